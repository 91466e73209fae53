//! Hosts and their links, as people write them: `2x2`, `1G`, `50us`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::RANKS_MAX;

/// Each host is a few processes of every implementation; more would measure the scheduler.
const HOSTS_MAX: usize = 32;
const RATE_MIN: f64 = 1e6;
const RATE_MAX: f64 = 400e9;
const DELAY_MAX: Duration = Duration::from_secs(1);

/// `HxR`: hosts, each with the same number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) hosts: usize,
    pub(crate) ranks_each: usize,
}

impl Layout {
    pub(crate) fn ranks(self) -> usize {
        self.hosts * self.ranks_each
    }

    /// Ranks of one host follow each other.
    pub(crate) fn host_of(self, rank: usize) -> usize {
        rank / self.ranks_each
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number > 0);
        let pair =
            text.split_once(['x', '×']).and_then(|(hosts, ranks)| Some((number(hosts)?, number(ranks)?)));
        let Some((hosts, ranks_each)) = pair else {
            return Err("expected hosts x ranks of each host, such as 2x2 or 4x2".into());
        };
        match hosts {
            1 => return Err("one host has no link to measure; use `--ranks` instead".into()),
            2..=HOSTS_MAX => {}
            _ => return Err(format!("at most {HOSTS_MAX} hosts")),
        }
        match hosts.checked_mul(ranks_each) {
            Some(..=RANKS_MAX) => Ok(Layout { hosts, ranks_each }),
            _ => Err(format!("at most {RANKS_MAX} ranks in all")),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { hosts, ranks_each } = self;
        let plural = if *ranks_each == 1 { "rank" } else { "ranks" };
        write!(f, "{hosts} hosts × {ranks_each} {plural}")
    }
}

/// The links of every host, and what each of them allows in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    /// Each on a network of its own.
    pub(crate) links: usize,
    pub(crate) rate: Option<Rate>,
    /// From the host to the switch, and from the switch to the host.
    pub(crate) delay: Option<Delay>,
}

/// Names of the interfaces at the links of a host.
pub(crate) fn interfaces(links: usize) -> String {
    (0..links).map(interface).collect::<Vec<_>>().join(",")
}

pub(crate) fn interface(link: usize) -> String {
    format!("eth{link}")
}

/// Bits per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate(pub(crate) f64);

impl Rate {
    /// Bytes that fit through in this time.
    pub(crate) fn bytes_in(self, seconds: f64) -> f64 {
        self.0 / 8.0 * seconds
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("invalid rate `{text}`: expected bits per second, such as 100M, 1G or 2.5G");
        let digits = |character: char| character.is_ascii_digit() || character == '.';
        let (number, unit) = text.split_at(text.find(|character| !digits(character)).unwrap_or(text.len()));
        let factor = match unit.trim_end_matches("bit") {
            "" => 1.0,
            "K" | "k" => 1e3,
            "M" => 1e6,
            "G" => 1e9,
            _ => return Err(bad()),
        };
        match number.parse::<f64>().map_err(|_| bad())? * factor {
            rate @ RATE_MIN..=RATE_MAX => Ok(Rate(rate)),
            _ => Err(format!("a rate of `{text}` is out of range: expected 1M to 400G bits per second")),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            rate if rate >= 1e9 => write!(f, "{} Gbit/s", rate / 1e9),
            rate => write!(f, "{} Mbit/s", rate / 1e6),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delay(pub(crate) Duration);

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || format!("invalid delay `{text}`: expected a number followed by us, ms or s, such as 50us");
        let end = text.find(|character: char| character.is_ascii_alphabetic()).ok_or_else(bad)?;
        let unit = match &text[end..] {
            "us" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            _ => return Err(bad()),
        };
        let number: f64 = text[..end].parse().map_err(|_| bad())?;
        match Duration::try_from_secs_f64(number * unit) {
            Ok(delay) if delay <= DELAY_MAX => Ok(Delay(delay)),
            Ok(_) => Err(format!("a delay of `{text}` is out of range: expected at most 1s")),
            Err(_) => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_hosts_and_ranks_of_each() {
        let layout: Layout = "3x2".parse().unwrap();
        assert_eq!(layout, Layout { hosts: 3, ranks_each: 2 });
        assert_eq!(
            (layout.ranks(), layout.host_of(3), layout.to_string()),
            (6, 1, "3 hosts × 2 ranks".into())
        );
        assert_eq!("2x1".parse::<Layout>().unwrap().to_string(), "2 hosts × 1 rank");
        for (wrong, reason) in [
            ("0x2", "such as 2x2"),
            ("2x0", "such as 2x2"),
            ("2", "such as 2x2"),
            ("2x", "such as 2x2"),
            ("x2", "such as 2x2"),
            ("-2x2", "such as 2x2"),
            ("1x4", "`--ranks` instead"),
            ("33x1", "at most 32 hosts"),
            ("8x9", "at most 64 ranks in all"),
            ("2x18446744073709551615", "at most 64 ranks in all"),
        ] {
            let error = wrong.parse::<Layout>().unwrap_err();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_rate_is_in_bits_and_decimal() {
        let rate = |text: &str| text.parse::<Rate>();
        assert_eq!(rate("1G"), Ok(Rate(1e9)));
        assert_eq!(rate("100Mbit"), Ok(Rate(1e8)));
        assert_eq!(rate("2500000"), Ok(Rate(2.5e6)));
        assert_eq!(rate("2.5G").unwrap().to_string(), "2.5 Gbit/s");
        assert_eq!(rate("1G").unwrap().bytes_in(0.5), 62.5e6);
        for wrong in ["", "G", "1X", "fast", "-1G", "1.2.3G"] {
            assert!(rate(wrong).unwrap_err().contains("invalid rate"), "{wrong}");
        }
        for wrong in ["0", "1K", "500G"] {
            assert!(rate(wrong).unwrap_err().contains("out of range"), "{wrong}");
        }
    }

    #[test]
    fn a_delay_has_a_unit() {
        let delay = |text: &str| text.parse::<Delay>();
        assert_eq!(delay("50us"), Ok(Delay(Duration::from_micros(50))));
        assert_eq!(delay("1.5ms"), Ok(Delay(Duration::from_micros(1500))));
        for wrong in ["", "50", "us", "5m", "-1ms"] {
            assert!(delay(wrong).unwrap_err().contains("invalid delay"), "{wrong}");
        }
        assert!(delay("2s").unwrap_err().contains("out of range"));
    }
}
