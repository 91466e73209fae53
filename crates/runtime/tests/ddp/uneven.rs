//! Ranks that run out of data before others do.

use super::*;

#[test]
fn a_rank_that_knows_of_others_data_takes_part() {
    Group::threads(3, |group| {
        let mut reducer = Reducer::new(&group, &weight_and_bias(), Options::default())?;
        for iteration in 0..4 {
            if group.rank() < iteration {
                reducer.take_part()?;
            } else {
                step(&mut reducer, &[1, 0], 3.0)?;
            }
            let live = (3 - iteration.min(3)) as f32;
            assert_eq!(reducer.gradient::<f32>(1)?, [live; 2], "iteration {iteration}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_run_out_of_data_add_nothing_and_keep_up() {
    for (divisor, shares) in [(Divisor::Initial, [3.0, 2.0, 1.0]), (Divisor::Live, [3.0, 3.0, 3.0])] {
        let ends = Group::threads(3, |group| {
            let options = Options::default().join(divisor).find_unused_parameters();
            let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
            let mut seen = Vec::new();
            for _batch in 0..=group.rank() {
                step(&mut reducer, &[1, 0], 3.0)?;
                seen.push(reducer.gradient::<f32>(0)?[0]);
            }
            while reducer.shadow()? {
                seen.push(reducer.gradient::<f32>(0)?[0]);
            }
            assert_eq!(reducer.last_with_data(group.rank() as u64 + 1)?, 2);
            Ok(seen)
        });
        assert_eq!(ends.unwrap(), vec![shares.to_vec(); 3]);
    }
    let default =
        Group::threads(1, |group| Reducer::new(&group, &weight_and_bias(), Options::default())?.shadow());
    assert_eq!(message(default.unwrap_err()), "this reducer expects the same number of batches on all ranks");
}

#[test]
fn a_rank_without_any_data_shadows_every_kind_of_graph() {
    let graphs: [fn() -> Options; 3] = [
        Options::default,
        || Options::default().find_unused_parameters(),
        || Options::default().static_graph(),
    ];
    for graph in graphs {
        let ends = Group::threads(3, |group| {
            let options = graph().join(Divisor::Initial).bucket_bytes(&[1]);
            let mut reducer = Reducer::new(&group, &weight_and_bias(), options)?;
            let mut seen = Vec::new();
            for _batch in 0..2 * group.rank() {
                step(&mut reducer, &[1, 0], 3.0)?;
                seen.push(reducer.gradient::<f32>(1)?[0]);
            }
            while reducer.shadow()? {
                seen.push(reducer.gradient::<f32>(1)?[0]);
            }
            Ok(seen)
        });
        assert_eq!(ends.unwrap(), vec![vec![2.0, 2.0, 1.0, 1.0]; 3]);
    }
}

#[test]
fn uneven_ranks_rebuild_and_skip_together() {
    let ends = Group::threads(2, |group| {
        let mut reducer = Reducer::new(
            &group,
            &weight_and_bias(),
            Options::default().join(Divisor::Initial).bucket_bytes(&[1]),
        )?;
        for batch in 0..if group.rank() == 0 { 1 } else { 4 } {
            reducer.set_sync(batch != 2);
            if batch == 3 {
                reducer.zero_gradients()?;
            }
            step(&mut reducer, &[1, 0], 2.0)?;
        }
        let mut steps = 0;
        while reducer.shadow()? {
            steps += 1;
        }
        assert!(reducer.buckets().is_rebuilt());
        Ok((steps, reducer.gradient::<f32>(0)?[0]))
    });
    assert_eq!(ends.unwrap(), [(3, 1.0), (0, 1.0)]);
}
