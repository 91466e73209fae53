//! Which streams of which ranks: the values of `--redirects`, `--tee` and the filters.

use std::collections::{BTreeMap, BTreeSet};

use super::super::output::Stream;

/// A choice of a rank's streams, in the form of torchrun's flags: 0 none, 1 standard output, 2 standard
/// error, 3 both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Streams {
    pub(super) output: bool,
    pub(super) error: bool,
}

impl Streams {
    pub(super) const NONE: Streams = Streams { output: false, error: false };
    pub(super) const BOTH: Streams = Streams { output: true, error: true };

    fn parse(digit: &str) -> Option<Self> {
        match digit {
            "0" => Some(Streams::NONE),
            "1" => Some(Streams { output: true, error: false }),
            "2" => Some(Streams { output: false, error: true }),
            "3" => Some(Streams::BOTH),
            _ => None,
        }
    }

    pub(super) fn has(self, stream: Stream) -> bool {
        match stream {
            Stream::Output => self.output,
            Stream::Error => self.error,
        }
    }
}

/// The value of `--redirects` and `--tee`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// The same for all ranks.
    All(Streams),
    /// By local rank; the others have none.
    Some(BTreeMap<usize, Streams>),
}

impl Selection {
    pub(super) fn of(&self, local_rank: usize) -> Streams {
        match self {
            Selection::All(streams) => *streams,
            Selection::Some(ranks) => ranks.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    pub(super) fn has_any(&self) -> bool {
        match self {
            Selection::All(streams) => *streams != Streams::NONE,
            Selection::Some(ranks) => ranks.values().any(|&streams| streams != Streams::NONE),
        }
    }
}

/// `3`, or `0:3,1:1` by local rank.
pub(crate) fn parse_selection(text: &str) -> Result<Selection, String> {
    if let Some(streams) = Streams::parse(text) {
        return Ok(Selection::All(streams));
    }
    let entries = text.split(',').map(|entry| {
        let (rank, streams) = entry.split_once(':')?;
        Some((parse_rank(rank)?, Streams::parse(streams)?))
    });
    entries.collect::<Option<BTreeMap<_, _>>>().map(Selection::Some).ok_or_else(|| {
        format!(
            "invalid streams `{text}`: expected 0 for none, 1 for standard output, 2 for standard error, 3 for both, or \
             such a number for some local ranks: 0:3,1:2"
        )
    })
}

/// `0,2`: the value of `--local-ranks-filter`.
pub(crate) fn parse_ranks(text: &str) -> Result<BTreeSet<usize>, String> {
    text.split(',').map(|rank| parse_rank(rank.trim())).collect::<Option<_>>().ok_or_else(|| {
        format!("invalid ranks `{text}`: expected local ranks separated by commas, such as 0,2")
    })
}

/// Digits alone: no sign, no blanks.
fn parse_rank(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// `apple,orange`: the value of `--duplicate-stdout-filters`; two commas stand for one inside a word.
pub(crate) fn parse_words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut characters) = (Vec::new(), String::new(), text.chars().peekable());
    while let Some(character) = characters.next() {
        if character != ',' || characters.next_if_eq(&',').is_some() {
            word.push(character);
        } else {
            words.push(std::mem::take(&mut word));
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams(number: usize) -> Streams {
        Streams { output: number & 1 == 1, error: number & 2 == 2 }
    }

    #[test]
    fn streams_are_chosen_as_torchrun_reads_them() {
        for number in 0..4 {
            assert_eq!(parse_selection(&number.to_string()), Ok(Selection::All(streams(number))));
        }
        let some = parse_selection("0:3,1:0,12:1,3:2").unwrap();
        let of: Vec<Streams> = [0, 1, 2, 3, 12].map(|rank| some.of(rank)).to_vec();
        assert_eq!(of, [3, 0, 0, 2, 1].map(streams));
        for wrong in [
            "",
            "4",
            "-1",
            "a",
            "0:",
            ":3",
            "0:4",
            "0:3,",
            "0:3 ,1:1",
            "+0:3",
            "0:3:1",
            "99999999999999999999:1",
        ] {
            assert_eq!(
                parse_selection(wrong),
                Err(format!(
                    "invalid streams `{wrong}`: expected 0 for none, 1 for standard output, 2 for standard error, 3 for \
                     both, or such a number for some local ranks: 0:3,1:2"
                ))
            );
        }
        assert_eq!(parse_ranks("0,2"), Ok(BTreeSet::from([0, 2])));
        for wrong in ["", "x", "0,", "-1"] {
            let error =
                format!("invalid ranks `{wrong}`: expected local ranks separated by commas, such as 0,2");
            assert_eq!(parse_ranks(wrong), Err(error));
        }
        assert_eq!(parse_words("apple,orange"), ["apple", "orange"]);
        assert_eq!(parse_words("a,,b,c"), ["a,b", "c"]);
        assert_eq!(parse_words(""), Vec::<String>::new());
    }
}
