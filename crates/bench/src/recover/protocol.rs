//! The lines that the coordinator and a rank exchange while a rank is killed, the same for ours, Gloo's and ULFM's.
//!
//! Times are those of CLOCK_MONOTONIC, which all processes of a machine share, in network namespaces too.

/// What a rank sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// `hello TEAM RANK PID VERSION`: first of all.
    Hello { team: String, rank: usize, pid: i32, version: String },
    /// `missing TEAM REASON`: it cannot take part at all, as when Python has no torch.
    Missing { team: String, reason: String },
    /// `store PORT`: it hosts a store, as ordered.
    Store(u16),
    /// `running`: it has completed some all-reduces, and goes on with them.
    Running,
    /// `recovered ERROR_NS DONE_NS SUM`: when it got an error, and when it had completed an all-reduce with the others; each
    /// rank adds a power of two, so the sum says which ranks they are.
    Recovered { error_ns: u64, done_ns: u64, sum: u64 },
    /// `failed ERROR_NS REASON`: it got an error, and cannot continue.
    Failed { error_ns: u64, reason: String },
    /// `wrong REASON`: a result cannot be trusted.
    Wrong(String),
}

impl Answer {
    pub(crate) fn parse(line: &str) -> Option<Answer> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "hello" => {
                let mut words = rest.splitn(4, ' ');
                let (team, rank, pid) = (words.next()?.to_owned(), words.next()?, words.next()?);
                let version = words.next().unwrap_or_default().trim().to_owned();
                Some(Answer::Hello { team, rank: rank.parse().ok()?, pid: pid.parse().ok()?, version })
            }
            "missing" => {
                let (team, reason) = rest.split_once(' ')?;
                Some(Answer::Missing { team: team.to_owned(), reason: reason.to_owned() })
            }
            "store" => Some(Answer::Store(rest.parse().ok()?)),
            "running" => Some(Answer::Running),
            "recovered" => {
                let numbers: Option<Vec<u64>> = rest.split(' ').map(|word| word.parse().ok()).collect();
                let [error_ns, done_ns, sum] = numbers?[..] else { return None };
                Some(Answer::Recovered { error_ns, done_ns, sum })
            }
            "failed" => {
                let (error, reason) = rest.split_once(' ')?;
                Some(Answer::Failed { error_ns: error.parse().ok()?, reason: reason.to_owned() })
            }
            "wrong" => Some(Answer::Wrong(rest.to_owned())),
            _ => None,
        }
    }
}

/// The order to all ranks but those of ULFM: where the store is. Port 0 asks the rank to host it.
pub(crate) fn store_order(host: impl std::fmt::Display, port: u16) -> String {
    format!("store {host} {port}\n")
}

/// What `store_order` says.
pub(crate) fn parse_store_order(line: &str) -> Option<(String, u16)> {
    let (host, port) = line.trim_end().strip_prefix("store ")?.split_once(' ')?;
    Some((host.to_owned(), port.parse().ok()?))
}

pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither is negative: the clock starts at 0 when the machine does.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_invalid_ones_are_refused() {
        let hello = Answer::Hello { team: "t1".into(), rank: 3, pid: 77, version: "Open MPI v5.0.11".into() };
        assert_eq!(Answer::parse("hello t1 3 77 Open MPI v5.0.11"), Some(hello));
        let missing = Answer::Missing { team: "t1".into(), reason: "no torch".into() };
        assert_eq!(Answer::parse("missing t1 no torch"), Some(missing));
        assert_eq!(Answer::parse("store 4711"), Some(Answer::Store(4711)));
        assert_eq!(Answer::parse("running"), Some(Answer::Running));
        let recovered = Answer::Recovered { error_ns: 5, done_ns: 7, sum: 11 };
        assert_eq!(Answer::parse("recovered 5 7 11"), Some(recovered));
        let failed = Answer::Failed { error_ns: 5, reason: "no store there".into() };
        assert_eq!(Answer::parse("failed 5 no store there"), Some(failed));
        for wrong in ["", "hello t1", "hello t1 x 7 v", "store", "recovered 5 7", "recovered 5 7 x", "failed"]
        {
            assert_eq!(Answer::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_rank_understands_where_the_store_is() {
        assert_eq!(parse_store_order(&store_order("10.0.0.1", 0)), Some(("10.0.0.1".into(), 0)));
        assert_eq!(parse_store_order("store 10.0.0.1"), None);
        assert_eq!(parse_store_order("bye"), None);
    }
}
