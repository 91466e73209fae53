//! Which program the ranks run, found before anything is started.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// The words that every rank executes: a `.py` file under a Python, anything else as it is.
pub(super) fn resolve(words: &[OsString], python: Option<&Path>) -> Result<Vec<OsString>, Missing> {
    let program = &words[0];
    if Path::new(program).extension() != Some(OsStr::new("py")) {
        find(program)?;
        return Ok(words.to_vec());
    }
    if !Path::new(program).is_file() {
        return Err(Missing::File(program.clone()));
    }
    let interpreter = match python {
        Some(python) => find(python.as_os_str())?,
        None => ["python3", "python"]
            .into_iter()
            .find_map(|name| find(OsStr::new(name)).ok())
            .ok_or_else(|| Missing::Python(program.clone()))?,
    };
    Ok(std::iter::once(interpreter.into()).chain(words.iter().cloned()).collect())
}

/// A program as a shell finds it.
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

/// Why there is nothing to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missing {
    Program(OsString),
    File(OsString),
    Python(OsString),
    Permission(PathBuf),
}

impl Missing {
    /// As a shell tells it.
    pub(super) fn code(&self) -> u8 {
        match self {
            Missing::Program(_) | Missing::File(_) | Missing::Python(_) => super::NOT_FOUND,
            Missing::Permission(_) => super::NOT_RUNNABLE,
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Program(name) if name.as_encoded_bytes().contains(&b'/') => {
                write!(f, "there is no program `{}`", name.display())
            }
            Missing::Program(name) => {
                let name = name.display();
                write!(
                    f,
                    "there is no program `{name}` on PATH\n  hint: for a file of this folder write `./{name}`"
                )
            }
            Missing::File(name) => write!(f, "there is no file `{}`", name.display()),
            Missing::Python(program) => {
                let program = program.display();
                write!(
                    f,
                    "there is no python3 on PATH for `{program}`\n  hint: name a Python with `--python`"
                )
            }
            Missing::Permission(file) => {
                let file = file.display();
                write!(
                    f,
                    "`{file}` may not be executed\n  hint: `chmod +x {file}`, or name the program that reads it first"
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
        assert_eq!(resolve(&plain, None), Ok(plain));
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("train.py");
        std::fs::write(&script, "").unwrap();
        let script = script.into_os_string();
        let resolved = resolve(&[script.clone(), "--lr".into()], Some(Path::new("/bin/sh")));
        assert_eq!(resolved, Ok(vec!["/bin/sh".into(), script, "--lr".into()]));
    }

    #[test]
    fn what_cannot_run_is_told_with_what_to_do() {
        let says = |word: &str| {
            let missing = resolve(&words(&[word]), Some(Path::new("/nowhere/python"))).unwrap_err();
            (missing.to_string(), missing.code())
        };
        assert_eq!(
            says("no-such-program"),
            (
                "there is no program `no-such-program` on PATH\n  hint: for a file of this folder write \
                 `./no-such-program`"
                    .into(),
                127
            )
        );
        assert_eq!(says("./no-such-program"), ("there is no program `./no-such-program`".into(), 127));
        assert_eq!(says("no-such-file.py"), ("there is no file `no-such-file.py`".into(), 127));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data");
        std::fs::write(&file, "").unwrap();
        let file = file.display();
        let expected = format!(
            "`{file}` may not be executed\n  hint: `chmod +x {file}`, or name the program that reads it first"
        );
        assert_eq!(says(&file.to_string()), (expected, 126));
        let script = folder.path().join("train.py");
        std::fs::write(&script, "").unwrap();
        assert_eq!(says(script.to_str().unwrap()), ("there is no program `/nowhere/python`".into(), 127));
    }
}
