//! Random programs that cannot deadlock as long as a send never blocks: all of them must complete, with the right bytes.
//!
//! A program is one sequence of steps for all ranks. A message is sent by one step without waiting, and received by a step
//! of another rank at or after it in the sequence, often several later and not in the order of the sends. Collectives of
//! the world and of subgroups are in between; sends are waited for long after they were received. Every rank goes through
//! the sequence and does its part of each step, so executing the steps one by one is a valid schedule: a program that hangs has
//! been held up by something that is not in it. What every message and every result must be follows from the sequence.
//!
//! The seeds of a run are printed. `TENFOLD_PROGRAM_SEED=17` replays one, `TENFOLD_PROGRAM_SEEDS=1000` runs more.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests: threads of their own, helpers may fail"
)]

mod support;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::time::Duration;

use support::{Hosts, Job, Jobs, Rank, local_store};
use tenfold::{Buffer, DType, Group, Options, ReduceOp, Tag, Work};

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);

const JOBS: Jobs = &[("programs", programs)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    support::run_as_rank(JOBS);
}

// ── programs ────────────────────────────────────────────────────────────────────────────────────────────────

/// Numbers from a seed (splitmix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    /// Mostly short, some that take one slot or several, few of megabytes.
    fn length(&mut self) -> usize {
        let most = match self.below(100) {
            0..8 => return 0,
            8..30 => 80,
            30..60 => 4 << 10,
            60..80 => 128 << 10,
            80..94 => 1 << 20,
            _ => 8 << 20,
        };
        1 + self.below(most)
    }
}

#[derive(Clone, Debug)]
struct Message {
    /// Which of the groups carries it.
    group: usize,
    from: usize,
    to: usize,
    len: usize,
    /// Its memory is shared, so that the receiver may read it in place.
    shared: bool,
    /// The sender calls it in the background.
    background: bool,
    any_source: bool,
}

#[derive(Clone, Copy, Debug)]
enum Collective {
    Barrier,
    AllReduce { elements: usize },
    Broadcast { root: usize, len: usize },
}

#[derive(Clone, Debug)]
enum Step {
    /// The number of a message is its tag.
    Send(usize),
    Receive(usize),
    WaitForSend(usize),
    Collective {
        group: usize,
        what: Collective,
    },
    /// Begins a collective and goes on; ends with the program.
    Begin {
        group: usize,
        what: Collective,
    },
}

#[derive(Debug)]
struct Program {
    /// Members of each group, by their rank in the world; the first is the world.
    groups: Vec<Vec<usize>>,
    messages: Vec<Message>,
    steps: Vec<Step>,
}

impl Program {
    fn new(seed: u64, size: usize) -> Program {
        let mut chance = Chance(seed);
        let mut groups: Vec<Vec<usize>> = vec![(0..size).collect()];
        for _ in 0..2 {
            let without = chance.below(size);
            groups.push((0..size).filter(|rank| *rank != without).collect());
        }
        let (mut messages, mut steps) = (Vec::new(), Vec::new());
        let (mut unread, mut unwaited): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            match chance.below(100) {
                0..45 => {
                    let group = chance.below(groups.len());
                    let members = groups[group].len();
                    let from = chance.below(members);
                    let to = (from + 1 + chance.below(members - 1)) % members;
                    let (from, to) = (groups[group][from], groups[group][to]);
                    let (shared, background, any_source) =
                        (chance.percent(20), chance.percent(50), chance.percent(10));
                    let len = chance.length();
                    messages.push(Message { group, from, to, len, shared, background, any_source });
                    steps.push(Step::Send(messages.len() - 1));
                    unread.push(messages.len() - 1);
                }
                45..75 if !unread.is_empty() => {
                    // Mostly not the oldest: messages overtake each other.
                    let message = unread.remove(chance.below(unread.len()));
                    steps.push(Step::Receive(message));
                    unwaited.push(message);
                }
                75..80 if !unwaited.is_empty() => {
                    steps.push(Step::WaitForSend(unwaited.remove(chance.below(unwaited.len()))));
                }
                _ => {
                    let group = chance.below(groups.len());
                    let what = match chance.below(3) {
                        0 => Collective::Barrier,
                        1 => Collective::AllReduce { elements: chance.length() / 16 },
                        _ => {
                            let root = chance.below(groups[group].len());
                            Collective::Broadcast { root, len: chance.length() }
                        }
                    };
                    steps.push(if chance.percent(25) {
                        Step::Begin { group, what }
                    } else {
                        Step::Collective { group, what }
                    });
                }
            }
        }
        while !unread.is_empty() {
            steps.push(Step::Receive(unread.remove(chance.below(unread.len()))));
        }
        Program { groups, messages, steps }
    }

    /// Does this rank's part; an error names the step.
    fn run(&self, world: &Group, seed: u64) -> Result<(), String> {
        let made = |index: usize| {
            let options = Options::new(format!("{}/{seed}/{index}", world.name())).timeout(LIMIT);
            world.subgroup(&self.groups[index], options).map_err(|error| format!("subgroup {index}: {error}"))
        };
        let mut groups = vec![Some(world.clone())];
        for index in 1..self.groups.len() {
            groups.push(made(index)?);
        }
        let mut part =
            Part { program: self, rank: world.rank(), groups, sends: HashMap::new(), begun: Vec::new() };
        for (number, step) in self.steps.iter().enumerate() {
            part.step(number, step).map_err(|error| format!("step {number} {}: {error}", self.show(step)))?;
        }
        part.end()
    }

    fn show(&self, step: &Step) -> String {
        match step {
            Step::Send(message) | Step::Receive(message) | Step::WaitForSend(message) => {
                format!("{step:?} {:?}", self.messages[*message])
            }
            other => format!("{other:?}"),
        }
    }
}

/// What one rank has under way.
struct Part<'a> {
    program: &'a Program,
    rank: usize,
    /// Nothing for groups that this rank is not in.
    groups: Vec<Option<Group>>,
    sends: HashMap<usize, (Work, Buffer)>,
    /// Collectives: the work, what it works on, and what that must be afterwards.
    begun: Vec<(Work, Buffer, Vec<u8>)>,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What travels under this number.
fn pattern(number: usize, len: usize) -> Vec<u8> {
    let mut chance = Chance(number as u64);
    let block: Vec<u8> = (0..32).flat_map(|_| chance.next().to_ne_bytes()).collect();
    // Blocks differ from each other, so that one in the place of another is found out.
    let mut bytes: Vec<u8> = block.iter().copied().cycle().take(len).collect();
    for (index, block) in bytes.chunks_mut(block.len()).enumerate() {
        block[0] = block[0].wrapping_add(index as u8);
    }
    bytes
}

fn compare(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None if found.len() == expected.len() => Ok(()),
        place => Err(format!("{what}: wrong bytes from {place:?} on, of {}", expected.len())),
    }
}

impl Part<'_> {
    fn step(&mut self, number: usize, step: &Step) -> Result<(), String> {
        match *step {
            Step::Send(index) => {
                let message = &self.program.messages[index];
                let Some(group) = self.groups[message.group].clone() else { return Ok(()) };
                if message.from != self.rank {
                    return Ok(());
                }
                let mut tensor = match message.shared {
                    true => group.shared_buffer(DType::U8, message.len).map_err(text)?,
                    false => Buffer::zeros(DType::U8, message.len),
                };
                tensor.as_mut_bytes().copy_from_slice(&pattern(index, message.len));
                let calls = if message.background { group.background() } else { group };
                let to = self.rank_in(message.group, message.to);
                let work = calls.start_send(tensor.lend(), to, Tag(index as u32)).map_err(text)?;
                self.sends.insert(index, (work, tensor));
                Ok(())
            }
            Step::Receive(index) => {
                let message = &self.program.messages[index];
                let Some(group) = &self.groups[message.group] else { return Ok(()) };
                if message.to != self.rank {
                    return Ok(());
                }
                let mut tensor = Buffer::zeros(DType::U8, message.len);
                let from = self.rank_in(message.group, message.from);
                let work = match message.any_source {
                    true => group.start_recv_any(tensor.lend(), Tag(index as u32)),
                    false => group.start_recv(tensor.lend(), from, Tag(index as u32)),
                };
                let work = work.map_err(text)?;
                work.wait().map_err(text)?;
                if work.source() != Some(from) {
                    return Err(format!("came from {:?} instead of {from}", work.source()));
                }
                compare("message", tensor.as_bytes(), &pattern(index, message.len))
            }
            Step::WaitForSend(index) => match self.sends.remove(&index) {
                Some((work, _tensor)) => work.wait().map_err(text),
                None => Ok(()),
            },
            Step::Collective { group, what } => {
                let Some((work, tensor, expected)) = self.collective(number, group, what)? else {
                    return Ok(());
                };
                work.wait().map_err(text)?;
                compare("collective", tensor.as_bytes(), &expected)
            }
            Step::Begin { group, what } => {
                let begun = self.collective(number, group, what)?;
                self.begun.extend(begun);
                Ok(())
            }
        }
    }

    fn rank_in(&self, group: usize, rank: usize) -> usize {
        self.program.groups[group].iter().position(|member| *member == rank).unwrap()
    }

    fn collective(
        &self,
        number: usize,
        group: usize,
        what: Collective,
    ) -> Result<Option<(Work, Buffer, Vec<u8>)>, String> {
        let Some(calls) = &self.groups[group] else { return Ok(None) };
        let members = &self.program.groups[group];
        let of = |rank: usize, index: usize| (rank * 1_000_003 + number * 101 + index) as i64;
        let begun = match what {
            Collective::Barrier => (calls.start_barrier(), Buffer::zeros(DType::U8, 0), Vec::new()),
            Collective::AllReduce { elements } => {
                let own: Vec<i64> = (0..elements).map(|index| of(self.rank, index)).collect();
                let mut tensor = Buffer::from_slice(&own);
                let sum = |index| members.iter().map(|rank| of(*rank, index)).sum::<i64>();
                let expected = (0..elements).flat_map(|index| sum(index).to_ne_bytes()).collect();
                (calls.start_all_reduce(tensor.lend(), ReduceOp::Sum), tensor, expected)
            }
            Collective::Broadcast { root, len } => {
                let expected = pattern(number, len);
                let mut tensor = Buffer::zeros(DType::U8, len);
                if members[root] == self.rank {
                    tensor.as_mut_bytes().copy_from_slice(&expected);
                }
                (calls.start_broadcast(tensor.lend(), root), tensor, expected)
            }
        };
        Ok(Some((begun.0.map_err(text)?, begun.1, begun.2)))
    }

    fn end(self) -> Result<(), String> {
        for (work, tensor, expected) in &self.begun {
            work.wait().map_err(text)?;
            compare("collective", tensor.as_bytes(), expected)?;
        }
        for (index, (work, _tensor)) in self.sends {
            work.wait().map_err(|error| format!("send {index}: {error}"))?;
        }
        Ok(())
    }
}

fn size_of(seed: u64) -> usize {
    3 + (seed % 2) as usize
}

/// The seeds of this run: a few, or what the environment says.
fn seeds(usual: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seeds = match (number("TENFOLD_PROGRAM_SEED"), number("TENFOLD_PROGRAM_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(usual),
    };
    println!("seeds {seeds:?}; replay one with TENFOLD_PROGRAM_SEED=n");
    seeds
}

// ── where ranks are ─────────────────────────────────────────────────────────────────────────────────────────

fn among_threads(seeds: Range<u64>, options: &Options) {
    for seed in seeds {
        let program = Program::new(seed, size_of(seed));
        let outcomes =
            Group::threads_with(size_of(seed), options, |group| Ok(program.run(&group, seed))).unwrap();
        let mut failures = String::new();
        for (rank, outcome) in outcomes.iter().enumerate() {
            if let Err(error) = outcome {
                writeln!(failures, "rank {rank}: {error}").unwrap();
            }
        }
        assert!(failures.is_empty(), "seed {seed}, {} ranks:\n{failures}", size_of(seed));
    }
}

#[test]
fn threads_complete_every_program() {
    among_threads(seeds(12), &Options::default().timeout(LIMIT));
}

#[test]
fn threads_that_read_in_place_complete_every_program() {
    among_threads(seeds(6), &Options::default().timeout(LIMIT).read_in_place());
}

#[test]
fn threads_over_tcp_complete_every_program() {
    among_threads(seeds(6), &Options::default().timeout(LIMIT).only_tcp());
}

#[test]
fn threads_over_several_interfaces_complete_every_program() {
    let rails = [1, 2, 3].map(|number| std::net::IpAddr::from([127, 0, 0, number]));
    among_threads(seeds(6), &Options::default().timeout(LIMIT).only_tcp().interfaces(rails));
}

/// In a process: all programs of the seeds that have as many ranks.
fn programs(rank: &Rank) {
    let (first, end) = rank.argument.split_once("..").unwrap();
    let options = Options::new("world").timeout(LIMIT);
    let world = Group::connect(rank.store(), rank.seat(), options).unwrap();
    for seed in (first.parse().unwrap()..end.parse().unwrap()).filter(|seed| size_of(*seed) == rank.size) {
        let outcome = Program::new(seed, rank.size).run(&world, seed);
        if let Err(error) = outcome {
            panic!("seed {seed}, rank {}: {error}", rank.rank);
        }
    }
    world.start_barrier().unwrap().wait().unwrap(); // a rank must not leave while others need it
    rank.event("done");
}

fn among_processes(seeds: &Range<u64>, environment: &[(&str, &str)]) {
    for size in [3, 4] {
        let server = local_store();
        let mut job = Job::new("programs", size).argument(format!("{}..{}", seeds.start, seeds.end));
        for (name, value) in environment {
            job = job.environment(name, value);
        }
        finish(job, server.address(), seeds);
    }
}

fn finish(job: Job<'_>, store: std::net::SocketAddr, seeds: &Range<u64>) {
    let within = LIMIT + LIMIT * (seeds.end - seeds.start) as u32 / 10;
    job.start(store).wait_for_all("done", within);
}

#[test]
fn processes_complete_every_program() {
    among_processes(&seeds(8), &[]);
}

#[test]
fn processes_over_tcp_complete_every_program() {
    among_processes(&seeds(8), &[("TENFOLD_TRANSPORT", "tcp")]);
}

#[test]
fn two_hosts_with_two_ranks_each_complete_every_program() {
    let seeds = seeds(8);
    let Some(hosts) = Hosts::near(2) else { return };
    let server = hosts.serve_store();
    let job = Job::spread("programs", 2, &hosts).argument(format!("{}..{}", seeds.start, seeds.end));
    finish(job, server.address(), &seeds);
}
