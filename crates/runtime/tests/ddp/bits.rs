//! The same bits as a plain all-reduce, whatever the buckets, the dtypes and the order; and the averages of any program.

use super::*;

/// Numbers as good as random, the same everywhere.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut next = random(seed);
    let mut order: Vec<usize> = (0..count).collect();
    (1..count).rev().for_each(|place| order.swap(place, next() as usize % (place + 1)));
    order
}

/// A gradient, as bytes of its dtype.
fn gradient(param: &Param, seed: u64) -> Vec<u8> {
    let mut next = random(seed);
    let mut value = || (next() >> 40) as f32 / (1 << 20) as f32 - 8.0;
    let one = |value: f32| match param.dtype {
        DType::F32 => value.to_ne_bytes().to_vec(),
        DType::F64 => f64::from(value).sin().to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32(value).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(value).to_ne_bytes().to_vec(),
        other => panic!("{other}"),
    };
    (0..param.elements()).flat_map(|_| one(value())).collect()
}

fn tensor(param: &Param, bytes: &[u8]) -> Buffer {
    let mut tensor = Buffer::zeros(param.dtype, param.elements());
    tensor.as_mut_bytes().copy_from_slice(bytes);
    tensor
}

/// What PyTorch's reducer would put into the bucket.
fn divided(param: &Param, bytes: &[u8], ranks: usize, copied: bool) -> Vec<u8> {
    let single = |value: f32| if copied { value * (1.0 / ranks as f64) as f32 } else { value / ranks as f32 };
    let size = param.dtype.size();
    let one = |bytes: &[u8]| match param.dtype {
        DType::F32 => single(f32::from_ne_bytes(bytes.try_into().unwrap())).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32(single(f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()))
            .to_ne_bytes()
            .to_vec(),
        DType::BF16 => bf16::from_f32(single(bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()))
            .to_ne_bytes()
            .to_vec(),
        _ => {
            let value = f64::from_ne_bytes(bytes.try_into().unwrap());
            let double = if copied { value * (1.0 / ranks as f64) } else { value / ranks as f64 };
            double.to_ne_bytes().to_vec()
        }
    };
    bytes.chunks(size).flat_map(one).collect()
}

fn model(dtypes: &[DType], seed: u64) -> Vec<Param> {
    let mut next = random(seed);
    let one = |number: usize| {
        let shape = [next() as usize % 40, next() as usize % 30];
        Param::new(format!("layer{number}"), &shape, dtypes[next() as usize % dtypes.len()])
    };
    (0..12).map(one).collect()
}

/// One model trained for a few iterations; every gradient must have the bits of an all-reduce of it alone.
fn same_bits(group: &Group, dtypes: &[DType], limits: &[usize], seed: u64) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let params = model(dtypes, seed);
    let mut reducer = Reducer::new(group, &params, Options::default().bucket_bytes(limits))?;
    for step in 0..4_u64 {
        let own = |param: usize| {
            gradient(&params[param], seed + 100 * step + 7 * param as u64 + 1000 * rank as u64)
        };
        reducer.start_forward()?;
        reducer.start_backward()?;
        // Every rank has its own order, and copies some gradients in.
        let copied = |param: usize| (param as u64 + step).is_multiple_of(2);
        for param in shuffled(params.len(), seed + step * 10 + rank as u64) {
            if copied(param) {
                reducer.grad_ready_from(param, &own(param))?;
            } else {
                reducer.gradient_bytes(param)?.copy_from_slice(&own(param));
                reducer.grad_ready(param)?;
            }
        }
        reducer.finish()?;
        for (number, param) in params.iter().enumerate() {
            let mut plain = tensor(param, &divided(param, &own(number), size, copied(number)));
            group.start_all_reduce(plain.lend(), ReduceOp::Sum)?.wait()?;
            assert_eq!(
                reducer.gradient_bytes(number)?,
                plain.as_bytes(),
                "step {step}, parameter {number} of {size} ranks"
            );
        }
    }
    assert!(reducer.buckets().is_rebuilt());
    Ok(())
}

const LAYOUTS: [&[usize]; 4] = [&[1 << 20, 25 << 20], &[1], &[2000], &[100, 5000, 800]];

#[test]
fn averages_have_the_bits_of_a_plain_all_reduce_for_any_buckets_dtypes_orders_and_ranks() {
    // Only then do bits not depend on what is reduced together.
    let options = tenfold::Options::default().deterministic().timeout(LIMIT);
    let kinds: [&[DType]; 3] =
        [&[DType::F32], &[DType::F32, DType::F64], &[DType::BF16, DType::F16, DType::F64, DType::F32]];
    for size in 1..=4 {
        let every_layout = |group: Group| {
            for (number, limits) in LAYOUTS.iter().enumerate() {
                for (other, dtypes) in kinds.iter().enumerate() {
                    same_bits(&group, dtypes, limits, (number * 10 + other + size * 100) as u64)?;
                }
            }
            Ok(())
        };
        Group::threads_with(size, &options, every_layout).unwrap();
    }
}

/// What a rank has added up since the last reduction, kept by the test; nothing where it had no gradient.
type Sums = Vec<Option<f32>>;

/// Iterations with and without synchronisation, with unused parameters, in any order; all that happens follows from the seed.
fn any_program(group: &Group, seed: u64) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let mut common = random(seed);
    let params: Vec<Param> = (0..1 + common() as usize % 6)
        .map(|number| Param::new(format!("p{number}"), &[1 + common() as usize % 9], DType::F32))
        .collect();
    let limits = [1 + common() as usize % 60, 1 + common() as usize % 60];
    let finds_unused = common().is_multiple_of(2);
    let options = Options::default().bucket_bytes(&limits);
    let options = if finds_unused { options.find_unused_parameters() } else { options };
    let mut reducer = Reducer::new(group, &params, options)?;
    let mut sums: Vec<Sums> = vec![vec![None; params.len()]; size];
    for step in 0..8 {
        let sync = !common().is_multiple_of(3);
        reducer.set_sync(sync);
        // All ranks know what all ranks do, so that the test can compute the sums.
        let uses: Vec<Vec<bool>> = (0..size)
            .map(|_| params.iter().map(|_| !finds_unused || !common().is_multiple_of(3)).collect())
            .collect();
        let values: Vec<Vec<f32>> =
            (0..size).map(|_| params.iter().map(|_| (common() % 100 * 12) as f32).collect()).collect();
        let order = shuffled(params.len(), seed + step + 1000 * rank as u64);
        let unused: Vec<usize> = (0..params.len()).filter(|param| !uses[rank][*param]).collect();
        reducer.start_backward_without(&unused)?;
        for param in order.into_iter().filter(|param| uses[rank][*param]) {
            let value = values[rank][param];
            if common_coin(seed, step, param) {
                let bytes: Vec<u8> =
                    vec![value; params[param].elements()].iter().flat_map(|v| v.to_ne_bytes()).collect();
                reducer.grad_ready_from(param, &bytes)?;
            } else {
                let before = sums[rank][param].unwrap_or(0.0);
                reducer.gradient_mut::<f32>(param)?.fill(before + value);
                reducer.grad_ready(param)?;
            }
        }
        reducer.finish()?;
        for (sums, (uses, values)) in sums.iter_mut().zip(uses.iter().zip(&values)) {
            for (param, sum) in sums.iter_mut().enumerate().filter(|(param, _)| uses[*param]) {
                *sum = Some(sum.unwrap_or(0.0) + values[param]);
            }
        }
        if sync {
            for (param, shape) in params.iter().enumerate() {
                let total: f32 = sums.iter().map(|sums| sums[param].unwrap_or(0.0)).sum();
                let expected = vec![total / size as f32; shape.elements()];
                assert_eq!(
                    reducer.gradient::<f32>(param)?,
                    expected,
                    "seed {seed}, step {step}, parameter {param}"
                );
                let used = sums.iter().any(|sums| sums[param].is_some());
                assert!(used == reducer.is_used_anywhere(param) || !finds_unused, "seed {seed}, step {step}");
            }
            sums.iter_mut().flatten().for_each(|sum| *sum = None);
        }
    }
    Ok(())
}

fn common_coin(seed: u64, step: u64, param: usize) -> bool {
    random(seed + step * 31 + param as u64)() & 64 == 0
}

#[test]
fn any_program_of_iterations_gives_the_averages_that_a_sheet_of_paper_gives() {
    for seed in 0..60 {
        // Multiples of 12 are divided by up to four ranks without rounding.
        Group::threads(1 + seed as usize % 4, |group| any_program(&group, seed)).unwrap();
    }
}

#[test]
fn averages_have_the_same_bits_between_processes() {
    let store = local_store();
    Job::new("bits", 3).start(store.address()).join_well(LIMIT);
}

pub(super) fn bits_in_a_process(rank: &Rank) {
    let options = tenfold::Options::default().deterministic().timeout(LIMIT);
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    for (number, limits) in LAYOUTS.iter().enumerate() {
        same_bits(&group, &[DType::F32, DType::BF16], limits, number as u64).unwrap();
    }
}
