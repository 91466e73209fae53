//! Likely causes: what programs print when they fail, and what signals mean.

use std::path::Path;

use signal_hook::consts::{SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGPIPE, SIGQUIT};
use signal_hook::consts::{SIGSEGV, SIGSYS, SIGTERM, SIGXCPU, SIGXFSZ};

use tenfold_console::printable;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cause {
    pub(super) words: String,
    pub(super) hint: Option<String>,
}

pub(super) fn cause(words: &str, hint: &str) -> Option<Cause> {
    Some(Cause { words: words.into(), hint: (!hint.is_empty()).then(|| hint.into()) })
}

/// Something that programs print when they fail, in upper or lower case, and what it means.
pub(super) struct Saying {
    patterns: &'static [&'static str],
    means: Means,
}

enum Means {
    Always(&'static str, &'static str),
    /// The line may name the port.
    PortTaken,
    /// The line names the module.
    ModuleMissing,
}

/// Specific ones first.
pub(super) const SAYINGS: &[Saying] = &[
    Saying { patterns: &["address already in use", "eaddrinuse"], means: Means::PortTaken },
    Saying { patterns: &["no module named "], means: Means::ModuleMissing },
    Saying {
        patterns: &["cuda out of memory", "cuda error: out of memory", "hip out of memory"],
        means: Means::Always(
            "the GPU's memory is full",
            "use a smaller batch; `nvidia-smi` lists the processes on the GPU",
        ),
    },
    Saying {
        patterns: &["too many open files"],
        means: Means::Always("the limit of open files was reached", "show and raise it with `ulimit -n`"),
    },
    Saying {
        patterns: &["insufficient shared memory", "unable to allocate shared memory"],
        means: Means::Always(
            "shared memory is full",
            "check `df -h /dev/shm`; in Docker, use `--shm-size` or `--ipc=host`",
        ),
    },
    Saying {
        patterns: &["no space left on device"],
        means: Means::Always("a disk is full", "check `df -h`, and `df -h /dev/shm` for shared memory"),
    },
    Saying {
        patterns: &["cannot allocate memory"],
        means: Means::Always("the system is out of memory", "check `free -m` and `ulimit -v`"),
    },
];

impl Saying {
    pub(super) fn is_in(&self, line: &str) -> bool {
        let line = line.to_ascii_lowercase();
        self.patterns.iter().any(|pattern| line.contains(pattern))
    }

    pub(super) fn cause(&self, line: &str, program: &str) -> Cause {
        let (words, hint) = match self.means {
            Means::Always(words, hint) => (words.into(), hint.into()),
            Means::PortTaken => match port_in(line) {
                Some(port) => (
                    format!("port {port} is already in use"),
                    format!("find the process with `ss -ltnp 'sport = :{port}'`, or use another port"),
                ),
                None => (
                    "a port is already in use".into(),
                    "find the process with `ss -ltnp`, or use another port".into(),
                ),
            },
            Means::ModuleMissing => module_missing(line, program),
        };
        Cause { words, hint: Some(hint) }
    }
}

/// `port: 29500`, `port 29500`, `127.0.0.1:29500`, `('127.0.0.1', 29500)`.
fn port_in(line: &str) -> Option<u16> {
    let line = line.to_ascii_lowercase();
    let named = ["port: ", "port=", "port "].iter().filter_map(|marker| line.split_once(marker));
    let addresses = line.match_indices(':').filter(|(at, _)| {
        let before = line[..*at].bytes().next_back();
        before.is_some_and(|byte| byte.is_ascii_digit() || b"]*t".contains(&byte)) // …1, [::1], *, localhost
    });
    let addresses = addresses.map(|(at, _)| &line[at + 1..]);
    let pairs = line.match_indices("', ").map(|(at, marker)| &line[at + marker.len()..]);
    let places = named.map(|(_, behind)| behind).chain(pairs).chain(addresses);
    places
        .filter_map(|behind| {
            let digits = behind.len() - behind.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            behind[..digits].parse().ok().filter(|&port: &u16| port > 99) // a smaller number is a time or a line number
        })
        .next()
}

/// `ModuleNotFoundError: No module named 'numpy'`, and without quotes from `python -m`.
fn module_missing(line: &str, program: &str) -> (String, String) {
    const MARKER: &str = "no module named ";
    let at = line.to_ascii_lowercase().find(MARKER).map_or(line.len(), |at| at + MARKER.len());
    let name: String = line[at..].chars().filter(|c| !"'\"`".contains(*c)).take(100).collect();
    let name = printable(name.split([' ', ';', ',']).next().unwrap_or_default());
    let file = Path::new(program).file_name().unwrap_or_default();
    if !file.to_string_lossy().starts_with("python") {
        return (
            format!("the Python module `{name}` is missing"),
            "install it, or choose a Python with `--python`".into(),
        );
    }
    let package = name.split('.').next().unwrap_or_default();
    (
        format!("the Python module `{name}` is missing in {program}"),
        format!("run `{program} -m pip install {package}`, or choose another Python with `--python`"),
    )
}

/// What a signal means for a rank, if this launcher did not send it.
pub(super) fn meaning(signal: i32) -> Option<Cause> {
    match signal {
        SIGKILL => cause(
            "killed by a user, or by the kernel's OOM killer",
            "run `dmesg | grep -i oom` to see if it was the kernel",
        ),
        SIGBUS => cause(
            "access to memory that could not be provided: shared memory may be full",
            "check `df -h /dev/shm`; in Docker, use `--shm-size` or `--ipc=host`",
        ),
        SIGSEGV => cause(
            "invalid memory access: a bug in native code",
            "PYTHONFAULTHANDLER=1 shows where a Python program was",
        ),
        SIGILL => cause(
            "illegal instruction: this processor does not have it",
            "a library may be built for another processor: see `lscpu`",
        ),
        SIGFPE => cause("arithmetic error in native code, such as a division by zero", ""),
        SIGABRT => cause("aborted: a failed assertion or an uncaught exception in native code", ""),
        SIGTERM => cause("terminated from outside: by a user or a scheduler", ""),
        SIGINT | SIGQUIT | SIGHUP => cause("the signal was sent from outside", ""),
        SIGPIPE => cause("it wrote to a pipe or connection whose reader had closed it", ""),
        SIGXCPU => cause("it exceeded its limit of processor time", "`ulimit -t`"),
        SIGXFSZ => cause("a file exceeded the size limit", "`ulimit -f`"),
        SIGSYS => cause("a system call that is not permitted here, as in some containers", ""),
        _ => None,
    }
}
