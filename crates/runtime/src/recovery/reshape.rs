//! One reconfiguration, as seen by one of its processes: a list of processes becomes a group, or none of them leaves the
//! group that it has.
//!
//! All processes of the list call with the same id and the same list. A process *prepares*: it connects to all others and
//! hears from each that it has the same list, which needs nothing of the old group. Then it votes yes, as what it contributes
//! to one [`Agreement`] of all processes of the list, by the rule that one missing vote means no. That makes the commit of
//! two phases one that does not block: the decision belongs to a majority of the list (or half of it with its first process)
//! instead of to a coordinator. If a process dies between its vote and the commit, the others decide without it.
//!
//! What a process does when it does not get a decision:
//! - It has not voted yes: its vote is missing, so no process commits. It stays with the old group and votes no, as it does
//!   when it is not prepared after three quarters of its time.
//! - It has voted yes and reaches no majority of the list before its deadline: it is *in doubt*. The others may have committed
//!   and may wait for it in the new group, so it must not continue in the old one as if nothing had happened. It
//!   reconfigures again under another id, with those that it reaches. Nothing is lost by that: a group has no state that
//!   outlives its members.
//!
//! A member that dies after the commit is a dead rank of the new group, like any other.
//!
//! An id is used once by a process: [`UsedIds`]. So no late message of a failed attempt can be about a later one.
//!
//! Not here: connections, handles, swapping the groups.

use std::collections::BTreeSet;
use std::time::Duration;

use super::agreement::{Agreement, Failure, Rule, Settings, To};
use super::message::{Instance, Letter, Message, Refused};
use super::quorum::Quorum;
use super::ranks::{Ranks, SIZE_MAX};
use crate::fault::{ErrorKind, Fault, show_ranks};
use crate::wire::FabricId;

const NO: u64 = 0;
const YES: u64 = 1;

/// What processes of a reconfiguration send each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Say {
    /// The first message in each direction: a number made from the list of the sender, and where it has its room.
    Hello {
        id: u64,
        list: u64,
        room: u64,
    },
    Letter(Letter),
}

const HELLO: u8 = 0x80;

impl Say {
    /// Appends it to `out`. The kinds of letters and of hellos differ.
    pub(super) fn encode(&self, size: usize, out: &mut Vec<u8>) {
        match self {
            Say::Hello { id, list, room } => {
                out.push(HELLO);
                [id, list, room].iter().for_each(|word| out.extend(word.to_le_bytes()));
            }
            Say::Letter(letter) => letter.encode(size, out),
        }
    }

    /// # Errors
    /// Says why these bytes are neither.
    pub(super) fn decode(bytes: &[u8], size: usize) -> Result<Say, Refused> {
        let Some((&HELLO, words)) = bytes.split_first() else {
            return Letter::decode(bytes, size).map(Say::Letter);
        };
        let word = |at: usize| words.get(8 * at..).and_then(|rest| rest.first_chunk()).copied();
        match (word(0), word(1), word(2), words.len()) {
            (Some(id), Some(list), Some(room), 24) => {
                let [id, list, room] = [id, list, room].map(u64::from_le_bytes);
                Ok(Say::Hello { id, list, room })
            }
            _ => Err(Refused::Length { len: bytes.len() }),
        }
    }
}

/// What the call returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reshaped {
    /// All processes of the list are the group; this one has its position in the list as its rank.
    Committed,
    /// All processes keep what they have. The attempt may be repeated under another id.
    Aborted(Cause),
    /// Other processes may have committed. The attempt must be repeated under another id.
    InDoubt(Failure),
}

/// Why an attempt was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// These did not connect or call in time.
    NotReady(Vec<usize>),
    /// This one has another list.
    OtherList(usize),
    /// The connection to this one was lost.
    Lost(usize),
    /// These did not vote yes.
    Refused(Vec<usize>),
}

impl Cause {
    pub(crate) fn fault(&self) -> Fault {
        let kept = "each process keeps its group";
        match self {
            Cause::NotReady(ranks) => Fault::timeout(format!(
                "not reconfigured: no connection with {}; {kept}",
                show_ranks(ranks)
            ))
            .hint(
                "check that all processes of the list call with the same id, and call again with another id",
            ),
            Cause::OtherList(rank) => Fault::new(
                ErrorKind::Mismatch,
                format!(
                    "not reconfigured: rank {rank} has another list of handles under the same id; {kept}"
                ),
            )
            .peer(*rank)
            .hint("give all processes the same list, in the same order"),
            Cause::Lost(rank) => {
                Fault::new(ErrorKind::PeerLost, format!("not reconfigured: lost rank {rank}; {kept}"))
                    .peer(*rank)
                    .hint(format!("call again with another id, without rank {rank} if it has died"))
            }
            Cause::Refused(ranks) => Fault::new(
                ErrorKind::PeerLost,
                format!("not reconfigured: {} did not take part; {kept}", show_ranks(ranks)),
            )
            .hint("call again with another id"),
        }
    }
}

/// The ids that a process has used, so that it uses none twice.
#[derive(Debug, Default)]
pub(crate) struct UsedIds {
    ids: BTreeSet<u64>,
}

impl UsedIds {
    /// More than any job reconfigures.
    const MAX: usize = 1 << 16;

    /// # Errors
    /// The id was used, or there are too many.
    pub(crate) fn take(&mut self, id: u64) -> Result<(), Fault> {
        if self.ids.len() >= UsedIds::MAX {
            let message = format!("this process has reconfigured {} times, which is the limit", UsedIds::MAX);
            return Err(Fault::new(ErrorKind::Limit, message));
        }
        match self.ids.insert(id) {
            true => Ok(()),
            false => Err(Fault::argument(format!("the id {id} was already used"))
                .hint("give each reconfiguration an id of its own, also after one that failed")),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Reshape {
    id: u64,
    list: u64,
    me: usize,
    size: usize,
    deadline: Duration,
    /// A process that is not prepared then votes no, so that the others get a decision before their deadlines.
    prepared_by: Duration,
    agreement: Agreement,
    connected: Ranks,
    /// Those that have the same list.
    agreeing: Ranks,
    /// Where they have their rooms.
    rooms: Vec<u64>,
    vote: Option<u64>,
    cause: Option<Cause>,
    outcome: Option<Reshaped>,
    sends: Vec<(To, Say)>,
}

impl Reshape {
    /// Process `me` calls at time zero, with the processes in the order of their ranks. `repeat` is after how long messages are repeated.
    ///
    /// # Errors
    /// Says what is wrong with the list.
    pub(crate) fn new(
        id: u64,
        list: &[FabricId],
        me: FabricId,
        room: u64,
        repeat: Duration,
        deadline: Duration,
    ) -> Result<Reshape, Fault> {
        let size = list.len();
        if size > SIZE_MAX {
            return Err(Fault::argument(format!("{size} handles are too many: the limit is {SIZE_MAX}")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = list.iter().position(|process| !seen.insert(process.0)) {
            return Err(Fault::argument(format!("handle {twice} is in the list twice")));
        }
        let Some(rank) = list.iter().position(|process| *process == me) else {
            return Err(Fault::argument("the list of handles does not contain this process")
                .hint("only processes that are in the list call"));
        };
        let settings = Settings {
            quorum: Quorum::Majority,
            rule: Rule::Unanimous,
            repeat,
            // A rank that has not voted is asked until the deadline.
            patience: deadline,
            grace: deadline,
        };
        let mut reshape = Reshape {
            id,
            list: digest(id, list),
            me: rank,
            size,
            deadline,
            prepared_by: deadline / 4 * 3,
            agreement: Agreement::new(rank, size, settings),
            connected: Ranks::of(size, [rank]),
            agreeing: Ranks::of(size, [rank]),
            rooms: (0..size).map(|other| if other == rank { room } else { 0 }).collect(),
            vote: None,
            cause: None,
            outcome: None,
            sends: Vec::new(),
        };
        reshape.progress(Duration::ZERO);
        Ok(reshape)
    }

    pub(crate) fn outcome(&self) -> Option<&Reshaped> {
        self.outcome.as_ref()
    }

    /// By rank. All are known once it is committed.
    pub(crate) fn rooms(&self) -> &[u64] {
        &self.rooms
    }

    /// What to send: bytes, each with its receivers. In this order to each of them.
    pub(crate) fn take_letters(&mut self) -> Vec<(Vec<usize>, Vec<u8>)> {
        let (me, size) = (self.me, self.size);
        let encode = |(to, say): (To, Say)| {
            let to = match to {
                To::Rank(rank) => vec![rank],
                To::All => (0..size).filter(|rank| *rank != me).collect(),
            };
            let mut bytes = Vec::new();
            say.encode(size, &mut bytes);
            (to, bytes)
        };
        self.take_sends().into_iter().map(encode).collect()
    }

    /// Handles what another process sent.
    ///
    /// # Errors
    /// Says what is wrong with bytes that no correct process sends.
    pub(crate) fn on_letter(&mut self, from: usize, bytes: &[u8], now: Duration) -> Result<(), String> {
        let said = Say::decode(bytes, self.size).and_then(|say| self.on_say(from, say, now));
        said.map_err(|refused| refused.to_string())
    }

    pub(super) fn take_sends(&mut self) -> Vec<(To, Say)> {
        let instance = Instance { group: self.id, sequence: 0 };
        let letter = |(to, message)| (to, Say::Letter(Letter { instance, message }));
        let letters = self.agreement.take_sends().into_iter().map(letter);
        self.sends.drain(..).chain(letters).collect()
    }

    pub(crate) fn wake(&self) -> Option<Duration> {
        let prepared_by = self.vote.is_none().then_some(self.prepared_by);
        prepared_by.into_iter().chain(self.agreement.wake()).min()
    }

    /// There is a connection with this process.
    pub(crate) fn on_connected(&mut self, rank: usize, now: Duration) {
        if rank < self.size && rank != self.me && !self.connected.contains(rank) {
            self.connected.insert(rank);
            self.agreement.on_trust(rank, now);
            let hello = Say::Hello { id: self.id, list: self.list, room: self.rooms[self.me] };
            self.sends.push((To::Rank(rank), hello));
            self.progress(now);
        }
    }

    /// The connection with this process was lost, or it has died.
    pub(crate) fn on_lost(&mut self, rank: usize, now: Duration) {
        if rank < self.size && rank != self.me {
            self.connected.remove(rank);
            self.agreement.on_suspect(rank, now);
            self.refuse(Cause::Lost(rank), now);
            self.progress(now);
        }
    }

    /// Handles what another process sent.
    ///
    /// # Errors
    /// Says what is wrong with a message that no correct process sends.
    pub(super) fn on_say(&mut self, from: usize, say: Say, now: Duration) -> Result<(), Refused> {
        if from >= self.size || from == self.me {
            return Err(Refused::Rank { rank: from, size: self.size });
        }
        match say {
            Say::Hello { id, .. } if id != self.id => return Err(Refused::Group { group: id }),
            Say::Hello { list, .. } if list != self.list => {
                self.refuse(Cause::OtherList(from), now);
                self.progress(now);
                return Err(Refused::List { from });
            }
            Say::Hello { room, .. } => {
                self.agreeing.insert(from);
                self.rooms[from] = room;
            }
            Say::Letter(Letter { instance, .. })
                if instance != (Instance { group: self.id, sequence: 0 }) =>
            {
                return Err(Refused::Group { group: instance.group });
            }
            Say::Letter(Letter { message, .. }) => {
                self.check(from, &message)?;
                self.agreement.on_message(from, message, now)?;
            }
        }
        self.progress(now);
        Ok(())
    }

    pub(crate) fn on_tick(&mut self, now: Duration) {
        if now >= self.prepared_by && self.vote.is_none() {
            let missing =
                Ranks::of(self.size, self.connected.iter().filter(|rank| self.agreeing.contains(*rank)));
            self.refuse(Cause::NotReady(missing.others().iter().collect()), now);
        }
        self.agreement.on_tick(now);
        self.progress(now);
    }

    /// A commit needs all votes.
    fn check(&self, from: usize, message: &Message) -> Result<(), Refused> {
        let proposal = match message {
            Message::Propose { proposal, .. } | Message::Decided { proposal } => Some(proposal),
            Message::Join { accepted: Some((_, proposal)), .. } => Some(proposal),
            _ => None,
        };
        let is_commit = proposal.is_some_and(|proposal| proposal.value != NO);
        match is_commit && (self.vote != Some(YES) || proposal.is_some_and(|it| it.members.len() < self.size))
        {
            true => Err(Refused::Impossible { from }),
            false => Ok(()),
        }
    }

    /// Votes no, if this process has not voted yet.
    fn refuse(&mut self, cause: Cause, now: Duration) {
        if self.vote.is_none() {
            self.vote = Some(NO);
            self.cause = Some(cause);
            // Those that never connected may be the ones that would have to lead.
            self.connected.others().iter().for_each(|rank| self.agreement.on_suspect(rank, now));
            // The vote is for the others. This process knows enough.
            self.agreement.call(NO, self.deadline, now);
        }
    }

    fn progress(&mut self, now: Duration) {
        let is_prepared = self.connected.len() == self.size && self.agreeing.len() == self.size;
        if is_prepared && self.vote.is_none() {
            self.vote = Some(YES);
            self.agreement.call(YES, self.deadline, now);
        }
        if self.outcome.is_some() {
            return;
        }
        let decision = self.agreement.decision();
        self.outcome = if let Some(cause) = self.cause.clone() {
            Some(Reshaped::Aborted(cause))
        } else if let Some(decision) = decision {
            Some(match decision.value {
                NO => Reshaped::Aborted(Cause::Refused(decision.members.others().iter().collect())),
                _ => Reshaped::Committed,
            })
        } else if let Some(super::agreement::Outcome::Failed(failure)) = self.agreement.outcome() {
            Some(Reshaped::InDoubt(failure.clone()))
        } else {
            None
        };
    }
}

/// FNV-1a of the id and the list. It tells lists of careless users apart, not of attackers.
fn digest(id: u64, list: &[FabricId]) -> u64 {
    let bytes = id.to_le_bytes().into_iter().chain(list.iter().flat_map(|process| process.0.to_le_bytes()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests;
