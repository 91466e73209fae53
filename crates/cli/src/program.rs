//! How this command starts itself again.
//!
//! Ranks of `demo` and `bench` are child processes that run the same code by hidden subcommands. In the binary that is
//! the executable itself; inside the Python package there is no such executable, and it is `python -m tenfold`.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// The command line that starts `tenfold`, to which arguments are added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    path: OsString,
    arguments: Vec<OsString>,
    is_python: bool,
}

static OWN: OnceLock<Program> = OnceLock::new();

impl Program {
    /// A program that is `tenfold` when called with these arguments first, such as a Python with `-m tenfold`.
    pub fn new(path: impl Into<OsString>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        Program { path: path.into(), arguments: arguments.into_iter().collect(), is_python: false }
    }

    /// The Python `path`, in which this command is the module `tenfold`.
    pub fn in_python(path: impl Into<OsString>) -> Self {
        Program { is_python: true, ..Program::new(path, ["-m".into(), "tenfold".into()]) }
    }

    /// The executable of this process; the `tenfold` on PATH if the system does not tell which one that is.
    pub fn this_executable() -> Self {
        let path = std::env::current_exe().map_or_else(|_| OsString::from("tenfold"), OsString::from);
        Program::new(path, [])
    }

    /// What `main` was told this process is.
    pub(crate) fn own() -> &'static Program {
        OWN.get_or_init(Program::this_executable)
    }

    /// The first call counts: a process does not become another program.
    pub(crate) fn make_own(self) {
        let _the_first = OWN.get_or_init(|| self);
    }

    /// The Python that this command runs in, if it does.
    pub(crate) fn python(&self) -> Option<&Path> {
        self.is_python.then(|| Path::new(&self.path))
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments);
        command
    }
}
