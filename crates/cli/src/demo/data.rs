//! The task of the demo: to which arm of a spiral a point of the plane belongs.
//!
//! Points are generated from a seed, so that every worker can generate the same ones and take its share.

use std::f32::consts::TAU;

/// Arms of the spiral, which are the classes.
pub(super) const CLASSES: usize = 3;
/// How far each arm turns, from the middle to its end.
const TURNS: f32 = 1.25;
/// Points are up to this far from their exact position, in both directions.
const NOISE: f32 = 0.03;

/// Pseudo-random numbers that follow from a seed.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) // xorshift never leaves zero
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// At least -1 and less than 1.
    pub(super) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for place in (1..items.len()).rev() {
            items.swap(place, (self.next() % (place as u64 + 1)) as usize);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) place: [f32; 2],
    pub(super) class: usize,
}

/// Points of all arms in turn, somewhere along their arm.
pub(super) fn spirals(count: usize, seed: u64) -> Vec<Point> {
    let mut random = Random::new(seed);
    let point = |number| {
        let class = number % CLASSES;
        let radius = 0.55 + 0.45 * random.uniform();
        let angle = TAU * (class as f32 / CLASSES as f32 + TURNS * radius);
        let (sine, cosine) = angle.sin_cos();
        let place = [cosine, sine].map(|direction| radius * direction + NOISE * random.uniform());
        Point { place, class }
    };
    (0..count).map(point).collect()
}

/// Every n-th point, beginning with this rank's own number: what this rank learns from.
pub(super) fn share(points: &[Point], rank: usize, ranks: usize) -> Vec<Point> {
    points.iter().skip(rank).step_by(ranks).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_follow_from_the_seed_and_lie_on_the_disc_in_equal_numbers() {
        let points = spirals(3000, 1);
        assert_eq!(points, spirals(3000, 1));
        assert_ne!(points, spirals(3000, 2));
        for class in 0..CLASSES {
            assert_eq!(points.iter().filter(|point| point.class == class).count(), 1000);
        }
        assert!(points.iter().all(|Point { place: [x, y], .. }| x.hypot(*y) < 1.0 + 2.0 * NOISE));
    }

    #[test]
    fn every_point_is_in_one_share() {
        for ranks in 1..10 {
            let points: Vec<Point> = spirals(100, 3);
            let mut all: Vec<Point> = (0..ranks).flat_map(|rank| share(&points, rank, ranks)).collect();
            assert_eq!(all.len(), points.len(), "{ranks} ranks");
            all.retain(|point| !points.contains(point));
            assert_eq!(all, []);
        }
    }

    #[test]
    fn shuffling_keeps_everything_and_moves_most_of_it() {
        let mut numbers: Vec<usize> = (0..1000).collect();
        Random::new(7).shuffle(&mut numbers);
        assert!(numbers.iter().enumerate().filter(|(place, number)| place == *number).count() < 20);
        numbers.sort_unstable();
        assert_eq!(numbers, (0..1000).collect::<Vec<_>>());
    }
}
