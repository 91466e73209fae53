//! How ranks find each other through a store.
//!
//! Every rank puts a card into the store and reads everybody else's. Ranks whose cards name the same kernel and network are
//! *probably* on one host; whether they are is found out by connecting: each tries the Unix socket of the first of them
//! and maps its memory. What it found goes into the store too, so that all ranks have the same idea of who is near whom,
//! for they must all choose the same plans.
//!
//! Cards are kept apart by the number of groups of the same name that were made before. A rank that fails to join and tries again
//! writes another card under the same number, so with its place each rank says which cards it has read; while these differ,
//! all read them again.
//!
//! A rank listens on the address from which it reaches the store. That is loopback if the store is on the same host, or is
//! no server at all. If the cards then show ranks on other hosts, the ranks with loopback choose another address, and all
//! exchange cards once more: no rank advertises loopback to another host.

#![expect(clippy::disallowed_methods, reason = "waits for a peer to answer")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenfold_memory::Room;
use tenfold_plan::{Rank, Topology};
use tenfold_store::{Deadline, Store, StoreCollectives, StoreExt as _};

use super::trouble::stuck::StuckSettings;
use super::{Options, planner};
use crate::control;
use crate::debug;
use crate::environment::{Environment, TransportChoice};
use crate::fabric::{FabricHandle, FabricOptions, Whereabouts};
use crate::fault::{ErrorKind, Fault, store_fault};
use crate::transport::mesh::Member;
use crate::wire::FabricId;

/// How long a peer on this host has to show its memory before it is treated as one elsewhere.
const MEETING_MAX: Duration = Duration::from_secs(10);

/// A rank, as it introduces itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    version: u32,
    size: usize,
    fabric: String,
    host: String,
    pid: u32,
    /// Kernel and network namespace: where these are equal, Unix sockets may reach.
    place: String,
    /// The same, also if this rank shares no memory: where these are equal, loopback reaches.
    loopback: String,
    socket: String,
    address: Option<SocketAddr>,
    room: usize,
    /// What decides which plan an operation gets; see [`planner::settings`].
    settings: String,
    /// Is the rank at debug level DETAIL?
    detail: bool,
}

const VERSION: u32 = 4;

/// What a rank found out about its place.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Found {
    /// The first rank of its host.
    host: Rank,
    /// A number made of the cards that it has read.
    cards: u64,
}

/// What a rank knows once it has met the others.
#[derive(Debug)]
pub(super) struct Met {
    pub fabric: FabricHandle,
    pub id: u64,
    pub room: Arc<Room>,
    pub members: Vec<Member>,
    pub topology: Topology,
    pub control: control::Lease,
    /// All ranks are at debug level DETAIL; see [`planner`].
    pub confirms_roots: bool,
}

pub(super) fn meet(
    store: &Arc<dyn Store>,
    rank: Rank,
    size: usize,
    options: &Options,
    settings: &str,
) -> Result<Met, Fault> {
    let environment = Environment::read()?;
    // First, so that a rank that waits for others can be asked what it does.
    let control = control::start_if_asked(environment.worker_server.as_deref(), rank)?;
    let deadline = Deadline::after(options.timeout.min(store.timeout()));
    let transport = options.transport.unwrap_or(environment.transport);
    // Groups of this name that were made before. An attempt that failed does not count, so a rank that tries again and one
    // that comes late find each other.
    let made = format!("tenfold/{}/made", options.name);
    let generation = 1 + store.add(&made, 0).map_err(store_fault)?;
    let id = group_id(&options.name, generation as u64);
    let interface = first_interface(store, options, &environment)?;
    let mut fabric = make_fabric(interface, options, &environment)?;
    let mut room = new_room(&fabric, size, id)?;
    let introduction = |fabric: &FabricHandle, room: &Room| Card {
        version: VERSION,
        size,
        fabric: fabric.id().to_string(),
        host: fabric.host().to_string(),
        pid: fabric.pid(),
        place: if transport == TransportChoice::Tcp { fabric.id().to_string() } else { place() },
        loopback: place(),
        socket: fabric.socket_name().to_string(),
        address: fabric.address(),
        room: room.offset(),
        settings: settings.to_string(),
        detail: debug::level() == debug::Level::Detail,
    };
    let exchange =
        Exchange { store, rank, size, prefix: format!("tenfold/{}/{generation}", options.name), deadline };
    let (cards, peers, hosts) = loop {
        let mut cards: Vec<Card> = exchange.all("card", &introduction(&fabric, &room))?;
        check(&cards, rank, size)?;
        if (0..size).any(|rank| is_stranded(&cards, rank)) {
            let chosen = options.interface.is_some() || environment.interfaces.is_some();
            if is_stranded(&cards, rank) && !chosen {
                let loopback = &cards[rank].loopback;
                let others = cards.iter().filter(|card| card.loopback != *loopback && !is_on_loopback(card));
                if let Some(address) =
                    crate::network::address_for_others(others.filter_map(|card| card.address))
                {
                    fabric = make_fabric(address, options, &environment)?;
                    room = new_room(&fabric, size, id)?;
                }
            }
            cards = exchange.all("second_card", &introduction(&fabric, &room))?;
            check(&cards, rank, size)?;
            refuse_stranded(&cards)?;
        }
        let mut peers = introduce(&fabric, &cards, rank)?;
        let host = find_host(&fabric, &cards, &mut peers, rank, transport)?;
        let own = Found { host, cards: digest(&cards) };
        let found: Vec<Found> = exchange.all("host", &own)?;
        let others = found.iter().position(|other| other.cards != own.cards);
        let Some(other) = others else {
            break (cards, peers, found.into_iter().map(|found| found.host).collect::<Vec<usize>>());
        };
        // One of us has read the card of an attempt that failed: that rank has written another since, or will.
        if deadline.passed() {
            let message = format!(
                "rank {other} ({}, pid {}) has not joined again after it failed to",
                cards[other].host, cards[other].pid
            );
            return Err(Fault::new(ErrorKind::Timeout, message).peer(other).hint("see that rank's log"));
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    if hosts.iter().any(|host| *host >= size) {
        return Err(Fault::new(ErrorKind::Protocol, "a rank names a host that nobody is on"));
    }
    // The store may have ended with the rank that hosts it; then no group is made through it again.
    let _ = store.set(&made, generation.to_string());
    exchange.forget(generation - 1, &options.name);
    let members = peers.into_iter().zip(&cards).zip(&hosts);
    let members =
        members.map(|((peer, card), host)| Member { peer, near: *host == hosts[rank], room: card.room });
    let members: Vec<Member> = members.collect();
    for (member, card) in members.iter().zip(&cards) {
        if let Some(peer) = &member.peer {
            peer.set_whereabouts(whereabouts(card, member.near));
        }
    }
    if transport == TransportChoice::SharedMemory && members.iter().any(|member| !member.near) {
        let message = "TENFOLD_TRANSPORT=shm, but not all ranks share this host's memory";
        return Err(Fault::new(ErrorKind::Connect, message).hint("use `auto`, which takes TCP between hosts"));
    }
    let confirms_roots = cards.iter().all(|card| card.detail);
    Ok(Met { fabric, id, room, members, topology: Topology::new(hosts), control, confirms_roots })
}

/// The same number on ranks that have read the same cards.
fn digest(cards: &[Card]) -> u64 {
    let ids: Vec<&str> = cards.iter().map(|card| card.fabric.as_str()).collect();
    group_id(&ids.join(" "), 0)
}

/// A room for a group of `size`, in this rank's segment.
pub(super) fn new_room(fabric: &FabricHandle, size: usize, id: u64) -> Result<Arc<Room>, Fault> {
    let key = (id as u32 ^ (id >> 32) as u32).max(1); // 0 stands for no room
    let room = Room::new(fabric.segment(), size, key).map_err(|error| {
        Fault::io("no shared memory for a group", error)
            .hint("drop groups or shared tensors that are no longer used")
    })?;
    Ok(Arc::new(room))
}

/// The same number on all ranks for the same group, and another for every other.
pub(super) fn group_id(name: &str, joined: u64) -> u64 {
    // FNV-1a, then mixed so that the upper half depends on everything too. Fixed, since ranks may run different builds.
    let bytes = name.bytes().chain(joined.to_le_bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ hash >> 32
}

/// The address on which to listen as long as nothing is known of the other ranks.
fn first_interface(
    store: &Arc<dyn Store>,
    options: &Options,
    environment: &Environment,
) -> Result<IpAddr, Fault> {
    match options.interface {
        Some(interface) => Ok(interface),
        None => crate::network::address_towards(store.address(), environment.interfaces.as_ref())
            .map_err(|error| Fault::io("cannot choose an address for other hosts", error)),
    }
}

fn make_fabric(
    interface: IpAddr,
    options: &Options,
    environment: &Environment,
) -> Result<FabricHandle, Fault> {
    FabricHandle::new(FabricOptions {
        interface: Some(interface),
        ports: environment.ports.clone(),
        heartbeat: options.heartbeat.or(environment.heartbeat).unwrap_or(super::HEARTBEAT),
        in_place: options.in_place,
        stuck: StuckSettings {
            after: options
                .stuck_after
                .or(environment.stuck_after)
                .map_or(StuckSettings::default().after, |after| (!after.is_zero()).then_some(after)),
            policy: options.on_stuck.or(environment.on_stuck).unwrap_or_default(),
        },
        progress: environment.progress.clone(),
    })
}

fn is_on_loopback(card: &Card) -> bool {
    card.address.is_none_or(|address| address.ip().to_canonical().is_loopback())
}

/// Can ranks on other hosts not reach this one?
fn is_stranded(cards: &[Card], rank: Rank) -> bool {
    is_on_loopback(&cards[rank]) && cards.iter().any(|other| other.loopback != cards[rank].loopback)
}

/// Fails in the same words on all ranks.
fn refuse_stranded(cards: &[Card]) -> Result<(), Fault> {
    let Some(rank) = (0..cards.len()).find(|rank| is_stranded(cards, *rank)) else { return Ok(()) };
    let card = &cards[rank];
    let other = cards.iter().position(|other| other.loopback != card.loopback).unwrap_or(rank);
    let message = format!(
        "rank {rank} (host {}, pid {}) listens on loopback only, and rank {other} (host {}, pid {}) is on another host",
        card.host, card.pid, cards[other].host, cards[other].pid
    );
    let hint = format!(
        "on host {}, set TENFOLD_INTERFACE (or GLOO_SOCKET_IFNAME) to the network interface that other hosts reach",
        card.host
    );
    Err(Fault::new(ErrorKind::Connect, message).peer(rank).hint(hint))
}

/// Kernel and network namespace of this process.
fn place() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

fn whereabouts(card: &Card, near: bool) -> Whereabouts {
    let Card { host, pid, socket, address, .. } = card.clone();
    Whereabouts { host, pid, socket_name: socket, near, address }
}

fn check(cards: &[Card], rank: Rank, size: usize) -> Result<(), Fault> {
    for (other, card) in cards.iter().enumerate() {
        if card.version != VERSION {
            let message =
                format!("rank {other} speaks version {} and rank {rank} version {VERSION}", card.version);
            return Err(Fault::new(ErrorKind::Protocol, message)
                .peer(other)
                .hint("run the same tenfold everywhere"));
        }
        if card.size != size {
            let message =
                format!("rank {other} says that the group has {} ranks, rank {rank} says {size}", card.size);
            return Err(Fault::new(ErrorKind::Mismatch, message).peer(other));
        }
        if let Some(twin) = cards[..other].iter().position(|earlier| earlier.fabric == card.fabric) {
            let message = format!("ranks {twin} and {other} are the same process");
            return Err(Fault::new(ErrorKind::Mismatch, message).peer(other));
        }
    }
    planner::check_settings(cards.iter().map(|card| card.settings.as_str()))
}

type Peers = Vec<Option<Arc<crate::fabric::Peer>>>;

fn introduce(fabric: &FabricHandle, cards: &[Card], rank: Rank) -> Result<Peers, Fault> {
    let peer = |(other, card): (usize, &Card)| {
        let id = u128::from_str_radix(&card.fabric, 16);
        let id = id.map_err(|_| {
            Fault::new(ErrorKind::Protocol, format!("rank {other} has no proper card")).peer(other)
        })?;
        Ok((other != rank).then(|| fabric.peer(FabricId(id))))
    };
    cards.iter().enumerate().map(peer).collect()
}

/// The first rank of this rank's host: itself, or one whose memory it could map.
fn find_host(
    fabric: &FabricHandle,
    cards: &[Card],
    peers: &mut Peers,
    rank: Rank,
    transport: TransportChoice,
) -> Result<Rank, Fault> {
    let first = cards.iter().position(|card| card.place == cards[rank].place).unwrap_or(rank);
    let Some(peer) = &peers[first] else { return Ok(rank) };
    if transport == TransportChoice::Tcp {
        return Ok(rank);
    }
    peer.set_whereabouts(whereabouts(&cards[first], true));
    fabric.dial(peer);
    let deadline = Deadline::after(MEETING_MAX);
    while peer.segment().is_none() {
        if deadline.passed() || peer.fate().is_some() {
            tracing::warn!(
                "rank {first} ({peer}) seems to be on this host, but its memory cannot be mapped; using TCP instead: {:?}",
                peer.fate()
            );
            peers[first] = Some(fabric.peer_anew(peer.id()));
            return Ok(rank);
        }
        // The helper thread meets it; a look every millisecond is often enough for something that happens once.
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(first)
}

/// Values that all ranks exchange through the store.
struct Exchange<'a> {
    store: &'a Arc<dyn Store>,
    rank: Rank,
    size: usize,
    prefix: String,
    deadline: Deadline,
}

impl Exchange<'_> {
    fn all<T: Serialize + for<'de> Deserialize<'de>>(&self, what: &str, own: &T) -> Result<Vec<T>, Fault> {
        let own = serde_json::to_vec(own).map_err(|error| Fault::argument(error.to_string()))?;
        let ranks = StoreCollectives::new(Arc::clone(self.store), self.rank, self.size);
        let limit = self.deadline.left().unwrap_or(Duration::MAX);
        let values = ranks.all_gather(format!("{}/{what}", self.prefix), own, limit).map_err(store_fault)?;
        let parse = |(rank, value): (usize, &tenfold_store::Value)| {
            serde_json::from_slice(value).map_err(|error| {
                let message = format!("rank {rank} left a {what} in the store that makes no sense: {error}");
                Fault::new(ErrorKind::Protocol, message).peer(rank)
            })
        };
        values.iter().enumerate().map(parse).collect()
    }

    /// Removes what this rank left for others, which all have read: those who are here have joined since.
    fn forget(&self, generation: i64, name: &str) {
        for what in ["card", "second_card", "host"] {
            let key = format!("tenfold/{name}/{generation}/{what}/{}", self.rank);
            if generation > 0 {
                let _ = self.store.delete_key(key); // only to save memory; not every store can delete
            }
        }
    }
}
