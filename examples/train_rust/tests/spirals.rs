//! Where `spirals.csv` comes from: this makes it.

use std::f64::consts::TAU;
use std::fmt::Write as _;

const POINTS: usize = 1200;
/// How far each arm turns, from the middle to its end.
const TURNS: f64 = 1.25;
/// Points lie up to this far beside their place, in both directions.
const NOISE: f64 = 0.03;

/// Three arms of a spiral with their points in turn, somewhere along the arm, and noise from xorshift64.
fn spirals() -> String {
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let mut text = "x,y,class\n".to_string();
    for number in 0..POINTS {
        let class = number % 3;
        let radius = 0.1 + 0.9 * uniform();
        let angle = TAU * (class as f64 / 3.0 + TURNS * radius);
        let (x, y) = (radius * angle.cos() + NOISE * (2.0 * uniform() - 1.0), radius * angle.sin());
        let y = y + NOISE * (2.0 * uniform() - 1.0);
        writeln!(text, "{x:.3},{y:.3},{class}").expect("memory takes it");
    }
    text
}

/// `BLESS=1 cargo test -p train_rust --test spirals` overwrites the file.
#[test]
fn the_bundled_points_are_those_of_the_generator() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/spirals.csv");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, spirals()).unwrap();
    }
    assert!(std::fs::read_to_string(path).unwrap() == spirals(), "{path} was changed by hand");
}
