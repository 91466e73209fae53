use tenfold::{DType, Group, Options, ReduceOp, Tensor};
fn main() {
    let mut args = std::env::args().skip(1);
    let size: usize = args.next().map_or(2, |a| a.parse().unwrap());
    let tcp = args.next().as_deref() == Some("tcp");
    let options = if tcp { Options::default().only_tcp() } else { Options::default() };
    let r = Group::threads_with(size, &options, |group| {
        let mut rows = Vec::new();
        for bytes in [8usize, 512, 4096, 32768, 262144, 2 << 20, 16 << 20, 64 << 20] {
            for shared in [false, true] {
                let mut t = if shared {
                    group.shared_tensor(DType::F32, bytes / 4)?
                } else {
                    Tensor::zeros(DType::F32, bytes / 4)
                };
                t.as_mut_slice::<f32>().fill(0.0);
                let iters = (if bytes < 100_000 { 20000 } else { (400usize << 20) / bytes }).max(5);
                let mut best = f64::MAX;
                for _ in 0..5 {
                    group.barrier()?.wait()?;
                    let s = std::time::Instant::now();
                    for _ in 0..iters / 5 {
                        group.all_reduce(t.lend(), ReduceOp::Sum)?.wait()?;
                    }
                    best = best.min(s.elapsed().as_secs_f64() * 1e6 / (iters / 5) as f64);
                }
                rows.push((bytes, shared, best));
            }
        }
        Ok(rows)
    })
    .unwrap();
    for (b, s, t) in &r[0] {
        println!("{b:>10} {} {t:.3} us", if *s { "shared " } else { "private" });
    }
}
