//! The mark of a run: a random number in the environment of its ranks, by which their descendants are found.

use std::io::{self, Read as _};

use rustix::process::Pid;

use super::proc;

/// The variable that holds the marks of all runs that a process belongs to, the outermost first.
pub(super) const VARIABLE: &str = "TENFOLD_RUN_MARK";

/// Identifies the processes of one run: 128 random bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark(String);

impl Mark {
    pub(super) fn new() -> io::Result<Mark> {
        let mut bits = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bits)?;
        Ok(Mark(bits.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    pub(super) fn parse(text: &str) -> Option<Mark> {
        let is_mark = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_mark.then(|| Mark(text.into()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// The variable's value for ranks. A run within a rank of another run belongs to that run as well.
    pub(super) fn variable(&self) -> String {
        match std::env::var(VARIABLE) {
            Ok(outer) if !outer.is_empty() => format!("{outer},{}", self.0),
            _ => self.0.clone(),
        }
    }

    /// The variable's value for a process that has this mark besides those of its run.
    pub(super) fn beside(&self, of_run: &str) -> String {
        format!("{of_run},{}", self.0)
    }

    /// The beginning of the names of temporary folders that are removed with the run.
    pub(super) fn folders(&self) -> String {
        format!("tenfold-run-{}-", &self.0[..16])
    }

    /// The first digits, for names that must differ.
    pub(super) fn short(&self) -> &str {
        &self.0[..8]
    }

    pub(super) fn is_on(&self, process: Pid) -> bool {
        proc::environment(process).is_some_and(|text| self.is_in(&text))
    }

    fn is_in(&self, environment: &[u8]) -> bool {
        let variables = environment.split(|&byte| byte == 0);
        let beginning = VARIABLE.as_bytes();
        let mut values = variables
            .filter_map(|variable| variable.strip_prefix(beginning).and_then(|rest| rest.strip_prefix(b"=")));
        values.any(|value| value.split(|&byte| byte == b',').any(|mark| mark == self.0.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_alone_and_among_others_and_nowhere_else() {
        let mark = Mark("00ff".into());
        assert!(mark.is_in(b"A=1\0TENFOLD_RUN_MARK=00ff\0"));
        assert!(mark.is_in(b"TENFOLD_RUN_MARK=aa,00ff,bb\0B=2"));
        for other in [
            &b"TENFOLD_RUN_MARK=00ff0"[..],
            b"TENFOLD_RUN_MARKS=00ff",
            b"X=TENFOLD_RUN_MARK=00ff",
            b"",
            b"\0\0",
        ] {
            assert!(!mark.is_in(other), "{}", other.escape_ascii());
        }
    }

    #[test]
    fn marks_differ_and_can_be_read_again() {
        let mark = Mark::new().unwrap();
        assert_ne!(mark, Mark::new().unwrap());
        assert_eq!(Mark::parse(mark.as_str()), Some(mark));
        assert_eq!(Mark::parse("00ff"), None);
        assert_eq!(Mark::parse(&"g".repeat(32)), None);
    }
}
