//! A group for tests whose ranks run on the thread of the test: nothing moves unless the test polls it, there are no helper
//! threads, and the test sees what each rank asks of its helper.

#![expect(clippy::disallowed_methods, reason = "plays a peer whose connection arrives now")]

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tenfold_memory::{Buffer, Bytes, DType, Head, Lane};
use tenfold_plan::{Kind, Needs, Rank, Topology};
use tenfold_store::Deadline;

use super::connect::new_room;
use super::planner::Planner;
use super::point_to_point::Receiving;
use super::state::{GroupState, Job};
use super::trouble::stuck::StuckSettings;
use crate::fabric::{FabricHandle, FabricOptions, Order, Peer, Whereabouts};
use crate::label::{Label, OpKind};
use crate::recorder::{self, Called, Newcomer, Sizes, Stalls};
use crate::run::{Buffers, Parts, Run};
use crate::transport::Transport as _;
use crate::transport::line::{Frame, LinkId};
use crate::transport::mesh::{Member, Mesh};
use crate::wire::FabricId;
use crate::work::{Recorded, Shared, Work};

/// Names the group on the wire.
pub(super) const GROUP: u64 = 77;

/// No test takes this long unless a rank hangs.
const HANG: Duration = Duration::from_secs(40);

pub(super) struct Scripted {
    pub fabrics: Vec<FabricHandle>,
    pub ranks: Vec<GroupState>,
    /// Works that ended and that a callback waits for.
    pub finished: Vec<Arc<Shared>>,
}

/// An operation that was called. Unlike a [`Work`], it may be ignored: ranks go on when they are polled.
pub(super) struct Started(Work);

impl std::ops::Deref for Started {
    type Target = Work;

    fn deref(&self) -> &Work {
        &self.0
    }
}

impl Scripted {
    /// All ranks of a group that share memory and know each other.
    pub(super) fn near(size: usize) -> Self {
        Scripted::near_with(size, StuckSettings::default())
    }

    pub(super) fn near_with(size: usize, stuck: StuckSettings) -> Self {
        let options = FabricOptions { stuck, ..FabricOptions::for_tests() };
        let fabrics: Vec<FabricHandle> =
            (0..size).map(|_| FabricHandle::without_helper(options.clone()).unwrap()).collect();
        let rooms: Vec<_> = fabrics.iter().map(|fabric| new_room(fabric, size, GROUP).unwrap()).collect();
        let state = |rank: Rank| {
            let member = |other: Rank| {
                let peer =
                    (other != rank).then(|| introduce(&fabrics[rank], fabrics[other].id(), other, true));
                Member { peer, near: true, room: rooms[other].offset() }
            };
            let mesh = Mesh::new(
                rank,
                GROUP,
                Arc::clone(&fabrics[rank]),
                Arc::clone(&rooms[rank]),
                (0..size).map(member).collect(),
            );
            new_state(&fabrics[rank], rank, mesh, Topology::new(vec![0; size]))
        };
        let ranks: Vec<_> = (0..size).map(state).collect();
        for (fabric, state) in fabrics.iter().zip(&ranks) {
            state.peers().iter().for_each(|peer| fabric.dial(peer));
        }
        fabrics.iter().for_each(|fabric| fabric.bell.silence());
        Scripted { fabrics, ranks, finished: Vec::new() }
    }

    /// Rank 0 of a group whose other ranks are on other hosts and are played by the test.
    pub(super) fn far(size: usize) -> Self {
        let fabric = FabricHandle::without_helper(FabricOptions::for_tests()).unwrap();
        let room = new_room(&fabric, size, GROUP).unwrap();
        let member = |other: Rank| {
            let peer = (other > 0).then(|| introduce(&fabric, far_id(other), other, false));
            Member { peer, near: other == 0, room: 0 }
        };
        let mesh = Mesh::new(0, GROUP, Arc::clone(&fabric), room, (0..size).map(member).collect());
        let state = new_state(&fabric, 0, mesh, Topology::new((0..size).collect()));
        Scripted { fabrics: vec![fabric], ranks: vec![state], finished: Vec::new() }
    }

    pub(super) fn poll(&mut self, rank: Rank) -> bool {
        self.ranks[rank].poll(&self.fabrics[rank], &mut self.finished)
    }

    /// Polls all ranks until none moves.
    pub(super) fn settle(&mut self) {
        let mut turns = 0..10_000;
        while (0..self.ranks.len()).fold(false, |moved, rank| self.poll(rank) | moved) {
            turns.next().expect("ranks stop when they have nothing left to do");
        }
    }

    /// A peer as `rank` knows it.
    pub(super) fn peer(&self, rank: Rank, other: Rank) -> Arc<Peer> {
        self.ranks[rank].members()[other].peer.clone().expect("it is another rank")
    }

    /// What `rank` has told others since the last call: to which processes, and what.
    pub(super) fn told(&self, rank: Rank) -> Vec<(Vec<FabricId>, Vec<u8>)> {
        let told = self.fabrics[rank].take_orders().into_iter().filter_map(|order| match order {
            Order::Tell { to, group, text } => {
                assert_eq!(group, GROUP);
                Some((to.iter().map(|peer| peer.id()).collect(), text))
            }
            _ => None,
        });
        told.collect()
    }

    pub(super) fn hear(&mut self, rank: Rank, text: &[u8]) {
        self.ranks[rank].hear(&self.fabrics[rank], text, &mut self.finished);
    }

    fn note(&mut self, rank: Rank, label: Label, peer: Option<Rank>, limit: Duration) -> Arc<Shared> {
        let state = &mut self.ranks[rank];
        let (collectives, messages) = state.counts();
        let ticket = state.record.called(&Called {
            kind: label.kind,
            dtype: label.dtype,
            reduction: label.reduction_code(),
            collectives,
            messages,
            input: Sizes::NONE,
            output: Sizes::NONE,
            peer,
            timeout_ms: 0,
            starts: false,
        });
        let record = Recorded { group: Arc::clone(&state.record), ticket, detail: None };
        let size = state.members().len();
        Shared::new(label, "", Deadline::after(limit), &"scripted".into(), rank, size, record)
    }

    fn handle(&self, rank: Rank, work: Arc<Shared>) -> Started {
        Started(Work::new(work, self.fabrics[rank].clone()))
    }

    /// A send of bytes.
    pub(super) fn send(&mut self, rank: Rank, bytes: &[u8], to: Rank, tag: u32) -> Started {
        let label = Label::new(OpKind::Send, self.ranks[rank].next_message_number());
        let label = label.elements(DType::U8, bytes.len()).tag(tag);
        let work = self.note(rank, label, Some(to), HANG);
        self.ranks[rank].messages.send(Arc::clone(&work), Buffer::from_slice(bytes).lend(), to);
        self.handle(rank, work)
    }

    /// A receive of up to `len` bytes; without `from`, a message of any rank will do.
    pub(super) fn receive(
        &mut self,
        rank: Rank,
        len: usize,
        from: Option<Rank>,
        tag: u32,
    ) -> (Buffer, Started) {
        self.receive_within(rank, len, from, tag, HANG)
    }

    pub(super) fn receive_within(
        &mut self,
        rank: Rank,
        len: usize,
        from: Option<Rank>,
        tag: u32,
        limit: Duration,
    ) -> (Buffer, Started) {
        let kind = if from.is_some() { OpKind::Recv } else { OpKind::RecvAnySource };
        let label =
            Label::new(kind, self.ranks[rank].next_message_number()).elements(DType::U8, len).tag(tag);
        let work = self.note(rank, label, from, limit);
        let mut buffer = Buffer::zeros(DType::U8, len);
        let receiving = Receiving { work: Arc::clone(&work), view: buffer.lend(), from, tag };
        self.ranks[rank].messages.receive(receiving);
        (buffer, self.handle(rank, work))
    }

    /// A barrier that is planned and remembered, and not in the queue.
    pub(super) fn plan_barrier(&mut self, rank: Rank) -> Run {
        let label = Label::new(OpKind::Barrier, 0);
        self.plan(rank, label, Kind::Barrier, Buffers::default())
    }

    fn plan(&mut self, rank: Rank, label: Label, kind: Kind, buffers: Buffers) -> Run {
        let state = &mut self.ranks[rank];
        let root = label.root_of().unwrap_or(0);
        let choice = state.planner.plan(kind, 0, root, Needs::default());
        let mut run = Run::unplanned(label, rank, buffers, None);
        run.follow(&mut state.roots);
        run.assign(state.next_sequence_number(), choice.name, choice.plan, state.planner.piece());
        state.remember(run.label(), 1000);
        run
    }

    fn enqueue(&mut self, rank: Rank, run: Run, limit: Duration) -> Started {
        let work = self.note(rank, *run.label(), None, limit);
        let job = Job { run, work: Arc::clone(&work), finish: None, stalls: Stalls::default() };
        self.ranks[rank].enqueue(job);
        self.handle(rank, work)
    }

    pub(super) fn barrier(&mut self, rank: Rank) -> Started {
        self.barrier_within(rank, HANG)
    }

    pub(super) fn barrier_within(&mut self, rank: Rank, limit: Duration) -> Started {
        let run = self.plan_barrier(rank);
        self.enqueue(rank, run, limit)
    }

    /// A broadcast of one byte.
    pub(super) fn broadcast(&mut self, rank: Rank, root: Rank) -> Started {
        let label = Label::new(OpKind::Broadcast, 0).elements(DType::U8, 1).root(root);
        let mut buffers = Buffers::of(Buffer::zeros(DType::U8, 1).lend());
        buffers.set(tenfold_plan::Area::Output, Parts::One(0));
        let run = self.plan(rank, label, Kind::Broadcast, buffers);
        self.enqueue(rank, run, HANG)
    }

    /// Posts a point-to-point message as `rank` would, whatever it says.
    pub(super) fn post(&mut self, rank: Rank, to: Rank, head: &Head, bytes: &[u8]) {
        let mesh = &mut self.ranks[rank].mesh;
        let mut stage = None;
        let sent = mesh.poll_send(Lane::PointToPoint, to, &mut stage, head, Bytes::of(bytes), false);
        assert_eq!(sent.unwrap(), Poll::Ready(()), "there is a link with room");
        mesh.close(Lane::PointToPoint, stage);
    }

    /// Opens the line on which a rank on another host sends messages to rank 0, and which it uses for one lane.
    pub(super) fn open_link(&self, from: Rank, lane: Lane) -> FarEnd {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.connect(&listener.local_addr().unwrap().into()).unwrap();
        let stream = TcpStream::from(socket);
        self.fabrics[0].hand_in(far_id(from), listener.accept().unwrap().0, Instant::now());
        FarEnd { stream, link: LinkId { group: GROUP, lane: lane as u8 } }
    }
}

/// The end of a line on another host.
pub(super) struct FarEnd {
    stream: TcpStream,
    link: LinkId,
}

impl FarEnd {
    pub(super) fn send(&mut self, head: &Head, bytes: &[u8]) {
        self.send_part(head, bytes, bytes.len());
    }

    /// Sends a message of `len` bytes, but not more of it than `bytes`.
    pub(super) fn send_part(&mut self, head: &Head, bytes: &[u8], len: usize) {
        let header = Frame::Message { link: self.link, head: *head, len, credit: 0 }.encode();
        self.stream.write_all(&[&header, bytes].concat()).unwrap();
    }
}

fn new_state(fabric: &FabricHandle, rank: Rank, mesh: Mesh, topology: Topology) -> GroupState {
    let record = recorder::join(Newcomer {
        name: "scripted",
        rank,
        size: topology.size(),
        global_ranks: None,
        fabric: fabric.id(),
        among_threads: true,
    });
    let planner = Planner::new(topology, rank, Vec::new(), false);
    *GroupState::new(GROUP, "scripted".into(), rank, mesh, planner, record)
}

/// The process of a rank on another host.
pub(super) fn far_id(rank: Rank) -> FabricId {
    FabricId(rank as u128)
}

fn introduce(fabric: &FabricHandle, id: FabricId, rank: Rank, near: bool) -> Arc<Peer> {
    let peer = fabric.peer(id);
    let (host, pid, socket_name) = (format!("h{rank}"), 100 + rank as u32, String::new());
    let (address, rails) = (None, Vec::new());
    peer.set_whereabouts(Whereabouts { host, pid, socket_name, near, address, rails });
    peer
}

/// Polls what arrives through loopback until it is there.
pub(super) fn until_ready<T>(mut poll: impl FnMut() -> Poll<T>) -> T {
    let limit = Deadline::after(HANG);
    loop {
        match poll() {
            Poll::Ready(value) => return value,
            Poll::Pending => {
                assert!(!limit.passed(), "nothing arrived in {HANG:?}");
                std::thread::yield_now();
            }
        }
    }
}
