//! All ranks of a group in one thread: the seed says who moves next.
//!
//! Each rank works through the same list of calls; a fast one is in the next call while others are in the last. Every
//! second seed polls a rank only when one of its wants has come, as the engine does when it sleeps: a run that wants the
//! wrong thing never wakes. If no rank can make progress and nothing is on its way, the world is stuck. That is a bug,
//! unless a rank died or called something else; then all ranks that wait for that rank must be able to name it.

use tenfold_plan::{Rank, Topology};

use super::calls::{Call, Job};
use super::{Chance, Network, Port};
use crate::fault::{ErrorKind, Fault};
use crate::run::Run;
use crate::transport::Wants;

/// What goes wrong in a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    /// A rank dies at some moment.
    Death,
    /// A rank calls something else once.
    Mistake,
}

#[derive(Debug)]
enum State {
    Working,
    Done,
    Dead,
    Failed(Fault),
}

#[derive(Debug)]
struct Actor {
    state: State,
    calls_done: usize,
    expected: Vec<(usize, Vec<u8>)>,
    /// Computes, or is stopped, until then.
    busy_until: u64,
    /// Was polled since anything changed.
    polled: bool,
}

struct World {
    topology: Topology,
    piece: usize,
    calls: Vec<Call>,
    trouble: Trouble,
    /// Who makes trouble, and what it calls instead of which call.
    culprit: Rank,
    mistake: Option<(usize, Call)>,
    /// When the culprit dies, counted in polls of all ranks.
    death: usize,
    /// Ranks are polled only when what they want has come.
    sleepy: bool,
    slow: Option<Rank>,
    network: Network,
    runs: Vec<Option<Run>>,
    actors: Vec<Actor>,
    polls: usize,
    chance: Chance,
}

impl World {
    fn new(trouble: Trouble, seed: u64) -> Self {
        let mut chance = Chance(seed);
        let least = if trouble == Trouble::None { 1 } else { 2 };
        let most = if chance.once_in(8) { 17 } else { 9 };
        let size = least + chance.below(most - least + 1);
        let hosts = 1 + chance.below(chance.clone().pick(&[1, 2, 3, size]));
        let topology = Topology::new((0..size).map(|_| chance.below(hosts)).collect());
        let piece = chance.pick(&[64, 128, 256]);
        let calls: Vec<Call> =
            (0..1 + chance.below(5)).map(|_| Call::random(&topology, piece, &mut chance)).collect();
        let mistaken = chance.below(calls.len());
        let mistake = (trouble == Trouble::Mistake)
            .then(|| (mistaken, calls[mistaken].mistaken(&topology, piece, &mut chance)));
        let actor = || Actor {
            state: State::Working,
            calls_done: 0,
            expected: Vec::new(),
            busy_until: 0,
            polled: false,
        };
        World {
            network: Network::new(&topology, &mut chance),
            piece,
            calls,
            trouble,
            culprit: chance.below(size),
            mistake,
            death: chance.below(40 * size),
            sleepy: seed % 2 == 1,
            slow: chance.once_in(3).then(|| chance.below(size)),
            runs: (0..size).map(|_| None).collect(),
            actors: (0..size).map(|_| actor()).collect(),
            polls: 0,
            topology,
            chance,
        }
    }

    fn run(mut self) {
        while self.actors.iter().any(|actor| matches!(actor.state, State::Working)) {
            let ready: Vec<Rank> = (0..self.actors.len()).filter(|rank| self.may_move(*rank)).collect();
            if !ready.is_empty() && !self.chance.once_in(4) {
                let rank = self.chance.pick(&ready);
                self.poll(rank);
            } else if self.network.advance() {
                self.something_changed();
            } else if ready.is_empty() {
                self.resolve();
            }
            if self.trouble == Trouble::Death && self.polls == self.death {
                self.actors[self.culprit].state = State::Dead;
            }
        }
        self.check_end();
    }

    fn something_changed(&mut self) {
        self.actors.iter_mut().for_each(|actor| actor.polled = false);
    }

    fn may_move(&self, rank: Rank) -> bool {
        let actor = &self.actors[rank];
        if !matches!(actor.state, State::Working) || actor.polled || actor.busy_until > self.network.now {
            return false;
        }
        match &self.runs[rank] {
            Some(_) if self.sleepy => self.network.grants(rank, &self.wants(rank)),
            _ => true,
        }
    }

    fn wants(&self, rank: Rank) -> Wants {
        let mut wants = Wants::default();
        if let Some(run) = &self.runs[rank] {
            run.wants(&mut wants);
        }
        wants
    }

    /// What `rank` calls next.
    fn call(&self, rank: Rank) -> &Call {
        let number = self.actors[rank].calls_done;
        match &self.mistake {
            Some((mistaken, call)) if rank == self.culprit && number == *mistaken => call,
            _ => &self.calls[number],
        }
    }

    fn poll(&mut self, rank: Rank) {
        let before = self.network.changes;
        if self.runs[rank].is_none() {
            let seq = self.actors[rank].calls_done as u64 + 1;
            let Job { run, expected } = self.call(rank).start(seq, rank, &self.topology, self.piece);
            (self.runs[rank], self.actors[rank].expected) = (Some(run), expected);
            self.network.changes += 1;
        }
        for to in 0..self.actors.len() {
            self.network.link(rank, to).blocked = None;
        }
        let mut run = self.runs[rank].take().expect("it was started above");
        let position = run.position();
        let polled = run.poll(&mut Port { rank, network: &mut self.network, runs: &self.runs });
        let mut moved = run.position() != position || self.network.changes != before;
        match polled {
            Err(fault) => {
                assert!(self.trouble == Trouble::Mistake, "rank {rank} failed: {fault:?}");
                self.runs[rank] = Some(run);
                (self.actors[rank].state, moved) = (State::Failed(fault), true);
            }
            Ok(polled) if polled.is_ready() => {
                self.finish(rank, run);
                moved = true;
            }
            Ok(_) => self.runs[rank] = Some(run),
        }
        if moved {
            self.something_changed();
        }
        // Polling it again changes nothing before something else does.
        self.actors[rank].polled = self.runs[rank].is_some();
        self.polls += 1;
        if moved {
            self.rest(rank); // a rank that only waits must not keep the clock going
        }
    }

    /// Compares the results and frees the memory, so that a rank that still reads it fails.
    fn finish(&mut self, rank: Rank, run: Run) {
        let label = *run.label();
        let buffers = run.into_buffers();
        let actor = &mut self.actors[rank];
        let is_mistaken =
            matches!(&self.mistake, Some((call, _)) if rank == self.culprit && actor.calls_done == *call);
        for (view, expected) in actor.expected.drain(..).filter(|_| !is_mistaken) {
            let found = buffers.view(view).span().bytes().to_vec();
            assert_eq!(
                found, expected,
                "wrong result on rank {rank} in view {view} of {label} #{}",
                label.seq
            );
        }
        actor.calls_done += 1;
        if actor.calls_done == self.calls.len() {
            actor.state = State::Done;
        }
    }

    /// Now and then a rank does something else for a while.
    fn rest(&mut self, rank: Rank) {
        let pause = match self.slow {
            Some(slow) if slow == rank => 25,
            _ if self.chance.once_in(48) => self.chance.below(200) as u64,
            _ => return,
        };
        self.actors[rank].busy_until = self.network.now + pause;
        self.network.alarm(self.network.now + pause);
    }

    /// Called when no rank can make progress. Ranks that wait for a rank that will not answer fail; there must be one.
    fn resolve(&mut self) {
        let working = |rank: &Rank| matches!(self.actors[*rank].state, State::Working);
        let verdicts: Vec<(Rank, Fault)> = (0..self.actors.len())
            .filter(working)
            .filter_map(|rank| Some((rank, self.verdict(rank)?)))
            .collect();
        if verdicts.is_empty() && self.trouble == Trouble::Mistake {
            return self.time_out();
        }
        assert!(!verdicts.is_empty(), "no rank can make progress:\n{}", self.report());
        for (rank, fault) in verdicts {
            self.actors[rank].state = State::Failed(fault);
        }
    }

    /// Ranks that passed different roots may all wait for each other, and none sends anything. Then one of them times out,
    /// and names the rank that it waits for.
    fn time_out(&mut self) {
        let first = self.actors.iter().position(|actor| matches!(actor.state, State::Working));
        let rank = first.expect("a rank is at work, or the world would have ended");
        let peer = self.waited(rank).first().copied();
        let peer =
            peer.unwrap_or_else(|| panic!("rank {rank} does not wait for any rank:\n{}", self.report()));
        self.actors[rank].state = State::Failed(Fault::new(ErrorKind::Timeout, "did not answer").peer(peer));
    }

    /// The ranks that `rank` waits for.
    fn waited(&self, rank: Rank) -> Vec<Rank> {
        let wants = self.wants(rank);
        let unread = wants.flush.then(|| self.network.unread(rank)).into_iter().flatten();
        wants.messages.iter().chain(&wants.room).copied().chain(unread).collect()
    }

    /// Why `rank` will wait forever, as `GroupState::check` finds it.
    fn verdict(&self, rank: Rank) -> Option<Fault> {
        let run = self.runs[rank].as_ref()?;
        if self.trouble == Trouble::Mistake
            && let Some(peer) = self.network.stray(rank, &run.label().head())
        {
            return Some(Fault::new(ErrorKind::Mismatch, "called something else").peer(peer));
        }
        self.waited(rank).into_iter().find_map(|peer| match &self.actors[peer].state {
            State::Working => None,
            State::Dead => Some(Fault::new(ErrorKind::PeerLost, "died").peer(peer)),
            State::Failed(fault) => Some(fault.clone()),
            State::Done if self.trouble == Trouble::Mistake => {
                Some(Fault::new(ErrorKind::PeerLost, "left").peer(peer))
            }
            State::Done => None,
        })
    }

    fn check_end(&mut self) {
        let faults = || {
            self.actors.iter().filter_map(|actor| match &actor.state {
                State::Failed(fault) => Some(fault),
                _ => None,
            })
        };
        match self.trouble {
            Trouble::None => {
                while self.network.advance() {}
                self.network.assert_empty();
            }
            Trouble::Death => {
                assert!(faults().all(|fault| fault.peer == Some(self.culprit)), "{}", self.report());
            }
            Trouble::Mistake => {
                // Two ranks may part before either hears the other: the sender of the last call does not wait to be read.
                let named = faults().any(|fault| fault.peer.is_some()) || self.network.has_unheard();
                assert!(named, "no rank noticed the mistake of rank {}:\n{}", self.culprit, self.report());
            }
        }
    }

    /// Where each rank is.
    fn report(&self) -> String {
        let line = |rank: Rank| {
            let run = self.runs[rank].as_ref().map(|run| (run.label().to_string(), run.progress()));
            let (state, wants) = (&self.actors[rank].state, self.wants(rank));
            format!("  rank {rank}: {state:?} {run:?} {wants:?}\n")
        };
        (0..self.actors.len()).map(line).collect()
    }
}

/// Prints how to repeat a seed that panics.
struct Replay {
    trouble: Trouble,
    seed: u64,
}

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Replay { trouble, seed } = self;
            eprintln!(
                "seed={seed} ({trouble:?}); to repeat it: TENFOLD_SIM_SEED={seed} cargo test -p tenfold sim"
            );
        }
    }
}

fn run_seeds(trouble: Trouble, usual: u64) {
    let number = |name| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} is a number, not `{text}`")))
    };
    let seeds = match number("TENFOLD_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TENFOLD_SIM_SEEDS").unwrap_or(usual),
    };
    for seed in seeds {
        let _replay = Replay { trouble, seed };
        World::new(trouble, seed).run();
    }
}

#[test]
fn whoever_moves_when_every_rank_ends_with_the_right_values() {
    run_seeds(Trouble::None, 300);
}

#[test]
fn when_a_rank_dies_everybody_who_needs_it_names_it_and_nobody_hangs() {
    run_seeds(Trouble::Death, 150);
}

#[test]
fn a_rank_that_calls_something_else_is_noticed_and_no_result_is_wrong() {
    run_seeds(Trouble::Mistake, 150);
}
