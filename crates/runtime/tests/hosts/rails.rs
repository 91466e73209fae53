//! Hosts with two interfaces, of which both are named: messages take turns on them.

use super::*;

const BOTH: &str = "eth0,eth1";

/// How long a group waits whose second network is cut.
const BRIEFLY: Duration = Duration::from_secs(3);

/// A few MiB to and from each other rank, and all collectives with short and long tensors.
pub(super) fn exchange_long_messages(rank: &Rank) {
    let group = connect(rank);
    for round in 0..4 {
        let others = || (0..group.size()).filter(|other| *other != group.rank());
        let mut pending = Vec::new();
        let mut numbers: Vec<(usize, Buffer)> =
            others().map(|other| (other, Buffer::zeros(DType::F32, (1 << 20) + round))).collect();
        for (other, tensor) in &mut numbers {
            pending.push(group.start_recv(tensor.lend(), *other, Tag(0)).unwrap());
        }
        for other in others() {
            let mut tensor = Buffer::zeros(DType::F32, (1 << 20) + round);
            tensor.as_mut_slice::<f32>().fill((group.rank() * 10 + round) as f32);
            pending.push(group.start_send(tensor.lend(), other, Tag(0)).unwrap());
        }
        pending.iter().for_each(|work| work.wait().unwrap());
        for (other, tensor) in &numbers {
            let expected = (other * 10 + round) as f32;
            assert!(tensor.as_slice::<f32>().iter().all(|value| *value == expected), "round {round}");
        }
    }
    for count in [1, 1000, 400_003] {
        check_every_collective(&group, count);
    }
}

/// As `sum_until_told`, in a group that does not wait for long.
pub(super) fn sum_briefly(rank: &Rank) {
    let options = Options::new("default").timeout(BRIEFLY).heartbeat(HEARTBEAT_LONG);
    sum(rank, &Group::connect(rank.store(), rank.seat(), options).unwrap());
}

#[test]
fn messages_take_turns_on_all_interfaces_that_are_named() {
    let Some(hosts) = Hosts::near(2) else { return };
    hosts.add_rail(&[0, 1]);
    let store = hosts.serve_store();
    let job = Job::spread("exchange_long_messages", 2, &hosts).environment("TENFOLD_INTERFACE", BOTH);
    job.start(store.address()).join_well(SOON);
    let (first, second) = (hosts.traffic().1, hosts.rail_traffic(&[0, 1]).1);
    println!("{first} bytes by eth0, {second} by eth1");
    assert!(second > 4 << 20, "the second interface carries messages");
    assert!(
        first < 2 * second && second < 2 * first,
        "{first} and {second} bytes are not about equal shares"
    );
}

#[test]
fn a_host_with_one_interface_talks_to_hosts_that_have_two() {
    let Some(hosts) = Hosts::near(3) else { return };
    hosts.add_rail(&[0, 2]);
    let store = hosts.serve_store();
    let job = Job::spread("exchange_long_messages", 1, &hosts).environment("TENFOLD_INTERFACE", BOTH);
    job.start(store.address()).join_well(SOON);
    let second = hosts.rail_traffic(&[0, 2]).1;
    assert!(second > 4 << 20, "hosts 0 and 2 use both of theirs: {second} bytes");
}

#[test]
fn the_end_of_a_rank_is_known_at_once_with_several_interfaces() {
    once_within(Duration::from_millis(500), || {
        let Some(hosts) = Hosts::near(2) else { return Duration::ZERO };
        hosts.add_rail(&[0, 1]);
        let store = hosts.serve_store();
        let job = Job::spread("sum_until_told", 2, &hosts).argument(1 << 16);
        let mut ranks = job.environment("TENFOLD_INTERFACE", BOTH).start(store.address());
        ranks.wait_for_all("round 5", SOON);
        let since = Instant::now();
        ranks.kill(3);
        let known =
            [0, 1, 2].map(|survivor| ranks.wait_for_event(survivor, "raised PeerLost Some(3) ", SOON).at);
        known.into_iter().max().unwrap() - since
    });
}

/// Signs of life go by the first network, so no rank is given up: operations time out, and name a rank that has sent nothing.
#[test]
fn a_second_network_that_is_cut_ends_in_a_timeout_that_names_a_rank_behind_it() {
    let Some(hosts) = Hosts::near(2) else { return };
    hosts.add_rail(&[0, 1]);
    let store = hosts.serve_store();
    let job = Job::spread("sum_briefly", 1, &hosts).argument(1 << 16);
    let mut ranks = job.environment("TENFOLD_INTERFACE", BOTH).start(store.address());
    ranks.wait_for_all("round 5", SOON);
    hosts.cut_rail(1);
    for rank in 0..2 {
        let error = ranks.wait_for_event(rank, "raised Timeout ", SOON);
        assert!(error.text.contains(&format!("rank {} (host host-{}", 1 - rank, 1 - rank)), "{}", error.text);
    }
    ranks.tell_all("end");
    ranks.join_well(SOON);
}
