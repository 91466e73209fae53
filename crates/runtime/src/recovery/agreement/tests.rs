//! Agreements by hand. Random and complete schedules are in `model` and `small`.

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(10);

fn settings(quorum: Quorum) -> Settings {
    let repeat = Duration::from_millis(20);
    Settings { quorum, rule: Rule::Survivors, repeat, patience: 2 * SECOND, grace: SECOND }
}

fn group(size: usize, quorum: Quorum) -> Vec<Agreement> {
    (0..size).map(|me| Agreement::new(me, size, settings(quorum))).collect()
}

/// Delivers everything in the order in which it was sent, except to and from the dead, for as many message delays as it takes.
/// Returns those, and the number of messages.
fn settle(all: &mut [Agreement], dead: &[usize], now: Duration) -> (usize, usize) {
    let (size, mut delays, mut count) = (all.len(), 0, 0);
    loop {
        let mut wire = Vec::new();
        for (from, agreement) in all.iter_mut().enumerate() {
            for (to, message) in agreement.take_sends() {
                let is_meant = |other: &usize| *other != from && (to == To::All || to == To::Rank(*other));
                let receivers = (0..size).filter(is_meant);
                wire.extend(receivers.map(|other| (from, other, message.clone())));
            }
        }
        wire.retain(|(from, to, _)| !dead.contains(from) && !dead.contains(to));
        if wire.is_empty() {
            return (delays, count);
        }
        delays += 1;
        count += wire.len();
        for (from, to, message) in wire {
            all[to].on_message(from, message, now).expect("it is right");
        }
    }
}

fn decided(agreement: &Agreement) -> (Vec<usize>, u64) {
    let Some(Outcome::Decided(proposal)) = agreement.outcome() else { panic!("{:?}", agreement.outcome()) };
    (proposal.members.iter().collect(), proposal.value)
}

#[test]
fn without_a_fault_it_takes_two_round_trips_and_four_messages_for_each_rank_but_the_leader() {
    for size in [3, 64, 300] {
        let mut all = group(size, Quorum::Majority);
        for (rank, agreement) in all.iter_mut().enumerate() {
            agreement.call(u64::MAX ^ (1 << (rank % 64)), TIMEOUT, Duration::ZERO);
        }
        assert_eq!(settle(&mut all, &[], Duration::ZERO), (4, 4 * (size - 1)));
        let value = if size < 64 { u64::MAX << size } else { 0 };
        assert!(all.iter().all(|agreement| decided(agreement) == ((0..size).collect(), value)));
        assert!(all.iter().all(|agreement| agreement.wake().is_none()), "nothing is left to do");
    }
}

#[test]
fn of_two_ranks_the_first_is_a_quorum_and_decides_a_message_delay_earlier() {
    let mut all = group(2, Quorum::Majority);
    all.iter_mut().for_each(|agreement| agreement.call(3, TIMEOUT, Duration::ZERO));
    let delays_and_messages = settle(&mut all, &[], Duration::ZERO);
    assert_eq!(delays_and_messages, (3, 4), "it decides with its own vote, once the other has joined");
    assert!(all.iter().all(|agreement| decided(agreement) == (vec![0, 1], 3)));

    for (dead, survivor) in [(1, 0), (0, 1)] {
        let mut all = group(2, Quorum::Majority);
        all[survivor].call(3, SECOND, Duration::ZERO);
        all[survivor].on_suspect(dead, Duration::ZERO);
        all[survivor].on_tick(SECOND);
        match survivor {
            0 => assert_eq!(decided(&all[0]), (vec![0], 3)),
            _ => assert!(matches!(all[1].outcome(), Some(Outcome::Failed(Failure::Quorum { .. })))),
        }
    }
    let mut alone = group(1, Quorum::Majority);
    alone[0].call(5, TIMEOUT, Duration::ZERO);
    assert_eq!((decided(&alone[0]), settle(&mut alone, &[], Duration::ZERO)), ((vec![0], 5), (0, 0)));
}

#[test]
fn a_rank_that_hears_of_the_decision_passes_it_on_to_those_that_joined_it() {
    let mut all = group(3, Quorum::Majority);
    all.iter_mut().for_each(|agreement| agreement.call(1, TIMEOUT, Duration::ZERO));
    all[2].take_sends();
    all[2].on_suspect(0, Duration::ZERO);
    let joins = all[2].take_sends();
    let [(To::Rank(1), join @ Message::Join { .. })] = &joins[..] else { panic!("{joins:?}") };
    all[1].take_sends();
    all[1].on_message(2, join.clone(), Duration::ZERO).expect("it is right");
    assert_eq!(all[1].take_sends(), [], "rank 1 follows rank 0, and rank 0 may decide");
    let proposal = Proposal { members: Ranks::of(3, [0, 1]), value: 1 };
    let decision = Message::Decided { proposal };
    all[1].on_message(0, decision.clone(), Duration::ZERO).expect("it is right");
    assert_eq!(all[1].take_sends(), [(To::Rank(2), decision)]);
}

#[test]
fn a_leader_whose_followers_decide_with_another_one_learns_that_it_was_excluded() {
    let mut all = group(4, Quorum::Majority);
    all[0].on_suspect(1, Duration::ZERO);
    all[1].on_suspect(0, Duration::ZERO);
    all[2].call(1, TIMEOUT, Duration::ZERO);
    all[1].call(1, TIMEOUT, Duration::ZERO);
    all[1].on_tick(2 * SECOND);
    settle(&mut all, &[0], 2 * SECOND);
    assert_eq!(all[1].outcome(), None, "ranks 1 and 2 are half of the group, without rank 0");
    let decision = Message::Decided { proposal: Proposal { members: Ranks::of(4, [0, 2]), value: 1 } };
    all[2].on_message(0, decision, 2 * SECOND).expect("it is right");
    all[2].take_sends();
    for seconds in 3..8 {
        all[1].on_tick(seconds * SECOND);
        settle(&mut all, &[0], seconds * SECOND);
    }
    assert!(matches!(all[1].outcome(), Some(Outcome::Excluded(_))), "{:?}", all[1].outcome());
}

#[test]
fn what_was_accepted_in_an_earlier_ballot_does_not_count() {
    let mut leader = Agreement::new(0, 3, settings(Quorum::Majority));
    leader.call(1, TIMEOUT, Duration::ZERO);
    let (first, second) = (Ballot::FIRST, Ballot { round: 1, rank: 0 });
    for ballot in [first, second] {
        for rank in [1, 2] {
            let join = Message::Join {
                ballot,
                value: Some(1),
                suspects: Ranks::none(3),
                left: Ranks::none(3),
                accepted: None,
            };
            leader.on_message(rank, join, SECOND).expect("it is right");
        }
        if ballot == first {
            let refusal = Message::Refuse { ballot, promised: Ballot { round: 0, rank: 1 } };
            leader.on_message(2, refusal, SECOND).expect("it is right");
            leader.on_tick(2 * SECOND);
        }
    }
    leader.on_message(1, Message::Accept { ballot: first }, 2 * SECOND).expect("it is right");
    assert_eq!(leader.outcome(), None, "it is late");
    leader.on_message(1, Message::Accept { ballot: second }, 2 * SECOND).expect("it is right");
    assert_eq!(decided(&leader), (vec![0, 1, 2], 1));
}

#[test]
fn dead_ranks_that_all_know_of_cost_nothing() {
    let mut all = group(64, Quorum::Majority);
    let dead = [0, 5, 63];
    for agreement in &mut all {
        dead.iter().for_each(|rank| agreement.on_suspect(*rank, Duration::ZERO));
        agreement.call(3, TIMEOUT, Duration::ZERO);
    }
    let (delays, count) = settle(&mut all, &dead, Duration::ZERO);
    assert_eq!((delays, count), (4, 4 * 60));
    assert_eq!(decided(&all[1]).0.len(), 61);
}

#[test]
fn each_leader_that_dies_costs_one_more_round_and_no_timeout() {
    for deaths in 1..=3 {
        let mut all = group(64, Quorum::Majority);
        all.iter_mut().for_each(|agreement| agreement.call(1, TIMEOUT, Duration::ZERO));
        let mut dead: Vec<usize> = Vec::new();
        for leader in 0..deaths {
            dead.push(leader);
            for agreement in all.iter_mut().skip(leader + 1) {
                agreement.on_suspect(leader, Duration::ZERO);
            }
        }
        let (delays, count) = settle(&mut all, &dead, Duration::ZERO);
        assert!(
            delays <= 5 && count <= 6 * 64 * (deaths + 1),
            "{deaths} deaths: {delays} delays, {count} messages"
        );
        let members: Vec<usize> = (deaths..64).collect();
        assert!(all[deaths..].iter().all(|agreement| decided(agreement).0 == members));
    }
}

#[test]
fn a_rank_that_does_not_call_is_left_out_after_a_while_and_learns_that() {
    let mut all = group(4, Quorum::Majority);
    for rank in [1, 2, 3] {
        all[rank].call(1, TIMEOUT, Duration::ZERO);
    }
    settle(&mut all, &[], Duration::ZERO);
    assert_eq!(all[1].outcome(), None, "rank 0 may still call");
    assert!(all[0].wake().is_some_and(|at| at <= 2 * SECOND), "it leads although its program has not called");
    all[0].on_tick(2 * SECOND);
    settle(&mut all, &[], 2 * SECOND);
    assert_eq!(decided(&all[3]).0, [1, 2, 3]);
    assert_eq!(all[0].outcome(), None);
    all[0].call(1, TIMEOUT, 3 * SECOND);
    assert!(matches!(all[0].outcome(), Some(Outcome::Excluded(_))));
}

#[test]
fn of_two_ranks_that_cannot_reach_each_other_one_is_left_out() {
    let mut all = group(5, Quorum::Majority);
    all[2].on_suspect(4, Duration::ZERO);
    all[4].on_suspect(2, Duration::ZERO);
    all[4].on_suspect(3, Duration::ZERO);
    all.iter_mut().for_each(|agreement| agreement.call(1, TIMEOUT, Duration::ZERO));
    settle(&mut all, &[], Duration::ZERO);
    assert_eq!(decided(&all[0]).0, [0, 1, 2, 3]);
    assert!(matches!(all[4].outcome(), Some(Outcome::Excluded(_))));
}

#[test]
fn in_a_partition_only_one_side_continues_unless_all_that_are_reachable_suffice() {
    for (quorum, sides) in [(Quorum::Majority, 1), (Quorum::AtLeast(3), 1), (Quorum::AllReachable, 2)] {
        let mut all = group(5, quorum);
        for agreement in &mut all {
            let others = if agreement.me < 2 { 2..5 } else { 0..2 };
            others.for_each(|rank| agreement.on_suspect(rank, Duration::ZERO));
            agreement.call(1, TIMEOUT, Duration::ZERO);
        }
        let (mut left, mut right) = (all.clone(), all);
        settle(&mut left, &[2, 3, 4], Duration::ZERO);
        settle(&mut right, &[0, 1], Duration::ZERO);
        assert_eq!(decided(&right[4]).0, [2, 3, 4]);
        assert_eq!(left[0].outcome().is_some(), sides == 2, "{quorum:?}");
    }
}

#[test]
fn a_call_that_times_out_says_what_it_waited_for_and_may_be_repeated() {
    let fault = |agreement: &Agreement| {
        let Some(Outcome::Failed(failure)) = agreement.outcome() else { panic!("{:?}", agreement.outcome()) };
        failure.fault().to_string()
    };
    let mut all = group(3, Quorum::Majority);
    all[0].call(6, SECOND, Duration::ZERO);
    all[1].call(3, SECOND, Duration::ZERO);
    settle(&mut all, &[2], Duration::ZERO);
    all.iter_mut().for_each(|agreement| agreement.on_tick(SECOND));
    assert_eq!(
        fault(&all[0]),
        "no agreement: rank 2 has not called\n  hint: call on all ranks, or raise `timeout`"
    );
    assert_eq!(
        fault(&all[1]),
        "no agreement: rank 0, which leads it, has not decided\n  hint: see the log of rank 0, or raise `timeout`"
    );
    all[1].call(7, TIMEOUT, SECOND);
    assert_eq!(all[1].outcome(), None, "it waits again");
    all[0].on_suspect(2, SECOND);
    settle(&mut all, &[2], SECOND);
    assert_eq!(decided(&all[1]), (vec![0, 1], 2), "with what it contributed first");
    all[0].call(0, TIMEOUT, SECOND);
    assert_eq!(decided(&all[0]), (vec![0, 1], 2), "the same for a rank that had failed");

    let mut all = group(3, Quorum::Majority);
    all[1].on_suspect(0, Duration::ZERO);
    all[1].on_suspect(2, Duration::ZERO);
    all[1].call(1, SECOND, Duration::ZERO);
    all[1].on_tick(SECOND);
    assert_eq!(
        fault(&all[1]),
        "no agreement: it needs more than half of 3 ranks, or half with rank 0; no answer from ranks 0, 2\n  \
         hint: restart the job, or check the network between the hosts and call again"
    );
}

#[test]
fn what_no_correct_rank_sends_is_refused_and_changes_nothing() {
    let mut all = group(3, Quorum::Majority);
    let members = |ranks: &[usize]| Ranks::of(3, ranks.iter().copied());
    let proposal = |ranks: &[usize]| Proposal { members: members(ranks), value: 1 };
    let ballot = |round, rank| Ballot { round, rank };
    all[1].call(1, TIMEOUT, Duration::ZERO);
    let mut refusal = |from: usize, message: Message| {
        let before = format!("{:?}", all[1]);
        let refused = all[1].on_message(from, message, Duration::ZERO).expect_err("it is wrong");
        assert_eq!(format!("{:?}", all[1]), before);
        refused
    };
    let prepare = |rank| Message::Prepare { ballot: ballot(0, rank) };
    assert_eq!(refusal(3, prepare(0)), Refused::Rank { rank: 3, size: 3 });
    assert_eq!(refusal(1, prepare(1)), Refused::Rank { rank: 1, size: 3 });
    assert_eq!(refusal(2, prepare(0)), Refused::Leader { from: 2, leader: 0 });
    let accept = Message::Accept { ballot: ballot(0, 0) };
    assert_eq!(refusal(2, accept), Refused::Leader { from: 2, leader: 0 });
    let propose = |ranks: &[usize]| Message::Propose {
        ballot: ballot(0, 0),
        proposal: proposal(ranks),
        dead: Ranks::none(3),
    };
    assert_eq!(refusal(0, propose(&[])), Refused::Members { from: 0 });
    all[1].on_message(0, propose(&[0, 1]), Duration::ZERO).expect("it is right");
    let mut refusal =
        |from, message| all[1].on_message(from, message, Duration::ZERO).expect_err("it is wrong");
    assert_eq!(
        refusal(0, propose(&[0, 1, 2])),
        Refused::Contradiction { from: 0 },
        "one ballot, one proposal"
    );
    all[1]
        .on_message(0, Message::Decided { proposal: proposal(&[0, 1]) }, Duration::ZERO)
        .expect("it is right");
    let other = Message::Decided { proposal: proposal(&[0, 1, 2]) };
    let refused = all[1].on_message(2, other.clone(), Duration::ZERO);
    assert_eq!(refused, Err(Refused::Contradiction { from: 2 }));
    let refused = all[2].on_message(0, other, Duration::ZERO);
    assert_eq!(refused, Err(Refused::Impossible { from: 0 }), "rank 2 has not called");
}

#[test]
fn the_last_round_is_not_exceeded() {
    let mut all = group(3, Quorum::Majority);
    all[0].call(1, TIMEOUT, Duration::ZERO);
    all[0].on_suspect(1, Duration::ZERO);
    let last = Ballot { round: ROUND_MAX, rank: 1 };
    all[0].on_message(1, Message::Prepare { ballot: last }, Duration::ZERO).expect("it is in range");
    for seconds in 1..9 {
        all[0].on_tick(seconds * SECOND);
    }
    let too_high = |(_, message): &(To, Message)| match message {
        Message::Prepare { ballot } | Message::Propose { ballot, .. } => ballot.round > ROUND_MAX,
        _ => false,
    };
    assert!(!all[0].take_sends().iter().any(too_high));
}

/// Ranks 0 and 3 decide without the others, and die. Rank 1 sees that. At rank 2, what they sent arrives late.
#[test]
fn what_the_dead_have_decided_is_not_heard_once_the_living_have_decided_without_them() {
    let mut all = group(4, Quorum::Living);
    for rank in [0, 3] {
        [1, 2].iter().for_each(|other| all[rank].on_suspect(*other, Duration::ZERO));
        all[rank].call(1, TIMEOUT, Duration::ZERO);
    }
    settle(&mut all, &[1, 2], Duration::ZERO);
    assert_eq!(decided(&all[0]).0, [0, 3], "half of them with rank 0");
    let late = Message::Decided { proposal: all[0].decision().cloned().expect("it is decided") };
    [1, 2].iter().for_each(|rank| all[*rank].call(1, TIMEOUT, Duration::ZERO));
    [0, 3].iter().for_each(|dead| all[1].on_dead(*dead, Duration::ZERO));
    settle(&mut all, &[0, 3], Duration::ZERO);
    assert_eq!(decided(&all[1]).0, [1, 2]);
    all[2].on_message(0, late, Duration::ZERO).expect("it is ignored");
    assert_eq!(decided(&all[2]).0, [1, 2], "rank 1 has told it that rank 0 is dead");
}

/// The proposal says which ranks are dead, so one that dies later costs another ballot.
#[test]
fn a_death_between_proposal_and_decision_changes_what_is_proposed_only_if_it_was_not_accepted() {
    let mut all = group(3, Quorum::Living);
    all.iter_mut().for_each(|agreement| agreement.call(1, TIMEOUT, Duration::ZERO));
    all[1].on_dead(0, Duration::ZERO);
    all[2].on_dead(0, Duration::ZERO);
    all[1].take_sends();
    all[2].take_sends();
    let join = all[2].join(Ballot { round: 0, rank: 1 });
    all[1].on_message(2, join, Duration::ZERO).expect("it is right");
    assert!(all[1].lead.as_ref().is_some_and(|lead| lead.proposal.is_some()), "it has proposed");
    all[1].on_dead(2, Duration::ZERO);
    assert_eq!(decided(&all[1]).0, [1, 2], "rank 2 may have accepted it and told others, so it stays");
}

#[test]
fn a_rank_that_says_that_it_will_not_call_is_not_waited_for() {
    let mut all = group(3, Quorum::Majority);
    [0, 1].iter().for_each(|rank| all[*rank].call(1, TIMEOUT, Duration::ZERO));
    settle(&mut all, &[], Duration::ZERO);
    assert_eq!(all[0].outcome(), None, "rank 2 may still call");
    all[0].on_left(2, Duration::ZERO);
    settle(&mut all, &[], Duration::ZERO);
    assert_eq!(decided(&all[0]).0, [0, 1]);
    assert_eq!(decided(&all[1]).0, [0, 1]);
}

#[test]
fn a_leader_asks_a_rank_that_another_one_suspects_before_it_would_repeat_anything() {
    let mut all = group(4, Quorum::Living);
    all[1].on_dead(3, Duration::ZERO);
    [0, 1, 2].iter().for_each(|rank| all[*rank].call(1, TIMEOUT, Duration::ZERO));
    let [(To::Rank(0), join)] = &all[1].take_sends()[..] else { panic!("it joins") };
    all[0].on_message(1, join.clone(), Duration::ZERO).expect("it is right");
    let sends = all[0].take_sends();
    assert!(matches!(sends[..], [(To::Rank(3), Message::Prepare { .. })]), "{sends:?}");
    all[0].on_message(1, join.clone(), Duration::ZERO).expect("it is right");
    assert!(all[0].take_sends().is_empty(), "once is enough");
    all[0].on_dead(3, Duration::ZERO); // as it found out
    settle(&mut all, &[3], Duration::ZERO);
    assert_eq!(decided(&all[2]).0, [0, 1, 2]);
}
