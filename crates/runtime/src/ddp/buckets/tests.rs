use super::*;
use proptest::prelude::*;

fn param(elements: usize, dtype: DType, sparse: bool) -> Param {
    let param = Param::new("p", &[elements], dtype);
    if sparse { param.sparse() } else { param }
}

fn floats(elements: &[usize]) -> Vec<Param> {
    elements.iter().map(|count| param(*count, DType::F32, false)).collect()
}

fn members(buckets: &[Assignment]) -> Vec<Vec<usize>> {
    buckets.iter().map(|bucket| bucket.params.clone()).collect()
}

#[test]
fn assignments_are_those_that_were_measured_of_c10d() {
    let five = floats(&[100; 5]);
    let cut = |limits: &[usize]| members(&assign_by_size(&five, limits, None));
    assert_eq!(cut(&[400]), [[0], [1], [2], [3], [4]]);
    assert_eq!(cut(&[500]), [vec![0, 1], vec![2, 3], vec![4]]);
    let nine = assign_by_size(&floats(&[100; 9]), &[400, 800, 1200], None);
    assert_eq!(members(&nine), [vec![0], vec![1, 2], vec![3, 4, 5], vec![6, 7, 8]]);

    let numbers = |text: &str, by: char| -> Vec<usize> {
        text.split(by).filter_map(|number| number.trim().parse().ok()).collect()
    };
    let cases = include_str!("assignments.txt").lines().filter(|line| !line.starts_with('#'));
    for line in cases {
        let (question, answer) = line.split_once("=>").unwrap();
        let [sizes, limits, order] = question.split('|').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let params: Vec<Param> = sizes
            .split_whitespace()
            .map(|text| {
                let parts: Vec<&str> = text.split(':').collect();
                param(parts[0].parse().unwrap(), parts[1].parse().unwrap(), parts.len() > 2)
            })
            .collect();
        let order = numbers(order, ' ');
        let order = (!order.is_empty()).then_some(order.as_slice());
        let (buckets, limits_then) = answer.split_once('=').unwrap();
        let mut expected: Vec<Assignment> = buckets
            .split(';')
            .zip(numbers(limits_then, ' '))
            .map(|(bucket, limit)| Assignment { params: numbers(bucket, ','), limit })
            .collect();
        let mut ours = assign_by_size(&params, &numbers(limits, ' '), order);
        if order.is_some() {
            // c10d keeps open buckets in a hash table: the order of those at the end is chance.
            expected.sort_by_key(|bucket| bucket.params[0]);
            ours.sort_by_key(|bucket| bucket.params[0]);
        }
        assert_eq!(ours, expected, "{line}");
    }
}

#[test]
fn the_first_iteration_has_a_bucket_per_dtype_and_the_second_follows_the_arrival() {
    let mut params = floats(&[100, 100, 100]);
    params.push(param(10, DType::F64, false));
    let mut buckets = Buckets::new(&params, &[400, 800], Graph::Whole);
    assert_eq!(members(&buckets.buckets), [vec![3], vec![0, 1, 2]]);
    assert_eq!(buckets.start(&[]), 0..0);
    assert_eq!(buckets.ready(2), Ok(0..0));
    assert_eq!(buckets.ready(0), Ok(0..0));
    assert_eq!(buckets.ready(1), Ok(0..0), "bucket 0 comes first");
    assert!(!buckets.rebuild_due());
    assert_eq!(buckets.ready(3), Ok(0..2));
    assert_eq!(buckets.finish(), Ok(0..0));
    assert!(buckets.rebuild_due());
    let order = buckets.arrival();
    assert_eq!(order, [2, 0, 1, 3]);
    buckets.rebuild(&params, &order);
    assert_eq!(members(&buckets.buckets), [vec![2], vec![0, 1], vec![3]]);
    assert!(!buckets.rebuild_due());
}

#[test]
fn unused_parameters_are_ready_from_the_start() {
    let mut buckets = Buckets::new(&floats(&[100; 3]), &[400], Graph::Unused);
    assert_eq!(members(&buckets.buckets), [[2], [1], [0]]);
    assert_eq!(buckets.start(&[2, 1]), 0..2);
    assert_eq!(buckets.ready(1), Err(Misuse::UsedAfterAll { param: 1 }));
    assert_eq!(buckets.ready(0), Ok(2..3));
    assert_eq!(buckets.finish(), Ok(0..0));
    assert!(!buckets.rebuild_due());
}

#[test]
fn a_static_graph_is_learned_once_and_expected_afterwards() {
    let params = floats(&[100; 3]);
    let mut buckets = Buckets::new(&params, &[400], Graph::Static);
    buckets.start(&[]);
    for param in [0, 0, 2] {
        assert_eq!(buckets.ready(param), Ok(0..0));
    }
    assert_eq!(buckets.finish(), Ok(0..1), "all at the end");
    assert!(!buckets.rebuild_due());
    buckets.start(&[]);
    assert_eq!(buckets.unused(), [1]);
    assert_eq!(buckets.ready(0), Ok(0..0));
    assert_eq!(buckets.ready(2), Ok(0..0));
    assert_eq!(buckets.clone().finish(), Err(Misuse::GraphChanged { param: 0, expected: 2, seen: 1 }));
    assert_eq!(buckets.ready(0), Ok(0..1));
    assert_eq!(buckets.clone().ready(0), Err(Misuse::GraphChanged { param: 0, expected: 2, seen: 3 }));
    assert_eq!(buckets.clone().ready(1), Err(Misuse::GraphChanged { param: 1, expected: 0, seen: 1 }));
    assert_eq!(buckets.finish(), Ok(0..0));
    assert!(buckets.rebuild_due());
    buckets.rebuild(&params, &buckets.arrival());
    assert_eq!(members(&buckets.buckets), [[0], [2], [1]]);
}

#[test]
fn misuse_is_told_apart() {
    let mut buckets = Buckets::new(&floats(&[1; 3]), &[400], Graph::Whole);
    buckets.start(&[]);
    assert_eq!(buckets.ready(1), Ok(0..0));
    assert_eq!(buckets.ready(1), Err(Misuse::ReadyTwice { param: 1 }));
    assert_eq!(buckets.finish(), Err(Misuse::Missing { params: vec![0, 2] }));
}

/// The rule once more, as slowly as possible: for each dtype, sums from the last cut on.
fn naive(params: &[Param], limits: &[usize], order: &[usize]) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        let own: Vec<usize> =
            order.iter().copied().filter(|p| params[*p].dtype == dtype && !params[*p].sparse).collect();
        let (mut from, mut cuts) = (0, 0);
        for to in 1..=own.len() {
            let bytes: usize = own[from..to].iter().map(|p| params[*p].bytes()).sum();
            if bytes >= limits[cuts.min(limits.len() - 1)] || to == own.len() {
                all.push(own[from..to].to_vec());
                (from, cuts) = (to, cuts + 1);
            }
        }
    }
    all.extend(order.iter().filter(|p| params[**p].sparse).map(|p| vec![*p]));
    all.sort();
    all
}

fn any_params() -> impl Strategy<Value = Vec<Param>> {
    let dtype = prop::sample::select(vec![DType::F32, DType::BF16, DType::F64]);
    let one = (0..300_usize, dtype, prop::bool::weighted(0.1));
    prop::collection::vec(one.prop_map(|(elements, dtype, sparse)| param(elements, dtype, sparse)), 1..30)
}

/// Any model, limits, and an order of its parameters.
fn any_case() -> impl Strategy<Value = (Vec<Param>, Vec<usize>, Vec<usize>)> {
    (any_params(), prop::collection::vec(0..2000_usize, 1..4)).prop_flat_map(|(params, limits)| {
        let order: Vec<usize> = (0..params.len()).collect();
        (Just(params), Just(limits), Just(order).prop_shuffle())
    })
}

fn run(buckets: &mut Buckets, order: &[usize]) -> Vec<usize> {
    let mut launched: Vec<usize> = buckets.start(&[]).collect();
    for param in order {
        launched.extend(buckets.ready(*param).unwrap());
    }
    launched.extend(buckets.finish().unwrap());
    launched
}

proptest! {
    #[test]
    fn every_parameter_is_in_one_bucket_of_one_dtype_that_closes_when_it_is_full(
        (params, limits, order) in any_case()
    ) {
        for order in [None, Some(order.as_slice())] {
            let buckets = assign_by_size(&params, &limits, order);
            let all: Vec<usize> = buckets.iter().flat_map(|bucket| bucket.params.clone()).collect();
            prop_assert!(is_order_of(&all, params.len()));
            for bucket in &buckets {
                let first = &params[bucket.params[0]];
                prop_assert!(bucket.params.iter().all(|param| params[*param].dtype == first.dtype));
                prop_assert!(!first.sparse || bucket.params.len() == 1 && bucket.limit == 0);
                let (_, before) = bucket.params.split_last().unwrap();
                let bytes: usize = before.iter().map(|param| params[*param].bytes()).sum();
                prop_assert!(before.is_empty() || bytes < bucket.limit, "it would have closed before");
            }
        }
    }

    #[test]
    fn the_assignment_agrees_with_a_naive_one((params, limits, order) in any_case()) {
        let mut ours = members(&assign_by_size(&params, &limits, Some(&order)));
        ours.sort();
        prop_assert_eq!(ours, naive(&params, &limits, &order));
    }

    #[test]
    fn any_order_launches_each_bucket_once_and_in_order(
        (params, limits, order) in any_case(),
        graph in prop::sample::select(vec![Graph::Whole, Graph::Unused, Graph::Static]),
    ) {
        let mut buckets = Buckets::new(&params, &limits, graph);
        for _ in 0..4 {
            if buckets.rebuild_due() {
                let arrival = buckets.arrival();
                prop_assert_eq!(&arrival, &order);
                buckets.rebuild(&params, &arrival);
            }
            let launched = run(&mut buckets, &order);
            prop_assert_eq!(launched, (0..buckets.len()).collect::<Vec<_>>());
            let all: Vec<usize> = (0..buckets.len()).flat_map(|b| buckets.bucket(b).params.clone()).collect();
            prop_assert!(is_order_of(&all, params.len()), "none is lost");
        }
        prop_assert_eq!(buckets.is_rebuilt(), graph != Graph::Unused);
    }

    #[test]
    fn a_bucket_is_launched_as_soon_as_it_and_all_before_are_ready((params, limits, order) in any_case()) {
        let mut buckets = Buckets::new(&params, &limits, Graph::Unused);
        let mut ready = vec![false; params.len()];
        buckets.start(&[]);
        for param in &order {
            buckets.ready(*param).unwrap();
            ready[*param] = true;
            let complete = |bucket: &Assignment| bucket.params.iter().all(|param| ready[*param]);
            let expected = buckets.buckets.iter().take_while(|bucket| complete(bucket)).count();
            prop_assert_eq!(buckets.next, expected);
        }
    }
}
