//! What the ranks of the tests do.

use super::*;

pub(super) fn options() -> Options {
    Options::new("default").timeout(SOON).heartbeat(HEARTBEAT)
}

pub(super) fn connect(rank: &Rank, options: Options) -> Group {
    Group::connect(rank.store(), rank.seat(), options).unwrap()
}

pub(super) fn ones(dtype: DType, elements: usize) -> Buffer {
    let mut tensor = Buffer::zeros(dtype, elements);
    match dtype {
        DType::F32 => tensor.as_mut_slice::<f32>().fill(1.0),
        DType::I32 => tensor.as_mut_slice::<i32>().fill(1),
        other => unreachable!("no test sums {other}"),
    }
    tensor
}

pub(super) fn sum(group: &Group, tensor: &mut Buffer) -> Result<()> {
    group.start_all_reduce(tensor.lend(), ReduceOp::Sum).and_then(|work| work.wait())
}

/// Reports an error, and that every further call of the group fails with the same error, without waiting for another rank.
pub(super) fn tell_error(rank: &Rank, group: &Group, error: &Error) {
    rank.event(format!("raised {:?} {:?}\n{error}", error.kind(), error.peer()));
    let start = Instant::now();
    let again = group.start_barrier().and_then(|work| work.wait()).expect_err("a group that failed refuses");
    assert!(start.elapsed() < SOON / 2, "it takes {:?} to refuse: it waits for something", start.elapsed());
    assert!(again.to_string().contains(error.message()), "the first cause: {again}");
}

/// Sums in a loop until that fails, and lingers as a trainer does that saves what it has. The argument: elements.
pub(super) fn sum_until_error(rank: &Rank, options: Options) -> Group {
    let group = connect(rank, options);
    let elements = rank.argument.parse().unwrap();
    for round in 1.. {
        let mut tensor = ones(DType::F32, elements);
        rank.event(format!("round {round} begins"));
        let start = Instant::now();
        if let Err(error) = sum(&group, &mut tensor) {
            tell_error(rank, &group, &error);
            break;
        }
        assert!(tensor.as_slice::<f32>().iter().all(|value| *value == rank.size as f32), "round {round}");
        if start.elapsed() > Duration::from_millis(500) {
            rank.event(format!("slow round {round}"));
        }
    }
    group
}

pub(super) fn sum_for_ever(rank: &Rank) {
    let _group = sum_until_error(rank, options());
    rank.order();
}

pub(super) fn sum_for_ever_patiently(rank: &Rank) {
    let _group = sum_until_error(rank, options().heartbeat(HEARTBEAT_LONG));
    rank.order();
}

/// With the heartbeat that a rank has unless it says otherwise.
pub(super) fn sum_for_ever_by_default(rank: &Rank) {
    let _group = sum_until_error(rank, Options::new("default").timeout(2 * SOON));
    rank.order();
}

/// A store in which ranks find Unix sockets that cannot be connected, as where a security module forbids it.
pub(super) struct WithoutUnixSockets(Arc<dyn Store>);

impl Store for WithoutUnixSockets {
    fn call(
        &self,
        request: Request<'_>,
        deadline: Deadline,
    ) -> std::result::Result<Response, tenfold_store::Fault> {
        match request {
            Request::Set { key, value } => {
                let text =
                    String::from_utf8_lossy(&value).replace("\"socket\":\"tenfold/", "\"socket\":\"nowhere/");
                self.0.call(Request::Set { key, value: text.into_bytes().into() }, deadline)
            }
            other => self.0.call(other, deadline),
        }
    }
}

/// Sums often, and lets the others wait so long each time that they sleep.
pub(super) fn sum_without_unix_sockets(rank: &Rank) {
    let store = Arc::new(WithoutUnixSockets(rank.store()));
    let group = Group::connect(store, rank.seat(), options()).unwrap();
    for round in 0..6 {
        if round % rank.size == rank.rank {
            std::thread::park_timeout(Duration::from_millis(100));
        }
        let mut tensor = ones(DType::F32, 1000);
        group.start_all_reduce(tensor.lend(), ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(tensor.as_slice::<f32>()[999], rank.size as f32);
    }
    rank.event("summed");
    rank.order();
}

/// The ranks that are left go on as a smaller group; the order says who is dead.
pub(super) fn sum_and_regroup(rank: &Rank) {
    drop(sum_until_error(rank, options()));
    let dead: usize = rank.order().parse().unwrap();
    let (rank_now, size_now) = (rank.rank - usize::from(rank.rank > dead), rank.size - 1);
    let options = Options::new("smaller").timeout(SOON).heartbeat(HEARTBEAT);
    let group = Group::connect(rank.store(), Seat { rank: rank_now, size: size_now }, options).unwrap();
    let mut tensor = ones(DType::F32, 1000);
    sum(&group, &mut tensor).unwrap();
    rank.event(format!("sum {}", tensor.as_slice::<f32>()[999]));
    rank.order();
}

/// Rank 3 calls something else than the others in the third call; the argument says what.
pub(super) fn differ(rank: &Rank) {
    let group = connect(rank, options());
    let mut tensor = ones(DType::F32, 1000);
    sum(&group, &mut tensor).unwrap();
    group.start_broadcast(tensor.lend(), 1).unwrap().wait().unwrap();
    let call: fn(&Group, bool) -> Result<Work> = match rank.argument.as_str() {
        "kind" => |group, odd| match odd {
            false => group.start_all_reduce(ones(DType::F32, 1000).lend(), ReduceOp::Sum),
            true => group.start_broadcast(ones(DType::F32, 1000).lend(), 0),
        },
        "barrier" => |group, odd| match odd {
            false => group.start_all_reduce(ones(DType::F32, 1000).lend(), ReduceOp::Sum),
            true => group.start_barrier(),
        },
        "shape" => |group, odd| {
            group.start_all_reduce(ones(DType::F32, if odd { 2000 } else { 1000 }).lend(), ReduceOp::Sum)
        },
        "large shape" => |group, odd| {
            group.start_all_reduce(ones(DType::F32, if odd { 1_000_000 } else { 1000 }).lend(), ReduceOp::Sum)
        },
        "dtype" => |group, odd| {
            group
                .start_all_reduce(ones(if odd { DType::I32 } else { DType::F32 }, 1000).lend(), ReduceOp::Sum)
        },
        "reduce op" => |group, odd| {
            let op = if odd { ReduceOp::Max } else { ReduceOp::Sum };
            group.start_all_reduce(ones(DType::F32, 1000).lend(), op)
        },
        "root" => |group, odd| group.start_broadcast(ones(DType::F32, 1000).lend(), usize::from(odd)),
        other => unreachable!("no rank differs in `{other}`"),
    };
    rank.event("calls");
    let outcome = call(&group, rank.rank == 3).and_then(|work| work.wait());
    // A rank that got what it asked for from a root that meant the same has finished; its next call fails.
    let next = |()| group.start_barrier().and_then(|work| work.wait());
    let error = if rank.argument == "root" { outcome.and_then(next) } else { outcome };
    let error = error.expect_err("ranks disagree");
    tell_error(rank, &group, &error);
    rank.order();
}

/// The last rank does not make the third call, but lives.
pub(super) fn stay_away(rank: &Rank) {
    let group = connect(rank, options().timeout(TIMEOUT));
    let mut tensor = ones(DType::F32, 1000);
    sum(&group, &mut tensor).unwrap();
    group.start_broadcast(tensor.lend(), 1).unwrap().wait().unwrap();
    if rank.rank < rank.size - 1 {
        rank.event("calls");
        let error = sum(&group, &mut tensor).expect_err("one is missing");
        tell_error(rank, &group, &error);
    }
    rank.order();
}

/// The last rank does not join; the others leave as soon as they have raised, each a little after the one before.
pub(super) fn time_out_and_leave(rank: &Rank) {
    let timeout = TIMEOUT + Duration::from_millis(30) * rank.rank as u32;
    let mut options = options().timeout(timeout).heartbeat(HEARTBEAT_LONG);
    if rank.argument == "tcp" {
        options = options.only_tcp();
    }
    let group = connect(rank, options);
    let mut tensor = ones(DType::F32, 1000);
    // So that all have streams to each other, dialled by both sides.
    let all = group.with_timeout(SOON);
    all.start_all_to_all_single(ones(DType::F32, 400).lend(), ones(DType::F32, 400).lend(), vec![], vec![])
        .unwrap()
        .wait()
        .unwrap();
    if rank.rank == rank.size - 1 {
        rank.event("stays away");
        rank.order();
        return;
    }
    let error = sum(&group, &mut tensor).expect_err("one is missing");
    rank.event(format!("raised {:?} {:?}\n{error}", error.kind(), error.peer()));
    drop(group);
}

/// Every rank names the root that the argument has for it, then calls something that all would agree about.
pub(super) fn name_different_roots(rank: &Rank) {
    let group = connect(rank, options().heartbeat(HEARTBEAT_LONG));
    let root: usize = rank.argument.split(' ').nth(rank.rank).unwrap().parse().unwrap();
    let first = group.start_broadcast(ones(DType::F32, 1000).lend(), root).and_then(|work| work.wait());
    let outcome = if first.is_ok() { "done" } else { "failed" };
    rank.event(format!("first {outcome}"));
    let next = sum(&group, &mut ones(DType::F32, 1000));
    let error = first.and(next).expect_err("ranks disagree");
    tell_error(rank, &group, &error);
    rank.order();
}

/// Rank 0 is blocked in a call that it gives up when a signal comes, or an order, as the argument says.
pub(super) fn give_up(rank: &Rank) {
    let group = connect(rank, options());
    let mut tensor = ones(DType::F32, 1000);
    sum(&group, &mut tensor).unwrap();
    if rank.rank > 0 {
        rank.event("joined");
        rank.order();
        // Rank 0 may have sent its part before it gave up: then this call can still end well, but not the next.
        let error = (0..2).find_map(|_| sum(&group, &mut tensor).err()).expect("rank 0 gave up");
        return tell_error(rank, &group, &error);
    }
    std::thread::scope(|threads| {
        let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT]).unwrap();
        let group = &group;
        threads.spawn(move || match rank.argument.as_str() {
            "order" => group.abort(&rank.order()),
            _ => group.abort(&format!("interrupted by signal {}", signals.forever().next().unwrap())),
        });
        rank.event("joined");
        let error = sum(group, &mut tensor).expect_err("it gave up");
        tell_error(rank, group, &error);
    });
}

/// Rank 1 drops its group while the others wait for it.
pub(super) fn leave(rank: &Rank) {
    let group = connect(rank, options());
    let mut tensor = ones(DType::F32, 1000);
    sum(&group, &mut tensor).unwrap();
    rank.event("joined");
    if rank.rank == 1 {
        rank.order();
        drop(group);
    } else {
        let error = sum(&group, &mut tensor).expect_err("rank 1 left");
        tell_error(rank, &group, &error);
    }
    rank.order();
}

pub(super) fn sum_once(rank: &Rank) {
    let group = connect(rank, options().heartbeat(HEARTBEAT_LONG));
    for elements in [1, 1000, 100_000] {
        let mut tensor = ones(DType::F32, elements);
        sum(&group, &mut tensor).unwrap();
        assert!(tensor.as_slice::<f32>().iter().all(|value| *value == rank.size as f32));
    }
    rank.event("summed");
    rank.order();
}

/// What a process holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holdings {
    descriptors: usize,
    threads: usize,
    resident_bytes: usize,
}

impl Holdings {
    fn now() -> Holdings {
        let count = |path| fs::read_dir(path).unwrap().count();
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
        let resident_bytes = pages * rustix::param::page_size();
        Holdings { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task"), resident_bytes }
    }
}

pub(super) fn make_groups(rank: &Rank) {
    let store: Arc<dyn Store> = rank.store();
    let use_once = |number: usize| {
        let options = Options::new(format!("group {number}")).timeout(SOON);
        let group = Group::connect(store.clone(), rank.seat(), options).unwrap();
        let mut tensor = ones(DType::F32, 100);
        sum(&group, &mut tensor).unwrap();
        assert_eq!(tensor.as_slice::<f32>()[99], rank.size as f32);
    };
    // The first ones leave what a process has once, and what allocators keep.
    (0..100).for_each(use_once);
    let before = Holdings::now();
    (100..1100).for_each(use_once);
    let after = Holdings::now();
    rank.event(format!("before {before:?}, after {after:?}"));
    assert_eq!(after.descriptors, before.descriptors, "{before:?} {after:?}");
    assert_eq!(after.threads, before.threads, "{before:?} {after:?}");
    assert!(after.resident_bytes < before.resident_bytes + (1 << 20), "{before:?} {after:?}");
}

/// Tells what becomes of a second group, which is made when the order comes; the first goes on.
pub(super) fn make_another_group(rank: &Rank) {
    let group = connect(rank, options());
    let store: Arc<dyn Store> = rank.store();
    sum(&group, &mut ones(DType::F32, 10)).unwrap();
    rank.event("ready");
    rank.order();
    let start = Instant::now();
    let error = Group::connect(store, rank.seat(), Options::new("another").timeout(SOON)).unwrap_err();
    rank.event(format!("{} {error}", start.elapsed().as_millis()));
    sum(&group, &mut ones(DType::F32, 10)).unwrap();
}

/// Rank 0 is the root of a broadcast and need not wait for rank 1, which comes when the test says so. The argument: elements.
pub(super) fn send_to_one_who_is_late(rank: &Rank) {
    let group = connect(rank, options());
    let mut tensor = Buffer::zeros(DType::F32, rank.argument.parse().unwrap());
    if rank.rank == 0 {
        tensor.as_mut_slice::<f32>().fill(7.0);
        group.start_broadcast(tensor.lend(), 0).and_then(|work| work.wait()).unwrap();
        rank.event("sent");
        rank.order();
        return;
    }
    rank.order();
    group.start_broadcast(tensor.lend(), 0).and_then(|work| work.wait()).unwrap();
    assert!(tensor.as_slice::<f32>().iter().all(|value| *value == 7.0));
    rank.event("received");
}
