//! Reducers: the same bits as a plain all-reduce, whatever the buckets and the order; and what is said when something goes wrong.
//!
//! Here is what all parts need; they are in `ddp/`, by subject.

#![allow(clippy::unwrap_used, reason = "tests: helpers may fail")]

#[path = "ddp/bits.rs"]
mod bits;
#[path = "ddp/hooks.rs"]
mod hooks;
#[path = "ddp/iterations.rs"]
mod iterations;
#[path = "ddp/refusals.rs"]
mod refusals;
mod support;
#[path = "ddp/trouble.rs"]
mod trouble;
#[path = "ddp/uneven.rs"]
mod uneven;

use std::sync::Barrier;
use std::time::Duration;

use half::{bf16, f16};
use support::{Job, Jobs, Rank, local_store};
use tenfold::ddp::raw::{Framework as _, verify_params};
use tenfold::ddp::{CommHook, Divisor, GradBucket, Options, Param, Reducer};
use tenfold::{Buffer, DType, Error, ErrorKind, Group, ReduceOp, Result, SparseTensor, Work};

const JOBS: Jobs = &[("bits", bits::bits_in_a_process), ("death", trouble::death)];

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

fn message(error: Error) -> String {
    error.message().to_owned()
}

/// The error of each rank, which each must have.
fn errors(size: usize, body: impl Fn(Group) -> Result<()> + Sync) -> Vec<Error> {
    let options = tenfold::Options::default().timeout(LIMIT);
    Group::threads_with(size, &options, |group| Ok(body(group).expect_err("every rank hears of it"))).unwrap()
}
