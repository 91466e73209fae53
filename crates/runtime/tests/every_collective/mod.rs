//! One call of every collective, on numbers whose results are exact, and what must come out of it.
//!
//! Element `i` of rank `r` is `1000 r + i`: a result tells by itself whose elements it is made of, and which.

#![allow(unreachable_pub, clippy::unwrap_used, reason = "tests: each file uses its part; a helper may fail")]

use std::time::Duration;

use tenfold::{Buffer, BufferView, DType, Group, ReduceOp, Tag, Work};

/// Element `index` of `rank`.
fn element(rank: usize, index: usize) -> i64 {
    i64::try_from(1000 * rank + index).expect("small numbers")
}

/// Elements `from..from + count` of `rank`.
fn elements(rank: usize, from: usize, count: usize) -> Vec<i64> {
    (from..from + count).map(|index| element(rank, index)).collect()
}

/// Those elements summed over all ranks.
fn sums(size: usize, from: usize, count: usize) -> Vec<i64> {
    (from..from + count).map(|index| (0..size).map(|rank| element(rank, index)).sum()).collect()
}

fn zeros(elements: usize) -> Buffer {
    Buffer::zeros(DType::I64, elements)
}

fn values(tensor: &Buffer) -> &[i64] {
    tensor.as_slice()
}

fn lend_all(tensors: &mut [Buffer]) -> Vec<BufferView> {
    tensors.iter_mut().map(Buffer::lend).collect()
}

fn done(work: tenfold::Result<Work>) {
    work.and_then(|work| work.wait()).unwrap();
}

/// Calls every collective with `count` elements a rank, and every root there is.
pub fn check_every_collective(group: &Group, count: usize) {
    let (rank, size) = (group.rank(), group.size());
    check_reductions(group, count);
    check_gathers(group, count);
    check_exchanges(group, count);
    for root in 0..size {
        check_rooted(group, count, root);
    }
    done(group.start_barrier());
    group.monitored_barrier(Duration::from_secs(20), true).unwrap();
    let mut last = Buffer::from_slice(&[element(rank, 0)]);
    done(group.start_all_reduce(last.lend(), ReduceOp::Sum));
    assert_eq!(values(&last), sums(size, 0, 1), "the group is as good as new");
}

fn check_reductions(group: &Group, count: usize) {
    let (rank, size) = (group.rank(), group.size());
    let mut tensor = Buffer::from_slice(&elements(rank, 0, count));
    done(group.start_all_reduce(tensor.lend(), ReduceOp::Sum));
    assert_eq!(values(&tensor), sums(size, 0, count), "all_reduce(sum)");

    let mut tensor = Buffer::from_slice(&elements(rank, 0, count));
    done(group.start_all_reduce(tensor.lend(), ReduceOp::Max));
    assert_eq!(values(&tensor), elements(size - 1, 0, count), "all_reduce(max)");

    let mut tensor = Buffer::from_slice(&elements(rank, 0, count));
    done(group.start_scan(tensor.lend(), ReduceOp::Sum));
    assert_eq!(values(&tensor), sums(rank + 1, 0, count), "scan");

    let (mut input, mut output) = (Buffer::from_slice(&elements(rank, 0, count * size)), zeros(count));
    done(group.start_reduce_scatter_into(output.lend(), input.lend(), ReduceOp::Sum));
    assert_eq!(values(&output), sums(size, rank * count, count), "reduce_scatter_into");

    let part = |part| Buffer::from_slice(&elements(rank, part * count, count));
    let (mut inputs, mut output): (Vec<_>, _) = ((0..size).map(part).collect(), zeros(count));
    done(group.start_reduce_scatter(output.lend(), lend_all(&mut inputs), ReduceOp::Sum));
    assert_eq!(values(&output), sums(size, rank * count, count), "reduce_scatter");
}

fn check_gathers(group: &Group, count: usize) {
    let (rank, size) = (group.rank(), group.size());
    let (mut input, mut output) = (Buffer::from_slice(&elements(rank, 0, count)), zeros(count * size));
    done(group.start_all_gather_into(output.lend(), input.lend()));
    let expected: Vec<_> = (0..size).flat_map(|peer| elements(peer, 0, count)).collect();
    assert_eq!(values(&output), expected, "all_gather_into");

    let mut outputs: Vec<_> = (0..size).map(|_| zeros(count)).collect();
    done(group.start_all_gather(lend_all(&mut outputs), input.lend()));
    for (peer, output) in outputs.iter().enumerate() {
        assert_eq!(values(output), elements(peer, 0, count), "all_gather of rank {peer}");
    }
}

fn check_exchanges(group: &Group, count: usize) {
    let (rank, size) = (group.rank(), group.size());
    let (mut input, mut output) = (Buffer::from_slice(&elements(rank, 0, count * size)), zeros(count * size));
    done(group.start_all_to_all_single(output.lend(), input.lend(), vec![], vec![]));
    let expected: Vec<_> = (0..size).flat_map(|peer| elements(peer, rank * count, count)).collect();
    assert_eq!(values(&output), expected, "all_to_all_single");

    let part = |part| Buffer::from_slice(&elements(rank, part * count, count));
    let mut inputs: Vec<_> = (0..size).map(part).collect();
    let mut outputs: Vec<_> = (0..size).map(|_| zeros(count)).collect();
    done(group.start_all_to_all(lend_all(&mut outputs), lend_all(&mut inputs)));
    for (peer, output) in outputs.iter().enumerate() {
        assert_eq!(values(output), elements(peer, rank * count, count), "all_to_all from rank {peer}");
    }

    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let (mut sent, mut received) = (Buffer::from_slice(&elements(rank, 7, count)), zeros(count));
    let send = group.start_send(sent.lend(), next, Tag(3)).unwrap();
    done(group.start_recv(received.lend(), previous, Tag(3)));
    send.wait().unwrap();
    assert_eq!(values(&received), elements(previous, 7, count), "recv from rank {previous}");

    let send = group.start_send(sent.lend(), next, Tag(4)).unwrap();
    let recv = group.start_recv_any(received.lend(), Tag(4)).unwrap();
    recv.wait().unwrap();
    send.wait().unwrap();
    assert_eq!(recv.source(), Some(previous), "recv_any");
    assert_eq!(values(&received), elements(previous, 7, count), "recv_any");
}

fn check_rooted(group: &Group, count: usize, root: usize) {
    let (rank, size) = (group.rank(), group.size());
    let is_root = rank == root;
    let mut tensor = Buffer::from_slice(&elements(rank, 0, count));
    done(group.start_broadcast(tensor.lend(), root));
    assert_eq!(values(&tensor), elements(root, 0, count), "broadcast from root {root}");

    let mut tensor = Buffer::from_slice(&elements(rank, 0, count));
    done(group.start_reduce(tensor.lend(), ReduceOp::Sum, root));
    if is_root {
        assert_eq!(values(&tensor), sums(size, 0, count), "reduce to root {root}");
    }

    let mut outputs: Vec<_> = (0..if is_root { size } else { 0 }).map(|_| zeros(count)).collect();
    let mut input = Buffer::from_slice(&elements(rank, 0, count));
    done(group.start_gather(lend_all(&mut outputs), input.lend(), root));
    for (peer, output) in outputs.iter().enumerate() {
        assert_eq!(values(output), elements(peer, 0, count), "gather to root {root} of rank {peer}");
    }

    let part = |part| Buffer::from_slice(&elements(rank, part * count, count));
    let mut inputs: Vec<_> = (0..if is_root { size } else { 0 }).map(part).collect();
    let mut output = zeros(count);
    done(group.start_scatter(output.lend(), lend_all(&mut inputs), root));
    assert_eq!(values(&output), elements(root, rank * count, count), "scatter from root {root}");
}
