//! How gradients are reduced.

use super::buckets::{BUCKET_BYTES, FIRST_BUCKET_BYTES, Graph};
use super::hook::CommHook;
use crate::DType;

/// How a [`Reducer`](super::Reducer) works; all ranks choose alike.
///
/// ```
/// use tenfold::ddp::{Options, hooks::Compress};
/// let options = Options::default().bucket_bytes(&[1 << 20]).hook(Compress::bf16());
/// ```
#[derive(Debug)]
pub struct Options {
    pub(super) limits: Vec<usize>,
    pub(super) first_buckets: Option<Vec<Vec<usize>>>,
    pub(super) graph: Graph,
    pub(super) reduce_dtype: Option<DType>,
    pub(super) join: Option<Divisor>,
    pub(super) divided: bool,
    pub(super) hook: Option<Box<dyn CommHook>>,
}

/// What gradients are divided by once some ranks have run out of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divisor {
    /// All ranks: every sample counts alike over the whole epoch.
    Initial,
    /// The ranks that still have data.
    Live,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            limits: vec![FIRST_BUCKET_BYTES, BUCKET_BYTES],
            first_buckets: None,
            graph: Graph::Whole,
            reduce_dtype: None,
            join: None,
            divided: false,
            hook: None,
        }
    }
}

impl Options {
    /// How many bytes close a bucket, first to last; the last one repeats. As c10d's `bucket_cap_mb_list`. By default 1 MiB and
    /// then 25 MiB. No limits mean the default.
    #[must_use]
    pub fn bucket_bytes(mut self, limits: &[usize]) -> Self {
        if !limits.is_empty() {
            self.limits = limits.to_vec();
        }
        self
    }

    /// Which parameters share a bucket until buckets are cut again; by default one bucket per dtype. See
    /// [`assign_by_size`](super::raw::assign_by_size).
    #[must_use]
    pub fn first_buckets(mut self, layout: Vec<Vec<usize>>) -> Self {
        self.first_buckets = Some(layout);
        self
    }

    /// Parameters may get no gradient in an iteration; the caller names them in
    /// [`Reducer::start_backward_without`](super::Reducer::start_backward_without). Costs a small reduction per iteration,
    /// and buckets stay as they are first cut.
    #[must_use]
    pub fn find_unused_parameters(mut self) -> Self {
        self.graph = Graph::Unused;
        self
    }

    /// May parameters get no gradient? See [`Options::find_unused_parameters`].
    pub fn finds_unused_parameters(&self) -> bool {
        self.graph == Graph::Unused
    }

    /// Every iteration makes the same parameters ready as often as the first one, whose reductions all wait for its end.
    #[must_use]
    pub fn static_graph(mut self) -> Self {
        self.graph = Graph::Static;
        self
    }

    /// Gradients travel and are added in this dtype, and come back in their own.
    #[must_use]
    pub fn reduce_dtype(mut self, dtype: DType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Ranks may have different numbers of batches: those that have run out go on with
    /// [`Reducer::shadow`](super::Reducer::shadow). Costs a small reduction per iteration.
    #[must_use]
    pub fn join(mut self, divisor: Divisor) -> Self {
        self.join = Some(divisor);
        self
    }

    /// Gradients come divided already, by a caller who copies them in anyway: they are only added up.
    #[must_use]
    pub fn divided_by_caller(mut self) -> Self {
        self.divided = true;
        self
    }

    /// Reduces buckets in another way than by an average. The hook is then responsible for dividing.
    #[must_use]
    pub fn hook(mut self, hook: impl CommHook + 'static) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    pub(super) fn hook_name(&self) -> &str {
        self.hook.as_ref().map_or("", |hook| hook.name())
    }

    /// What must be alike on all ranks, in words.
    pub(super) fn describe(&self) -> String {
        let limits: Vec<String> = self.limits.iter().map(usize::to_string).collect();
        let mut text = format!("buckets of {} bytes", limits.join(", "));
        if let Some(layout) = &self.first_buckets {
            text += &format!(", at first {layout:?}");
        }
        match self.graph {
            Graph::Whole => {}
            Graph::Unused => text += ", find_unused_parameters",
            Graph::Static => text += ", static_graph",
        }
        if let Some(dtype) = self.reduce_dtype {
            text += &format!(", reduced as {dtype}");
        }
        if let Some(divisor) = self.join {
            text += if divisor == Divisor::Initial { ", join by all ranks" } else { ", join by live ranks" };
        }
        if self.divided {
            text += ", divided by the caller";
        }
        if self.hook.is_some() {
            text += &format!(", hook {}", self.hook_name());
        }
        text
    }
}
