//! Dumps as files: on request, when a group fails, and on a signal.
//!
//! A file for a failed group is written by a thread of its own, because who finds the fault holds the engine's lock, and
//! because a disk may hang: no error waits for it. A program that ends does, for a limited time: when it drops or aborts a group, and
//! in Python when the interpreter ends.

#![expect(clippy::disallowed_methods, reason = "owns the threads that write dumps")]

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tenfold_plan::Rank;

use super::dump::{self, DumpOptions};
use super::{GroupRecord, RECORDER, Recorder, clock};
use crate::environment;
use crate::fault::Fault;

/// Files that are being written at the same time; ranks that are threads have one each.
const WRITING_MAX: usize = 64;

/// How many files are being written, and who waits for them.
static WRITING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// The process that writes them.
static WRITER: AtomicU32 = AtomicU32::new(0);

/// Writes a dump of `rank`; where.
pub(super) fn write(recorder: &Recorder, rank: Rank, options: &DumpOptions) -> io::Result<PathBuf> {
    let path = path(recorder, rank);
    let bytes = dump::pickle(&dump::snapshot(recorder, Some(rank), options), options);
    write_whole(&path, &bytes)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display())))?;
    Ok(path)
}

fn path(recorder: &Recorder, rank: Rank) -> PathBuf {
    let settings = &recorder.settings;
    let prefix = settings.dynamic_prefix.then(environment::recorder_prefix).and_then(Result::ok);
    let mut path = prefix.unwrap_or_else(|| settings.prefix.clone()).into_os_string();
    path.push(rank.to_string());
    path.into()
}

/// Replaces the file in one step: a reader sees the old file or the new one. The name of the unfinished file does not match that
/// of a dump.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let unfinished = folder.join(format!(".tenfold-dump-{}-{}", std::process::id(), clock::now()));
    let written = fs::write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished); // it may not have been made
    }
    written
}

/// A dump of a group that fails. From now on [`wait_until_dumped`] waits for it.
pub(crate) struct ExpectedDump {
    place: Place,
    group: Arc<GroupRecord>,
}

/// A group fails, which leaves a dump, unless that was switched off.
#[cold]
pub(crate) fn expect_dump(group: &Arc<GroupRecord>, fault: &Fault) -> Option<ExpectedDump> {
    group.fail(fault);
    let recorder = group.recorder();
    if !recorder.settings.dump_on_failure || recorder.ring.is_none() {
        return None;
    }
    Some(ExpectedDump { place: Place::take()?, group: Arc::clone(group) })
}

impl ExpectedDump {
    /// Writes the dump on another thread, and returns immediately.
    pub(crate) fn write(self) {
        let ExpectedDump { place, group } = self;
        let recorder = group.recorder();
        place.run(move || write_for(recorder, &group));
    }
}

/// Writes a dump of the rank that `group` belongs to, on another thread. Returns immediately.
#[cold]
pub(crate) fn dump_for(group: &Arc<GroupRecord>) {
    #[cfg(test)]
    group.dumps.fetch_add(1, Ordering::Relaxed);
    let (recorder, group) = (group.recorder(), Arc::clone(group));
    if recorder.ring.is_none() {
        return;
    }
    let Some(place) = Place::take() else { return };
    place.run(move || write_for(recorder, &group));
}

/// Writes a dump of the rank that `group` belongs to, and tells where.
fn write_for(recorder: &Recorder, group: &GroupRecord) {
    let rank = match group.only() {
        Some(_) => group.global_rank(),
        None => *recorder.process_rank.get_or_init(|| group.global_rank()),
    };
    tell(write(recorder, rank, &DumpOptions::default().only(group.only())), rank);
}

/// Writes a file for each rank of this process now; which they are, or why not.
pub(crate) fn write_all() -> Vec<(Rank, io::Result<PathBuf>)> {
    let mut told = Vec::new();
    let mut written = Vec::new();
    for group in RECORDER.groups.all() {
        if told.contains(&group.only()) {
            continue;
        }
        told.push(group.only());
        let rank = group.only().map(|_| group.global_rank());
        let rank = rank.or(RECORDER.process_rank.get().copied()).unwrap_or_default();
        written.push((rank, write(&RECORDER, rank, &DumpOptions::default().only(group.only()))));
    }
    written
}

/// Writes a file for each rank of this process if the signal came that asks for it.
pub(crate) fn dump_if_signalled() {
    if RECORDER.signalled.load(Ordering::Relaxed) && RECORDER.signalled.swap(false, Ordering::AcqRel) {
        let Some(place) = Place::take() else { return };
        place.run(|| write_all().into_iter().for_each(|(rank, written)| tell(written, rank)));
    }
}

/// Files that the user knows of.
static TOLD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Logs where the dump is and how to read it. The first time this is a warning, since the user needs it to find the cause.
fn tell(written: io::Result<PathBuf>, rank: Rank) {
    let path = match written {
        Ok(path) => path,
        Err(error) => return tracing::warn!("no dump of the flight recorder: {error}"),
    };
    let shown = path.display().to_string();
    let all = shown.strip_suffix(&rank.to_string()).unwrap_or(&shown);
    let is_new = TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(path);
    if is_new {
        tracing::warn!(
            "the last operations of rank {rank} are in {shown}; `tenfold trace {all}*` compares those of all ranks"
        );
    } else {
        tracing::info!("the last operations of rank {rank} were written to {shown} again");
    }
}

/// One of the files that are being written, or will be. While there is one, a file in the launcher's folder says so: a launcher that
/// ends the other ranks of a job that failed lets them write their dumps first.
struct Place;

/// The first file to be written and the last make and remove that file.
fn tell_launcher(is_writing: bool) {
    let Some(folder) = environment::progress_folder() else { return };
    let marker = folder.join(format!("{}.{DUMPING}", std::process::id()));
    let _the_folder_is_gone = if is_writing { fs::write(marker, "") } else { fs::remove_file(marker) };
}

/// How the name of that file ends.
pub const DUMPING: &str = "dumping";

impl Place {
    fn take() -> Option<Place> {
        let mut writing = WRITING.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *writing >= WRITING_MAX {
            tracing::warn!("no dump of the flight recorder: {writing} earlier ones are still being written");
            return None;
        }
        *writing += 1;
        WRITER.store(std::process::id(), Ordering::Relaxed);
        if *writing == 1 {
            tell_launcher(true);
        }
        Some(Place)
    }

    /// Runs `write` on a thread of its own.
    fn run(self, write: impl FnOnce() + Send + 'static) {
        let run = move || {
            write();
            drop(self);
        };
        if let Err(error) = std::thread::Builder::new().name("tenfold-dump".to_string()).spawn(run) {
            tracing::warn!("no dump of the flight recorder: cannot start a thread: {error}");
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut writing = WRITING.0.lock().unwrap_or_else(PoisonError::into_inner);
        *writing -= 1;
        if *writing == 0 {
            tell_launcher(false);
        }
        WRITING.1.notify_all();
    }
}

/// Returns when no dump is being written, or when the time for that is up.
#[cold]
pub(crate) fn wait_until_dumped() {
    // What a forked child has of this is its parent's count, and maybe a lock that a thread of the parent held.
    if WRITER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let writing = WRITING.0.lock().unwrap_or_else(PoisonError::into_inner);
    let limit = RECORDER.settings.dump_time;
    let _ = WRITING.1.wait_timeout_while(writing, limit, |writing| *writing > 0);
}

/// Has the signal that the user named set a flag; the helper thread looks at it.
pub(super) fn listen_for_signal(recorder: &Recorder) {
    let Some(signal) = recorder.settings.signal else { return };
    if let Err(error) = signal_hook::flag::register(signal, Arc::clone(&recorder.signalled)) {
        tracing::warn!("cannot listen for signal {signal}: {error}");
    }
}
