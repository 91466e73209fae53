//! Runs one kernel a number of times, for a tool that counts instructions: see `benches/instructions`.
//!
//! ```text
//! kernel_once LEVEL OP DTYPE SOURCES BYTES TIMES
//! ```

use std::hint::black_box;

use tenfold_memory::{Bytes, DType, Level, ReduceOp, Reduction, Span};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [level, op, dtype, sources, bytes, times] = &words[..] else {
        panic!("kernel_once LEVEL OP DTYPE SOURCES BYTES TIMES");
    };
    let named = |known: &Level| format!("{known:?}").eq_ignore_ascii_case(level);
    let level = Level::ALL.into_iter().find(named).expect("a level is `plain`, `avx2` or `avx512`");
    let op: ReduceOp = op.parse().expect("a built-in operation");
    let dtype: DType = dtype.parse().expect("a dtype");
    let sources: usize = sources.parse().expect("a number of sources");
    let bytes: usize = bytes.parse().expect("a number of bytes");
    let times: usize = times.parse().expect("a number of times");
    let reduction = Reduction::with_level(&op, dtype, sources, level).expect("the pair is supported");

    let sources = vec![vec![0x3c; bytes]; sources];
    let sources: Vec<Bytes<'_>> = sources.iter().map(|source| Bytes::of(source)).collect();
    let mut target = vec![0; bytes];
    counted(&reduction, Span::of(&mut target), &sources, times);
}

/// A function by itself, so that counting can begin and end with it.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted(reduction: &Reduction, target: Span<'_>, sources: &[Bytes<'_>], times: usize) {
    for _ in 0..times {
        reduction.combine(black_box(target), black_box(sources), true);
    }
}
