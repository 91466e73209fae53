//! Whether two ranks' calls of one number belong together.
//!
//! The rules of sizes are those of PyTorch's analyser: all ranks have the same, except for what only the root
//! has, and for operations that may be uneven. PyTorch compares shapes; this compares numbers of elements,
//! because ranks that reduce `[2, 3]` and `[6]` are compatible.

use std::sync::Arc;

use super::dump::{Detail, Record, Shape};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Difference {
    Operation,
    /// A different number of operations in one coalesced call.
    Count,
    Argument,
    ReduceOp,
    Root,
    Sizes,
    Dtype,
}

/// The first difference between the calls of two ranks.
pub(crate) fn difference(ours: &[&Record], theirs: &[&Record]) -> Option<Difference> {
    let pairs = || ours.iter().zip(theirs);
    if pairs().any(|(our, their)| our.operation != their.operation) {
        return Some(Difference::Operation);
    }
    if ours.len() != theirs.len() {
        return Some(Difference::Count);
    }
    pairs().filter_map(|(our, their)| differ(our, their)).min()
}

fn differ(our: &Record, their: &Record) -> Option<Difference> {
    if Arc::ptr_eq(&our.call, &their.call) {
        return None;
    }
    if let (Detail::Argument(our), Detail::Argument(their)) = (&our.detail, &their.detail)
        && our != their
    {
        return Some(Difference::Argument);
    }
    // Not every recorder has these two.
    if let (Some(our), Some(their)) = (&our.reduce_op, &their.reduce_op)
        && our != their
    {
        return Some(Difference::ReduceOp);
    }
    if let (Some(our), Some(their)) = (our.root, their.root)
        && our != their
    {
        return Some(Difference::Root);
    }
    let rules = rules(&our.operation);
    let inputs = rules.inputs_alike.then_some((&our.inputs, &their.inputs));
    let outputs = rules.outputs_alike.then_some((&our.outputs, &their.outputs));
    let sides = || [inputs, outputs].into_iter().flatten();
    // In an all-gather of tensors of different sizes, the list that all ranks have says how large each rank's
    // tensor is.
    let uneven =
        (is_gathering(&our.operation) && our.outputs.len() > 1 && alike(&our.outputs, &their.outputs))
            || (is_scattering(&our.operation) && our.inputs.len() > 1 && alike(&our.inputs, &their.inputs));
    if !uneven && sides().any(|(our, their)| !alike(our, their)) {
        return Some(Difference::Sizes);
    }
    let is_other = |(our, their): (&Vec<Shape>, &Vec<Shape>)| {
        !our.is_empty() && !their.is_empty() && dtypes(our) != dtypes(their)
    };
    sides().any(is_other).then_some(Difference::Dtype)
}

/// Which sides must be the same on all ranks.
struct Rules {
    inputs_alike: bool,
    outputs_alike: bool,
}

fn rules(operation: &str) -> Rules {
    match operation {
        "all_to_all" | "all_to_all_single" | "all_to_all_v_single" | "all_gather_v" | "reduce_scatter_v" => {
            Rules { inputs_alike: false, outputs_alike: false }
        }
        "scatter" => Rules { inputs_alike: false, outputs_alike: true },
        "gather" => Rules { inputs_alike: true, outputs_alike: false },
        _ => Rules { inputs_alike: true, outputs_alike: true },
    }
}

fn alike(ours: &[Shape], theirs: &[Shape]) -> bool {
    ours.len() == theirs.len()
        && ours.iter().zip(theirs).all(|(our, their)| our.elements() == their.elements())
}

fn dtypes(shapes: &[Shape]) -> Vec<&str> {
    let mut names: Vec<&str> = shapes.iter().filter_map(|shape| shape.dtype.as_deref()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn is_gathering(operation: &str) -> bool {
    matches!(
        operation,
        "all_gather" | "_all_gather_base" | "all_gather_single" | "all_gather_into_tensor_coalesced"
    )
}

fn is_scattering(operation: &str) -> bool {
    matches!(
        operation,
        "reduce_scatter"
            | "_reduce_scatter_base"
            | "reduce_scatter_single"
            | "reduce_scatter_tensor_coalesced"
    )
}

/// A contradiction inside one call: an all-gather's output has the inputs of all ranks.
pub(crate) fn contradiction(record: &Record, members: usize, index: Option<usize>) -> Option<String> {
    let (whole, part, words) = match &*record.operation {
        operation if is_gathering(operation) => (&record.outputs, &record.inputs, ("output", "input")),
        operation if is_scattering(operation) => (&record.inputs, &record.outputs, ("input", "output")),
        _ => return None,
    };
    let (first_whole, first_part) = (whole.first()?, part.first()?);
    let sum = |shapes: &[Shape]| shapes.iter().map(Shape::elements).sum::<i128>();
    // Native backends record one tensor for all; hooks record the caller's list, one per rank, perhaps
    // uneven.
    let is_one = first_whole.elements() == first_part.elements() * members as i128;
    let is_sum = sum(whole) == sum(part) * members as i128;
    let is_own = whole.len() == members
        && part.len() == 1
        && index.is_some_and(|index| whole[index].elements() == first_part.elements());
    if is_one || is_sum || is_own {
        return None;
    }
    Some(format!(
        "its {} has {} elements and its {} {}: with {members} ranks, {} are expected",
        words.0,
        sum(whole),
        words.1,
        sum(part),
        sum(part) * members as i128
    ))
}

/// In an all-to-all, the total input equals the total output.
pub(crate) fn all_to_all_sums(row: &[&Record]) -> Option<(i128, i128)> {
    let is_one = |record: &&Record| matches!(&*record.operation, "all_to_all" | "all_to_all_single");
    if !row.iter().all(is_one) {
        return None;
    }
    let sum = |side: fn(&Record) -> &Vec<Shape>| -> i128 {
        row.iter().flat_map(|record| side(record)).map(Shape::elements).sum()
    };
    let (put, got) = (sum(|record| &record.inputs), sum(|record| &record.outputs));
    (put != got && put != 0 && got != 0).then_some((put, got))
}

#[cfg(test)]
mod tests {
    use super::super::dump::Call;
    use super::*;

    fn record(operation: &str, inputs: &[&[i64]], outputs: &[&[i64]]) -> Record {
        let shapes = |all: &[&[i64]]| {
            all.iter().map(|sizes| Shape { sizes: sizes.to_vec(), dtype: Some("Float".into()) }).collect()
        };
        of(Call {
            operation: operation.into(),
            inputs: shapes(inputs),
            outputs: shapes(outputs),
            ..Call::default()
        })
    }

    fn of(call: Call) -> Record {
        Record { call: call.into(), ..Record::default() }
    }

    fn differ(ours: &Record, theirs: &Record) -> Option<Difference> {
        difference(&[ours], &[theirs])
    }

    #[test]
    fn calls_differ_by_name_size_dtype_and_argument() {
        let sum = record("all_reduce", &[&[4]], &[&[4]]);
        assert_eq!(differ(&sum, &sum), None);
        assert_eq!(differ(&sum, &record("barrier", &[], &[])), Some(Difference::Operation));
        assert_eq!(differ(&sum, &record("all_reduce", &[&[5]], &[&[5]])), Some(Difference::Sizes));
        assert_eq!(differ(&sum, &record("all_reduce", &[&[2, 2]], &[&[2, 2]])), None, "as many elements");
        let mut halves = sum.clone();
        halves.inputs[0].dtype = Some("Half".into());
        assert_eq!(differ(&sum, &halves), Some(Difference::Dtype));
        let call = || (*sum.call).clone();
        let rooted = |root: &str| of(Call { detail: Detail::Argument(root.into()), ..call() });
        assert_eq!(differ(&rooted("root=0"), &rooted("root=1")), Some(Difference::Argument));
        assert_eq!(difference(&[&sum], &[&sum, &sum]), Some(Difference::Count));
        let with = |op: Option<&str>, root| of(Call { reduce_op: op.map(Into::into), root, ..call() });
        let (ours, unknown) = (with(Some("sum"), Some(0)), with(None, None));
        assert_eq!(differ(&ours, &with(Some("max"), Some(1))), Some(Difference::ReduceOp));
        assert_eq!(differ(&ours, &with(Some("sum"), Some(1))), Some(Difference::Root));
        assert_eq!(differ(&ours, &unknown), None, "another recorder does not say");
    }

    #[test]
    fn what_only_the_root_has_may_differ() {
        assert_eq!(
            differ(&record("scatter", &[&[4], &[4]], &[&[4]]), &record("scatter", &[], &[&[4]])),
            None
        );
        assert_eq!(differ(&record("gather", &[&[4]], &[&[4], &[4]]), &record("gather", &[&[4]], &[])), None);
        let uneven = differ(&record("all_to_all", &[&[4]], &[&[8]]), &record("all_to_all", &[&[8]], &[&[4]]));
        assert_eq!(uneven, None);
        let outputs: &[&[i64]] = &[&[1], &[3]];
        assert_eq!(
            differ(&record("all_gather", &[&[1]], outputs), &record("all_gather", &[&[3]], outputs)),
            None
        );
    }

    #[test]
    fn an_all_gather_must_hold_what_all_ranks_give() {
        assert_eq!(contradiction(&record("all_gather", &[&[4]], &[&[3, 4]]), 3, None), None);
        assert_eq!(contradiction(&record("all_gather", &[&[4]], &[&[4], &[4], &[4]]), 3, None), None);
        assert_eq!(contradiction(&record("all_gather", &[&[3]], &[&[1], &[3]]), 2, Some(1)), None);
        assert_eq!(
            contradiction(&record("_all_gather_base", &[&[4]], &[&[8]]), 3, None).unwrap(),
            "its output has 8 elements and its input 4: with 3 ranks, 12 are expected"
        );
        assert_eq!(
            contradiction(&record("_reduce_scatter_base", &[&[8]], &[&[4]]), 3, None).unwrap(),
            "its input has 8 elements and its output 4: with 3 ranks, 12 are expected"
        );
    }

    #[test]
    fn what_goes_into_an_all_to_all_comes_out() {
        let (small, large) = (record("all_to_all", &[&[4]], &[&[8]]), record("all_to_all", &[&[8]], &[&[4]]));
        assert_eq!(all_to_all_sums(&[&small, &large]), None);
        assert_eq!(all_to_all_sums(&[&small, &small]), Some((8, 16)));
    }
}
