//! What goes over a line: a header, and the bytes of a message after it.
//!
//! ```text
//! magic u32 │ length u24, kind and lane u8 │ group u64 │ credit u64 │ head 3 × u64 │ checksum u64 │ payload     little endian
//! ```

use std::io;

use tenfold_memory::Head;

pub(crate) const HEADER: usize = 56;

/// No payload can be longer; the pieces that are sent are much shorter.
pub(crate) const PAYLOAD_MAX: usize = (1 << 24) - 1;

/// A header begins with it; `VERSION` of the hello covers what follows.
const MAGIC: u32 = u32::from_le_bytes(*b"10f>");

/// Which messages of a line belong together: those of one lane of one group. They arrive in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinkId {
    pub group: u64,
    pub lane: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A message. Its payload follows.
    Message { link: LinkId, head: Head, len: usize, credit: u64 },
    /// The sender has taken so many bytes of what it received on a link: as many more may be sent. Comes with messages, and alone
    /// where none go that way.
    Credit { link: LinkId, credit: u64 },
}

impl Frame {
    /// # Panics
    /// If a message is longer than a header can say, which no piece is.
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let (kind, link, len, credit, head) = match *self {
            Frame::Message { link, head, len, credit } => (0, link, len, credit, head),
            Frame::Credit { link, credit } => (1, link, 0, credit, [0; 3]),
        };
        assert!(len <= PAYLOAD_MAX && link.lane < 2, "a piece is shorter than 16 MiB");
        let which = u64::from(kind << 1 | link.lane);
        let first = which << 56 | (len as u64) << 32 | u64::from(MAGIC);
        let words = [first, link.group, credit, head[0], head[1], head[2]];
        let mut bytes = [0; HEADER];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words.into_iter().chain([checksum(&words)])) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Refuses messages that are longer than `len_max`.
    pub(crate) fn decode(bytes: &[u8; HEADER], len_max: usize) -> io::Result<Frame> {
        let words: [u64; HEADER / 8] = std::array::from_fn(|at| {
            u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8 bytes were taken"))
        });
        let [first, group, credit, head @ .., sum] = words;
        if first as u32 != MAGIC {
            return Err(invalid("no message begins like that"));
        }
        if sum != checksum(&[first, group, credit, head[0], head[1], head[2]]) {
            return Err(invalid("the header of a message is damaged"));
        }
        let (len, which) = ((first >> 32) as usize & PAYLOAD_MAX, (first >> 56) as u8);
        let link = LinkId { group, lane: which & 1 };
        match which >> 1 {
            0 if len > len_max => {
                Err(invalid(format!("a message of {len} bytes where none has more than {len_max}")))
            }
            0 => Ok(Frame::Message { link, head, len, credit }),
            1 if len == 0 && head == [0; 3] => Ok(Frame::Credit { link, credit }),
            _ => Err(invalid("a header of a kind that is not known")),
        }
    }
}

/// Against damage, not against malice: each step maps sums one to one, so a change of any one word always shows, and
/// any other goes unnoticed once in 2⁶⁴ times.
fn checksum(words: &[u64; 6]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15; // 2⁶⁴ ÷ the golden ratio: its bits look random
    words.iter().fold(0, |sum: u64, word| (sum ^ word).wrapping_mul(ODD).rotate_left(29))
}

#[cold]
pub(super) fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}
