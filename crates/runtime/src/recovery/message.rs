//! What ranks send each other to agree, as values and as bytes.
//!
//! A [`Letter`] names the group and which of its agreements it is about. Sets of ranks are bit maps whose length follows from
//! the size of the group, which the receiver knows, so a letter has exactly one length for its kind. The longest, a join that
//! reports an accepted proposal in a group of 4,096 ranks, has about a kilobyte. All numbers are little endian.
//!
//! What arrives is input: `decode` refuses every letter that `encode` would not have written.

use std::fmt;

use super::ranks::Ranks;

/// A leader takes another round when its last one was refused, after a pause. This is more than two days of that.
pub(super) const ROUND_MAX: u32 = 1 << 24;

/// One attempt of one rank to lead. A rank ignores ballots below the highest one that it has promised to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Ballot {
    pub(super) round: u32,
    /// The rank that leads.
    pub(super) rank: usize,
}

impl Ballot {
    /// Every rank has promised this one from the start, which is what saves the first leader a round trip.
    pub(super) const FIRST: Ballot = Ballot { round: 0, rank: 0 };

    /// The lowest ballot of `rank` that is not below this one.
    pub(super) fn of(self, rank: usize) -> Ballot {
        Ballot { round: if rank >= self.rank { self.round } else { self.round + 1 }, rank }
    }

    /// The lowest ballot of the same rank that is above this one.
    pub(super) fn again(self) -> Ballot {
        Ballot { round: self.round + 1, ..self }
    }
}

/// What may be decided.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Proposal {
    /// The ranks that continue.
    pub(super) members: Ranks,
    /// The bitwise AND of the values of those ranks.
    pub(super) value: u64,
}

/// The proposal that a rank accepted last, and in which ballot.
pub(super) type Accepted = (Ballot, Proposal);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Message {
    /// A leader asks all ranks to join its ballot.
    Prepare { ballot: Ballot },
    /// The sender follows this ballot and no lower one. This is what it contributes.
    Join {
        ballot: Ballot,
        /// Nothing if its program has not called.
        value: Option<u64>,
        suspects: Ranks,
        /// The sender expects no call of these.
        left: Ranks,
        accepted: Option<Accepted>,
    },
    /// A leader asks all ranks to accept this, and to handle nothing more from those that it knows to be dead.
    Propose { ballot: Ballot, proposal: Proposal, dead: Ranks },
    /// The sender has accepted what this ballot proposes.
    Accept { ballot: Ballot },
    /// The sender does not follow `ballot`, because it follows `promised`.
    Refuse { ballot: Ballot, promised: Ballot },
    /// It is decided.
    Decided { proposal: Proposal },
}

/// For the traces of tests.
#[cfg(test)]
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = |ranks: &Ranks| format!("{:?}", ranks.iter().collect::<Vec<_>>());
        let text = match self {
            Message::Prepare { ballot } => format!("prepare {}.{}", ballot.round, ballot.rank),
            Message::Join { ballot, value, suspects, accepted, .. } => {
                let accepted = accepted.as_ref().map(|(ballot, proposal)| {
                    format!(" accepted {} in {}.{}", set(&proposal.members), ballot.round, ballot.rank)
                });
                let called = if value.is_some() { "" } else { " without a call" };
                let suspects = set(suspects);
                format!(
                    "join {}.{}{called} suspects {suspects}{}",
                    ballot.round,
                    ballot.rank,
                    accepted.unwrap_or_default()
                )
            }
            Message::Propose { ballot, proposal, .. } => {
                format!("propose {} in {}.{}", set(&proposal.members), ballot.round, ballot.rank)
            }
            Message::Accept { ballot } => format!("accept {}.{}", ballot.round, ballot.rank),
            Message::Refuse { ballot, promised } => {
                format!("refuse {}.{} for {}.{}", ballot.round, ballot.rank, promised.round, promised.rank)
            }
            Message::Decided { proposal } => format!("decided {}", set(&proposal.members)),
        };
        f.write_str(&text)
    }
}

/// Which agreement of which group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Instance {
    pub(super) group: u64,
    /// How many agreements of this group were decided before.
    pub(super) sequence: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Letter {
    pub(super) instance: Instance,
    pub(super) message: Message,
}

const PREPARE: u8 = 1;
const JOIN: u8 = 2;
const PROPOSE: u8 = 3;
const ACCEPT: u8 = 4;
const REFUSE: u8 = 5;
const DECIDED: u8 = 6;

/// Flags of a join.
const HAS_VALUE: u8 = 1;
const HAS_ACCEPTED: u8 = 2;

impl Letter {
    /// Appends the letter to `out`.
    pub(super) fn encode(&self, size: usize, out: &mut Vec<u8>) {
        let Letter { instance, message } = self;
        let (kind, flags) = match message {
            Message::Prepare { .. } => (PREPARE, 0),
            Message::Join { value, accepted, .. } => {
                let has_accepted = if accepted.is_some() { HAS_ACCEPTED } else { 0 };
                (JOIN, has_accepted | if value.is_some() { HAS_VALUE } else { 0 })
            }
            Message::Propose { .. } => (PROPOSE, 0),
            Message::Accept { .. } => (ACCEPT, 0),
            Message::Refuse { .. } => (REFUSE, 0),
            Message::Decided { .. } => (DECIDED, 0),
        };
        out.extend([kind, flags]);
        out.extend((size as u16).to_le_bytes());
        out.extend(instance.sequence.to_le_bytes());
        out.extend(instance.group.to_le_bytes());
        match message {
            Message::Prepare { ballot } | Message::Accept { ballot } => put_ballot(out, *ballot),
            Message::Join { ballot, value, suspects, left, accepted } => {
                put_ballot(out, *ballot);
                suspects.encode(out);
                left.encode(out);
                value.iter().for_each(|value| out.extend(value.to_le_bytes()));
                if let Some((ballot, proposal)) = accepted {
                    put_ballot(out, *ballot);
                    put_proposal(out, proposal);
                }
            }
            Message::Propose { ballot, proposal, dead } => {
                put_ballot(out, *ballot);
                put_proposal(out, proposal);
                dead.encode(out);
            }
            Message::Refuse { ballot, promised } => {
                put_ballot(out, *ballot);
                put_ballot(out, *promised);
            }
            Message::Decided { proposal } => put_proposal(out, proposal),
        }
    }

    /// The letter that these bytes are, in a group of `size` ranks.
    ///
    /// # Errors
    /// Says why they are not one.
    pub(super) fn decode(bytes: &[u8], size: usize) -> Result<Letter, Refused> {
        let mut rest = Rest { bytes, size, len: bytes.len() };
        let [kind, flags] = rest.take()?;
        let theirs = usize::from(u16::from_le_bytes(rest.take()?));
        if theirs != size {
            return Err(Refused::Size { theirs, ours: size });
        }
        let sequence = u32::from_le_bytes(rest.take()?);
        let instance = Instance { group: rest.word()?, sequence };
        let known = if kind == JOIN { HAS_VALUE | HAS_ACCEPTED } else { 0 };
        if flags & !known != 0 {
            return Err(Refused::Kind { kind, flags });
        }
        let message = match kind {
            PREPARE => Message::Prepare { ballot: rest.ballot()? },
            JOIN => {
                let (ballot, suspects, left) = (rest.ballot()?, rest.ranks()?, rest.ranks()?);
                let value = if flags & HAS_VALUE != 0 { Some(rest.word()?) } else { None };
                let has_accepted = flags & HAS_ACCEPTED != 0;
                let accepted = if has_accepted { Some((rest.ballot()?, rest.proposal()?)) } else { None };
                Message::Join { ballot, value, suspects, left, accepted }
            }
            PROPOSE => {
                Message::Propose { ballot: rest.ballot()?, proposal: rest.proposal()?, dead: rest.ranks()? }
            }
            ACCEPT => Message::Accept { ballot: rest.ballot()? },
            REFUSE => Message::Refuse { ballot: rest.ballot()?, promised: rest.ballot()? },
            DECIDED => Message::Decided { proposal: rest.proposal()? },
            _ => return Err(Refused::Kind { kind, flags }),
        };
        match rest.bytes.is_empty() {
            true => Ok(Letter { instance, message }),
            false => Err(Refused::Length { len: bytes.len() }),
        }
    }
}

fn put_ballot(out: &mut Vec<u8>, ballot: Ballot) {
    out.extend(ballot.round.to_le_bytes());
    out.extend((ballot.rank as u16).to_le_bytes());
}

fn put_proposal(out: &mut Vec<u8>, proposal: &Proposal) {
    proposal.members.encode(out);
    out.extend(proposal.value.to_le_bytes());
}

/// What is not decoded yet.
struct Rest<'a> {
    bytes: &'a [u8],
    size: usize,
    len: usize,
}

impl Rest<'_> {
    fn slice(&mut self, len: usize) -> Result<&[u8], Refused> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or(Refused::Length { len: self.len })?;
        self.bytes = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        Ok(self.slice(N)?.try_into().expect("N bytes were taken"))
    }

    fn word(&mut self) -> Result<u64, Refused> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn ballot(&mut self) -> Result<Ballot, Refused> {
        let round = u32::from_le_bytes(self.take()?);
        let rank = usize::from(u16::from_le_bytes(self.take()?));
        match (round <= ROUND_MAX, rank < self.size) {
            (true, true) => Ok(Ballot { round, rank }),
            (false, _) => Err(Refused::Round { round }),
            (_, false) => Err(Refused::Rank { rank, size: self.size }),
        }
    }

    fn ranks(&mut self) -> Result<Ranks, Refused> {
        let size = self.size;
        Ranks::decode(self.slice(Ranks::bytes_len(size))?, size).ok_or(Refused::Bits { size })
    }

    fn proposal(&mut self) -> Result<Proposal, Refused> {
        Ok(Proposal { members: self.ranks()?, value: self.word()? })
    }
}

/// Why a letter is not listened to. The receiver closes the connection that it came on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Kind {
        kind: u8,
        flags: u8,
    },
    Length {
        len: usize,
    },
    Size {
        theirs: usize,
        ours: usize,
    },
    Rank {
        rank: usize,
        size: usize,
    },
    Round {
        round: u32,
    },
    Bits {
        size: usize,
    },
    Group {
        group: u64,
    },
    /// It speaks for a ballot that another rank leads.
    Leader {
        from: usize,
        leader: usize,
    },
    /// The group cannot continue with the members that it names.
    Members {
        from: usize,
    },
    /// A decision, or a proposal of one ballot, that differs from the one known here.
    Contradiction {
        from: usize,
    },
    /// It says that this rank is a member of something that this rank has not joined.
    Impossible {
        from: usize,
    },
    /// It takes part in another reconfiguration under the same id.
    List {
        from: usize,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Kind { kind, flags } => write!(f, "unknown kind {kind} of letter with flags {flags:#x}"),
            Refused::Length { len } => write!(f, "a letter of its kind does not have {len} bytes"),
            Refused::Size { theirs, ours } => {
                write!(f, "it is about a group of {theirs} ranks, and this group has {ours}")
            }
            Refused::Rank { rank, size } => {
                write!(f, "rank {rank} is out of range for a group of {size}: ranks are 0 to {}", size - 1)
            }
            Refused::Round { round } => write!(f, "round {round} is out of range: the last is {ROUND_MAX}"),
            Refused::Bits { size } => write!(f, "its set names ranks that a group of {size} does not have"),
            Refused::Group { group } => write!(f, "it is about group {group:016x}, which is another one"),
            Refused::Leader { from, leader } => {
                write!(f, "rank {from} spoke for a ballot that rank {leader} leads")
            }
            Refused::Members { from } => {
                write!(f, "rank {from} sent a membership that the quorum of this group does not allow")
            }
            Refused::Contradiction { from } => {
                write!(f, "rank {from} reports another decision than the one known here")
            }
            Refused::Impossible { from } => {
                write!(f, "rank {from} reports that this rank has joined what it has not joined")
            }
            Refused::List { from } => {
                write!(f, "rank {from} reconfigures with another list of processes under the same id")
            }
        }
    }
}

impl std::error::Error for Refused {}

#[cfg(test)]
mod tests {
    use super::super::ranks::SIZE_MAX;
    use super::*;
    use proptest::prelude::*;

    fn ballots(size: usize) -> impl Strategy<Value = Ballot> {
        (0..=ROUND_MAX, 0..size).prop_map(|(round, rank)| Ballot { round, rank })
    }

    fn sets(size: usize) -> impl Strategy<Value = Ranks> {
        proptest::collection::vec(0..size, 0..20).prop_map(move |ranks| Ranks::of(size, ranks))
    }

    fn proposals(size: usize) -> impl Strategy<Value = Proposal> {
        (sets(size), any::<u64>()).prop_map(|(members, value)| Proposal { members, value })
    }

    fn messages(size: usize) -> impl Strategy<Value = Message> {
        let accepted = proptest::option::of((ballots(size), proposals(size)));
        prop_oneof![
            ballots(size).prop_map(|ballot| Message::Prepare { ballot }),
            (ballots(size), any::<Option<u64>>(), sets(size), sets(size), accepted).prop_map(
                |(ballot, value, suspects, left, accepted)| {
                    Message::Join { ballot, value, suspects, left, accepted }
                }
            ),
            (ballots(size), proposals(size), sets(size))
                .prop_map(|(ballot, proposal, dead)| Message::Propose { ballot, proposal, dead }),
            ballots(size).prop_map(|ballot| Message::Accept { ballot }),
            (ballots(size), ballots(size))
                .prop_map(|(ballot, promised)| Message::Refuse { ballot, promised }),
            proposals(size).prop_map(|proposal| Message::Decided { proposal }),
        ]
    }

    fn letters() -> impl Strategy<Value = (usize, Letter)> {
        let size = prop_oneof![1..70_usize, Just(SIZE_MAX)];
        size.prop_flat_map(|size| {
            (messages(size), any::<u64>(), any::<u32>()).prop_map(move |(message, group, sequence)| {
                (size, Letter { instance: Instance { group, sequence }, message })
            })
        })
    }

    proptest! {
        #[test]
        fn a_letter_survives_its_bytes_and_no_other_length_is_one((size, letter) in letters()) {
            let mut bytes = Vec::new();
            letter.encode(size, &mut bytes);
            prop_assert!(bytes.len() <= 3 * Ranks::bytes_len(SIZE_MAX) + 64);
            prop_assert_eq!(Letter::decode(&bytes, size), Ok(letter));
            for len in 0..bytes.len() {
                prop_assert!(Letter::decode(&bytes[..len], size).is_err());
            }
            bytes.push(0);
            let refused = Letter::decode(&bytes, size).expect_err("one byte too many");
            prop_assert_eq!(refused, Refused::Length { len: bytes.len() });
        }

        #[test]
        fn what_is_accepted_is_what_would_have_been_written(
            (size, letter) in letters(), changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4)
        ) {
            let mut bytes = Vec::new();
            letter.encode(size, &mut bytes);
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if let Ok(letter) = Letter::decode(&bytes, size) {
                let mut again = Vec::new();
                letter.encode(size, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_cause_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), size in 1..70_usize) {
            let _ = Letter::decode(&bytes, size);
        }
    }

    #[test]
    fn a_refusal_says_what_was_wrong() {
        let letter = |message| Letter { instance: Instance { group: 7, sequence: 1 }, message };
        let bytes = |size: usize, message| {
            let mut bytes = Vec::new();
            letter(message).encode(size, &mut bytes);
            bytes
        };
        let refusal = |bytes: &[u8]| Letter::decode(bytes, 3).expect_err("it is wrong").to_string();
        let prepare = |round, rank| Message::Prepare { ballot: Ballot { round, rank } };
        assert_eq!(refusal(&bytes(4, prepare(0, 0))), "it is about a group of 4 ranks, and this group has 3");
        assert_eq!(
            refusal(&bytes(3, prepare(0, 3))),
            "rank 3 is out of range for a group of 3: ranks are 0 to 2"
        );
        assert_eq!(
            refusal(&bytes(3, prepare(u32::MAX, 0))),
            "round 4294967295 is out of range: the last is 16777216"
        );
        assert_eq!(refusal(&[9, 0, 3]), "a letter of its kind does not have 3 bytes");
        let mut strange = bytes(3, prepare(0, 0));
        strange[1] = 4;
        assert_eq!(refusal(&strange), "unknown kind 1 of letter with flags 0x4");
        let mut proposal =
            bytes(3, Message::Decided { proposal: Proposal { members: Ranks::none(3), value: 0 } });
        proposal[16] = 0x08;
        assert_eq!(refusal(&proposal), "its set names ranks that a group of 3 does not have");
    }
}
