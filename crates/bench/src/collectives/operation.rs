//! What is measured: operations, element types, and the bytes that a size stands for.
//!
//! A size means the same as in nccl-tests: the larger of the buffers a rank lends. So `all_gather` of 64 MiB
//! on two ranks gathers 32 MiB from each, and the figures of one size can be compared across operations.

use std::fmt;

use super::layout::Layout;

/// A collective operation, or a point-to-point one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub(crate) enum Operation {
    #[value(alias = "all-reduce", alias = "allreduce")]
    AllReduce,
    Broadcast,
    Reduce,
    #[value(alias = "reduce-scatter")]
    ReduceScatter,
    #[value(alias = "all-gather", alias = "allgather")]
    AllGather,
    #[value(alias = "all-to-all", alias = "alltoall")]
    AllToAll,
    Gather,
    Scatter,
    /// One way: half a round trip between ranks 0 and 1
    #[value(alias = "send-recv")]
    SendRecv,
    Barrier,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::AllToAll => "all_to_all",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::SendRecv => "send_recv",
            Operation::Barrier => "barrier",
        }
    }

    /// Whether every rank has a separate part in the larger buffer.
    fn is_blockwise(self) -> bool {
        matches!(
            self,
            Operation::ReduceScatter
                | Operation::AllGather
                | Operation::AllToAll
                | Operation::Gather
                | Operation::Scatter
        )
    }

    /// The bytes actually used for a requested size: whole elements, and the same number for each rank.
    pub(crate) fn bytes(self, asked: usize, dtype: Dtype, ranks: usize) -> usize {
        match self {
            Operation::Barrier => 0,
            _ if self.is_blockwise() => asked.max(1).next_multiple_of(dtype.size() * ranks),
            _ => asked.max(1).next_multiple_of(dtype.size()),
        }
    }

    /// What makes the bandwidth of an operation comparable with the hardware's, as in nccl-tests: how often
    /// each byte of the larger buffer must cross a link, whatever the algorithm.
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Operation::AllReduce => 2.0 * others,
            _ if self.is_blockwise() => others,
            _ => 1.0,
        }
    }

    /// Operations that one run of the inner loop does: a round trip is two ways.
    pub(crate) fn operations_per_turn(self) -> u64 {
        if self == Operation::SendRecv { 2 } else { 1 }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
    I32,
    I64,
    U8,
}

impl Dtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
        }
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Dtype::U8 => 1,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F64 | Dtype::I64 => 8,
        }
    }
}

/// The memory of a tensor. Only ours can be in memory that peers read in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Memory {
    /// Ordinary memory of the process
    Private,
    /// The group's shared heap, which peers on the host read in place
    Shared,
}

impl Memory {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Memory::Private => "private",
            Memory::Shared => "shared",
        }
    }
}

/// The transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    /// Shared memory of one host
    Shm,
    /// TCP over the loopback interface
    Tcp,
    /// Shared memory within a host and TCP between hosts: with `--hosts`
    #[value(skip)]
    #[serde(rename = "shm+tcp")]
    ByHost,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
            Transport::ByHost => "shm+tcp",
        }
    }
}

/// One line of a table: everything that all implementations have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) operation: Operation,
    pub(crate) dtype: Dtype,
    pub(crate) crew: Crew,
    pub(crate) bytes: usize,
}

impl Point {
    /// The least number of bytes that the busiest direction of a link between hosts must carry, whatever the
    /// algorithm; none on one machine.
    pub(crate) fn link_bytes_least(self) -> Option<f64> {
        let Crew::Hosts(Layout { hosts, ranks_each }) = self.crew else { return None };
        let (bytes, others) = (self.bytes as f64, (hosts - 1) as f64 / hosts as f64);
        Some(match self.operation {
            // Patarasuk and Yuan, for hosts that have added up what their own ranks contribute.
            Operation::AllReduce => 2.0 * others * bytes,
            Operation::AllToAll => ranks_each as f64 * others * bytes,
            operation if operation.is_blockwise() => others * bytes,
            Operation::SendRecv if ranks_each > 1 => 0.0,
            _ => bytes,
        })
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Point { operation, dtype, crew, bytes } = self;
        match operation {
            Operation::Barrier => write!(f, "barrier, {crew}"),
            _ => write!(f, "{operation} {} {bytes} B, {crew}", dtype.name()),
        }
    }
}

/// How many ranks, and on how many hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crew {
    Machine(usize),
    Hosts(Layout),
}

impl Crew {
    pub(crate) fn ranks(self) -> usize {
        match self {
            Crew::Machine(ranks) => ranks,
            Crew::Hosts(layout) => layout.ranks(),
        }
    }

    pub(crate) fn hosts(self) -> usize {
        match self {
            Crew::Machine(_) => 1,
            Crew::Hosts(layout) => layout.hosts,
        }
    }
}

impl fmt::Display for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Crew::Machine(1) => f.write_str("1 rank"),
            Crew::Machine(ranks) => write!(f, "{ranks} ranks"),
            Crew::Hosts(layout) => layout.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn an_operation_is_known_by_the_name_it_prints() {
        for operation in Operation::value_variants() {
            assert_eq!(Operation::from_str(operation.name(), false), Ok(*operation));
            assert_eq!(serde_json::to_value(operation).unwrap(), operation.name());
        }
        for dtype in Dtype::value_variants() {
            assert_eq!(Dtype::from_str(dtype.name(), false), Ok(*dtype));
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
        }
    }

    #[test]
    fn a_size_becomes_whole_elements_alike_for_every_rank() {
        assert_eq!(Operation::AllReduce.bytes(9, Dtype::F32, 3), 12);
        assert_eq!(Operation::AllGather.bytes(8, Dtype::F32, 2), 8);
        assert_eq!(Operation::ReduceScatter.bytes(8, Dtype::F32, 8), 32);
        assert_eq!(Operation::Scatter.bytes(0, Dtype::U8, 3), 3);
        assert_eq!(Operation::Barrier.bytes(64, Dtype::F32, 2), 0);
    }

    #[test]
    fn a_link_must_carry_what_its_host_owes_the_others() {
        let least =
            |operation, crew| Point { operation, dtype: Dtype::F32, crew, bytes: 600 }.link_bytes_least();
        let hosts = Crew::Hosts(Layout { hosts: 3, ranks_each: 2 });
        assert_eq!(least(Operation::AllReduce, hosts), Some(800.0));
        assert_eq!(least(Operation::ReduceScatter, hosts), Some(400.0));
        assert_eq!(least(Operation::AllToAll, hosts), Some(800.0));
        assert_eq!(least(Operation::Broadcast, hosts), Some(600.0));
        assert_eq!(least(Operation::AllReduce, Crew::Machine(6)), None);
    }

    #[test]
    fn bus_bandwidth_is_what_nccl_tests_call_it() {
        assert_eq!(Operation::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Operation::AllGather.bus_factor(4), 0.75);
        assert_eq!(Operation::Broadcast.bus_factor(4), 1.0);
        assert_eq!(Operation::AllReduce.bus_factor(1), 0.0);
    }
}
