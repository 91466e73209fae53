use tenfold::{Group, Options, ReduceOp, Tensor};
fn main() {
    let tcp = std::env::args().nth(1).as_deref() == Some("tcp");
    let options = if tcp { Options::default().only_tcp() } else { Options::default() };
    for size in [1, 2, 3, 4, 8] {
        let started = std::time::Instant::now();
        let results = Group::threads_with(size, &options, |group| {
            for n in [0usize, 1, 7, 1000, 1_000_003] {
                let mut tensor = Tensor::from_slice(&vec![group.rank() as f32 + 1.0; n]);
                let work = group.all_reduce(tensor.lend(), ReduceOp::Sum)?;
                work.wait()?;
                let want = (size * (size + 1) / 2) as f32;
                assert!(tensor.as_slice::<f32>().iter().all(|v| *v == want), "{n} {}", work.algorithm());
                group.broadcast(tensor.lend(), size - 1)?.wait()?;
                let mut all = Tensor::zeros(tenfold::DType::F32, n * size);
                group.all_gather_into(all.lend(), tensor.lend())?.wait()?;
                assert!(all.as_slice::<f32>().iter().all(|v| *v == want));
                group.reduce_scatter_into(tensor.lend(), all.lend(), ReduceOp::Avg)?.wait()?;
                assert!(tensor.as_slice::<f32>().iter().all(|v| *v == want), "{n}");
                let mut back = Tensor::zeros(tenfold::DType::F32, n * size);
                group.all_to_all_single(back.lend(), all.lend(), &[], &[])?.wait()?;
                if size > 1 {
                    let next = (group.rank() + 1) % size;
                    let prev = (group.rank() + size - 1) % size;
                    let s = group.send(tensor.lend(), next, 3)?;
                    let mut got = Tensor::zeros(tenfold::DType::F32, n);
                    let r = group.recv(got.lend(), prev, 3)?;
                    s.wait()?;
                    r.wait()?;
                    assert_eq!(got.as_slice::<f32>(), tensor.as_slice::<f32>());
                }
                group.barrier()?.wait()?;
            }
            Ok(group.rank())
        });
        println!("{size}: {results:?} {:?}", started.elapsed());
    }
}
