//! What a collective costs that has nobody to wait for: `overhead [TIMES]`. Under `valgrind --tool=callgrind` it counts the
//! instructions of the path of an 8-byte all-reduce, without the messages.

#![expect(clippy::disallowed_methods, reason = "measures time")]

use std::time::Instant;

use tenfold::{Buffer, DType, Group, ReduceOp};

fn main() -> tenfold::Result<()> {
    let times: u32 = std::env::args().nth(1).map_or(1000, |times| times.parse().expect("a number of times"));
    Group::threads(1, |group| {
        let mut tensor = Buffer::zeros(DType::F32, 2);
        let start = Instant::now();
        for _ in 0..times {
            group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
        }
        println!("{:?} each", start.elapsed() / times);
        Ok(())
    })?;
    Ok(())
}
