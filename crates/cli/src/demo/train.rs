//! The training on one rank: everything that a framework would do, with a reducer in the middle.

#![expect(clippy::disallowed_methods, reason = "reports how long steps took")]

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tenfold::ddp::{self, Param, Reducer};
use tenfold::{Buffer, DType, Group, ReduceOp, Result};

use super::data::{self, Point, Random};
use super::model::Model;
use super::progress::Progress;

const HIDDEN: [usize; 2] = [64, 64];
/// Points in a batch, of all ranks together, so that the result hardly depends on the number of ranks.
const BATCH: usize = 256;
/// Enough for one batch of the most workers that the command accepts.
const TRAINING_POINTS: usize = 6144;
pub(super) const TEST_POINTS: usize = 1500;
const RATE: f32 = 0.3;
/// Points of the curve, unless they would be too far apart to show progress.
const CURVE_POINTS: u32 = 100;
const STEPS_APART: u32 = 100;

/// The result on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Training {
    pub(super) parameters: usize,
    /// Of points that were not used for training; all ranks have the same figure.
    pub(super) accuracy: f64,
    /// Mean microseconds of a step, and of the time in it that this rank only waited for gradients of others.
    pub(super) step_us: f64,
    pub(super) communication_us: f64,
    /// Of the bits of all parameters at the end, in hexadecimal: JSON's numbers are too short for it.
    pub(super) fingerprint: String,
}

/// Trains for this many steps; every rank of the group calls it. `tell` is called on all ranks with the
/// common progress.
pub(super) fn train<E: From<tenfold::Error>>(
    group: &Group,
    steps: u32,
    mut tell: impl FnMut(Progress) -> std::result::Result<(), E>,
) -> std::result::Result<Training, E> {
    let (rank, ranks) = (group.rank(), group.size());
    let mut random = Random::new(100 + rank as u64);
    let mut own = data::share(&data::spirals(TRAINING_POINTS, 1), rank, ranks);
    let own_batch = (BATCH / ranks).max(1);
    // Every rank has its own values, until it gets those of rank 0.
    let mut model = Model::new(&HIDDEN, 1 + rank as u64);
    begin_alike(group, &mut model)?;
    let params: Vec<Param> =
        model.describe().into_iter().map(|(name, shape)| Param::new(name, &shape, DType::F32)).collect();
    let mut reducer = Reducer::new(group, &params, ddp::Options::default())?;

    let (mut next, mut loss, mut counted) = (own.len(), 0.0, 0);
    let (mut busy, mut waited) = (Duration::ZERO, Duration::ZERO);
    let every = (steps / CURVE_POINTS).clamp(1, STEPS_APART);
    for step in 1..=steps {
        let begin = Instant::now();
        if next + own_batch > own.len() {
            random.shuffle(&mut own);
            next = 0;
        }
        let rate = RATE * (1.0 - (step - 1) as f32 / steps as f32); // decreases, so that it converges
        loss += one_step(&mut model, &mut reducer, &own[next..next + own_batch], rate)?;
        next += own_batch;
        busy += begin.elapsed();
        waited += exposed(&reducer);
        counted += 1;
        if step % every == 0 || step == steps {
            let loss = over_all_ranks(group, std::mem::take(&mut loss) / counted as f32, ReduceOp::Avg)?;
            counted = 0;
            tell(Progress { step, steps, loss })?;
        }
    }

    let test = data::share(&data::spirals(TEST_POINTS, 2), rank, ranks);
    let right = over_all_ranks(group, model.forward(&test).right(&test) as f32, ReduceOp::Sum)?;
    let mean_us = |sum: Duration| sum.as_secs_f64() * 1e6 / f64::from(steps);
    Ok(Training {
        parameters: params.iter().map(Param::elements).sum(),
        accuracy: f64::from(right) / TEST_POINTS as f64,
        step_us: mean_us(busy),
        communication_us: mean_us(waited),
        fingerprint: format!("{:016x}", model.fingerprint()),
    })
}

/// Gradients are computed in the reducer's memory, where the other ranks read them; returns the loss before the step.
fn one_step(model: &mut Model, reducer: &mut Reducer, batch: &[Point], rate: f32) -> Result<f32> {
    reducer.start_forward()?;
    let pass = model.forward(batch);
    let loss = pass.loss(batch);
    reducer.start_backward()?;
    model.backward(&pass, batch, |parameter, write| {
        write(reducer.gradient_mut::<f32>(parameter)?);
        reducer.grad_ready(parameter)
    })?;
    reducer.finish()?;
    for parameter in 0..model.parameters.len() {
        model.step(parameter, reducer.gradient(parameter)?, rate);
    }
    Ok(loss)
}

/// Communication of the last step during which this rank had nothing else to do.
fn exposed(reducer: &Reducer) -> Duration {
    let statistics = reducer.statistics();
    statistics.backward_comm.saturating_sub(statistics.overlap)
}

fn begin_alike(group: &Group, model: &mut Model) -> Result<()> {
    let mut tensors: Vec<Buffer> = model.parameters.iter().map(|values| Buffer::from_slice(values)).collect();
    let views = tensors.iter_mut().map(Buffer::lend).collect();
    ddp::broadcast_coalesced(group, views, 0, ddp::BROADCAST_BYTES)?;
    for (values, tensor) in model.parameters.iter_mut().zip(&tensors) {
        values.copy_from_slice(tensor.as_slice());
    }
    Ok(())
}

fn over_all_ranks(group: &Group, number: f32, op: ReduceOp) -> Result<f32> {
    let mut numbers = [number];
    group.all_reduce(&mut numbers, op)?;
    Ok(numbers[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(ranks: usize, steps: u32) -> Vec<(Training, Vec<Progress>)> {
        let one = |group: Group| {
            let mut curve = Vec::new();
            let training = train(&group, steps, |progress| {
                curve.push(progress);
                Ok::<(), tenfold::Error>(())
            });
            Ok((training?, curve))
        };
        Group::threads(ranks, one).unwrap()
    }

    #[test]
    fn any_number_of_ranks_ends_with_one_model_and_one_curve() {
        for ranks in [1, 2, 3, 5] {
            let all = trained(ranks, 60);
            let (first, curve) = &all[0];
            for (training, other) in &all {
                assert_eq!(training.fingerprint, first.fingerprint, "{ranks} ranks");
                assert_eq!((training.accuracy, other), (first.accuracy, curve));
                assert!(training.communication_us < training.step_us);
            }
            assert_eq!(
                curve.iter().map(|point| point.step).collect::<Vec<_>>(),
                (1..=60).collect::<Vec<_>>()
            );
            assert!(curve[59].loss < curve[0].loss, "{curve:?}");
        }
    }

    #[test]
    fn long_curves_have_few_points_and_the_last_step_among_them() {
        let all = trained(1, 350);
        let steps: Vec<u32> = all[0].1.iter().map(|point| point.step).collect();
        assert_eq!((steps.len(), steps[0], steps[115], steps[116]), (117, 3, 348, 350));
    }
}
