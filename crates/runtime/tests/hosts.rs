//! Groups over several hosts: values, topology, and what ranks see when the network between hosts breaks.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests: the time things take; a helper may fail too"
)]

#[path = "hosts/beats.rs"]
mod beats;
mod every_collective;
#[path = "hosts/rails.rs"]
mod rails;
mod support;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use every_collective::check_every_collective;
use support::{Cable, Hosts, Job, Jobs, Rank, Ranks, Slow, once_within, run_as_rank};
use tenfold::{Buffer, DType, Group, Options, ReduceOp, Tag};
use tenfold_store::{Deadline, PrefixStore, Request, Response, Store};

/// How long something may take before it is said to hang.
const SOON: Duration = Duration::from_secs(60);

/// A peer that has been silent this long is given up.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// For ranks that must not be given up, however long a busy machine does not let them run. After a cut, TCP tries again at
/// longer and longer intervals: if a cut lasts one second, the next packet may arrive two seconds later.
const HEARTBEAT_LONG: Duration = Duration::from_secs(20);

/// What an error may take beyond the heartbeat.
const GRACE: Duration = Duration::from_secs(1);

const JOBS: Jobs = &[
    ("every_collective", every_collective),
    ("locality", locality),
    ("sum_until_told", sum_until_told),
    ("sum_patiently", sum_patiently),
    ("differ", differ),
    ("find_each_other", find_each_other),
    ("sum_by_variable", sum_by_variable),
    ("end_early", end_early),
    ("exchange_with_all", beats::exchange_with_all),
    ("idle", beats::idle),
    ("exchange_long_messages", rails::exchange_long_messages),
    ("sum_briefly", rails::sum_briefly),
];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    run_as_rank(JOBS);
}

fn connect(rank: &Rank) -> Group {
    connect_with(rank, HEARTBEAT_LONG)
}

fn connect_with(rank: &Rank, heartbeat: Duration) -> Group {
    let options = Options::new("default").timeout(SOON).heartbeat(heartbeat);
    Group::connect(rank.store(), rank.seat(), options).unwrap()
}

fn every_collective(rank: &Rank) {
    let group = connect(rank);
    for count in rank.argument.split(' ') {
        check_every_collective(&group, count.parse().unwrap());
    }
}

fn locality(rank: &Rank) {
    let group = connect(rank);
    let topology = group.topology();
    let hosts: Vec<_> = (0..topology.hosts()).map(|host| topology.ranks_of(host).to_vec()).collect();
    rank.event(format!("{hosts:?}"));
    let mut tensor = ones(1 << 20);
    let work = group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap();
    work.wait().unwrap();
    rank.event(work.algorithm());
}

fn ones(elements: usize) -> Buffer {
    let mut tensor = Buffer::zeros(DType::F32, elements);
    tensor.as_mut_slice::<f32>().fill(1.0);
    tensor
}

/// Sums ones, round after round, until the test orders the last rank to end. That rank then sums zeros, which all ranks see. The
/// argument is the number of elements.
fn sum_until_told(rank: &Rank) {
    sum(rank, &connect_with(rank, HEARTBEAT));
}

/// The same with ranks that do not give each other up soon.
fn sum_patiently(rank: &Rank) {
    sum(rank, &connect(rank));
}

/// The same with what TENFOLD_HEARTBEAT says.
fn sum_by_variable(rank: &Rank) {
    let options = Options::new("default").timeout(2 * SOON);
    sum(rank, &Group::connect(rank.store(), rank.seat(), options).unwrap());
}

fn sum(rank: &Rank, group: &Group) {
    let (orders, told) = std::sync::mpsc::channel();
    let decides = rank.rank == rank.size - 1;
    std::thread::scope(|threads| {
        if decides {
            threads.spawn(|| orders.send(rank.order()).unwrap());
        }
        for round in 1.. {
            let mut tensor = ones(rank.argument.parse().unwrap());
            if decides && told.try_recv().is_ok() {
                tensor.as_mut_slice::<f32>().fill(-1.0);
            }
            let start = Instant::now();
            if let Err(error) =
                group.start_all_reduce(tensor.lend(), ReduceOp::Sum).and_then(|work| work.wait())
            {
                rank.event(format!("raised {:?} {:?} {error}", error.kind(), error.peer()));
                // It lingers, as a trainer does that saves what it has.
                drop(if decides { told.recv().unwrap() } else { rank.order() });
                return;
            }
            let (sum, full) = (tensor.as_slice::<f32>()[0], rank.size as f32);
            assert!(tensor.as_slice::<f32>().iter().all(|value| *value == sum), "round {round} is torn");
            if sum == full - 2.0 {
                return rank.event(format!("ended in round {round}"));
            }
            assert_eq!(sum, full, "round {round}");
            if start.elapsed() > Duration::from_millis(500) {
                rank.event(format!("slow round {round}"));
            }
            if round % 5 == 0 {
                rank.event(format!("round {round}"));
            }
        }
    });
}

/// The last rank has more elements than the others.
fn differ(rank: &Rank) {
    let group = connect(rank);
    let elements = if rank.rank == rank.size - 1 { 2000 } else { 1000 };
    let error = group
        .start_all_reduce(ones(elements).lend(), ReduceOp::Sum)
        .and_then(|work| work.wait())
        .unwrap_err();
    rank.event(error.message());
    rank.order();
}

/// Three hosts of two ranks that sum ones in a loop, past their first rounds. A job, and its number of elements.
fn summing(hosts: &Hosts, store: std::net::SocketAddr, job: &'static str, elements: usize) -> Ranks {
    let mut ranks = Job::spread(job, 2, hosts).argument(elements).start(store);
    ranks.wait_for_all("round 5", SOON);
    ranks
}

/// Tells the rank that decides, and waits until all have ended well.
fn end_well(mut ranks: Ranks) -> Vec<support::Ended> {
    ranks.tell(5, "end");
    ranks.wait_for_all("ended in round ", SOON);
    let ended = ranks.join_well(SOON);
    for end in &ended {
        assert!(!end.told().iter().any(|told| told.starts_with("raised")), "{:?}", end.told());
    }
    ended
}

/// Has the network of three hosts fail as `fail` says. Every rank must raise in time, and name one of `unreachable[rank]`.
/// A rank with an empty list is dead.
fn all_raise(fail: impl Fn(&Hosts, &Ranks), unreachable: [&[usize]; 6]) {
    once_within(HEARTBEAT + GRACE, || {
        let Some(hosts) = Hosts::near(3) else { return Duration::ZERO };
        let store = hosts.serve_store();
        let ranks = summing(&hosts, store.address(), "sum_until_told", 1 << 16);
        let since = Instant::now();
        fail(&hosts, &ranks);
        all_have_raised(ranks, since, unreachable)
    });
}

/// How long it took.
fn all_have_raised(mut ranks: Ranks, since: Instant, unreachable: [&[usize]; 6]) -> Duration {
    let mut longest = Duration::ZERO;
    for (rank, unreachable) in unreachable.into_iter().enumerate().filter(|(_, whom)| !whom.is_empty()) {
        let error = ranks.wait_for_event(rank, "raised ", SOON);
        let took = error.at - since;
        println!("rank {rank} after {took:?}: {}", error.text);
        longest = longest.max(took);
        let named =
            |peer: &&usize| error.text.contains(&format!("rank {peer} (host host-{}, pid ", *peer / 2));
        assert!(
            unreachable.iter().any(|peer| named(&peer)),
            "rank {rank} names none of {unreachable:?}: {}",
            error.text
        );
    }
    ranks.tell_all("end");
    for (end, unreachable) in std::iter::zip(ranks.join(SOON), unreachable) {
        assert_eq!(end.status.success(), !unreachable.is_empty(), "{}", end.stderr);
    }
    longest
}

// ── all is well ────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn every_collective_is_right_on_three_hosts_of_two_ranks() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let job = Job::spread("every_collective", 2, &hosts).argument("1 7 1000 100003");
    job.start(store.address()).join_well(SOON);
}

#[test]
fn every_collective_is_right_when_hosts_have_different_numbers_of_ranks() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let job = Job::place("every_collective", &[0, 1, 0, 2, 0, 1], &hosts).argument("1 1000");
    job.start(store.address()).join_well(SOON);
}

#[test]
fn ranks_see_which_of_them_share_a_host_and_use_it() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let ended = Job::spread("locality", 2, &hosts).start(store.address()).join_well(SOON);
    for end in ended {
        assert_eq!(end.told(), ["[[0, 1], [2, 3], [4, 5]]", "two_level"]);
    }
}

#[test]
fn ranks_of_one_host_need_not_be_neighbours_in_the_group() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let ended = Job::place("locality", &[0, 1, 2, 0, 1, 2], &hosts).start(store.address()).join_well(SOON);
    for end in ended {
        assert_eq!(end.told(), ["[[0, 3], [1, 4], [2, 5]]", "two_level"]);
    }
}

// ── the network breaks ─────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_silent_partition_is_raised_by_every_rank_and_names_the_unreachable() {
    // The ranks that are cut off reach none of the others. Which of them they report first is random.
    let (inside, outside): (&[usize], &[usize]) = (&[4, 5], &[0, 1, 2, 3]);
    all_raise(|hosts, _| hosts.isolate(2), [inside, inside, inside, inside, outside, outside]);
}

#[test]
fn with_four_seconds_a_partition_is_raised_by_every_rank_within_five() {
    once_within(Duration::from_secs(5), || {
        let Some(hosts) = Hosts::near(2) else { return Duration::ZERO };
        let store = hosts.serve_store();
        let job = Job::spread("sum_by_variable", 2, &hosts).argument(1 << 16);
        let mut ranks = job.environment("TENFOLD_HEARTBEAT", 4).start(store.address());
        ranks.wait_for_all("round 5", SOON);
        let since = Instant::now();
        hosts.isolate(1);
        let took = (0..4).map(|rank| {
            let error = ranks.wait_for_event(rank, "raised PeerSilent ", SOON);
            println!("rank {rank} after {:?}: {}", error.at - since, error.text);
            let other = 1 - rank / 2;
            assert!(error.text.contains(&format!("(host host-{other}, pid ")), "{}", error.text);
            error.at - since
        });
        let longest = took.max().unwrap();
        ranks.tell_all("end");
        ranks.join_well(SOON);
        longest
    });
}

#[test]
fn one_way_loss_is_raised_by_every_rank_and_names_one_of_the_two_ends() {
    // Host 2 reaches all hosts: the failure is reported to it. Host 0 still hears host 1, whose report names the
    // rank that is not heard there. That may be the neighbour of a rank, but not the rank itself.
    let (zero, both): (&[usize], &[usize]) = (&[0, 1], &[0, 1, 2, 3]);
    all_raise(|hosts, _| hosts.cut_one_way(0, 1), [&[1, 2, 3], &[0, 2, 3], zero, zero, both, both]);
}

#[test]
fn a_host_that_goes_down_is_raised_by_all_others() {
    let down: &[usize] = &[4, 5];
    let go_down = |hosts: &Hosts, ranks: &Ranks| {
        // No word of their end comes through.
        hosts.isolate(2);
        ranks.kill(4);
        ranks.kill(5);
    };
    all_raise(go_down, [down, down, down, down, &[], &[]]);
}

#[test]
fn a_rank_that_dies_is_known_on_all_hosts_at_once() {
    once_within(Duration::from_millis(500), || {
        let Some(hosts) = Hosts::near(3) else { return Duration::ZERO };
        let store = hosts.serve_store();
        let mut ranks = summing(&hosts, store.address(), "sum_until_told", 1 << 16);
        let since = Instant::now();
        ranks.kill(3);
        let known = [0, 1, 2, 4, 5].map(|survivor| {
            let error = ranks.wait_for_event(survivor, "raised PeerLost Some(3) ", SOON);
            println!("rank {survivor} after {:?}: {}", error.at - since, error.text);
            let name = format!("rank 3 (host host-1, pid {})", ranks.pid(3));
            assert!(error.text.contains(&name), "{}", error.text);
            error.at - since
        });
        known.into_iter().max().unwrap()
    });
}

#[test]
fn ranks_of_different_hosts_that_disagree_are_told_in_the_same_words() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let mut ranks = Job::spread("differ", 2, &hosts).start(store.address());
    for told in ranks.wait_for_all("", SOON) {
        let expected = "ranks called different operations as #1: ranks 0, 1, 2, 3, 4 called all_reduce(sum, float32 × \
                        1000); rank 5 called all_reduce(sum, float32 × 2000)";
        assert_eq!(told.text, expected);
    }
    ranks.tell_all("end");
    ranks.join_well(SOON);
}

#[test]
fn a_partition_shorter_than_the_heartbeat_is_no_error() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let mut ranks = summing(&hosts, store.address(), "sum_patiently", 1 << 16);
    hosts.isolate(2);
    // A fault lasts as long as it lasts: the second is the test, not a wait for something.
    std::thread::park_timeout(Duration::from_secs(1));
    hosts.heal();
    ranks.wait_for_all("slow round ", SOON);
    end_well(ranks);
}

/// TCP sends again after 0.2, 0.6, 1.4, 3.0 and 6.2 s. A pulse that is sent within 0.4 s after a cut of 3.7 s began is heard more than
/// six seconds later.
#[test]
fn a_partition_that_ends_before_the_limit_is_no_error_however_long_tcp_waits() {
    const CUT: Duration = Duration::from_millis(3700);
    let Some(hosts) = Hosts::near(2) else { return };
    let store = hosts.serve_store();
    for _ in 0..5 {
        let job = Job::spread("sum_by_variable", 2, &hosts).argument(1 << 10);
        let mut ranks = job.environment("TENFOLD_HEARTBEAT", 5.5).start(store.address());
        ranks.wait_for_all("round 5", SOON);
        let since = Instant::now();
        hosts.isolate(1);
        // A fault lasts as long as it lasts: this is the test, not a wait for something.
        std::thread::park_timeout(CUT);
        hosts.heal();
        if since.elapsed() < CUT + Duration::from_millis(700) {
            ranks.wait_for_all("slow round ", SOON);
            ranks.tell(3, "end");
            ranks.wait_for_all("ended in round ", SOON);
            ranks.join_well(SOON);
            return;
        }
        println!("the machine was too busy: the cut lasted {:?}", since.elapsed());
    }
}

#[test]
fn a_store_that_is_cut_off_disturbs_nobody() {
    let Some(hosts) = Hosts::near(3) else { return };
    let store = hosts.serve_store();
    let mut ranks = summing(&hosts, store.address(), "sum_patiently", 1 << 10);
    hosts.isolate_store();
    ranks.wait_for_all("round 500", SOON);
    end_well(ranks);
}

// ── the network is bad ─────────────────────────────────────────────────────────────────────────────────────

#[test]
fn sums_are_right_over_20_ms_of_delay() {
    let slow = Cable::Slow(Slow { delay: Duration::from_millis(20), ..Slow::default() });
    let Some(hosts) = Hosts::join(&[slow, slow, Cable::Ideal]) else { return };
    let store = hosts.serve_store();
    end_well(summing(&hosts, store.address(), "sum_patiently", 1 << 14));
}

#[test]
fn sums_are_right_over_a_cable_that_loses_one_packet_in_a_hundred() {
    let lossy = Cable::Slow(Slow { loss_out: 0.01, loss_in: 0.01, seed: 1, ..Slow::default() });
    let Some(mut hosts) = Hosts::join(&[lossy, Cable::Ideal, Cable::Ideal]) else { return };
    let store = hosts.serve_store();
    let ranks = summing(&hosts, store.address(), "sum_patiently", 1 << 18);
    end_well(ranks);
    let loss = hosts.loss(0);
    println!("{loss:?}");
    assert!(loss.out_lost > 0 && loss.in_lost > 0, "nothing was lost: {loss:?}");
}

/// Rank 0 sends and ends, while what it sent crosses a slow network.
fn end_early(rank: &Rank) {
    let group = connect(rank);
    let mut word = ones(1);
    group.start_all_reduce(word.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
    let mut tensor = ones(3 << 18);
    if rank.rank == 0 {
        group.start_send(tensor.lend(), 1, Tag(0)).unwrap().wait().unwrap();
        rank.event("sent");
        // As a script does that ends without leaving its group.
        std::process::exit(0);
    } else {
        tensor.as_mut_slice::<f32>().fill(0.0);
        let received = group.start_recv(tensor.lend(), 0, Tag(0)).unwrap().wait();
        rank.event(format!("received {received:?} {}", tensor.as_slice::<f32>().iter().sum::<f32>()));
    }
}

#[test]
fn what_a_rank_sent_before_its_end_arrives_however_slow_the_network_is() {
    // The window of a new connection doubles with each round trip, so most of the 3 MiB are in the last two of them.
    let slow = Cable::Slow(Slow { delay: Duration::from_millis(200), ..Slow::default() });
    let Some(hosts) = Hosts::join(&[slow, Cable::Ideal]) else { return };
    let store = hosts.serve_store();
    let mut ranks = Job::spread("end_early", 1, &hosts).start(store.address());
    let sent = ranks.wait_for_event(0, "sent", SOON);
    let received = ranks.wait_for_event(1, "received ", SOON);
    println!("received {:?} after it was sent", received.at.saturating_duration_since(sent.at));
    assert_eq!(received.text, "received Ok(()) 786432");
}

// ── addresses ───────────────────────────────────────────────────────────────────────────────────────────────

/// A store whose server seems to be elsewhere, as with a name that `/etc/hosts` maps to loopback on one host.
struct Mapped(Arc<dyn Store>, Option<SocketAddr>);

impl Store for Mapped {
    fn call(
        &self,
        request: Request<'_>,
        deadline: Deadline,
    ) -> std::result::Result<Response, tenfold_store::Fault> {
        self.0.call(request, deadline)
    }

    fn address(&self) -> Option<SocketAddr> {
        self.1
    }
}

/// Joins through the store that the argument names, and sums.
fn find_each_other(rank: &Rank) {
    let options = Options::new("default").timeout(SOON);
    let (store, options): (Arc<dyn Store>, Options) = match rank.argument.as_str() {
        "prefix" => {
            let inner: Arc<dyn Store> = Arc::new(PrefixStore::new("inner", rank.store() as _));
            (Arc::new(PrefixStore::new("/worker/attempt_0", inner)), options)
        }
        "mapped to loopback on one host" if rank.rank == 0 => {
            (Arc::new(Mapped(rank.store(), Some(SocketAddr::from(([127, 0, 1, 1], 29500))))), options)
        }
        "without an address" => (Arc::new(Mapped(rank.store(), None)), options),
        "only loopback on one host" if rank.rank == 1 => {
            (rank.store(), options.interface(IpAddr::from([127, 0, 0, 1])))
        }
        _ => (rank.store(), options),
    };
    match Group::connect(store, rank.seat(), options) {
        Ok(group) => {
            let mut tensor = ones(1 << 16);
            group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
            let mut word = ones(1);
            group.start_barrier().unwrap().wait().unwrap();
            group.start_all_reduce(word.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
            rank.event(format!("sum {}", tensor.as_slice::<f32>()[7] + word.as_slice::<f32>()[0]));
            rank.order(); // the others may still be reading
        }
        Err(error) => rank.event(format!("raised {error}")),
    }
}

#[test]
fn hosts_find_each_other_whatever_wraps_the_store_and_wherever_it_seems_to_be() {
    let Some(hosts) = Hosts::near(2) else { return };
    for argument in ["prefix", "mapped to loopback on one host", "without an address"] {
        let store = hosts.serve_store();
        let mut ranks = Job::spread("find_each_other", 2, &hosts).argument(argument).start(store.address());
        for event in ranks.wait_for_all("", SOON) {
            assert_eq!(event.text, "sum 8", "{argument}");
        }
        ranks.tell_all("end");
    }
}

#[test]
fn a_rank_that_other_hosts_cannot_reach_is_named_with_the_variable_to_set() {
    let Some(hosts) = Hosts::near(2) else { return };
    let store = hosts.serve_store();
    let job = Job::spread("find_each_other", 1, &hosts).argument("only loopback on one host");
    for event in job.start(store.address()).wait_for_all("raised", SOON) {
        for text in ["rank 1 (host ", "listens on loopback only, and rank 0 (host ", "TENFOLD_INTERFACE"] {
            assert!(event.text.contains(text), "{}", event.text);
        }
    }
}
