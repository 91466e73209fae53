//! Numbers in the protocol's form: decimal text.

pub(super) fn as_number(count: usize) -> i64 {
    i64::try_from(count).expect("a count of things in memory fits 63 bits")
}

/// A number and its decimal text, without an allocation.
pub(super) struct Decimal {
    pub(super) number: i64,
    pub(super) digits: [u8; 20], // i64::MIN
    pub(super) start: usize,
}

impl Decimal {
    pub(super) fn new(number: i64) -> Self {
        let mut digits = [0; 20];
        let mut start = digits.len();
        let mut rest = number.unsigned_abs();
        loop {
            start -= 1;
            digits[start] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            start -= 1;
            digits[start] = b'-';
        }
        Decimal { number, digits, start }
    }

    pub(super) fn text(&self) -> &[u8] {
        &self.digits[self.start..]
    }
}

/// Parses a counter's text as C's `strtoll` does, because c10d uses it: white space and a sign may come
/// first, and any text may follow.
pub(crate) fn parse_number(text: &[u8]) -> Option<i64> {
    let spaces = text.iter().take_while(|byte| matches!(byte, b' ' | b'\t'..=b'\r')).count();
    let text = &text[spaces..];
    let (negative, digits) = match text.first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
    if end == 0 {
        return None;
    }
    let mut number: i64 = 0;
    for digit in &digits[..end] {
        let digit = i64::from(digit - b'0');
        number = number.checked_mul(10)?;
        number = if negative { number.checked_sub(digit)? } else { number.checked_add(digit)? };
    }
    Some(number)
}
