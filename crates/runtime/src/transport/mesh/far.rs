//! A peer on another host: a connection in each direction for each lane, and whether bytes still arrive after its end.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tenfold_memory::{Lane, SLOT};
use tenfold_plan::Rank;

use super::{Mesh, Route};
use crate::fabric::{Fabric, Fate, Peer};
use crate::fault::{ErrorKind, Fault};
use crate::transport::tcp::{TcpIn, TcpOut};
use crate::wire::{FabricId, Hello, Purpose};

/// If no byte of a rank that has left arrives for this long, none will.
const STALLED: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Far {
    /// Whose connections are taken for its own.
    pub(super) peer: Option<FabricId>,
    pub(super) outgoing: [Option<TcpOut>; 2],
    pub(super) incoming: [Option<TcpIn>; 2],
    /// Nothing more comes on that lane: sleeping on its socket would be no sleep.
    pub(super) ended: [bool; 2],
    /// How many bytes had arrived at the last look that found more than before, and when that was.
    pub(super) progress: Option<(u64, Instant)>,
}

impl Mesh {
    pub(super) fn pump_far(&mut self) -> Result<(), Fault> {
        let mut index = 0;
        while let Some(&peer) = self.unwritten.get(index) {
            let mut is_idle = true;
            if let Route::Far(far) = &mut self.routes[peer] {
                for outgoing in far.outgoing.iter_mut().flatten().filter(|outgoing| !outgoing.is_idle()) {
                    let _ = outgoing.poll_flush().map_err(|error| lost(peer, &error))?;
                    is_idle &= outgoing.is_idle();
                }
            }
            if is_idle {
                self.unwritten.swap_remove(index);
            } else {
                index += 1;
            }
        }
        Ok(())
    }

    /// Do bytes of a rank that has left or died still arrive? As long as they do, the end of its data link is the truth: the
    /// kernel sends what a process wrote before its end, however long that takes.
    pub(crate) fn is_arriving(&mut self, rank: Rank, now: Instant) -> bool {
        let Some(peer) = &self.members[rank].peer else { return false };
        if matches!(peer.fate(), Some(Fate::Silent(_) | Fate::Unreachable(_))) {
            return false;
        }
        let Route::Far(far) = &mut self.routes[rank] else { return false };
        let open = far.incoming.iter().zip(far.ended).filter(|(_, ended)| !ended);
        let mut open = open.filter_map(|(incoming, _)| incoming.as_ref()).peekable();
        if open.peek().is_none() {
            return false;
        }
        let arrived = open.map(TcpIn::arrived).sum();
        match far.progress {
            Some((before, at)) if before == arrived => now.saturating_duration_since(at) < STALLED,
            _ => {
                far.progress = Some((arrived, now));
                true
            }
        }
    }
}

pub(super) fn hello(fabric: &Fabric, group: u64, from: Rank, to: Rank, lane: Lane, peer: &Peer) -> Hello {
    let purpose = Purpose::Data { group, from: from as u32, to: to as u32, lane: lane as u8 };
    Hello { purpose, sender: fabric.id(), receiver: peer.id() }
}

pub(super) fn open(fabric: &Fabric, peer: &Peer, rank: Rank, hello: &Hello) -> Result<TcpOut, Fault> {
    let address: SocketAddr = peer.address().ok_or_else(|| {
        Fault::new(ErrorKind::Connect, format!("rank {rank} ({peer}) has no TCP address")).peer(rank)
    })?;
    TcpOut::connect(address, fabric.interface(), hello).map_err(|error| {
        let reason = crate::network::explain(&error);
        Fault::new(ErrorKind::Connect, format!("cannot reach rank {rank} ({peer}) at {address}: {reason}"))
            .peer(rank)
    })
}

/// The connection on which `from` sends, once it is here.
pub(super) fn accepted<'a>(
    fabric: &Fabric,
    far: &'a mut Far,
    group: u64,
    from: Rank,
    lane: Lane,
) -> Result<Option<&'a mut TcpIn>, Fault> {
    let incoming = &mut far.incoming[lane as usize];
    if incoming.is_none()
        && let Some(peer) = far.peer
        && let Some(stream) = fabric.claim(group, peer, from, lane)
    {
        *incoming = Some(TcpIn::new(stream, SLOT.max(TCP_PIECE)).map_err(|error| lost(from, &error))?);
    }
    Ok(incoming.as_mut())
}

/// Longest message on a TCP link.
pub(crate) const TCP_PIECE: usize = 512 * 1024;

#[cold]
pub(super) fn lost(peer: Rank, error: &std::io::Error) -> Fault {
    // The fabric knows more about a peer that died than its broken connection does; see `Mesh::lost_among`.
    Fault::new(ErrorKind::PeerLost, format!("the connection with rank {peer} broke: {error}")).peer(peer)
}
