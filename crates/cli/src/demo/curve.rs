//! A curve made of block characters.

/// Eighths of a character, from empty to full.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// What is drawn for a number that cannot be drawn.
const NO_NUMBER: char = '×';
/// The width in front of each line: a number and a space.
const MARGIN: usize = 7;

/// Values from left to right, as `height` lines of at most `width` columns; zero is at the bottom, the highest value at the top.
pub(super) fn draw(values: &[f32], width: usize, height: usize) -> Vec<String> {
    let columns = resample(values, width.saturating_sub(MARGIN).max(1));
    let top = columns.iter().copied().filter(|value| value.is_finite()).fold(0.0, f32::max);
    let eighths = |value: f32| match value / top * (height * 8) as f32 {
        part if part > 0.0 => part.ceil() as usize, // what is not zero is visible
        _ => 0,
    };
    let line = |row: usize| {
        let below = (height - 1 - row) * 8;
        let character = |value: &f32| match value.is_finite() {
            true => BLOCKS[eighths(*value).saturating_sub(below).min(8)],
            false if below == 0 => NO_NUMBER,
            false => ' ',
        };
        let label = if row == 0 { number(top) } else { String::new() };
        let blocks: String = columns.iter().map(character).collect();
        format!("{label:>width$} {blocks}", width = MARGIN - 1).trim_end().to_string()
    };
    (0..height).map(line).collect()
}

/// Fits the margin's width, whatever the value.
fn number(value: f32) -> String {
    if value < 1000.0 { format!("{value:.2}") } else { format!("{value:.0e}") }
}

/// As many columns as fit, each the mean of its values; fewer values get wider columns.
fn resample(values: &[f32], columns: usize) -> Vec<f32> {
    let mean = |column: usize| {
        let from = column * values.len() / columns;
        let to = ((column + 1) * values.len() / columns).max(from + 1);
        values[from..to].iter().sum::<f32>() / (to - from) as f32
    };
    if values.is_empty() { Vec::new() } else { (0..columns).map(mean).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_line_falls() {
        let values = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.25, 0.0];
        let expected = [
            "  4.00 █▄", //
            "       ███▄",
            "       █████▄",
            "       ███████▄▂",
        ];
        assert_eq!(draw(&values, MARGIN + 10, 4), expected);
    }

    #[test]
    fn many_values_are_averaged_and_few_are_made_broad() {
        assert_eq!(resample(&[1.0, 3.0, 5.0, 7.0], 2), [2.0, 6.0]);
        assert_eq!(resample(&[1.0, 3.0], 5), [1.0, 1.0, 1.0, 3.0, 3.0]);
        assert!(resample(&[], 5).is_empty());
    }

    #[test]
    fn no_line_is_broader_than_asked_for_whatever_the_values() {
        for values in
            [&[][..], &[0.0], &[f32::NAN, 1.0], &[f32::INFINITY, 2.0, -5.0], &[3e38, 1e-38], &[1e4; 500]]
        {
            for width in [0, 1, MARGIN, 8, 20, 80, 200] {
                let lines = draw(values, width, 5);
                assert_eq!(lines.len(), 5);
                let broadest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
                assert!(broadest <= width.max(MARGIN + 1), "{width}: {lines:?}");
            }
        }
    }

    #[test]
    fn what_is_no_number_is_marked_at_the_bottom() {
        assert_eq!(draw(&[f32::NAN, 1.0, f32::INFINITY], MARGIN + 3, 2), ["  1.00  █", "       ×█×"]);
    }
}
