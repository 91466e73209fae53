//! The cases of `bench store`: their names, where each is measured, and its goal.

use std::fmt;

/// One kind of work for a store server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Case {
    /// SET of 16 bytes
    Set,
    /// GET of 16 bytes, the key known to be there
    Get,
    /// ADD 1 to a counter
    Add,
    /// CHECK of one key
    Check,
    /// COMPARE_SET that succeeds
    CompareSet,
    /// WAIT then GET, as PyTorch's client does `get`
    WaitGet,
    /// QUEUE_PUSH then QUEUE_POP
    Queue,
    /// SET then DELETE_KEY
    Delete,
    /// MULTI_GET of 100 keys
    MultiGet,
    /// MULTI_SET of 100 keys
    MultiSet,
    /// MULTI_SET of 10,000 keys
    #[value(name = "multi_set_10k")]
    MultiSetTenThousand,
    /// SET of 1 MiB
    #[value(name = "set_1m")]
    SetMebibyte,
    /// GET of 1 MiB
    #[value(name = "get_1m")]
    GetMebibyte,
    /// clients waiting for one key: from the SET until the last one knows
    Wake,
    /// clients that connect, introduce themselves and count themselves in
    Connect,
    /// resident memory of an idle connection
    Memory,
}

impl Case {
    pub(crate) const LOADS: [Case; 10] = [
        Case::Set,
        Case::Get,
        Case::Add,
        Case::Check,
        Case::CompareSet,
        Case::WaitGet,
        Case::Queue,
        Case::Delete,
        Case::MultiGet,
        Case::MultiSet,
    ];
    pub(crate) const LARGE: [Case; 3] = [Case::MultiSetTenThousand, Case::SetMebibyte, Case::GetMebibyte];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Case::Set => "set",
            Case::Get => "get",
            Case::Add => "add",
            Case::Check => "check",
            Case::CompareSet => "compare_set",
            Case::WaitGet => "wait_get",
            Case::Queue => "queue",
            Case::Delete => "delete",
            Case::MultiGet => "multi_get",
            Case::MultiSet => "multi_set",
            Case::MultiSetTenThousand => "multi_set_10k",
            Case::SetMebibyte => "set_1m",
            Case::GetMebibyte => "get_1m",
            Case::Wake => "wake",
            Case::Connect => "connect",
            Case::Memory => "memory",
        }
    }

    /// The unit of its figure, which decides whether more is better.
    pub(crate) fn unit(self) -> Unit {
        match self {
            Case::MultiSetTenThousand | Case::SetMebibyte | Case::GetMebibyte => Unit::Micros,
            Case::Wake | Case::Connect => Unit::Micros,
            Case::Memory => Unit::Bytes,
            _ => Unit::Rate,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Operations per second.
    Rate,
    /// Microseconds until it is done.
    Micros,
    /// Bytes of a connection.
    Bytes,
}

impl Unit {
    /// How many times better `ours` is than `theirs`; above 1 is better, whatever the unit.
    pub(crate) fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Unit::Rate => ours / theirs,
            Unit::Micros | Unit::Bytes => theirs / ours,
        }
    }
}

/// A case and its load: one row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) case: Case,
    pub(crate) in_flight: usize,
    pub(crate) connections: usize,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} c={} P={}", self.case.name(), self.connections, self.in_flight)
    }
}

/// The goal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// This many times better than PyTorch's server.
    Times(f64),
    /// No worse than PyTorch's server, within the noise of a run.
    Level,
    /// At most this many bytes, whatever other servers need.
    Bytes(f64),
}

/// The tolerance of "no worse": medians of two runs of one program differ by this much on a shared machine.
const LEVEL: f64 = 0.95;

impl Goal {
    /// Whether it is reached. Nothing if it needs a peer and there was none.
    pub(crate) fn met(self, ours: f64, ratio: Option<f64>) -> Option<bool> {
        match self {
            Goal::Times(times) => ratio.map(|ratio| ratio >= times),
            Goal::Level => ratio.map(|ratio| ratio >= LEVEL),
            Goal::Bytes(most) => Some(ours <= most),
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::Times(times) => write!(f, "≥ {times}×"),
            Goal::Level => f.write_str("level"),
            Goal::Bytes(most) => write!(f, "≤ {most} B"),
        }
    }
}

/// The section "Store server" of `docs/performance.md`, row by row: case, clients, in flight, goal.
const GOALS: &[(Case, usize, usize, Goal)] = &[
    (Case::Get, 64, 16, Goal::Times(9.0)),
    (Case::Add, 64, 16, Goal::Times(9.0)),
    (Case::Check, 64, 16, Goal::Times(9.0)),
    (Case::Get, 512, 16, Goal::Times(5.0)),
    (Case::Add, 512, 16, Goal::Times(5.0)),
    (Case::Check, 512, 16, Goal::Times(5.0)),
    (Case::Set, 64, 16, Goal::Times(1.5)),
    (Case::Get, 64, 1, Goal::Times(1.2)),
    (Case::Add, 64, 1, Goal::Times(1.2)),
    (Case::Set, 64, 1, Goal::Times(1.2)),
    (Case::WaitGet, 64, 16, Goal::Times(5.0)),
    (Case::Get, 1, 1, Goal::Level),
    (Case::Add, 1, 1, Goal::Level),
    (Case::Set, 1, 1, Goal::Level),
    (Case::Check, 1, 1, Goal::Level),
    (Case::MultiGet, 64, 1, Goal::Times(3.0)),
    (Case::MultiGet, 64, 16, Goal::Times(3.0)),
    (Case::MultiSet, 64, 1, Goal::Times(4.0)),
    (Case::MultiSet, 64, 16, Goal::Times(4.0)),
    (Case::MultiSetTenThousand, 1, 1, Goal::Times(30.0)),
    (Case::SetMebibyte, 1, 1, Goal::Times(1.5)),
    (Case::GetMebibyte, 1, 1, Goal::Times(1.5)),
    (Case::Wake, 512, 1, Goal::Times(1.5)),
    (Case::Connect, 5000, 1, Goal::Times(1.3)),
    (Case::Memory, 1000, 1, Goal::Bytes(1024.0)),
    (Case::Memory, 2000, 1, Goal::Bytes(1024.0)),
];

pub(crate) fn goal(point: Point) -> Option<Goal> {
    let here = (point.case, point.connections, point.in_flight);
    GOALS
        .iter()
        .find(|&&(case, connections, in_flight, _)| (case, connections, in_flight) == here)
        .map(|&(.., goal)| goal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn a_case_is_called_the_same_on_the_command_line_and_in_the_table() {
        for case in Case::value_variants() {
            let value = case.to_possible_value().expect("no case is hidden");
            assert_eq!(value.get_name(), case.name());
        }
    }

    #[test]
    fn a_ratio_above_one_is_better_whatever_the_unit() {
        assert_eq!(Unit::Rate.ratio(300.0, 100.0), 3.0);
        assert_eq!(Unit::Micros.ratio(100.0, 300.0), 3.0);
        assert_eq!(Unit::Bytes.ratio(500.0, 1000.0), 2.0);
    }

    #[test]
    fn goals_are_found_by_the_row_and_judged_only_when_they_can_be() {
        let get = |connections, in_flight| goal(Point { case: Case::Get, connections, in_flight });
        assert_eq!(get(64, 16), Some(Goal::Times(9.0)));
        assert_eq!(get(1, 1), Some(Goal::Level));
        assert_eq!(get(8, 16), None);
        assert_eq!(Goal::Times(9.0).met(1.0, None), None);
        assert_eq!(Goal::Times(9.0).met(1.0, Some(9.0)), Some(true));
        assert_eq!(Goal::Level.met(1.0, Some(0.9)), Some(false));
        assert_eq!(Goal::Bytes(1024.0).met(1000.0, None), Some(true));
    }
}
