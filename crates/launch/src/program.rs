//! Finds the program that the ranks run, before anything is started.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use tenfold_console::Program;

use super::args::Kind;

/// The placeholder that torchrun fills in, anywhere in a word.
pub(super) const LOCAL_RANK: &str = "${local_rank}";

/// The words of the command that every rank executes.
pub(super) fn resolve(
    words: &[OsString],
    kind: Kind,
    python: Option<&Path>,
) -> Result<Vec<OsString>, Missing> {
    let program = &words[0];
    let is_python_file = Path::new(program).extension() == Some(OsStr::new("py"));
    if kind == Kind::Plain || kind == Kind::ByName && !is_python_file {
        find(program)?;
        return Ok(words.to_vec());
    }
    if kind == Kind::PythonFile && !Path::new(program).is_absolute() {
        return Err(Missing::Absolute(program.clone()));
    }
    if kind != Kind::Module && !Path::new(program).is_file() {
        return Err(Missing::File(program.clone()));
    }
    let chosen = std::env::var_os("PYTHON_EXEC").filter(|python| !python.is_empty());
    let interpreter = match (python, &chosen) {
        (Some(python), _) => find(python.as_os_str())?,
        (None, Some(python)) => find(python)?,
        // `pip install` puts the command beside the Python that has the package.
        (None, None) => Program::own()
            .python()
            .or_else(|| ["python3", "python"].into_iter().find_map(|name| find(OsStr::new(name)).ok()))
            .ok_or_else(|| Missing::Python(program.clone()))?,
    };
    let options = ["-u"].into_iter().chain((kind == Kind::Module).then_some("-m")).map(OsString::from);
    Ok(std::iter::once(interpreter.into()).chain(options).chain(words.iter().cloned()).collect())
}

/// The words of one rank.
pub(super) fn fill_in(words: &[OsString], local_rank: usize) -> Vec<OsString> {
    let fill_in = |word: &OsString| match word.to_str() {
        Some(text) if text.contains(LOCAL_RANK) => text.replace(LOCAL_RANK, &local_rank.to_string()).into(),
        _ => word.clone(),
    };
    words.iter().map(fill_in).collect()
}

/// Finds a program as a shell does.
fn find(name: &OsStr) -> Result<PathBuf, Missing> {
    let candidates: Vec<PathBuf> = if name.as_encoded_bytes().contains(&b'/') {
        vec![name.into()]
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|folder| folder.join(name)).collect()
    };
    let files = || candidates.iter().filter(|candidate| candidate.is_file());
    let runnable = files().find(|file| access(file.as_path(), Access::EXEC_OK).is_ok());
    runnable.cloned().ok_or_else(|| match files().next() {
        Some(file) => Missing::Permission(file.clone()),
        None => Missing::Program(name.into()),
    })
}

/// The system's error for a file that exists but cannot be run.
pub(super) fn cannot_run(program: &OsStr, error: &io::Error) -> String {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "\n  hint: check that the interpreter named in its first line exists",
        io::ErrorKind::PermissionDenied => {
            "\n  hint: check that it and the interpreter named in its first line are executable"
        }
        _ => "",
    };
    format!("cannot run `{}`: {error}{hint}", program.display())
}

/// Why there is nothing to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missing {
    Program(OsString),
    File(OsString),
    /// `--run-path` requires the whole path, as in torchrun.
    Absolute(OsString),
    Python(OsString),
    Permission(PathBuf),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Program(name) if name.as_encoded_bytes().contains(&b'/') => {
                write!(f, "program `{}` not found", name.display())
            }
            Missing::Program(name) => {
                let name = name.display();
                write!(
                    f,
                    "program `{name}` not found on PATH\n  hint: to run a file of this folder, write `./{name}`"
                )
            }
            Missing::Absolute(name) => {
                let name = name.display();
                write!(f, "--run-path: `{name}` is not an absolute path\n  hint: write `$PWD/{name}`")
            }
            Missing::File(name) => write!(f, "file `{}` not found", name.display()),
            Missing::Python(program) => {
                let program = program.display();
                write!(f, "no python3 on PATH for `{program}`\n  hint: choose a Python with `--python`")
            }
            Missing::Permission(file) => {
                let file = file.display();
                write!(
                    f,
                    "`{file}` is not executable\n  hint: run `chmod +x {file}`, or put its interpreter before it"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn a_program_runs_as_it_is_and_a_python_file_under_python() {
        let plain = words(&["sh", "-c", "true"]);
        assert_eq!(resolve(&plain, Kind::ByName, None), Ok(plain.clone()));
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("train.py");
        std::fs::write(&script, "").unwrap();
        let script = script.into_os_string();
        let python = Some(Path::new("/bin/sh"));
        let typed = [script.clone(), "--lr".into()];
        let under_python = Ok(vec!["/bin/sh".into(), "-u".into(), script.clone(), "--lr".into()]);
        assert_eq!(resolve(&typed, Kind::ByName, python), under_python);
        assert_eq!(resolve(&typed, Kind::PythonFile, python), under_python);
        assert_eq!(resolve(&typed, Kind::Plain, python), Err(Missing::Permission(script.into())));
        let module = resolve(&words(&["package.train", "-v"]), Kind::Module, python);
        assert_eq!(module, Ok(words(&["/bin/sh", "-u", "-m", "package.train", "-v"])));
    }

    #[test]
    fn the_local_rank_is_filled_in_where_torchrun_does() {
        let typed = words(&["train.py", "--device=cuda:${local_rank}", "$local_rank", "${rank}"]);
        assert_eq!(fill_in(&typed, 3), words(&["train.py", "--device=cuda:3", "$local_rank", "${rank}"]));
    }

    #[test]
    fn a_program_that_cannot_run_is_reported_with_a_remedy() {
        let says_of = |word: &str, kind| {
            resolve(&words(&[word]), kind, Some(Path::new("/nowhere/python"))).unwrap_err().to_string()
        };
        let says = |word: &str| says_of(word, Kind::ByName);
        assert_eq!(
            says("no-such-program"),
            "program `no-such-program` not found on PATH\n  hint: to run a file of this folder, write \
             `./no-such-program`"
        );
        assert_eq!(says("./no-such-program"), "program `./no-such-program` not found");
        assert_eq!(says("no-such-file.py"), "file `no-such-file.py` not found");
        assert_eq!(
            says_of("train.py", Kind::PythonFile),
            "--run-path: `train.py` is not an absolute path\n  hint: write `$PWD/train.py`"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data");
        std::fs::write(&file, "").unwrap();
        let file = file.display();
        let expected = format!(
            "`{file}` is not executable\n  hint: run `chmod +x {file}`, or put its interpreter before it"
        );
        assert_eq!(says(&file.to_string()), expected);
        let script = folder.path().join("train.py");
        std::fs::write(&script, "").unwrap();
        assert_eq!(says(script.to_str().unwrap()), "program `/nowhere/python` not found");
    }
}
