//! Receives on a line: finds out which link a message belongs to, reads it to where it is expected or puts it aside, and gives
//! credit for what was taken.

use std::io;
use std::task::Poll;

use tenfold_memory::{Bytes, Head, Span};

use super::frame::{Frame, HEADER, LinkId};
use super::incoming::{Current, Place};
use super::{
    CREDIT, Claim, Half, Line, Link, SHORT, Standing, Surroundings, TCP_PIECE, UNKNOWN_MAX, WINDOW, frame,
};
use crate::label::is_same_call;

/// A message that has arrived.
#[derive(Debug)]
pub(crate) struct Message {
    pub head: Head,
    pub len: usize,
    /// At least as long as the message.
    pub(super) buffer: Vec<u8>,
}

impl Message {
    pub(crate) fn bytes(&self) -> Bytes<'_> {
        Bytes::of(&self.buffer[..self.len])
    }
}

/// Why a message was not received as expected.
#[derive(Debug)]
pub(crate) enum Unexpected {
    Io(io::Error),
    /// Another one came. It is still there.
    Other {
        head: Head,
        len: usize,
    },
}

impl From<io::Error> for Unexpected {
    fn from(error: io::Error) -> Self {
        Unexpected::Io(error)
    }
}

impl Line {
    /// The next message of a link, if it is here.
    pub(crate) fn poll_message(
        &mut self,
        around: &impl Surroundings,
        claim: Claim,
        lane: u8,
    ) -> io::Result<Poll<Message>> {
        self.check(claim)?;
        let id = LinkId { group: claim.group, lane };
        loop {
            if let Some(message) = self.links.get_mut(&id).and_then(|link| link.inbox.pop_front()) {
                return Ok(Poll::Ready(message));
            }
            if self.poll_any_frame(around, Some(id))?.is_pending() {
                return Ok(Poll::Pending);
            }
        }
    }

    /// A message that was received was read.
    pub(crate) fn take(&mut self, claim: Claim, lane: u8, message: Message) {
        let Message { len, buffer, .. } = message;
        if let Some(incoming) = self.incoming.open() {
            incoming.recycle(buffer);
        }
        if claim.epoch == self.epoch {
            self.took(LinkId { group: claim.group, lane }, len);
        }
    }

    /// Moves the next message of a link straight into `target`; `Pending` until it is whole, and to be called with the same
    /// arguments until then. It must be described by `head` and be as long as `target`. If it is not, that is said as soon as
    /// its header is there, and it is still there for [`Line::poll_message`].
    pub(crate) fn poll_recv(
        &mut self,
        around: &impl Surroundings,
        claim: Claim,
        lane: u8,
        head: &Head,
        target: Span<'_>,
    ) -> Result<Poll<()>, Unexpected> {
        assert!(target.len() <= TCP_PIECE, "a longer message than is ever let in");
        self.check(claim)?;
        let id = LinkId { group: claim.group, lane };
        let is_it = |theirs: &Head, len: usize| is_same_call(theirs, head) && len == target.len();
        loop {
            if let Some(link) = self.links.get_mut(&id)
                && let Some(message) = link.inbox.front()
            {
                if !is_it(&message.head, message.len) {
                    return Err(Unexpected::Other { head: message.head, len: message.len });
                }
                target.copy_from(message.bytes());
                let message = link.inbox.pop_front().expect("it was looked at");
                self.take(claim, lane, message);
                return Ok(Poll::Ready(()));
            }
            self.incoming.check()?;
            let Some(incoming) = self.incoming.open() else { return Ok(Poll::Pending) };
            if incoming.current.is_none() {
                // Not into the target: until its message is here, what it holds may still have to be sent.
                let polled = if target.len() <= SHORT {
                    incoming.poll_short_header(TCP_PIECE)
                } else {
                    incoming
                        .poll_header(Span::empty(), TCP_PIECE)
                        .map(|polled| polled.map(|(frame, _)| frame))
                };
                match polled {
                    Err(error) => return Err(self.incoming.broke(error).into()),
                    Ok(Poll::Pending) => return Ok(Poll::Pending),
                    Ok(Poll::Ready(frame)) => self.begin(around, frame, Some(id))?,
                }
            }
            let Some(incoming) = self.incoming.open() else { return Ok(Poll::Pending) };
            let Some(current) = &mut incoming.current else { continue };
            if current.link == id && !matches!(current.place, Place::Nowhere) {
                if !is_it(&current.head, current.len) {
                    return Err(Unexpected::Other { head: current.head, len: current.len });
                }
                if matches!(current.place, Place::Undecided) {
                    current.place = Place::Target;
                }
                if matches!(current.place, Place::Target) {
                    let polled = incoming.poll_payload(target);
                    if polled.map_err(|error| self.incoming.broke(error))?.is_pending() {
                        return Ok(Poll::Pending);
                    }
                    self.look_for_more(around);
                    if let Some(link) = self.links.get_mut(&id) {
                        link.arrived += (HEADER + target.len()) as u64;
                    }
                    self.took(id, target.len());
                    return Ok(Poll::Ready(()));
                }
            }
            if self.go_on(around, Some(id))?.is_pending() {
                return Ok(Poll::Pending);
            }
        }
    }

    /// What the next message of a link is and how long, without its payload.
    pub(crate) fn peek_head(
        &mut self,
        around: &impl Surroundings,
        claim: Claim,
        lane: u8,
    ) -> Option<(Head, usize)> {
        self.check(claim).ok()?;
        let id = LinkId { group: claim.group, lane };
        if let Some(message) = self.links.get(&id)?.inbox.front() {
            return Some((message.head, message.len));
        }
        let incoming = self.incoming.open()?;
        if incoming.current.is_none() {
            let polled = incoming.poll_header(Span::empty(), TCP_PIECE);
            if let Poll::Ready((frame, _)) = polled.map_err(|error| self.incoming.broke(error)).ok()? {
                self.begin(around, frame, None).ok()?;
            }
        }
        let current = self.incoming.open()?.current.as_ref();
        current.filter(|current| current.link == id).map(|current| (current.head, current.len))
    }

    /// Bytes of a link that have arrived, if the connection is open and there were any.
    pub(crate) fn arrived(&self, claim: Claim, lane: u8) -> Option<u64> {
        self.check(claim).ok()?;
        let id = LinkId { group: claim.group, lane };
        let Half::Open(incoming) = &self.incoming else { return None };
        let whole = self.links.get(&id)?.arrived;
        let current = incoming.current.as_ref().filter(|current| current.link == id);
        let arrived = whole + current.map_or(0, |current| (HEADER + current.read) as u64);
        (arrived > 0).then_some(arrived)
    }

    /// Reads one message to its end and puts it where it belongs, or one credit; `Pending` if there is none. `expected` is the
    /// link whose next message is most likely.
    pub(super) fn poll_any_frame(
        &mut self,
        around: &impl Surroundings,
        expected: Option<LinkId>,
    ) -> io::Result<Poll<()>> {
        self.incoming.check()?;
        let Some(incoming) = self.incoming.open() else { return Ok(Poll::Pending) };
        if incoming.current.is_none() && incoming.guess <= SHORT {
            match incoming.poll_short_header(TCP_PIECE) {
                Err(error) => return Err(self.incoming.broke(error)),
                Ok(Poll::Pending) => return Ok(Poll::Pending),
                Ok(Poll::Ready(frame)) => self.begin(around, frame, expected)?,
            }
            if self.incoming.open().is_some_and(|incoming| incoming.current.is_none()) {
                return Ok(Poll::Ready(())); // it was credit
            }
            return self.go_on(around, expected);
        }
        if incoming.current.is_none() {
            let guess = incoming.guess;
            let mut buffer = incoming.buffer(guess);
            let (frame, too_far) = match incoming.poll_header(Span::of(&mut buffer[..guess]), TCP_PIECE) {
                Err(error) => return Err(self.incoming.broke(error)),
                Ok(Poll::Pending) => {
                    incoming.recycle(buffer);
                    return Ok(Poll::Pending);
                }
                Ok(Poll::Ready(found)) => found,
            };
            self.begin(around, frame, expected)?;
            let Some(incoming) = self.incoming.open() else { return Ok(Poll::Pending) };
            match &mut incoming.current {
                Some(current) if Some(current.link) == expected => {
                    current.read = too_far.min(current.len);
                    let beyond = buffer[current.read..too_far].to_vec();
                    if buffer.len() < current.len {
                        buffer.resize(current.len, 0);
                    }
                    if matches!(current.place, Place::Undecided) {
                        current.place = Place::Buffer(buffer);
                    }
                    incoming.put_ahead(Bytes::of(&beyond));
                }
                Some(_) => {
                    incoming.put_ahead(Bytes::of(&buffer[..too_far]));
                    incoming.recycle(buffer);
                }
                None => {
                    incoming.put_ahead(Bytes::of(&buffer[..too_far]));
                    incoming.recycle(buffer);
                    return Ok(Poll::Ready(())); // it was credit
                }
            }
        }
        self.go_on(around, expected)
    }

    /// A header was read.
    fn begin(
        &mut self,
        around: &impl Surroundings,
        frame: Frame,
        expected: Option<LinkId>,
    ) -> io::Result<()> {
        let (id, head, len) = match frame {
            Frame::Message { link, head, len, credit } => {
                self.credit(around, link, credit);
                (link, head, len)
            }
            Frame::Credit { link, credit } => {
                self.credit(around, link, credit);
                return Ok(());
            }
        };
        let standing = match self.links.get(&id) {
            Some(link) if link.failed => Standing::Left,
            Some(link) if link.claimed => Standing::Member,
            _ => around.standing(id.group),
        };
        let place = if standing == Standing::Left { Place::Nowhere } else { Place::Undecided };
        if standing != Standing::Left {
            let bytes = HEADER + len;
            let link = self.links.entry(id).or_default();
            if !link.receivable.is_open() {
                let why = format!("more than {WINDOW} bytes were sent of which none was taken");
                return Err(self.incoming.broke(frame::invalid(why)));
            }
            link.receivable.use_up(bytes);
            if standing == Standing::Unknown {
                let bytes = bytes + size_of::<Link>();
                link.unknown += bytes;
                self.unknown += bytes;
                if self.unknown > UNKNOWN_MAX {
                    let why = format!(
                        "more than {UNKNOWN_MAX} bytes were sent for groups that this process does not have"
                    );
                    return Err(self.incoming.broke(frame::invalid(why)));
                }
            }
        }
        if expected != Some(id) {
            around.news().tell();
        }
        if let Some(incoming) = self.incoming.open() {
            incoming.current = Some(Current { link: id, head, len, read: 0, place });
        }
        Ok(())
    }

    /// The peer has taken so many bytes of what was sent on a link. One of a group that was left has no use for that.
    #[inline]
    fn credit(&mut self, around: &impl Surroundings, id: LinkId, bytes: u64) {
        if bytes > 0
            && let Some(link) = self.links.get_mut(&id)
        {
            if !link.sendable.is_open() {
                around.news().tell(); // a sender waits for it
            }
            link.sendable.give_back(bytes);
        }
    }

    /// Reads the current message, which goes into a buffer or nowhere, to its end. `Pending` if it is not all there, or if only
    /// its receiver can read on.
    fn go_on(&mut self, around: &impl Surroundings, expected: Option<LinkId>) -> io::Result<Poll<()>> {
        let Some(incoming) = self.incoming.open() else { return Ok(Poll::Pending) };
        let (id, message) = match incoming.poll_rest() {
            Err(error) => return Err(self.incoming.broke(error)),
            Ok(Poll::Pending) => return Ok(Poll::Pending),
            Ok(Poll::Ready(whole)) => whole,
        };
        match self.links.get_mut(&id).filter(|link| !link.failed) {
            Some(link) => {
                link.arrived += (HEADER + message.len) as u64;
                incoming.guess = message.len;
                link.inbox.push_back(message);
                if expected != Some(id) {
                    around.news().tell();
                }
            }
            None => incoming.recycle(message.buffer),
        }
        self.look_for_more(around);
        Ok(Poll::Ready(()))
    }

    /// What was read with a message and comes after it is not on the socket any more: whose it is must look.
    #[inline]
    fn look_for_more(&mut self, around: &impl Surroundings) {
        if self.incoming.open().is_some_and(|incoming| incoming.has_more()) {
            around.news().tell();
        }
    }

    /// A message was taken: the peer may send as much again.
    fn took(&mut self, id: LinkId, len: usize) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.taken += HEADER + len;
        if link.taken < CREDIT {
            return;
        }
        let credit = std::mem::take(&mut link.taken) as u64;
        link.receivable.give_back(credit);
        let frame = Frame::Credit { link: id, credit };
        match &mut self.outgoing {
            Half::Open(outgoing) => _ = outgoing.send_soon(&frame.encode()), // the next send reports an error
            Half::Absent => self.owed.push(frame),
            Half::Broken(..) => {}
        }
    }
}
