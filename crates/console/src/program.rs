//! How this command starts itself again.
//!
//! The guard of `run` and the ranks of `demo` and `bench` are child processes that run the same code by hidden subcommands.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The command line that starts `tenfold`, to which arguments are added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    path: OsString,
    arguments: Vec<OsString>,
}

static OWN: OnceLock<Program> = OnceLock::new();

impl Program {
    /// A program that is `tenfold` when called with these arguments first.
    pub fn new(path: impl Into<OsString>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        Program { path: path.into(), arguments: arguments.into_iter().collect() }
    }

    /// The executable of this process; the `tenfold` on PATH if the system does not know which one that is.
    pub fn this_executable() -> Self {
        let path = std::env::current_exe().map_or_else(|_| OsString::from("tenfold"), OsString::from);
        Program::new(path, [])
    }

    /// The program of this process.
    pub fn own() -> &'static Program {
        OWN.get_or_init(Program::this_executable)
    }

    /// Makes this the program of this process, unless one was set or used before.
    pub fn make_own(self) {
        let _the_first = OWN.get_or_init(|| self);
    }

    /// The Python of the virtual environment that the executable is installed in, if it is in one.
    pub fn python(&self) -> Option<PathBuf> {
        let folder = Path::new(&self.path).parent()?;
        let prefix = folder.parent()?;
        // What `python -m venv` and conda leave at the top of an environment.
        let is_environment = prefix.join("pyvenv.cfg").is_file() || prefix.join("conda-meta").is_dir();
        let python = folder.join("python");
        (is_environment && python.is_file()).then_some(python)
    }

    /// A command with the first words filled in.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_in_an_environment_uses_its_python_and_others_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        std::fs::write(bin.join("python"), "").unwrap();
        let program = Program::new(bin.join("tenfold"), []);
        // /usr/local/bin may hold a Python too, and the user may have activated another environment.
        assert_eq!(program.python(), None);
        std::fs::write(folder.path().join("pyvenv.cfg"), "").unwrap();
        assert_eq!(program.python(), Some(bin.join("python")));
        std::fs::remove_file(bin.join("python")).unwrap();
        assert_eq!(program.python(), None);
        assert_eq!(Program::new("tenfold", []).python(), None);
    }
}
