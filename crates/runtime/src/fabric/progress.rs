//! How far this rank is, for programs that watch from outside.
//!
//! `tenfold run` names a folder to each of its ranks (`TENFOLD_PROGRESS`). The helper thread keeps a file there while the
//! fabric lives: for each group the last operation, whether it is under way, and since when. It looks at every tick and
//! writes only when something changed, so an operation costs nothing more than without it, and a rank that is stuck
//! leaves a file that does not change. Times are as exact as ticks.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tenfold_memory::Doing;

use crate::group::StuckReport;
use crate::label::Label;
use crate::wire::FabricId;

/// More groups than this are not told of: the last that were made.
const GROUPS_MAX: usize = 64;

/// A group, and what this rank does in it.
#[derive(Debug)]
pub(crate) struct GroupProgress {
    pub(crate) id: u64,
    pub(crate) name: Arc<str>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) doing: Doing,
    /// Which rank has kept which others waiting for too long.
    pub(crate) stuck: Option<StuckReport>,
    /// How late this rank comes lately.
    pub(crate) late: Option<Duration>,
}

/// What the file says of one group: a list of these, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgressEntry {
    /// The name of the group.
    pub group: String,
    /// This rank's number in the group.
    pub rank: usize,
    /// How many ranks the group has.
    pub size: usize,
    /// As in `all_reduce(sum, float32 × 1000)`.
    pub call: String,
    /// Which call of the group it is, counted from 1; 0 if it is known only because others wait for this rank.
    pub number: u64,
    /// Is it in progress, or done?
    pub under_way: bool,
    /// When it began, or ended.
    pub since_unix: f64,
    /// Which rank has kept which others waiting there, if one has for too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stuck: Option<StuckReport>,
    /// How long after the first rank this one comes to collectives, lately; nothing if no other was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_seconds: Option<f64>,
}

#[derive(Debug)]
pub(super) struct Progress {
    path: PathBuf,
    since: HashMap<u64, (Doing, f64)>,
    /// By group, what was said of ranks that are stuck.
    stuck: HashMap<u64, StuckReport>,
    /// Whether the last attempt to write failed, so that a failure is logged only once.
    failed: bool,
}

impl Progress {
    pub(super) fn new(folder: &Path, id: FabricId) -> Self {
        Progress {
            path: folder.join(format!("{id}.json")),
            since: HashMap::new(),
            stuck: HashMap::new(),
            failed: false,
        }
    }

    /// Writes what `groups` do if it has changed.
    pub(super) fn tell(&mut self, groups: &[GroupProgress], now: SystemTime) {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        if !self.notice(groups, now) {
            return;
        }
        let written = self.write(&self.entries(groups, now));
        if let Err(error) = &written
            && !self.failed
        {
            tracing::warn!("cannot tell the launcher how far this rank is: {}: {error}", self.path.display());
        }
        self.failed = written.is_err();
    }

    /// True if anything differs from what was last seen.
    fn notice(&mut self, groups: &[GroupProgress], now: f64) -> bool {
        let before = self.since.len();
        self.since.retain(|id, _| groups.iter().any(|group| group.id == *id));
        let mut changed = self.since.len() != before;
        for group in groups {
            if self.since.get(&group.id).is_none_or(|(doing, _)| *doing != group.doing) {
                self.since.insert(group.id, (group.doing, now));
                changed = true;
            }
        }
        let stuck: HashMap<u64, StuckReport> =
            groups.iter().filter_map(|group| Some((group.id, group.stuck.clone()?))).collect();
        changed |= stuck != self.stuck;
        self.stuck = stuck;
        changed
    }

    fn entries(&self, groups: &[GroupProgress], now: f64) -> Vec<ProgressEntry> {
        let last = &groups[groups.len().saturating_sub(GROUPS_MAX)..];
        let entries = last.iter().filter_map(|group| {
            let label = Label::from_head(&group.doing.current).filter(|label| label.seq > 0);
            let since_unix = self.since.get(&group.id).map_or(0.0, |(_, since)| *since);
            let (call, number, under_way, since_unix) = match (label, &group.stuck) {
                (Some(label), _) => {
                    let under_way = group.doing.current != group.doing.finished;
                    (label.to_string(), label.seq, under_way, since_unix)
                }
                // No collective was called, but a rank is waiting: this rank for a message, or a peer for this rank.
                (None, Some(stuck)) if stuck.is_message => {
                    let call = stuck.text.split(" #").next().unwrap_or_default();
                    (call.to_string(), stuck.number, true, now - stuck.seconds as f64)
                }
                (None, Some(_)) => ("nothing".to_string(), 0, false, since_unix),
                (None, None) => return None,
            };
            Some(ProgressEntry {
                group: group.name.to_string(),
                rank: group.rank,
                size: group.size,
                call,
                number,
                under_way,
                since_unix,
                stuck: group.stuck.clone(),
                late_seconds: group.late.map(|late| late.as_secs_f64()),
            })
        });
        entries.collect()
    }

    /// Replaces the file in one step, so that a reader sees either the old file or the new one.
    fn write(&self, entries: &[ProgressEntry]) -> io::Result<()> {
        let unfinished = self.path.with_extension("new");
        std::fs::write(&unfinished, serde_json::to_vec(entries)?)?;
        std::fs::rename(unfinished, &self.path)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let _there_was_none = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::OpKind;

    fn group(current: u64, finished: u64) -> GroupProgress {
        let head = |seq| if seq == 0 { [0; 3] } else { Label::new(OpKind::Barrier, seq).head() };
        let doing = Doing { current: head(current), finished: head(finished), since: [0; 2] };
        GroupProgress { id: 7, name: "default".into(), rank: 1, size: 2, doing, stuck: None, late: None }
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn the_file_says_since_when_and_goes_with_the_fabric() {
        let folder = tempfile::tempdir().unwrap();
        let mut progress = Progress::new(folder.path(), FabricId(3));
        let path = progress.path.clone();
        let read = || serde_json::from_slice::<serde_json::Value>(&std::fs::read(&path).unwrap()).unwrap();

        progress.tell(&[group(0, 0)], at(10));
        assert_eq!(read(), serde_json::json!([]), "nothing was called yet");
        progress.tell(&[group(4, 3)], at(20));
        progress.tell(&[group(4, 3)], at(30));
        let expected = serde_json::json!([{
            "group": "default", "rank": 1, "size": 2, "call": "barrier", "number": 4, "under_way": true,
            "since_unix": 20.0,
        }]);
        assert_eq!(read(), expected);
        progress.tell(&[group(4, 4)], at(40));
        assert_eq!((&read()[0]["under_way"], &read()[0]["since_unix"]), (&false.into(), &40.0.into()));
        let stuck =
            StuckReport { number: 5, is_message: false, seconds: 30, itself: true, text: "it sleeps".into() };
        let late = Some(Duration::from_millis(30));
        progress.tell(&[GroupProgress { stuck: Some(stuck), late, ..group(4, 4) }], at(45));
        assert_eq!(read()[0]["late_seconds"], 0.03);
        let expected = serde_json::json!({"number": 5, "seconds": 30, "itself": true, "text": "it sleeps"});
        assert_eq!((&read()[0]["stuck"], &read()[0]["since_unix"]), (&expected, &40.0.into()));
        progress.tell(&[], at(50));
        assert_eq!(read(), serde_json::json!([]));

        drop(progress);
        assert!(!path.exists());
    }

    #[test]
    fn who_waits_is_told_also_of_a_group_in_which_no_collective_was_called() {
        let folder = tempfile::tempdir().unwrap();
        let mut progress = Progress::new(folder.path(), FabricId(3));
        let path = progress.path.clone();
        let read = || serde_json::from_slice::<Vec<ProgressEntry>>(&std::fs::read(&path).unwrap()).unwrap();
        progress.tell(&[group(0, 0)], at(10));
        let mut stuck = StuckReport {
            number: 2,
            is_message: true,
            seconds: 30,
            itself: false,
            text: "recv(float32 × 8, tag 7) #2 of group `default` waits for 30 s for rank 1".into(),
        };
        progress.tell(&[GroupProgress { stuck: Some(stuck.clone()), ..group(0, 0) }], at(45));
        let told = read();
        assert_eq!((&*told[0].call, told[0].number), ("recv(float32 × 8, tag 7)", 2));
        assert_eq!((told[0].under_way, told[0].since_unix), (true, 15.0));
        assert_eq!(told[0].stuck.as_ref(), Some(&stuck));
        (stuck.is_message, stuck.itself, stuck.text) = (false, true, "the others wait for this one".into());
        progress.tell(&[GroupProgress { stuck: Some(stuck), ..group(0, 0) }], at(50));
        assert_eq!((&*read()[0].call, read()[0].number, read()[0].under_way), ("nothing", 0, false));
    }

    #[test]
    fn a_folder_that_is_not_there_does_no_harm() {
        let mut progress = Progress::new(Path::new("/nowhere/at/all"), FabricId(3));
        progress.tell(&[group(1, 0)], at(10));
        assert!(progress.failed);
    }
}
