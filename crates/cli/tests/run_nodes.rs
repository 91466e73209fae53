//! Several `tenfold run` on one machine, as on several: they join, fail, restart and end together.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests: helpers that may fail")]

mod launching;
mod serving;

use std::net::TcpListener;

use launching::{Run, finished, handle, make_fifo, wait_until_gone};
use rustix::process::Signal;
use serving::Serve;

/// A port of 127.0.0.2 that is free now: several launchers must use the same one.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

/// Options for an elastic job that soon notices missing nodes, but not before a busy machine lets them run
/// again.
fn elastic(nodes: &str, port: &str, name: &str) -> Vec<String> {
    let endpoint = format!("127.0.0.2:{port}");
    let settings = "last_call_timeout=0.1,keep_alive_interval=0.2,keep_alive_max_attempt=25";
    let words = [
        "--nnodes",
        nodes,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        &endpoint,
        "--rdzv-id",
        "job",
        "--rdzv-conf",
        settings,
        "--local-addr",
        name,
    ];
    words.map(str::to_string).to_vec()
}

fn fixed(rank: &str, port: &str) -> Vec<String> {
    let words = ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.2", "--master-port", port];
    words.into_iter().map(str::to_string).chain(["--local-addr".into(), format!("node{rank}")]).collect()
}

fn start(options: &[String], ranks: &str, script: &str) -> Run {
    let words: Vec<&str> = options.iter().map(String::as_str).chain(["-n", ranks, script]).collect();
    Run::start(&words)
}

/// The lines of this many ranks, in any order, without prefixes.
fn said(run: &mut Run, ranks: usize) -> Vec<String> {
    let mut lines: Vec<String> = (0..ranks).map(|_| run.any_line()).collect();
    lines.sort();
    lines
}

/// Times and processes replaced, for failure reports.
fn told(error: &str) -> String {
    launching::without_numbers(&error.replace("local rank 1, pid", "pid").replace("local rank 0, pid", "pid"))
}

/// The other nodes begin the next round without it, so its ranks must not continue.
#[test]
fn ranks_of_a_frozen_launcher_are_ended_by_its_guard() {
    let port = free_port();
    let script = "echo $$ $TENFOLD_FENCE; exec sleep 1000";
    let mut host = start(&elastic("1:2", &port, "a"), "1", script);
    let first = host_line(&mut host);
    assert_eq!(first.split_whitespace().last(), Some("0"));
    let mut guest = start(&elastic("1:2", &port, "b"), "1", script);
    let rank = guest.any_line();
    let (process, fence) = rank.split_once(' ').unwrap();
    assert_eq!(fence, "1", "the second round of the first job");
    let rank = handle(process);
    guest.launcher.freeze();
    wait_until_gone(&rank);
    // The others continue without it.
    assert!(host.any_line().ends_with(" 1"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut host.output, &mut line).unwrap();
    assert!(line.trim_end().ends_with(" 2"), "{line:?}");
    guest.launcher.signal(Signal::CONT);
    host.launcher.signal(Signal::TERM);
    host.ended();
    guest.launcher.signal(Signal::TERM);
    let (said, _) = guest.ended();
    assert!(said.contains("so its guard killed the ranks"), "{said}");
}

/// A line of a single rank, which has no prefix.
fn host_line(run: &mut Run) -> String {
    let mut line = String::new();
    std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
    line.trim_end().into()
}

/// The usual soft limit of open files is 1,024, and 128 nodes with 8 ranks have more connections than that.
#[test]
fn a_launcher_that_hosts_the_store_serves_more_clients_than_ranks_may_have_files() {
    let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    if hard.is_some_and(|hard| hard < 1024) {
        return; // not testable on such a machine
    }
    let port = free_port();
    let mut command = std::process::Command::new("sh");
    let words = elastic("1:2", &port, "a").join(" ");
    let script = format!(
        "ulimit -S -n 128; exec {} run {words} sh -c 'ulimit -S -n; exec sleep 1000'",
        serving::TENFOLD
    );
    let mut run = Run::spawn(command.args(["-c", &script]).stdin(std::process::Stdio::null()));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut run.output, &mut line).unwrap();
    assert_eq!(line, "128\n", "ranks have the limit that the user gave");
    let port = port.parse().unwrap();
    let connect = || tenfold_store::TcpStore::connect("127.0.0.2", port).unwrap();
    let clients: Vec<_> = (0..300).map(|_| connect()).collect();
    assert!(clients.iter().all(|client| client.ping().is_ok()));
    run.launcher.signal(Signal::TERM);
    run.ended();
}

#[test]
fn two_nodes_with_given_ranks_join_in_either_order() {
    for host_first in [true, false] {
        let port = free_port();
        let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK of $GROUP_WORLD_SIZE, $MASTER_ADDR";
        let node = |rank: &str, ranks: &str| start(&fixed(rank, &port), ranks, script);
        // Nodes may have different numbers of ranks.
        let (mut first, mut second) = if host_first {
            let first = node("0", "2");
            (first, node("1", "1"))
        } else {
            let second = node("1", "1");
            (node("0", "2"), second)
        };
        let place = "127.0.0.2";
        assert_eq!(
            said(&mut first, 2),
            [
                format!("0 of 3, 0 of 2, node 0 of 2, {place}"),
                format!("1 of 3, 1 of 2, node 0 of 2, {place}")
            ]
        );
        assert_eq!(said(&mut second, 1), [format!("2 of 3, 0 of 1, node 1 of 2, {place}")]);
        let (error, status) = first.ended();
        assert_eq!(status.code(), Some(0), "{error}");
        assert!(error.starts_with(&format!(
            "tenfold: this node hosts the store at 127.0.0.2:{port} (the address could be bound here)\n"
        )));
        assert!(
            error.ends_with("tenfold: round 0 starts on 2 nodes; this is node 0, with ranks 0 to 1 of 3\n")
        );
        let (error, status) = second.ended();
        assert_eq!(status.code(), Some(0), "{error}");
        assert!(error.starts_with(&format!(
            "tenfold: node 1 of 2 connects to the store of node 0 at 127.0.0.2:{port}\n"
        )));
        assert!(error.ends_with("tenfold: round 0 starts on 2 nodes; this is node 1, with rank 2 of 3\n"));
    }
}

#[test]
fn nodes_join_leave_and_die_and_the_others_restart() {
    let port = free_port();
    let script = "echo $TORCHELASTIC_RESTART_COUNT: $RANK of $WORLD_SIZE; [ $TORCHELASTIC_RESTART_COUNT = 4 ] || exec sleep 1000";
    let node = |name: &str| start(&elastic("1:3", &port, name), "2", script);
    let mut a = node("a");
    assert_eq!(said(&mut a, 2), ["0: 0 of 2", "0: 1 of 2"]);
    let mut b = node("b");
    assert_eq!(said(&mut a, 2), ["1: 0 of 4", "1: 1 of 4"]);
    assert_eq!(said(&mut b, 2), ["1: 2 of 4", "1: 3 of 4"]);
    let mut c = node("c");
    assert_eq!(said(&mut a, 2), ["2: 0 of 6", "2: 1 of 6"]);
    assert_eq!(said(&mut b, 2), ["2: 2 of 6", "2: 3 of 6"]);
    assert_eq!(said(&mut c, 2), ["2: 4 of 6", "2: 5 of 6"]);
    c.launcher.signal(Signal::TERM);
    let (error, status) = c.ended();
    assert_eq!(status.code(), Some(1));
    assert_eq!(
        error,
        format!(
            "tenfold: this node connects to the store at 127.0.0.2:{port} (a store answers there already)\n\
             tenfold: round 2 starts on 3 nodes; this is node 2, with ranks 4 to 5 of 6\n\
             tenfold: SIGTERM: passed on to all ranks; they have 10 s to exit\n\
             error: ended by SIGTERM\n"
        )
    );
    assert_eq!(said(&mut a, 2), ["3: 0 of 4", "3: 1 of 4"]);
    assert_eq!(said(&mut b, 2), ["3: 2 of 4", "3: 3 of 4"]);
    b.launcher.signal(Signal::KILL);
    assert_eq!(said(&mut a, 2), ["4: 0 of 2", "4: 1 of 2"]);
    let (error, status) = a.ended();
    assert_eq!(status.code(), Some(0));
    assert_eq!(
        error,
        format!(
            "tenfold: this node hosts the store at 127.0.0.2:{port} (the address could be bound here)\n\
             tenfold: 1 node has joined; waiting for up to 2 more for 0.1 s\n\
             tenfold: node b joined: stopping the ranks\n\
             tenfold: round 1 starts on 2 nodes; this is node 0, with ranks 0 to 1 of 4\n\
             tenfold: node c joined: stopping the ranks\n\
             tenfold: round 2 starts on 3 nodes; this is node 0, with ranks 0 to 1 of 6\n\
             tenfold: node c left: SIGTERM: stopping the ranks\n\
             tenfold: round 3 starts on 2 nodes; this is node 0, with ranks 0 to 1 of 4\n\
             tenfold: node b sent no heartbeat for 5 s: stopping the ranks\n\
             tenfold: round 4 starts on 1 node; this is node 0, with ranks 0 to 1 of 2\n"
        )
    );
}

#[test]
fn a_failure_on_one_node_ends_all_and_every_node_reports_the_same() {
    let port = free_port();
    let folder = tempfile::tempdir().unwrap();
    let go = make_fifo(folder.path());
    let script = format!(
        "echo $$; if [ $RANK = 3 ]; then read word < {go}; echo why >&2; exit 3; fi; exec sleep 1000"
    );
    let mut nodes = ["0", "1"].map(|rank| start(&fixed(rank, &port), "2", &script));
    let lines: Vec<String> = nodes.iter_mut().flat_map(|node| node.lines(2)).collect();
    let ranks: Vec<_> = lines.iter().map(|process| handle(process)).collect();
    let failing = &lines[3];
    std::fs::write(&go, "go\n").unwrap();
    let [first, second] = nodes.map(Run::ended);
    for (error, status) in [&first, &second] {
        assert_eq!(status.code(), Some(1));
        let (_, report) = error.split_once("error: ").unwrap();
        assert_eq!(
            told(report),
            format!("rank 3 of 4 on host node1 failed first: exit code 3\n  | {failing}\n  | why\n")
        );
    }
    assert!(
        first.0.contains("tenfold: rank 3 on node node1 failed: exit code 3: stopping the ranks\n"),
        "{}",
        first.0
    );
    assert!(second.0.contains("tenfold: rank 3 failed (exit code 3): stopping the others\n"), "{}", second.0);
    ranks.iter().for_each(wait_until_gone);
}

#[test]
fn ranks_are_started_again_as_often_as_allowed() {
    let script = "if [ $RANK = 0 ]; then echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; echo > $1; else read word < $1; fi
        if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt $0 ]; then exit 3; fi
        [ $TORCHELASTIC_RESTART_COUNT = $0 ] || exec sleep 1000";
    let folder = tempfile::tempdir().unwrap();
    let go = make_fifo(folder.path());
    let run = |failures: &str| {
        let mut command = launching::command(&["-n", "2", "--max-restarts", "2", script]);
        let output = command.args([failures, &go]).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(output.stdout), text(output.stderr), output.status.code())
    };
    let (output, error, code) = run("1");
    assert_eq!(output, "[0] 0 of 2\n[0] 1 of 2\n");
    assert_eq!(
        error,
        "tenfold: rank 1 failed (exit code 3): stopping the others\ntenfold: restart 1 of 2: round 1 starts on 1 node; this is node 0, with ranks 0 to 1 of 2\n"
    );
    assert_eq!(code, Some(0));
    let (_, error, code) = run("9");
    assert_eq!(error.matches("tenfold: restart ").count(), 2, "{error}");
    assert!(error.contains("\nerror: rank 1 of 2 failed first: exit code 3 after "), "{error}");
    assert_eq!(code, Some(1));
}

#[test]
fn ranks_find_an_empty_store_in_every_round() {
    let script = "store=\"$0 store $MASTER_ADDR:$MASTER_PORT\"
        $store check left || { $store set left behind && $store push queue item && $store set tenfold/left behind; }
        $store len queue
        [ $TORCHELASTIC_RESTART_COUNT = 1 ]";
    let serve = Serve::start(&["--host", "127.0.0.2"]);
    let endpoint = serve.address.to_string();
    for meeting in [&[][..], &["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", &endpoint]] {
        let words: Vec<&str> =
            meeting.iter().copied().chain(["-n", "1", "--max-restarts", "1", script]).collect();
        let output = launching::command(&words).arg(serving::TENFOLD).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "false\n1\nfalse\n1\n", "{meeting:?}");
        assert_eq!(output.status.code(), Some(0), "{meeting:?}");
    }
}

#[test]
fn nodes_can_use_an_existing_store() {
    let serve = Serve::start(&["--host", "127.0.0.2"]);
    let port = serve.address.port().to_string();
    let script = "echo $RANK $MASTER_ADDR $MASTER_PORT";
    let mut nodes = ["a", "b"].map(|name| {
        start(
            &elastic("2", &port, "127.0.0.2")
                .into_iter()
                .chain(["--role".into(), name.into()])
                .collect::<Vec<_>>(),
            "1",
            script,
        )
    });
    let mut lines: Vec<String> = nodes.iter_mut().flat_map(|node| said(node, 1)).collect();
    lines.sort();
    let (first, second) = (lines[0].strip_prefix("0 ").unwrap(), lines[1].strip_prefix("1 ").unwrap());
    assert_eq!(first, second);
    assert!(first.starts_with("127.0.0.2 "));
    assert_ne!(first, format!("127.0.0.2 {port}"), "the ranks have a store of their own");
    for (error, status) in nodes.map(Run::ended) {
        assert_eq!(status.code(), Some(0), "{error}");
        assert!(error.contains(" (a store answers there already)\n"), "{error}");
    }
}

#[test]
fn a_node_that_times_out_names_the_missing_nodes() {
    let port = free_port();
    let mut options = elastic("2", &port, "a");
    options.extend(["--rdzv-conf".into(), "join_timeout=0.3".into()]);
    options.retain(|word| !word.starts_with("last_call")); // the option of that value goes too
    let at = options.iter().position(|word| word == "--rdzv-conf").unwrap();
    options.remove(at);
    let words: Vec<&str> = options.iter().map(String::as_str).chain(["echo started"]).collect();
    let (output, error, code) = finished(&words);
    assert_eq!((output.as_str(), code), ("", Some(1)));
    assert!(
        error.contains("\ntenfold: 1 of 2 nodes have joined; waiting for the rest for up to 0.3 s\nerror: "),
        "{error}"
    );

    let port = free_port();
    let mut options = fixed("1", &port);
    options.extend(["--rdzv-conf".into(), "join_timeout=0.3".into()]);
    let words: Vec<&str> = options.iter().map(String::as_str).chain(["echo started"]).collect();
    let (output, error, code) = finished(&words);
    assert_eq!((output.as_str(), code), ("", Some(1)));
    let (_, report) = error.split_once("error: ").unwrap();
    assert!(report.starts_with(&format!("cannot reach the store at 127.0.0.2:{port} within ")), "{error}");
    assert!(report.ends_with(
        "refused)\n  hint: check that the node that hosts it is up and that no firewall blocks it; raise join_timeout in --rdzv-conf to wait longer\n"
    ), "{error}");
}

#[test]
fn a_launcher_that_waits_for_others_can_be_stopped() {
    for rank in ["0", "1"] {
        let mut run = start(&fixed(rank, &free_port()), "1", "echo started");
        let mut error = std::io::BufReader::new(run.launcher.0.stderr.take().unwrap());
        let mut line = String::new();
        std::io::BufRead::read_line(&mut error, &mut line).unwrap();
        assert!(line.contains("store"), "{line}");
        run.launcher.signal(Signal::TERM);
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut error, &mut rest).unwrap();
        assert!(rest.ends_with("error: ended by SIGTERM\n"), "{rest}");
        assert_eq!(run.launcher.0.wait().unwrap().code(), Some(1));
    }
}

#[test]
fn when_a_node_that_is_needed_leaves_the_job_is_over_for_all() {
    for leaver in [0, 1] {
        let port = free_port();
        let mut nodes = ["0", "1"].map(|rank| start(&fixed(rank, &port), "1", "echo $$; exec sleep 1000"));
        let ranks: Vec<_> =
            nodes.iter_mut().flat_map(|node| said(node, 1)).map(|process| handle(&process)).collect();
        nodes[leaver].launcher.signal(Signal::INT);
        let ended = nodes.map(Run::ended);
        ranks.iter().for_each(wait_until_gone);
        assert!(ended[leaver].0.ends_with("error: ended by SIGINT\n"), "{}", ended[leaver].0);
        let (error, status) = &ended[1 - leaver];
        assert_eq!(status.code(), Some(1));
        let (_, report) = error.split_once("error: ").unwrap();
        assert!(report.contains(&format!("node node{leaver} left: SIGINT")), "{error}");
    }
}

#[test]
fn the_host_of_the_store_follows_from_the_address_unless_given() {
    // Reserved for documentation, so not an address of any machine.
    let run = |port: &str, settings: &str| {
        let endpoint = format!("192.0.2.1:{port}");
        let options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint, "--rdzv-conf", settings];
        finished(&[&options[..], &["echo $MASTER_ADDR $MASTER_PORT"]].concat())
    };
    let port = free_port();
    let (output, error, code) = run(&port, "is_host=true");
    assert_eq!((output, code), (format!("192.0.2.1 {port}\n"), Some(0)));
    assert_eq!(
        error,
        format!(
            "tenfold: this node hosts the store at 192.0.2.1:{port} (requested; the address is not one of this machine's, so \
             the store listens on all addresses)\ntenfold: warning: no authentication: anyone who can reach 0.0.0.0:{port} can read and \
             write this store, and ranks trust what they read there\n"
        )
    );
    for (settings, why) in [
        ("join_timeout=0.1", "the address is not one of this machine's"),
        ("join_timeout=0.1,is_host=false", "is_host=false"),
    ] {
        let (output, error, code) = run(&port, settings);
        assert_eq!((output.as_str(), code), ("", Some(1)));
        let said = format!("tenfold: this node connects to the store at 192.0.2.1:{port} ({why})\n");
        let (before, report) = error.split_once("error: ").unwrap();
        assert_eq!(before, said);
        assert!(
            report.starts_with(&format!("cannot reach the store at 192.0.2.1:{port} within ")),
            "{error}"
        );
    }
}
