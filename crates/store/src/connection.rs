//! The buffers of one non-blocking connection of the server.
//!
//! An idle connection owns almost no memory. Input is read into one buffer of the server and kept here only
//! while a message is incomplete. Output is written immediately and kept here only while the peer does not
//! read. Long values are queued by reference, so that a reply of many megabytes costs a pointer. A reply of
//! many values is encoded piece by piece while the peer reads it, so that it costs one pointer per value.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::time::Instant;

use mio::net::TcpStream;
use tenfold_memory::NotInherited;

use crate::request::Operation;
use crate::table::SHARED_VALUE;
use crate::value::Value;
use crate::wire::{self, ReplySink, Scan};

/// Bytes written to one client before other clients get their turn: 100 clients that were sent 16 MB each
/// made all other clients wait for 0.7 s.
const WRITE_SHARE: usize = 256 << 10;

/// A reading peer must take this many bytes, or all that are left, within the limit for writing. A peer that
/// takes a byte now and then holds as much memory as one that takes none.
pub(crate) const PROGRESS: usize = 16 << 10;

/// One client, as the server sees it.
#[derive(Debug)]
pub(crate) struct Connection {
    /// A forked child that kept a copy would hide the end of this process from the client.
    pub(crate) stream: NotInherited<TcpStream>,
    pub(crate) peer: SocketAddr,
    pub(crate) since: Instant,
    /// Has it sent the magic words?
    pub(crate) validated: bool,
    /// The beginning of a message whose rest has not arrived, or whole messages that wait for the peer to
    /// read.
    pub(crate) input: Vec<u8>,
    pub(crate) scan: Scan,
    /// The number of bytes that `input` must have before decoding it can succeed.
    pub(crate) needs: usize,
    pub(crate) message_since: Option<Instant>,
    /// It waits for an expensive request to be served; its later requests wait too.
    pub(crate) in_line: bool,
    /// The socket may have bytes that we have not read.
    pub(crate) readable: bool,
    /// The socket may accept bytes that we have not written: a large reply is written in shares, alternating
    /// with other clients.
    pub(crate) writable: bool,
    /// The peer will send nothing more, but the end of the stream has not been read yet.
    pub(crate) peer_is_done: bool,
    /// The end of the stream was read. The connection stays open only until the peer has read its replies.
    pub(crate) ended: bool,
    pub(crate) output: Output,
    pub(crate) stalled_since: Option<Instant>,
    /// Bytes that the peer has taken since then.
    taken: usize,
    /// Its last request, and when it last sent something.
    pub(crate) last_operation: Option<Operation>,
    pub(crate) last_heard: Instant,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// The bytes of this connection that the server's total includes.
    pub(crate) counted: usize,
    /// The session that it opened.
    pub(crate) session: Option<usize>,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, peer: SocketAddr, now: Instant) -> Self {
        Connection {
            stream: stream.into(),
            peer,
            since: now,
            validated: false,
            input: Vec::new(),
            scan: Scan::default(),
            needs: 0,
            message_since: None,
            in_line: false,
            readable: false,
            writable: false,
            peer_is_done: false,
            ended: false,
            output: Output::default(),
            stalled_since: None,
            taken: 0,
            last_operation: None,
            last_heard: now,
            bytes_in: 0,
            bytes_out: 0,
            counted: 0,
            session: None,
        }
    }

    /// Bytes of memory that only this connection holds.
    pub(crate) fn held(&self) -> usize {
        self.input.capacity() + self.output.held()
    }

    /// Reads once. `Ok(None)`: no bytes available. `Ok(Some(0))`: end of the stream.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.stream.read(buffer) {
                Ok(length) => {
                    // On Linux, a read that did not fill the buffer has emptied the socket, and the next byte
                    // causes an event. But an end of the stream that arrived with these bytes causes none.
                    let emptied = cfg!(target_os = "linux") && length < buffer.len();
                    self.readable = !emptied || self.peer_is_done;
                    return Ok(Some(length));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    return Ok(None);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes what the peer takes, up to a share; sets `writable` if it would take more.
    pub(crate) fn flush(&mut self, pool: &mut Pool, now: Instant, written: &mut u64) -> io::Result<()> {
        let mut progress = 0;
        self.writable = false;
        while !self.output.is_empty() {
            if progress >= WRITE_SHARE {
                self.writable = true;
                self.stalled_since = None;
                self.taken = 0;
                return Ok(());
            }
            match self.output.write_to(&mut self.stream, pool) {
                Ok(length) => {
                    *written += length as u64;
                    self.bytes_out += length as u64;
                    progress += length;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.taken += progress;
                    if self.taken >= PROGRESS || self.stalled_since.is_none() {
                        self.stalled_since = Some(now);
                        self.taken = 0;
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.stalled_since = None;
        self.taken = 0;
        Ok(())
    }

    /// Since when it has held memory because its peer does not read, or does not finish a message.
    pub(crate) fn hoards_since(&self) -> Option<Instant> {
        [self.stalled_since, self.message_since].into_iter().flatten().min()
    }
}

/// Replies that the peer has not taken yet: `queue` first, then `tail`.
#[derive(Debug, Default)]
pub(crate) struct Output {
    queue: VecDeque<Chunk>,
    tail: Vec<u8>,
    /// Bytes of the first chunk (or of the tail, if there is none) that have been written.
    written: usize,
    /// Bytes still to be written.
    length: usize,
    /// Bytes of memory that the chunks of `queue` hold and that are counted nowhere else.
    queued: usize,
}

#[derive(Debug)]
enum Chunk {
    Owned(Box<[u8]>),
    Shared {
        value: Value,
        held: usize,
    },
    /// Values that are not encoded yet.
    List {
        values: std::vec::IntoIter<Option<Value>>,
        held: usize,
    },
}

/// What a queued chunk costs beyond its bytes: its slot in the queue, doubled for growth, and the allocator's
/// overhead.
const CHUNK: usize = 2 * size_of::<Chunk>() + 32;

/// A queue that has grown beyond this is not kept for the next reply.
const QUEUE_KEPT: usize = 16;

/// A list of values with more bytes than this is encoded in pieces of about this size.
const PIECE: usize = 64 << 10;

impl Chunk {
    /// Its bytes; nothing if they are not encoded yet.
    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Chunk::Owned(bytes) => Some(bytes),
            Chunk::Shared { value, .. } => Some(value),
            Chunk::List { .. } => None,
        }
    }

    /// Bytes of memory that it holds and that are counted nowhere else.
    fn held(&self) -> usize {
        CHUNK
            + match self {
                Chunk::Owned(bytes) => bytes.len(),
                Chunk::Shared { held, .. } | Chunk::List { held, .. } => *held,
            }
    }
}

impl Output {
    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Bytes still to be written, shared values included.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Bytes of memory that only this output holds.
    pub(crate) fn held(&self) -> usize {
        self.queued + self.tail.capacity()
    }

    /// Where to write the next reply.
    pub(crate) fn sink<'a>(&'a mut self, pool: &'a mut Pool) -> Sink<'a> {
        if self.tail.capacity() == 0 {
            self.tail = pool.take();
        }
        Sink { output: self }
    }

    fn write_to(&mut self, stream: &mut TcpStream, pool: &mut Pool) -> io::Result<usize> {
        const SLICES: usize = 16; // enough for one system call to fill any socket buffer
        self.encode_piece();
        let length = if self.queue.is_empty() {
            stream.write(&self.tail[self.written..])?
        } else {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let chunks = self.queue.iter().map(Chunk::bytes).chain([Some(self.tail.as_slice())]);
            let mut count = 0;
            for (slice, chunk) in slices.iter_mut().zip(chunks.map_while(|chunk| chunk)) {
                *slice = IoSlice::new(if count == 0 { &chunk[self.written..] } else { chunk });
                count += 1;
            }
            stream.write_vectored(&slices[..count])?
        };
        self.advance(length, pool);
        Ok(length)
    }

    fn advance(&mut self, length: usize, pool: &mut Pool) {
        self.length -= length;
        self.written += length;
        while let Some(first) = self.queue.front() {
            let Some(size) = first.bytes().map(<[u8]>::len) else { return };
            if self.written < size {
                return;
            }
            self.written -= size;
            self.queued -= first.held();
            self.queue.pop_front();
        }
        if self.queue.capacity() > QUEUE_KEPT {
            self.queue = VecDeque::new();
        }
        if self.written == self.tail.len() {
            self.written = 0;
            pool.give(std::mem::take(&mut self.tail));
        }
    }

    /// If the next thing to write is a list of values: encodes the next piece of it.
    fn encode_piece(&mut self) {
        if !matches!(self.queue.front(), Some(Chunk::List { .. })) {
            return;
        }
        let Some(list) = self.queue.pop_front() else { return };
        self.queued -= list.held();
        let Chunk::List { mut values, mut held } = list else { unreachable!("it was just looked at") };
        let mut piece = Piece { bytes: Vec::with_capacity(PIECE), long: None };
        while piece.bytes.len() < PIECE && piece.long.is_none() {
            let Some(value) = values.next() else { break };
            held -= LISTED;
            wire::put_value(&mut piece, value.as_ref());
        }
        if values.len() > 0 {
            self.push_front(Chunk::List { values, held });
        }
        if let Some(value) = piece.long {
            self.push_front(Chunk::Shared { value, held: 0 });
        }
        self.push_front(Chunk::Owned(piece.bytes.into()));
    }

    fn push_front(&mut self, chunk: Chunk) {
        self.queued += chunk.held();
        self.queue.push_front(chunk);
    }

    fn push_back(&mut self, chunk: Chunk) {
        self.queued += chunk.held();
        self.queue.push_back(chunk);
    }

    /// Turns the tail into a chunk, so that another chunk can follow. Copies just these bytes, because a
    /// client that does not read may have a thousand of them queued. The buffer is reused as the tail.
    fn queue_tail(&mut self) {
        if !self.tail.is_empty() {
            self.push_back(Chunk::Owned(self.tail.as_slice().into()));
            self.tail.clear();
        }
    }
}

/// What a value costs while it waits in a list. The table counts its bytes, even after the key has been
/// overwritten or deleted.
const LISTED: usize = size_of::<Option<Value>>();

/// The next bytes of a list, up to the first value that is not copied.
struct Piece {
    bytes: Vec<u8>,
    long: Option<Value>,
}

impl ReplySink for Piece {
    fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn value(&mut self, value: &Value) {
        if value.len() < SHARED_VALUE {
            self.bytes.extend_from_slice(value);
        } else {
            self.long = Some(value.clone());
        }
    }
}

/// Writes replies into an [`Output`].
pub(crate) struct Sink<'a> {
    output: &'a mut Output,
}

impl ReplySink for Sink<'_> {
    #[inline]
    fn bytes(&mut self, bytes: &[u8]) {
        self.output.tail.extend_from_slice(bytes);
        self.output.length += bytes.len();
    }

    #[inline]
    fn value(&mut self, value: &Value) {
        if value.len() < SHARED_VALUE {
            return self.bytes(value);
        }
        self.output.queue_tail();
        // The table counts a value that it still holds; a popped value belongs to this output alone.
        let held = if value.is_shared() { 0 } else { value.len() };
        self.output.push_back(Chunk::Shared { value: value.clone(), held });
        self.output.length += value.len();
    }

    fn list(&mut self, values: Vec<Option<Value>>) {
        let length: usize = values.iter().map(|value| wire::value_length(value.as_ref())).sum();
        if length <= PIECE {
            return values.iter().for_each(|value| wire::put_value(self, value.as_ref()));
        }
        self.output.queue_tail();
        let held = values.len() * LISTED;
        self.output.push_back(Chunk::List { values: values.into_iter(), held });
        self.output.length += length;
    }
}

/// Buffers kept for the next reply, so that a busy server allocates none.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    buffers: Vec<Vec<u8>>,
}

impl Pool {
    const BUFFERS_MAX: usize = 64; // replies of one turn that had to wake others
    const CAPACITY: usize = 4 << 10;
    const CAPACITY_MAX: usize = 64 << 10;

    fn take(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_else(|| Vec::with_capacity(Self::CAPACITY))
    }

    fn give(&mut self, mut buffer: Vec<u8>) {
        if self.buffers.len() < Self::BUFFERS_MAX && (1..=Self::CAPACITY_MAX).contains(&buffer.capacity()) {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Takes what an output would write, in pieces of the sizes given.
    fn drain(output: &mut Output, pool: &mut Pool, sizes: &[usize]) -> Vec<u8> {
        let mut taken = Vec::new();
        let mut sizes = sizes.iter().cycle();
        while !output.is_empty() {
            output.encode_piece();
            let first = output.queue.front().map_or(output.tail.as_slice(), |chunk| chunk.bytes().unwrap());
            let rest = &first[output.written..];
            let length = rest.len().min(*sizes.next().expect("an endless iterator"));
            taken.extend_from_slice(&rest[..length]);
            output.advance(length, pool);
        }
        taken
    }

    /// Slow progress does not entitle a peer to hold the rest forever.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "flushing needs a time, any time")]
    fn a_peer_that_takes_a_little_now_and_then_has_stalled() {
        use std::time::Duration;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        socket.connect(&listener.local_addr().unwrap().into()).unwrap();
        let mut peer: std::net::TcpStream = socket.into();
        let (stream, address) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        socket2::SockRef::from(&stream).set_send_buffer_size(4096).unwrap();
        let start = Instant::now();
        let mut connection = Connection::new(TcpStream::from_std(stream), address, start);
        let (mut pool, mut written) = (Pool::default(), 0);
        connection.output.sink(&mut pool).bytes(&vec![7; 1 << 20]);
        connection.flush(&mut pool, start, &mut written).unwrap();
        assert_eq!(connection.stalled_since, Some(start));
        // It reads until the server has noticed, several times. Each read is progress, but all together are
        // too little.
        let mut taken = 0;
        for seconds in 1.. {
            let (before, now) = (written, start + Duration::from_secs(seconds));
            while written == before {
                peer.read_exact(&mut [0; 64]).unwrap();
                connection.flush(&mut pool, now, &mut written).unwrap();
            }
            taken += (written - before) as usize;
            if taken >= PROGRESS {
                assert_eq!(connection.stalled_since, Some(now), "it has taken {taken} bytes");
                assert!(seconds > 1, "it has taken them one after the other");
                break;
            }
            assert_eq!(connection.stalled_since, Some(start), "it has taken {taken} bytes");
        }
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out_however_it_is_cut(
            lengths in prop::collection::vec(prop_oneof![0_usize..50, 16_000..17_000_usize], 0..20),
            sizes in prop::collection::vec(1_usize..20_000, 1..5),
        ) {
            let (mut output, mut pool) = (Output::default(), Pool::default());
            let mut expected = Vec::new();
            for (index, length) in lengths.into_iter().enumerate() {
                let value: Value = vec![index as u8; length].into();
                output.sink(&mut pool).bytes(&[0xaa, index as u8]);
                output.sink(&mut pool).value(&value);
                expected.extend_from_slice(&[0xaa, index as u8]);
                expected.extend_from_slice(&value);
                if index % 3 == 0 {
                    let list: Vec<_> = (0..index).flat_map(|_| [Some(value.clone()), None, Some("short".into())]).collect();
                    list.iter().for_each(|value| wire::put_value(&mut expected, value.as_ref()));
                    output.sink(&mut pool).list(list);
                }
            }
            prop_assert_eq!(output.len(), expected.len());
            prop_assert_eq!(drain(&mut output, &mut pool, &sizes), expected);
            prop_assert_eq!(output.held(), 0);
        }
    }

    #[test]
    fn a_long_value_is_queued_by_reference() {
        let value: Value = vec![7; 1 << 20].into();
        let _in_the_table = value.clone();
        let (mut output, mut pool) = (Output::default(), Pool::default());
        for _ in 0..1000 {
            output.sink(&mut pool).value(&value);
        }
        assert_eq!(output.len(), 1000 << 20);
        assert_eq!(output.queued, 1000 * CHUNK);
    }

    #[test]
    fn a_list_of_values_that_are_copied_costs_a_piece_at_a_time() {
        let value: Value = vec![7; SHARED_VALUE - 1].into();
        let (mut output, mut pool) = (Output::default(), Pool::default());
        output.sink(&mut pool).list(vec![Some(value.clone()); 10_000]);
        assert_eq!(output.len(), 10_000 * (8 + value.len()));
        let (before, mut most) = (output.held(), 0);
        while !output.is_empty() {
            output.encode_piece();
            most = most.max(output.held());
            let length = output.queue[0].bytes().unwrap().len();
            output.advance(length, &mut pool);
        }
        assert!(before <= 10_000 * 32 + Pool::CAPACITY + CHUNK, "{before} bytes before anything is read");
        assert!(most <= before + 2 * PIECE, "{most} bytes while it is read");
    }
}
