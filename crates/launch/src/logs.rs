//! Log files of ranks: which streams have one, where it is, and what happens when it cannot be written.
//!
//! Flags and layout are torchrun's: `<log dir>/<run id>_<random>/attempt_<round>/<local rank>/stdout.log`, `stderr.log`
//! and `error.json`, the last for programs that use `torch.distributed.elastic`'s `record`. A stream can go to the
//! console, to its file (`--redirects`), or to both (`--tee`). Files hold the bytes as the rank wrote them.
//!
//! A stream that goes to its file alone is not read by the launcher: the rank holds the file itself. All
//! others come through a pipe, and the launcher writes their files. If it cannot, it reports that once, and
//! the ranks continue.
//!
//! How a launcher uses it: [`Logs::open`] before anything starts; [`Logs::start_round`] for each round, and [`Logs::of`] for each process that is started later, give one
//! [`RankLogs`] for each local rank; the [`Destination::stdio`] of its streams and the path of its error file go to the rank's process,
//! and it becomes part of the rank's [`Pipes`](super::pipes::Pipes). At the end, [`Logs::reminder`].

mod copies;
mod selection;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use signal_hook::consts::SIGXFSZ;
use tempfile::TempDir;

use super::failure::first_bytes;
use super::lines::Cutter;
use super::output::Stream;

pub(super) use copies::{Copies, Destination};
use copies::{Filter, Incomplete, LogFile, add, describe};
use selection::Streams;
pub(super) use selection::{Selection, parse_ranks, parse_selection, parse_words};

/// The local rank of a spare, for flags that choose local ranks.
const NO_RANK: usize = usize::MAX;
/// The longest run id in the name of its folder: file names have at most 255 bytes.
const RUN_ID_MAX: usize = 128;

/// The values of the flags.
#[derive(Clone, Debug, Default)]
pub(super) struct LogOptions {
    /// `--log-dir`
    pub(super) folder: Option<PathBuf>,
    pub(super) redirects: Option<Selection>,
    pub(super) tee: Option<Selection>,
    /// `--local-ranks-filter`: the only ranks on the console.
    pub(super) shown: Option<BTreeSet<usize>>,
    /// `--duplicate-stdout-filters` and `--duplicate-stderr-filters`
    pub(super) output_words: Vec<String>,
    pub(super) error_words: Vec<String>,
}

impl LogOptions {
    /// As in torchrun, `--log-dir /dev/null` means no files at all.
    fn wants_files(&self) -> bool {
        let folder = self.folder.as_deref();
        if folder == Some(Path::new("/dev/null")) {
            return false;
        }
        let words = !self.output_words.is_empty() || !self.error_words.is_empty();
        let chosen = [&self.redirects, &self.tee].into_iter().flatten().any(Selection::has_any);
        folder.is_some() || chosen || words
    }

    /// A log folder without a choice of streams: all of them, on the console too. (torchrun would write no
    /// file.)
    fn tee_of(&self, local_rank: usize) -> Streams {
        match (&self.redirects, &self.tee) {
            (None, None) if self.folder.is_some() => Streams::BOTH,
            (_, tee) => tee.as_ref().map_or(Streams::NONE, |tee| tee.of(local_rank)),
        }
    }

    fn redirect_of(&self, local_rank: usize) -> Streams {
        self.redirects.as_ref().map_or(Streams::NONE, |redirects| redirects.of(local_rank))
    }

    fn words(&self, stream: Stream) -> &[String] {
        match stream {
            Stream::Output => &self.output_words,
            Stream::Error => &self.error_words,
        }
    }
}

/// The files of one run on this node.
#[derive(Debug)]
pub(super) struct Logs {
    options: LogOptions,
    place: Place,
    /// The first round has its folder; later failures do not stop the ranks.
    begun: bool,
    incomplete: Incomplete,
}

#[derive(Debug)]
enum Place {
    /// `<log dir>/<run id>_<random>`, which stays.
    Kept(PathBuf),
    /// For error files alone; removed with the launcher.
    Private(TempDir),
    /// Not even a temporary folder can be created, and no log files were requested.
    Nowhere,
}

impl Logs {
    /// Makes the run's folder. The error is for the user, and is reported before anything starts.
    ///
    /// `private` is the beginning of the name of a folder that is removed with the launcher.
    pub(super) fn open(options: LogOptions, run_id: &str, private: &str) -> Result<Self, String> {
        let place = if options.wants_files() {
            // With `ulimit -f`, a file that is too long would kill the launcher; now it is like a full disk.
            let _is_told_by_the_write = signal_hook::flag::register(SIGXFSZ, Arc::default());
            Place::Kept(make_run_folder(options.folder.as_deref(), run_id)?)
        } else {
            only_ours(private).tempdir().map_or(Place::Nowhere, Place::Private)
        };
        Ok(Logs { options, place, begun: false, incomplete: Incomplete::default() })
    }

    /// Where the files of ranks are, if there are any: worth a line on the console.
    pub(super) fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Kept(folder) => Some(folder),
            Place::Private(_) | Place::Nowhere => None,
        }
    }

    /// What the ranks of a round get, by local rank. Fails in the first round only.
    pub(super) fn start_round(&mut self, round: u64, local_ranks: usize) -> Result<Vec<RankLogs>, String> {
        let ranks = (0..local_ranks).map(|local_rank| self.of(round, &Writer::first(local_rank)));
        let ranks = ranks.collect::<Result<_, _>>()?;
        self.begun = true;
        Ok(ranks)
    }

    /// What a process of a round gets. Fails in the first round only.
    pub(super) fn of(&self, round: u64, writer: &Writer) -> Result<RankLogs, String> {
        let folder = match &self.place {
            Place::Kept(folder) => Some(folder.as_path()),
            Place::Private(folder) => Some(folder.path()),
            Place::Nowhere => None,
        };
        let attempt = folder.map(|folder| folder.join(format!("attempt_{round}")));
        let made = attempt.as_deref().map(|attempt| {
            let folder = attempt.join(writer.folder());
            fs::create_dir_all(&folder).map(|()| folder.clone()).map_err(|error| cannot_make(&folder, &error))
        });
        match made.transpose().and_then(|folder| self.rank(writer, folder.as_deref())) {
            Ok(rank) => Ok(rank),
            Err(error) if !self.begun && self.folder().is_some() => Err(error),
            Err(_) => {
                // Ranks continue without files; the reminder will name them.
                if let Some(attempt) = &attempt {
                    add(&self.incomplete, attempt);
                }
                self.rank(writer, None)
            }
        }
    }

    fn rank(&self, writer: &Writer, folder: Option<&Path>) -> Result<RankLogs, String> {
        let error_file = folder.map(|folder| folder.join(writer.error_file()));
        let mut traces = Traces { error_file, ..Traces::default() };
        // Standard error first: it is read first when something failed.
        let error = self.destination(Stream::Error, writer, folder, &mut traces)?;
        let output = self.destination(Stream::Output, writer, folder, &mut traces)?;
        Ok(RankLogs { output, error, traces })
    }

    fn destination(
        &self,
        stream: Stream,
        writer: &Writer,
        folder: Option<&Path>,
        traces: &mut Traces,
    ) -> Result<Destination, String> {
        let local_rank = writer.local_rank.unwrap_or(NO_RANK);
        let is_shown = self.options.shown.as_ref().is_none_or(|shown| shown.contains(&local_rank));
        let folder = folder.filter(|_| self.folder().is_some());
        let Some(folder) = folder else { return Ok(Destination::Pipe(Copies::console(is_shown))) };
        let tee = self.options.tee_of(local_rank).has(stream);
        let redirect = self.options.redirect_of(local_rank).has(stream);
        let name = match stream {
            Stream::Output => "stdout.log",
            Stream::Error => "stderr.log",
        };
        let filter = match self.options.words(stream) {
            [] => None,
            words => {
                let attempt = folder.parent().unwrap_or(folder);
                let file = LogFile::open(attempt.join(format!("filtered_{name}")), &self.incomplete)?;
                Some(Filter { words: words.to_vec(), cutter: Cutter::default(), file })
            }
        };
        let on_console = is_shown && (tee || !redirect);
        if !tee && !redirect {
            return Ok(Destination::Pipe(Copies { file: None, filter, on_console }));
        }
        let file = LogFile::open(folder.join(name), &self.incomplete)?;
        traces.log_files.push(file.path.clone());
        if on_console || filter.is_some() || writer.may_move {
            return Ok(Destination::Pipe(Copies { file: Some(file), filter, on_console }));
        }
        traces.unread.push(file.path);
        Ok(Destination::File(file.file))
    }

    /// The files that could not be written, for the end; one line.
    pub(super) fn reminder(&self) -> Option<String> {
        let incomplete = self.incomplete.lock().unwrap_or_else(PoisonError::into_inner);
        match incomplete.as_slice() {
            [] => None,
            [one] => Some(format!("{} is incomplete: it could not be written", one.display())),
            [first, others @ ..] => {
                let (count, first) = (others.len() + 1, first.display());
                Some(format!(
                    "{count} log files are incomplete, among them {first}: they could not be written"
                ))
            }
        }
    }
}

/// A folder that no other user can read, whatever the umask: programs may print secrets.
fn only_ours(name: &str) -> tempfile::Builder<'_, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(name).permissions(fs::Permissions::from_mode(0o700));
    builder
}

fn make_run_folder(folder: Option<&Path>, run_id: &str) -> Result<PathBuf, String> {
    let base = match folder {
        Some(folder) => {
            fs::create_dir_all(folder).map_err(|error| cannot_make(folder, &error))?;
            // The summary and the ranks' environment use paths that are valid in any folder.
            std::path::absolute(folder).map_err(|error| cannot_make(folder, &error))?
        }
        None => {
            let folder = only_ours("tenfold_").tempdir();
            let folder =
                folder.map_err(|error| cannot_make(&std::env::temp_dir().join("tenfold_…"), &error))?;
            folder.keep()
        }
    };
    let name: String = run_id.chars().map(|c| if c == '/' || c.is_control() { '_' } else { c }).collect();
    let name = first_bytes(&name, RUN_ID_MAX);
    let made = only_ours(&format!("{name}_")).rand_bytes(8).tempdir_in(&base);
    Ok(made.map_err(|error| cannot_make(&base.join(format!("{name}_…")), &error))?.keep())
}

fn cannot_make(folder: &Path, error: &io::Error) -> String {
    let what = describe(error);
    format!(
        "cannot create the log folder `{}`: {what}\n  hint: choose another one with `--log-dir`",
        folder.display()
    )
}

/// Whose files these are.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    /// None for a spare.
    local_rank: Option<usize>,
    /// The name of a process that was not started with the round. It continues the files of its rank, and has an
    /// error file of its own.
    serial: Option<String>,
    /// Its output may go elsewhere later, so the launcher must write it.
    may_move: bool,
}

impl Writer {
    pub(super) fn first(local_rank: usize) -> Writer {
        Writer { local_rank: Some(local_rank), serial: None, may_move: false }
    }

    /// A process that was started later, in place of a rank.
    pub(super) fn replacement(local_rank: usize, serial: &str) -> Writer {
        Writer { local_rank: Some(local_rank), serial: Some(serial.into()), may_move: false }
    }

    pub(super) fn spare(serial: &str) -> Writer {
        Writer { local_rank: None, serial: Some(serial.into()), may_move: true }
    }

    /// A spare that has become a rank.
    pub(super) fn former_spare(local_rank: usize, serial: &str) -> Writer {
        Writer { may_move: true, ..Writer::replacement(local_rank, serial) }
    }

    fn folder(&self) -> String {
        match (self.local_rank, &self.serial) {
            (Some(local_rank), _) => local_rank.to_string(),
            (None, serial) => format!("spare-{}", serial.as_deref().unwrap_or_default()),
        }
    }

    fn error_file(&self) -> String {
        self.serial.as_ref().map_or_else(|| "error.json".into(), |serial| format!("error-{serial}.json"))
    }
}

/// Where one rank's output goes.
#[derive(Debug)]
pub(super) struct RankLogs {
    pub(super) output: Destination,
    pub(super) error: Destination,
    pub(super) traces: Traces,
}

/// Where to look when a rank has failed.
#[derive(Clone, Debug, Default)]
pub(super) struct Traces {
    /// For TORCHELASTIC_ERROR_FILE; none where no folder could be made.
    pub(super) error_file: Option<PathBuf>,
    pub(super) log_files: Vec<PathBuf>,
    /// Those of them that the rank writes itself.
    pub(super) unread: Vec<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where each stream of a rank goes: to a file that the rank holds, or to `console`, `file` and `filter`
    /// by the launcher.
    fn fate(destination: &Destination) -> String {
        let Destination::Pipe(copies) = destination else { return "its own file".into() };
        let places = [
            ("console", copies.on_console),
            ("file", copies.file.is_some()),
            ("filter", copies.filter.is_some()),
        ];
        places.iter().filter(|(_, is_so)| *is_so).map(|(name, _)| *name).collect::<Vec<_>>().join("+")
    }

    fn fates(options: LogOptions, ranks: usize) -> Vec<(String, String)> {
        let folder = tempfile::tempdir().unwrap();
        let options = LogOptions { folder: Some(folder.path().into()), ..options };
        let mut logs = Logs::open(options, "job", "tenfold-run-test-").unwrap();
        let round = logs.start_round(0, ranks).unwrap();
        round.iter().map(|rank| (fate(&rank.output), fate(&rank.error))).collect()
    }

    fn pair(output: &str, error: &str) -> (String, String) {
        (output.into(), error.into())
    }

    #[test]
    fn each_stream_goes_where_the_flags_say() {
        let select = |text| Some(parse_selection(text).unwrap());
        let none = LogOptions::default;
        assert_eq!(fates(none(), 1), [pair("console+file", "console+file")]);
        assert_eq!(
            fates(LogOptions { redirects: select("3"), ..none() }, 1),
            [pair("its own file", "its own file")]
        );
        assert_eq!(
            fates(LogOptions { redirects: select("1"), ..none() }, 1),
            [pair("its own file", "console")]
        );
        assert_eq!(
            fates(LogOptions { redirects: select("3"), tee: select("0:1"), ..none() }, 2),
            [pair("console+file", "its own file"), pair("its own file", "its own file")]
        );
        assert_eq!(fates(LogOptions { tee: select("0"), ..none() }, 1), [pair("console", "console")]);
        assert_eq!(
            fates(LogOptions { tee: select("2"), shown: Some(BTreeSet::from([1])), ..none() }, 2),
            [pair("", "its own file"), pair("console", "console+file")]
        );
        assert_eq!(
            fates(LogOptions { redirects: select("1"), output_words: vec!["a".into()], ..none() }, 1),
            [pair("file+filter", "console")]
        );
    }

    #[test]
    fn the_layout_is_torchruns() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("new/logs");
        let options = LogOptions { folder: Some(base.clone()), ..LogOptions::default() };
        let mut logs = Logs::open(options, "my/job", "tenfold-run-test-").unwrap();
        let run = logs.folder().unwrap().to_path_buf();
        assert_eq!(run.parent(), Some(base.as_path()));
        let name = run.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("my_job_") && name.len() == "my_job_".len() + 8, "{name}");
        for round in [0, 3] {
            let ranks = logs.start_round(round, 2).unwrap();
            let place = run.join(format!("attempt_{round}/1"));
            assert_eq!(ranks[1].traces.error_file, Some(place.join("error.json")));
            assert_eq!(ranks[1].traces.log_files, [place.join("stderr.log"), place.join("stdout.log")]);
            assert!(ranks[1].traces.log_files.iter().all(|file| file.is_file()));
        }
        assert_eq!(logs.reminder(), None);
    }

    #[test]
    fn a_process_that_joins_later_continues_the_files_of_its_rank() {
        let folder = tempfile::tempdir().unwrap();
        let redirects = Some(parse_selection("3").unwrap());
        let options = LogOptions { folder: Some(folder.path().into()), redirects, ..LogOptions::default() };
        let mut logs = Logs::open(options, "job", "tenfold-run-test-").unwrap();
        let first = logs.start_round(0, 2).unwrap().remove(1);
        let place = logs.folder().unwrap().join("attempt_0");
        let next = logs.of(0, &Writer::replacement(1, "0-4")).unwrap();
        assert_eq!(next.traces.log_files, first.traces.log_files);
        assert_eq!((fate(&next.output), fate(&next.error)), pair("its own file", "its own file"));
        assert_eq!(next.traces.error_file, Some(place.join("1/error-0-4.json")));
        // A spare cannot hold its files itself: they will be others when it is a rank.
        let spare = logs.of(0, &Writer::spare("0-2")).unwrap();
        assert_eq!((fate(&spare.output), fate(&spare.error)), pair("file", "file"));
        assert_eq!(spare.traces.log_files[1], place.join("spare-0-2/stdout.log"));
        let admitted = logs.of(0, &Writer::former_spare(1, "0-2")).unwrap();
        assert_eq!(fate(&admitted.output), "file");
        assert_eq!(admitted.traces.log_files, first.traces.log_files);
    }

    #[test]
    fn an_error_file_works_without_log_files_and_is_removed() {
        for options in [
            LogOptions::default(),
            LogOptions { folder: Some("/dev/null".into()), ..LogOptions::default() },
            LogOptions { redirects: Some(Selection::All(Streams::NONE)), ..LogOptions::default() },
        ] {
            let mut logs = Logs::open(options, "job", "tenfold-run-test-").unwrap();
            assert_eq!(logs.folder(), None);
            let rank = logs.start_round(0, 1).unwrap().remove(0);
            assert_eq!((fate(&rank.output), fate(&rank.error)), pair("console", "console"));
            assert!(rank.traces.log_files.is_empty());
            let file = rank.traces.error_file.unwrap();
            assert!(file.ends_with("attempt_0/0/error.json"), "{}", file.display());
            fs::write(&file, "{}").unwrap();
            drop(logs);
            assert!(!file.exists());
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_reported_before_anything_starts() {
        let folder = tempfile::tempdir().unwrap();
        let in_the_way = folder.path().join("file");
        fs::write(&in_the_way, "").unwrap();
        for (path, why) in [(in_the_way.clone(), "File exists"), (in_the_way.join("logs"), "Not a directory")]
        {
            let options = LogOptions { folder: Some(path.clone()), ..LogOptions::default() };
            assert_eq!(
                Logs::open(options, "job", "tenfold-run-test-").unwrap_err(),
                format!(
                    "cannot create the log folder `{}`: {why}\n  hint: choose another one with `--log-dir`",
                    path.display()
                )
            );
        }
    }

    #[test]
    fn a_later_round_continues_without_files_if_they_cannot_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let options = LogOptions { folder: Some(folder.path().into()), ..LogOptions::default() };
        let mut logs = Logs::open(options, "job", "tenfold-run-test-").unwrap();
        logs.start_round(0, 2).unwrap();
        let next = logs.folder().unwrap().join("attempt_1");
        fs::write(&next, "in the way").unwrap();
        let ranks = logs.start_round(1, 2).unwrap();
        assert_eq!((fate(&ranks[1].output), fate(&ranks[1].error)), pair("console", "console"));
        assert_eq!(ranks[1].traces.error_file, None);
        assert_eq!(
            logs.reminder().unwrap(),
            format!("{} is incomplete: it could not be written", next.display())
        );
    }

    #[test]
    fn a_full_disk_is_reported_once_for_each_file_and_again_at_the_end() {
        let incomplete = Incomplete::default();
        let full = || LogFile::open("/dev/full".into(), &incomplete).unwrap();
        let mut copies = Copies { file: Some(full()), filter: None, on_console: true };
        assert_eq!(
            copies.write(b"words", b"", "rank 3"),
            [
                "cannot write /dev/full: No space left on device; the output of rank 3 goes to the console only"
            ]
        );
        assert_eq!(copies.write(b"words", b"", "rank 3"), Vec::<String>::new());
        let filter = Filter { words: vec!["a".into()], cutter: Cutter::default(), file: full() };
        let mut copies = Copies { file: Some(full()), filter: Some(filter), on_console: false };
        assert_eq!(
            copies.write(b"b\na\na\n", b"", "rank 4"),
            [
                "cannot write /dev/full: No space left on device; the output of rank 4 is lost",
                "cannot write /dev/full: No space left on device; the lines of rank 4 are missing there"
            ]
        );
        let logs = |incomplete| Logs {
            options: LogOptions::default(),
            place: Place::Nowhere,
            begun: true,
            incomplete,
        };
        let reminder = logs(incomplete.clone()).reminder().unwrap();
        assert_eq!(reminder, "/dev/full is incomplete: it could not be written");
        add(&incomplete, Path::new("/other"));
        let reminder = logs(incomplete).reminder().unwrap();
        assert_eq!(reminder, "2 log files are incomplete, among them /dev/full: they could not be written");
    }
}
