//! Every operation that only moves elements, on every dtype: results are inputs, to the bit.

use tenfold::{Buffer, DType, Group, Tag};

use super::values::Source;
use super::{Course, LONG, SHORT, SIZES, done, lend_all, uneven};

/// What one check moves.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    pub source: Source,
    pub count: usize,
    pub root: usize,
}

impl Move {
    pub fn new(course: &mut Course<'_>, dtype: DType, count: usize) -> Move {
        let number = course.next();
        Move { source: Source::moved(dtype, number as u64), count, root: number % course.size() }
    }

    fn dtype(&self) -> DType {
        self.source.dtype
    }

    /// Elements `from..from + count` of `rank`.
    fn of(&self, rank: usize, from: usize, count: usize) -> Vec<u8> {
        self.source.elements(rank, from, count)
    }

    #[track_caller]
    fn expect(&self, actual: &Buffer, expected: &[u8], what: &str) {
        let actual = actual.as_bytes();
        if actual != expected {
            let at = actual
                .iter()
                .zip(expected)
                .position(|(a, b)| a != b)
                .unwrap_or(actual.len().min(expected.len()));
            panic!("{what} of {self:?}: byte {at} of {} is wrong", expected.len());
        }
    }
}

/// A check of one operation.
pub type Check = fn(&mut Course<'_>, &Move);

/// All of them.
pub const CHECKS: &[Check] = &[
    broadcast,
    all_gather_into,
    all_gather,
    gather,
    gather_into,
    scatter,
    scatter_from,
    all_to_all_single,
    all_to_all_single_with_splits,
    all_to_all,
    send_to_the_next,
    receive_from_anybody,
    all_gather_coalesced,
    all_gather_into_coalesced,
    reduce_scatter_into_coalesced,
];

/// Every dtype and every short length.
pub fn short(group: &Group) -> u64 {
    let mut course = Course::new(group);
    for dtype in DType::ALL {
        for count in SHORT {
            for check in CHECKS {
                let moved = Move::new(&mut course, dtype, count);
                check(&mut course, &moved);
            }
        }
        done(group.start_barrier());
        course.agree(dtype.name());
    }
    for root in 0..group.size() {
        for check in [broadcast, gather, gather_into, scatter, scatter_from] {
            let moved = Move { root, ..Move::new(&mut course, DType::I16, 777) };
            check(&mut course, &moved);
        }
    }
    course.agree("all movements");
    course.digest()
}

/// A long tensor of every second dtype; with all sizes of groups together, of every one and by every operation.
pub fn long(group: &Group) -> u64 {
    let mut course = Course::new(group);
    let turn = SIZES.iter().position(|size| *size == group.size()).expect("a size of the suite");
    for (number, dtype) in DType::ALL.into_iter().enumerate().skip(turn % 2).step_by(2) {
        let whole = Move::new(&mut course, dtype, LONG);
        broadcast(&mut course, &whole);
        let part = Move { count: LONG / group.size(), ..whole };
        CHECKS[(number + 3 * turn) % CHECKS.len()](&mut course, &part);
    }
    course.agree("long movements");
    course.digest()
}

pub fn broadcast(course: &mut Course<'_>, moved: &Move) {
    let mut tensor = course.tensor(moved.dtype(), &moved.of(course.rank(), 0, moved.count));
    done(course.group.start_broadcast(tensor.lend(), moved.root));
    moved.expect(&tensor, &moved.of(moved.root, 0, moved.count), "broadcast");
    course.note(tensor.as_bytes());
}

pub fn all_gather_into(course: &mut Course<'_>, moved: &Move) {
    let mut input = course.tensor(moved.dtype(), &moved.of(course.rank(), 0, moved.count));
    let mut output = course.blank(moved.dtype(), moved.count * course.size());
    done(course.group.start_all_gather_into(output.lend(), input.lend()));
    moved.expect(&output, &everybodys(course, moved), "all_gather_into");
    course.note(output.as_bytes());
}

/// All ranks' elements, one rank after the other.
fn everybodys(course: &Course<'_>, moved: &Move) -> Vec<u8> {
    (0..course.size()).flat_map(|rank| moved.of(rank, 0, moved.count)).collect()
}

/// Lists of different lengths.
pub fn all_gather(course: &mut Course<'_>, moved: &Move) {
    let own = uneven(moved.count, course.rank());
    let mut input = course.tensor(moved.dtype(), &moved.of(course.rank(), 0, own));
    let blank = |rank| course.blank(moved.dtype(), uneven(moved.count, rank));
    let mut outputs: Vec<Buffer> = (0..course.size()).map(blank).collect();
    done(course.group.start_all_gather(lend_all(&mut outputs), input.lend()));
    for (rank, output) in outputs.iter().enumerate() {
        moved.expect(output, &moved.of(rank, 0, uneven(moved.count, rank)), "all_gather");
        course.note(output.as_bytes());
    }
}

pub fn gather(course: &mut Course<'_>, moved: &Move) {
    let mut input = course.tensor(moved.dtype(), &moved.of(course.rank(), 0, moved.count));
    let outputs = if course.rank() == moved.root { course.size() } else { 0 };
    let mut outputs: Vec<Buffer> = (0..outputs).map(|_| course.blank(moved.dtype(), moved.count)).collect();
    done(course.group.start_gather(lend_all(&mut outputs), input.lend(), moved.root));
    for (rank, output) in outputs.iter().enumerate() {
        moved.expect(output, &moved.of(rank, 0, moved.count), "gather");
    }
}

pub fn gather_into(course: &mut Course<'_>, moved: &Move) {
    let mut input = course.tensor(moved.dtype(), &moved.of(course.rank(), 0, moved.count));
    let is_root = course.rank() == moved.root;
    let mut output = is_root.then(|| course.blank(moved.dtype(), moved.count * course.size()));
    done(course.group.start_gather_into(output.as_mut().map(Buffer::lend), input.lend(), moved.root));
    if let Some(output) = output {
        moved.expect(&output, &everybodys(course, moved), "gather_into");
    }
}

pub fn scatter(course: &mut Course<'_>, moved: &Move) {
    let (rank, count) = (course.rank(), moved.count);
    let inputs = if rank == moved.root { course.size() } else { 0 };
    let part = |part| course.tensor(moved.dtype(), &moved.of(rank, part * count, count));
    let mut inputs: Vec<Buffer> = (0..inputs).map(part).collect();
    let mut output = course.blank(moved.dtype(), count);
    done(course.group.start_scatter(output.lend(), lend_all(&mut inputs), moved.root));
    moved.expect(&output, &moved.of(moved.root, rank * count, count), "scatter");
}

pub fn scatter_from(course: &mut Course<'_>, moved: &Move) {
    let (rank, count) = (course.rank(), moved.count);
    let whole = || course.tensor(moved.dtype(), &moved.of(rank, 0, count * course.size()));
    let mut input = (rank == moved.root).then(whole);
    let mut output = course.blank(moved.dtype(), count);
    done(course.group.start_scatter_from(output.lend(), input.as_mut().map(Buffer::lend), moved.root));
    moved.expect(&output, &moved.of(moved.root, rank * count, count), "scatter_from");
}

pub fn all_to_all_single(course: &mut Course<'_>, moved: &Move) {
    let (rank, size, count) = (course.rank(), course.size(), moved.count);
    let mut input = course.tensor(moved.dtype(), &moved.of(rank, 0, count * size));
    let mut output = course.blank(moved.dtype(), count * size);
    done(course.group.start_all_to_all_single(output.lend(), input.lend(), vec![], vec![]));
    let expected: Vec<u8> = (0..size).flat_map(|peer| moved.of(peer, rank * count, count)).collect();
    moved.expect(&output, &expected, "all_to_all_single");
}

/// How many elements go from one rank to another where all differ; between some there are none.
fn split(moved: &Move, from: usize, to: usize) -> usize {
    match (from + 2 * to) % 4 {
        3 => 0,
        other => moved.count / (other + 1) + to,
    }
}

/// What goes from one rank to another: of the sender's elements, after those for lower ranks.
fn sent(moved: &Move, from: usize, to: usize) -> Vec<u8> {
    let start = (0..to).map(|before| split(moved, from, before)).sum();
    moved.of(from, start, split(moved, from, to))
}

pub fn all_to_all_single_with_splits(course: &mut Course<'_>, moved: &Move) {
    let (rank, size) = (course.rank(), course.size());
    let input_splits: Vec<usize> = (0..size).map(|peer| split(moved, rank, peer)).collect();
    let output_splits: Vec<usize> = (0..size).map(|peer| split(moved, peer, rank)).collect();
    let mut input = course.tensor(moved.dtype(), &moved.of(rank, 0, input_splits.iter().sum()));
    let mut output = course.blank(moved.dtype(), output_splits.iter().sum());
    done(course.group.start_all_to_all_single(output.lend(), input.lend(), output_splits, input_splits));
    let expected: Vec<u8> = (0..size).flat_map(|peer| sent(moved, peer, rank)).collect();
    moved.expect(&output, &expected, "all_to_all_single with splits");
}

/// Lists of different lengths.
pub fn all_to_all(course: &mut Course<'_>, moved: &Move) {
    let (rank, size) = (course.rank(), course.size());
    let input = |peer| course.tensor(moved.dtype(), &sent(moved, rank, peer));
    let output = |peer| course.blank(moved.dtype(), split(moved, peer, rank));
    let mut inputs: Vec<Buffer> = (0..size).map(input).collect();
    let mut outputs: Vec<Buffer> = (0..size).map(output).collect();
    done(course.group.start_all_to_all(lend_all(&mut outputs), lend_all(&mut inputs)));
    for (peer, output) in outputs.iter().enumerate() {
        moved.expect(output, &sent(moved, peer, rank), "all_to_all");
    }
}

/// Two messages to the next rank, received in the other order by their tags; into room for more than comes.
pub fn send_to_the_next(course: &mut Course<'_>, moved: &Move) {
    let (rank, size, count) = (course.rank(), course.size(), moved.count);
    if size == 1 {
        return;
    }
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut sent = [0, count].map(|from| course.tensor(moved.dtype(), &moved.of(rank, from, count)));
    let mut received = [0, 1].map(|_| course.blank(moved.dtype(), count + 2));
    let [first, second] = &mut sent;
    let sends = [
        course.group.start_send(first.lend(), next, Tag(11)),
        course.group.start_send(second.lend(), next, Tag(12)),
    ];
    let [one, two] = &mut received;
    done(course.group.start_recv(two.lend(), previous, Tag(12)));
    done(course.group.start_recv(one.lend(), previous, Tag(11)));
    for send in sends {
        done(send);
    }
    for (received, from) in received.iter().zip([0, count]) {
        let mut expected = moved.of(previous, from, count);
        expected.extend(vec![0x55; 2 * moved.dtype().size()]);
        moved.expect(received, &expected, "recv");
    }
}

/// All ranks send to the root, which receives from any rank, one message after the other.
pub fn receive_from_anybody(course: &mut Course<'_>, moved: &Move) {
    let (rank, size, count) = (course.rank(), course.size(), moved.count);
    if rank != moved.root {
        let mut tensor = course.tensor(moved.dtype(), &moved.of(rank, 0, count));
        done(course.group.start_send(tensor.lend(), moved.root, Tag(7)));
        return;
    }
    let mut heard: Vec<usize> = (1..size)
        .map(|_| {
            let mut tensor = course.blank(moved.dtype(), count);
            let outcome = done(course.group.start_recv_any(tensor.lend(), Tag(7)));
            let source = outcome.source.expect("a message has a source");
            moved.expect(&tensor, &moved.of(source, 0, count), "recv_any");
            source
        })
        .collect();
    heard.sort_unstable();
    let others: Vec<usize> = (0..size).filter(|rank| *rank != moved.root).collect();
    assert_eq!(heard, others, "one message of each rank was received");
}

pub fn all_gather_coalesced(course: &mut Course<'_>, moved: &Move) {
    let counts = [moved.count, 0, 3];
    let input = |count: &usize| course.tensor(moved.dtype(), &moved.of(course.rank(), 0, *count));
    let mut inputs: Vec<Buffer> = counts.iter().map(input).collect();
    let blanks = |count: &usize| -> Vec<Buffer> {
        (0..course.size()).map(|_| course.blank(moved.dtype(), *count)).collect()
    };
    let mut outputs: Vec<Vec<Buffer>> = counts.iter().map(blanks).collect();
    let views = outputs.iter_mut().map(|outputs| lend_all(outputs)).collect();
    done(course.group.start_all_gather_coalesced(views, lend_all(&mut inputs)));
    for (outputs, count) in outputs.iter().zip(counts) {
        for (rank, output) in outputs.iter().enumerate() {
            moved.expect(output, &moved.of(rank, 0, count), "all_gather_coalesced");
            course.note(output.as_bytes());
        }
    }
}

pub fn all_gather_into_coalesced(course: &mut Course<'_>, moved: &Move) {
    let counts = [moved.count, 0, 3];
    let input = |count: &usize| course.tensor(moved.dtype(), &moved.of(course.rank(), 0, *count));
    let blank = |count: &usize| course.blank(moved.dtype(), count * course.size());
    let mut inputs: Vec<Buffer> = counts.iter().map(input).collect();
    let mut outputs: Vec<Buffer> = counts.iter().map(blank).collect();
    done(course.group.start_all_gather_into_coalesced(lend_all(&mut outputs), lend_all(&mut inputs)));
    for (output, count) in outputs.iter().zip(counts) {
        let moved = Move { count, ..*moved };
        moved.expect(output, &everybodys(course, &moved), "all_gather_into_coalesced");
        course.note(output.as_bytes());
    }
}

/// As a movement: all ranks but one have zeroes, so that the sum is what that one has.
pub fn reduce_scatter_into_coalesced(course: &mut Course<'_>, moved: &Move) {
    let (rank, size) = (course.rank(), course.size());
    // A wild float may be a NaN or a negative zero, which a sum changes; integers of the same length are left alone.
    let dtype = match moved.dtype().size() {
        1 => DType::U8,
        2 => DType::I16,
        4 => DType::U32,
        _ => DType::I64,
    };
    let source = Source { dtype, ..moved.source };
    let counts = [moved.count, 0, 3];
    let whole = |count: &usize| match rank == moved.root {
        true => course.tensor(dtype, &source.elements(rank, 0, count * size)),
        false => course.tensor(dtype, &vec![0; count * size * dtype.size()]),
    };
    let mut inputs: Vec<Buffer> = counts.iter().map(whole).collect();
    let mut outputs: Vec<Buffer> = counts.iter().map(|count| course.blank(dtype, *count)).collect();
    let (outputs_lent, inputs_lent) = (lend_all(&mut outputs), lend_all(&mut inputs));
    done(course.group.start_reduce_scatter_into_coalesced(outputs_lent, inputs_lent, tenfold::ReduceOp::Sum));
    for (output, count) in outputs.iter().zip(counts) {
        let expected = source.elements(moved.root, rank * count, count);
        moved.expect(output, &expected, "reduce_scatter_into_coalesced");
    }
}
