//! Invalid calls and settings are refused.

use super::*;

/// The error on rank 0 of 3, after the name of the operation.
#[track_caller]
pub(super) fn refused<T: std::fmt::Debug>(call: Result<T>, operation: &str, message: &str) {
    let error = call.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert_eq!(error.to_string(), format!("{operation} in group `default` failed on rank 0 of 3: {message}"));
}

/// Runs `body` on rank 0 of 3, and checks that the group is as good as before.
pub(super) fn on_rank_0_of_3(body: impl Fn(&Group) + Sync) {
    ranks(3, |group| {
        if group.rank() == 0 {
            body(&group);
            assert_eq!(group.sequence_number(), 0, "what was refused is not counted");
        }
        assert_eq!(sum(&group, 1)?, 3);
        Ok(())
    });
}

pub(super) fn f32s(elements: usize) -> tenfold::BufferView {
    Buffer::zeros(DType::F32, elements).lend()
}

pub(super) fn i64s(elements: usize) -> tenfold::BufferView {
    Buffer::zeros(DType::I64, elements).lend()
}

#[test]
fn ranks_out_of_range_are_refused() {
    on_rank_0_of_3(|group| {
        let out = "root 3 is out of range: ranks are 0 to 2";
        refused(group.start_broadcast(f32s(4), 3), "broadcast", out);
        refused(group.start_reduce(f32s(4), ReduceOp::Sum, 3), "reduce", out);
        refused(group.start_gather(vec![], f32s(4), 3), "gather", out);
        refused(group.start_gather_into(None, f32s(4), 3), "gather", out);
        refused(group.start_scatter(f32s(4), vec![], 3), "scatter", out);
        refused(group.start_scatter_from(f32s(4), None, 3), "scatter", out);
        let out = "rank 3 is out of range: ranks are 0 to 2";
        refused(group.start_send(f32s(4), 3, Tag(0)), "send", out);
        refused(group.start_recv(f32s(4), 3, Tag(0)), "recv", out);
        refused(group.start_send(f32s(4), 0, Tag(0)), "send", "rank 0 is this rank itself");
        refused(group.start_recv(f32s(4), 0, Tag(0)), "recv", "rank 0 is this rank itself");
        refused(group.subgroup(&[0, 3], Options::new("x")), "split", out);
        refused(group.subgroup(&[0, 1, 0], Options::new("x")), "split", "rank 0 is given twice");
    });
}

#[test]
fn reductions_that_make_no_sense_are_refused_with_those_that_do() {
    on_rank_0_of_3(|group| {
        let band = "`band` does not work on float32; float32 has sum, avg, product, min, max, premul_sum; `band` works \
                    on int8, uint8, int16, uint16, int32, uint32, int64, uint64, bool";
        refused(group.start_all_reduce(f32s(4), ReduceOp::Band), "all_reduce", band);
        refused(group.start_reduce(f32s(4), ReduceOp::Band, 0), "reduce", band);
        refused(group.start_scan(f32s(4), ReduceOp::Band), "scan", band);
        refused(
            group.start_reduce_scatter_into(f32s(4), f32s(12), ReduceOp::Band),
            "reduce_scatter_into",
            band,
        );
        let list = (0..3).map(|_| f32s(4)).collect();
        refused(group.start_reduce_scatter(f32s(4), list, ReduceOp::Band), "reduce_scatter", band);
        refused(
            group.start_all_reduce_coalesced(vec![f32s(4)], ReduceOp::Band),
            "all_reduce_coalesced",
            band,
        );
        let avg = "`avg` does not work on int64; int64 has sum, product, min, max, band, bor, bxor; `avg` works on \
                   float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, \
                   complex64, complex128";
        refused(group.start_all_reduce(i64s(4), ReduceOp::Avg), "all_reduce", avg);
    });
}

#[test]
fn lengths_and_dtypes_that_do_not_fit_are_refused() {
    on_rank_0_of_3(|group| {
        let output = "the output has 11 elements; 3 ranks with an input of 4 need 12";
        refused(group.start_all_gather_into(f32s(11), f32s(4)), "all_gather_into", output);
        refused(group.start_gather_into(Some(f32s(11)), f32s(4), 0), "gather", output);
        let input = "the input has 11 elements; 3 ranks with an output of 4 need 12";
        refused(
            group.start_reduce_scatter_into(f32s(4), f32s(11), ReduceOp::Sum),
            "reduce_scatter_into",
            input,
        );
        refused(group.start_scatter_from(f32s(4), Some(f32s(11)), 0), "scatter", input);
        let dtypes = "the output has dtype int64, the input float32";
        refused(group.start_all_gather_into(i64s(12), f32s(4)), "all_gather_into", dtypes);
        let dtypes = "the input has dtype int64, the output float32";
        refused(
            group.start_reduce_scatter_into(f32s(4), i64s(12), ReduceOp::Sum),
            "reduce_scatter_into",
            dtypes,
        );
        refused(group.start_all_to_all_single(f32s(3), i64s(3), vec![], vec![]), "all_to_all_single", dtypes);
        refused(
            group.start_all_reduce_coalesced(vec![f32s(1), i64s(1)], ReduceOp::Sum),
            "all_reduce_coalesced",
            "tensors of float32 and int64 cannot be one",
        );
        refused(
            group.start_all_reduce_coalesced(vec![], ReduceOp::Sum),
            "all_reduce_coalesced",
            "there are no tensors",
        );
    });
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    on_rank_0_of_3(|group| {
        let list = |lengths: &[usize]| lengths.iter().map(|length| f32s(*length)).collect::<Vec<_>>();
        let short = "there are 2 outputs for 3 ranks";
        refused(group.start_all_gather(list(&[4, 4]), f32s(4)), "all_gather", short);
        refused(group.start_gather(list(&[4, 4]), f32s(4), 0), "gather", short);
        refused(group.start_all_to_all(list(&[4, 4]), list(&[4, 4, 4])), "all_to_all", short);
        let short = "there are 4 inputs for 3 ranks";
        refused(group.start_scatter(f32s(4), list(&[4; 4]), 0), "scatter", short);
        refused(group.start_reduce_scatter(f32s(4), list(&[4; 4]), ReduceOp::Sum), "reduce_scatter", short);
        refused(group.start_all_to_all(list(&[4; 3]), list(&[4; 4])), "all_to_all", short);
        refused(
            group.start_all_gather(list(&[5, 4, 4]), f32s(4)),
            "all_gather",
            "the input has 4 elements, but output 0, where it goes, has 5",
        );
        refused(
            group.start_reduce_scatter(f32s(4), list(&[5, 4, 4]), ReduceOp::Sum),
            "reduce_scatter",
            "the output has 4 elements, but input 0, which goes there, has 5",
        );
        let unequal = "number 1 of the outputs has 5 elements, not 4";
        refused(group.start_gather(list(&[4, 5, 4]), f32s(4), 0), "gather", unequal);
        let unequal = "number 1 of the inputs has 5 elements, not 4";
        refused(group.start_scatter(f32s(4), list(&[4, 5, 4]), 0), "scatter", unequal);
        refused(
            group.start_all_gather(vec![f32s(4), i64s(4), f32s(4)], f32s(4)),
            "all_gather",
            "number 1 of the outputs has dtype int64, not float32",
        );
        refused(group.start_gather(vec![], f32s(4), 0), "gather", "rank 0 is the root and needs outputs");
        refused(group.start_scatter_from(f32s(4), None, 0), "scatter", "rank 0 is the root and needs input");
        refused(
            group.start_scatter(f32s(4), list(&[4; 3]), 1),
            "scatter",
            "rank 0 is not the root 1 and must not give inputs",
        );
        refused(
            group.start_all_gather_into_coalesced(list(&[3]), list(&[1, 1])),
            "all_gather_into_coalesced",
            "there are 1 outputs for 2 inputs",
        );
    });
}

#[test]
fn splits_that_do_not_add_up_are_refused() {
    on_rank_0_of_3(|group| {
        let split = |output: &[usize], input: &[usize]| {
            group.start_all_to_all_single(f32s(6), f32s(7), output.to_vec(), input.to_vec())
        };
        let single = "all_to_all_single";
        refused(
            split(&[2, 2, 2], &[]),
            single,
            "the input has 7 elements, which 3 ranks cannot share equally; give splits",
        );
        let sums = "the output has 6 elements for 3 ranks, but 3 splits that add up to 7";
        refused(split(&[2, 2, 3], &[2, 2, 3]), single, sums);
        let sums = "the input has 7 elements for 3 ranks, but 2 splits that add up to 7";
        refused(split(&[2, 2, 2], &[3, 4]), single, sums);
        let sums = "the input has 7 elements for 3 ranks, but 3 splits that add up to more than fits";
        refused(split(&[2, 2, 2], &[usize::MAX, 2, 3]), single, sums);
    });
}

#[test]
fn a_rank_alone_has_nobody_to_send_to() {
    ranks(1, |group| {
        let error = group.start_recv_any(f32s(1), Tag(0)).unwrap_err();
        assert_eq!(error.message(), "there is no other rank in the group to receive from");
        let error = group.start_send(f32s(1), 1, Tag(0)).unwrap_err();
        assert_eq!(error.message(), "rank 1 is out of range: ranks are 0 to 0");
        Ok(())
    });
}

#[test]
fn a_rank_that_is_not_in_its_group_cannot_connect() {
    let store = Arc::new(tenfold_store::HashStore::new());
    let error = Group::connect(store.clone(), Seat { rank: 3, size: 3 }, Options::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "connect in group `default` failed on rank 3 of 3: rank 3 of 3 makes no sense: ranks are counted from 0"
    );
    let options = Options::default().algorithm("all_reduce", "magic");
    let error = Group::connect(store, Seat { rank: 0, size: 1 }, options).unwrap_err();
    assert_eq!(
        error.message(),
        "there is no algorithm `magic` for all_reduce; there are one_shot, direct, ring, recursive_doubling, \
         halving_doubling, two_level, leaders"
    );
}

/// Every rank must report both settings.
pub(super) fn refused_for_its_settings<T>(outcome: Result<T>) {
    let error = outcome.err().expect("ranks with different settings cannot form a group");
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    let text = error.to_string();
    let both = [
        "rank 0 has `not deterministic; no forced algorithms;",
        "rank 2 has `deterministic; all_reduce=ring;",
    ];
    assert!(both.iter().all(|part| text.contains(part)), "{text}");
}

pub(super) fn settings_of(rank: usize, options: Options) -> Options {
    if rank == 2 { options.deterministic().algorithm("all_reduce", "ring") } else { options }
}

#[test]
fn ranks_whose_settings_choose_different_plans_cannot_connect() {
    let store = tenfold_store::HashStore::new();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let store = Arc::new(store.clone());
            scope.spawn(move || {
                let options = settings_of(rank, Options::new("default").timeout(LIMIT));
                refused_for_its_settings(Group::connect(store, Seat { rank, size: 3 }, options));
            });
        }
    });
}

#[test]
fn ranks_whose_settings_choose_different_plans_cannot_form_a_subgroup() {
    ranks(3, |group| {
        let options = settings_of(group.rank(), Options::new("sub").timeout(LIMIT));
        refused_for_its_settings(group.subgroup(&[0, 1, 2], options));
        // Those that agree can, also beside one that does not.
        let options = settings_of(group.rank(), Options::new("split").timeout(LIMIT));
        let part = group.split(Some((group.rank() / 2) as u32), 0, options)?.unwrap();
        assert_eq!(part.size(), if group.rank() == 2 { 1 } else { 2 });
        sum(&group, 1).map(drop)
    });
}
