//! Reads dumps from the paths that the user typed: files and folders, pickle or JSON, and the rank of each.
//!
//! A file that cannot be read does not affect the others: it becomes a [`Refusal`] that names it. Files are
//! read by as many threads as there are cores; the results are in the order of the files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;

use super::dump::{self, Calls, Dump, End};
use super::pickle::Problem;
use super::{json, pickle, words};

/// Bytes of one file. A ring of 20,000 operations with deep stacks has 30 MB.
const FILE_MAX: u64 = 256 << 20;
/// A file with more bytes is read alone among its kind, so that a folder of huge files takes as much memory
/// on many cores as on one.
const LARGE: u64 = 32 << 20;
/// Files that are read at a time: a disk does not become quicker with more.
const READERS_MAX: usize = 8;
/// Hosts' clocks differ by less than this.
const CLOCKS_NS: i64 = 60_000_000_000;
/// Files of one job.
const FILES_MAX: usize = 20_000;

/// The dumps found, and the files that could not be read.
#[derive(Debug, Default)]
pub(crate) struct Dumps {
    pub(crate) dumps: Vec<Dump>,
    pub(crate) refusals: Vec<Refusal>,
    /// Ranks that exist according to Gloo's recorder, which does not say in which group.
    pub(crate) ranks_mentioned: Vec<u32>,
    /// Files in folders whose names do not end in a rank.
    pub(crate) left_out: usize,
}

/// What a path stands for.
#[derive(Debug, Default)]
struct Listed {
    files: Vec<PathBuf>,
    left_out: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
/// A file that could not be read as a dump, and why.
pub struct Refusal {
    pub(crate) file: String,
    pub(crate) problem: String,
}

/// A dump, and ranks that it mentions without a group.
type Read = (Dump, Vec<u32>);

/// Reads every file, and every file of every folder.
pub(crate) fn read_all(paths: &[PathBuf]) -> Dumps {
    let listed: Vec<Result<Listed, String>> = paths.iter().map(|path| list(path)).collect();
    let files: Vec<&PathBuf> = listed.iter().flatten().flat_map(|listed| &listed.files).collect();
    let mut read = read_files(&files).into_iter();
    let mut found = Dumps::default();
    for (path, listed) in paths.iter().zip(&listed) {
        match listed {
            Ok(listed) => {
                listed.files.iter().zip(&mut read).for_each(|(file, read)| found.add(file, read));
                found.left_out += listed.left_out;
            }
            Err(problem) => found.refuse(path, problem.clone()),
        }
    }
    found.dumps.sort_by_key(|dump| dump.rank);
    found.leave_out_earlier_jobs();
    settle_ends(&mut found.dumps);
    found
}

/// The contents of each file, in order.
fn read_files(files: &[&PathBuf]) -> Vec<Result<Read, String>> {
    let next = AtomicUsize::new(0);
    let large = Mutex::new(());
    let reader = || {
        let mut calls = Calls::default();
        let mut read = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = files.get(index) else { return read };
            read.push((index, read_file(file, &large, &mut calls)));
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let helpers = cores.min(READERS_MAX).min(files.len()).saturating_sub(1);
    let mut read = thread::scope(|scope| {
        let builder = || thread::Builder::new().name("tenfold-read".into());
        // If a thread cannot be started, it is not needed: this thread reads too.
        let helpers: Vec<_> =
            (0..helpers).filter_map(|_| builder().spawn_scoped(scope, reader).ok()).collect();
        let mut read = reader();
        for helper in helpers {
            read.extend(helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        read
    });
    read.sort_by_key(|(index, _)| *index);
    read.into_iter().map(|(_, read)| read).collect()
}

/// Interprets ends of operations, which depend on what the recorder ever records.
///
/// Some recorders note that an operation was called and never look again (PyTorch's hook around a backend
/// without completion hooks): all of theirs seem to be in progress. If a library has several on one rank and
/// none has ever started or ended, that says nothing. A recorder that does record completions, and stops
/// watching an operation, has seen it fail.
fn settle_ends(dumps: &mut [Dump]) {
    let mut watched: BTreeSet<Arc<str>> = BTreeSet::new();
    let mut told: BTreeSet<Arc<str>> = BTreeSet::new();
    let mut several: BTreeSet<Arc<str>> = BTreeSet::new();
    for dump in dumps.iter() {
        let mut seen = BTreeSet::new();
        for record in &dump.records {
            if record.end != End::Open || record.started_ns.is_some() {
                watched.insert(record.library.clone());
            }
            if record.is_completed() {
                told.insert(record.library.clone());
            }
            if !seen.insert((&record.library, &record.group)) {
                several.insert(record.library.clone());
            }
        }
    }
    for record in dumps.iter_mut().flat_map(|dump| &mut dump.records) {
        let library = &record.library;
        if !watched.contains(library) && several.contains(library) {
            record.end = End::Unknown;
        } else if record.end == End::Unknown && told.contains(library) {
            record.end = End::Failed;
        }
    }
}

impl Dumps {
    fn add(&mut self, path: &Path, read: Result<Read, String>) {
        let (dump, mentioned) = match read {
            Ok(read) => read,
            Err(problem) => return self.refuse(path, problem),
        };
        if let Some(other) = self.dumps.iter().find(|other| other.rank == dump.rank) {
            let problem = format!(
                "duplicate dump of rank {}: another is {}\n  hint: pass the dumps of one job and one moment; \
                 the rank is the number at the end of a file's name",
                dump.rank, other.file
            );
            return self.refuse(path, problem);
        }
        self.ranks_mentioned.extend(mentioned);
        self.dumps.push(dump);
    }

    /// File names are the same in every job, so a folder may have files of an earlier, larger job, or of a
    /// rank that left none this time. The newest dump shows when its job began, if its ring still has that.
    fn leave_out_earlier_jobs(&mut self) {
        let newest =
            self.dumps.iter().filter(|dump| dump.written_ns.is_some()).max_by_key(|dump| dump.written_ns);
        let first = newest.and_then(|dump| dump.records.first()).filter(|record| record.id == 0);
        let Some(begun) = first.and_then(|record| record.created_ns) else { return };
        let age = |dump: &Dump| Some(begun.saturating_sub(dump.written_ns?)).filter(|age| *age > CLOCKS_NS);
        for dump in std::mem::take(&mut self.dumps) {
            match age(&dump) {
                Some(age) => {
                    let age = words::seconds(age as f64 / 1e9);
                    let problem = format!(
                        "belongs to an earlier job: it was written {age} before the first operation of this job"
                    );
                    self.refuse(Path::new(&dump.file), problem);
                }
                None => self.dumps.push(dump),
            }
        }
    }

    fn refuse(&mut self, path: &Path, problem: String) {
        self.refusals.push(Refusal { file: path.display().to_string(), problem });
    }
}

/// The file itself, or the files of the folder whose names end like a dump's.
fn list(path: &Path) -> Result<Listed, String> {
    if !path.is_dir() {
        return Ok(Listed { files: vec![path.to_owned()], left_out: 0 });
    }
    let mut files = BTreeMap::new();
    let mut left_out = 0;
    for entry in fs::read_dir(path).map_err(|error| error.to_string())? {
        let file = entry.map_err(|error| error.to_string())?.path();
        match (rank_of(&file), file.is_file()) {
            (Some(rank), true) => drop(files.insert((rank, file.clone()), file)),
            (None, true) => left_out += 1,
            (_, false) => {}
        }
        if files.len() > FILES_MAX {
            return Err(format!("the folder has more than {FILES_MAX} files"));
        }
    }
    if files.is_empty() {
        return Err("the folder has no file whose name ends in a rank, such as trace_0 or rank3.json".into());
    }
    Ok(Listed { files: files.into_values().collect(), left_out })
}

/// The number at the end of a file's name: `nccl_trace_rank_3`, `trace_3.json`. A compressed file has a rank
/// too, so that the error names it. Names are bytes: what precedes the number may not be text.
fn rank_of(path: &Path) -> Option<u32> {
    let name = path.file_name()?.as_bytes();
    let without = |name: &[u8], ends: &[&str]| {
        ends.iter().find_map(|end| name.strip_suffix(end.as_bytes())).unwrap_or(name).to_vec()
    };
    let name = without(name, &[".gz", ".zst", ".xz"]);
    let name = without(&name, &[".json", ".pickle", ".pkl", ".bin", ".dump", ".txt"]);
    let start = name.iter().rposition(|byte| !byte.is_ascii_digit()).map_or(0, |last| last + 1);
    std::str::from_utf8(&name[start..]).ok()?.parse().ok()
}

fn read_file(path: &Path, large: &Mutex<()>, calls: &mut Calls) -> Result<Read, String> {
    // Opening a pipe without a writer would block.
    let without_waiting = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(without_waiting).open(path);
    let file = file.map_err(|error| error.to_string())?;
    let facts = file.metadata().map_err(|error| error.to_string())?;
    if !facts.is_file() {
        return Err("not a regular file".into()); // reading a pipe might never end
    }
    let _alone = (facts.len() > LARGE).then(|| large.lock().unwrap_or_else(PoisonError::into_inner));
    let mut bytes = Vec::with_capacity(facts.len().min(FILE_MAX) as usize + 1);
    file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    let (mut dump, rank, mentioned) = read_bytes(&bytes, calls)?;
    dump.rank = rank.or_else(|| rank_of(path)).ok_or(
        "cannot tell which rank it belongs to: the file name does not end in a number\n  hint: rename it as trace_0 for rank 0",
    )?;
    dump.file = path.display().to_string();
    let modified = || facts.modified().ok().and_then(nanoseconds).filter(|&at| is_credible(&dump, at));
    dump.written_ns = dump.written_ns.or_else(modified);
    Ok((dump, mentioned))
}

/// Parses a file's bytes: the dump, its rank and the other ranks it mentions.
pub(super) fn read_bytes(bytes: &[u8], calls: &mut Calls) -> Result<(Dump, Option<u32>, Vec<u32>), String> {
    if bytes.len() as u64 > FILE_MAX {
        return Err(format!("longer than {} MiB, which is longer than any dump", FILE_MAX >> 20));
    }
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let parsed = match (first, bytes) {
        (None, _) => return Err("the file is empty: the rank may have been killed while writing it".into()),
        (_, [0x1f, 0x8b, ..]) => return Err("it is compressed\n  hint: `gunzip` it first".into()),
        (_, [0x28, 0xb5, 0x2f, 0xfd, ..]) => return Err("it is compressed\n  hint: `unzstd` it first".into()),
        (_, [0xfd, b'7', b'z', b'X', b'Z', 0, ..]) => {
            return Err("it is compressed\n  hint: `unxz` it first".into());
        }
        (Some(b'{' | b'['), _) => json::parse(bytes),
        (_, [0x80, ..]) => pickle::unpickle(bytes),
        _ => return Err("not a flight-recorder dump (neither JSON nor pickle)".into()),
    };
    let (heap, value) = parsed.map_err(|Problem { position, text }| format!("at byte {position}: {text}"))?;
    let top = heap.view(&value);
    Ok((dump::read(top, calls)?, dump::rank(top), dump::nameless_members(top)))
}

fn nanoseconds(time: SystemTime) -> Option<i64> {
    i64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()
}

/// A copied file is newer than its dump. A rank writes its dump soon after its operations time out, at the
/// latest.
fn is_credible(dump: &Dump, written_ns: i64) -> bool {
    const GRACE_NS: i64 = 120_000_000_000;
    let times = dump.records.iter().flat_map(|record| [record.created_ns, record.ended_ns()]);
    let last = times.flatten().max().unwrap_or(written_ns);
    let patience = dump.records.iter().filter_map(|record| record.timeout_ms).max().unwrap_or(0);
    let latest = last.saturating_add(patience.saturating_mul(2_000_000)).saturating_add(GRACE_NS);
    (last..=latest).contains(&written_ns)
}

#[cfg(test)]
mod tests {
    use super::super::dump::{Call, Record};
    use super::*;

    #[test]
    fn the_rank_is_the_number_at_the_end_of_the_name() {
        let ranks = [
            ("nccl_trace_rank_12", Some(12)),
            ("trace_3.json", Some(3)),
            ("7", Some(7)),
            ("rank0.pickle", Some(0)),
            ("é5", Some(5)),
            ("trace_6.json.gz", Some(6)),
            ("trace_8.zst", Some(8)),
            ("x_2.xz", Some(2)),
            ("trace", None),
            ("trace_99999999999", None),
            ("4.x", None),
            (".gz", None),
        ];
        for (name, rank) in ranks {
            assert_eq!(rank_of(Path::new(name)), rank, "{name}");
        }
        let no_text = std::ffi::OsStr::from_bytes(b"tr\xffce_9");
        assert_eq!(rank_of(Path::new(no_text)), Some(9));
    }

    #[test]
    fn what_is_no_dump_is_told_apart() {
        let problem = |bytes: &[u8]| read_bytes(bytes, &mut Calls::default()).unwrap_err();
        assert_eq!(problem(b" \n"), "the file is empty: the rank may have been killed while writing it");
        assert_eq!(problem(b"\x1f\x8b\x08"), "it is compressed\n  hint: `gunzip` it first");
        assert_eq!(problem(b"\xfd7zXZ\0"), "it is compressed\n  hint: `unxz` it first");
        assert_eq!(problem(b"hello"), "not a flight-recorder dump (neither JSON nor pickle)");
        assert_eq!(problem(b"\x80\x02}"), "at byte 3: the file ends here: it is truncated");
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("trace_0");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let found = read_all(&[pipe]);
        assert_eq!(found.refusals[0].problem, "not a regular file");
    }

    #[test]
    fn what_an_end_means_depends_on_what_its_recorder_says_of_others() {
        let record = |library: &str, end| {
            let call = Call { library: library.into(), ..Call::default() };
            Record { call: call.into(), end, ..Record::default() }
        };
        let completed = End::Completed(None);
        let ends = [
            ("blind", End::Open, End::Unknown),
            ("blind", End::Open, End::Unknown),
            ("once", End::Open, End::Open),
            ("good", completed, completed),
            ("good", End::Unknown, End::Failed),
            ("good", End::Open, End::Open),
            ("gloo", End::Unknown, End::Unknown),
            ("gloo", End::Open, End::Open),
        ];
        let records = ends.iter().map(|&(library, end, _)| record(library, end)).collect();
        let mut dumps = [Dump { records, ..Dump::default() }];
        settle_ends(&mut dumps);
        let settled: Vec<End> = dumps[0].records.iter().map(|record| record.end).collect();
        assert_eq!(settled, ends.map(|(_, _, expected)| expected));
    }

    #[test]
    fn what_an_earlier_job_left_is_told_and_left_out() {
        const MINUTE: i64 = 60_000_000_000;
        let dump = |rank, first: Option<(i64, i64)>, written| Dump {
            rank,
            file: format!("trace_{rank}"),
            written_ns: Some(written),
            records: first
                .map(|(id, created)| Record { id, created_ns: Some(created), ..Record::default() })
                .into_iter()
                .collect(),
            ..Dump::default()
        };
        let left = |dumps: Vec<Dump>| {
            let mut found = Dumps { dumps, ..Dumps::default() };
            found.leave_out_earlier_jobs();
            found.refusals
        };
        let new = || dump(0, Some((0, 100 * MINUTE)), 110 * MINUTE);
        let old = || dump(1, Some((0, 10 * MINUTE)), 70 * MINUTE);
        let refusals = left(vec![new(), old()]);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert_eq!(refusals[0].file, "trace_1");
        assert_eq!(
            refusals[0].problem,
            "belongs to an earlier job: it was written 30.0 min before the first operation of this job"
        );
        let lost_its_first = dump(0, Some((7, 100 * MINUTE)), 110 * MINUTE);
        assert_eq!(left(vec![lost_its_first, old()]), [], "its beginning is unknown");
        assert_eq!(left(vec![dump(0, None, 110 * MINUTE), old()]), []);
        let clocks_differ = dump(1, Some((0, 98 * MINUTE)), 99 * MINUTE + MINUTE / 2);
        assert_eq!(left(vec![new(), clocks_differ]), []);
    }

    #[test]
    fn files_of_one_rank_or_of_none_are_refused_and_the_others_read() {
        let folder = tempfile::tempdir().unwrap();
        let good = r#"{"version": "2.10", "pg_config": {"": {"ranks": "[0, 1, 2]"}}}"#;
        for (name, text) in [("trace_0", good), ("trace_1", "{"), ("again_0", good), ("notes", "x")] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let found = read_all(&[folder.path().to_owned(), folder.path().join("gone_4")]);
        let ranks: Vec<u32> = found.dumps.iter().map(|dump| dump.rank).collect();
        assert_eq!((ranks, found.ranks_mentioned), (vec![0], vec![0, 1, 2]));
        assert_eq!(found.left_out, 1, "the notes");
        let problems: Vec<&str> =
            found.refusals.iter().map(|refusal| refusal.problem.lines().next().unwrap()).collect();
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems[0].starts_with("duplicate dump of rank 0: another is "), "{problems:?}");
        assert!(problems[1].starts_with("at byte 1: truncated JSON: EOF"), "{problems:?}");
        assert!(problems[2].starts_with("No such file"), "{problems:?}");
    }
}
