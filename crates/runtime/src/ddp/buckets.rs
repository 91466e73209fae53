//! Which gradients travel together, and when: a pure state machine. It never waits and reads no clock.
//!
//! Parameters of one dtype share buckets up to a size. Buckets are launched strictly by their index, so that all ranks call the
//! same collectives in the same order, whatever becomes ready first where. After the first iteration the order in which
//! gradients came is known, and buckets are cut again along it: the first to be full is then the first to be launched.
//!
//! Not here: memory and communication (see `reducer`).

use std::ops::Range;

use super::Param;
use crate::DType;

/// What c10d's first bucket holds: little, so that communication begins early.
pub const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// What c10d's other buckets hold.
pub const BUCKET_BYTES: usize = 25 << 20;

/// Some parameters that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Numbers of its parameters, in the order of its memory.
    pub params: Vec<usize>,
    /// The size that was to close it; 0 for a sparse parameter, which is alone.
    pub limit: usize,
}

/// Cuts parameters into buckets as c10d's `_compute_bucket_assignment_by_size` does.
///
/// Each dtype has one open bucket, which closes as soon as it has *at least* its limit; the dtype then goes on to the next
/// limit, and the last one repeats. Without an `order`, parameters come as they are numbered, and buckets in the order of
/// their first parameter. With one, buckets come as they close, and of those still open at the end the last opened first: c10d
/// walks a hash map there, and this is what comes of it.
///
/// # Panics
/// If there are no limits, or the order names a parameter that does not exist.
pub fn assign_by_size(params: &[Param], limits: &[usize], order: Option<&[usize]>) -> Vec<Assignment> {
    struct Open {
        dtype: DType,
        params: Vec<usize>,
        bytes: usize,
        limits_used: usize,
    }
    assert!(!limits.is_empty(), "there is a limit");
    let mut open: Vec<Open> = Vec::new();
    let mut closed = Vec::new();
    let numbered: Vec<usize> = (0..params.len()).collect();
    for &number in order.unwrap_or(&numbered) {
        let param = &params[number];
        if param.sparse {
            closed.push(Assignment { params: vec![number], limit: 0 });
            continue;
        }
        let place = open.iter().position(|open| open.dtype == param.dtype).unwrap_or_else(|| {
            open.push(Open { dtype: param.dtype, params: Vec::new(), bytes: 0, limits_used: 0 });
            open.len() - 1
        });
        let bucket = &mut open[place];
        bucket.params.push(number);
        bucket.bytes += param.bytes();
        let limit = limits[bucket.limits_used];
        if bucket.bytes >= limit {
            closed.push(Assignment { params: std::mem::take(&mut bucket.params), limit });
            bucket.bytes = 0;
            bucket.limits_used = (bucket.limits_used + 1).min(limits.len() - 1);
        }
    }
    let rest = open.into_iter().rev().filter(|open| !open.params.is_empty());
    closed.extend(rest.map(|open| Assignment { params: open.params, limit: limits[open.limits_used] }));
    if order.is_none() {
        closed.sort_by_key(|bucket| bucket.params.iter().min().copied());
    }
    closed
}

/// How parameters get ready in one iteration after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graph {
    /// Every parameter once.
    #[default]
    Whole,
    /// Some not at all, which the caller names each time.
    Unused,
    /// As often as in the first iteration, which may be never, or several times.
    Static,
}

/// What a caller did wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// A gradient was ready twice in one iteration.
    ReadyTwice {
        /// Whose gradient.
        param: usize,
    },
    /// It had been named as unused.
    UsedAfterAll {
        /// The parameter that was used.
        param: usize,
    },
    /// Gradients are missing at the end of the iteration.
    Missing {
        /// Whose gradients.
        params: Vec<usize>,
    },
    /// A static graph used a parameter more or less often than in the first iteration.
    GraphChanged {
        /// The parameter.
        param: usize,
        /// How often it was used in the first iteration.
        expected: u32,
        /// How often it was used in this one.
        seen: u32,
    },
}

/// The buckets of a model, and how far an iteration is.
#[derive(Clone, Debug)]
pub struct Buckets {
    graph: Graph,
    limits: Vec<usize>,
    buckets: Vec<Assignment>,
    /// The bucket of each parameter.
    home: Vec<usize>,
    /// In this iteration: how often each parameter was made ready.
    seen: Vec<u32>,
    unused: Vec<bool>,
    /// Parameters of each bucket that are not ready.
    pending: Vec<usize>,
    /// The first bucket that is not launched.
    next: usize,
    /// How often each parameter gets ready, once a static graph has been seen.
    expected: Option<Vec<u32>>,
    arrival: Vec<usize>,
    /// Whole iterations so far.
    iterations: u64,
    rebuilt: bool,
}

impl Buckets {
    /// For the first iteration: a bucket for each dtype, unless some parameters may be unused; then cut by `limits` in the order
    /// of definition. Gradients come in about the reverse order, and so do the buckets.
    ///
    /// # Panics
    /// If there are no limits.
    pub fn new(params: &[Param], limits: &[usize], graph: Graph) -> Self {
        let first = if graph == Graph::Unused { limits } else { &[usize::MAX] };
        let mut buckets = assign_by_size(params, first, None);
        buckets.reverse();
        Self::over(buckets, params.len(), limits, graph)
    }

    /// For the first iteration: these buckets, launched in this order.
    pub fn with_layout(params: &[Param], layout: &[Vec<usize>], limits: &[usize], graph: Graph) -> Self {
        let bucket = |params: &Vec<usize>| Assignment { params: params.clone(), limit: usize::MAX };
        Self::over(layout.iter().map(bucket).collect(), params.len(), limits, graph)
    }

    fn over(buckets: Vec<Assignment>, count: usize, limits: &[usize], graph: Graph) -> Self {
        let mut home = vec![0; count];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.params.iter().for_each(|param| home[*param] = index);
        }
        Buckets {
            graph,
            limits: limits.to_vec(),
            pending: buckets.iter().map(|bucket| bucket.params.len()).collect(),
            buckets,
            home,
            seen: vec![0; count],
            unused: vec![false; count],
            next: 0,
            expected: None,
            arrival: Vec::new(),
            iterations: 0,
            rebuilt: false,
        }
    }

    /// Begins an iteration in which the given parameters get no gradient; those that a static graph never uses need not be
    /// listed. Returns the buckets to launch immediately.
    pub fn start(&mut self, unused: &[usize]) -> Range<usize> {
        self.seen.fill(0);
        self.unused.fill(false);
        self.next = 0;
        self.arrival.clear();
        for (pending, bucket) in self.pending.iter_mut().zip(&self.buckets) {
            *pending = bucket.params.len();
        }
        unused.iter().for_each(|param| self.unused[*param] = true);
        if let Some(expected) = &self.expected {
            let never = expected.iter().map(|count| *count == 0);
            self.unused.iter_mut().zip(never).for_each(|(unused, never)| *unused |= never);
        }
        for param in 0..self.unused.len() {
            if self.unused[param] {
                self.pending[self.home[param]] -= 1;
            }
        }
        self.launch()
    }

    /// A parameter's gradient is ready. Returns the buckets to launch now.
    ///
    /// # Errors
    /// If it was ready before, or was not expected.
    pub fn ready(&mut self, param: usize) -> Result<Range<usize>, Misuse> {
        let seen = self.seen[param] + 1;
        let expected = self.expected.as_ref().map_or(1, |expected| expected[param]);
        if self.learns() {
            self.seen[param] = seen;
            return Ok(0..0);
        }
        if self.graph == Graph::Static && seen > expected {
            return Err(Misuse::GraphChanged { param, expected, seen });
        }
        if self.unused[param] {
            return Err(Misuse::UsedAfterAll { param });
        }
        if seen > expected {
            return Err(Misuse::ReadyTwice { param });
        }
        self.seen[param] = seen;
        if seen == 1 {
            self.arrival.push(param);
        }
        if seen < expected {
            return Ok(0..0);
        }
        self.pending[self.home[param]] -= 1;
        Ok(self.launch())
    }

    /// Will `ready` complete this parameter? Its gradient may then be divided and sent.
    pub fn completes(&self, param: usize) -> bool {
        let expected = self.expected.as_ref().map_or(1, |expected| expected[param]);
        !self.learns() && self.seen[param] + 1 == expected
    }

    /// Ends the iteration. Returns the buckets to launch now: all, in the first iteration of a static graph.
    ///
    /// # Errors
    /// If a parameter is not ready.
    pub fn finish(&mut self) -> Result<Range<usize>, Misuse> {
        if self.learns() {
            self.expected = Some(self.seen.clone());
            self.iterations += 1;
            self.next = self.buckets.len();
            return Ok(0..self.next);
        }
        if let Some(expected) = &self.expected {
            let changed = (0..self.seen.len()).find(|param| self.seen[*param] != expected[*param]);
            if let Some(param) = changed {
                let (expected, seen) = (expected[param], self.seen[param]);
                return Err(Misuse::GraphChanged { param, expected, seen });
            }
        } else {
            let params = self.missing();
            if !params.is_empty() {
                return Err(Misuse::Missing { params });
            }
        }
        self.iterations += 1;
        Ok(0..0)
    }

    /// Parameters that are neither ready nor unused.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.seen.len()).filter(|param| self.seen[*param] == 0 && !self.unused[*param]).collect()
    }

    /// An iteration of the other ranks in which this rank has no gradients. Returns all buckets, to be launched immediately.
    pub fn shadow(&mut self) -> Range<usize> {
        self.start(&[]);
        self.pending.fill(0);
        self.iterations += 1;
        self.next = self.buckets.len();
        if self.learns() {
            self.expected = Some(vec![1; self.seen.len()]);
        }
        0..self.next
    }

    /// Is it time to cut buckets along the order of arrival? Once, after the first iteration that was a usual one.
    pub fn rebuild_due(&self) -> bool {
        let after = match self.graph {
            Graph::Whole => 1,
            Graph::Static => 2,
            Graph::Unused => return false,
        };
        !self.rebuilt && self.iterations >= after
    }

    /// The parameters that got ready, in the order in which they did.
    pub fn came(&self) -> &[usize] {
        &self.arrival
    }

    /// The same with those that did not come at the end.
    pub fn arrival(&self) -> Vec<usize> {
        let mut absent = vec![true; self.seen.len()];
        self.arrival.iter().for_each(|param| absent[*param] = false);
        let absent = (0..absent.len()).filter(|param| absent[*param]);
        self.arrival.iter().copied().chain(absent).collect()
    }

    /// Cuts the buckets again along `order`, which must be the same on all ranks.
    ///
    /// # Panics
    /// If the order is not one of all parameters; see [`is_order_of`].
    pub fn rebuild(&mut self, params: &[Param], order: &[usize]) {
        assert!(is_order_of(order, params.len()), "every parameter comes once");
        let buckets = assign_by_size(params, &self.limits, Some(order));
        *self = Buckets {
            expected: self.expected.take(),
            iterations: self.iterations,
            rebuilt: true,
            ..Self::over(buckets, params.len(), &self.limits, self.graph)
        };
    }

    /// How many buckets there are.
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// The parameters of a bucket.
    pub fn bucket(&self, index: usize) -> &Assignment {
        &self.buckets[index]
    }

    /// The bucket of a parameter.
    pub fn home(&self, param: usize) -> usize {
        self.home[param]
    }

    /// Has the bucket of a parameter been launched in this iteration?
    pub fn is_launched(&self, param: usize) -> bool {
        self.home[param] < self.next
    }

    /// Have all buckets been launched in this iteration?
    pub fn all_launched(&self) -> bool {
        self.next == self.buckets.len()
    }

    /// Did the parameter get a gradient in this iteration?
    pub fn is_used(&self, param: usize) -> bool {
        self.seen[param] > 0
    }

    /// Parameters known to get no gradient in this iteration.
    pub fn unused(&self) -> Vec<usize> {
        (0..self.unused.len()).filter(|param| self.unused[*param]).collect()
    }

    /// Do they follow the order in which gradients become ready?
    pub fn is_rebuilt(&self) -> bool {
        self.rebuilt
    }

    /// Is this the iteration in which a static graph is learned?
    pub fn learns(&self) -> bool {
        self.graph == Graph::Static && self.expected.is_none()
    }

    /// Buckets from the next on that are complete.
    fn launch(&mut self) -> Range<usize> {
        let start = self.next;
        if !self.learns() {
            self.next += self.pending[start..].iter().take_while(|pending| **pending == 0).count();
        }
        start..self.next
    }
}

/// Does `order` have each of `count` parameters once?
pub fn is_order_of(order: &[usize], count: usize) -> bool {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..count)
}

#[cfg(test)]
mod tests;
