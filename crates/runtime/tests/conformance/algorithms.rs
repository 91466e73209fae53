//! The same operations by every algorithm there is, and the promise of `Options::deterministic`.

use tenfold::{Buffer, DType, Group, Options, ReduceOp};
use tenfold_plan::{ALGORITHMS, Algorithm, Kind, Needs};

use super::movement::{self, Check, Move};
use super::reductions::{self, Case};
use super::values::Spice;
use super::{Course, done};

/// Lengths in elements: nothing, less than there are ranks, some, and more than one piece.
const LENGTHS: [usize; 4] = [0, 3, 1000, 40_001];

/// A group of the same ranks that takes `algorithm` where it can.
fn forcing(group: &Group, algorithm: &Algorithm, options: Options) -> Group {
    let all: Vec<usize> = (0..group.size()).collect();
    let options = options.algorithm(algorithm.kind.name(), algorithm.name);
    group.subgroup(&all, options).unwrap().expect("every rank is a member")
}

/// Every algorithm, forced, does what its operation should.
pub fn forced(group: &Group) -> u64 {
    let mut digest = 0;
    for algorithm in ALGORITHMS {
        let forced = forcing(group, algorithm, Options::new(algorithm.to_string()));
        let mut course = Course::new(&forced);
        for count in LENGTHS {
            if algorithm.kind.reduces() {
                reduce_by(&mut course, algorithm.kind, count);
            } else {
                move_by(&mut course, algorithm.kind, count);
            }
        }
        is_taken(&forced, algorithm);
        course.agree(&algorithm.to_string());
        digest ^= course.digest().rotate_left(algorithm.name.len() as u32);
    }
    digest
}

fn reduce_by(course: &mut Course<'_>, kind: Kind, count: usize) {
    let cases = [(ReduceOp::Sum, DType::F32), (ReduceOp::Avg, DType::BF16), (ReduceOp::Product, DType::I64)];
    for (op, dtype) in cases.into_iter().chain([(ReduceOp::PremulSum(0.0), DType::F8E5M2)]) {
        let seed = course.next();
        let case = Case::new(&op, dtype, count, seed, Spice::Tame);
        match kind {
            Kind::AllReduce => reductions::all_reduce(course, &case),
            Kind::Scan => reductions::scan(course, &case),
            Kind::Reduce => {
                for root in [0, course.size() / 2, course.size() - 1] {
                    reductions::reduce(course, &case, root);
                }
            }
            _ => {
                reductions::reduce_scatter_into(course, &case);
                reductions::reduce_scatter(course, &case);
            }
        }
    }
}

fn move_by(course: &mut Course<'_>, kind: Kind, count: usize) {
    let checks: &[Check] = match kind {
        Kind::AllGather => &[movement::all_gather_into, movement::all_gather],
        Kind::AllToAll => {
            &[movement::all_to_all_single, movement::all_to_all_single_with_splits, movement::all_to_all]
        }
        Kind::Broadcast => &[movement::broadcast],
        Kind::Gather => &[movement::gather, movement::gather_into],
        Kind::Scatter => &[movement::scatter, movement::scatter_from],
        _ => &[],
    };
    for check in checks {
        let moved = Move::new(course, DType::F32, count);
        check(course, &moved);
    }
    if kind == Kind::Barrier {
        done(course.group.start_barrier());
    }
}

/// The forced algorithm is the one that was used, for a short operation that any suits.
fn is_taken(group: &Group, algorithm: &Algorithm) {
    let size = group.size();
    let tensor = |elements| Buffer::zeros(DType::F32, elements);
    let (mut one, mut all) = (tensor(4), tensor(4 * size));
    let is_root = group.rank() == 0;
    let work = match algorithm.kind {
        Kind::AllGather => group.start_all_gather_into(all.lend(), one.lend()),
        Kind::AllReduce => group.start_all_reduce(one.lend(), ReduceOp::Sum),
        Kind::AllToAll => group.start_all_to_all_single(all.lend(), tensor(4 * size).lend(), vec![], vec![]),
        Kind::Barrier => group.start_barrier(),
        Kind::Broadcast => group.start_broadcast(one.lend(), 0),
        Kind::Gather => group.start_gather_into(is_root.then(|| all.lend()), one.lend(), 0),
        Kind::Reduce => group.start_reduce(one.lend(), ReduceOp::Sum, 0),
        Kind::ReduceScatter => group.start_reduce_scatter_into(one.lend(), all.lend(), ReduceOp::Sum),
        Kind::Scan => group.start_scan(one.lend(), ReduceOp::Sum),
        Kind::Scatter => group.start_scatter_from(one.lend(), is_root.then(|| all.lend()), 0),
    };
    assert_eq!(done(work).algorithm, algorithm.name, "of {}", algorithm.kind);
}

/// With `deterministic`, by every algorithm that can, whole and in halves: the bits of one pass in the order of ranks.
pub fn deterministic(group: &Group) -> u64 {
    let needs = Needs { in_rank_order: true, equal_parts: true };
    let digest_by = |algorithm: &Algorithm| {
        let forced = forcing(group, algorithm, Options::new(algorithm.to_string()).deterministic());
        let mut course = Course::new(&forced);
        reductions::wild(&mut course, algorithm.kind);
        is_taken(&forced, algorithm);
        course.agree(&algorithm.to_string());
        course.digest()
    };
    [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::Scan].into_iter().fold(0, |digest, kind| {
        let qualified =
            ALGORITHMS.iter().filter(|algorithm| algorithm.kind == kind && algorithm.suits(28, needs));
        let digests: Vec<u64> = qualified.map(|algorithm| digest_by(algorithm)).collect();
        assert!(digests.iter().all(|digest| *digest == digests[0]), "{kind}: {digests:x?}");
        digest ^ digests[0]
    })
}
