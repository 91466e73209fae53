//! What an iteration can be: accumulated, with unused parameters, sparse, in another dtype, of a static graph; what is logged of it.

use super::*;

#[test]
fn a_bucket_travels_while_the_caller_goes_on() {
    let (late, limits) = (Barrier::new(2), [1]);
    Group::threads(2, |group| {
        let mut reducer =
            Reducer::new(&group, &weight_and_bias(), Options::default().find_unused_parameters().bucket_bytes(&limits))?;
        reducer.start_backward()?;
        if group.rank() == 1 {
            late.wait();
        }
        reducer.grad_ready(1)?;
        if group.rank() == 0 {
            assert!(reducer.buckets().is_launched(1) && !reducer.buckets().is_launched(0));
            assert_eq!(
                reducer.gradient_mut::<f32>(1).unwrap_err().to_string(),
                "ddp in group `default/ddp` failed on rank 0 of 2: the gradient of parameter 1 `bias` is being reduced\n  \
                 hint: it is yours again after `finish`"
            );
            late.wait();
        }
        reducer.grad_ready(0)?;
        reducer.finish()
    })
    .unwrap();
}

#[test]
fn without_synchronisation_gradients_add_up_until_they_are_reduced() {
    let both = Group::threads(2, |group| {
        let rank = group.rank() as f32;
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        let mut results = Vec::new();
        for round in 0..3 {
            for (value, sync) in [(1.0, false), (10.0, false), (100.0, true)] {
                reducer.set_sync(sync);
                reducer.start_backward()?;
                // The weight is written where it lies, the bias copied in.
                reducer.gradient_mut::<f32>(0)?.iter_mut().for_each(|place| *place += value * (rank + 1.0));
                reducer.grad_ready(0)?;
                let bias: Vec<u8> =
                    [value * (rank + 1.0); 2].iter().flat_map(|value| value.to_ne_bytes()).collect();
                reducer.grad_ready_from(1, &bias)?;
                reducer.finish()?;
                if !sync {
                    assert_eq!(reducer.statistics().buckets_reduced, 0);
                }
            }
            results.push((reducer.gradient::<f32>(0)?[5], reducer.gradient::<f32>(1)?[1], round));
            reducer.zero_gradients()?;
        }
        Ok(results)
    });
    let expected: Vec<(f32, f32, i32)> = (0..3).map(|round| (166.5, 166.5, round)).collect();
    assert_eq!(both.unwrap(), [expected.clone(), expected]);
}

#[test]
fn unused_parameters_count_as_zero_and_those_that_nobody_used_are_known() {
    Group::threads(3, |group| {
        let params: Vec<Param> =
            (0..4).map(|number| Param::new(format!("p{number}"), &[5], DType::F32)).collect();
        let options = Options::default().find_unused_parameters().bucket_bytes(&[1]);
        let mut reducer = Reducer::new(&group, &params, options)?;
        for _ in 0..3 {
            // Parameter 1 is used by rank 1 alone, parameter 2 by no rank.
            let unused: &[usize] = if group.rank() == 1 { &[2] } else { &[1, 2] };
            reducer.start_backward_without(unused)?;
            for param in (0..4).filter(|param| !unused.contains(param)) {
                reducer.gradient_mut::<f32>(param)?.fill(3.0);
                reducer.grad_ready(param)?;
            }
            reducer.finish()?;
            let averages: Vec<f32> = (0..4).map(|param| reducer.gradient::<f32>(param).unwrap()[4]).collect();
            assert_eq!(averages, [3.0, 1.0, 0.0, 3.0]);
            let used: Vec<bool> = (0..4).map(|param| reducer.is_used_anywhere(param)).collect();
            assert_eq!(used, [true, true, false, true]);
        }
        assert!(!reducer.buckets().is_rebuilt());
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_parameter_that_had_its_turn_without_a_gradient_counts_as_zero_and_as_unused() {
    Group::threads(2, |group| {
        let options = Options::default().find_unused_parameters().bucket_bytes(&[1]);
        let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
        for (step, used) in [false, true, false].into_iter().enumerate() {
            reducer.start_backward()?;
            reducer.gradient_mut::<f32>(1)?.fill(7.0); // from before, or from no rank
            if used && group.rank() == 1 {
                reducer.grad_ready(1)?;
            } else {
                reducer.ready_without_gradient(1)?;
            }
            reducer.gradient_mut::<f32>(0)?.fill(1.0);
            reducer.grad_ready(0)?;
            reducer.finish()?;
            let average = if used { 3.5 } else { 0.0 };
            assert!(reducer.gradient::<f32>(1)?.iter().all(|value| *value == average), "step {step}");
            assert_eq!((reducer.is_used_anywhere(0), reducer.is_used_anywhere(1)), (true, used));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn forward_as_it_is_waits_for_nobody_and_buckets_are_cut_when_the_caller_says_so() {
    let ahead = std::sync::Barrier::new(2);
    Group::threads(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default().bucket_bytes(&[1]))?;
        step(&mut reducer, &[1, 0], 1.0)?;
        if group.rank() == 0 {
            reducer.start_forward_as_is()?; // the other has not come, and need not
            assert!(!reducer.buckets().is_rebuilt());
        }
        ahead.wait();
        assert!(reducer.rebuild_buckets()?.is_some());
        step(&mut reducer, &[1, 0], 1.0)
    })
    .unwrap();
}

/// As a framework works that accumulates gradients itself, divides them as it copies them in, and looks which are there at the end.
#[test]
fn a_caller_with_gradients_of_its_own_divides_counts_and_keeps() {
    let model = [
        Param::new("weight", &[2], DType::F32),
        Param::new("bias", &[2], DType::F32),
        Param::new("rows", &[10, 3], DType::F32).sparse(),
    ];
    Group::threads(2, |group| {
        let rank = group.rank();
        let options = Options::default().divided_by_caller().find_unused_parameters();
        let mut reducer = Reducer::new(&group, &model, options)?;
        // No rank uses bias in this iteration, but each rank has a gradient from before. Rank 1 also has a row.
        reducer.gradient_mut::<f32>(1)?.fill(10.0 + rank as f32);
        reducer.keep(1, rank == 0)?;
        if rank == 1 {
            reducer.keep_sparse(2, rows(&[2], &[8.0; 3]), false)?;
        }
        reducer.start_backward_without(&[1, 2])?;
        reducer.gradient_mut::<f32>(0)?.fill(1.0);
        reducer.grad_ready(0)?;
        assert!(reducer.is_whole());
        assert_eq!(message(reducer.keep(1, true).unwrap_err()), "a gradient cannot be kept before `finish`");
        while !reducer.wait_for(Duration::from_millis(50)) {}
        reducer.finish()?;
        assert_eq!(reducer.gradient::<f32>(0)?, [2.0; 2], "added up, not divided");
        assert_eq!(reducer.gradient::<f32>(1)?, [21.0; 2]);
        assert_eq!(reducer.sparse_gradient(2).unwrap().values.as_slice::<f32>(), [8.0; 3]);
        assert!(reducer.is_used_anywhere(1) && !reducer.is_used_anywhere(2));

        // What was kept is kept once.
        reducer.start_backward_without(&[1, 2])?;
        reducer.grad_ready(0)?;
        reducer.finish()?;
        assert_eq!(reducer.gradient::<f32>(1)?, [0.0; 2]);
        assert!(!reducer.is_used_anywhere(1));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_gradient_of_a_static_graph_is_given_when_it_is_whole() {
    Group::threads(2, |group| {
        let options = Options::default().divided_by_caller().static_graph();
        let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
        for iteration in 0..3 {
            reducer.start_backward()?;
            reducer.count_ready(0)?;
            if iteration == 0 {
                // Only its end shows what a gradient is.
                reducer.count_ready(0)?;
                reducer.count_ready(1)?;
                assert!(!reducer.is_whole());
                for param in [0, 1] {
                    reducer.gradient_mut::<f32>(param)?.fill(1.0 + group.rank() as f32);
                    reducer.keep(param, false)?;
                }
            } else {
                assert!(reducer.buckets().completes(0));
                for param in [0, 1] {
                    reducer.gradient_mut::<f32>(param)?.fill(1.0 + group.rank() as f32);
                    reducer.grad_ready(param)?;
                }
                assert!(reducer.is_whole());
            }
            reducer.finish()?;
            assert_eq!(reducer.gradient::<f32>(0)?, [3.0; 6], "iteration {iteration}");
            assert_eq!(reducer.gradient::<f32>(1)?, [3.0; 2], "iteration {iteration}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_static_graph_knows_how_often_each_parameter_comes() {
    Group::threads(2, |group| {
        let params: Vec<Param> = (0..3).map(|number| Param::new(format!("p{number}"), &[5], DType::F32)).collect();
        let mut reducer = Reducer::new(&group, &params, Options::default())?;
        reducer.set_static_graph()?;
        let value = (1.0 + group.rank() as f32).to_ne_bytes();
        let gradient: Vec<u8> = (0..5).flat_map(|_| value).collect();
        for step in 0..4 {
            reducer.start_forward()?;
            reducer.start_backward()?;
            for param in [2, 0, 2] {
                reducer.grad_ready_from(param, &gradient)?; // parameter 2 is used twice, 1 never
            }
            reducer.finish()?;
            let averages: Vec<f32> = (0..3).map(|param| reducer.gradient::<f32>(param).unwrap()[4]).collect();
            assert_eq!(averages, [1.5, 0.0, 3.0], "step {step}");
            assert!(!reducer.is_used_anywhere(1));
            assert_eq!(reducer.buckets().is_rebuilt(), step >= 2);
        }
        group.start_barrier()?.wait()?; // else one may fail while the other is not through with the iteration before
        let mut changed = || -> Result<()> {
            reducer.start_backward()?;
            reducer.grad_ready_from(2, &gradient)?;
            reducer.grad_ready_from(0, &gradient)?;
            reducer.finish()
        };
        assert_eq!(
            message(changed().unwrap_err()),
            "the graph is not static: parameter 2 `p2` was made ready once in iteration 5, and 2 times in the first"
        );
        Ok(())
    })
    .unwrap();
}

/// Rows of three elements.
fn rows(indices: &[i64], values: &[f32]) -> SparseTensor {
    SparseTensor { shape: vec![10], indices: indices.to_vec(), dense: 3, values: Buffer::from_slice(values) }
}

#[test]
fn sparse_gradients_are_averaged_by_row() {
    Group::threads(2, |group| {
        let params = [
            Param::new("embedding", &[10, 3], DType::F32).sparse(),
            Param::new("weight", &[4], DType::F32),
        ];
        let mut reducer = Reducer::new(&group, &params, Options::default())?;
        assert!(reducer.sparse_gradient(0).is_none());
        for round in 0..3 {
            reducer.set_sync(round != 1);
            reducer.start_backward()?;
            let row = 4 + group.rank() as i64;
            reducer.grad_ready_sparse(0, rows(&[row, 9], &[2.0, 2.0, 2.0, 4.0, 4.0, 4.0]))?;
            reducer.gradient_mut::<f32>(1)?.fill(1.0);
            reducer.grad_ready(1)?;
            reducer.finish()?;
            let average = reducer.sparse_gradient(0).unwrap();
            assert_eq!(average.indices, [4, 5, 9]);
            let factor = if round == 2 { 2.0 } else { 1.0 }; // with what was accumulated
            let expected = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0].map(|value| value * factor);
            assert_eq!(average.values.as_slice::<f32>(), expected, "round {round}");
        }
        reducer.start_backward()?;
        let errors = [
            reducer.grad_ready(0).unwrap_err(),
            reducer.grad_ready_sparse(1, rows(&[], &[])).unwrap_err(),
            reducer.grad_ready_sparse(0, SparseTensor { shape: vec![11], ..rows(&[], &[]) }).unwrap_err(),
            reducer.gradient::<f32>(0).unwrap_err(),
        ];
        let texts = errors.map(message);
        assert_eq!(
            texts,
            [
                "parameter 0 `embedding` is sparse, and its gradient is not",
                "parameter 1 `weight` is not sparse, and its gradient is",
                "the gradient of parameter 0 `embedding` has [11] rows of 3 float32, not [10] rows of 3 float32",
                "parameter 0 `embedding` is sparse: it has no gradient in memory",
            ]
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_can_be_reduced_in_another_dtype_than_their_own() {
    Group::threads(2, |group| {
        let params = [Param::new("a", &[3], DType::F32), Param::new("b", &[2], DType::F64)];
        let mut reducer = Reducer::new(&group, &params, Options::default().reduce_dtype(DType::BF16))?;
        for _ in 0..3 {
            let value = 1.0 + group.rank() as f32 / 3.0;
            reducer.start_backward()?;
            reducer.gradient_mut::<f32>(0)?.fill(value);
            reducer.gradient_mut::<f64>(1)?.fill(f64::from(value));
            reducer.grad_ready(0)?;
            reducer.grad_ready(1)?;
            reducer.finish()?;
            let part = |rank: f32| bf16::from_f32((1.0 + rank / 3.0) / 2.0).to_f32();
            let expected = bf16::from_f32(part(0.0) + part(1.0));
            assert_eq!(reducer.gradient::<f32>(0)?, [expected.to_f32(); 3]);
            assert_eq!(reducer.gradient::<f64>(1)?, [expected.to_f64(); 2]);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_logger_has_c10ds_fields() {
    Group::threads(2, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default().bucket_bytes(&[8]))?;
        reducer.logger_mut().set("module_name", "Net");
        for _ in 0..3 {
            reducer.start_forward()?;
            step(&mut reducer, &[1, 0], 1.0)?;
        }
        let data = reducer.logger().data();
        let strings = ["module_name", "backend_name", "dtypes", "bucket_sizes", "rebuilt_bucket_sizes"];
        assert_eq!(
            strings.map(|name| data.strings[name].as_str()),
            ["Net", "tenfold", "float32", "32", "8, 24"]
        );
        assert_eq!(data.strings["prev_iteration_grad_ready_order_indices"], "1, 0");
        assert_eq!(data.strings["rebuilt_per_bucket_param_indices"], "1, 0");
        let numbers =
            ["world_size", "rank", "num_parameter_tensors", "total_parameter_size_bytes", "iteration"];
        let expected = [2, group.rank() as i64, 2, 32, 3];
        assert_eq!(numbers.map(|name| data.integers[name]), expected);
        let numbers = ["num_buckets_reduced", "has_rebuilt_buckets", "has_error", "bucket_cap_bytes"];
        assert_eq!(numbers.map(|name| data.integers[name]), [2, 1, 0, 8]);
        for name in ["forward_compute_time", "backward_compute_time", "backward_comm_time"] {
            assert!(data.integers[name] >= 0 && data.integers[format!("avg_{name}").as_str()] >= 0);
        }
        let statistics = reducer.statistics();
        assert_eq!((statistics.iteration, statistics.buckets_reduced, statistics.bytes_reduced), (3, 2, 32));
        Ok(())
    })
    .unwrap();
}
