//! The progress of ranks in their collectives, as ranks that use tenfold report it themselves.
//!
//! Each rank has a separate folder for that (`TENFOLD_PROGRESS`). The runtime keeps a file there for every
//! fabric of the rank, see `fabric/progress.rs` of the crate `tenfold`. Programs that use something else
//! leave the folder empty.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use tempfile::TempDir;
use tenfold::raw::{ProgressEntry, StuckReport};
use tenfold::recorder::DUMPING;

pub(super) const VARIABLE: &str = "TENFOLD_PROGRESS";

/// Limits on what is read and reported about one rank.
const FILES_MAX: usize = 64;
const BYTES_MAX: u64 = 64 << 10;
const TOLD_MAX: usize = 4;
/// Bytes of a group's name or a call that are passed on.
const NAME_MAX: usize = 200;
/// Bytes of what it reports about other ranks.
const STUCK_MAX: usize = 1000;

/// The current or last call of a rank in one group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Collective {
    group: String,
    /// Its rank in that group, and the group's size.
    rank: usize,
    size: usize,
    call: String,
    number: u64,
    under_way: bool,
    /// Since it began, or since it ended.
    seconds: f64,
    /// Which rank keeps which ranks waiting there for too long, as this rank reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    stuck: Option<StuckReport>,
    /// How long after the first rank this one recently arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    late_seconds: Option<f64>,
}

/// The warnings already printed about ranks that keep others waiting: for which operation, and for how long.
#[derive(Debug, Default)]
pub(super) struct Stuck(HashMap<Wait, u64>);

/// What is waited for. The number of a collective means the same on all ranks; each rank counts messages for
/// itself.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Wait {
    group: String,
    number: u64,
    message_of: Option<usize>,
}

impl Stuck {
    /// The warnings to print now: once for each operation, and again when the wait has doubled. `ranks` has
    /// what each rank reports.
    pub(super) fn news<'a>(&mut self, ranks: impl Iterator<Item = (usize, &'a [Collective])>) -> Vec<String> {
        let of_rank = |(rank, collectives): (usize, &'a [Collective])| {
            collectives.iter().filter_map(move |it| Some((rank, &it.group, it.stuck.as_ref()?)))
        };
        let mut reports: Vec<(usize, &String, &StuckReport)> = ranks.flat_map(of_rank).collect();
        reports.sort_by_key(|(.., report)| report.itself); // reports of other ranks are clearer
        if reports.is_empty() {
            self.0.clear();
        }
        let mut news = Vec::new();
        for (rank, group, report) in reports {
            let message_of = report.is_message.then_some(rank);
            let wait = Wait { group: group.clone(), number: report.number, message_of };
            let told = self.0.entry(wait).or_default();
            if report.seconds < 2 * *told {
                continue;
            }
            *told = report.seconds.max(1);
            // A report about a message does not identify the message.
            news.push(if report.itself || report.is_message {
                format!("rank {rank}: {}", report.text)
            } else {
                report.text.clone()
            });
        }
        news
    }
}

/// The folders of all ranks of a launcher; removed with it.
#[derive(Debug)]
pub(super) struct Progress(Option<TempDir>);

impl Progress {
    /// If no folder can be made, nothing is known, but the job runs. `name` is the beginning of the folder's
    /// name.
    pub(super) fn new(name: &str) -> Self {
        let only_ours = std::fs::Permissions::from_mode(0o700);
        Progress(tempfile::Builder::new().prefix(name).permissions(only_ours).tempdir().ok())
    }

    /// Makes a rank's folder.
    pub(super) fn make_folder(&self, round: u64, local_rank: usize) -> Option<PathBuf> {
        let folder = self.folder(round, local_rank)?;
        std::fs::create_dir_all(&folder).ok()?;
        Some(folder)
    }

    fn folder(&self, round: u64, local_rank: usize) -> Option<PathBuf> {
        Some(self.0.as_ref()?.path().join(round.to_string()).join(local_rank.to_string()))
    }

    /// Whether a rank is writing a dump. A rank that is killed meanwhile leaves the mark behind.
    pub(super) fn is_dumping(&self, round: u64, local_rank: usize) -> bool {
        let files = self.folder(round, local_rank).and_then(|folder| std::fs::read_dir(folder).ok());
        let is_word = |path: PathBuf| path.extension().is_some_and(|extension| extension == DUMPING);
        files.is_some_and(|files| files.flatten().take(FILES_MAX).any(|file| is_word(file.path())))
    }

    /// What a rank reported last: blocked operations first, then those in progress, the longest first.
    pub(super) fn of(&self, round: u64, local_rank: usize, now: SystemTime) -> Vec<Collective> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        self.folder(round, local_rank).map_or_else(Vec::new, |folder| read(&folder, now))
    }
}

fn read(folder: &Path, now: f64) -> Vec<Collective> {
    let Ok(files) = std::fs::read_dir(folder) else { return Vec::new() };
    let files = files.flatten().map(|file| file.path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let mut all: Vec<Collective> =
        files.take(FILES_MAX).filter_map(|path| parse(&path)).flatten().map(|entry| at(entry, now)).collect();
    all.sort_by(|a, b| {
        let oldest_first = b.seconds.total_cmp(&a.seconds);
        let stuck_first = b.stuck.is_some().cmp(&a.stuck.is_some()); // it must not be cut off
        stuck_first.then(b.under_way.cmp(&a.under_way)).then(if a.under_way {
            oldest_first
        } else {
            oldest_first.reverse()
        })
    });
    all.truncate(TOLD_MAX);
    all
}

/// A file that cannot be read is ignored: the next attempt finds a whole one.
fn parse(path: &Path) -> Option<Vec<ProgressEntry>> {
    let is_short = std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= BYTES_MAX);
    let text = is_short.then(|| std::fs::read(path).ok())??;
    serde_json::from_slice(&text).ok()
}

fn at(entry: ProgressEntry, now: f64) -> Collective {
    let ProgressEntry {
        mut group,
        rank,
        size,
        mut call,
        number,
        under_way,
        since_unix,
        mut stuck,
        late_seconds,
    } = entry;
    let cut = |text: &mut String, max: usize| {
        let end = (0..=max.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
    };
    cut(&mut group, NAME_MAX);
    cut(&mut call, NAME_MAX);
    if let Some(report) = &mut stuck {
        cut(&mut report.text, STUCK_MAX);
        report.text = report.text.replace(char::is_control, " "); // one line, whatever it says
    }
    Collective {
        group,
        rank,
        size,
        call,
        number,
        under_way,
        seconds: (now - since_unix).max(0.0),
        stuck,
        late_seconds,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn entry(number: u64, under_way: bool, since: f64) -> serde_json::Value {
        serde_json::json!({
            "group": "default", "rank": 1, "size": 2, "call": "barrier", "number": number, "under_way": under_way,
            "since_unix": since,
        })
    }

    #[test]
    fn the_longest_running_operation_comes_first() {
        let progress = Progress::new("tenfold-run-test-");
        let folder = progress.make_folder(3, 1).unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        assert_eq!(progress.of(3, 1, now), []);
        let write = |name: &str, entries: serde_json::Value| {
            std::fs::write(folder.join(name), entries.to_string()).unwrap();
        };
        write("a.json", serde_json::json!([entry(1, false, 10.0), entry(2, true, 60.0)]));
        write("b.json", serde_json::json!([entry(3, false, 90.0), entry(4, true, 40.0)]));
        write("half.json", "[{".into());
        write("b.new", serde_json::json!([entry(5, true, 1.0)]));
        let order: Vec<_> = progress.of(3, 1, now).iter().map(|it| (it.number, it.seconds)).collect();
        assert_eq!(order, [(4, 60.0), (2, 40.0), (3, 10.0), (1, 90.0)]);
        assert_eq!(progress.of(4, 1, now), [], "another round");
        assert!(!progress.is_dumping(3, 1));
        write("4711.dumping", "".into());
        assert!(progress.is_dumping(3, 1) && !progress.is_dumping(3, 0));
    }

    #[test]
    fn a_blocked_rank_is_reported_once_and_again_when_the_wait_has_doubled() {
        let told = |number: u64, seconds: u64, itself: bool, text: &str| {
            let mut told: ProgressEntry = serde_json::from_value(entry(1, true, 0.0)).unwrap();
            told.stuck = Some(StuckReport { number, is_message: false, seconds, itself, text: text.into() });
            [at(told, 0.0)]
        };
        let mut stuck = Stuck::default();
        let (first, second) = (told(7, 30, true, "I sleep"), told(7, 31, false, "rank 3 sleeps\x1b[2J"));
        let mut news = |ranks: &[(usize, &[Collective])]| stuck.news(ranks.iter().copied());
        assert_eq!(news(&[(3, &first), (0, &second)]), ["rank 3 sleeps [2J"], "what others say comes first");
        assert!(news(&[(3, &first), (0, &second)]).is_empty());
        assert_eq!(news(&[(0, &told(7, 62, false, "still"))]), ["still"]);
        assert_eq!(
            news(&[(3, &told(8, 30, true, "I sleep"))]),
            ["rank 3: I sleep"],
            "no other rank is on this node"
        );
        assert!(news(&[]).is_empty());
        assert_eq!(news(&[(3, &told(8, 30, true, "again"))]), ["rank 3: again"]);
    }

    #[test]
    fn a_message_is_not_taken_for_the_collective_of_its_number_nor_for_another_ranks() {
        let told = |group: &str, is_message: bool, text: &str| {
            let mut told: ProgressEntry = serde_json::from_value(entry(1, true, 0.0)).unwrap();
            told.group = group.into();
            told.stuck =
                Some(StuckReport { number: 7, is_message, seconds: 30, itself: false, text: text.into() });
            at(told, 0.0)
        };
        let ranks = [
            [told("default", false, "rank 3 sleeps"), told("second", false, "rank 3 sleeps there")],
            [told("default", true, "recv #7 waits"), told("second", true, "recv #7 waits there")],
            [told("default", true, "send #7 waits"), told("second", false, "rank 3 sleeps there")],
        ];
        let ranks = || ranks.iter().enumerate().map(|(rank, told)| (rank, &told[..]));
        let mut stuck = Stuck::default();
        let expected = [
            "rank 3 sleeps",
            "rank 3 sleeps there",
            "rank 1: recv #7 waits",
            "rank 1: recv #7 waits there",
            "rank 2: send #7 waits",
        ];
        assert_eq!(stuck.news(ranks()), expected);
        assert!(stuck.news(ranks()).is_empty(), "each was said");
    }

    #[test]
    fn a_rank_cannot_make_the_launcher_read_forever() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("long.json"), vec![b'['; BYTES_MAX as usize + 1]).unwrap();
        let name = "ä".repeat(NAME_MAX);
        let mut long = entry(1, true, 0.0);
        long["group"] = name.into();
        let many: Vec<_> = std::iter::repeat_n(long, 20).collect();
        std::fs::write(folder.path().join("many.json"), serde_json::Value::from(many).to_string()).unwrap();
        let told = read(folder.path(), 1.0);
        assert_eq!(told.len(), TOLD_MAX);
        assert_eq!(told[0].group, "ä".repeat(NAME_MAX / 2));
    }
}
