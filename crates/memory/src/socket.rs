//! Sockets and spans: one system call for a header and the bytes that follow it.
//!
//! The kernel reads and writes the spans itself, by address. No Rust reference to them is ever made, so what [`Span`] and
//! [`Bytes`] promise holds here too: other spans may overlap them, other processes may write to them.
//!
//! Nothing here waits, whatever the socket's mode, and a closed peer is an error, never a signal.

use std::ffi::c_void;
use std::io::{self, IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg};

use crate::{Bytes, Span};

/// The system's `iovec`: where, and how many bytes.
#[repr(C)]
struct Range<'a> {
    start: *mut c_void,
    len: usize,
    lent: PhantomData<&'a std::cell::Cell<u8>>,
}

const _: () = {
    assert!(size_of::<Range<'_>>() == size_of::<IoSlice<'_>>());
    assert!(size_of::<Range<'_>>() == size_of::<IoSliceMut<'_>>());
    assert!(align_of::<Range<'_>>() == align_of::<IoSlice<'_>>());
    assert!(align_of::<Range<'_>>() == align_of::<IoSliceMut<'_>>());
};

/// Sends as much of `header` and then `bytes` as the socket takes in one call, and returns how much that was.
/// [`io::ErrorKind::WouldBlock`] if it takes nothing now.
#[inline]
pub fn send(socket: BorrowedFd<'_>, header: &[u8], bytes: Bytes<'_>) -> io::Result<usize> {
    let header = Range { start: header.as_ptr().cast_mut().cast(), len: header.len(), lent: PhantomData };
    let bytes = Range { start: bytes.start().cast_mut().cast(), len: bytes.len(), lent: PhantomData };
    let ranges = [header, bytes];
    // SAFETY: `IoSlice` is documented to have the layout of `iovec`, which is `Range`'s; size and alignment are asserted
    // above. Both ranges may be read while their lenders' lifetimes last, which is beyond this call, and are only
    // handed to the kernel.
    let slices = unsafe { &*(&raw const ranges).cast::<[IoSlice<'_>; 2]>() };
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Receives into `header` and then `target` what is there, up to their length; says how much. Nothing means that the peer
/// has closed, unless nothing was asked for. [`io::ErrorKind::WouldBlock`] if nothing is there yet.
#[inline]
pub fn receive(socket: BorrowedFd<'_>, header: &mut [u8], target: Span<'_>) -> io::Result<usize> {
    receive_into(socket, [range_of(header), range_of_span(target)])
}

/// The same in the other order: into `target`, and then into `header` what follows it.
#[inline]
pub fn receive_rest(socket: BorrowedFd<'_>, target: Span<'_>, header: &mut [u8]) -> io::Result<usize> {
    receive_into(socket, [range_of_span(target), range_of(header)])
}

fn range_of(bytes: &mut [u8]) -> Range<'_> {
    Range { start: bytes.as_mut_ptr().cast(), len: bytes.len(), lent: PhantomData }
}

fn range_of_span(span: Span<'_>) -> Range<'_> {
    Range { start: span.start().cast(), len: span.len(), lent: PhantomData }
}

#[inline]
fn receive_into(socket: BorrowedFd<'_>, mut ranges: [Range<'_>; 2]) -> io::Result<usize> {
    // SAFETY: as in `send`; and both may be written to, the header because it is borrowed for that, the target by the
    // contract of `Span`.
    let slices = unsafe { &mut *(&raw mut ranges).cast::<[IoSliceMut<'_>; 2]>() };
    loop {
        match recvmsg(socket, slices, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?.bytes),
        }
    }
}

/// Has `bind` to an address leave the port to `connect`, which needs one that is free towards its peer only.
pub fn choose_port_late(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads an integer that lives until the call returns.
    let answer = unsafe {
        let (level, option) = (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT);
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const on).cast(), len)
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(all(test, not(miri)))] // Miri knows no sockets
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_header_and_its_bytes_arrive_in_one_piece_whatever_the_cut_at_the_other_end() {
        let text = b"head: and what follows it";
        for sent in 0..=text.len() {
            for received in 0..=text.len() {
                let (left, right) = UnixStream::pair().expect("a pair of sockets");
                let count =
                    send(left.as_fd(), &text[..sent], Bytes::of(&text[sent..])).expect("there is room");
                assert_eq!(count, text.len());
                let (mut header, mut rest) = (vec![0; received], vec![0; text.len() - received]);
                let count = receive(right.as_fd(), &mut header, Span::of(&mut rest)).expect("it was sent");
                assert_eq!(count, text.len());
                assert_eq!([&header[..], &rest].concat(), text);
                send(left.as_fd(), text, Bytes::of(&[])).expect("there is room");
                let count =
                    receive_rest(right.as_fd(), Span::of(&mut rest), &mut header).expect("it was sent");
                assert_eq!(count, text.len());
                assert_eq!([rest, header].concat(), text);
            }
        }
    }

    #[test]
    fn nothing_there_no_room_and_a_closed_peer_are_told_apart_without_waiting() {
        let (left, right) = UnixStream::pair().expect("a pair of sockets"); // both of the blocking kind
        let mut header = [0; 8];
        let nothing = receive(right.as_fd(), &mut header, Span::empty()).expect_err("nothing was sent");
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        let many = vec![7; 64 << 10];
        let full = loop {
            match send(left.as_fd(), b"", Bytes::of(&many)) {
                Ok(count) => assert!(count > 0),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(right);
        let closed = send(left.as_fd(), b"hello?", Bytes::of(&[])).expect_err("the other end is closed");
        assert_eq!(closed.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(receive(left.as_fd(), &mut header, Span::empty()).ok(), None,);
    }

    #[test]
    fn a_peer_that_closed_in_order_is_the_end() {
        let (left, right) = UnixStream::pair().expect("a pair of sockets");
        drop(left);
        let mut bytes = [0; 8];
        assert_eq!(receive(right.as_fd(), &mut [], Span::of(&mut bytes)).expect("an end is not an error"), 0);
    }
}
