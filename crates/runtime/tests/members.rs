//! Members of a job whose dead are replaced: survivors keep their numbers, processes join in place of the others.

#![expect(clippy::unwrap_used, reason = "tests: a helper may fail too")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::{Hosts, Job, Jobs, Rank, Ranks, local_store, run_as_rank};
use tenfold::store::{HashStore, Store, StoreExt as _};
use tenfold::{ErrorKind, Members, Options, Quorum, ReduceOp, Result, Seat};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

const HEARTBEAT_LONG: Duration = Duration::from_secs(20);

/// The first so many processes begin; the others join when the test orders it.
const BEGIN: usize = 4;

const JOBS: Jobs = &[("take_part", take_part)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn options() -> Options {
    Options::default().timeout(SOON).heartbeat(HEARTBEAT_LONG)
}

/// Sums and recovers until the test has told all members to end. Joins as rank R after the order `join R`, or as a spare.
fn take_part(rank: &Rank) {
    let store: Arc<dyn Store> = rank.store();
    let members = if rank.rank < BEGIN {
        Members::connect(store, Seat { rank: rank.rank, size: BEGIN }, options(), rank.argument == "replaced")
    } else {
        rank.event("ready");
        let order = rank.order();
        Members::join(store, order.strip_prefix("join ").map(|rank| rank.parse().unwrap()), options())
    };
    let mut members = members.unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    std::thread::scope(|threads| {
        let told = Arc::clone(&ended);
        threads.spawn(move || {
            rank.order();
            told.store(true, Ordering::Relaxed);
        });
        loop {
            let group = members.group();
            rank.event(format!(
                "generation {}: rank {} of {}, without state {:?}",
                members.generation(),
                group.rank(),
                group.size(),
                members.without_state()
            ));
            members.state_is_complete();
            let Err(error) = sum_until_told(rank, &members, &ended) else { return };
            rank.event(format!("raised {error}"));
            match members.recover() {
                Ok(recovered) => {
                    rank.event(format!("left {:?} joined {:?}", recovered.left, recovered.joined));
                }
                Err(error) => return rank.event(format!("gave up {error}")),
            }
        }
    });
}

fn sum_until_told(rank: &Rank, members: &Members, ended: &AtomicBool) -> Result<()> {
    let group = members.group();
    let names = group.all_gather(group.name().as_bytes())?;
    assert!(names.iter().all(|name| name == group.name().as_bytes()), "{names:?}");
    for round in 1.. {
        let mut values = vec![1.0_f32; 1000];
        values[999] = f32::from(u8::from(ended.load(Ordering::Relaxed)));
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        let size = group.size() as f32;
        assert!(values[..999].iter().all(|value| *value == size), "round {round}: not {size}");
        if round == 1 {
            rank.event(format!("summed in {}", members.generation()));
        }
        if values[999] == size {
            break;
        }
    }
    Ok(())
}

/// `processes` are the members by rank.
fn works(ranks: &mut Ranks, processes: &[usize], generation: u64) {
    for (rank, process) in processes.iter().enumerate() {
        let beginning = format!("generation {generation}: rank {rank} of {}", processes.len());
        ranks.wait_for_event(*process, &beginning, SOON);
        ranks.wait_for_event(*process, &format!("summed in {generation}"), SOON);
    }
}

fn end_well(mut ranks: Ranks, processes: &[usize]) {
    processes.iter().for_each(|process| ranks.tell(*process, "end"));
    for (process, ended) in ranks.join(SOON).into_iter().enumerate() {
        assert!(!processes.contains(&process) || ended.status.success(), "process {process}: {ended:?}");
    }
}

fn generation(store: &dyn Store) -> serde_json::Value {
    serde_json::from_slice(&store.get("recover/generation").unwrap()).unwrap()
}

#[test]
fn a_spare_and_a_replacement_take_the_places_of_killed_ranks_over_both_transports() {
    for transport in ["auto", "tcp"] {
        let server = local_store();
        let job = Job::new("take_part", BEGIN + 2).argument("replaced");
        let mut ranks = job.environment("TENFOLD_TRANSPORT", transport).start(server.address());
        (BEGIN..BEGIN + 2).for_each(|process| _ = ranks.wait_for_event(process, "ready", SOON));
        works(&mut ranks, &[0, 1, 2, 3], 1);
        ranks.tell(4, "spare"); // waits from now on
        ranks.kill(1);
        for process in [0, 2, 3] {
            ranks.wait_for_event(process, "left [1] joined [1]", SOON);
        }
        works(&mut ranks, &[0, 4, 2, 3], 2);
        // Rank 0, which decides, is replaced by a process that is started later.
        ranks.kill(0);
        ranks.tell(5, "join 0");
        works(&mut ranks, &[5, 4, 2, 3], 3);
        let store = tenfold::store::TcpStore::open(tenfold::store::TcpStoreOptions::new(
            server.address().ip().to_string(),
            server.address().port(),
        ));
        let facts = generation(&store.unwrap());
        assert_eq!((&facts["generation"], &facts["left"][0]["rank"]), (&3.into(), &0.into()), "{facts}");
        assert_eq!(facts["joined"][0]["pid"], ranks.pid(5), "{facts}");
        let pids: Vec<u64> =
            facts["ranks"].as_array().unwrap().iter().map(|rank| rank["pid"].as_u64().unwrap()).collect();
        assert_eq!(pids, [5, 4, 2, 3].map(|process| u64::from(ranks.pid(process))));
        end_well(ranks, &[5, 4, 2, 3]);
    }
}

#[test]
fn ranks_that_joined_are_known_to_all_to_need_state() {
    let server = local_store();
    let mut ranks = Job::new("take_part", BEGIN + 1).argument("replaced").start(server.address());
    ranks.wait_for_event(4, "ready", SOON);
    works(&mut ranks, &[0, 1, 2, 3], 1);
    ranks.tell(4, "spare");
    ranks.kill(2);
    for process in [0, 1, 3, 4] {
        ranks.wait_for_event(process, "generation 2: ", SOON);
    }
    let ended = {
        [0, 1, 3, 4].iter().for_each(|process| ranks.tell(*process, "end"));
        ranks.join(SOON)
    };
    for process in [0, 1, 3, 4] {
        let told = ended[process].told();
        let second = told.iter().find(|text| text.starts_with("generation 2")).unwrap();
        assert!(second.ends_with("without state [2]"), "{second}");
    }
}

#[test]
fn two_ranks_that_die_at_once_and_one_that_dies_during_the_recovery_are_all_replaced() {
    let server = local_store();
    let mut ranks = Job::new("take_part", BEGIN + 3).argument("replaced").start(server.address());
    (BEGIN..BEGIN + 3).for_each(|process| _ = ranks.wait_for_event(process, "ready", SOON));
    works(&mut ranks, &[0, 1, 2, 3], 1);
    ranks.kill(3);
    for process in [0, 1, 2] {
        ranks.wait_for_event(process, "raised", SOON);
    }
    // The survivors wait for a process that joins; the one that waits in their name is killed meanwhile.
    ranks.kill(0);
    ranks.tell(4, "join 3");
    ranks.tell(5, "spare");
    works(&mut ranks, &[5, 1, 2, 4], 2);
    ranks.kill(1);
    ranks.kill(2);
    ranks.tell(6, "join 1");
    // Half of the ranks are left, and all deaths were seen. Rank 2 is still missing.
    ranks.wait_for_event(5, "raised", SOON);
    ranks.kill(6);
    ranks.kill(4);
    drop(ranks);
}

#[test]
fn a_process_that_asked_to_join_and_was_killed_is_passed_over() {
    let server = local_store();
    let mut ranks = Job::new("take_part", BEGIN + 2).argument("replaced").start(server.address());
    (BEGIN..BEGIN + 2).for_each(|process| _ = ranks.wait_for_event(process, "ready", SOON));
    works(&mut ranks, &[0, 1, 2, 3], 1);
    ranks.tell(4, "spare");
    let store = server.address();
    let store = tenfold::store::TcpStore::open(tenfold::store::TcpStoreOptions::new(
        store.ip().to_string(),
        store.port(),
    ));
    store.unwrap().wait_for(&["recover/joiner/1"], SOON).unwrap();
    ranks.kill(4);
    ranks.kill(2);
    ranks.tell(5, "spare");
    works(&mut ranks, &[0, 1, 5, 3], 2);
    end_well(ranks, &[0, 1, 5, 3]);
}

#[test]
fn without_replacements_the_survivors_close_up() {
    let server = local_store();
    let mut ranks = Job::new("take_part", BEGIN).argument("not replaced").start(server.address());
    works(&mut ranks, &[0, 1, 2, 3], 1);
    ranks.kill(1);
    works(&mut ranks, &[0, 2, 3], 2);
    ranks.kill(0);
    works(&mut ranks, &[2, 3], 3);
    end_well(ranks, &[2, 3]);
}

#[test]
fn a_rank_of_another_host_is_replaced() {
    let Some(hosts) = Hosts::near(3) else { return };
    let server = hosts.serve_store();
    let mut ranks = Job::spread("take_part", 2, &hosts).argument("replaced").start(server.address());
    (4..6).for_each(|process| _ = ranks.wait_for_event(process, "ready", SOON));
    works(&mut ranks, &[0, 1, 2, 3], 1);
    ranks.kill(3);
    ranks.tell(4, "spare");
    works(&mut ranks, &[0, 1, 2, 4], 2);
    ranks.kill(5); // it came with its host
    end_well(ranks, &[0, 1, 2, 4]);
}

#[test]
fn survivors_that_no_process_joins_all_say_which_ranks_are_missing() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|threads| {
        for rank in 0..3 {
            let store = Arc::clone(&store);
            threads.spawn(move || {
                let options = options().timeout(Duration::from_secs(2));
                let seat = Seat { rank, size: 3 };
                let mut members = Members::connect(store, seat, options, true).unwrap();
                if rank == 1 {
                    return; // it leaves
                }
                members.group().barrier().unwrap_err();
                let error = members.recover().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                let text = error.to_string();
                assert!(
                    text.contains("no process has joined in place of rank 1 within 2.0 s; 0 wait"),
                    "{text}"
                );
                assert!(text.contains("hint: check the launcher's log"), "{text}");
            });
        }
    });
}

#[test]
fn a_process_that_nobody_admits_says_so() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let error = Members::join(store, Some(1), options().timeout(Duration::from_millis(50))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("the other ranks have not admitted this process within"), "{error}");
}

#[test]
fn a_note_of_another_program_is_refused_with_its_key() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|threads| {
        for rank in 0..2 {
            let store = Arc::clone(&store);
            threads.spawn(move || {
                let options = options().quorum(Quorum::AllReachable);
                let mut members =
                    Members::connect(Arc::clone(&store), Seat { rank, size: 2 }, options, true).unwrap();
                if rank == 1 {
                    store.set("recover/joiner/1", "{\"handle\": 7}").unwrap();
                    store.add("recover/joiners", 1).unwrap();
                    return;
                }
                members.group().barrier().unwrap_err();
                let error = members.recover().unwrap_err().to_string();
                assert!(error.contains("key `recover/joiner/1` of the store is not what a rank"), "{error}");
            });
        }
    });
}
