//! How fast reductions are, in bytes moved per second, next to a copy of the same bytes.
//!
//! ```text
//! cargo run --release -p tenfold-memory --example kernel_speed [LEVEL]
//! ```
//!
//! A row per operation, dtype and number of sources; a column per size of one source. What is counted is every source
//! read and the target written; a copy reads one and writes one. The best of several rounds is shown, because what
//! disturbs a round only ever makes it slower.

#![expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]

use std::time::Instant;

use tenfold_memory::{Bytes, DType, Level, ReduceOp, Reduction, Span};

const SIZES: [usize; 3] = [16 << 10, 128 << 10, 16 << 20];
const ROUNDS: usize = 7;
/// Bytes of one source that a round covers, by repetition.
const ROUND: usize = 64 << 20;
/// Neither subnormal nor infinite as an element of any dtype, and written, so that each page is memory of its own.
const ORDINARY: u8 = 0x3c;

fn main() {
    let level = level_asked_for();
    println!("{level:?}, GB/s          sources    16 KiB   128 KiB    16 MiB");
    let copied = SIZES.map(|size| measure(size, 1, |target, sources| target.copy_from(sources[0])));
    print_row("copy", "", 1, copied);
    let sums = [DType::F32, DType::F64, DType::BF16, DType::F16].map(|dtype| (ReduceOp::Sum, dtype));
    for (op, dtype) in &sums {
        for sources in [2, 3, 4, 8] {
            print_reduction(op, *dtype, sources, level);
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        print_reduction(&ReduceOp::Avg, dtype, 2, level);
        print_reduction(&ReduceOp::Avg, dtype, 3, level);
    }
    for dtype in DType::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Bxor] {
            let is_shown = sums.contains(&(op.clone(), dtype));
            if tenfold_memory::supports(&op, dtype) && !is_shown {
                print_reduction(&op, dtype, 2, level);
            }
        }
    }
}

fn level_asked_for() -> Level {
    let Some(name) = std::env::args().nth(1) else { return Level::best() };
    let named = |level: &Level| format!("{level:?}").eq_ignore_ascii_case(&name);
    Level::ALL.into_iter().find(named).expect("a level is `plain`, `avx2` or `avx512`")
}

fn print_reduction(op: &ReduceOp, dtype: DType, sources: usize, level: Level) {
    let reduction = Reduction::with_level(op, dtype, sources, level).expect("the pair is supported");
    let speeds =
        SIZES.map(|size| measure(size, sources, |target, sources| reduction.combine(target, sources, true)));
    print_row(op.name(), dtype.name(), sources, speeds);
}

fn print_row(op: &str, dtype: &str, sources: usize, speeds: [f64; 3]) {
    let [small, middle, large] = speeds;
    println!("{op:8} {dtype:16} {sources:5} {small:9.1} {middle:9.1} {large:9.1}");
}

/// GB/s of the fastest round.
fn measure(size: usize, count: usize, run: impl Fn(Span<'_>, &[Bytes<'_>])) -> f64 {
    let sources: Vec<Vec<u8>> = (0..count).map(|_| vec![ORDINARY; size]).collect();
    let sources: Vec<Bytes<'_>> = sources.iter().map(|source| Bytes::of(source)).collect();
    let mut target = vec![ORDINARY; size];
    let target = Span::of(&mut target);
    let repetitions = ROUND / size;
    let round = |_| {
        let begin = Instant::now();
        for _ in 0..repetitions {
            run(target, std::hint::black_box(&sources));
        }
        begin.elapsed().as_secs_f64()
    };
    let fastest = (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min);
    (repetitions * size * (count + 1)) as f64 / fastest / 1e9
}
