//! What users choose about the recorder: c10d's variables, and those of older PyTorch that mean the same.

use std::path::PathBuf;
use std::time::Duration;

use super::ring::CAPACITY_MAX;
use crate::environment::Variable;
use crate::fault::Fault;

/// c10d's default.
const CAPACITY: usize = 2000;

/// c10d's default.
const DUMP_TIME: Duration = Duration::from_secs(15);

/// Where it is said how files are called. Ours comes first: PyTorch's own recorder writes files of the name that `TORCH_FR_…` says.
const PREFIXES: [&str; 3] =
    ["TENFOLD_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"];

/// What c10d calls its files, in the cache folder.
const FILE_NAME: &str = "torch/comm_lib_trace_rank_";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// `TORCH_FR_BUFFER_SIZE`: operations that are remembered; 0 turns the recorder off.
    pub capacity: usize,
    /// `TORCH_FR_CPP_STACK`, or `TENFOLD_FR_STACK`: where calls come from.
    pub stacks: bool,
    /// `TENFOLD_FR_DUMP_TEMP_FILE`, `TORCH_FR_DUMP_TEMP_FILE`: to which the rank is appended.
    pub prefix: PathBuf,
    /// `TORCH_FR_DUMP_DYNAMIC_FILE_NAME`: look the prefix up at each dump.
    pub dynamic_prefix: bool,
    /// `TORCH_FR_DUMP_ON_TIMEOUT`: write a file when a group fails.
    pub dump_on_failure: bool,
    /// `TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC`: how long a failed call waits for that file.
    pub dump_time: Duration,
    /// `TORCH_INCLUDE_STACK_TRACE` and `TORCH_INCLUDE_ONLY_ACTIVE`: what a dump has in it unless the caller says.
    pub include_stacks: bool,
    pub only_active: bool,
    /// `TENFOLD_FR_SIGNAL`: a signal that makes the process write a file.
    pub signal: Option<i32>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            capacity: CAPACITY,
            stacks: false,
            prefix: PathBuf::from(FILE_NAME),
            dynamic_prefix: false,
            dump_on_failure: true,
            dump_time: DUMP_TIME,
            include_stacks: true,
            only_active: false,
            signal: None,
        }
    }
}

/// Gives a variable that is set, and not empty.
pub(crate) type LookUp<'a> = &'a dyn Fn(&'static str) -> Result<Option<Variable>, Fault>;

impl Settings {
    pub(crate) fn parse(look_up: LookUp<'_>) -> Result<Settings, Fault> {
        let first = |names: &[&'static str]| -> Result<Option<Variable>, Fault> {
            for name in names {
                if let Some(variable) = look_up(name)? {
                    return Ok(Some(variable));
                }
            }
            Ok(None)
        };
        let truth = |names: &[&'static str], default: bool| {
            first(names)?.map_or(Ok(default), |variable| variable.truth())
        };
        let number = |names: &[&'static str], default: usize| {
            first(names)?.map_or(Ok(default), |variable| variable.number())
        };
        let capacity = number(&["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"], CAPACITY)?;
        let dump_time = number(
            &["TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"],
            DUMP_TIME.as_millis() as usize,
        )?;
        let stacks = ["TENFOLD_FR_STACK", "TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK"];
        Ok(Settings {
            capacity: capacity.min(CAPACITY_MAX),
            stacks: truth(&stacks, false)?,
            prefix: Settings::prefix(look_up)?,
            dynamic_prefix: truth(&["TORCH_FR_DUMP_DYNAMIC_FILE_NAME"], false)?,
            dump_on_failure: truth(&["TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"], true)?,
            dump_time: Duration::from_millis(dump_time as u64),
            include_stacks: truth(&["TORCH_INCLUDE_STACK_TRACE"], true)?,
            only_active: truth(&["TORCH_INCLUDE_ONLY_ACTIVE"], false)?,
            signal: look_up("TENFOLD_FR_SIGNAL")?.map(|variable| variable.signal()).transpose()?,
        })
    }

    /// How names of dump files begin.
    pub(crate) fn prefix(look_up: LookUp<'_>) -> Result<PathBuf, Fault> {
        for name in PREFIXES {
            if let Some(variable) = look_up(name)? {
                return Ok(variable.value.into());
            }
        }
        if let Some(cache) = look_up("XDG_CACHE_HOME")? {
            return Ok(PathBuf::from(cache.value).join(FILE_NAME));
        }
        let home =
            look_up("HOME")?.map_or_else(std::env::temp_dir, |home| PathBuf::from(home.value).join(".cache"));
        Ok(home.join(FILE_NAME))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(variables: &[(&str, &str)]) -> Result<Settings, Fault> {
        Settings::parse(&|name| {
            let value = variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            Variable::of(name, value.unwrap_or_default().into())
        })
    }

    #[test]
    fn defaults_are_c10ds() {
        let settings = parse(&[("HOME", "/home/me")]).unwrap();
        let prefix = PathBuf::from("/home/me/.cache/torch/comm_lib_trace_rank_");
        assert_eq!(settings, Settings { prefix, ..Settings::default() });
        assert_eq!((settings.capacity, settings.dump_time), (2000, Duration::from_secs(15)));
    }

    #[test]
    fn newer_names_win_over_older_ones() {
        let both = [("TORCH_NCCL_TRACE_BUFFER_SIZE", "7"), ("TORCH_FR_BUFFER_SIZE", "9")];
        assert_eq!(parse(&both).unwrap().capacity, 9);
        assert_eq!(parse(&both[..1]).unwrap().capacity, 7);
        assert_eq!(parse(&[("TORCH_FR_BUFFER_SIZE", "99999999999")]).unwrap().capacity, CAPACITY_MAX);
        let older = parse(&[("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/tmp/x_")]).unwrap();
        assert_eq!(older.prefix, PathBuf::from("/tmp/x_"));
        let ours = [("TORCH_FR_DUMP_TEMP_FILE", "/tmp/x_"), ("TENFOLD_FR_DUMP_TEMP_FILE", "/tmp/y_")];
        assert_eq!(parse(&ours).unwrap().prefix, PathBuf::from("/tmp/y_"), "PyTorch's files are apart");
    }

    #[test]
    fn a_switch_is_what_c10d_takes_for_one() {
        for (value, truth) in [("1", true), ("true", true), ("Y", true), ("0", false), ("False", false)] {
            assert_eq!(parse(&[("TORCH_FR_DUMP_ON_TIMEOUT", value)]).unwrap().dump_on_failure, truth);
        }
        let signals = [("SIGUSR2", 12), ("usr1", 10), ("SIGHUP", 1)];
        for (value, number) in signals {
            assert_eq!(parse(&[("TENFOLD_FR_SIGNAL", value)]).unwrap().signal, Some(number));
        }
    }

    #[test]
    fn what_means_nothing_is_refused_with_what_would_be_right() {
        let refusal = |name, value| {
            let fault = parse(&[(name, value)]).expect_err("it means nothing");
            (fault.message, fault.hint.expect("it says what would be right"))
        };
        let (message, hint) = refusal("TORCH_FR_BUFFER_SIZE", "many");
        assert_eq!(message, "`TORCH_FR_BUFFER_SIZE=many` is not a number");
        assert_eq!(hint, "say a number, 0 or more");
        let (message, hint) = refusal("TORCH_FR_DUMP_ON_TIMEOUT", "perhaps");
        assert_eq!(message, "`TORCH_FR_DUMP_ON_TIMEOUT=perhaps` is neither yes nor no");
        assert_eq!(hint, "say `1` or `0`");
        let (message, hint) = refusal("TENFOLD_FR_SIGNAL", "SIGKILL");
        assert_eq!(message, "`TENFOLD_FR_SIGNAL=SIGKILL` is not a signal that can be asked for");
        assert_eq!(hint, "say `SIGUSR1`, `SIGUSR2`, `SIGHUP` or `SIGQUIT`");
    }
}
