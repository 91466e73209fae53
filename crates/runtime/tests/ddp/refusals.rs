//! Models, options and calls that are refused, with all ranks hearing why.

use super::hooks::Largest;
use super::*;

#[test]
fn different_models_are_refused_on_all_ranks_with_the_first_difference() {
    let refused = |change: fn(&mut Vec<Param>)| {
        let errors = errors(3, |group| {
            let mut params = weight_and_bias().to_vec();
            if group.rank() == 2 {
                change(&mut params);
            }
            Reducer::new(&group, &params, Options::default()).map(drop)
        });
        for error in &errors {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(2)));
            assert_eq!(error.message(), errors[0].message(), "all hear the same");
        }
        message(errors[1].clone())
    };
    assert_eq!(
        refused(|params| params[1].shape = vec![3]),
        "rank 2 has another model than rank 0: parameter 1 is `bias` [3] float32 there, and `bias` [2] float32 on rank 0"
    );
    assert_eq!(
        refused(|params| params[0].dtype = DType::BF16),
        "rank 2 has another model than rank 0: parameter 0 is `weight` [3, 2] bfloat16 there, and `weight` [3, 2] \
         float32 on rank 0"
    );
    assert_eq!(
        refused(|params| params.swap(0, 1)),
        "rank 2 has another model than rank 0: parameter 0 is `bias` [2] float32 there, and `weight` [3, 2] float32 on \
         rank 0"
    );
    assert_eq!(
        refused(|params| params.truncate(1)),
        "rank 2 has 1 parameters, and rank 0 has 2: only rank 0 has `bias`"
    );
    assert_eq!(
        refused(|params| params.push(Param::new("more", &[1], DType::F32))),
        "rank 2 has 3 parameters, and rank 0 has 2: only rank 2 has `more`"
    );
    assert_eq!(
        refused(|params| params[1].sparse = true),
        "rank 2 has another model than rank 0: parameter 1 is `bias` [2] float32 sparse there, and `bias` [2] float32 \
         on rank 0"
    );
}

#[test]
fn the_same_models_by_other_names_are_the_same() {
    Group::threads(3, |group| {
        verify_params(&group, &[Param::new(format!("{}", group.rank()), &[2], DType::F32)])
    })
    .unwrap();
}

#[test]
fn different_options_are_refused_and_the_callers_group_goes_on() {
    let errors = errors(2, |group| {
        let options =
            if group.rank() == 0 { Options::default() } else { Options::default().bucket_bytes(&[100]) };
        let refused = Reducer::new(&group, &weight_and_bias(), options).map(drop);
        group.start_barrier()?.wait()?;
        refused
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(
            error.to_string(),
            format!(
                "ddp in group `default/ddp` failed on rank {rank} of 2: rank 1 has other options than rank 0: buckets of \
                 100 bytes there, buckets of 1048576, 26214400 bytes on rank 0\n  hint: build the same model with the \
                 same options on all ranks, with its parameters in the same order"
            )
        );
    }
}

#[test]
fn models_that_cannot_be_trained_are_refused() {
    let refused = |params: Vec<Param>, options: fn() -> Options| {
        let body = |group: Group| Reducer::new(&group, &params, options()).map(drop);
        message(errors(1, body).remove(0))
    };
    assert_eq!(refused(Vec::new(), Options::default), "the model has no parameters");
    assert_eq!(
        refused(vec![Param::new("steps", &[1], DType::I64)], Options::default),
        "parameter 0 `steps` of int64 can have no gradient"
    );
    assert_eq!(
        refused(vec![Param::new("huge", &[usize::MAX, 2], DType::F32)], Options::default),
        format!("with parameter 0 `huge` of [{}, 2] the model does not fit the address space", usize::MAX)
    );
    assert_eq!(
        refused(vec![Param::new("phase", &[2], DType::Complex64)], || Options::default()
            .reduce_dtype(DType::F16)),
        "parameter 0 `phase` of complex64 cannot be reduced as float16"
    );
}

#[test]
fn buckets_may_be_given_and_must_make_sense() {
    Group::threads(2, |group| {
        let options = || Options::default().bucket_bytes(&[1]);
        let mut reducer =
            Reducer::new(&group, &weight_and_bias(), options().first_buckets(vec![vec![0], vec![1]]))?;
        assert_eq!(reducer.buckets().bucket(0).params, [0]);
        step(&mut reducer, &[1, 0], 1.0)?;
        let refused = |layout| {
            message(Reducer::new(&group, &weight_and_bias(), options().first_buckets(layout)).unwrap_err())
        };
        assert_eq!(refused(vec![vec![0]]), "the first buckets do not have each of 2 parameters once");
        assert_eq!(
            refused(vec![vec![0, 1], vec![]]),
            "first bucket 1 is empty, of several dtypes, or has a sparse parameter that is not alone"
        );
        reducer.start_backward()?;
        assert_eq!(message(reducer.set_hook(Largest).unwrap_err()), "a hook cannot be set before `finish`");
        for param in [1, 0] {
            reducer.grad_ready(param)?;
        }
        reducer.finish()?;
        assert_eq!(
            message(reducer.set_static_graph().unwrap_err()),
            "a static graph is declared before the first backward"
        );
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        reducer.set_hook(Largest)?;
        assert_eq!(
            message(reducer.set_hook(Largest).unwrap_err()),
            "the reducer has a hook already, and can have one only"
        );
        step(&mut reducer, &[1, 0], 2.0)?;
        assert_eq!(reducer.gradient::<f32>(1)?, [20.0; 2]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn calls_that_make_no_sense_do_no_harm() {
    Group::threads(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        let texts = [
            reducer.finish().unwrap_err(),
            reducer.grad_ready(0).unwrap_err(),
            reducer.gradient::<f32>(2).unwrap_err(),
            reducer.gradient::<f64>(0).unwrap_err(),
            reducer.start_backward_without(&[0]).unwrap_err(),
        ]
        .map(message);
        assert_eq!(
            texts,
            [
                "`finish` without `start_backward`: there is nothing to finish",
                "parameter 0 `weight` was made ready without `start_backward`",
                "there is no parameter 2: there are 2",
                "parameter 0 `weight` has a gradient of float32, not float64",
                "this reducer expects a gradient of every parameter",
            ]
        );
        reducer.start_backward()?;
        assert_eq!(
            message(reducer.zero_gradients().unwrap_err()),
            "gradients cannot be zeroed before `finish`"
        );
        assert_eq!(
            message(reducer.grad_ready_from(1, &[0; 7]).unwrap_err()),
            "the gradient of parameter 1 `bias` has 8 bytes, not 7"
        );
        reducer.gradient_mut::<f32>(0)?.fill(2.0);
        reducer.grad_ready(0)?;
        reducer.grad_ready(1)?;
        assert_eq!(
            message(reducer.start_backward().unwrap_err()),
            "iteration 1 has begun and is not finished"
        );
        reducer.finish()?;
        assert!(reducer.failure().is_none());
        assert_eq!(reducer.gradient::<f32>(0)?, [2.0; 6]);
        Ok(())
    })
    .unwrap();
}
