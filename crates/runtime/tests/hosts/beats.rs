//! One rank of a host asks for all of them: which ranks are given up when it freezes, dies or leaves, and what the questions
//! cost. All ranks talk to all others first, so that each has a stream to each. Which rank of a host asks depends on random
//! numbers, so tests try all of them.

use super::*;

/// Exchanges with all others, round after round, in a group without the rank that the argument names, if it names one.
/// Round 3 begins when the test orders it.
pub(super) fn exchange_with_all(rank: &Rank) {
    let world = connect_with(rank, HEARTBEAT);
    exchange(&world).unwrap();
    let absent: Option<usize> = rank.argument.parse().ok();
    let members: Vec<usize> = (0..rank.size).filter(|member| Some(*member) != absent).collect();
    let options = Options::new("some").timeout(2 * SOON).heartbeat(HEARTBEAT);
    let some = world.subgroup(&members, options).unwrap();
    rank.event("has met all");
    rank.order();
    let Some(group) = some else { return }; // it leaves in an orderly way
    for round in 3.. {
        if let Err(error) = exchange(&group) {
            rank.event(format!("raised {:?} {:?} {error}", error.kind(), error.peer()));
            break;
        }
        if round % 5 == 0 {
            rank.event(format!("round {round}"));
        }
    }
    rank.order();
}

/// Has a stream to all others, and nothing to do until the test orders another exchange.
pub(super) fn idle(rank: &Rank) {
    let options = Options::new("default").timeout(2 * SOON);
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    exchange(&group).unwrap();
    rank.event("has met all");
    rank.order();
    exchange(&group).unwrap();
    rank.event("still works");
    rank.order();
}

/// A message to and from each other rank. A collective would be free to send them by way of others.
fn exchange(group: &Group) -> tenfold::Result<()> {
    let others = || (0..group.size()).filter(|other| *other != group.rank());
    let mut pending = Vec::new();
    for other in others() {
        let mut number = Buffer::zeros(DType::F32, 1);
        pending.push(group.start_recv(number.lend(), other, Tag(0))?);
    }
    for other in others() {
        pending.push(group.start_send(ones(1).lend(), other, Tag(0))?);
    }
    pending.iter().try_for_each(|work| work.wait())
}

/// Three ranks on each of two hosts that have streams to each other, in a group without `absent`.
fn exchanging(hosts: &Hosts, store: SocketAddr, absent: Option<usize>) -> Ranks {
    let argument = absent.map_or_else(String::new, |absent| absent.to_string());
    let mut ranks = Job::spread("exchange_with_all", 3, hosts).argument(argument).start(store);
    ranks.wait_for_all("has met all", SOON);
    ranks
}

/// All of `watchers` raise, and name `frozen`; how long it took.
fn all_name(ranks: &mut Ranks, watchers: &[usize], frozen: usize, since: Instant) -> Duration {
    let took = watchers.iter().map(|watcher| {
        let error = ranks.wait_for_event(*watcher, "raised ", SOON);
        println!("rank {watcher} after {:?}: {}", error.at - since, error.text);
        let name =
            format!("(host host-{}, pid {}) shows no sign of life for ", frozen / 3, ranks.pid(frozen));
        assert!(error.text.starts_with("raised PeerSilent ") && error.text.contains(&name), "{}", error.text);
        error.at - since
    });
    took.max().unwrap()
}

#[test]
fn a_frozen_rank_is_named_and_no_other_whichever_rank_of_its_host_it_is() {
    for frozen in 3..6 {
        once_within(HEARTBEAT + GRACE, || {
            let Some(hosts) = Hosts::near(2) else { return Duration::ZERO };
            let store = hosts.serve_store();
            let mut ranks = exchanging(&hosts, store.address(), None);
            ranks.tell_all("begin");
            ranks.wait_for_all("round 5", SOON);
            let since = Instant::now();
            ranks.stop(frozen);
            let watchers: Vec<usize> = (0..6).filter(|rank| *rank != frozen).collect();
            all_name(&mut ranks, &watchers, frozen, since)
        });
    }
}

#[test]
fn a_frozen_rank_is_named_also_if_another_rank_of_its_host_is_killed() {
    for (killed, frozen) in [(3, 4), (4, 5), (5, 3)] {
        once_within(HEARTBEAT + GRACE, || {
            let Some(hosts) = Hosts::near(2) else { return Duration::ZERO };
            let store = hosts.serve_store();
            let mut ranks = exchanging(&hosts, store.address(), Some(killed));
            let watchers: Vec<usize> = (0..6).filter(|rank| ![killed, frozen].contains(rank)).collect();
            watchers.iter().chain([&frozen]).for_each(|rank| ranks.tell(*rank, "begin"));
            for rank in watchers.iter().chain([&frozen]) {
                ranks.wait_for_event(*rank, "round 5", SOON);
            }
            let since = Instant::now();
            ranks.stop(frozen);
            ranks.kill(killed);
            all_name(&mut ranks, &watchers, frozen, since)
        });
    }
}

#[test]
fn when_a_rank_leaves_the_others_of_its_host_go_on() {
    let Some(hosts) = Hosts::near(2) else { return };
    for leaves in [0, 1, 2] {
        let store = hosts.serve_store();
        let mut ranks = exchanging(&hosts, store.address(), Some(leaves));
        ranks.tell(leaves, "leave");
        // Ranks that do not talk are heard only because they are asked. The time is the test, not a wait for something.
        std::thread::park_timeout(2 * HEARTBEAT);
        ranks.tell_all("begin");
        for rank in (0..6).filter(|rank| *rank != leaves) {
            let event = ranks.wait_for_event(rank, "r", SOON); // `raised` or `round`
            assert_eq!(event.text, "round 5", "rank {rank} after rank {leaves} left");
        }
    }
}

#[test]
fn ranks_of_two_hosts_that_are_cut_off_name_each_other_and_no_rank_of_a_third() {
    once_within(HEARTBEAT + GRACE, || {
        let Some(hosts) = Hosts::near(3) else { return Duration::ZERO };
        let store = hosts.serve_store();
        let mut ranks = exchanging(&hosts, store.address(), None);
        ranks.tell_all("begin");
        ranks.wait_for_all("round 5", SOON);
        let since = Instant::now();
        hosts.cut_one_way(0, 1);
        hosts.cut_one_way(1, 0);
        let took = (0..9).map(|rank| {
            let error = ranks.wait_for_event(rank, "raised PeerSilent ", SOON);
            println!("rank {rank} after {:?}: {}", error.at - since, error.text);
            let third = (6..9).any(|peer| error.text.contains(&format!("pid {}) shows no", ranks.pid(peer))));
            assert!(!third, "rank {rank} names a rank that all others reach: {}", error.text);
            error.at - since
        });
        took.max().unwrap()
    });
}

/// Prints a line of the table in docs/scale.md: `TENFOLD_HOSTS=4 TENFOLD_RANKS=2 cargo test --test hosts -- --ignored
/// what_idle_hosts_send --nocapture`.
#[test]
#[ignore = "a measurement for docs/scale.md that checks nothing; it takes half a minute"]
fn what_idle_hosts_send() {
    let number = |name: &str, or: usize| std::env::var(name).map_or(or, |value| value.parse().unwrap());
    let (count, per_host) = (number("TENFOLD_HOSTS", 4), number("TENFOLD_RANKS", 2));
    let Some(hosts) = Hosts::near(count) else { return };
    let store = hosts.serve_store();
    let mut ranks = Job::spread("idle", per_host, &hosts).start(store.address());
    ranks.wait_for_all("has met all", 2 * SOON);
    std::thread::park_timeout(Duration::from_secs(5)); // until all know all
    let (start, before) = (Instant::now(), hosts.traffic());
    std::thread::park_timeout(Duration::from_secs(30));
    let (took, after) = (start.elapsed().as_secs_f64(), hosts.traffic());
    let (packets, bytes) = ((after.0 - before.0) as f64 / took, (after.1 - before.1) as f64 / took);
    let pairs = (count * (count - 1) / 2) as f64;
    println!(
        "| {count} × {per_host} | {packets:.1} | {:.2} | {:.0} | {:.1} |",
        packets / pairs,
        bytes / pairs,
        bytes / (count * per_host) as f64
    );
    ranks.tell_all("exchange");
    ranks.wait_for_all("still works", SOON);
    ranks.tell_all("end");
    ranks.join_well(SOON);
}
