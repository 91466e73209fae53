//! Sizes and times as people type and read them.

use std::time::Duration;

/// Reads `512`, `64K`, `8M`, `1G` (powers of 1024; an `iB` or `B` may follow).
///
/// # Errors
/// If the text is not a size; the error says what is expected.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let bad = || {
        format!("invalid size `{text}`: expected a number with an optional unit, such as 65536, 64K or 2G")
    };
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let number: usize = text[..end].parse().map_err(|_| bad())?;
    let shift = match text[end..].to_ascii_uppercase().trim_end_matches('B').trim_end_matches('I') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(bad()),
    };
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// Reads `10`, `2.5s`, `500ms`, `5m`.
///
/// # Errors
/// If the text is not a duration; the error says what is expected.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || {
        format!(
            "invalid duration `{text}`: expected seconds, or a number followed by ms, s, m or h, such as 500ms"
        )
    };
    let end =
        text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().map_err(|_| bad())?;
    let seconds = match &text[end..] {
        "ms" => number / 1e3,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(bad()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

/// Writes a number of bytes as in `1.5 MiB`.
pub fn show_size(bytes: usize) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = "";
    for next in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("64K"), Ok(64 << 10));
        assert_eq!(parse_size("8MiB"), Ok(8 << 20));
        assert_eq!(parse_size("1g"), Ok(1 << 30));
        for wrong in ["", "K", "-1", "1.5M", "3X", "99999999999999T"] {
            assert!(parse_size(wrong).unwrap_err().contains("invalid size"), "{wrong}");
        }
        assert_eq!(show_size(1_572_864), "1.5 MiB");
    }

    #[test]
    fn times_read_as_people_write_them() {
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2.5s"), Ok(Duration::from_millis(2500)));
        assert_eq!(parse_duration("5m"), Ok(Duration::from_secs(300)));
        for wrong in ["", "s", "-1", "3x", "1e99h"] {
            assert!(parse_duration(wrong).unwrap_err().contains("invalid duration"), "{wrong}");
        }
    }
}
