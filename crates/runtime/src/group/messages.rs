//! Messages between two ranks, and the barrier that is made of them.

use std::sync::Arc;
use std::time::Duration;

use tenfold_memory::{Buffer, BufferView, DType};
use tenfold_plan::Rank;

use super::Group;
use super::point_to_point::Receiving;
use super::state::GroupState;
use super::submit::refused;
use super::trouble::detail::Detail;
use crate::debug;
use crate::engine::Urgency;
use crate::fault::{ErrorKind, Fault, Result, show_duration, show_ranks};
use crate::label::{Label, OpKind};
use crate::recorder::{self, Sizes};
use crate::work::{Recorded, Shared, Work};

/// Tags from here on are for tenfold itself.
const TAGS_RESERVED: u32 = u32::MAX - 15;

pub(super) const TAG_HAND_OVER: u32 = TAGS_RESERVED + 1;

impl Group {
    pub(crate) fn begin_send(&self, tensor: BufferView, to: Rank, tag: u32) -> Result<Work> {
        self.check_tag(OpKind::Send, tag)?;
        if self.inner.checks_numbers {
            let label = Label::new(OpKind::Send, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
            self.check_tensors(&label, std::iter::once(&tensor))?;
        }
        self.send_tagged(tensor, to, tag)
    }

    pub(super) fn send_tagged(&self, tensor: BufferView, to: Rank, tag: u32) -> Result<Work> {
        let label = Label::new(OpKind::Send, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
        self.check_peer(&label, to)?;
        self.check_contiguous(&label, &tensor)?;
        self.message(label, Some(to), |state, work| {
            state.messages.send(work, tensor, to);
        })
    }

    pub(crate) fn begin_recv(&self, tensor: BufferView, from: Rank, tag: u32) -> Result<Work> {
        self.check_tag(OpKind::Recv, tag)?;
        self.recv_tagged(tensor, from, tag)
    }

    pub(super) fn recv_tagged(&self, tensor: BufferView, from: Rank, tag: u32) -> Result<Work> {
        let label = Label::new(OpKind::Recv, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
        self.check_peer(&label, from)?;
        self.check_contiguous(&label, &tensor)?;
        self.message(label, Some(from), |state, work| {
            state.messages.receive(Receiving { work, view: tensor, from: Some(from), tag });
        })
    }

    pub(crate) fn begin_recv_any(&self, tensor: BufferView, tag: u32) -> Result<Work> {
        let label = Label::new(OpKind::RecvAnySource, 0).elements(tensor.dtype(), tensor.elements()).tag(tag);
        self.check_tag(OpKind::RecvAnySource, tag)?;
        if self.size() == 1 {
            return self.refuse(&label, "there is no other rank in the group to receive from".to_string());
        }
        self.check_contiguous(&label, &tensor)?;
        self.message(label, None, |state, work| {
            state.messages.receive(Receiving { work, view: tensor, from: None, tag });
        })
    }

    /// Some tags are tenfold's own.
    fn check_tag(&self, kind: OpKind, tag: u32) -> Result<()> {
        if tag < TAGS_RESERVED {
            return Ok(());
        }
        let message = format!("tag {tag} is out of range: tags are 0 to {}", TAGS_RESERVED - 1);
        self.refuse(&Label::new(kind, 0).tag(tag), message)
    }

    fn check_contiguous(&self, label: &Label, tensor: &BufferView) -> Result<()> {
        if tensor.is_contiguous() {
            return Ok(());
        }
        self.refuse(
            label,
            "the tensor is not contiguous; collectives take such tensors, messages do not".to_string(),
        )
    }

    fn check_peer(&self, label: &Label, peer: Rank) -> Result<()> {
        self.check_root(label, peer, "rank")?;
        if peer == self.rank() {
            return self.refuse(label, format!("rank {peer} is this rank itself"));
        }
        Ok(())
    }

    fn message(
        &self,
        label: Label,
        peer: Option<Rank>,
        start: impl FnOnce(&mut GroupState, Arc<Shared>),
    ) -> Result<Work> {
        if debug::level() == debug::Level::Detail {
            let site = recorder::caller();
            let (input, output) = message_sizes(&label);
            let detail = Arc::new(Detail::new(&site, input, output));
            return recorder::with_site(site, || self.message_with(label, peer, start, Some(detail)));
        }
        self.message_with(label, peer, start, None)
    }

    fn message_with(
        &self,
        mut label: Label,
        peer: Option<Rank>,
        start: impl FnOnce(&mut GroupState, Arc<Shared>),
        detail: Option<Arc<Detail>>,
    ) -> Result<Work> {
        let inner = &self.inner;
        if let Err(fault) = inner.fabric.check_process() {
            return Err(self.error(label, fault));
        }
        let deadline = self.deadline();
        let span = self.span(&label, || None);
        let urgency = if self.background { Urgency::Background } else { Urgency::Patient };
        let submitted = inner.fabric.engine.submit(&inner.fabric, inner.index, urgency, |state, _| {
            label.seq = state.next_message_number();
            let sizes = message_sizes(&label);
            let ticket = state.record.called(&self.call(&label, state.counts(), sizes, peer, false));
            let record = Recorded { group: Arc::clone(&inner.record), ticket, detail };
            let size = inner.topology.size();
            let work = Shared::new(label, "", deadline, &inner.name, inner.rank, size, record);
            start(state, Arc::clone(&work));
            work
        });
        match submitted {
            Ok(work) => {
                work.trace(span);
                Ok(Work::new(work, inner.fabric.clone()))
            }
            Err(fault) => Err(self.error(label, refused(fault))),
        }
    }

    /// A barrier in which rank 0 finds out which ranks are missing. Blocks. With `wait_for_all`, rank 0 names all stragglers,
    /// otherwise the first that it finds.
    ///
    /// # Errors
    /// On rank 0, if ranks are missing after `timeout`: they are named, and the group fails on all ranks.
    pub fn monitored_barrier(&self, timeout: Duration, wait_for_all: bool) -> Result<()> {
        const TAG: u32 = TAGS_RESERVED;
        let label = Label::new(OpKind::MonitoredBarrier, self.sequence_number() + 1);
        let calls = self.with_timeout(timeout.saturating_add(Duration::from_secs(5)));
        let word = || Buffer::zeros(DType::U8, 1);
        if self.rank() > 0 {
            let (mut here, mut answer) = (word(), word());
            calls.send_tagged(here.lend(), 0, TAG)?.wait()?;
            return calls.recv_tagged(answer.lend(), 0, TAG)?.wait();
        }
        let mut words: Vec<Buffer> = (0..self.size()).map(|_| word()).collect();
        let waits: Vec<Work> = words
            .iter_mut()
            .enumerate()
            .skip(1)
            .map(|(rank, word)| calls.recv_tagged(word.lend(), rank, TAG))
            .collect::<Result<_>>()?;
        let deadline = tenfold_store::Deadline::after(timeout);
        let mut missing = Vec::new();
        for (index, wait) in waits.iter().enumerate() {
            match wait.wait_for(deadline.left().unwrap_or(Duration::MAX)) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Timeout && self.failure().is_none() => {
                    missing.push(index + 1);
                }
                Err(error) => return Err(error),
            }
            if !missing.is_empty() && !wait_for_all {
                break;
            }
        }
        if !missing.is_empty() {
            let time = show_duration(timeout);
            let message = format!("{} did not reach the monitored barrier in {time}", show_ranks(&missing));
            let fault = Fault::new(ErrorKind::Timeout, message).peer(missing[0]);
            let fault = fault.hint("see that rank's log; it called something else, or is still computing");
            self.inner.fabric.engine.fail(&self.inner.fabric, self.inner.index, fault.clone());
            return Err(self.error(label, fault));
        }
        for (rank, word) in words.iter_mut().enumerate().skip(1) {
            calls.send_tagged(word.lend(), rank, TAG)?.wait()?;
        }
        Ok(())
    }
}

/// What goes out and what comes in.
fn message_sizes(label: &Label) -> (Sizes, Sizes) {
    let whole = Sizes::one(label.count as usize);
    if label.kind == OpKind::Send { (whole, Sizes::NONE) } else { (Sizes::NONE, whole) }
}
