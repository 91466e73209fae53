//! A small hand-written network: layers of weights, tanh between them, cross-entropy at the end.
//!
//! Weights have one row per *input*, so that the inner loops of forward and of the gradient run over adjacent
//! values. Backward returns each parameter's gradient as soon as it is known, last layer first, and computes
//! it in its final place.

use super::data::{CLASSES, Point, Random};

/// The share of the last step that momentum keeps.
const MOMENTUM: f32 = 0.9;

#[derive(Debug)]
pub(super) struct Model {
    /// The number of inputs of each layer, and of the outputs of the last.
    widths: Vec<usize>,
    /// Weight and bias of each layer in turn.
    pub(super) parameters: Vec<Vec<f32>>,
    speeds: Vec<Vec<f32>>,
}

/// The results of forward for some points: the values before each layer, and after the last.
#[derive(Debug)]
pub(super) struct Pass {
    values: Vec<Vec<f32>>,
}

impl Model {
    /// With values that follow from the seed.
    pub(super) fn new(hidden: &[usize], seed: u64) -> Self {
        let widths = [&[2], hidden, &[CLASSES]].concat();
        let mut random = Random::new(seed);
        let mut parameters = Vec::new();
        for layer in widths.windows(2) {
            let reach = (3.0 / layer[0] as f32).sqrt(); // keeps the spread of values from layer to layer
            parameters.push((0..layer[0] * layer[1]).map(|_| reach * random.uniform()).collect());
            parameters.push(vec![0.0; layer[1]]);
        }
        let speeds = parameters.iter().map(|values: &Vec<f32>| vec![0.0; values.len()]).collect();
        Model { widths, parameters, speeds }
    }

    fn layers(&self) -> usize {
        self.widths.len() - 1
    }

    /// `layer2.weight`, with its shape.
    pub(super) fn describe(&self) -> Vec<(String, Vec<usize>)> {
        let both = |layer: usize| {
            let (from, to) = (self.widths[layer], self.widths[layer + 1]);
            [(format!("layer{layer}.weight"), vec![from, to]), (format!("layer{layer}.bias"), vec![to])]
        };
        (0..self.layers()).flat_map(both).collect()
    }

    pub(super) fn forward(&self, points: &[Point]) -> Pass {
        let mut values = vec![points.iter().flat_map(|point| point.place).collect::<Vec<f32>>()];
        for layer in 0..self.layers() {
            let (weight, bias) = (&self.parameters[2 * layer], &self.parameters[2 * layer + 1]);
            let mut output = Vec::with_capacity(points.len() * bias.len());
            for row in values[layer].chunks_exact(self.widths[layer]) {
                let start = output.len();
                output.extend_from_slice(bias);
                for (value, weights) in row.iter().zip(weight.chunks_exact(bias.len())) {
                    add_scaled(&mut output[start..], *value, weights);
                }
            }
            if layer + 1 < self.layers() {
                output.iter_mut().for_each(|value| *value = value.tanh());
            }
            values.push(output);
        }
        Pass { values }
    }

    /// Returns every parameter's number, last layer first, and a function that writes its gradient.
    pub(super) fn backward<E>(
        &self,
        pass: &Pass,
        points: &[Point],
        mut give: impl FnMut(usize, &dyn Fn(&mut [f32])) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut delta = pass.slope_of_loss(points);
        for layer in (0..self.layers()).rev() {
            let (from, to) = (self.widths[layer], self.widths[layer + 1]);
            let inputs = &pass.values[layer];
            give(2 * layer + 1, &|gradient| {
                gradient.fill(0.0);
                delta.chunks_exact(to).for_each(|row| add_scaled(gradient, 1.0, row));
            })?;
            give(2 * layer, &|gradient| {
                gradient.fill(0.0);
                for (input, row) in inputs.chunks_exact(from).zip(delta.chunks_exact(to)) {
                    for (value, target) in input.iter().zip(gradient.chunks_exact_mut(to)) {
                        add_scaled(target, *value, row);
                    }
                }
            })?;
            if layer > 0 {
                let weight = &self.parameters[2 * layer];
                let through = |row| weight.chunks_exact(to).map(move |weights| dot(weights, row));
                let slopes = inputs.iter().map(|value| 1.0 - value * value); // of tanh, by its value
                delta = delta.chunks_exact(to).flat_map(through).zip(slopes).map(|(a, b)| a * b).collect();
            }
        }
        Ok(())
    }

    /// Moves one parameter against its gradient.
    pub(super) fn step(&mut self, parameter: usize, gradient: &[f32], rate: f32) {
        let values = self.parameters[parameter].iter_mut().zip(&mut self.speeds[parameter]);
        for ((value, speed), slope) in values.zip(gradient) {
            *speed = MOMENTUM * *speed + slope;
            *value -= rate * *speed;
        }
    }

    /// Of all bits of all parameters: FNV-1a.
    pub(super) fn fingerprint(&self) -> u64 {
        let bits = self.parameters.iter().flatten().map(|value| u64::from(value.to_bits()));
        bits.fold(0xcbf2_9ce4_8422_2325, |print, bits| (print ^ bits).wrapping_mul(0x100_0000_01b3))
    }
}

impl Pass {
    fn scores(&self) -> impl Iterator<Item = &[f32]> {
        self.values.last().expect("there is a layer").chunks_exact(CLASSES)
    }

    /// The mean over all points.
    pub(super) fn loss(&self, points: &[Point]) -> f32 {
        let one = |(scores, point): (&[f32], &Point)| -likelihoods(scores)[point.class].ln();
        self.scores().zip(points).map(one).sum::<f32>() / points.len() as f32
    }

    /// How many points get the highest score for their class.
    pub(super) fn right(&self, points: &[Point]) -> usize {
        let is_right = |(scores, point): &(&[f32], &Point)| {
            (0..CLASSES).all(|other| other == point.class || scores[other] < scores[point.class])
        };
        self.scores().zip(points).filter(is_right).count()
    }

    /// The derivative by each score.
    fn slope_of_loss(&self, points: &[Point]) -> Vec<f32> {
        let one = |(scores, point): (&[f32], &Point)| {
            let mut slope = likelihoods(scores);
            slope[point.class] -= 1.0;
            slope.map(|slope| slope / points.len() as f32)
        };
        self.scores().zip(points).flat_map(one).collect()
    }
}

fn likelihoods(scores: &[f32]) -> [f32; CLASSES] {
    let highest = scores.iter().copied().fold(f32::MIN, f32::max);
    let powers: [f32; CLASSES] = std::array::from_fn(|class| (scores[class] - highest).exp());
    let sum: f32 = powers.iter().sum();
    powers.map(|power| (power / sum).max(f32::MIN_POSITIVE)) // its logarithm stays finite
}

fn add_scaled(target: &mut [f32], factor: f32, source: &[f32]) {
    target.iter_mut().zip(source).for_each(|(target, source)| *target += factor * source);
}

/// In eight sums, which the compiler keeps in registers side by side.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        (0..8).for_each(|lane| sums[lane] += a[lane] * b[lane]);
    }
    rest + sums.iter().sum::<f32>()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::super::data::spirals;
    use super::*;

    fn gradients(model: &Model, points: &[Point]) -> Vec<(usize, Vec<f32>)> {
        let mut all = Vec::new();
        let Ok(()) = model.backward::<Infallible>(&model.forward(points), points, |parameter, write| {
            let mut gradient = vec![f32::NAN; model.parameters[parameter].len()];
            write(&mut gradient);
            all.push((parameter, gradient));
            Ok(())
        });
        all
    }

    #[test]
    fn gradients_are_the_slopes_that_one_measures() {
        const STEP: f32 = 1e-2;
        let points = spirals(12, 5);
        let mut model = Model::new(&[9, 11], 3);
        let gradients = gradients(&model, &points);
        assert_eq!(gradients.iter().map(|(parameter, _)| *parameter).collect::<Vec<_>>(), [5, 4, 3, 2, 1, 0]);
        let mut largest = 0.0_f32;
        for (parameter, gradient) in gradients {
            for place in 0..gradient.len() {
                let value = model.parameters[parameter][place];
                let mut loss_at = |moved: f32| {
                    model.parameters[parameter][place] = moved;
                    model.forward(&points).loss(&points)
                };
                let slope = (loss_at(value + STEP) - loss_at(value - STEP)) / (2.0 * STEP);
                loss_at(value);
                assert!((slope - gradient[place]).abs() < 2e-4, "{parameter}/{place}: {slope}, {gradient:?}");
                largest = largest.max(slope.abs());
            }
        }
        assert!(largest > 0.05, "{largest}: there was something to compare");
    }

    #[test]
    fn training_alone_learns_the_spirals() {
        let points = spirals(200, 1);
        let mut model = Model::new(&[24, 24], 2);
        let before = model.forward(&points).loss(&points);
        for _ in 0..1000 {
            for (parameter, gradient) in gradients(&model, &points) {
                model.step(parameter, &gradient, 0.1);
            }
        }
        let pass = model.forward(&points);
        assert!(before > 0.8 && pass.loss(&points) < 0.1, "{before} → {}", pass.loss(&points));
        assert!(pass.right(&points) > 190);
    }

    #[test]
    fn one_bit_makes_another_fingerprint() {
        let mut model = Model::new(&[4], 1);
        let before = model.fingerprint();
        assert_eq!(before, Model::new(&[4], 1).fingerprint());
        for parameter in 0..model.parameters.len() {
            let value = model.parameters[parameter][0];
            model.parameters[parameter][0] = f32::from_bits(value.to_bits() ^ 1);
            assert_ne!(model.fingerprint(), before);
            model.parameters[parameter][0] = value;
        }
        assert_eq!(model.fingerprint(), before);
    }

    #[test]
    fn scores_beyond_all_bounds_give_a_finite_loss() {
        let points = spirals(3, 1);
        let pass = Pass { values: vec![[-1e30_f32, 1e30, 0.0].repeat(3)] };
        assert!(pass.loss(&points).is_finite());
        assert!(pass.slope_of_loss(&points).iter().all(|slope| slope.is_finite()));
    }
}
