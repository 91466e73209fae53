//! Data-parallel training in Rust: candle computes, tenfold keeps the replicas alike.
//!
//! Every rank is a process with a copy of a small network and a part of every batch. candle's gradients go into a `Reducer` and
//! come back as averages over all ranks, so that candle's optimizer makes the same step everywhere.
//!
//! `Group::from_environment` finds the others. Three functions are worth copying: `begin_alike`, `average` (the heart of it), and
//! `check_replicas`. The rest is what any training has.

use std::error::Error;
use std::process::ExitCode;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{
    AdamW, Module, Optimizer as _, ParamsAdamW, Sequential, VarBuilder, VarMap, linear, loss, seq,
};
use clap::Parser as _;
use tenfold::ddp::{self, Param, Reducer};
use tenfold::{Group, Options, ReduceOp};

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
    let parameters = Parameters::of(&variables);
    begin_alike(group, &parameters)?;
    let mut reducer = Reducer::new(group, &parameters.described(), ddp::Options::default())?;
    let options = ParamsAdamW { lr: args.learning_rate, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(parameters.variables.clone(), options)?;

    for epoch in 1..=args.epochs {
        let order = shuffled(training.len(), u64::from(epoch)); // the same on all ranks
        let mut sum = 0.0;
        for batch in order.chunks_exact(own * ranks) {
            let (x, class) = training.tensors(&batch[rank * own..][..own])?;
            let loss = loss::cross_entropy(&network.forward(&x)?, &class)?;
            let mut gradients = loss.backward()?;
            average(&mut reducer, &parameters, &mut gradients)?;
            optimizer.step(&gradients)?;
            sum += loss.to_scalar::<f32>()?;
        }
        let [loss] = over_all_ranks(group, [sum / batches as f32], ReduceOp::Avg)?;
        let accuracy = accuracy(group, &network, &test)?;
        if rank == 0 {
            println!("epoch {epoch:>3}   loss {loss:.4}   accuracy {:5.1} %", accuracy * 100.0);
        }
    }

    let print = check_replicas(group, &parameters.values()?)?;
    if rank == 0 {
        println!("replicas bit-identical: {ranks} of {ranks}, fingerprint {print:016x}");
    }
    Ok(())
}

/// All ranks get the values of rank 0; candle has drawn others on each.
fn begin_alike(group: &Group, parameters: &Parameters) -> Outcome<()> {
    let mut values: Vec<_> =
        parameters.values()?.iter().map(|values| tenfold::Buffer::from_slice(values)).collect();
    let views = values.iter_mut().map(tenfold::Buffer::lend).collect();
    ddp::broadcast_coalesced(group, views, 0, ddp::BROADCAST_BYTES)?;
    for (variable, values) in parameters.variables.iter().zip(&values) {
        variable.set(&Tensor::from_slice(values.as_slice::<f32>(), variable.shape(), &Device::Cpu)?)?;
    }
    Ok(())
}

/// The gradients of this rank's points become those of the whole batch.
///
/// candle hands out all gradients at the end of its backward. With a framework that tells when each of them is there, call
/// `grad_ready` at that time: the first gradients then travel while the others are being computed.
fn average(reducer: &mut Reducer, parameters: &Parameters, gradients: &mut GradStore) -> Outcome<()> {
    reducer.start_backward()?;
    for (number, variable) in parameters.variables.iter().enumerate().rev() {
        let gradient = gradients.get(variable).ok_or("the network does not use all its parameters")?;
        reducer.gradient_mut::<f32>(number)?.copy_from_slice(&gradient.flatten_all()?.to_vec1::<f32>()?);
        reducer.grad_ready(number)?;
    }
    reducer.finish()?;
    for (number, variable) in parameters.variables.iter().enumerate() {
        let average = Tensor::from_slice(reducer.gradient::<f32>(number)?, variable.shape(), &Device::Cpu)?;
        gradients.insert(variable, average);
    }
    Ok(())
}

/// Fails on all ranks, and says which differ, unless all have the same bits. Returns their fingerprint.
fn check_replicas(group: &Group, values: &[Vec<f32>]) -> Outcome<u64> {
    let bits = values.iter().flatten().map(|value| u64::from(value.to_bits()));
    let own = bits.fold(0xcbf2_9ce4_8422_2325, |print, bits| (print ^ bits).wrapping_mul(0x100_0000_01b3)); // FNV-1a
    let mut all = vec![0_u64; group.size()];
    group.all_gather_into(&mut all, &[own])?;
    let others: Vec<usize> = (1..group.size()).filter(|rank| all[*rank] != all[0]).collect();
    if others.is_empty() {
        Ok(own)
    } else {
        Err(format!("ranks {others:?} have other parameters than rank 0").into())
    }
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

/// What is trained, in an order that all ranks have in common. `VarMap::all_vars` has another one in every process.
struct Parameters {
    names: Vec<String>,
    variables: Vec<Var>,
}

impl Parameters {
    fn of(variables: &VarMap) -> Self {
        let variables = variables.data().lock().expect("nobody has panicked with it");
        let mut named: Vec<_> =
            variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect();
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        let (names, variables) = named.into_iter().unzip();
        Parameters { names, variables }
    }

    fn described(&self) -> Vec<Param> {
        let named = self.names.iter().zip(&self.variables);
        named.map(|(name, variable)| Param::new(name, variable.dims(), tenfold::DType::F32)).collect()
    }

    fn values(&self) -> candle_core::Result<Vec<Vec<f32>>> {
        self.variables.iter().map(|variable| variable.flatten_all()?.to_vec1()).collect()
    }
}

/// Places in the plane, and to which spiral they belong.
struct Points(Vec<([f32; 2], u32)>);

impl Points {
    /// For training, and every fifth for the test. See README.md for where they come from.
    fn bundled() -> Outcome<(Points, Points)> {
        let mut parts = (Points(Vec::new()), Points(Vec::new()));
        for (number, line) in include_str!("../spirals.csv").lines().skip(1).enumerate() {
            let fields: Vec<&str> = line.split(',').collect();
            let [x, y, class] = fields[..] else { return Err(format!("`{line}` is no point").into()) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_that_differs_in_one_bit_is_named_on_all_ranks() {
        let verdicts = Group::threads(4, |group| {
            let last = if group.rank() == 2 { 2.0_f32.next_up() } else { 2.0 };
            Ok(check_replicas(&group, &[vec![1.0], vec![0.0, last]]).map_err(|error| error.to_string()))
        });
        assert_eq!(
            verdicts.unwrap(),
            vec![Err("ranks [2] have other parameters than rank 0".to_string()); 4]
        );
        let alike =
            Group::threads(4, |group| Ok(check_replicas(&group, &[vec![1.0], vec![0.0, 2.0]]).is_ok()));
        assert_eq!(alike.unwrap(), [true; 4]);
    }
}
