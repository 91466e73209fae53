//! Finds the rank that keeps the others waiting in a collective.
//!
//! Ranks that use tenfold report their current operation in each group (see `run/progress`). All ranks of a
//! group call the same operations in the same order. So a rank that has not called number 288 while others
//! are in it is the one that they wait for. Messages between two ranks have separate numbers and are left
//! out.
//!
//! The ranks decide how long is too long (`TENFOLD_STUCK_AFTER`): no rank is named here unless another rank
//! complains about it.
//!
//! Pure: takes what is known of all ranks, returns a sentence for some of them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// The current or last call of a rank in one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Collective {
    pub(super) group: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// As in `all_reduce(sum, float32 × 1000)`.
    pub(super) call: String,
    /// The number of the call in the group, counted from 1.
    pub(super) number: u64,
    pub(super) under_way: bool,
    pub(super) seconds: f64,
    /// How long after the first rank it recently arrived.
    pub(super) late_seconds: Option<f64>,
    /// Which rank keeps which ranks waiting there, as the rank reports it.
    #[serde(skip_serializing)]
    pub(super) stuck: Option<Complaint>,
}

/// What a rank reports about ranks that keep others waiting for too long; see `StuckReport` of the crate
/// `tenfold`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Complaint {
    pub(super) number: u64,
    pub(super) is_message: bool,
}

impl Collective {
    fn is_message(&self) -> bool {
        self.call.starts_with("send") || self.call.starts_with("recv")
    }

    /// Whether the rank reports that another rank has not entered this call of the group.
    fn complains_about(&self, number: u64) -> bool {
        self.stuck.as_ref().is_some_and(|complaint| !complaint.is_message && complaint.number == number)
    }

    /// `all_reduce #288`.
    fn name(&self) -> String {
        if self.number == 0 {
            return "nothing".to_string(); // it is known only because other ranks wait for it
        }
        let kind = self.call.split('(').next().unwrap_or_default();
        format!("{kind} #{}", self.number)
    }
}

/// For each of `ranks` (its calls in its groups): why it is blocking, if it keeps others waiting for longer
/// than they allow.
pub(super) fn culprits(ranks: &[&[Collective]]) -> Vec<Option<String>> {
    let mut groups: HashMap<(&str, usize), Vec<(usize, &Collective)>> = HashMap::new();
    for (index, own) in ranks.iter().enumerate() {
        for collective in own.iter().filter(|collective| !collective.is_message()) {
            groups.entry((&collective.group, collective.size)).or_default().push((index, collective));
        }
    }
    let mut culprits = vec![None; ranks.len()];
    for ((group, size), members) in groups {
        if members.len() > size {
            continue; // two groups of one name: their members are not known
        }
        let Some(furthest) = members.iter().map(|(_, collective)| collective.number).max() else { continue };
        let waiting = || {
            let in_it = members.iter().map(|(_, collective)| collective);
            in_it.filter(|collective| collective.under_way && collective.number == furthest)
        };
        if !members.iter().any(|(_, collective)| collective.complains_about(furthest)) {
            continue;
        }
        let Some(longest) = waiting().max_by(|a, b| a.seconds.total_cmp(&b.seconds)) else { continue };
        let operation = longest.name();
        let others = match waiting().count() {
            1 => "1 other rank has waited".to_string(),
            count => format!("{count} other ranks have waited"),
        };
        for (index, late) in members.iter().filter(|(_, collective)| collective.number < furthest) {
            let state = if late.under_way { "is still in" } else { "last finished" };
            culprits[*index] = Some(format!(
                "has not entered {operation} of group `{group}`, in which {others} for {:.0} s; it {state} {} ({:.0} s)",
                longest.seconds,
                late.name(),
                late.seconds
            ));
        }
    }
    culprits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(number: u64, under_way: bool, seconds: f64) -> Collective {
        let call = "all_reduce(sum, float32 × 1000)".into();
        Collective {
            group: "default".into(),
            rank: 0,
            size: 3,
            call,
            number,
            under_way,
            seconds,
            late_seconds: None,
            stuck: None,
        }
    }

    /// The same, from a rank that complains about call `about`.
    fn complaining(about: u64, it: Collective) -> Collective {
        Collective { stuck: Some(Complaint { number: about, is_message: false }), ..it }
    }

    #[test]
    fn a_rank_that_has_not_entered_a_collective_is_reported() {
        let told = [[at(288, true, 41.0)], [at(287, false, 43.2)], [at(288, true, 40.0)]];
        let ranks = |complains: usize, complaint: Complaint| {
            let mut ranks = told.clone();
            ranks[complains][0].stuck = Some(complaint);
            culprits(&ranks.iter().map(|rank| &rank[..]).collect::<Vec<_>>())
        };
        let expected = "has not entered all_reduce #288 of group `default`, in which 2 other ranks have waited for 41 s; it last \
                        finished all_reduce #287 (43 s)";
        for complains in 0..3 {
            let complaint = Complaint { number: 288, is_message: false };
            assert_eq!(ranks(complains, complaint), [None, Some(expected.to_string()), None]);
            let another = Complaint { number: 287, is_message: false };
            assert_eq!(ranks(complains, another), [None, None, None], "that is over");
            let message = Complaint { number: 288, is_message: true };
            assert_eq!(ranks(complains, message), [None, None, None], "not about a collective");
        }
        let silent: Vec<&[Collective]> = told.iter().map(|rank| &rank[..]).collect();
        assert_eq!(culprits(&silent), [None, None, None], "for those who wait it is not yet too long");
    }

    #[test]
    fn a_rank_that_is_alone_ahead_is_not_to_blame() {
        let ranks = [[complaining(5, at(5, true, 20.0))], [at(4, true, 21.0)]];
        let ranks: Vec<&[Collective]> = ranks.iter().map(|rank| &rank[..]).collect();
        let expected = "has not entered all_reduce #5 of group `default`, in which 1 other rank has waited for 20 s; it is still in \
                        all_reduce #4 (21 s)";
        assert_eq!(culprits(&ranks), [None, Some(expected.to_string())]);
    }

    #[test]
    fn no_rank_is_blamed_without_evidence() {
        let at = |number, under_way, seconds| complaining(number, at(number, under_way, seconds));
        let all_in_it = [[at(5, true, 99.0)], [at(5, true, 99.0)]];
        let nobody_waits = [[at(5, false, 99.0)], [at(4, false, 99.0)]];
        let message = Collective { call: "recv(uint8 × 9, tag 4)".into(), ..at(9, true, 99.0) };
        let messages = [[message], [at(4, false, 99.0)]];
        for ranks in [all_in_it, nobody_waits, messages] {
            let ranks: Vec<&[Collective]> = ranks.iter().map(|rank| &rank[..]).collect();
            assert_eq!(culprits(&ranks), [None, None], "{ranks:?}");
        }
        let too_many = [[at(5, true, 99.0)], [at(4, false, 99.0)], [at(5, true, 9.0)], [at(4, false, 1.0)]];
        let too_many: Vec<&[Collective]> = too_many.iter().map(|rank| &rank[..]).collect();
        assert_eq!(culprits(&too_many), [None, None, None, None]);
    }
}
