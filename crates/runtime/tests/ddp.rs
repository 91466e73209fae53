//! Reducers: the same bits as a plain all-reduce, whatever the buckets and the order; and what is said when something goes wrong.

#![allow(clippy::unwrap_used, reason = "tests: helpers may fail")]

mod support;

use std::sync::Barrier;
use std::time::Duration;

use half::{bf16, f16};
use support::{Job, Jobs, Rank, local_store};
use tenfold::ddp::{CommHook, Divisor, GradBucket, Options, Param, Reducer, verify_params};
use tenfold::{DType, Error, FaultKind, Group, ReduceOp, Result, SparseTensor, Tensor, Work};

const JOBS: Jobs = &[("bits", bits_in_a_process), ("death", death)];

#[test]
#[ignore = "a rank, started by the tests"]
fn rank_entry() {
    support::run_as_rank(JOBS);
}

/// A reducer may be made on one thread and used on another.
const _: fn() = || {
    fn can_be_sent<T: Send>() {}
    can_be_sent::<Reducer>();
};

const LIMIT: Duration = Duration::from_secs(40);

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

fn tensor(param: &Param, bytes: &[u8]) -> Tensor {
    let mut tensor = Tensor::zeros(param.dtype, param.elements());
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
            group.all_reduce(plain.lend(), ReduceOp::Sum)?.wait()?;
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
        // Everybody knows what everybody does, so that the test can add it up.
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

fn bits_in_a_process(rank: &Rank) {
    let options = tenfold::Options::default().deterministic().timeout(LIMIT);
    let group = Group::connect(rank.store(), rank.rank, rank.size, options).unwrap();
    for (number, limits) in LAYOUTS.iter().enumerate() {
        same_bits(&group, &[DType::F32, DType::BF16], limits, number as u64).unwrap();
    }
}

#[test]
fn a_rank_that_dies_in_backward_is_named_by_the_others() {
    let store = local_store();
    let mut ranks = Job::new("death", 3).start(store.address());
    ranks.wait_for_all("in backward", LIMIT);
    ranks.kill(1);
    ranks.tell(0, "go on");
    ranks.tell(2, "go on");
    for rank in [0, 2] {
        let text = ranks.wait_for_event(rank, "failed", LIMIT).text;
        assert!(text.contains("rank 1 (host "), "{text}");
        assert!(text.contains(", in bucket 0 with `weight`, `bias`"), "{text}");
        assert!(text.contains("PeerLost, Some(1)"), "{text}");
    }
    ranks.join(LIMIT);
}

fn death(rank: &Rank) {
    let options = tenfold::Options::default().timeout(LIMIT);
    let group = Group::connect(rank.store(), rank.rank, rank.size, options).unwrap();
    let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default()).unwrap();
    step(&mut reducer, &[0, 1], 1.0).unwrap();
    reducer.start_backward().unwrap();
    reducer.grad_ready(1).unwrap();
    rank.event("in backward");
    rank.order();
    let error = reducer.grad_ready(0).and_then(|()| reducer.finish()).unwrap_err();
    rank.event(format!("failed: {error} {:?}, {:?}", error.kind(), error.peer()));
}

fn weight_and_bias() -> [Param; 2] {
    [Param::new("weight", &[3, 2], DType::F32), Param::new("bias", &[2], DType::F32)]
}

/// An iteration in which each of these parameters gets `value` everywhere.
fn step(reducer: &mut Reducer, params: &[usize], value: f32) -> Result<()> {
    reducer.start_backward()?;
    for param in params {
        reducer.gradient_mut::<f32>(*param)?.fill(value);
        reducer.grad_ready(*param)?;
    }
    reducer.finish()
}

#[test]
fn a_bucket_travels_while_the_caller_goes_on() {
    let (late, limits) = (Barrier::new(2), [1]);
    Group::threads(2, |group| {
        let mut reducer =
            Reducer::new(&group, &weight_and_bias(), Options::default().find_unused_parameters().bucket_bytes(&limits))?;
        reducer.start_backward()?;
        if group.rank() == 1 {
            late.wait();
        }
        reducer.grad_ready(1)?;
        if group.rank() == 0 {
            assert!(reducer.buckets().is_launched(1) && !reducer.buckets().is_launched(0));
            assert_eq!(
                reducer.gradient_mut::<f32>(1).unwrap_err().to_string(),
                "ddp in group `default/ddp` failed on rank 0 of 2: the gradient of parameter 1 `bias` is being reduced\n  \
                 hint: it is yours again after `finish`"
            );
            late.wait();
        }
        reducer.grad_ready(0)?;
        reducer.finish()
    })
    .unwrap();
}

#[test]
fn without_synchronisation_gradients_add_up_until_they_are_reduced() {
    let both = Group::threads(2, |group| {
        let rank = group.rank() as f32;
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        let mut results = Vec::new();
        for round in 0..3 {
            for (value, sync) in [(1.0, false), (10.0, false), (100.0, true)] {
                reducer.set_sync(sync);
                reducer.start_backward()?;
                // The weight is written where it lies, the bias copied in.
                reducer.gradient_mut::<f32>(0)?.iter_mut().for_each(|place| *place += value * (rank + 1.0));
                reducer.grad_ready(0)?;
                let bias: Vec<u8> =
                    [value * (rank + 1.0); 2].iter().flat_map(|value| value.to_ne_bytes()).collect();
                reducer.grad_ready_from(1, &bias)?;
                reducer.finish()?;
                if !sync {
                    assert_eq!(reducer.statistics().buckets_reduced, 0);
                }
            }
            results.push((reducer.gradient::<f32>(0)?[5], reducer.gradient::<f32>(1)?[1], round));
            reducer.zero_gradients()?;
        }
        Ok(results)
    });
    let expected: Vec<(f32, f32, i32)> = (0..3).map(|round| (166.5, 166.5, round)).collect();
    assert_eq!(both.unwrap(), [expected.clone(), expected]);
}

#[test]
fn unused_parameters_count_as_zero_and_those_that_nobody_used_are_known() {
    Group::threads(3, |group| {
        let params: Vec<Param> =
            (0..4).map(|number| Param::new(format!("p{number}"), &[5], DType::F32)).collect();
        let options = Options::default().find_unused_parameters().bucket_bytes(&[1]);
        let mut reducer = Reducer::new(&group, &params, options)?;
        for _ in 0..3 {
            // Parameter 1 is used by rank 1 alone, 2 by nobody.
            let unused: &[usize] = if group.rank() == 1 { &[2] } else { &[1, 2] };
            reducer.start_backward_without(unused)?;
            for param in (0..4).filter(|param| !unused.contains(param)) {
                reducer.gradient_mut::<f32>(param)?.fill(3.0);
                reducer.grad_ready(param)?;
            }
            reducer.finish()?;
            let averages: Vec<f32> = (0..4).map(|param| reducer.gradient::<f32>(param).unwrap()[4]).collect();
            assert_eq!(averages, [3.0, 1.0, 0.0, 3.0]);
            let used: Vec<bool> = (0..4).map(|param| reducer.is_used_anywhere(param)).collect();
            assert_eq!(used, [true, true, false, true]);
        }
        assert!(!reducer.buckets().is_rebuilt());
        Ok(())
    })
    .unwrap();
}

/// As a framework works that accumulates gradients itself, divides them as it copies them in, and looks which are there at the end.
#[test]
fn a_caller_with_gradients_of_its_own_divides_counts_and_keeps() {
    let model = [
        Param::new("weight", &[2], DType::F32),
        Param::new("bias", &[2], DType::F32),
        Param::new("rows", &[10, 3], DType::F32).sparse(),
    ];
    Group::threads(2, |group| {
        let rank = group.rank();
        let options = Options::default().divided_by_caller().find_unused_parameters();
        let mut reducer = Reducer::new(&group, &model, options)?;
        // Nobody uses bias in this iteration, but each rank has something from before; rank 1 also has a row.
        reducer.gradient_mut::<f32>(1)?.fill(10.0 + rank as f32);
        reducer.keep(1, rank == 0)?;
        if rank == 1 {
            reducer.keep_sparse(2, rows(&[2], &[8.0; 3]), false)?;
        }
        reducer.start_backward_without(&[1, 2])?;
        reducer.gradient_mut::<f32>(0)?.fill(1.0);
        reducer.grad_ready(0)?;
        assert!(reducer.is_whole());
        assert_eq!(message(reducer.keep(1, true).unwrap_err()), "a gradient cannot be kept before `finish`");
        while !reducer.wait_for(Duration::from_millis(50)) {}
        reducer.finish()?;
        assert_eq!(reducer.gradient::<f32>(0)?, [2.0; 2], "added up, not divided");
        assert_eq!(reducer.gradient::<f32>(1)?, [21.0; 2]);
        assert_eq!(reducer.sparse_gradient(2).unwrap().values.as_slice::<f32>(), [8.0; 3]);
        assert!(reducer.is_used_anywhere(1) && !reducer.is_used_anywhere(2));

        // What was kept is kept once.
        reducer.start_backward_without(&[1, 2])?;
        reducer.grad_ready(0)?;
        reducer.finish()?;
        assert_eq!(reducer.gradient::<f32>(1)?, [0.0; 2]);
        assert!(!reducer.is_used_anywhere(1));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_gradient_of_a_static_graph_is_given_when_it_is_whole() {
    Group::threads(2, |group| {
        let options = Options::default().divided_by_caller().static_graph();
        let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
        for iteration in 0..3 {
            reducer.start_backward()?;
            reducer.count_ready(0)?;
            if iteration == 0 {
                // Only its end shows what a gradient is.
                reducer.count_ready(0)?;
                reducer.count_ready(1)?;
                assert!(!reducer.is_whole());
                for param in [0, 1] {
                    reducer.gradient_mut::<f32>(param)?.fill(1.0 + group.rank() as f32);
                    reducer.keep(param, false)?;
                }
            } else {
                assert!(reducer.buckets().completes(0));
                for param in [0, 1] {
                    reducer.gradient_mut::<f32>(param)?.fill(1.0 + group.rank() as f32);
                    reducer.grad_ready(param)?;
                }
                assert!(reducer.is_whole());
            }
            reducer.finish()?;
            assert_eq!(reducer.gradient::<f32>(0)?, [3.0; 6], "iteration {iteration}");
            assert_eq!(reducer.gradient::<f32>(1)?, [3.0; 2], "iteration {iteration}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_knows_of_others_data_takes_part() {
    Group::threads(3, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        for iteration in 0..4 {
            if group.rank() < iteration {
                reducer.take_part()?;
            } else {
                step(&mut reducer, &[1, 0], 3.0)?;
            }
            let live = (3 - iteration.min(3)) as f32;
            assert_eq!(reducer.gradient::<f32>(1)?, [live; 2], "iteration {iteration}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_static_graph_knows_how_often_each_parameter_comes() {
    Group::threads(2, |group| {
        let params: Vec<Param> = (0..3).map(|number| Param::new(format!("p{number}"), &[5], DType::F32)).collect();
        let mut reducer = Reducer::new(&group, &params, Options::default())?;
        reducer.set_static_graph()?;
        let value = (1.0 + group.rank() as f32).to_ne_bytes();
        let gradient: Vec<u8> = (0..5).flat_map(|_| value).collect();
        for step in 0..4 {
            reducer.start_forward()?;
            reducer.start_backward()?;
            for param in [2, 0, 2] {
                reducer.grad_ready_from(param, &gradient)?; // parameter 2 is used twice, 1 never
            }
            reducer.finish()?;
            let averages: Vec<f32> = (0..3).map(|param| reducer.gradient::<f32>(param).unwrap()[4]).collect();
            assert_eq!(averages, [1.5, 0.0, 3.0], "step {step}");
            assert!(!reducer.is_used_anywhere(1));
            assert_eq!(reducer.buckets().is_rebuilt(), step >= 2);
        }
        group.barrier()?.wait()?; // else one may fail while the other is not through with the iteration before
        let mut changed = || -> Result<()> {
            reducer.start_backward()?;
            reducer.grad_ready_from(2, &gradient)?;
            reducer.grad_ready_from(0, &gradient)?;
            reducer.finish()
        };
        assert_eq!(
            message(changed().unwrap_err()),
            "the graph is not static: parameter 2 `p2` was made ready once in iteration 5, and 2 times in the first"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_run_out_of_data_add_nothing_and_keep_up() {
    for (divisor, shares) in [(Divisor::Initial, [3.0, 2.0, 1.0]), (Divisor::Live, [3.0, 3.0, 3.0])] {
        let ends = Group::threads(3, |group| {
            let options = Options::default().join(divisor).find_unused_parameters();
            let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
            let mut seen = Vec::new();
            for _batch in 0..=group.rank() {
                step(&mut reducer, &[1, 0], 3.0)?;
                seen.push(reducer.gradient::<f32>(0)?[0]);
            }
            while reducer.shadow()? {
                seen.push(reducer.gradient::<f32>(0)?[0]);
            }
            assert_eq!(reducer.last_with_data(group.rank() as u64 + 1)?, 2);
            Ok(seen)
        });
        assert_eq!(ends.unwrap(), vec![shares.to_vec(); 3]);
    }
    let default =
        Group::threads(1, |group| Reducer::new(&group, &weight_and_bias(), Options::default())?.shadow());
    assert_eq!(message(default.unwrap_err()), "this reducer expects the same number of batches on all ranks");
}

#[test]
fn a_rank_without_any_data_shadows_every_kind_of_graph() {
    let graphs: [fn() -> Options; 3] = [
        Options::default,
        || Options::default().find_unused_parameters(),
        || Options::default().static_graph(),
    ];
    for graph in graphs {
        let ends = Group::threads(3, |group| {
            let options = graph().join(Divisor::Initial).bucket_bytes(&[1]);
            let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
            let mut seen = Vec::new();
            for _batch in 0..2 * group.rank() {
                step(&mut reducer, &[1, 0], 3.0)?;
                seen.push(reducer.gradient::<f32>(1)?[0]);
            }
            while reducer.shadow()? {
                seen.push(reducer.gradient::<f32>(1)?[0]);
            }
            Ok(seen)
        });
        assert_eq!(ends.unwrap(), vec![vec![2.0, 2.0, 1.0, 1.0]; 3]);
    }
}

#[test]
fn uneven_ranks_rebuild_and_skip_together() {
    let ends = Group::threads(2, |group| {
        let mut reducer = Reducer::new(
            &group,
            &weight_and_bias(),
            Options::default().join(Divisor::Initial).bucket_bytes(&[1]),
        )?;
        for batch in 0..if group.rank() == 0 { 1 } else { 4 } {
            reducer.set_sync(batch != 2);
            if batch == 3 {
                reducer.zero_gradients()?;
            }
            step(&mut reducer, &[1, 0], 2.0)?;
        }
        let mut steps = 0;
        while reducer.shadow()? {
            steps += 1;
        }
        assert!(reducer.buckets().is_rebuilt());
        Ok((steps, reducer.gradient::<f32>(0)?[0]))
    });
    assert_eq!(ends.unwrap(), [(3, 1.0), (0, 1.0)]);
}

/// Rows of three elements.
fn rows(indices: &[i64], values: &[f32]) -> SparseTensor {
    SparseTensor { shape: vec![10], indices: indices.to_vec(), dense: 3, values: Tensor::from_slice(values) }
}

#[test]
fn sparse_gradients_are_averaged_by_row() {
    Group::threads(2, |group| {
        let params = [
            Param::new("embedding", &[10, 3], DType::F32).sparse(),
            Param::new("weight", &[4], DType::F32),
        ];
        let mut reducer = Reducer::new(&group, &params, Options::default())?;
        assert!(reducer.sparse_gradient(0).is_none());
        for round in 0..3 {
            reducer.set_sync(round != 1);
            reducer.start_backward()?;
            let row = 4 + group.rank() as i64;
            reducer.grad_ready_sparse(0, rows(&[row, 9], &[2.0, 2.0, 2.0, 4.0, 4.0, 4.0]))?;
            reducer.gradient_mut::<f32>(1)?.fill(1.0);
            reducer.grad_ready(1)?;
            reducer.finish()?;
            let average = reducer.sparse_gradient(0).unwrap();
            assert_eq!(average.indices, [4, 5, 9]);
            let factor = if round == 2 { 2.0 } else { 1.0 }; // with what was accumulated
            let expected = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0].map(|value| value * factor);
            assert_eq!(average.values.as_slice::<f32>(), expected, "round {round}");
        }
        reducer.start_backward()?;
        let errors = [
            reducer.grad_ready(0).unwrap_err(),
            reducer.grad_ready_sparse(1, rows(&[], &[])).unwrap_err(),
            reducer.grad_ready_sparse(0, SparseTensor { shape: vec![11], ..rows(&[], &[]) }).unwrap_err(),
            reducer.gradient::<f32>(0).unwrap_err(),
        ];
        let texts = errors.map(message);
        assert_eq!(
            texts,
            [
                "parameter 0 `embedding` is sparse, and its gradient is not",
                "parameter 1 `weight` is not sparse, and its gradient is",
                "the gradient of parameter 0 `embedding` has [11] rows of 3 float32, not [10] rows of 3 float32",
                "parameter 0 `embedding` is sparse: it has no gradient in memory",
            ]
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_can_be_reduced_in_another_dtype_than_their_own() {
    Group::threads(2, |group| {
        let params = [Param::new("a", &[3], DType::F32), Param::new("b", &[2], DType::F64)];
        let mut reducer = Reducer::new(&group, &params, Options::default().reduce_dtype(DType::BF16))?;
        for _ in 0..3 {
            let value = 1.0 + group.rank() as f32 / 3.0;
            reducer.start_backward()?;
            reducer.gradient_mut::<f32>(0)?.fill(value);
            reducer.gradient_mut::<f64>(1)?.fill(f64::from(value));
            reducer.grad_ready(0)?;
            reducer.grad_ready(1)?;
            reducer.finish()?;
            let part = |rank: f32| bf16::from_f32((1.0 + rank / 3.0) / 2.0).to_f32();
            let expected = bf16::from_f32(part(0.0) + part(1.0));
            assert_eq!(reducer.gradient::<f32>(0)?, [expected.to_f32(); 3]);
            assert_eq!(reducer.gradient::<f64>(1)?, [expected.to_f64(); 2]);
        }
        Ok(())
    })
    .unwrap();
}

/// A hook that does not exist elsewhere: the largest, found in another tensor than the bucket's own.
struct Largest;

impl CommHook for Largest {
    fn name(&self) -> &str {
        "largest"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        let values: Vec<f64> = bucket.gradients::<f32>().concat().into_iter().map(f64::from).collect();
        bucket.set_buffer(Tensor::from_slice(&values));
        group.all_reduce(bucket.buffer_mut().lend(), ReduceOp::Max).map(Some)
    }

    fn land(&mut self, bucket: &mut GradBucket, _: &Group) -> Result<()> {
        assert!(bucket.is_last() && bucket.index() == 0);
        let names: Vec<&str> = bucket.parameters().map(|(_, param)| param.name.as_str()).collect();
        assert_eq!(names.len(), 2);
        bucket.buffer_mut().as_mut_slice::<f64>().iter_mut().for_each(|value| *value *= 10.0);
        Ok(())
    }
}

#[test]
fn a_hook_decides_what_becomes_of_a_bucket() {
    Group::threads(3, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default().hook(Largest))?;
        for _ in 0..3 {
            step(&mut reducer, &[1, 0], group.rank() as f32)?;
            assert_eq!(reducer.gradient::<f32>(0)?, [20.0; 6]);
        }
        Ok(())
    })
    .unwrap();
}

fn message(error: Error) -> String {
    error.message().to_owned()
}

/// The error of each rank, which each must have.
fn errors(size: usize, body: impl Fn(Group) -> Result<()> + Sync) -> Vec<Error> {
    let options = tenfold::Options::default().timeout(LIMIT);
    Group::threads_with(size, &options, |group| Ok(body(group).expect_err("every rank hears of it"))).unwrap()
}

#[test]
fn different_models_are_refused_on_all_ranks_with_the_first_difference() {
    let refused = |change: fn(&mut Vec<Param>)| {
        let errors = errors(3, |group| {
            let mut params = weight_and_bias().to_vec();
            if group.rank() == 2 {
                change(&mut params);
            }
            Reducer::new(&group, &params, Options::default()).map(drop)
        });
        for error in &errors {
            assert_eq!((error.kind(), error.peer()), (FaultKind::Mismatch, Some(2)));
            assert_eq!(error.message(), errors[0].message(), "all hear the same");
        }
        message(errors[1].clone())
    };
    assert_eq!(
        refused(|params| params[1].shape = vec![3]),
        "rank 2 has another model than rank 0: parameter 1 is `bias` [3] float32 there, and `bias` [2] float32 on rank 0"
    );
    assert_eq!(
        refused(|params| params[0].dtype = DType::BF16),
        "rank 2 has another model than rank 0: parameter 0 is `weight` [3, 2] bfloat16 there, and `weight` [3, 2] \
         float32 on rank 0"
    );
    assert_eq!(
        refused(|params| params.swap(0, 1)),
        "rank 2 has another model than rank 0: parameter 0 is `bias` [2] float32 there, and `weight` [3, 2] float32 on \
         rank 0"
    );
    assert_eq!(
        refused(|params| params.truncate(1)),
        "rank 2 has 1 parameters, and rank 0 has 2: only rank 0 has `bias`"
    );
    assert_eq!(
        refused(|params| params.push(Param::new("more", &[1], DType::F32))),
        "rank 2 has 3 parameters, and rank 0 has 2: only rank 2 has `more`"
    );
    assert_eq!(
        refused(|params| params[1].sparse = true),
        "rank 2 has another model than rank 0: parameter 1 is `bias` [2] float32 sparse there, and `bias` [2] float32 \
         on rank 0"
    );
}

#[test]
fn the_same_models_by_other_names_are_the_same() {
    Group::threads(3, |group| {
        verify_params(&group, &[Param::new(format!("{}", group.rank()), &[2], DType::F32)])
    })
    .unwrap();
}

#[test]
fn different_options_are_refused_and_the_callers_group_goes_on() {
    let errors = errors(2, |group| {
        let options =
            if group.rank() == 0 { Options::default() } else { Options::default().bucket_bytes(&[100]) };
        let refused = Reducer::new(&group, &weight_and_bias(), options).map(drop);
        group.barrier()?.wait()?;
        refused
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(
            error.to_string(),
            format!(
                "ddp in group `default/ddp` failed on rank {rank} of 2: rank 1 has other options than rank 0: buckets of \
                 100 bytes there, buckets of 1048576, 26214400 bytes on rank 0\n  hint: build the same model with the \
                 same options on all ranks, with its parameters in the same order"
            )
        );
    }
}

#[test]
fn models_that_cannot_be_trained_are_refused() {
    let refused = |params: Vec<Param>, options: fn() -> Options| {
        let body = |group: Group| Reducer::new(&group, &params, options()).map(drop);
        message(errors(1, body).remove(0))
    };
    assert_eq!(refused(Vec::new(), Options::default), "the model has no parameters");
    assert_eq!(
        refused(vec![Param::new("steps", &[1], DType::I64)], Options::default),
        "parameter 0 `steps` of int64 can have no gradient"
    );
    assert_eq!(
        refused(vec![Param::new("huge", &[usize::MAX, 2], DType::F32)], Options::default),
        format!("with parameter 0 `huge` of [{}, 2] the model does not fit the address space", usize::MAX)
    );
    assert_eq!(
        refused(vec![Param::new("phase", &[2], DType::Complex64)], || Options::default()
            .reduce_dtype(DType::F16)),
        "parameter 0 `phase` of complex64 cannot be reduced as float16"
    );
}

#[test]
fn buckets_may_be_given_and_must_make_sense() {
    Group::threads(2, |group| {
        let options = || Options::default().bucket_bytes(&[1]);
        let mut reducer =
            Reducer::new(&group, &weight_and_bias(), options().first_buckets(vec![vec![0], vec![1]]))?;
        assert_eq!(reducer.buckets().bucket(0).params, [0]);
        step(&mut reducer, &[1, 0], 1.0)?;
        let refused = |layout| {
            message(Reducer::new(&group, &weight_and_bias(), options().first_buckets(layout)).unwrap_err())
        };
        assert_eq!(refused(vec![vec![0]]), "the first buckets do not have each of 2 parameters once");
        assert_eq!(
            refused(vec![vec![0, 1], vec![]]),
            "first bucket 1 is empty, of several dtypes, or has a sparse parameter that is not alone"
        );
        reducer.start_backward()?;
        assert_eq!(message(reducer.set_hook(Largest).unwrap_err()), "a hook cannot be set before `finish`");
        for param in [1, 0] {
            reducer.grad_ready(param)?;
        }
        reducer.finish()?;
        assert_eq!(
            message(reducer.set_static_graph().unwrap_err()),
            "a static graph is declared before the first backward"
        );
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        reducer.set_hook(Largest)?;
        assert_eq!(
            message(reducer.set_hook(Largest).unwrap_err()),
            "the reducer has a hook already, and can have one only"
        );
        step(&mut reducer, &[1, 0], 2.0)?;
        assert_eq!(reducer.gradient::<f32>(1)?, [20.0; 2]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_parameter_that_is_ready_twice_fails_everybody() {
    let errors = errors(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        reducer.start_backward()?;
        reducer.grad_ready(1)?;
        if group.rank() == 1 {
            let error = reducer.grad_ready(1).unwrap_err();
            assert_eq!(
                message(reducer.start_backward().unwrap_err()),
                "the reducer has failed before: parameter 1 `bias` was made ready twice in iteration 1"
            );
            assert_eq!(reducer.logger().data().integers["has_error"], 1);
            assert_eq!(reducer.logger().data().strings["error"], error.to_string());
            group.barrier()?.wait()?;
            return Err(error);
        }
        let failed = reducer.grad_ready(0).and_then(|()| reducer.finish());
        group.barrier()?.wait()?; // the caller's group goes on
        failed
    });
    assert_eq!(
        errors[1].to_string(),
        "ddp in group `default/ddp` failed on rank 1 of 2: parameter 1 `bias` was made ready twice in iteration 1\n  \
         hint: call `finish` between two backward passes; a parameter that is used several times in one needs \
         `static_graph`"
    );
    let text = message(errors[0].clone());
    assert!(text.contains("rank 1 (host "), "{text}");
    assert!(
        text.contains(") aborted the group: parameter 1 `bias` was made ready twice in iteration 1"),
        "{text}"
    );
    assert_eq!(errors[0].peer(), Some(1));
}

#[test]
fn missing_gradients_are_named_with_their_ranks_on_all_ranks() {
    let params: Vec<Param> =
        (0..4).map(|number| Param::new(format!("p{number}"), &[2], DType::F32)).collect();
    let errors = errors(3, |group| {
        let mut reducer = Reducer::new(&group, &params, Options::default())?;
        step(&mut reducer, &[0, 1, 2, 3], 1.0)?;
        // Nobody has 1, rank 2 does not have 3 either, rank 0 learns of it in the midst of things.
        let have: &[usize] = [&[0_usize, 2, 3] as &[usize], &[0, 2, 3], &[0, 2]][group.rank()];
        step(&mut reducer, have, 1.0)
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(
            error.to_string(),
            format!(
                "ddp in group `default/ddp` failed on rank {rank} of 3: 2 parameters have no gradient at the end of \
                 iteration 2: `p1` on all ranks, `p3` on rank 2\n  hint: give every parameter a gradient in every \
                 iteration, or set `find_unused_parameters` and name the unused ones"
            )
        );
    }
}

#[test]
fn a_rank_that_misses_nothing_hears_what_others_miss() {
    let params: Vec<Param> =
        (0..25).map(|number| Param::new(format!("p{number}"), &[2], DType::F32)).collect();
    let errors = errors(2, |group| {
        let mut reducer = Reducer::new(&group, &params, Options::default())?;
        let have: Vec<usize> = if group.rank() == 0 { (0..25).collect() } else { vec![0] };
        step(&mut reducer, &have, 1.0)
    });
    for error in &errors {
        let text = message(error.clone());
        assert!(
            text.starts_with("24 parameters have no gradient at the end of iteration 1: `p1` on rank 1, "),
            "{text}"
        );
        assert!(text.ends_with("`p20` on rank 1 and 4 more"), "{text}");
    }
}

/// A hook that asks for something impossible on one rank.
struct Broken;

impl CommHook for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        let view = bucket.buffer_mut().lend();
        let work =
            if group.rank() == 1 { group.broadcast(view, 99) } else { group.all_reduce(view, ReduceOp::Sum) };
        work.map(Some)
    }
}

#[test]
fn a_hook_that_fails_on_one_rank_fails_the_iteration_on_all() {
    let errors = errors(3, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default().hook(Broken))?;
        step(&mut reducer, &[1, 0], 1.0)
    });
    let reason = "root 99 is out of range: ranks are 0 to 2, in bucket 0 with `weight`, `bias`";
    assert_eq!(errors[1].message(), reason);
    for rank in [0, 2] {
        assert!(errors[rank].message().contains(&format!("aborted the group: {reason}")), "{}", errors[rank]);
        assert_eq!(errors[rank].peer(), Some(1));
    }
}

#[test]
fn a_rank_that_is_late_is_named_with_the_bucket_that_waits_for_it() {
    let failed = Barrier::new(2);
    let errors = Group::threads(2, |group| {
        let patient = group.with_timeout(Duration::from_secs(2));
        let mut reducer = Reducer::new(&patient, &weight_and_bias(), Options::default())?;
        reducer.start_backward()?;
        if group.rank() == 1 {
            failed.wait();
        }
        // The late one may find all it needs before it hears that the other gave up.
        let error = step_from_here(&mut reducer).err();
        if group.rank() == 0 {
            failed.wait();
        }
        Ok(error)
    });
    let error = errors.unwrap().remove(0).expect("nobody came");
    assert_eq!((error.kind(), error.peer()), (FaultKind::Timeout, Some(1)), "{error}");
    assert!(error.message().contains("rank 1"), "{error}");
    assert!(error.message().ends_with(", in bucket 0 with `weight`, `bias`"), "{error}");
}

fn step_from_here(reducer: &mut Reducer) -> Result<()> {
    reducer.grad_ready(1)?;
    reducer.grad_ready(0)?;
    reducer.finish()
}

#[test]
fn calls_that_make_no_sense_do_no_harm() {
    Group::threads(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        let texts = [
            reducer.finish().unwrap_err(),
            reducer.grad_ready(0).unwrap_err(),
            reducer.gradient::<f32>(2).unwrap_err(),
            reducer.gradient::<f64>(0).unwrap_err(),
            reducer.start_backward_without(&[0]).unwrap_err(),
        ]
        .map(message);
        assert_eq!(
            texts,
            [
                "`finish` without `start_backward`: there is nothing to finish",
                "parameter 0 `weight` was made ready without `start_backward`",
                "there is no parameter 2: there are 2",
                "parameter 0 `weight` has a gradient of float32, not float64",
                "this reducer expects a gradient of every parameter",
            ]
        );
        reducer.start_backward()?;
        assert_eq!(
            message(reducer.zero_gradients().unwrap_err()),
            "gradients cannot be zeroed before `finish`"
        );
        assert_eq!(
            message(reducer.grad_ready_from(1, &[0; 7]).unwrap_err()),
            "the gradient of parameter 1 `bias` has 8 bytes, not 7"
        );
        reducer.gradient_mut::<f32>(0)?.fill(2.0);
        reducer.grad_ready(0)?;
        reducer.grad_ready(1)?;
        assert_eq!(
            message(reducer.start_backward().unwrap_err()),
            "iteration 1 has begun and is not finished"
        );
        reducer.finish()?;
        assert!(reducer.failure().is_none());
        assert_eq!(reducer.gradient::<f32>(0)?, [2.0; 6]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_next_forward_finds_a_backward_that_was_never_finished() {
    let errors = errors(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        reducer.start_forward()?;
        reducer.start_backward()?;
        reducer.grad_ready(1)?;
        reducer.start_forward()
    });
    let text = "1 parameter has no gradient at the end of iteration 1: `weight` on all ranks";
    assert_eq!(errors.into_iter().map(message).collect::<Vec<_>>(), [text, text]);
}

#[test]
fn the_logger_has_c10ds_fields() {
    Group::threads(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default().bucket_bytes(&[8]))?;
        reducer.logger_mut().set("module_name", "Net");
        for _ in 0..3 {
            reducer.start_forward()?;
            step(&mut reducer, &[1, 0], 1.0)?;
        }
        let data = reducer.logger().data();
        let strings = ["module_name", "backend_name", "dtypes", "bucket_sizes", "rebuilt_bucket_sizes"];
        assert_eq!(
            strings.map(|name| data.strings[name].as_str()),
            ["Net", "tenfold", "float32", "32", "8, 24"]
        );
        assert_eq!(data.strings["prev_iteration_grad_ready_order_indices"], "1, 0");
        assert_eq!(data.strings["rebuilt_per_bucket_param_indices"], "1, 0");
        let numbers =
            ["world_size", "rank", "num_parameter_tensors", "total_parameter_size_bytes", "iteration"];
        let expected = [2, group.rank() as i64, 2, 32, 3];
        assert_eq!(numbers.map(|name| data.integers[name]), expected);
        let numbers = ["num_buckets_reduced", "has_rebuilt_buckets", "has_error", "bucket_cap_bytes"];
        assert_eq!(numbers.map(|name| data.integers[name]), [2, 1, 0, 8]);
        for name in ["forward_compute_time", "backward_compute_time", "backward_comm_time"] {
            assert!(data.integers[name] >= 0 && data.integers[format!("avg_{name}").as_str()] >= 0);
        }
        let statistics = reducer.statistics();
        assert_eq!((statistics.iteration, statistics.buckets_reduced, statistics.bytes_reduced), (3, 2, 32));
        Ok(())
    })
    .unwrap();
}
