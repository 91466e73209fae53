//! Ranks that are alive but have not entered a collective: which rank keeps the others waiting, and what to do about it.
//!
//! A rank that died or froze is detected by its missing heartbeat (`fabric/watch`). A rank that computes without end, sleeps or
//! waits in other code answers every heartbeat. But its board shows the others that it has not entered the collective that they
//! are in. The helper thread looks at the boards with every tick. A rank that finds such a rank reports it to all ranks, so that
//! all say the same: also those that wait for it indirectly, and the rank itself.
//!
//! Here are the rules and the texts; `state/lookout.rs` looks and reports.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenfold_memory::Doing;
use tenfold_plan::Rank;

use crate::fault::show_ranks;
use crate::label::Label;

/// The default of [`Options::stuck_after`](crate::Options::stuck_after).
const AFTER: Duration = Duration::from_secs(30);

/// Ranks whose last operations are shown.
const TOLD_MAX: usize = 4;

/// What a rank does once others have kept it waiting for too long ([`Options::stuck_after`](crate::Options::stuck_after)).
///
/// ```
/// use tenfold::{Options, StuckPolicy};
/// let options = Options::default().on_stuck(StuckPolicy::Abort);
/// assert_eq!(StuckPolicy::from_name("abort"), Some(StuckPolicy::Abort)); // as in `TENFOLD_STUCK_POLICY`
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StuckPolicy {
    /// Says so in the log, and again after twice the time, four times the time, …
    #[default]
    Warn,
    /// Also writes a dump of the flight recorder, once for each operation.
    Dump,
    /// The group fails: every operation under way ends with an error that names the rank.
    Abort,
}

impl StuckPolicy {
    /// As in `TENFOLD_STUCK_POLICY`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "warn" => Some(StuckPolicy::Warn),
            "dump" => Some(StuckPolicy::Dump),
            "abort" => Some(StuckPolicy::Abort),
            _ => None,
        }
    }
}

/// When a rank counts as stuck, and what then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StuckSettings {
    /// Nothing: it is never said.
    pub after: Option<Duration>,
    pub policy: StuckPolicy,
}

impl Default for StuckSettings {
    fn default() -> Self {
        StuckSettings { after: Some(AFTER), policy: StuckPolicy::Warn }
    }
}

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// The collective of this number.
    Collective(u64),
    /// The message of this number.
    Message(u64),
}

/// What a rank reports about ranks that keep others waiting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StuckReport {
    /// The operation that is waited for; collectives and messages are counted apart.
    pub number: u64,
    /// It is a message of this rank, of which no other knows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_message: bool,
    /// How long it has waited.
    pub seconds: u64,
    /// It is the one that is waited for.
    pub itself: bool,
    /// The same as a sentence.
    pub text: String,
}

/// What was said about the collective and about the message that are waited for: each for itself, since a rank may wait for both.
#[derive(Debug, Default)]
pub(crate) struct Told {
    collective: Option<(Waiting, Duration)>,
    message: Option<(Waiting, Duration)>,
    /// What the last words are about.
    about: Option<Waiting>,
    /// The last words, while they are true.
    pub report: Option<StuckReport>,
}

impl Told {
    fn last(&self, what: Waiting) -> &Option<(Waiting, Duration)> {
        match what {
            Waiting::Collective(_) => &self.collective,
            Waiting::Message(_) => &self.message,
        }
    }

    /// Is it time to say that `what` is waited for, for `waited`? At first after the limit, then each time it has doubled.
    pub(crate) fn is_due(&self, what: Waiting, waited: Duration, after: Duration) -> bool {
        match *self.last(what) {
            Some((last, told)) if last == what => waited >= 2 * told,
            _ => waited >= after,
        }
    }

    /// Was it said about `what` before?
    pub(crate) fn knows(&self, what: Waiting) -> bool {
        self.last(what).is_some_and(|(last, _)| last == what)
    }

    pub(crate) fn say(&mut self, what: Waiting, waited: Duration, itself: bool, text: &str) {
        match what {
            Waiting::Collective(_) => self.collective = Some((what, waited)),
            Waiting::Message(_) => self.message = Some((what, waited)),
        }
        self.about = Some(what);
        let (Waiting::Collective(number) | Waiting::Message(number)) = what;
        let is_message = matches!(what, Waiting::Message(_));
        let (seconds, text) = (waited.as_secs(), text.to_string());
        self.report = Some(StuckReport { number, is_message, seconds, itself, text });
    }

    /// What was said is no longer so, unless `still` says that it is.
    pub(crate) fn forget_unless(&mut self, still: impl FnOnce(Waiting) -> bool) {
        if self.about.is_some_and(|what| !still(what)) {
            self.report = None;
        }
    }
}

/// As in ``rank 5 (host b, pid 812) is alive and has not entered barrier #288 of group `default` for 40 s; rank 5 last
/// finished …; the others wait``.
///
/// Ranks have their numbers in the whole job (`job_rank`), since the reader may not know the group. If a rank has another number
/// in the group, that is shown, too.
pub(crate) fn sentence(
    late: &[(Rank, Doing)],
    introduce: impl Fn(Rank) -> String,
    job_rank: impl Fn(Rank) -> Rank,
    operation: &str,
    group: &str,
    waited: Duration,
) -> String {
    let ranks: Vec<Rank> = late.iter().map(|(rank, _)| *rank).collect();
    let (who, are, have) = match ranks.as_slice() {
        [one] => (introduce(*one), "is", "has"),
        many => {
            let of_job: Vec<Rank> = many.iter().map(|rank| job_rank(*rank)).collect();
            let here = if of_job == many {
                String::new()
            } else {
                format!(" ({} of group `{group}`)", show_ranks(many))
            };
            (show_ranks(&of_job) + &here, "are", "have")
        }
    };
    let mut deeds: Vec<String> =
        late.iter().take(TOLD_MAX).map(|(rank, doing)| deed(job_rank(*rank), doing)).collect();
    if late.len() > TOLD_MAX {
        deeds.push("…".to_string());
    }
    let deeds = deeds.join("; ");
    format!(
        "{who} {are} alive and {have} not entered {operation} of group `{group}` for {} s; {deeds}; the others wait",
        waited.as_secs()
    )
}

/// The same, said by the one that is waited for.
pub(crate) fn confession(own: &Doing, operation: &str, group: &str, waited: Duration) -> String {
    format!(
        "the other ranks of group `{group}` wait for this one, which has not entered {operation} for {} s; this rank {}",
        waited.as_secs(),
        did(own)
    )
}

/// What a rank did last in a group.
pub(in crate::group) fn deed(rank: Rank, doing: &Doing) -> String {
    format!("rank {rank} {}", did(doing))
}

fn did(doing: &Doing) -> String {
    match (called(&doing.finished), called(&doing.current)) {
        (None, None) => "has called nothing in this group".to_string(),
        (None, Some(current)) => format!("has finished nothing and is in {current}"),
        (Some(finished), Some(current)) if current != finished => {
            format!("last finished {finished} and is in {current}")
        }
        (Some(finished), _) => format!("last finished {finished} and has called nothing since"),
    }
}

/// As in `#41 broadcast(float32 × 5, root 0)`; nothing if nothing was called.
fn called(head: &tenfold_memory::Head) -> Option<String> {
    (head[1] > 0).then(|| Label::from_head(head)).flatten().map(|label| format!("#{} {label}", label.seq))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpKind;

    fn doing(current: u64, finished: u64) -> Doing {
        let head = |seq| if seq == 0 { [0; 3] } else { Label::new(OpKind::Barrier, seq).head() };
        Doing { current: head(current), finished: head(finished), since: [0; 2] }
    }

    fn introduce(rank: Rank) -> String {
        format!("rank {rank} (host b, pid 812)")
    }

    const FORTY: Duration = Duration::from_secs(40);

    #[test]
    fn one_rank_is_introduced_and_several_are_counted() {
        let text = |late: &[(Rank, Doing)]| {
            sentence(late, introduce, |rank| rank, "all_reduce #288", "default", FORTY)
        };
        assert_eq!(
            text(&[(5, doing(287, 287))]),
            "rank 5 (host b, pid 812) is alive and has not entered all_reduce #288 of group `default` for 40 s; \
             rank 5 last finished #287 barrier and has called nothing since; the others wait"
        );
        assert_eq!(
            text(&[(5, doing(287, 286)), (7, doing(0, 0))]),
            "ranks 5, 7 are alive and have not entered all_reduce #288 of group `default` for 40 s; \
             rank 5 last finished #286 barrier and is in #287 barrier; rank 7 has called nothing in this group; \
             the others wait"
        );
        let many: Vec<_> = (0..40).map(|rank| (rank, doing(0, 0))).collect();
        let shown = text(&many);
        assert!(
            shown.contains(" and 24 more are alive") && shown.ends_with("; …; the others wait"),
            "{shown}"
        );
    }

    #[test]
    fn ranks_of_a_subgroup_are_told_by_their_numbers_in_the_job() {
        let text =
            |late: &[(Rank, Doing)]| sentence(late, introduce, |rank| rank + 8, "barrier #2", "tp1", FORTY);
        assert_eq!(
            text(&[(1, doing(1, 1)), (2, doing(0, 0))]),
            "ranks 9, 10 (ranks 1, 2 of group `tp1`) are alive and have not entered barrier #2 of group `tp1` for 40 s; \
             rank 9 last finished #1 barrier and has called nothing since; rank 10 has called nothing in this group; \
             the others wait"
        );
    }

    #[test]
    fn the_one_that_is_waited_for_says_so() {
        assert_eq!(
            confession(&doing(1, 0), "barrier #2", "default", FORTY),
            "the other ranks of group `default` wait for this one, which has not entered barrier #2 for 40 s; \
             this rank has finished nothing and is in #1 barrier"
        );
    }

    #[test]
    fn it_is_said_again_each_time_the_wait_has_doubled() {
        let mut told = Told::default();
        let seconds = Duration::from_secs;
        let due = |told: &Told, waited| told.is_due(Waiting::Collective(7), seconds(waited), seconds(30));
        assert!(!due(&told, 29) && due(&told, 30));
        told.say(Waiting::Collective(7), seconds(31), false, "it is so");
        assert!(!due(&told, 61) && due(&told, 62));
        assert!(told.is_due(Waiting::Collective(8), seconds(30), seconds(30)), "another operation");
        assert!(told.is_due(Waiting::Message(7), seconds(30), seconds(30)));
        assert!(told.report.as_ref().is_some_and(|report| !report.is_message));
        told.say(Waiting::Message(7), seconds(31), false, "that, too");
        assert!(told.report.as_ref().is_some_and(|report| report.is_message));
        assert!(!due(&told, 32), "a wait for a message does not restart the wait for the collective");
        assert!(!told.is_due(Waiting::Message(7), seconds(32), seconds(30)));
        told.forget_unless(|what| what == Waiting::Collective(7));
        assert_eq!(told.report, None, "it was about the message");
        told.say(Waiting::Collective(7), seconds(62), false, "it is so");
        told.forget_unless(|what| what == Waiting::Collective(7));
        assert_eq!(told.report.as_ref().map(|report| &*report.text), Some("it is so"));
        told.forget_unless(|_| false);
        assert_eq!(told.report, None);
    }
}
