use tenfold::{DType, Group, ReduceOp, Tensor};
fn main() {
    let n: usize = std::env::args().nth(1).map_or(1000, |a| a.parse().unwrap());
    Group::threads(1, |group| {
        let mut t = Tensor::zeros(DType::F32, 2);
        let s = std::time::Instant::now();
        for _ in 0..n { group.all_reduce(t.lend(), ReduceOp::Sum)?.wait()?; }
        println!("{:.1} ns", s.elapsed().as_secs_f64() * 1e9 / n as f64);
        Ok(())
    }).unwrap();
}
