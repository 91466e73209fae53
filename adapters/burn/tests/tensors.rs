//! Ranks as threads: what single tensors are after operations of all of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use burn::tensor::kind::Basic;
use burn::tensor::quantization::{QuantScheme, QuantStore};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use tenfold::{ErrorKind, Group, ReduceOp};
use tenfold_burn::{Error, all_gather, all_reduce, broadcast};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

const INTEGERS: [DType; 8] =
    [DType::I8, DType::I16, DType::I32, DType::I64, DType::U8, DType::U16, DType::U32, DType::U64];

fn ranks<R: Send>(size: usize, body: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    Group::threads(size, |group| Ok(body(&group))).unwrap()
}

fn numbers<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Vec<f64> {
    tensor.try_to_vec_as::<f64>().unwrap()
}

/// `own` has rank + 1 in each of four elements.
fn check_operations<K: burn::tensor::kind::Numeric>(group: &Group, own: &Tensor<2, K>) {
    let sum = all_reduce(group, own, ReduceOp::Sum).unwrap();
    assert_eq!((sum.dtype(), sum.dims()), (own.dtype(), [2, 2]));
    assert_eq!(numbers(&sum), [6.0; 4]);
    let largest = all_reduce(group, own, ReduceOp::Max).unwrap();
    assert_eq!(numbers(&largest), [3.0; 4]);
    let last = broadcast(group, own, 2).unwrap();
    assert_eq!((last.dtype(), last.dims()), (own.dtype(), [2, 2]));
    assert_eq!(numbers(&last), [3.0; 4]);
    let all = all_gather(group, own).unwrap();
    assert_eq!(all.iter().map(numbers).collect::<Vec<_>>(), [[1.0; 4], [2.0; 4], [3.0; 4]]);
    assert!(all.iter().all(|one| one.dtype() == own.dtype()));
}

#[test]
fn tensors_of_every_dtype_are_reduced_broadcast_and_gathered() {
    for dtype in FLOATS {
        ranks(3, |group| {
            let own = Tensor::<2>::full([2, 2], group.rank() as u32 + 1, (&Device::default(), dtype));
            assert_eq!(own.dtype(), dtype);
            check_operations(group, &own);
            let mean = all_reduce(group, &own, ReduceOp::Avg).unwrap();
            assert_eq!(numbers(&mean), [2.0; 4]);
        });
    }
    for dtype in INTEGERS {
        ranks(3, |group| {
            let own = Tensor::<2, Int>::full([2, 2], group.rank() as u32 + 1, (&Device::default(), dtype));
            assert_eq!(own.dtype(), dtype);
            check_operations(group, &own);
        });
    }
}

#[test]
fn booleans_are_broadcast_and_gathered() {
    ranks(2, |group| {
        let own = Tensor::<1, Bool>::from_data([group.rank() == 1, true, false], &Device::default());
        let theirs = broadcast(group, &own, 1).unwrap();
        assert_eq!(numbers(&theirs), [1.0, 1.0, 0.0]);
        let all = all_gather(group, &own).unwrap();
        assert_eq!(all.iter().map(numbers).collect::<Vec<_>>(), [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]);
    });
}

#[test]
fn a_tensor_of_any_number_of_dimensions_keeps_its_shape() {
    ranks(2, |group| {
        let device = Device::default();
        let line = all_reduce(group, &Tensor::<1>::ones([5], &device), ReduceOp::Sum).unwrap();
        assert_eq!((line.dims(), numbers(&line)), ([5], vec![2.0; 5]));
        let block = all_reduce(group, &Tensor::<5>::ones([1, 2, 3, 1, 2], &device), ReduceOp::Sum).unwrap();
        assert_eq!((block.dims(), numbers(&block)), ([1, 2, 3, 1, 2], vec![2.0; 12]));
        let nothing = all_reduce(group, &Tensor::<2>::ones([0, 3], &device), ReduceOp::Sum).unwrap();
        assert_eq!(nothing.dims(), [0, 3]);
    });
}

#[test]
fn a_tensor_that_is_not_contiguous_is_reduced_in_its_own_order() {
    ranks(2, |group| {
        let rows = Tensor::<2, Int>::from_data([[1, 2, 3], [4, 5, 6]], &Device::default());
        let sum = all_reduce(group, &rows.transpose(), ReduceOp::Sum).unwrap();
        assert_eq!((sum.dims(), numbers(&sum)), ([3, 2], vec![2.0, 8.0, 4.0, 10.0, 6.0, 12.0]));
    });
}

#[test]
fn a_result_is_a_constant_for_autodiff() {
    ranks(2, |group| {
        let device = Device::default().autodiff();
        let own = Tensor::<1>::from_data([2.0], &device).require_grad();
        let sum = all_reduce(group, &(own.clone() * 3.0), ReduceOp::Sum).unwrap();
        let gradients = (own.clone() * sum).sum().backward();
        assert_eq!(numbers(&own.grad(&gradients).unwrap()), [12.0]);
    });
}

#[test]
fn what_a_group_refuses_is_an_error() {
    ranks(2, |group| {
        let own = Tensor::<1>::ones([1], &Device::default());
        let refused = broadcast(group, &own, 2).unwrap_err();
        assert!(matches!(&refused, Error::Group(error) if error.kind() == ErrorKind::Argument));
        assert!(refused.to_string().contains("root 2 is out of range"), "{refused}");
    });
}

#[test]
fn tensors_of_different_lengths_are_refused_on_all_ranks() {
    let refusals = ranks(2, |group| {
        let own = Tensor::<1>::ones([3 + group.rank()], &Device::default());
        let refused = all_reduce(group, &own, ReduceOp::Sum).unwrap_err();
        assert!(matches!(&refused, Error::Group(error) if error.kind() == ErrorKind::Mismatch), "{refused}");
        refused.to_string()
    });
    assert!(
        refusals.iter().all(|refusal| refusal.contains("rank 1 called all_reduce(sum, float32 × 4)")),
        "{refusals:#?}"
    );
}

#[test]
fn a_quantized_tensor_is_refused() {
    ranks(2, |group| {
        let scheme = QuantScheme::default().with_store(QuantStore::Native);
        let own = Tensor::<2>::ones([4, 4], &Device::default()).quantize_dynamic(&scheme);
        let refused = all_reduce(group, &own, ReduceOp::Sum).unwrap_err();
        assert_eq!(refused.to_string(), "tensors of dtype qfloat cannot be sent");
    });
}
