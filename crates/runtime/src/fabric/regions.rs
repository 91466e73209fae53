//! How memory that another library shares becomes readable for the peers on this host.
//!
//! A region (see `tenfold_memory::Region`) is announced to every peer on this host, with its descriptor, on the stream that
//! the helper threads keep with each other. The peer's helper maps it and answers; only when all have answered bytes
//! are lent from there, and only to those that have, so that no message points to what its reader does not know. A peer that
//! is met later gets copies of what lies there.
//!
//! A peer hears that a region is retired when its registration was dropped and every message that points there was read,
//! and never before it has answered: the two may come on different streams. What a peer had that died or left is
//! kept until this rank's own groups are dropped, and so is its segment: messages that it sent before are still valid.
//!
//! Ranks that are threads of one process give each other the region itself.

use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tenfold_memory::{Lease, Region};
use tenfold_store::Deadline;

use super::{Fabric, LOCAL, Order, Peer, lock};
use crate::fault::{ErrorKind, Fault, show_duration};
use crate::wire::FabricId;

/// How long peers have to map a region. Their helper threads do nothing that takes long, so one that needs more is stopped.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// As long as this exists, peers on this host read the memory of a region in place; see [`Group::register`].
///
/// Operations under way when it is dropped go on. The memory may then be unmapped once their work is done.
///
/// [`Group::register`]: crate::Group::register
#[must_use = "the memory is registered until this is dropped"]
pub struct Registration {
    /// `None` if no peer reads in place.
    lease: Option<Arc<Lease>>,
    fabric: Weak<Fabric>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(lease) = self.lease.take() else { return };
        if self.fabric.upgrade().is_some_and(|fabric| fabric.check_process().is_err()) {
            return std::mem::forget(lease); // peers listen to the parent, and a thread of it may have held the locks
        }
        lease.close();
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.lease {
            Some(lease) => write!(f, "Registration({:?})", lease.region()),
            None => f.write_str("Registration(no peer reads in place)"),
        }
    }
}

/// A region that peers are to map.
#[derive(Debug)]
pub(crate) struct Announcement {
    pub offset: usize,
    pub region: Arc<Region>,
    pub to: Vec<Arc<Peer>>,
    pub answers: Sender<(FabricId, Answer)>,
}

/// What became of an announcement at one peer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Mapped,
    /// It is no more, and reads nothing.
    Gone,
    Refused(String),
}

impl Fabric {
    /// Makes `region` known to all peers on this host, then lends from it.
    pub(crate) fn register(
        self: &Arc<Self>,
        region: &Arc<Region>,
        limit: Duration,
    ) -> Result<Registration, Fault> {
        let fabric = Arc::downgrade(self);
        if !self.lends() {
            return Ok(Registration { lease: None, fabric });
        }
        let retire = {
            let fabric = Weak::clone(&fabric);
            move |offset| {
                if let Some(fabric) = fabric.upgrade()
                    && fabric.check_process().is_ok()
                {
                    fabric.order(Order::Retire { offset });
                }
            }
        };
        let refused = |error| Fault::io("the region cannot be registered", error);
        let lease = self.segment.register(region, retire).map_err(refused)?;
        // From here on, whatever goes wrong, dropping it takes everything back.
        let registration = Registration { lease: Some(Arc::clone(&lease)), fabric };
        self.announce(&lease, limit.min(ANSWER_MAX))?;
        lease.open();
        Ok(registration)
    }

    fn announce(self: &Arc<Self>, lease: &Lease, limit: Duration) -> Result<(), Fault> {
        let mut to: Vec<Arc<Peer>> = lock(&self.peers).values().cloned().collect();
        to.retain(|peer| peer.is_near() && peer.fate().is_none());
        let mut refusal = None;
        to.retain(|peer| {
            if let Some(thread) = local(peer) {
                match thread.share_with_thread(self, lease) {
                    Ok(()) => peer.learn_region(lease.offset()),
                    Err(error) => refusal = Some(error),
                }
                return false;
            }
            self.dial(peer); // unless there is a way to it
            !peer.is_thread()
        });
        if let Some(error) = refusal {
            return Err(Fault::io("a thread of this process cannot read the region", error));
        }
        if to.is_empty() {
            return Ok(());
        }
        let (sender, answers) = channel();
        self.order(Order::Announce(Announcement {
            offset: lease.offset(),
            region: Arc::clone(lease.region()),
            to: to.clone(),
            answers: sender,
        }));
        wait_for_all(to, &answers, lease.offset(), Deadline::after(limit))
    }

    /// Lets this rank read a region of `owner`, another thread.
    fn share_with_thread(&self, owner: &Arc<Fabric>, lease: &Lease) -> std::io::Result<()> {
        let peer = self.peer(owner.id);
        peer.meet_thread(owner);
        let segment = peer.segment().expect("they have just met");
        segment.add_region(lease.offset(), Arc::clone(lease.region().readable()))
    }

    /// Forgets that peers know a region, and tells the ranks that are threads of this process that it is no more.
    pub(super) fn retire_in_threads(&self, offset: usize) {
        let peers: Vec<Arc<Peer>> = lock(&self.peers).values().cloned().collect();
        peers.iter().for_each(|peer| peer.forget_region(offset));
        for thread in peers.iter().filter_map(|peer| local(peer)) {
            if let Some(segment) = thread.peer(self.id).segment() {
                segment.remove_region(offset);
            }
        }
    }
}

/// The peer's fabric, if it is a thread of this process that has not left.
fn local(peer: &Peer) -> Option<Arc<Fabric>> {
    lock(&LOCAL).get(&peer.id().0).and_then(Weak::upgrade)
}

fn wait_for_all(
    mut missing: Vec<Arc<Peer>>,
    answers: &Receiver<(FabricId, Answer)>,
    offset: usize,
    deadline: Deadline,
) -> Result<(), Fault> {
    while !missing.is_empty() {
        let left = deadline.left().unwrap_or(ANSWER_MAX);
        let Ok((from, answer)) = answers.recv_timeout(left) else {
            let names: Vec<String> = missing.iter().map(|peer| format!("({peer})")).collect();
            let time = show_duration(deadline.elapsed());
            let message = format!("{} did not map the region within {time}", names.join(", "));
            return Err(Fault::new(ErrorKind::Timeout, message).hint("is that process stopped?"));
        };
        let peer = missing.iter().find(|peer| peer.id() == from);
        if let Answer::Refused(why) = answer {
            let message = format!(
                "({}) cannot map the region: {why}",
                peer.map(ToString::to_string).unwrap_or_default()
            );
            return Err(Fault::new(ErrorKind::Io, message));
        }
        if let (Answer::Mapped, Some(peer)) = (answer, peer) {
            peer.learn_region(offset);
        }
        missing.retain(|peer| peer.id() != from);
    }
    Ok(())
}

/// Which peers know which regions of this rank; the helper thread's notes.
#[derive(Debug, Default)]
pub(super) struct Announced(HashMap<u64, Known>);

#[derive(Debug)]
struct Known {
    /// Asked, and not answered yet.
    waiting: Vec<FabricId>,
    /// Have it mapped.
    readers: Vec<FabricId>,
    answers: Sender<(FabricId, Answer)>,
    retired: bool,
}

impl Announced {
    pub(super) fn begin(&mut self, offset: u64, to: Vec<FabricId>, answers: Sender<(FabricId, Answer)>) {
        self.0.insert(offset, Known { waiting: to, readers: Vec::new(), answers, retired: false });
    }

    /// Notes a peer's answer. Returns true if the peer must be notified immediately that the region is retired.
    pub(super) fn answered(&mut self, offset: u64, from: FabricId, answer: Answer) -> bool {
        let Some(known) = self.0.get_mut(&offset) else { return false };
        let Some(index) = known.waiting.iter().position(|waiting| *waiting == from) else { return false };
        known.waiting.swap_remove(index);
        let mapped = answer == Answer::Mapped;
        let _ = known.answers.send((from, answer)); // the thread that asked may have given up
        let retired = known.retired;
        if mapped && !retired {
            known.readers.push(from);
        }
        self.forget_if_over(offset);
        mapped && retired
    }

    /// Forgets a peer that died or left. It will not answer, and does not need to be notified.
    pub(super) fn lose(&mut self, peer: FabricId) {
        for known in self.0.values_mut() {
            if known.waiting.contains(&peer) {
                let _ = known.answers.send((peer, Answer::Gone)); // as above
            }
            known.waiting.retain(|waiting| *waiting != peer);
            known.readers.retain(|reader| *reader != peer);
        }
        self.0.retain(|_, known| !known.is_over());
    }

    /// Retires a region that no message points to any more, and returns the peers to notify now. Peers that have not answered
    /// are notified when they do.
    pub(super) fn retire(&mut self, offset: u64) -> Vec<FabricId> {
        let Some(known) = self.0.get_mut(&offset) else { return Vec::new() };
        known.retired = true;
        let readers = std::mem::take(&mut known.readers);
        self.forget_if_over(offset);
        readers
    }

    fn forget_if_over(&mut self, offset: u64) {
        if self.0.get(&offset).is_some_and(Known::is_over) {
            self.0.remove(&offset);
        }
    }
}

impl Known {
    fn is_over(&self) -> bool {
        self.retired && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: FabricId = FabricId(1);
    const TWO: FabricId = FabricId(2);

    fn announced() -> (Announced, Receiver<(FabricId, Answer)>) {
        let (mut announced, (sender, answers)) = (Announced::default(), channel());
        announced.begin(7, vec![ONE, TWO], sender);
        (announced, answers)
    }

    #[test]
    fn whoever_mapped_a_region_hears_of_its_end_and_nobody_else() {
        let (mut announced, answers) = announced();
        assert!(!announced.answered(7, ONE, Answer::Mapped));
        assert!(!announced.answered(7, TWO, Answer::Refused("no".to_string())));
        let refused = (TWO, Answer::Refused("no".to_string()));
        assert_eq!(answers.try_iter().collect::<Vec<_>>(), [(ONE, Answer::Mapped), refused]);
        assert_eq!(announced.retire(7), [ONE]);
        assert!(announced.0.is_empty());
    }

    #[test]
    fn one_that_answers_after_the_end_hears_of_it_then() {
        let (mut announced, _answers) = announced();
        assert!(!announced.answered(7, ONE, Answer::Mapped));
        assert_eq!(announced.retire(7), [ONE]);
        assert!(announced.answered(7, TWO, Answer::Mapped));
        assert!(announced.0.is_empty());
        assert!(!announced.answered(7, TWO, Answer::Mapped), "said twice");
    }

    #[test]
    fn one_that_is_gone_is_not_waited_for() {
        let (mut announced, answers) = announced();
        announced.lose(TWO);
        assert_eq!(answers.try_recv(), Ok((TWO, Answer::Gone)));
        assert!(!announced.answered(7, ONE, Answer::Mapped));
        announced.lose(ONE);
        assert!(announced.retire(7).is_empty());
        assert!(announced.0.is_empty());
    }

    #[test]
    fn an_answer_that_nobody_asked_for_changes_nothing() {
        let (mut announced, answers) = announced();
        assert!(!announced.answered(8, ONE, Answer::Mapped));
        assert!(!announced.answered(7, FabricId(3), Answer::Mapped));
        assert!(answers.try_recv().is_err());
    }
}
