//! Writes what the launcher reads from one stream of a rank, and handles files that cannot be written.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::lines::{Cutter, Piece};

/// Files that cannot be written are named one by one up to this many.
const NOTES_MAX: usize = 8;

/// Files that could not be written, of all rounds.
pub(super) type Incomplete = Arc<Mutex<Vec<PathBuf>>>;

pub(super) fn add(incomplete: &Incomplete, path: &Path) -> usize {
    let mut incomplete = incomplete.lock().unwrap_or_else(PoisonError::into_inner);
    if !incomplete.iter().any(|known| known == path) {
        incomplete.push(path.to_path_buf());
    }
    incomplete.len()
}

/// The system's error text, without its number.
pub(super) fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" (os error").map_or(text.clone(), |(words, _)| words.to_string())
}

#[derive(Debug)]
pub(crate) enum Destination {
    /// The rank writes there itself.
    File(File),
    /// The launcher reads it, and writes these.
    Pipe(Copies),
}

impl Destination {
    /// For `Command::stdout` and `Command::stderr`.
    pub(crate) fn stdio(&self) -> io::Result<Stdio> {
        match self {
            Destination::File(file) => Ok(file.try_clone()?.into()),
            Destination::Pipe(_) => Ok(Stdio::piped()),
        }
    }
}

/// Where the launcher passes on what it reads.
#[derive(Debug)]
pub(crate) struct Copies {
    pub(crate) file: Option<LogFile>,
    pub(crate) filter: Option<Filter>,
    pub(crate) on_console: bool,
}

impl Copies {
    pub(crate) fn console(on_console: bool) -> Self {
        Copies { file: None, filter: None, on_console }
    }

    /// Writes the files; returns notes for the user if output is lost from now on.
    pub(crate) fn write(&mut self, bytes: &[u8], prefix: &[u8], speaker: &str) -> Vec<String> {
        let mut notes = Vec::new();
        let fate = if self.on_console { "goes to the console only" } else { "is lost" };
        if let Some(file) = &mut self.file {
            notes.extend(file.write(bytes).map(|lost| format!("{lost}; the output of {speaker} {fate}")));
        }
        if let Some(filter) = &mut self.filter {
            notes.extend(
                filter
                    .take(bytes, prefix)
                    .map(|lost| format!("{lost}; the lines of {speaker} are missing there")),
            );
        }
        notes
    }

    /// Nothing will follow.
    pub(crate) fn finish(&mut self, prefix: &[u8]) {
        if let Some(filter) = &mut self.filter {
            filter.finish(prefix);
        }
    }
}

/// A file until it cannot be written.
#[derive(Debug)]
pub(crate) struct LogFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    lost: bool,
    incomplete: Incomplete,
}

impl LogFile {
    pub(super) fn open(path: PathBuf, incomplete: &Incomplete) -> Result<Self, String> {
        // Ranks share the filtered files, and a rank may share its own with processes that it starts: all of
        // them append.
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| format!("cannot write {}: {}", path.display(), describe(&error)))?;
        Ok(LogFile { path, file, lost: false, incomplete: incomplete.clone() })
    }

    /// Returns the reason the first time, unless other files have already reported it often enough.
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
pub(crate) struct Filter {
    pub(super) words: Vec<String>,
    pub(super) cutter: Cutter,
    pub(super) file: LogFile,
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
    use super::super::parse_words;
    use super::*;
    use std::fs;

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
                assert_eq!(copies.write(part, b"[7] ", "rank 7"), Vec::<String>::new());
            }
            copies.finish(b"[7] ");
            let found = fs::read_to_string(path).unwrap();
            assert_eq!(found, "[7] an apple\n[7] orange, late\n[7] last apple\n", "in parts of {size}");
        }
    }
}
