use super::*;

fn parse(variables: &[(&str, &str)]) -> Result<Environment, Fault> {
    Environment::parse(|name| {
        let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
        Some(value.into())
    })
}

fn refusal(name: &str, value: &str) -> (String, String) {
    let fault = parse(&[(name, value)]).expect_err("the value is wrong");
    (fault.message, fault.hint.expect("it says what would be right"))
}

#[test]
fn every_variable_that_is_read_is_listed_and_no_other() {
    let read = std::cell::RefCell::new(std::collections::BTreeSet::new());
    Environment::parse(|name| {
        read.borrow_mut().insert(name.to_string());
        None
    })
    .unwrap();
    let mut read = read.into_inner();
    read.retain(|name| !["HOME", "XDG_CACHE_HOME"].contains(&&**name)); // of the user, not of tenfold
    read.extend(["TORCH_DISTRIBUTED_DEBUG", "TORCH_DIST_NAN_CHECK"].map(String::from)); // read one by one
    let listed = VARIABLES.iter().flat_map(|known| known.names).map(|name| name.to_string());
    assert_eq!(listed.collect::<std::collections::BTreeSet<_>>(), read);
}

#[test]
fn nothing_set_leaves_everything_to_tenfold_and_empty_is_nothing() {
    let recorder = recorder::Settings { prefix: parse(&[]).unwrap().recorder.prefix, ..Default::default() };
    let nothing = Environment { recorder, ..Environment::default() };
    assert_eq!(parse(&[]).unwrap(), nothing);
    let empty = ["TENFOLD_INTERFACE", "TENFOLD_PORT_RANGE", "TENFOLD_TRANSPORT", "TENFOLD_ALGORITHM"];
    assert_eq!(parse(&empty.map(|name| (name, " "))).unwrap(), nothing);
}

#[test]
fn what_the_launcher_does_about_failures_is_recover_or_restart() {
    assert!(parse(&[("TENFOLD_ON_FAILURE", "recover")]).unwrap().recovers);
    assert!(!parse(&[("TENFOLD_ON_FAILURE", "restart")]).unwrap().recovers);
    let (message, hint) = refusal("TENFOLD_ON_FAILURE", "panic");
    assert_eq!(message, "`TENFOLD_ON_FAILURE=panic` is not an answer to failures");
    assert!(hint.ends_with("recover or restart"), "{hint}");
}

#[test]
fn interfaces_are_named_as_for_gloo_and_for_nccl() {
    let rule = |value: &str| parse(&[("TENFOLD_INTERFACE", value)]).unwrap().interfaces.unwrap().rule;
    let names = |texts: &[&str], exact: bool| {
        texts.iter().map(|text| Name { text: text.to_string(), exact }).collect::<Vec<_>>()
    };
    assert_eq!(rule("eth0"), Rule::Only(names(&["eth0"], false)));
    assert_eq!(rule("eth0, eth1,"), Rule::Only(names(&["eth0", "eth1"], false)));
    assert_eq!(rule("=eth0,ib0"), Rule::Only(names(&["eth0", "ib0"], true)));
    assert_eq!(rule("^lo,docker"), Rule::Except(names(&["lo", "docker"], false)));
    assert_eq!(rule("^=lo"), Rule::Except(names(&["lo"], true)));
}

#[test]
fn our_own_interface_variable_wins_over_gloos() {
    let gloo = ("GLOO_SOCKET_IFNAME", "eth1");
    let said = |variables: &[(&str, &str)]| parse(variables).unwrap().interfaces.unwrap().said;
    assert_eq!(said(&[gloo]), "GLOO_SOCKET_IFNAME=eth1");
    assert_eq!(said(&[gloo, ("TENFOLD_INTERFACE", "eth0")]), "TENFOLD_INTERFACE=eth0");
    assert_eq!(said(&[gloo, ("TENFOLD_INTERFACE", "")]), "GLOO_SOCKET_IFNAME=eth1");
}

#[test]
fn right_values_are_understood() {
    let ports = |value: &str| parse(&[("TENFOLD_PORT_RANGE", value)]).unwrap().ports.unwrap();
    assert_eq!(ports("20000-20100"), 20000..=20100);
    assert_eq!(ports(" 1 - 65535 "), 1..=65535);
    assert_eq!(ports("29500"), 29500..=29500);
    let heartbeat = |value: &str| parse(&[("TENFOLD_HEARTBEAT", value)]).unwrap().heartbeat.unwrap();
    assert_eq!(["4", "2.5", "30 s"].map(heartbeat), [4000, 2500, 30_000].map(Duration::from_millis));
    let store = |value: &str| parse(&[("TENFOLD_STORE", value)]).unwrap().store.unwrap().to_string();
    assert_eq!(["10.0.0.1:29500", "[fd00::1]:1"].map(store), ["10.0.0.1:29500", "[fd00::1]:1"]);
    let transport = |value: &str| parse(&[("TENFOLD_TRANSPORT", value)]).unwrap().transport;
    assert_eq!(
        ["auto", "shm", "tcp"].map(transport),
        [TransportChoice::Auto, TransportChoice::SharedMemory, TransportChoice::Tcp]
    );
    let algorithms = parse(&[("TENFOLD_ALGORITHM", "all_reduce:ring, broadcast: tree")]).unwrap().algorithms;
    let pair = |operation: &str, algorithm: &str| (operation.to_string(), algorithm.to_string());
    assert_eq!(algorithms, [pair("all_reduce", "ring"), pair("broadcast", "tree")]);
}

#[test]
fn a_wrong_value_is_shown_with_what_would_be_right() {
    let (message, hint) = refusal("TENFOLD_TRANSPORT", "rdma");
    assert_eq!(message, "`TENFOLD_TRANSPORT=rdma` is not a transport");
    assert_eq!(hint, "say `auto`, `shm` or `tcp`");
    for value in ["20100-20000", "0-10", "http", "1-70000", "1-2-3", "-5", "5-"] {
        let (message, hint) = refusal("TENFOLD_PORT_RANGE", value);
        assert_eq!(message, format!("`TENFOLD_PORT_RANGE={value}` is not a range of ports"));
        assert_eq!(hint, "say the first and the last, as in `20000-20100`, both from 1 to 65535");
    }
    for value in ["0", "-1", "soon", "inf", "NaN"] {
        let (message, hint) = refusal("TENFOLD_HEARTBEAT", value);
        assert_eq!(message, format!("`TENFOLD_HEARTBEAT={value}` is not a valid time"));
        assert_eq!(hint, "set a number of seconds greater than 0, such as `15` or `2.5`");
    }
    let (message, hint) = refusal("TENFOLD_STORE", "node-a:29500");
    assert_eq!(message, "`TENFOLD_STORE=node-a:29500` is not an address with a port");
    assert_eq!(hint, "write an address and a port, such as 10.0.0.1:29500 or [fd00::1]:29500");
    for value in ["^", "=", ",", "^="] {
        let (message, hint) = refusal("TENFOLD_INTERFACE", value);
        assert_eq!(message, format!("`TENFOLD_INTERFACE={value}` names no interface"));
        assert!(hint.starts_with("say `eth0`"), "{hint}");
    }
    for value in ["ring", "all_reduce:", ":ring", "all_reduce:ring,", "a:b:c"] {
        let (message, hint) = refusal("TENFOLD_ALGORITHM", value);
        assert_eq!(message, format!("`TENFOLD_ALGORITHM={value}` is not a list of algorithms"));
        assert!(hint.starts_with("say an operation"), "{hint}");
    }
}

const LAUNCHED: [(&str, &str); 4] =
    [("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "node-a"), ("MASTER_PORT", "29500")];

/// The place of a rank with these variables, of which the last counts.
fn place_with(variables: &[(&str, &str)]) -> Result<Place, Fault> {
    let all: Vec<_> = LAUNCHED.iter().chain(variables).collect();
    read_place(|name| all.iter().rfind(|(known, _)| *known == name).map(|(_, value)| value.into()))
}

#[test]
fn a_rank_is_where_its_launcher_says() {
    let meeting = |round| Meeting { host: "node-a".into(), port: 29500, round };
    let place = |local_rank, round| Place { rank: 1, size: 3, local_rank, meeting: meeting(round) };
    assert_eq!(place_with(&[]).unwrap(), place(None, None));
    assert_eq!(place_with(&[("LOCAL_RANK", "0")]).unwrap(), place(Some(0), None));
    let agent = |value| ("TORCHELASTIC_USE_AGENT_STORE", value);
    let restarted = ("TORCHELASTIC_RESTART_COUNT", "2");
    assert_eq!(place_with(&[agent("True")]).unwrap(), place(None, Some(0)));
    assert_eq!(place_with(&[agent("True"), restarted]).unwrap(), place(None, Some(2)));
    for other in ["true", "1", "False", ""] {
        assert_eq!(place_with(&[agent(other), restarted]).unwrap(), place(None, None), "{other}");
    }
}

#[test]
fn a_program_without_a_launcher_is_told_what_is_missing_and_how_to_start_it() {
    let fault = read_place(|_| None).unwrap_err();
    assert_eq!(fault.message, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set in the environment");
    assert_eq!(fault.hint.unwrap(), "start it with `tenfold run -n 2 …`, which sets them");
    let fault = place_with(&[("MASTER_ADDR", " ")]).unwrap_err();
    assert_eq!(fault.message, "MASTER_ADDR is not set in the environment");
}

#[test]
fn a_place_that_cannot_be_is_refused_with_the_variable_and_its_value() {
    for (name, value, message) in [
        ("RANK", "one", "`RANK=one` is not a number"),
        ("RANK", "-1", "`RANK=-1` is not a number"),
        ("RANK", "3", "`RANK=3` is not a rank with `WORLD_SIZE=3`"),
        ("WORLD_SIZE", "0", "`WORLD_SIZE=0` is not a number of ranks"),
        ("WORLD_SIZE", "5000000000", "`WORLD_SIZE=5000000000` is not a number of ranks"),
        ("WORLD_SIZE", "99999999999999999999", "`WORLD_SIZE=99999999999999999999` is not a number"),
        ("LOCAL_RANK", "gpu0", "`LOCAL_RANK=gpu0` is not a number"),
        ("MASTER_PORT", "0", "`MASTER_PORT=0` is not a port"),
        ("MASTER_PORT", "65536", "`MASTER_PORT=65536` is not a port"),
    ] {
        assert_eq!(place_with(&[(name, value)]).unwrap_err().message, message);
    }
    let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
    let fault = place_with(&[agent, ("TORCHELASTIC_RESTART_COUNT", "x")]).unwrap_err();
    assert_eq!(fault.message, "`TORCHELASTIC_RESTART_COUNT=x` is not a number");
}

#[cfg(unix)]
#[test]
fn what_is_not_even_text_is_refused() {
    use std::os::unix::ffi::OsStringExt;
    let garbage = || OsString::from_vec(vec![b't', 0xff]);
    let fault = Environment::parse(|name| (name == "TENFOLD_TRANSPORT").then(garbage)).expect_err("no text");
    assert_eq!(fault.message, "`TENFOLD_TRANSPORT=t\u{fffd}` is not text");
}
