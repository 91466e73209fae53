//! Files for what ranks say: which streams have one, where it is, and what happens when it cannot be written.
//!
//! Flags and layout are torchrun's: `<log dir>/<run id>_<random>/attempt_<round>/<local rank>/stdout.log`, `stderr.log`
//! and `error.json`, the last for programs that use `torch.distributed.elastic`'s `record`. A stream can go to the
//! console, to its file (`--redirects`), or to both (`--tee`). Files hold the bytes as the rank wrote them.
//!
//! A stream that goes to its file alone is not read by the launcher: the rank holds the file itself. All others come
//! through a pipe, and the launcher writes their files. When it cannot, it says so once, and the ranks go on.
//!
//! How a launcher uses it: [`Logs::open`] before anything starts; [`Logs::start_round`] for each round gives one
//! [`RankLogs`] for each local rank; the [`Destination::stdio`] of its streams and the path of its error file go to the rank's process,
//! and it becomes part of the rank's [`Pipes`](super::pipes::Pipes). At the end, [`Logs::reminder`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::SIGXFSZ;
use tempfile::TempDir;

use super::failure::first_bytes;
use super::lines::{Cutter, Piece};
use super::output::Stream;

/// Of a run id, in the name of its folder: file names have at most 255 bytes.
const RUN_ID_MAX: usize = 128;
/// Files that cannot be written are named one by one up to this many.
const NOTES_MAX: usize = 8;

/// A choice of a rank's streams, as torchrun's flags tell it: 0 none, 1 standard output, 2 standard error, 3 both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Streams {
    output: bool,
    error: bool,
}

impl Streams {
    const NONE: Streams = Streams { output: false, error: false };
    const BOTH: Streams = Streams { output: true, error: true };

    fn parse(digit: &str) -> Option<Self> {
        match digit {
            "0" => Some(Streams::NONE),
            "1" => Some(Streams { output: true, error: false }),
            "2" => Some(Streams { output: false, error: true }),
            "3" => Some(Streams::BOTH),
            _ => None,
        }
    }

    fn has(self, stream: Stream) -> bool {
        match stream {
            Stream::Output => self.output,
            Stream::Error => self.error,
        }
    }
}

/// The value of `--redirects` and `--tee`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Selection {
    /// The same for all ranks.
    All(Streams),
    /// By local rank; the others have none.
    Some(BTreeMap<usize, Streams>),
}

impl Selection {
    fn of(&self, local_rank: usize) -> Streams {
        match self {
            Selection::All(streams) => *streams,
            Selection::Some(ranks) => ranks.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    fn has_any(&self) -> bool {
        match self {
            Selection::All(streams) => *streams != Streams::NONE,
            Selection::Some(ranks) => ranks.values().any(|&streams| streams != Streams::NONE),
        }
    }
}

/// `3`, or `0:3,1:1` by local rank.
pub(super) fn parse_selection(text: &str) -> Result<Selection, String> {
    if let Some(streams) = Streams::parse(text) {
        return Ok(Selection::All(streams));
    }
    let entries = text.split(',').map(|entry| {
        let (rank, streams) = entry.split_once(':')?;
        Some((parse_rank(rank)?, Streams::parse(streams)?))
    });
    entries.collect::<Option<BTreeMap<_, _>>>().map(Selection::Some).ok_or_else(|| {
        format!(
            "`{text}` names no streams: write 0 for none, 1 for standard output, 2 for standard error, 3 for both, or \
             such a number for some local ranks: 0:3,1:2"
        )
    })
}

/// `0,2`: the value of `--local-ranks-filter`.
pub(super) fn parse_ranks(text: &str) -> Result<BTreeSet<usize>, String> {
    text.split(',').map(|rank| parse_rank(rank.trim())).collect::<Option<_>>().ok_or_else(|| {
        format!("`{text}` names no ranks: write local ranks with commas between them, such as 0,2")
    })
}

/// Digits alone: no sign, no blanks.
fn parse_rank(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// `apple,orange`: the value of `--duplicate-stdout-filters`; two commas are one that belongs to a word.
pub(super) fn parse_words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut characters) = (Vec::new(), String::new(), text.chars().peekable());
    while let Some(character) = characters.next() {
        if character != ',' || characters.next_if_eq(&',').is_some() {
            word.push(character);
        } else {
            words.push(std::mem::take(&mut word));
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

/// What the flags say.
#[derive(Clone, Debug, Default)]
pub(super) struct LogOptions {
    /// `--log-dir`
    pub(super) folder: Option<PathBuf>,
    pub(super) redirects: Option<Selection>,
    pub(super) tee: Option<Selection>,
    /// `--local-ranks-filter`: the only ones on the console.
    pub(super) shown: Option<BTreeSet<usize>>,
    /// `--duplicate-stdout-filters` and `--duplicate-stderr-filters`
    pub(super) output_words: Vec<String>,
    pub(super) error_words: Vec<String>,
}

impl LogOptions {
    /// As in torchrun, `--log-dir /dev/null` is for people who want no file at all.
    fn wants_files(&self) -> bool {
        let folder = self.folder.as_deref();
        if folder == Some(Path::new("/dev/null")) {
            return false;
        }
        let words = !self.output_words.is_empty() || !self.error_words.is_empty();
        let chosen = [&self.redirects, &self.tee].into_iter().flatten().any(Selection::has_any);
        folder.is_some() || chosen || words
    }

    /// A log folder and no word about streams: all of them, on the console too. (torchrun would write no file.)
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
    /// The first round has its folder; what fails later does not stop anybody.
    begun: bool,
    incomplete: Incomplete,
}

#[derive(Debug)]
enum Place {
    /// `<log dir>/<run id>_<random>`, which stays.
    Kept(PathBuf),
    /// For error files alone; goes with the launcher.
    Private(TempDir),
    /// Not even a temporary folder can be had, and nobody asked for files.
    Nowhere,
}

/// Files that could not be written, of all rounds.
type Incomplete = Arc<Mutex<Vec<PathBuf>>>;

fn add(incomplete: &Incomplete, path: &Path) -> usize {
    let mut incomplete = incomplete.lock().unwrap_or_else(PoisonError::into_inner);
    if !incomplete.iter().any(|known| known == path) {
        incomplete.push(path.to_path_buf());
    }
    incomplete.len()
}

impl Logs {
    /// Makes the run's folder. The error is for people, and comes before anything is started.
    ///
    /// `private` is how the name of a folder begins that goes with the launcher.
    pub(super) fn open(options: LogOptions, run_id: &str, private: &str) -> Result<Self, String> {
        let place = if options.wants_files() {
            // With `ulimit -f` a file that is long enough would end the launcher; now it is like a full disk.
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

    /// What the ranks of a round are given, by local rank. Fails in the first round only.
    pub(super) fn start_round(&mut self, round: u64, local_ranks: usize) -> Result<Vec<RankLogs>, String> {
        let folder = match &self.place {
            Place::Kept(folder) => Some(folder.as_path()),
            Place::Private(folder) => Some(folder.path()),
            Place::Nowhere => None,
        };
        let attempt = folder.map(|folder| folder.join(format!("attempt_{round}")));
        let mut ranks = Vec::with_capacity(local_ranks);
        for local_rank in 0..local_ranks {
            let made = attempt.as_deref().map(|attempt| {
                let folder = attempt.join(local_rank.to_string());
                fs::create_dir_all(&folder)
                    .map(|()| folder.clone())
                    .map_err(|error| cannot_make(&folder, &error))
            });
            ranks.push(match made.transpose().and_then(|folder| self.rank(local_rank, folder.as_deref())) {
                Ok(rank) => rank,
                Err(error) if !self.begun && self.folder().is_some() => return Err(error),
                Err(_) => {
                    // Ranks go on without files; the reminder will say which.
                    if let Some(attempt) = &attempt {
                        add(&self.incomplete, attempt);
                    }
                    self.rank(local_rank, None)?
                }
            });
        }
        self.begun = true;
        Ok(ranks)
    }

    fn rank(&self, local_rank: usize, folder: Option<&Path>) -> Result<RankLogs, String> {
        let error_file = folder.map(|folder| folder.join("error.json"));
        let mut traces = Traces { error_file, ..Traces::default() };
        // Standard error first: it is read first when something failed.
        let error = self.destination(Stream::Error, local_rank, folder, &mut traces)?;
        let output = self.destination(Stream::Output, local_rank, folder, &mut traces)?;
        Ok(RankLogs { output, error, traces })
    }

    fn destination(
        &self,
        stream: Stream,
        local_rank: usize,
        folder: Option<&Path>,
        traces: &mut Traces,
    ) -> Result<Destination, String> {
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
        if on_console || filter.is_some() {
            return Ok(Destination::Pipe(Copies { file: Some(file), filter, on_console }));
        }
        traces.unread.push(file.path);
        Ok(Destination::File(file.file))
    }

    /// Which files could not be written, for the end; one line.
    pub(super) fn reminder(&self) -> Option<String> {
        let incomplete = self.incomplete.lock().unwrap_or_else(PoisonError::into_inner);
        match incomplete.as_slice() {
            [] => None,
            [one] => Some(format!("{} is not complete: it could not be written", one.display())),
            [first, others @ ..] => {
                let (count, first) = (others.len() + 1, first.display());
                Some(format!(
                    "{count} log files are not complete, {first} among them: they could not be written"
                ))
            }
        }
    }
}

/// A folder that no other user may look into, whatever the umask says: what programs print may be anything.
fn only_ours(name: &str) -> tempfile::Builder<'_, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(name).permissions(fs::Permissions::from_mode(0o700));
    builder
}

fn make_run_folder(folder: Option<&Path>, run_id: &str) -> Result<PathBuf, String> {
    let base = match folder {
        Some(folder) => {
            fs::create_dir_all(folder).map_err(|error| cannot_make(folder, &error))?;
            // The summary and the ranks' environment name files by paths that hold in any folder.
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
        "cannot make the log folder `{}`: {what}\n  hint: name another one with `--log-dir`",
        folder.display()
    )
}

/// In the system's words, without its number.
fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" (os error").map_or(text.clone(), |(words, _)| words.to_string())
}

/// Where one rank's words go.
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

#[derive(Debug)]
pub(super) enum Destination {
    /// The rank writes there itself.
    File(File),
    /// The launcher reads it, and writes these.
    Pipe(Copies),
}

impl Destination {
    /// For `Command::stdout` and `Command::stderr`.
    pub(super) fn stdio(&self) -> io::Result<Stdio> {
        match self {
            Destination::File(file) => Ok(file.try_clone()?.into()),
            Destination::Pipe(_) => Ok(Stdio::piped()),
        }
    }
}

/// Where the launcher passes on what it reads.
#[derive(Debug)]
pub(super) struct Copies {
    pub(super) file: Option<LogFile>,
    pub(super) filter: Option<Filter>,
    pub(super) on_console: bool,
}

impl Copies {
    pub(super) fn console(on_console: bool) -> Self {
        Copies { file: None, filter: None, on_console }
    }

    /// Writes the files; notes for people if something is lost from now on.
    pub(super) fn write(&mut self, bytes: &[u8], prefix: &[u8], rank: usize) -> Vec<String> {
        let mut notes = Vec::new();
        let fate = if self.on_console { "go to the console only" } else { "are lost" };
        if let Some(file) = &mut self.file {
            notes.extend(file.write(bytes).map(|lost| format!("{lost}; rank {rank}'s words {fate}")));
        }
        if let Some(filter) = &mut self.filter {
            notes.extend(
                filter.take(bytes, prefix).map(|lost| format!("{lost}; rank {rank} is missing there")),
            );
        }
        notes
    }

    /// Nothing will follow.
    pub(super) fn finish(&mut self, prefix: &[u8]) {
        if let Some(filter) = &mut self.filter {
            filter.finish(prefix);
        }
    }
}

/// A file until it cannot be written.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    lost: bool,
    incomplete: Incomplete,
}

impl LogFile {
    fn open(path: PathBuf, incomplete: &Incomplete) -> Result<Self, String> {
        // Ranks share the filtered ones, and a rank may share its own with what it starts: all of them append.
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| format!("cannot write {}: {}", path.display(), describe(&error)))?;
        Ok(LogFile { path, file, lost: false, incomplete: incomplete.clone() })
    }

    /// Says the first time why it cannot, unless others have said so often enough.
    fn write(&mut self, bytes: &[u8]) -> Option<String> {
        if self.lost {
            return None;
        }
        let error = self.file.write_all(bytes).err()?;
        self.lost = true;
        (add(&self.incomplete, &self.path) <= NOTES_MAX)
            .then(|| format!("cannot write {}: {}", self.path.display(), describe(&error)))
    }
}

/// Copies lines with certain words to a file that all ranks share, behind their prefix.
#[derive(Debug)]
pub(super) struct Filter {
    words: Vec<String>,
    cutter: Cutter,
    file: LogFile,
}

impl Filter {
    fn take(&mut self, bytes: &[u8], prefix: &[u8]) -> Option<String> {
        let Filter { words, cutter, file } = self;
        let mut lost = None;
        cutter.take(bytes, |piece| lost = lost.take().or(copy(piece, prefix, words, file)));
        lost
    }

    fn finish(&mut self, prefix: &[u8]) {
        let Filter { words, cutter, file } = self;
        cutter.cut(&mut |piece| {
            let _no_more_notes = copy(piece, prefix, words, file);
        });
    }
}

fn copy(piece: Piece<'_>, prefix: &[u8], words: &[String], file: &mut LogFile) -> Option<String> {
    let Piece::Line(line) = piece else { return None };
    let is_in = |word: &String| line.windows(word.len()).any(|window| window == word.as_bytes());
    words.iter().any(is_in).then(|| file.write(&[prefix, line, b"\n"].concat()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams(number: usize) -> Streams {
        Streams { output: number & 1 == 1, error: number & 2 == 2 }
    }

    #[test]
    fn streams_are_chosen_as_torchrun_reads_them() {
        for number in 0..4 {
            assert_eq!(parse_selection(&number.to_string()), Ok(Selection::All(streams(number))));
        }
        let some = parse_selection("0:3,1:0,12:1,3:2").unwrap();
        let of: Vec<Streams> = [0, 1, 2, 3, 12].map(|rank| some.of(rank)).to_vec();
        assert_eq!(of, [3, 0, 0, 2, 1].map(streams));
        for wrong in [
            "",
            "4",
            "-1",
            "a",
            "0:",
            ":3",
            "0:4",
            "0:3,",
            "0:3 ,1:1",
            "+0:3",
            "0:3:1",
            "99999999999999999999:1",
        ] {
            assert_eq!(
                parse_selection(wrong),
                Err(format!(
                    "`{wrong}` names no streams: write 0 for none, 1 for standard output, 2 for standard error, 3 for \
                     both, or such a number for some local ranks: 0:3,1:2"
                ))
            );
        }
        assert_eq!(parse_ranks("0,2"), Ok(BTreeSet::from([0, 2])));
        for wrong in ["", "x", "0,", "-1"] {
            let error =
                format!("`{wrong}` names no ranks: write local ranks with commas between them, such as 0,2");
            assert_eq!(parse_ranks(wrong), Err(error));
        }
        assert_eq!(parse_words("apple,orange"), ["apple", "orange"]);
        assert_eq!(parse_words("a,,b,c"), ["a,b", "c"]);
        assert_eq!(parse_words(""), Vec::<String>::new());
    }

    /// Where each stream of a rank goes: to a file that it holds, or `console`, `file` and `filter` by the launcher.
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
    fn an_error_file_has_a_place_without_log_files_and_none_is_left_behind() {
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
    fn a_folder_that_cannot_be_made_is_told_before_anything_starts() {
        let folder = tempfile::tempdir().unwrap();
        let in_the_way = folder.path().join("file");
        fs::write(&in_the_way, "").unwrap();
        for (path, why) in [(in_the_way.clone(), "File exists"), (in_the_way.join("logs"), "Not a directory")]
        {
            let options = LogOptions { folder: Some(path.clone()), ..LogOptions::default() };
            assert_eq!(
                Logs::open(options, "job", "tenfold-run-test-").unwrap_err(),
                format!(
                    "cannot make the log folder `{}`: {why}\n  hint: name another one with `--log-dir`",
                    path.display()
                )
            );
        }
    }

    #[test]
    fn a_later_round_goes_on_without_files_if_there_can_be_none() {
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
            format!("{} is not complete: it could not be written", next.display())
        );
    }

    #[test]
    fn a_full_disk_is_told_once_for_each_file_and_again_at_the_end() {
        let incomplete = Incomplete::default();
        let full = || LogFile::open("/dev/full".into(), &incomplete).unwrap();
        let mut copies = Copies { file: Some(full()), filter: None, on_console: true };
        assert_eq!(
            copies.write(b"words", b"", 3),
            ["cannot write /dev/full: No space left on device; rank 3's words go to the console only"]
        );
        assert_eq!(copies.write(b"words", b"", 3), Vec::<String>::new());
        let filter = Filter { words: vec!["a".into()], cutter: Cutter::default(), file: full() };
        let mut copies = Copies { file: Some(full()), filter: Some(filter), on_console: false };
        assert_eq!(
            copies.write(b"b\na\na\n", b"", 4),
            [
                "cannot write /dev/full: No space left on device; rank 4's words are lost",
                "cannot write /dev/full: No space left on device; rank 4 is missing there"
            ]
        );
        let logs = |incomplete| Logs {
            options: LogOptions::default(),
            place: Place::Nowhere,
            begun: true,
            incomplete,
        };
        let reminder = logs(incomplete.clone()).reminder().unwrap();
        assert_eq!(reminder, "/dev/full is not complete: it could not be written");
        add(&incomplete, Path::new("/other"));
        let reminder = logs(incomplete).reminder().unwrap();
        assert_eq!(reminder, "2 log files are not complete, /dev/full among them: they could not be written");
    }

    #[test]
    fn matching_lines_are_copied_whole_however_they_arrive() {
        let folder = tempfile::tempdir().unwrap();
        let text = "an apple\npear\n90 % apple\rorange, late\nlast apple";
        for size in 1..=text.len() {
            let path = folder.path().join(size.to_string());
            let file = LogFile::open(path.clone(), &Incomplete::default()).unwrap();
            let words = parse_words("apple,orange");
            let filter = Some(Filter { words, cutter: Cutter::default(), file });
            let mut copies = Copies { file: None, filter, on_console: true };
            for part in text.as_bytes().chunks(size) {
                assert_eq!(copies.write(part, b"[7] ", 7), Vec::<String>::new());
            }
            copies.finish(b"[7] ");
            let found = fs::read_to_string(path).unwrap();
            assert_eq!(found, "[7] an apple\n[7] orange, late\n[7] last apple\n", "in parts of {size}");
        }
    }
}
