//! A thread that waits: it enters, sleeps, and leaves what is under way to another.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::roster::{Waiter, Wake, Watching};
use super::{Engine, State};
use crate::fabric::{Bell, Fabric, When};
use crate::transport::Socket;
use crate::work::Shared;

/// A thread that falls asleep.
#[derive(Clone, Copy)]
pub(super) enum Asleep<'a> {
    Waiter(Waiter, &'a Arc<Shared>),
    /// Woken by the control plane too.
    Helper(BorrowedFd<'a>),
}

impl Asleep<'_> {
    pub(super) fn watching(&self) -> Watching {
        match self {
            Asleep::Waiter(waiter, _) => Watching::Waiter(*waiter),
            Asleep::Helper(_) => Watching::Helper,
        }
    }
}

/// A thread in `wait`, for as long as it drives. If it unwinds, another thread takes over all the same.
pub(super) struct Waiting<'a> {
    pub(super) engine: &'a Engine,
    pub(super) fabric: &'a Arc<Fabric>,
    pub(super) is_inside: bool,
}

impl Waiting<'_> {
    pub(super) fn enter(&mut self, state: &mut State) -> Waiter {
        self.is_inside = true;
        state.roster.enter()
    }

    pub(super) fn leave(&mut self, state: &mut State) {
        self.is_inside = false;
        let is_busy = state.is_busy();
        match state.roster.leave(is_busy) {
            Wake::Nobody => {}
            Wake::Waiter(waiter) => state.wake(waiter),
            Wake::Helper => self.fabric.call_helper(When::Now, true),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.is_inside {
            let mut state = self.engine.lock(); // free: the lock is taken after this value is made, so it is released before
            self.leave(&mut state);
        }
    }
}

/// Sleeps on the bell, on `sockets` (each with whether it is to be written), and on `also`.
pub(super) fn sleep_on(
    bell: Option<&Bell>,
    sockets: &[(Socket, bool)],
    also: Option<BorrowedFd<'_>>,
    limit: Duration,
) {
    let mut polled = Vec::with_capacity(2 + sockets.len());
    polled.extend(bell.map(|bell| PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)));
    polled.extend(also.map(|also| PollFd::from_borrowed_fd(also, PollFlags::IN)));
    for (socket, write) in sockets {
        let flags = if *write { PollFlags::OUT } else { PollFlags::IN };
        polled.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
    }
    let _ = rustix::event::poll(&mut polled, Some(&timespec(limit))); // a signal is as good as news
}

pub(super) fn timespec(limit: Duration) -> Timespec {
    Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) }
}
