//! Each hook against the formula it stands for, written down as plainly as possible; and whether training gets anywhere with it.

use half::{bf16, f16};

use super::power_sgd::{orthogonalize, random};
use super::*;
use crate::Result;
use crate::ddp::{CommHook, Options, Param, Reducer};

/// What rank 0 has after each iteration; all ranks have the same.
fn reduce<H: CommHook + 'static>(
    size: usize,
    shape: &[usize],
    steps: usize,
    hook: impl Fn() -> H + Sync,
    gradient: impl Fn(usize, usize) -> Vec<f32> + Sync,
) -> Vec<Vec<f32>> {
    let all = Group::threads(size, |group| {
        let mut reducer =
            Reducer::new(&group, &[Param::new("w", shape, DType::F32)], Options::default().hook(hook()))?;
        (0..steps)
            .map(|step| one_step(&mut reducer, &gradient(group.rank(), step)))
            .collect::<Result<Vec<_>>>()
    });
    let all = all.unwrap();
    let bits =
        |rank: &[Vec<f32>]| -> Vec<u32> { rank.iter().flatten().map(|value| value.to_bits()).collect() };
    assert!(all.iter().all(|rank| bits(rank) == bits(&all[0])), "ranks agree to the last bit");
    all.into_iter().next().unwrap()
}

fn one_step(reducer: &mut Reducer, gradient: &[f32]) -> Result<Vec<f32>> {
    reducer.start_backward()?;
    reducer.gradient_mut(0)?.copy_from_slice(gradient);
    reducer.grad_ready(0)?;
    reducer.finish()?;
    Ok(reducer.gradient::<f32>(0)?.to_vec())
}

/// Some numbers, others for each rank and step.
fn noise(rank: usize, step: usize, count: usize) -> Vec<f32> {
    random(count, &mut ((rank * 1000 + step) as u64))
}

#[test]
fn compression_converts_then_divides_then_adds() {
    let gradient = |rank, step| noise(rank, step, 1000);
    let narrow = reduce(2, &[1000], 2, Compress::fp16, gradient);
    let brain = reduce(2, &[1000], 2, Compress::bf16, gradient);
    for step in 0..2 {
        let (a, b) = (gradient(0, step), gradient(1, step));
        for place in 0..1000 {
            let part = |value: f32| f16::from_f32(f16::from_f32(value).to_f32() / 2.0).to_f32();
            assert_eq!(narrow[step][place], f16::from_f32(part(a[place]) + part(b[place])).to_f32());
            let part = |value: f32| bf16::from_f32(bf16::from_f32(value).to_f32() / 2.0).to_f32();
            assert_eq!(brain[step][place], bf16::from_f32(part(a[place]) + part(b[place])).to_f32());
        }
    }
}

#[test]
fn the_plain_hook_is_the_average() {
    let averages = reduce(2, &[100], 1, || AllReduce, |rank, step| noise(rank, step, 100));
    let (a, b) = (noise(0, 0, 100), noise(1, 0, 100));
    assert!((0..100).all(|place| averages[0][place] == a[place] / 2.0 + b[place] / 2.0));
}

#[test]
fn bytes_are_rounded_by_block_and_make_up_for_it_later() {
    const COUNT: usize = 1300;
    let (size, steps) = (3, 8);
    let gradient = |rank: usize, step: usize| -> Vec<f32> {
        let mut values = noise(rank, step, COUNT);
        values[600..].iter_mut().for_each(|value| *value *= 100.0);
        values[100] = 0.0;
        values
    };
    let ours = reduce(size, &[COUNT], steps, Int8::new, gradient);
    let mut errors = vec![vec![0.0_f32; COUNT]; size];
    let (mut total, mut true_total) = (vec![0.0_f64; COUNT], vec![0.0_f64; COUNT]);
    for (step, ours) in ours.iter().enumerate() {
        let mut sums = vec![0.0_f32; COUNT];
        for (rank, errors) in errors.iter_mut().enumerate() {
            let mut values = gradient(rank, step);
            true_total
                .iter_mut()
                .zip(&values)
                .for_each(|(sum, value)| *sum += f64::from(*value) / size as f64);
            for place in 0..COUNT {
                values[place] += errors[place];
            }
            for block in (0..COUNT).step_by(512) {
                let block = block..(block + 512).min(COUNT);
                let scale = values[block.clone()].iter().map(|value| value.abs()).fold(0.0, f32::max) / 127.0;
                for place in block {
                    let rounded = (values[place] / scale).round() * scale;
                    errors[place] = values[place] - rounded;
                    sums[place] += rounded;
                }
            }
        }
        for place in 0..COUNT {
            assert_eq!(ours[place], sums[place] / size as f32, "step {step}, element {place}");
            total[place] += f64::from(ours[place]);
        }
    }
    for place in 0..COUNT {
        let quantum = if place < 512 { 0.01 } else { 1.0 };
        assert!((total[place] - true_total[place]).abs() < quantum, "nothing is lost in the long run");
    }
}

#[test]
fn a_gradient_that_is_not_a_number_is_seen_by_all_and_forgotten() {
    let gradient =
        |rank, step| if (rank, step) == (1, 0) { vec![1.0, f32::INFINITY] } else { vec![1.0, 2.0] };
    let averages = reduce(2, &[2], 2, Int8::new, gradient);
    assert!(averages[0].iter().all(|value| value.is_nan()));
    assert!((averages[1][0] - 1.0).abs() < 0.02 && (averages[1][1] - 2.0).abs() < 0.02, "{:?}", averages[1]);
}

#[test]
fn columns_become_orthonormal() {
    let mut matrix = random(30, &mut 7);
    orthogonalize(&mut matrix, 10, 0.0);
    for (i, a) in matrix.chunks(10).enumerate() {
        for (j, b) in matrix.chunks(10).enumerate() {
            let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            assert!((dot - f32::from(i == j)).abs() < 1e-6, "columns {i} and {j}: {dot}");
        }
    }
    let mut nothing = vec![0.0; 10];
    orthogonalize(&mut nothing, 5, 0.0);
    assert_eq!(nothing, [0.0; 10], "no NaN");
}

/// The paper's algorithm on f64, matrices as rows of rows.
struct Reference {
    q: Vec<Vec<f64>>,
    errors: Vec<Vec<f64>>,
}

const ROWS: usize = 24;
const COLUMNS: usize = 10;
const RANK: usize = 2;

impl Reference {
    fn orthonormal(columns: &mut [Vec<f64>]) {
        for i in 0..columns.len() {
            for j in 0..i {
                let dot: f64 = columns[i].iter().zip(&columns[j]).map(|(a, b)| a * b).sum();
                let other = columns[j].clone();
                columns[i].iter_mut().zip(other).for_each(|(a, b)| *a -= dot * b);
            }
            let length = columns[i].iter().map(|a| a * a).sum::<f64>().sqrt();
            columns[i].iter_mut().for_each(|a| *a /= length);
        }
    }

    fn step(&mut self, gradients: &[Vec<f32>]) -> Vec<f64> {
        let size = gradients.len();
        let own: Vec<Vec<f64>> = (0..size)
            .map(|rank| {
                (0..ROWS * COLUMNS).map(|e| f64::from(gradients[rank][e]) + self.errors[rank][e]).collect()
            })
            .collect();
        let mean = |e: usize| (0..size).map(|rank| own[rank][e]).sum::<f64>() / size as f64;
        Self::orthonormal(&mut self.q);
        let dot = |r: usize, q: &[f64]| (0..COLUMNS).map(|c| mean(r * COLUMNS + c) * q[c]).sum();
        let mut p: Vec<Vec<f64>> = self.q.iter().map(|q| (0..ROWS).map(|r| dot(r, q)).collect()).collect();
        Self::orthonormal(&mut p);
        self.q = (0..RANK)
            .map(|k| (0..COLUMNS).map(|c| (0..ROWS).map(|r| mean(r * COLUMNS + c) * p[k][r]).sum()).collect())
            .collect();
        let value = |e: usize| (0..RANK).map(|k| p[k][e / COLUMNS] * self.q[k][e % COLUMNS]).sum();
        let result: Vec<f64> = (0..ROWS * COLUMNS).map(value).collect();
        let error = |own: &Vec<f64>| own.iter().zip(&result).map(|(own, result)| own - result).collect();
        self.errors = own.iter().map(error).collect();
        result
    }
}

#[test]
fn power_sgd_computes_what_the_paper_says() {
    let (size, start, steps) = (3, 1, 6);
    let gradient = |rank, step| noise(rank, step, ROWS * COLUMNS);
    let hook = || PowerSgd::new(RANK).start_iteration(start);
    let ours = reduce(size, &[ROWS, COLUMNS], steps, hook, gradient);
    let q = random(COLUMNS * RANK, &mut 0);
    let q = q.chunks(COLUMNS).map(|column| column.iter().map(|value| f64::from(*value)).collect()).collect();
    let mut reference = Reference { q, errors: vec![vec![0.0; ROWS * COLUMNS]; size] };
    for (step, ours) in ours.iter().enumerate() {
        let gradients: Vec<Vec<f32>> = (0..size).map(|rank| gradient(rank, step)).collect();
        let expected: Vec<f64> = if step < start as usize {
            (0..ROWS * COLUMNS)
                .map(|e| gradients.iter().map(|g| f64::from(g[e])).sum::<f64>() / size as f64)
                .collect()
        } else {
            reference.step(&gradients)
        };
        for (ours, expected) in ours.iter().zip(&expected) {
            assert!((f64::from(*ours) - expected).abs() < 1e-4, "step {step}: {ours} and {expected}");
        }
    }
}

#[test]
fn power_sgd_averages_vectors_and_small_matrices_as_they_are() {
    for shape in [vec![100], vec![3, 3], vec![], vec![0, 4]] {
        let count = shape.iter().product();
        let hook = || PowerSgd::new(2).start_iteration(0);
        let ours = reduce(2, &shape, 3, hook, |rank, step| noise(rank, step, count));
        for (step, ours) in ours.iter().enumerate() {
            let (a, b) = (noise(0, step, count), noise(1, step, count));
            let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| (a + b) / 2.0).collect();
            assert_eq!(*ours, expected);
        }
    }
}

/// Each rank pulls the model to a point of its own; the best for all is their mean. How far from it training ends.
fn distance_after<H: CommHook + 'static>(
    steps: usize,
    outer: bool,
    hook: impl Fn(&Group) -> H + Sync,
) -> f32 {
    const SIZE: usize = 3;
    const COUNT: usize = 20 * 12;
    let distances = Group::threads(SIZE, |group| {
        let goal = noise(group.rank(), 0, COUNT);
        let options = Options::default().hook(hook(&group));
        let mut reducer = Reducer::new(&group, &[Param::new("w", &[20, 12], DType::F32)], options)?;
        let mut model = vec![0.0_f32; COUNT];
        let mut averaging = OuterAveraging::new(&model, 5, 0.7, 0.5);
        for _ in 0..steps {
            let gradient: Vec<f32> = model.iter().zip(&goal).map(|(own, goal)| own - goal).collect();
            let average = one_step(&mut reducer, &gradient)?;
            model.iter_mut().zip(&average).for_each(|(own, slope)| *own -= 0.1 * slope);
            if outer {
                averaging.step(&mut model, &group)?;
            }
        }
        let goals: Vec<Vec<f32>> = (0..SIZE).map(|rank| noise(rank, 0, COUNT)).collect();
        let mean = |place: usize| goals.iter().map(|goal| goal[place]).sum::<f32>() / SIZE as f32;
        Ok((0..COUNT).map(|place| (model[place] - mean(place)).abs()).fold(0.0, f32::max))
    });
    distances.unwrap().into_iter().fold(0.0, f32::max)
}

#[test]
fn training_converges_with_every_hook() {
    assert!(distance_after(150, false, |_| AllReduce) < 1e-4);
    assert!(distance_after(150, false, |_| Compress::fp16()) < 1e-3);
    assert!(distance_after(150, false, |_| Compress::bf16()) < 1e-2);
    assert!(distance_after(150, false, |_| Int8::new()) < 1e-3);
    let low_rank = distance_after(400, false, |_| PowerSgd::new(2).start_iteration(2));
    assert!(low_rank < 1e-2, "{low_rank}");
    let local = distance_after(200, true, |_| PostLocalSgd::new(10, None));
    assert!(local < 1e-3, "{local}");
    let apart = distance_after(200, false, |_| PostLocalSgd::new(10, None));
    assert!(apart > 0.1, "no rank averages: {apart}");
}

#[test]
fn neighbours_average_among_themselves_after_the_start() {
    let all = Group::threads(4, |group| {
        let pair = group.split(Some(group.rank() as u32 / 2), 0, crate::Options::new("pair"))?;
        let options = Options::default().hook(PostLocalSgd::new(1, pair));
        let mut reducer = Reducer::new(&group, &[Param::new("w", &[1], DType::F32)], options)?;
        let own = [group.rank() as f32];
        Ok((one_step(&mut reducer, &own)?[0], one_step(&mut reducer, &own)?[0]))
    });
    assert_eq!(all.unwrap(), [(1.5, 0.5), (1.5, 0.5), (1.5, 2.5), (1.5, 2.5)]);
}
