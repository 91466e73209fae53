//! Ranks that train apart for a while and meet now and then: gradients stay between neighbours, models are averaged.

use super::super::{CommHook, GradBucket};
use super::average;
use crate::fault::Result;
use crate::work::Work;
use crate::{Buffer, Group, ReduceOp};

/// Averages gradients over all ranks at first, later only within a group of neighbours, or not at all: c10d's
/// `post_localSGD_hook`. Models then differ until [`OuterAveraging`] makes them one again.
#[derive(Debug)]
pub struct PostLocalSgd {
    start: u64,
    neighbours: Option<Group>,
    iteration: u64,
}

impl PostLocalSgd {
    /// Over all ranks for the first `start` iterations, then over `neighbours`.
    pub fn new(start: u64, neighbours: Option<Group>) -> Self {
        PostLocalSgd { start, neighbours: neighbours.map(|group| group.background()), iteration: 0 }
    }
}

impl CommHook for PostLocalSgd {
    fn name(&self) -> &str {
        "post_local_sgd"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        let all = self.iteration < self.start;
        self.iteration += u64::from(bucket.is_last());
        let group = if all { Some(group) } else { self.neighbours.as_ref() };
        let Some(group) = group else { return Ok(None) };
        average(bucket, group.size());
        group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Sum).map(Some)
    }
}

/// Makes one model of the ranks' every `period` steps, as DiLoCo does: what the ranks have moved on average is a gradient for an
/// outer step with Nesterov momentum. With a rate of 1 and no momentum the new model is the plain average.
#[derive(Debug)]
pub struct OuterAveraging {
    period: u64,
    rate: f32,
    momentum: f32,
    steps: u64,
    /// The model after the last outer step, and its velocity.
    anchor: Vec<f32>,
    velocity: Vec<f32>,
}

impl OuterAveraging {
    /// From the model that all ranks start with.
    pub fn new(model: &[f32], period: u64, rate: f32, momentum: f32) -> Self {
        let velocity = vec![0.0; model.len()];
        OuterAveraging { period: period.max(1), rate, momentum, steps: 0, anchor: model.to_vec(), velocity }
    }

    /// To be called after every step of the inner optimiser. True if this was one with an outer step.
    ///
    /// # Errors
    /// If the group fails.
    ///
    /// # Panics
    /// If the model has another length than at the start.
    pub fn step(&mut self, model: &mut [f32], group: &Group) -> Result<bool> {
        assert_eq!(model.len(), self.anchor.len(), "a model keeps its length");
        self.steps += 1;
        if !self.steps.is_multiple_of(self.period) {
            return Ok(false);
        }
        let moved: Vec<f32> = self.anchor.iter().zip(&*model).map(|(anchor, own)| anchor - own).collect();
        let mut moved = Buffer::from_slice(&moved);
        group.start_all_reduce(moved.lend(), ReduceOp::Avg)?.wait()?;
        for (place, moved) in moved.as_slice::<f32>().iter().enumerate() {
            let velocity = &mut self.velocity[place];
            *velocity = self.momentum * *velocity + moved;
            self.anchor[place] -= self.rate * (moved + self.momentum * *velocity);
        }
        model.copy_from_slice(&self.anchor);
        Ok(true)
    }
}
