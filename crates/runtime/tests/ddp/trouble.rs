//! Iterations that fail: ranks that die, come late, or miss gradients.

use super::*;

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

pub(super) fn death(rank: &Rank) {
    let options = tenfold::Options::default().timeout(LIMIT);
    let group = Group::connect(rank.store(), rank.seat(), options).unwrap();
    let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default()).unwrap();
    step(&mut reducer, &[0, 1], 1.0).unwrap();
    reducer.start_backward().unwrap();
    reducer.grad_ready(1).unwrap();
    rank.event("in backward");
    rank.order();
    let error = reducer.grad_ready(0).and_then(|()| reducer.finish()).unwrap_err();
    rank.event(format!("failed: {error} {:?}, {:?}", error.kind(), error.peer()));
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
            group.start_barrier()?.wait()?;
            return Err(error);
        }
        let failed = reducer.grad_ready(0).and_then(|()| reducer.finish());
        group.start_barrier()?.wait()?; // the caller's group goes on
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
        // No rank has parameter 1, rank 2 does not have parameter 3 either, and rank 0 learns that while it still adds gradients.
        let have: &[usize] = [&[0_usize, 2, 3] as &[usize], &[0, 2, 3], &[0, 2]][group.rank()];
        step(&mut reducer, have, 1.0)
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(
            error.to_string(),
            format!(
                "ddp in group `default/ddp` failed on rank {rank} of 3: 2 parameters have no gradient at the end of \
                 iteration 2: `p1` on all ranks, `p3` on rank 2\n  hint: give every parameter a gradient in every \
                 iteration, or set `find_unused_parameters`"
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

#[test]
fn a_rank_that_is_late_is_named_with_the_bucket_that_waits_for_it() {
    let failed = Barrier::new(2);
    let errors = Group::threads(2, |group| {
        let patient = group.with_timeout(Duration::from_secs(5)); // making the reducer must fit into it, too
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
    let error = errors.unwrap().remove(0).expect("rank 1 did not take part");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(1)), "{error}");
    assert!(error.message().contains("rank 1"), "{error}");
    assert!(error.message().ends_with(", in bucket 0 with `weight`, `bias`"), "{error}");
}

fn step_from_here(reducer: &mut Reducer) -> Result<()> {
    reducer.grad_ready(1)?;
    reducer.grad_ready(0)?;
    reducer.finish()
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
