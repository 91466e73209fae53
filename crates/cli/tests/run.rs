//! `tenfold run` with real processes: what ranks get, what users see, how it ends.

#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests: read the clock")]

mod launching;
mod serving;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use launching::{HANG, Run, ended, finished, handle, make_fifo, wait_until_gone, without_numbers};
use rustix::process::Signal;
use serving::TENFOLD;
use tenfold_store::{StoreExt as _, TcpStore};

#[test]
fn every_rank_finds_the_environment_that_torchrun_sets() {
    let (output, _, code) = finished(&["-n", "3", "env"]);
    assert_eq!(code, Some(0));
    let find = |rank: usize, name: &str| {
        let beginning = format!("[{rank}] {name}=");
        let mut found = output.lines().filter_map(|line| line.strip_prefix(&beginning));
        let value = found.next().unwrap_or_else(|| panic!("no {beginning} in {output}"));
        assert_eq!(found.next(), None);
        value.to_string()
    };
    for rank in 0..3 {
        let own = rank.to_string();
        for (name, expected) in [
            ("RANK", own.as_str()),
            ("LOCAL_RANK", &own),
            ("ROLE_RANK", &own),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("ROLE_NAME", "default"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("OMP_NUM_THREADS", "1"),
            ("RAYON_NUM_THREADS", "1"),
            ("PYTHONUNBUFFERED", "1"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ] {
            assert_eq!(find(rank, name), expected, "{name}");
        }
        for name in ["MASTER_PORT", "TORCHELASTIC_RUN_ID"] {
            assert_eq!(find(rank, name), find(0, name));
        }
    }
}

#[test]
fn the_store_serves_all_ranks_and_outlives_rank_0() {
    let script = format!(
        r#"store() {{ {TENFOLD} store $MASTER_ADDR:$MASTER_PORT "$@"; }}
        if [ $RANK = 0 ]; then store set pid $$; exit; fi
        pid=$(store get pid)
        while kill -0 $pid 2>/dev/null; do :; done # it has ended
        store set after-rank-0 yes && store get after-rank-0"#
    );
    let (output, error, code) = finished(&["--nproc_per_node", "2", &script]);
    assert_eq!((output.as_str(), code), ("[1] yes\n", Some(0)), "{error}");
}

#[test]
fn a_signal_that_is_not_listed_keeps_its_default_action() {
    let mut run =
        Run::start(&["-n", "2", "--signals-to-handle", "SIGUSR1,SIGINT", "echo $$; exec sleep 1000"]);
    let ranks: Vec<_> = run.lines(2).iter().map(|process| handle(process)).collect();
    run.launcher.signal(Signal::TERM);
    let (error, status) = run.ended();
    assert_eq!((error.as_str(), status.signal()), ("", Some(15)));
    ranks.iter().for_each(wait_until_gone);
    let script = "trap 'echo asked; exit 0' USR1; echo ready; while :; do sleep 1000 & wait; done";
    let mut run = Run::start(&["-n", "2", "--signals_to_handle=SIGUSR1", script]);
    assert_eq!(run.lines(2), ["ready", "ready"]);
    run.launcher.signal(Signal::USR1);
    assert_eq!(run.lines(2), ["asked", "asked"]);
    let (error, status) = run.ended();
    assert_eq!(status.code(), Some(1));
    assert!(error.ends_with("error: ended by SIGUSR1\n"), "{error}");
}

#[test]
fn options_are_read_from_torchruns_variables_too() {
    let mut command = launching::command(&["echo $LOCAL_RANK of $LOCAL_WORLD_SIZE in $ROLE_NAME"]);
    let output =
        command.env("PET_NPROC_PER_NODE", "2").env("PET_ROLE", "trainer").env("PET_STANDALONE", "1").output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 0 of 2 in trainer", "[1] 1 of 2 in trainer"]);
}

#[test]
fn ranks_run_on_the_processors_that_they_are_bound_to() {
    let processors = |text: &str| -> std::collections::BTreeSet<usize> {
        let number = |text: &str| text.parse::<usize>().unwrap();
        let ranges = text.trim().split(',').map(|range| range.split_once('-').unwrap_or((range, range)));
        ranges.flat_map(|(first, last)| number(first)..=number(last)).collect()
    };
    let list = "sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status";
    let own = Command::new("sh").args(["-c", list]).output().unwrap();
    let own = processors(&String::from_utf8(own.stdout).unwrap());
    let (output, error, code) = finished(&["-n", "2", "--numa-binding", "exclusive", list]);
    if error.contains("2 ranks share NUMA node") {
        eprintln!("not tested, for this machine has too few cores: {error}");
        return;
    }
    assert_eq!((error.as_str(), code), ("", Some(0)));
    let lists: Vec<_> = output.lines().map(|line| processors(line.split_once("] ").unwrap().1)).collect();
    assert!(
        lists.len() == 2 && lists.iter().all(|list| !list.is_empty() && list.is_subset(&own)),
        "{output}"
    );
    assert!(lists[0].is_disjoint(&lists[1]), "{output}");
}

#[test]
fn torchruns_spellings_and_arguments_with_hyphens_are_understood() {
    let words = ["run", "--nproc-per-node=2", "--", "echo", "-n", "7", "--", "--python", "x"];
    let output = Command::new(TENFOLD).args(words).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 7 -- --python x", "[1] 7 -- --python x"]);
}

#[test]
fn the_exit_code_is_torchruns() {
    assert_eq!(finished(&["-n", "2", "exit 0"]), (String::new(), String::new(), Some(0)));
    let (_, error, code) = finished(&["exit 5"]);
    assert_eq!((without_numbers(&error).as_str(), code), ("error: the rank failed: exit code 5\n", Some(1)));
    let (_, error, code) = finished(&["kill -SEGV $$"]);
    assert_eq!(
        (without_numbers(&error).as_str(), code),
        (
            "error: the rank failed: killed by SIGSEGV\n  cause: invalid memory access: a bug in native code\n  hint: PYTHONFAULTHANDLER=1 shows where a Python program was\n",
            Some(1)
        )
    );
}

#[test]
fn a_signal_is_passed_on_once() {
    for (signal, name) in
        [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::HUP, "HUP"), (Signal::QUIT, "QUIT")]
    {
        let script =
            format!("trap 'echo asked; exit 0' {name}; echo ready; while :; do sleep 1000 & wait; done");
        let mut run = Run::start(&["-n", "2", &script]);
        assert_eq!(run.lines(2), ["ready", "ready"]);
        run.launcher.signal(signal);
        let mut rest = String::new();
        run.output.read_to_string(&mut rest).unwrap();
        let mut lines: Vec<&str> = rest.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["[0] asked", "[1] asked"]);
        let (error, status) = run.ended();
        assert_eq!(status.code(), Some(1));
        assert!(error.ends_with(&format!("error: ended by SIG{name}\n")), "{error}");
    }
}

/// The next note of the launcher that begins like this.
fn note(error: &mut impl std::io::BufRead, beginning: &str) -> String {
    let note = error.lines().map_while(Result::ok).find(|line| line.starts_with(beginning));
    note.unwrap_or_else(|| panic!("it says nothing about {beginning}"))
}

#[test]
fn a_signal_for_ranks_goes_to_those_that_handle_it_and_ends_none() {
    // Each has a child in its group that would report the signal if it got it; rank 2 would be killed by it.
    let script = "sh -c 'trap \"echo child\" USR1 USR2; echo ready; while :; do sleep 1000 & wait; done' &
        case $RANK in
        0) trap 'echo heard USR1' USR1; trap 'echo heard USR2' USR2;;
        1) trap '' USR1; trap 'echo heard USR2' USR2;;
        esac
        echo ready; while :; do sleep 1000 & wait; done";
    let mut run = Run::start(&["-n", "3", script]);
    let mut error = BufReader::new(run.launcher.0.stderr.take().unwrap());
    assert_eq!((0..6).map(|_| run.any_line()).collect::<Vec<_>>(), ["ready"; 6]);
    let lacks = "not to rank 2, which does not catch it and would be killed by it";
    run.launcher.signal(Signal::USR1);
    assert_eq!(
        note(&mut error, "tenfold: SIGUSR1"),
        format!("tenfold: SIGUSR1: passed on to ranks 0, 1; {lacks}")
    );
    run.launcher.signal(Signal::USR2);
    assert_eq!(
        note(&mut error, "tenfold: SIGUSR2"),
        format!("tenfold: SIGUSR2: passed on to ranks 0, 1; {lacks}")
    );
    let mut said: Vec<String> = (0..3).map(|_| run.any_line()).collect();
    said.sort();
    assert_eq!(said, ["heard USR1", "heard USR2", "heard USR2"]);
    run.launcher.signal(Signal::TERM);
    let mut rest = String::new();
    run.output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "once, and no child of a rank");
    error.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("error: ended by SIGTERM\n"), "{rest}");
    assert_eq!(run.launcher.0.wait().unwrap().code(), Some(1));
}

#[test]
fn a_signal_for_ranks_before_there_are_any_is_noted() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap(); // accepts connections and sends nothing
    let endpoint = silent.local_addr().unwrap().to_string();
    let mut run = Run::start(&[
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint",
        &endpoint,
        "--rdzv-conf=is_host=false",
        "true",
    ]);
    let _it_was_found = silent.accept().unwrap(); // from here on the launcher handles signals
    let mut error = BufReader::new(run.launcher.0.stderr.take().unwrap());
    run.launcher.signal(Signal::USR1);
    assert_eq!(
        note(&mut error, "tenfold: SIGUSR1"),
        "tenfold: SIGUSR1: no rank on this node to pass it on to"
    );
    run.launcher.signal(Signal::INT);
    let mut rest = String::new();
    error.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("error: ended by SIGINT\n"), "{rest}");
    assert_eq!(run.launcher.0.wait().unwrap().code(), Some(1));
}

#[test]
fn a_second_signal_kills_immediately() {
    let mut run =
        Run::start(&["-n", "2", "--shutdown-timeout", "1h", "trap '' TERM; echo ready; exec sleep 1000"]);
    assert_eq!(run.lines(2), ["ready", "ready"]);
    run.launcher.signal(Signal::TERM);
    let mut error = BufReader::new(run.launcher.0.stderr.take().unwrap());
    let mut note = String::new();
    error.read_line(&mut note).unwrap();
    assert_eq!(note, "tenfold: SIGTERM: passed on to all ranks; they have 3600 s to exit\n");
    run.launcher.signal(Signal::TERM);
    let mut rest = String::new();
    error.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "error: ended by SIGTERM\n  ranks 0, 1 did not exit after SIGTERM and were killed\n");
    assert_eq!(run.launcher.0.wait().unwrap().code(), Some(1));
}

#[test]
fn a_launcher_under_nohup_survives_a_closed_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let go = make_fifo(folder.path());
    let script = format!("trap '' HUP; exec {TENFOLD} run sh -c 'echo ready; read word < {go}'");
    let mut run = Run::spawn(Command::new("sh").args(["-c", &script]));
    let mut line = String::new();
    run.output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    run.launcher.signal(Signal::HUP);
    std::fs::write(&go, "go\n").unwrap(); // a rank that exits now is noticed after the signal
    let (error, status) = run.ended();
    assert_eq!((error.as_str(), status.code()), ("", Some(0)));
}

#[test]
fn lines_of_ranks_are_never_torn() {
    const LINES: usize = 300;
    // Two writes for each line, on both streams, into one pipe; some lines are longer than a pipe takes in
    // one write.
    let script = format!(
        "pad=$(printf '%05000d' 0); i=0
        while [ $i -lt {LINES} ]; do
            printf 'rank %s ' $RANK; printf 'line %s %s\\n' $i $([ $((i % 10)) = 0 ] && echo $pad)
            printf 'rank %s ' $RANK >&2; printf 'error %s\\n' $i >&2
            i=$((i + 1))
        done"
    );
    let joined = format!("exec {TENFOLD} run -n 4 sh -c \"$0\" 2>&1");
    let output = Command::new("sh").args(["-c", &joined, &script]).output().unwrap();
    assert!(output.status.success());
    let output = String::from_utf8(output.stdout).unwrap();
    let pad = "0".repeat(5000);
    for rank in 0..4 {
        let of = |what: &str| {
            let beginning = format!("[{rank}] rank {rank} {what} ");
            let lines = output.lines().filter_map(|line| line.strip_prefix(&beginning));
            lines.map(str::to_string).collect::<Vec<_>>()
        };
        let expected =
            |line: usize| if line.is_multiple_of(10) { format!("{line} {pad}") } else { format!("{line} ") };
        assert!(of("line") == (0..LINES).map(expected).collect::<Vec<_>>());
        assert_eq!(of("error"), (0..LINES).map(|line| line.to_string()).collect::<Vec<_>>());
    }
    assert_eq!(output.lines().count(), 4 * 2 * LINES);
}

#[test]
fn the_output_of_a_single_rank_is_unchanged() {
    let (output, error, code) = finished(&["printf '10 %%\\r20 %%'; printf oops >&2"]);
    assert_eq!((output.as_str(), error.as_str(), code), ("10 %\r20 %", "oops", Some(0)));
}

#[test]
fn a_single_rank_reads_standard_input_and_several_have_none() {
    for (ranks, said) in [("1", "hi\n"), ("2", "")] {
        let script = format!("echo hi | {TENFOLD} run -n {ranks} sh -c 'read word && echo $word; exit 0'");
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), said);
        assert!(output.status.success());
    }
}

#[test]
fn a_last_line_without_end_gets_one() {
    let (output, _, code) = finished(&["-n", "2", "[ $RANK = 1 ] || printf unfinished"]);
    assert_eq!((output.as_str(), code), ("[0] unfinished\n", Some(0)));
}

#[test]
fn ranks_whose_output_is_not_read_can_still_be_stopped() {
    let mut run = Run::start(&["-n", "2", "echo $$; exec yes"]);
    let mut ranks = Vec::new();
    while ranks.len() < 2 {
        let line = run.any_line();
        ranks.extend((line != "y").then(|| handle(&line)));
    }
    // From here on the pipe is not read: the launcher waits for us once it is full.
    let (start, mut held, mut looks_alike) = (Instant::now(), 0, 0);
    while looks_alike < 50 {
        assert!(start.elapsed() < HANG, "the pipe does not fill");
        std::thread::park_timeout(Duration::from_millis(1));
        let now = rustix::io::ioctl_fionread(run.output.get_ref()).unwrap();
        looks_alike = if now == held && now > 0 { looks_alike + 1 } else { 0 };
        held = now;
    }
    run.launcher.signal(Signal::TERM);
    ranks.iter().for_each(wait_until_gone);
    run.launcher.signal(Signal::TERM); // output that was not shown by now is not waited for
    let (_, status) = run.ended();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn ranks_continue_when_their_output_is_not_read() {
    let script = "i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i + 1)); done";
    let mut run = Run::start(&["-n", "2", script]);
    run.any_line();
    let Run { launcher, output } = run;
    drop(output);
    let (error, status) = ended(launcher);
    assert_eq!(status.code(), Some(0));
    let note = "tenfold: cannot write to standard output: Broken pipe (os error 32); further output of ranks there is lost\n";
    assert!(error.is_empty() || error == note, "{error}"); // all may have been written by then
}

#[test]
fn the_store_knows_what_ranks_do() {
    let script = format!(
        "echo $MASTER_PORT $TORCHELASTIC_RUN_ID $$; case $RANK in
        0) exec {TENFOLD} store $MASTER_ADDR:$MASTER_PORT get never;; # waits
        1) kill -STOP $$;;
        esac"
    );
    let mut run = Run::start(&["-n", "3", "--rdzv-conf", "keep_alive_interval=0.1", &script]);
    let lines = run.lines(3);
    let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split(' ').collect()).collect();
    let store = TcpStore::connect("127.0.0.1", words[0][0].parse().unwrap()).unwrap();
    let prefix = format!("tenfold/run/{}/node/", words[0][1]);
    let start = Instant::now();
    let beat: serde_json::Value = loop {
        assert!(start.elapsed() < HANG, "the ranks are not seen");
        std::thread::park_timeout(Duration::from_millis(10));
        let keys = store.list_keys().unwrap();
        let Some(key) = keys.iter().find(|key| key.starts_with(prefix.as_bytes())) else { continue };
        let beat: serde_json::Value = serde_json::from_slice(&store.get(key).unwrap()).unwrap();
        let is_seen = |rank: usize| {
            beat["ranks"][rank]["store_connections"].as_array().is_some_and(|all| !all.is_empty())
        };
        if is_seen(0) && beat["ranks"][1]["state"] == "stopped" && beat["ranks"][2]["state"] == "ended" {
            break beat;
        }
    };
    let ranks = beat["ranks"].as_array().unwrap();
    for (rank, state) in ["running", "stopped", "ended"].into_iter().enumerate() {
        assert_eq!(ranks[rank]["rank"], rank);
        assert_eq!(ranks[rank]["local_rank"], rank);
        assert_eq!(ranks[rank]["pid"].to_string(), words[rank][2]);
        assert_eq!(ranks[rank]["state"], state);
    }
    assert_eq!(ranks[2]["end"], "exit code 0");
    assert!(ranks[0]["memory_bytes"].as_u64().unwrap() > 0);
    run.launcher.signal(Signal::KILL);
}
