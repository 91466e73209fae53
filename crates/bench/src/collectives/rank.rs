//! One of our ranks: joins the others, then follows the coordinator's orders.
//!
//! The only file of the benchmark that calls our own collectives; the peers' are in `peers/`.
#![expect(clippy::disallowed_methods, reason = "a rank reads the clock")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tenfold::{Buffer, DType, Group, Options, ReduceOp, Seat, Tag, Work};
use tenfold_store::TcpStore;

use super::super::Failure;
use super::operation::{Dtype, Memory, Operation};
use super::protocol::{BYE, Order};
use super::values::Scene;

/// One rank of ours.
#[derive(Debug, clap::Args)]
pub(crate) struct RankArgs {
    #[arg(long)]
    coordinator: PathBuf,
    #[arg(long)]
    store: SocketAddr,
    #[arg(long)]
    team: String,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    ranks: usize,
}

const ROOT: usize = 0;
const TAG: Tag = Tag(7);

pub(crate) fn run(args: &RankArgs) -> Result<(), Failure> {
    let lost = |error: std::io::Error| Failure::new(format!("lost the coordinator: {error}"));
    let store = TcpStore::connect(&args.store.ip().to_string(), args.store.port()).map_err(failure)?;
    let options = Options::new(args.team.as_str());
    let seat = Seat { rank: args.rank, size: args.ranks };
    let group = Group::connect(Arc::new(store), seat, options).map_err(failure)?;

    let mut coordinator = UnixStream::connect(&args.coordinator).map_err(lost)?;
    let orders = BufReader::new(coordinator.try_clone().map_err(lost)?);
    let mut say = |line: String| coordinator.write_all((line + "\n").as_bytes()).map_err(lost);
    say(format!("hello {} {} tenfold {}", args.team, args.rank, env!("CARGO_PKG_VERSION")))?;

    let mut session = Session { group, rank: args.rank, ranks: args.ranks, buffers: None };
    for line in orders.lines() {
        let line = line.map_err(lost)?;
        if line == BYE.trim_end() {
            break;
        }
        let order = Order::parse(&line).ok_or_else(|| Failure::new(format!("cannot run `{line}`")))?;
        let answer = session.obey(order);
        say(answer.unwrap_or_else(|wrong| format!("wrong {}", wrong.replace('\n', " "))))?;
    }
    Ok(())
}

fn failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(error.to_string())
}

struct Session {
    group: Group,
    rank: usize,
    ranks: usize,
    /// Of the last case: in all its rounds they are touched already.
    buffers: Option<(Order, Buffers)>,
}

impl Session {
    /// The answer, or the error.
    fn obey(&mut self, order: Order) -> Result<String, String> {
        let kept = self.buffers.take().filter(|(known, _)| known.is_same_case(&order));
        let mut buffers = match kept {
            Some((_, buffers)) => buffers,
            None => Buffers::new(&order, self).map_err(|error| error.to_string())?,
        };
        if order.check {
            self.verify(&order, &mut buffers)?;
        }
        let (algorithm, times) = self.measure(&order, &mut buffers).map_err(|error| error.to_string())?;
        self.buffers = Some((order, buffers));
        Ok(format!("done {algorithm} {}", times.join(",")))
    }

    fn scene(&self, order: &Order) -> Scene {
        let Order { operation, dtype, bytes, .. } = *order;
        let (rank, ranks) = (self.rank, self.ranks);
        Scene { operation, dtype, rank, ranks, block: bytes / dtype.size() / ranks }
    }

    fn verify(&self, order: &Order, buffers: &mut Buffers) -> Result<(), String> {
        let scene = self.scene(order);
        scene.fill(buffers.input.as_mut_bytes());
        if let Some(output) = &mut buffers.output {
            output.as_mut_bytes().fill(0xff);
        }
        self.turn(order.operation, buffers).map_err(|error| error.to_string())?;
        let result = buffers.output.as_ref().unwrap_or(&buffers.input);
        let has_result = match order.operation {
            Operation::Barrier => false,
            Operation::Reduce | Operation::Gather => self.rank == ROOT,
            Operation::SendRecv => self.rank < 2,
            _ => true,
        };
        let difference = has_result.then(|| scene.first_difference(result.as_bytes())).flatten();
        // Zeros stay zeros however often they are added.
        buffers.input.as_mut_bytes().fill(0);
        match difference {
            None => Ok(()),
            Some(index) => Err(format!("rank {} has another value at {index} than expected", self.rank)),
        }
    }

    fn measure(&self, order: &Order, buffers: &mut Buffers) -> tenfold::Result<(&'static str, Vec<String>)> {
        self.group.start_barrier()?.wait()?;
        let mut algorithm = "-";
        for _ in 0..order.pace.warmup {
            algorithm = self.turn(order.operation, buffers)?;
        }
        let mut times = Vec::with_capacity(order.pace.batches as usize);
        for _ in 0..order.pace.batches {
            let start = Instant::now();
            for _ in 0..order.pace.iterations {
                self.turn(order.operation, buffers)?;
            }
            times.push(start.elapsed().as_nanos().to_string());
        }
        Ok((algorithm, times))
    }

    /// One turn of the measured loop; returns the algorithm.
    #[inline]
    fn turn(&self, operation: Operation, buffers: &mut Buffers) -> tenfold::Result<&'static str> {
        if operation == Operation::SendRecv {
            return self.bounce(buffers);
        }
        let work = self.submit(operation, buffers)?;
        work.wait()?;
        Ok(if work.algorithm().is_empty() { "-" } else { work.algorithm() })
    }

    #[inline]
    fn submit(&self, operation: Operation, buffers: &mut Buffers) -> tenfold::Result<Work> {
        let (group, is_root) = (&self.group, self.rank == ROOT);
        let Buffers { input, output } = buffers;
        let mut output = || output.as_mut().expect("what is not in place has an output").lend();
        match operation {
            Operation::AllReduce => group.start_all_reduce(input.lend(), ReduceOp::Sum),
            Operation::Broadcast => group.start_broadcast(input.lend(), ROOT),
            Operation::Reduce => group.start_reduce(input.lend(), ReduceOp::Sum, ROOT),
            Operation::ReduceScatter => {
                group.start_reduce_scatter_into(output(), input.lend(), ReduceOp::Sum)
            }
            Operation::AllGather => group.start_all_gather_into(output(), input.lend()),
            Operation::AllToAll => group.start_all_to_all_single(output(), input.lend(), vec![], vec![]),
            Operation::Gather => group.start_gather_into(is_root.then(output), input.lend(), ROOT),
            Operation::Scatter => group.start_scatter_from(output(), is_root.then(|| input.lend()), ROOT),
            Operation::Barrier => group.start_barrier(),
            Operation::SendRecv => unreachable!("two operations, see `bounce`"),
        }
    }

    /// A round trip between ranks 0 and 1.
    #[inline]
    fn bounce(&self, buffers: &mut Buffers) -> tenfold::Result<&'static str> {
        let Buffers { input, output } = buffers;
        let output = output.as_mut().expect("what is not in place has an output");
        match self.rank {
            0 => {
                self.group.start_send(input.lend(), 1, TAG)?.wait()?;
                self.group.start_recv(output.lend(), 1, TAG)?.wait()?;
            }
            1 => {
                self.group.start_recv(output.lend(), 0, TAG)?.wait()?;
                self.group.start_send(output.lend(), 0, TAG)?.wait()?;
            }
            _ => {}
        }
        Ok("-")
    }
}

/// The buffers that a rank lends.
struct Buffers {
    input: Buffer,
    /// None if the result is in place.
    output: Option<Buffer>,
}

impl Buffers {
    fn new(order: &Order, session: &Session) -> tenfold::Result<Self> {
        let dtype = match order.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F64 => DType::F64,
            Dtype::F16 => DType::F16,
            Dtype::Bf16 => DType::BF16,
            Dtype::I32 => DType::I32,
            Dtype::I64 => DType::I64,
            Dtype::U8 => DType::U8,
        };
        let tensor = |elements| match order.memory {
            Memory::Private => Ok(Buffer::zeros(dtype, elements)),
            Memory::Shared => session.group.shared_buffer(dtype, elements),
        };
        let all = order.bytes / order.dtype.size();
        let block = all / session.ranks;
        let (input, output) = match order.operation {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce | Operation::Barrier => {
                (all, None)
            }
            Operation::ReduceScatter | Operation::Scatter => (all, Some(block)),
            Operation::AllGather | Operation::Gather => (block, Some(all)),
            Operation::AllToAll | Operation::SendRecv => (all, Some(all)),
        };
        Ok(Buffers { input: tensor(input)?, output: output.map(tensor).transpose()? })
    }
}
