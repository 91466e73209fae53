//! Values in messages, as people write them.

use std::any::Any;
use std::time::Duration;

/// A duration: `30.2 s`, `250.0 ms`, `0.3 ms`.
///
/// ```
/// use std::time::Duration;
/// assert_eq!(tenfold_base::show_duration(Duration::from_millis(30_249)), "30.2 s");
/// ```
pub fn show_duration(duration: Duration) -> String {
    if duration >= Duration::from_secs(1) {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        format!("{:.1} ms", duration.as_secs_f64() * 1e3)
    }
}

/// Ranks: `rank 3` or `ranks 1, 2, 5`.
pub fn show_ranks(ranks: &[usize]) -> String {
    const SHOWN: usize = 16;
    let mut text = ranks.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() > SHOWN {
        text += &format!(" and {} more", ranks.len() - SHOWN);
    }
    if ranks.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}

/// The message of a panic that was caught.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(show_duration(Duration::from_millis(250)), "250.0 ms");
        assert_eq!(show_duration(Duration::from_micros(340)), "0.3 ms");
        assert_eq!(show_duration(Duration::from_millis(30_249)), "30.2 s");
    }

    #[test]
    fn ranks_are_listed_up_to_a_number() {
        assert_eq!(show_ranks(&[3]), "rank 3");
        assert_eq!(show_ranks(&[1, 2, 5]), "ranks 1, 2, 5");
        let many: Vec<usize> = (0..18).collect();
        assert!(show_ranks(&many).ends_with("14, 15 and 2 more"));
    }

    #[test]
    fn a_panic_has_its_message() {
        for text in ["written", "made 1"] {
            let panic = std::panic::catch_unwind(|| match text {
                "written" => panic!("written"),
                _ => panic!("made {}", 1),
            });
            assert_eq!(panic_text(&*panic.unwrap_err()), text);
        }
        assert_eq!(panic_text(&7), "no message");
    }
}
