//! Hooks of the caller's.

use super::*;

/// A hook that does not exist elsewhere: the largest, found in another tensor than the bucket's own.
pub(super) struct Largest;

impl CommHook for Largest {
    fn name(&self) -> &str {
        "largest"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        let values: Vec<f64> = bucket.gradients::<f32>().concat().into_iter().map(f64::from).collect();
        bucket.set_buffer(Buffer::from_slice(&values));
        group.start_all_reduce(bucket.buffer_mut().lend(), ReduceOp::Max).map(Some)
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

/// A hook that asks for something impossible on one rank.
struct Broken;

impl CommHook for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn launch(&mut self, bucket: &mut GradBucket, group: &Group) -> Result<Option<Work>> {
        let view = bucket.buffer_mut().lend();
        let work = if group.rank() == 1 {
            group.start_broadcast(view, 99)
        } else {
            group.start_all_reduce(view, ReduceOp::Sum)
        };
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
