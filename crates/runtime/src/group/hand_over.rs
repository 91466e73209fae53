//! State for ranks that have joined: many tensors, from all ranks that have them to those that need them.
//!
//! The tensors are cut into pieces, and each source sends every so many-th piece, so a rank that joined is filled by all others
//! together: within a host by as many cores as there are, between hosts over as many connections. First all ranks compare what
//! they are about to move. At the end each target compares a hash of what it received with that of the source, and all ranks
//! learn the outcome.
//!
//! Not here: which ranks need state (see `members`).

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use tenfold_memory::{BufferView, Span, Whole};
use tenfold_plan::Rank;
use twox_hash::XxHash3_64;

use super::Group;
use super::messages::TAG_HAND_OVER as TAG;
use crate::fault::{ErrorKind, Fault, Result, show_ranks};
use crate::label::{Label, OpKind};
use crate::work::Work;

/// What is sent with one message.
const PIECE: usize = 4 << 20;

/// How many messages are under way at a time between two ranks.
const WINDOW: usize = 4;

/// What is hashed at a time: it stays in the nearest cache.
const HASHED: usize = 16 << 10;

/// What a rank does in a hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The source of that number.
    Source(usize),
    Target,
    Neither,
}

impl Group {
    /// Copies tensors from the ranks in `from`, which all have the same values, to the ranks in `to`. All ranks of the group call it
    /// with the same ranks, and with tensors of the same lengths; ranks that are in neither list may give none. Blocks.
    ///
    /// `progress` gets the bytes that this rank has sent or received, and how many there are in all. If the call fails, the tensors
    /// of the ranks in `to` hold anything.
    ///
    /// ```
    /// use tenfold::{Buffer, Group};
    ///
    /// Group::threads(3, |group| {
    ///     let value = if group.rank() == 1 { 0.0 } else { 7.5 }; // rank 1 has joined
    ///     let mut weights = Buffer::from_slice(&[value; 1000]);
    ///     group.hand_over(vec![weights.lend()], &[0, 2], &[1], |done, all| assert!(done <= all))?;
    ///     assert_eq!(weights.as_slice::<f64>(), [7.5; 1000]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), tenfold::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a rank is out of range or in both lists, tensors differ in length or lie in memory with gaps, a rank dies, or a target received something else
    /// than the source has sent.
    pub fn hand_over(
        &self,
        tensors: Vec<BufferView>,
        from: &[Rank],
        to: &[Rank],
        mut progress: impl FnMut(u64, u64),
    ) -> Result<()> {
        let label = Label::new(OpKind::HandOver, 0);
        let role = self.check_hand_over(&label, &tensors, from, to)?;
        self.compare_tensors(&label, role, &tensors, from, to)?;
        if to.is_empty() {
            return Ok(());
        }
        let outcome = match role {
            Role::Neither => Ok(Vec::new()),
            Role::Source(number) => self.hand_out(tensors, number, from.len(), to, &mut progress),
            Role::Target => self.take_over(tensors, from, &mut progress),
        };
        self.compare_hashes(&label, role, outcome?, from)
    }

    fn check_hand_over(
        &self,
        label: &Label,
        tensors: &[BufferView],
        from: &[Rank],
        to: &[Rank],
    ) -> Result<Role> {
        for rank in from.iter().chain(to) {
            self.check_root(label, *rank, "rank")?;
        }
        if let Some(both) = from.iter().find(|rank| to.contains(rank)) {
            return self.refuse(label, format!("rank {both} is both a source and a target"));
        }
        if from.is_empty() && !to.is_empty() {
            return self.refuse(label, format!("no source is given for {}", show_ranks(to)));
        }
        if let Some(at) = tensors.iter().position(|tensor| !tensor.is_contiguous()) {
            return self.refuse(label, format!("tensor {at} is not contiguous"));
        }
        let own = self.rank();
        Ok(match from.iter().position(|rank| *rank == own) {
            Some(number) => Role::Source(number),
            None if to.contains(&own) => Role::Target,
            None => Role::Neither,
        })
    }

    /// All sources and targets have the same tensors, and all ranks the same lists.
    fn compare_tensors(
        &self,
        label: &Label,
        role: Role,
        tensors: &[BufferView],
        from: &[Rank],
        to: &[Rank],
    ) -> Result<()> {
        let bytes: usize = tensors.iter().map(BufferView::byte_len).sum();
        let mut hasher = DefaultHasher::new();
        for tensor in tensors {
            (tensor.dtype() as u8, tensor.elements()).hash(&mut hasher);
        }
        let shapes = hasher.finish() as i64;
        let mut hasher = DefaultHasher::new();
        (from, to).hash(&mut hasher);
        let lists = hasher.finish() as i64;
        let takes_part = i64::from(role != Role::Neither);
        let all = self.exchange(&[takes_part, tensors.len() as i64, bytes as i64, shapes, lists])?;
        let takes_part = |rank: &Rank| all[*rank][0] != 0;
        let others = |is_odd: &dyn Fn(Rank) -> bool| (0..all.len()).find(|rank| is_odd(*rank));
        if let Some(odd) = others(&|rank| all[rank][4] != all[0][4]) {
            let message = format!("rank {odd} names other sources or targets than rank 0");
            return Err(self.hand_over_error(label, Fault::new(ErrorKind::Mismatch, message).peer(odd)));
        }
        let Some(first) = (0..all.len()).find(takes_part) else { return Ok(()) };
        let Some(odd) = others(&|rank| takes_part(&rank) && all[rank][1..4] != all[first][1..4]) else {
            return Ok(());
        };
        let show = |rank: Rank| format!("tensors: {}, bytes: {}", all[rank][1], all[rank][2]);
        let mut message = format!("rank {odd} has {}; rank {first} has {}", show(odd), show(first));
        if all[odd][1..3] == all[first][1..3] {
            message.push_str(", of other lengths or dtypes");
        }
        let fault = Fault::new(ErrorKind::Mismatch, message).peer(odd);
        Err(self.hand_over_error(label, fault.hint("all ranks need the same model and optimizer")))
    }

    /// Sends every piece whose turn it is to all targets. Returns the hash of what it sent.
    fn hand_out(
        &self,
        tensors: Vec<BufferView>,
        number: usize,
        sources: usize,
        to: &[Rank],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<i64>> {
        let hash = hash_of(&tensors, number, sources);
        let mut counter = Counter::new(&tensors, |piece| piece % sources == number, to.len());
        let mut tensors = tensors;
        for target in to {
            let (pieces, wholes) = cut(tensors);
            let mut window = Window::default();
            for piece in pieces.into_iter().skip(number).step_by(sources) {
                let bytes = piece.byte_len();
                if let Some(sent) = window.push(self.send_tagged(piece, *target, TAG)?, bytes)? {
                    counter.add(sent, progress);
                }
            }
            window.finish(|sent| counter.add(sent, progress))?;
            tensors = given_back(wholes);
        }
        Ok(vec![hash])
    }

    /// Receives from all sources in turns. Returns the hashes of what came from each.
    fn take_over(
        &self,
        tensors: Vec<BufferView>,
        from: &[Rank],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<i64>> {
        let mut counter = Counter::new(&tensors, |_| true, 1);
        let (pieces, wholes) = cut(tensors);
        let mut windows: Vec<Window> = from.iter().map(|_| Window::default()).collect();
        for (number, piece) in pieces.into_iter().enumerate() {
            let (bytes, at) = (piece.byte_len(), number % from.len());
            if let Some(received) = windows[at].push(self.recv_tagged(piece, from[at], TAG)?, bytes)? {
                counter.add(received, progress);
            }
        }
        for window in &mut windows {
            window.finish(|received| counter.add(received, progress))?;
        }
        let tensors = given_back(wholes);
        Ok((0..from.len()).map(|source| hash_of(&tensors, source, from.len())).collect())
    }

    /// Do all targets have what the sources have sent?
    fn compare_hashes(&self, label: &Label, role: Role, hashes: Vec<i64>, from: &[Rank]) -> Result<()> {
        let sent = self.exchange(&[hashes.first().copied().unwrap_or(0)])?;
        let wrong =
            from.iter().enumerate().find(|(number, source)| hashes.get(*number) != Some(&sent[**source][0]));
        let wrong = wrong.filter(|_| role == Role::Target).map_or(-1, |(_, source)| *source as i64);
        let outcomes = self.exchange(&[wrong])?;
        let Some((target, [source])) = outcomes.iter().enumerate().find(|(_, [wrong])| *wrong >= 0) else {
            return Ok(());
        };
        let message =
            format!("what rank {target} received from rank {source} is not what rank {source} has sent");
        let fault = Fault::new(ErrorKind::Mismatch, message).peer(target);
        let hint =
            "check that no thread changes the tensors meanwhile; otherwise memory or network is faulty";
        Err(self.hand_over_error(label, fault.hint(hint)))
    }

    #[cold]
    fn hand_over_error(&self, label: &Label, fault: Fault) -> crate::Error {
        self.error(*label, fault)
    }
}

/// All pieces of all tensors, in order, and what gives the tensors back.
fn cut(tensors: Vec<BufferView>) -> (Vec<BufferView>, Vec<Whole>) {
    let (pieces, wholes): (Vec<_>, Vec<_>) = tensors.into_iter().map(|tensor| tensor.cut(PIECE)).unzip();
    (pieces.into_iter().flatten().collect(), wholes)
}

/// The thread that ended an operation may be about to drop its view.
fn given_back(wholes: Vec<Whole>) -> Vec<BufferView> {
    let back = |mut whole: Whole| loop {
        match whole.back() {
            Ok(view) => return view,
            Err(again) => whole = again,
        }
        std::thread::yield_now();
    };
    wholes.into_iter().map(back).collect()
}

/// The hash of the pieces that one source sends.
fn hash_of(tensors: &[BufferView], number: usize, sources: usize) -> i64 {
    let mut hasher = XxHash3_64::new();
    let mut copy = [0; HASHED];
    let mut piece = 0;
    for tensor in tensors {
        let len = tensor.byte_len();
        for start in (0..len).step_by(PIECE) {
            let end = len.min(start + PIECE);
            if piece % sources == number {
                for at in (start..end).step_by(HASHED) {
                    let part = tensor.bytes().part(at, end.min(at + HASHED));
                    let copy = &mut copy[..part.len()];
                    Span::of(copy).copy_from(part);
                    hasher.write(copy);
                }
            }
            piece += 1;
        }
    }
    hasher.finish() as i64
}

/// Messages of one direction, the oldest first.
#[derive(Default)]
struct Window(std::collections::VecDeque<(Work, usize)>);

impl Window {
    /// Adds a message, and waits for the oldest if there are too many. Returns the bytes of the one that is over.
    fn push(&mut self, work: Work, bytes: usize) -> Result<Option<usize>> {
        self.0.push_back((work, bytes));
        if self.0.len() <= WINDOW { Ok(None) } else { self.pop() }
    }

    fn pop(&mut self) -> Result<Option<usize>> {
        let Some((work, bytes)) = self.0.pop_front() else { return Ok(None) };
        work.wait()?;
        Ok(Some(bytes))
    }

    fn finish(&mut self, mut done: impl FnMut(usize)) -> Result<()> {
        while let Some(bytes) = self.pop()? {
            done(bytes);
        }
        Ok(())
    }
}

struct Counter {
    done: u64,
    all: u64,
}

impl Counter {
    fn new(tensors: &[BufferView], is_mine: impl Fn(usize) -> bool, times: usize) -> Self {
        let lengths = tensors.iter().flat_map(|tensor| {
            let len = tensor.byte_len();
            (0..len).step_by(PIECE).map(move |start| PIECE.min(len - start) as u64)
        });
        let mine = lengths.enumerate().filter(|(piece, _)| is_mine(*piece));
        Counter { done: 0, all: mine.map(|(_, bytes)| bytes).sum::<u64>() * times as u64 }
    }

    fn add(&mut self, bytes: usize, progress: &mut dyn FnMut(u64, u64)) {
        self.done += bytes as u64;
        progress(self.done, self.all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenfold_memory::Buffer;

    #[test]
    fn the_hash_covers_every_byte_of_the_pieces_of_a_source_and_no_other() {
        let elements = 2 * PIECE + PIECE / 2;
        let mut buffers =
            [Buffer::zeros(tenfold_memory::DType::U8, elements), Buffer::from_slice(&[7_u8; 3])];
        let hashes = |buffers: &mut [Buffer; 2]| {
            let views: Vec<BufferView> = buffers.iter_mut().map(Buffer::lend).collect();
            [0, 1].map(|source| hash_of(&views, source, 2))
        };
        let before = hashes(&mut buffers);
        // Source 0 sends pieces 0 and 2 of the first tensor, source 1 the other one and the second tensor.
        for (buffer, byte, source) in
            [(0, 0, 0), (0, PIECE - 1, 0), (0, PIECE, 1), (0, elements - 1, 0), (1, 0, 1), (1, 2, 1)]
        {
            buffers[buffer].as_mut_slice::<u8>()[byte] ^= 1;
            let now = hashes(&mut buffers);
            buffers[buffer].as_mut_slice::<u8>()[byte] ^= 1;
            assert_ne!(now[source], before[source], "byte {byte} of tensor {buffer}");
            assert_eq!(now[1 - source], before[1 - source], "byte {byte} of tensor {buffer}");
        }
    }

    #[test]
    fn all_ranks_are_told_which_target_received_something_else_from_which_source() {
        let errors = Group::threads(3, |group| {
            let label = Label::new(OpKind::HandOver, 0);
            let (role, hashes) = match group.rank() {
                0 => (Role::Source(0), vec![1]),
                1 => (Role::Source(1), vec![2]),
                _ => (Role::Target, vec![1, 3]),
            };
            Ok(group.compare_hashes(&label, role, hashes, &[0, 1]).unwrap_err().to_string())
        });
        for error in errors.unwrap() {
            let what = "what rank 2 received from rank 1 is not what rank 1 has sent";
            assert!(error.contains(what), "{error}");
        }
    }
}
