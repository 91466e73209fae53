//! The lines that the coordinator and a rank exchange, the same for ours, Gloo's and every MPI's.
//!
//! A rank sends `hello`, then blocks in a read, so that it takes no time from the implementation whose turn
//! it is. Each order is one line, and so is its answer. Lines of words, because one of the readers is written
//! in C.

use std::fmt;

use clap::ValueEnum as _;

use super::operation::{Dtype, Memory, Operation, Point};

/// What a rank is asked to run: `run OP DTYPE BYTES MEMORY CHECK WARMUP BATCHES ITERATIONS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) operation: Operation,
    pub(crate) dtype: Dtype,
    pub(crate) bytes: usize,
    pub(crate) memory: Memory,
    /// Run it once with known values first, and refuse to measure wrong results.
    pub(crate) check: bool,
    pub(crate) pace: Pace,
}

/// How long the inner loop is. Each batch has its own time, of all its turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) warmup: u64,
    pub(crate) batches: u64,
    pub(crate) iterations: u64,
}

/// The order that ends a rank; without it, the end of the connection means that the coordinator died.
pub(crate) const BYE: &str = "bye\n";

impl Order {
    pub(crate) fn new(point: Point, memory: Memory, check: bool, pace: Pace) -> Self {
        let Point { operation, dtype, bytes, .. } = point;
        Order { operation, dtype, bytes, memory, check, pace }
    }

    pub(crate) fn parse(line: &str) -> Option<Order> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["run", operation, dtype, bytes, memory, check, warmup, batches, iterations] = words[..] else {
            return None;
        };
        Some(Order {
            operation: Operation::from_str(operation, false).ok()?,
            dtype: Dtype::from_str(dtype, false).ok()?,
            bytes: bytes.parse().ok()?,
            memory: Memory::from_str(memory, false).ok()?,
            check: check == "1",
            pace: Pace {
                warmup: warmup.parse().ok()?,
                batches: batches.parse().ok()?,
                iterations: iterations.parse().ok()?,
            },
        })
    }

    /// Whether it needs the same buffers.
    pub(crate) fn is_same_case(&self, other: &Order) -> bool {
        let case = |order: &Order| (order.operation, order.dtype, order.bytes, order.memory);
        case(self) == case(other)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Order { operation, dtype, bytes, memory, check, pace } = self;
        let Pace { warmup, batches, iterations } = pace;
        let check = u8::from(*check);
        write!(f, "run {operation} {} {bytes} {} {check} ", dtype.name(), memory.name())?;
        write!(f, "{warmup} {batches} {iterations}")
    }
}

/// The answer of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// `hello TEAM RANK VERSION`: it has joined its peers and waits for orders.
    Hello { team: String, rank: usize, version: String },
    /// `missing REASON`: it cannot take part at all, as when Python has no torch.
    Missing(String),
    /// `done ALGORITHM NS,NS,…`: the time of each batch; `-` stands for an unknown algorithm.
    Done { algorithm: Option<String>, batches: Vec<u64> },
    /// `cannot REASON`: this implementation has no such case; the others may.
    Cannot(String),
    /// `wrong REASON`: the results of this run cannot be trusted.
    Wrong(String),
}

impl Answer {
    pub(crate) fn parse(line: &str) -> Option<Answer> {
        let (word, rest) = line.trim_end().split_once(' ')?;
        match word {
            "hello" => {
                let mut words = rest.splitn(3, ' ');
                let (team, rank) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
                Some(Answer::Hello {
                    team,
                    rank,
                    version: words.next().unwrap_or_default().trim().to_owned(),
                })
            }
            "missing" => Some(Answer::Missing(rest.to_owned())),
            "done" => {
                let (algorithm, times) = rest.split_once(' ')?;
                let batches = times.split(',').map(|time| time.parse().ok()).collect::<Option<_>>()?;
                let algorithm = (algorithm != "-").then(|| algorithm.to_owned());
                Some(Answer::Done { algorithm, batches })
            }
            "cannot" => Some(Answer::Cannot(rest.to_owned())),
            "wrong" => Some(Answer::Wrong(rest.to_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::operation::Crew;
    use super::*;

    #[test]
    fn an_order_is_one_line_of_words() {
        let crew = Crew::Machine(2);
        let point = Point { operation: Operation::AllReduce, dtype: Dtype::Bf16, crew, bytes: 4096 };
        let pace = Pace { warmup: 5, batches: 10, iterations: 700 };
        let order = Order::new(point, Memory::Shared, true, pace);
        assert_eq!(order.to_string(), "run all_reduce bf16 4096 shared 1 5 10 700");
        assert_eq!(Order::parse(&order.to_string()), Some(order));
        assert_eq!(Order::parse("run all_reduce bf16 4096 shared 1 5 10"), None);
    }

    #[test]
    fn answers_are_read_and_invalid_ones_are_refused() {
        let hello = Answer::Hello { team: "t1".into(), rank: 3, version: "Open MPI v4.1.4".into() };
        assert_eq!(Answer::parse("hello t1 3 Open MPI v4.1.4\n"), Some(hello));
        let done = Answer::Done { algorithm: Some("ring".into()), batches: vec![10, 20] };
        assert_eq!(Answer::parse("done ring 10,20\n"), Some(done));
        assert_eq!(Answer::parse("done - 7\n"), Some(Answer::Done { algorithm: None, batches: vec![7] }));
        assert_eq!(Answer::parse("cannot it has no bf16\n"), Some(Answer::Cannot("it has no bf16".into())));
        for wrong in ["", "hello", "hello t1 x y", "done ring", "done ring 1,x", "done - ", "howdy you"] {
            assert_eq!(Answer::parse(wrong), None, "{wrong}");
        }
    }
}
