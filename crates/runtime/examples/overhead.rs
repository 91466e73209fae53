//! What a collective costs that has no other rank to wait for: `overhead [TIMES] [slice]`. Under `valgrind --tool=callgrind` it
//! counts the instructions of the path of an 8-byte all-reduce, without the messages: of a view, or of a borrowed slice.

#![expect(clippy::disallowed_methods, reason = "measures time")]

use std::time::Instant;

use tenfold::{Buffer, DType, Group, ReduceOp};

fn main() -> tenfold::Result<()> {
    let times: u32 = std::env::args().nth(1).map_or(1000, |times| times.parse().expect("a number of times"));
    let is_slice = std::env::args().nth(2).is_some_and(|kind| kind == "slice");
    Group::threads(1, |group| {
        let (mut tensor, mut values) = (Buffer::zeros(DType::F32, 2), [0.0_f32; 2]);
        let start = Instant::now();
        for _ in 0..times {
            if is_slice {
                group.all_reduce(&mut values, ReduceOp::Sum)?;
            } else {
                group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
            }
        }
        println!("{:?} each", start.elapsed() / times);
        Ok(())
    })?;
    Ok(())
}
