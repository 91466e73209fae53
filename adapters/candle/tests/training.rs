//! Ranks as threads: what tensors and models are after operations of all of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, Optimizer as _, SGD, VarMap};
use tenfold::ddp;
use tenfold::{Group, ReduceOp};
use tenfold_candle::{DataParallel, Error, all_gather, all_reduce, broadcast};

const DTYPES: [DType; 9] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
];

fn ranks<R: Send>(size: usize, body: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    Group::threads(size, |group| Ok(body(&group))).unwrap()
}

#[test]
fn tensors_of_every_dtype_are_reduced_broadcast_and_gathered() {
    for dtype in DTYPES {
        ranks(3, |group| {
            let rank = group.rank() as f64;
            let own = Tensor::full(rank + 1.0, (2, 2), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let numbers = |tensor: &Tensor| {
                tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
            };
            let sum = all_reduce(group, &own, ReduceOp::Sum).unwrap();
            assert_eq!((sum.dtype(), sum.dims()), (dtype, &[2, 2][..]));
            assert_eq!(numbers(&sum), [6.0; 4]);
            assert_eq!(numbers(&broadcast(group, &own, 2).unwrap()), [3.0; 4]);
            let all = all_gather(group, &own).unwrap();
            assert_eq!(all.dims(), [3, 2, 2]);
            assert_eq!(numbers(&all), [[1.0; 4], [2.0; 4], [3.0; 4]].concat());
        });
    }
}

#[test]
fn a_tensor_that_is_not_contiguous_is_reduced_in_its_own_order() {
    ranks(2, |group| {
        let rows = Tensor::new(&[[1_i64, 2, 3], [4, 5, 6]], &Device::Cpu).unwrap();
        let sum = all_reduce(group, &rows.t().unwrap(), ReduceOp::Sum).unwrap();
        assert_eq!(sum.to_vec2::<i64>().unwrap(), [[2, 8], [4, 10], [6, 12]]);
    });
}

#[test]
fn what_a_group_refuses_is_an_error() {
    ranks(2, |group| {
        let own = Tensor::new(&[1_u32], &Device::Cpu).unwrap();
        let refused = broadcast(group, &own, 2).unwrap_err();
        assert!(matches!(&refused, Error::Group(error) if error.kind() == tenfold::ErrorKind::Argument));
        assert!(refused.to_string().contains("root 2 is out of range"), "{refused}");
    });
}

/// One step with the whole batch on one rank, and with half of it on each of two.
#[test]
fn two_ranks_with_half_a_batch_step_as_one_with_the_whole() {
    let step = |group: &Group| {
        let variables = VarMap::new();
        let init = Init::Const(1.0 + group.rank() as f64); // rank 0's value counts
        let weight = variables.get(2, "weight", init, DType::F64, &Device::Cpu).unwrap();
        let mut parallel = DataParallel::new(group, &variables).unwrap();
        let mut optimizer = SGD::new(parallel.variables().to_vec(), 0.5).unwrap();
        let batch = Tensor::new(&[[1.0, 2.0], [3.0, 5.0]], &Device::Cpu).unwrap();
        let own = 2 / group.size();
        let own = batch.narrow(0, group.rank() * own, own).unwrap();
        let loss = own.broadcast_mul(&weight).unwrap().sqr().unwrap().mean_all().unwrap();
        parallel.backward_step(&loss, &mut optimizer).unwrap();
        let print = parallel.check_replicas().unwrap();
        (weight.to_vec1::<f64>().unwrap(), print)
    };
    let alone = ranks(1, step);
    let both = ranks(2, step);
    assert_eq!(both, [alone[0].clone(), alone[0].clone()]);
}

#[test]
fn a_replica_that_differs_in_one_bit_is_named_on_all_ranks() {
    let verdicts = ranks(4, |group| {
        let variables = VarMap::new();
        variables.get(1, "bias", Init::Const(1.0), DType::F32, &Device::Cpu).unwrap();
        variables.get(2, "weight", Init::Const(2.0), DType::F32, &Device::Cpu).unwrap();
        let parallel = DataParallel::new(group, &variables).unwrap();
        assert!(parallel.check_replicas().is_ok());
        if group.rank() == 2 {
            let other = Tensor::new(&[2.0, 2.0_f32.next_up()], &Device::Cpu).unwrap();
            parallel.variables()[1].set(&other).unwrap();
        }
        parallel.check_replicas().unwrap_err().to_string()
    });
    assert_eq!(verdicts, vec!["ranks [2] have other parameters than rank 0"; 4]);
}

#[test]
fn models_that_differ_are_refused_on_all_ranks() {
    let refusals = ranks(2, |group| {
        let variables = VarMap::new();
        variables.get(2 + group.rank(), "weight", Init::Const(1.0), DType::F32, &Device::Cpu).unwrap();
        DataParallel::new(group, &variables).map(drop).unwrap_err().to_string()
    });
    assert!(refusals.iter().all(|refusal| refusal.contains("weight")), "{refusals:?}");
}

/// The outcome of a step in which these ranks do not use one of two parameters.
fn step_without(skips: fn(usize) -> bool, options: fn() -> ddp::Options) -> Vec<Result<[f32; 2], String>> {
    ranks(2, |group| {
        let variables = VarMap::new();
        let get = |name| variables.get(1, name, Init::Const(1.0), DType::F32, &Device::Cpu).unwrap();
        let (always, sometimes) = (get("always"), get("sometimes"));
        let mut parallel = DataParallel::with_options(group, &variables, options()).unwrap();
        let mut optimizer = SGD::new(parallel.variables().to_vec(), 0.5).unwrap();
        let used = if skips(group.rank()) { always.clone() } else { (&always + &sometimes).unwrap() };
        let outcome = parallel.backward_step(&used.sum_all().unwrap(), &mut optimizer);
        outcome.map_err(|error| error.to_string())?;
        Ok([always, sometimes].map(|one| one.to_vec1::<f32>().unwrap()[0]))
    })
}

#[test]
fn a_parameter_without_a_gradient_is_named_on_all_ranks() {
    for outcome in step_without(|rank| rank == 1, ddp::Options::default) {
        let refusal = outcome.unwrap_err();
        assert!(
            refusal.contains("no gradient at the end of iteration 1: `sometimes` on rank 1"),
            "{refusal}"
        );
    }
    for outcome in step_without(|_| true, ddp::Options::default) {
        let refusal = outcome.unwrap_err();
        assert!(
            refusal.contains("no gradient at the end of iteration 1: `sometimes` on all ranks"),
            "{refusal}"
        );
    }
}

#[test]
fn a_parameter_without_a_gradient_needs_an_option() {
    let options = || ddp::Options::default().find_unused_parameters();
    assert_eq!(step_without(|rank| rank == 1, options), [Ok([0.5, 0.75]), Ok([0.5, 0.75])]);
    assert_eq!(step_without(|_| true, options), [Ok([0.5, 1.0]), Ok([0.5, 1.0])]);
}

#[test]
fn gradients_of_iterations_without_synchronisation_are_added() {
    ranks(2, |group| {
        let variables = VarMap::new();
        let weight = variables.get(1, "weight", Init::Const(1.0), DType::F32, &Device::Cpu).unwrap();
        let mut parallel = DataParallel::new(group, &variables).unwrap();
        let mut average = |factor: f64, sync: bool| {
            let loss = (&weight * (factor * (1.0 + group.rank() as f64))).unwrap().sum_all().unwrap();
            let mut gradients = loss.backward().unwrap();
            parallel.reducer().set_sync(sync);
            parallel.average(&mut gradients).unwrap();
            gradients.get(&weight).unwrap().to_vec1::<f32>().unwrap()
        };
        average(1.0, false);
        assert_eq!(average(10.0, true), [16.5]);
        assert_eq!(average(100.0, true), [150.0]); // nothing is left of the earlier ones
    });
}
