//! Every operation that computes, on every dtype, with every reduction that the dtype has.

use tenfold::{Buffer, CustomOp, DType, Group, ReduceOp};
use tenfold_plan::{Kind, named};

use super::reference::{Precision, as_called, check};
use super::values::{PERIOD, Source, Spice, Use, format_of, part_of};
use super::{Course, LONG, SHORT, SIZES, done, lend_all, uneven};

/// The reductions of a dtype.
pub fn ops(dtype: DType) -> &'static [ReduceOp] {
    use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, PremulSum, Product, Sum};
    match dtype {
        DType::Complex64 | DType::Complex128 => &[Sum, Avg, Product, PremulSum(0.0)],
        DType::Bool | DType::I8 | DType::U8 | DType::I16 | DType::U16 => {
            &[Sum, Product, Min, Max, Band, Bor, Bxor]
        }
        DType::I32 | DType::U32 | DType::I64 | DType::U64 => &[Sum, Product, Min, Max, Band, Bor, Bxor],
        _ => &[Sum, Avg, Product, Min, Max, PremulSum(0.0)],
    }
}

/// What to reduce, and how.
#[derive(Clone, Debug)]
pub struct Case {
    pub op: ReduceOp,
    pub source: Source,
    pub count: usize,
}

impl Case {
    pub fn new(op: &ReduceOp, dtype: DType, count: usize, seed: usize, spice: Spice) -> Case {
        let purpose = if *op == ReduceOp::Product { Use::Factors } else { Use::Terms };
        // Infinite complex products depend on the order: inf × 0 is not a number.
        let complex_product = dtype == DType::Complex64 || dtype == DType::Complex128;
        let tame = complex_product && purpose == Use::Factors && spice == Spice::Endless;
        let spice = if tame { Spice::Tame } else { spice };
        Case { op: op.clone(), source: Source { dtype, spice, purpose, seed: seed as u64 }, count }
    }

    pub fn dtype(&self) -> DType {
        self.source.dtype
    }

    /// What all ranks put in: all of it, or one period.
    fn inputs(&self, size: usize, from: usize, count: usize) -> Vec<Vec<u8>> {
        (0..size).map(|rank| self.source.elements(rank, from, count.min(PERIOD))).collect()
    }

    fn check(&self, actual: &Buffer, inputs: &[Vec<u8>], kind: Kind, algorithm: &str) {
        let Case { op, source, count } = self;
        let known = named(kind, algorithm).unwrap_or_else(|| panic!("no {kind} is called `{algorithm}`"));
        let precision = if known.in_rank_order { Precision::Bits } else { Precision::EveryStepRounded };
        let (dtype, ranks) = (source.dtype, inputs.len());
        let what = format!("{kind}({op}, {dtype} × {count}) on {ranks} ranks by `{algorithm}`, {source:?}");
        check(op, dtype, inputs, actual.as_bytes(), precision, &what);
    }
}

pub fn all_reduce(course: &mut Course<'_>, case: &Case) {
    let number = course.next();
    let mut tensor = course.tensor(case.dtype(), &case.source.elements(course.rank(), 0, case.count));
    let outcome = done(course.group.start_all_reduce(tensor.lend(), as_called(&case.op, course.rank())));
    course.note(tensor.as_bytes());
    // All have the same bits, so one has the time to look at them.
    if course.rank() == number % course.size() {
        case.check(&tensor, &case.inputs(course.size(), 0, case.count), Kind::AllReduce, outcome.algorithm);
    }
}

pub fn reduce(course: &mut Course<'_>, case: &Case, root: usize) {
    course.next();
    let mut tensor = course.tensor(case.dtype(), &case.source.elements(course.rank(), 0, case.count));
    let outcome = done(course.group.start_reduce(tensor.lend(), as_called(&case.op, course.rank()), root));
    if course.rank() == root {
        case.check(&tensor, &case.inputs(course.size(), 0, case.count), Kind::Reduce, outcome.algorithm);
    }
}

/// The first rank with the first rank's elements, the second with those of two, and so on.
pub fn scan(course: &mut Course<'_>, case: &Case) {
    course.next();
    let mut tensor = course.tensor(case.dtype(), &case.source.elements(course.rank(), 0, case.count));
    let outcome = done(course.group.start_scan(tensor.lend(), as_called(&case.op, course.rank())));
    case.check(&tensor, &case.inputs(course.rank() + 1, 0, case.count), Kind::Scan, outcome.algorithm);
}

pub fn reduce_scatter_into(course: &mut Course<'_>, case: &Case) {
    course.next();
    let (rank, size) = (course.rank(), course.size());
    let mut input = course.tensor(case.dtype(), &case.source.elements(rank, 0, case.count * size));
    let before = input.as_bytes().to_vec();
    let mut output = course.blank(case.dtype(), case.count);
    let outcome =
        done(course.group.start_reduce_scatter_into(output.lend(), input.lend(), as_called(&case.op, rank)));
    let inputs = case.inputs(size, rank * case.count, case.count);
    case.check(&output, &inputs, Kind::ReduceScatter, outcome.algorithm);
    assert!(input.as_bytes() == before, "reduce_scatter_into leaves its input as it was");
}

/// Parts of different lengths.
pub fn reduce_scatter(course: &mut Course<'_>, case: &Case) {
    course.next();
    let (rank, size) = (course.rank(), course.size());
    let start = |part: usize| (0..part).map(|before| uneven(case.count, before)).sum();
    let part = |part| {
        course.tensor(case.dtype(), &case.source.elements(rank, start(part), uneven(case.count, part)))
    };
    let mut inputs: Vec<Buffer> = (0..size).map(part).collect();
    let mut output = course.blank(case.dtype(), uneven(case.count, rank));
    let op = as_called(&case.op, rank);
    let outcome = done(course.group.start_reduce_scatter(output.lend(), lend_all(&mut inputs), op));
    let inputs = case.inputs(size, start(rank), uneven(case.count, rank));
    case.check(&output, &inputs, Kind::ReduceScatter, outcome.algorithm);
}

/// A tensor of the case's length, one without elements, and one of five.
pub fn all_reduce_coalesced(course: &mut Course<'_>, case: &Case) {
    let number = course.next();
    let parts = [(0, case.count), (case.count, 0), (case.count, 5)];
    let part = |(from, count)| course.tensor(case.dtype(), &case.source.elements(course.rank(), from, count));
    let mut tensors: Vec<Buffer> = parts.map(part).into();
    let op = as_called(&case.op, course.rank());
    let outcome = done(course.group.start_all_reduce_coalesced(lend_all(&mut tensors), op));
    for (tensor, (from, count)) in tensors.iter().zip(parts) {
        course.note(tensor.as_bytes());
        if course.rank() == number % course.size() {
            case.check(tensor, &case.inputs(course.size(), from, count), Kind::AllReduce, outcome.algorithm);
        }
    }
}

/// Every dtype with every reduction and every short length, by all operations that compute.
pub fn short(group: &Group) -> u64 {
    let mut course = Course::new(group);
    for dtype in DType::ALL {
        for op in ops(dtype) {
            for count in SHORT {
                let number = course.next();
                let spice = if number.is_multiple_of(2) { Spice::Tame } else { Spice::Endless };
                let case = Case::new(op, dtype, count, number, spice);
                all_reduce(&mut course, &case);
                reduce(&mut course, &case, number % group.size());
                scan(&mut course, &case);
                reduce_scatter_into(&mut course, &case);
                reduce_scatter(&mut course, &case);
                all_reduce_coalesced(&mut course, &case);
            }
        }
        course.agree(dtype.name());
    }
    every_root(&mut course);
    custom(&mut course);
    course.agree("all reductions");
    course.digest()
}

fn every_root(course: &mut Course<'_>) {
    for (dtype, count) in [(DType::F32, 3), (DType::BF16, 5000), (DType::I64, 20_000)] {
        for root in 0..course.size() {
            reduce(course, &Case::new(&ReduceOp::Sum, dtype, count, root, Spice::Tame), root);
        }
    }
}

/// A function for which order and grouping matter: `3 × earlier + later`, byte by byte.
fn custom(course: &mut Course<'_>) {
    let two = |earlier: &mut [u8], later: &[u8]| {
        for (earlier, later) in earlier.iter_mut().zip(later) {
            *earlier = earlier.wrapping_mul(3).wrapping_add(*later);
        }
    };
    let op = ReduceOp::Custom(CustomOp::new("triple", move |earlier, later, _| two(earlier, later)));
    for (dtype, count) in DType::ALL.into_iter().flat_map(|dtype| [0, 7, 40_000].map(|count| (dtype, count)))
    {
        let source = Source::moved(dtype, course.next() as u64);
        let mut tensor = course.tensor(dtype, &source.elements(course.rank(), 0, count));
        done(course.group.start_all_reduce(tensor.lend(), op.clone()));
        let mut expected = source.elements(0, 0, count);
        (1..course.size()).for_each(|rank| two(&mut expected, &source.elements(rank, 0, count)));
        assert!(tensor.as_bytes() == expected, "a custom reduction of {dtype} × {count}");

        let mut tensor = course.tensor(dtype, &source.elements(course.rank(), 0, count));
        done(course.group.start_scan(tensor.lend(), op.clone()));
        let mut expected = source.elements(0, 0, count);
        (1..=course.rank()).for_each(|rank| two(&mut expected, &source.elements(rank, 0, count)));
        assert!(tensor.as_bytes() == expected, "a custom scan of {dtype} × {count}");
    }
}

/// A long tensor of every second dtype; with all sizes of groups together, every dtype with two of its reductions or more.
pub fn long(group: &Group) -> u64 {
    let mut course = Course::new(group);
    let turn = SIZES.iter().position(|size| *size == group.size()).expect("a size of the suite");
    for (number, (dtype, op)) in long_cases(turn).into_iter().enumerate() {
        let case = Case::new(&op, dtype, LONG, number, Spice::Endless);
        all_reduce(&mut course, &case);
        let shared = Case { count: LONG / group.size(), ..case.clone() };
        match (number + turn) % 5 {
            4 => scan(&mut course, &case),
            0 => reduce(&mut course, &case, number % group.size()),
            1 => reduce_scatter_into(&mut course, &shared),
            2 => reduce_scatter(&mut course, &shared),
            _ => all_reduce_coalesced(&mut course, &case),
        }
    }
    course.agree("long reductions");
    course.digest()
}

/// Every second dtype, each with another of its reductions in every turn.
pub fn long_cases(turn: usize) -> Vec<(DType, ReduceOp)> {
    let dtypes = DType::ALL.into_iter().skip(turn % 2).step_by(2);
    let one =
        |(number, dtype): (usize, DType)| (dtype, ops(dtype)[(number + turn) % ops(dtype).len()].clone());
    dtypes.enumerate().map(one).collect()
}

/// Everything of one kind that computes and rounds, on the wildest numbers.
pub fn wild(course: &mut Course<'_>, kind: Kind) {
    let floats = DType::ALL.into_iter().filter(|dtype| format_of(part_of(*dtype)).is_some());
    for (dtype, op) in floats.flat_map(|dtype| ops(dtype).iter().map(move |op| (dtype, op))) {
        for count in [7, 1100] {
            let seed = course.next();
            let case = Case::new(op, dtype, count, seed, Spice::Wild);
            match kind {
                Kind::AllReduce => {
                    all_reduce(course, &case);
                    all_reduce_in_halves(course, &case);
                }
                Kind::Reduce => reduce(course, &case, seed % course.size()),
                Kind::Scan => scan(course, &case),
                _ => reduce_scatter_into(course, &case),
            }
        }
    }
}

/// Two calls for the halves of a tensor give what one call gives for the whole.
fn all_reduce_in_halves(course: &mut Course<'_>, case: &Case) {
    let rank = course.rank();
    let middle = case.count / 2;
    let sum = |from, count| {
        let mut tensor = course.tensor(case.dtype(), &case.source.elements(rank, from, count));
        let outcome = done(course.group.start_all_reduce(tensor.lend(), as_called(&case.op, rank)));
        let known = named(Kind::AllReduce, outcome.algorithm).expect("it has just been used");
        assert!(known.in_rank_order, "{known} combines in another order than that of ranks");
        tensor.as_bytes().to_vec()
    };
    let halves = [sum(0, middle), sum(middle, case.count - middle)].concat();
    assert!(halves == sum(0, case.count), "the halves of {case:?} differ from the whole");
}
