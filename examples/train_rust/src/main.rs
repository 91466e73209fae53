//! Data-parallel training in Rust: candle computes, tenfold keeps the replicas alike.
//!
//! Every rank is a process with a copy of a small network and a part of every batch. `DataParallel` averages candle's gradients
//! over all ranks, so that candle's optimizer makes the same step everywhere.
//!
//! `Group::from_environment` finds the others. The lines with `parallel` are all that data parallelism adds to the training.

use std::error::Error;
use std::process::ExitCode;

use candle_core::{DType, Device, Tensor};
use candle_nn::{
    AdamW, Module, Optimizer as _, ParamsAdamW, Sequential, VarBuilder, VarMap, linear, loss, seq,
};
use clap::Parser as _;
use tenfold::{Group, Options, ReduceOp};
use tenfold_candle::DataParallel;

/// Trains a small network on three spirals, on as many ranks as `tenfold run` starts
#[derive(clap::Parser)]
#[command(after_help = "Examples:
  tenfold run -n 4 examples/train_rust/target/release/train_rust
  tenfold run -n 2 examples/train_rust/target/release/train_rust --epochs 50 --batch 32")]
struct Args {
    /// How often all points are seen
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Points in a batch, of all ranks together
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Of AdamW
    #[arg(long, default_value_t = 0.01)]
    learning_rate: f64,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let args = Args::parse();
    let joined = Group::from_environment(Options::default()); // all that is needed under `tenfold run`, or torchrun
    match joined.map_err(Into::into).and_then(|group| train(&group, &args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn train(group: &Group, args: &Args) -> Outcome<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let (training, test) = Points::bundled()?;
    let own = (args.batch as usize / ranks).max(1); // points of a batch that are this rank's
    let batches = training.len() / (own * ranks);
    if batches == 0 {
        return Err(format!("{} points are too few for {ranks} ranks with {own} each", training.len()).into());
    }

    let variables = VarMap::new();
    let network = network(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let mut parallel = DataParallel::new(group, &variables)?; // candle has drawn other values on each rank: rank 0's count
    let options = ParamsAdamW { lr: args.learning_rate, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(parallel.variables().to_vec(), options)?;

    for epoch in 1..=args.epochs {
        let order = shuffled(training.len(), u64::from(epoch)); // the same on all ranks
        let mut sum = 0.0;
        for batch in order.chunks_exact(own * ranks) {
            let (x, class) = training.tensors(&batch[rank * own..][..own])?;
            let loss = loss::cross_entropy(&network.forward(&x)?, &class)?;
            parallel.backward_step(&loss, &mut optimizer)?; // with the gradients of the whole batch
            sum += loss.to_scalar::<f32>()?;
        }
        let [loss] = over_all_ranks(group, [sum / batches as f32], ReduceOp::Avg)?;
        let accuracy = accuracy(group, &network, &test)?;
        if rank == 0 {
            println!("epoch {epoch:>3}   loss {loss:.4}   accuracy {:5.1} %", accuracy * 100.0);
        }
    }

    let print = parallel.check_replicas()?;
    if rank == 0 {
        println!("replicas bit-identical: {ranks} of {ranks}, fingerprint {print:016x}");
    }
    Ok(())
}

/// Numbers of each rank, combined.
fn over_all_ranks<const N: usize>(group: &Group, mut numbers: [f32; N], op: ReduceOp) -> Outcome<[f32; N]> {
    group.all_reduce(&mut numbers, op)?;
    Ok(numbers)
}

/// The part of all test points that the network puts where they belong; each rank looks at its own share.
fn accuracy(group: &Group, network: &Sequential, test: &Points) -> Outcome<f32> {
    let share: Vec<usize> = (group.rank()..test.len()).step_by(group.size()).collect();
    let right = if share.is_empty() {
        0.0
    } else {
        let (x, class) = test.tensors(&share)?;
        network.forward(&x)?.argmax(1)?.eq(&class)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?
    };
    let [right] = over_all_ranks(group, [right], ReduceOp::Sum)?;
    Ok(right / test.len() as f32)
}

fn network(variables: VarBuilder<'_>) -> candle_core::Result<Sequential> {
    Ok(seq()
        .add(linear(2, 64, variables.pp("hidden1"))?)
        .add(|x: &Tensor| x.relu())
        .add(linear(64, 64, variables.pp("hidden2"))?)
        .add(|x: &Tensor| x.relu())
        .add(linear(64, 3, variables.pp("output"))?))
}

/// Places in the plane, and to which spiral they belong.
struct Points(Vec<([f32; 2], u32)>);

impl Points {
    /// For training, and every fifth for the test. See README.md for where they come from.
    fn bundled() -> Outcome<(Points, Points)> {
        let mut parts = (Points(Vec::new()), Points(Vec::new()));
        for (number, line) in include_str!("../spirals.csv").lines().skip(1).enumerate() {
            let fields: Vec<&str> = line.split(',').collect();
            let [x, y, class] = fields[..] else {
                return Err(format!("invalid point `{line}`: expected x,y,class").into());
            };
            let part = if number % 5 == 4 { &mut parts.1 } else { &mut parts.0 };
            part.0.push(([x.parse()?, y.parse()?], class.parse()?));
        }
        Ok(parts)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn tensors(&self, chosen: &[usize]) -> candle_core::Result<(Tensor, Tensor)> {
        let places: Vec<f32> = chosen.iter().flat_map(|number| self.0[*number].0).collect();
        let classes: Vec<u32> = chosen.iter().map(|number| self.0[*number].1).collect();
        Ok((Tensor::from_vec(places, (chosen.len(), 2), &Device::Cpu)?, Tensor::new(classes, &Device::Cpu)?))
    }
}

/// All numbers below `count`, in an order that follows from the seed.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut order: Vec<usize> = (0..count).collect();
    for place in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(place, (state % (place as u64 + 1)) as usize);
    }
    order
}
