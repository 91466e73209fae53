//! How ranks find each other through a store.
//!
//! Every rank puts a card into the store. Rank 0 reads all cards, and writes one table for all ranks (see `cards`). Ranks at
//! the same place are *probably* on one host; whether they are is found out by connecting: each tries the Unix socket of the
//! first of them and maps its memory. It answers with what it found, and rank 0 writes for all ranks which share a host,
//! for they must all choose the same plans. So each rank makes the same number of requests, however many ranks there are.
//!
//! Cards are kept apart by the number of groups of the same name that were made before. A rank that fails to join and tries again
//! writes another card under the same number. Rank 0 compares the answers with the cards that it read; if a rank answers in
//! another attempt, or has moved to another address, rank 0 reads all cards again and writes another table. A table is
//! known by a number of its own, because rank 0 may have to try again, too.
//!
//! A rank listens on the address from which it reaches the store. That is loopback if the store is on the same host, or
//! does not have a server. If the table then shows ranks on other hosts, the ranks with loopback choose another address and
//! write another card: no rank advertises loopback to another host.

#![expect(clippy::disallowed_methods, reason = "waits for a peer to answer")]

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenfold_memory::Room;
use tenfold_plan::{Rank, Topology};
use tenfold_store::{Deadline, Store, StoreCollectives, StoreExt as _, Value};

use super::Options;
use super::cards::{Brief, Card, Contact, Refusal, Sequence, Table, VERSION};
use super::cores::{Cores, Crowd};
use super::directory::{self, Directory};
use super::trouble::stuck::StuckSettings;
use crate::control;
use crate::debug;
use crate::environment::{Environment, TransportChoice};
use crate::fabric::{FabricHandle, FabricOptions, Whereabouts};
use crate::fault::{ErrorKind, Fault, store_fault};
use crate::transport::mesh::Member;
use crate::wire::{FabricId, RAILS_MAX};

/// How long a peer on this host has to show its memory before it is treated as one elsewhere.
const MEETING_MAX: Duration = Duration::from_secs(10);

/// When a rank that waits for the end of a round first looks whether rank 0 has begun another; then after twice as long each
/// time, up to the second.
const LOOK: Duration = Duration::from_millis(500);
const LOOK_MAX: Duration = Duration::from_secs(5);

/// What rank 0 writes once it has read all cards.
#[derive(Debug, Serialize, Deserialize)]
enum Published {
    Table(Table),
    /// These ranks cannot form a group. With the attempts that it is about, by rank.
    Refused(Refusal, Vec<u64>),
}

/// What a rank answers to a table.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// The first rank of its host.
    host: Rank,
    attempt: u64,
    on_loopback: Loopback,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Loopback {
    /// Other hosts reach this rank, or there are none.
    Fine,
    /// This rank has written another card, with another address.
    Moved,
    /// Other hosts cannot reach this rank, and it has no other address.
    Stranded,
}

/// What rank 0 makes of the answers.
#[derive(Debug, Serialize, Deserialize)]
enum Verdict {
    /// The group is made. By rank: which host it is on.
    Made(Sequence),
    /// Cards have changed: there is another table, with this number.
    Again(u64),
    Refused(Refusal),
}

/// What a rank knows once it has met the others.
#[derive(Debug)]
pub(super) struct Met {
    pub fabric: FabricHandle,
    pub id: u64,
    pub room: Arc<Room>,
    pub members: Vec<Member>,
    /// Finds members that are not known yet.
    pub directory: Option<Arc<Directory>>,
    pub topology: Topology,
    pub control: control::Lease,
    /// All ranks are at debug level DETAIL; see [`planner`](super::planner).
    pub confirms_roots: bool,
    pub crowd: Crowd,
}

/// What a rank shows of itself; another one if it moves to another address.
struct Own {
    fabric: FabricHandle,
    room: Arc<Room>,
    attempt: u64,
}

impl Own {
    fn new(interfaces: &[IpAddr], chosen: bool, of: &Seeker<'_>) -> Result<Own, Fault> {
        let options = fabric_options(interfaces, of.options, &of.environment);
        let fabric = FabricHandle::shared(options, chosen, of.id)?;
        let room = new_room(&fabric, of.size, of.id)?;
        Ok(Own { fabric, room, attempt: crate::fabric::random()? as u64 })
    }
}

/// A rank that looks for the others.
struct Seeker<'a> {
    store: &'a Arc<dyn Store>,
    rank: Rank,
    size: usize,
    options: &'a Options,
    environment: Environment,
    transport: TransportChoice,
    settings: &'a str,
    id: u64,
    /// Of all keys of this group.
    prefix: String,
    deadline: Deadline,
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
    let interfaces = first_interfaces(store, options, &environment)?;
    let prefix = format!("tenfold/{}/{generation}", options.name);
    let seeker =
        Seeker { store, rank, size, options, environment, transport, settings, id, prefix, deadline };
    let mut own = Own::new(&interfaces, seeker.has_chosen(), &seeker)?;
    let (table, found, hosts) = if rank == 0 { seeker.lead(&mut own)? } else { seeker.follow(&mut own)? };
    // The store may have ended with the rank that hosts it; then no group is made through it again.
    let _ = store.set(&made, generation.to_string());
    seeker.forget(generation - 1);
    let Found { contacts, mut peers, .. } = found;
    let mut members = Vec::with_capacity(size);
    for (other, contact) in contacts.iter().enumerate() {
        let near = hosts[other] == hosts[rank];
        let peer = peers[other].take();
        if let (Some(peer), Some(contact)) = (&peer, contact) {
            peer.set_whereabouts(whereabouts(contact, near));
        }
        members.push(Member { peer, near, room: contact.as_ref().map_or(0, |contact| contact.room) });
    }
    if transport == TransportChoice::SharedMemory && members.iter().any(|member| !member.near) {
        let message = "TENFOLD_TRANSPORT=shm, but not all ranks share this host's memory";
        return Err(Fault::new(ErrorKind::Connect, message).hint("use `auto`, which takes TCP between hosts"));
    }
    let directory = contacts.iter().any(Option::is_none).then(|| {
        Arc::new(Directory::new(&own.fabric, Arc::clone(store), format!("{}/contact", seeker.prefix)))
    });
    let crowd = table.crowd(rank, size).ok_or_else(|| senseless("list of kernels"))?;
    let Own { fabric, room, .. } = own;
    let topology = Topology::new(hosts);
    let confirms_roots = table.confirms_roots;
    Ok(Met { fabric, id, room, members, directory, topology, control, confirms_roots, crowd })
}

/// What a rank found out with a table.
struct Found {
    answer: Answer,
    /// By rank; nothing where they were not looked up.
    contacts: Vec<Option<Contact>>,
    peers: Peers,
}

impl Seeker<'_> {
    fn has_chosen(&self) -> bool {
        !self.options.interfaces.is_empty() || self.environment.interfaces.is_some()
    }

    fn card(&self, own: &Own) -> Card {
        let Own { fabric, room, attempt, .. } = own;
        let place = place();
        let is_apart = self.transport == TransportChoice::Tcp;
        Card {
            version: VERSION,
            size: self.size,
            attempt: *attempt,
            contact: Contact {
                fabric: fabric.id().to_string(),
                host: fabric.host().to_string(),
                pid: fabric.pid(),
                socket: fabric.socket_name().to_string(),
                address: fabric.address(),
                rails: fabric.rails().to_vec(),
                room: room.offset(),
            },
            place: if is_apart { fabric.id().to_string() } else { place.clone() },
            loopback: place,
            settings: self.settings.to_string(),
            detail: debug::level() == debug::Level::Detail,
            cores: Cores::here(),
        }
    }

    /// Writes this rank's card, and before it what other ranks of a large group read of it.
    fn introduce(&self, own: &Own) -> Result<(), Fault> {
        let card = self.card(own);
        if self.size > self.options.contacts_max {
            self.write(&format!("contact/{}", self.rank), &Brief::from(card.contact.clone()))?;
        }
        if self.rank > 0 { self.write(&format!("card/{}", self.rank), &card) } else { Ok(()) }
    }

    /// What rank 0 does.
    fn lead(&self, own: &mut Own) -> Result<(Table, Found, Vec<usize>), Fault> {
        let mut before: Option<u64> = None;
        loop {
            self.introduce(own)?;
            let cards: Vec<Card> = self.gather("card", &self.card(own))?;
            let attempts: Vec<u64> = cards.iter().map(|card| card.attempt).collect();
            let number = crate::fabric::random()? as u64;
            let table = Table::of(&cards, self.options.contacts_max);
            let published = match &table {
                Ok(table) => Published::Table(table.clone()),
                Err(fault) => Published::Refused(fault.clone().into(), attempts.clone()),
            };
            self.write(&format!("table/{number}"), &published)?;
            self.write("table", &number)?;
            if let Some(before) = before {
                self.write(&format!("hosts/{before}"), &Verdict::Again(number))?;
            }
            let table = table?;
            let found = self.examine(&table, own)?;
            let answers: Vec<Answer> = self.gather(&format!("found/{number}"), &found.answer)?;
            let is_current = |(answer, attempt): (&Answer, &u64)| {
                answer.attempt == *attempt && answer.on_loopback != Loopback::Moved
            };
            if !answers.iter().zip(&attempts).all(is_current) {
                before = Some(number);
                continue;
            }
            let is_stranded = |answer: &Answer| answer.on_loopback == Loopback::Stranded;
            let stranded = table.refusal.clone().filter(|_| answers.iter().any(is_stranded));
            let hosts: Vec<usize> = answers.iter().map(|answer| answer.host).collect();
            let misplaced = hosts.iter().position(|host| *host >= self.size).map(|rank| {
                let message = format!("rank {rank} says that it shares a host with rank {}", hosts[rank]);
                let hint = "another program writes to the keys of this group: use a store of its own";
                Refusal::from(Fault::new(ErrorKind::Protocol, message).peer(rank).hint(hint))
            });
            let verdict = match stranded.or(misplaced) {
                Some(refusal) => Verdict::Refused(refusal),
                None => Verdict::Made(Sequence::of(&in_order(&hosts))),
            };
            self.write(&format!("hosts/{number}"), &verdict)?;
            return match verdict {
                Verdict::Refused(refusal) => Err(refusal.into()),
                _ => Ok((table, found, in_order(&hosts))),
            };
        }
    }

    /// What all other ranks do.
    fn follow(&self, own: &mut Own) -> Result<(Table, Found, Vec<usize>), Fault> {
        self.introduce(own)?;
        let mut number: u64 = self.read("table", "card")?;
        loop {
            let table = match self.read(&format!("table/{number}"), "card")? {
                Published::Table(table) => table,
                Published::Refused(refusal, attempts) => {
                    // It may be about an earlier attempt of this rank: then rank 0 has to try again, too.
                    if attempts.get(self.rank).is_none_or(|attempt| *attempt == own.attempt) {
                        return Err(refusal.into());
                    }
                    number = self.next_round(number)?;
                    continue;
                }
            };
            let found = self.examine(&table, own)?;
            self.write(&format!("found/{number}/{}", self.rank), &found.answer)?;
            let Some(verdict) = self.verdict(number)? else {
                number = self.read("table", "card")?;
                continue;
            };
            let _ = self.store.delete_key(self.key(&format!("found/{number}/{}", self.rank))); // rank 0 has read it
            match verdict {
                Verdict::Made(hosts) => {
                    let hosts = hosts.numbers(self.size).ok_or_else(|| senseless("list of hosts"))?;
                    return Ok((table, found, hosts));
                }
                Verdict::Again(next) => number = next,
                Verdict::Refused(refusal) => return Err(refusal.into()),
            }
        }
    }

    /// How a round ended; nothing if rank 0 has begun another without ending it.
    fn verdict(&self, number: u64) -> Result<Option<Verdict>, Fault> {
        let key = format!("hosts/{number}");
        let mut look = LOOK;
        loop {
            if self.left() <= look {
                return self.read(&key, &format!("found/{number}")).map(Some);
            }
            let waited = self.store.wait_for(&[self.key(&key)], look);
            look = (2 * look).min(LOOK_MAX);
            match waited {
                Ok(()) => return self.read(&key, &format!("found/{number}")).map(Some),
                Err(error) if !error.is_timeout() => return Err(store_fault(error)),
                Err(_) if self.read::<u64>("table", "card")? != number => return Ok(None),
                Err(_) => {}
            }
        }
    }

    /// The number of the round after `number`.
    fn next_round(&self, number: u64) -> Result<u64, Fault> {
        loop {
            let next = self.read("table", "card")?;
            if next != number {
                return Ok(next);
            }
            if self.deadline.passed() {
                let message = "rank 0 has not joined again after it refused to";
                return Err(Fault::timeout(message).peer(0).hint("see the log of rank 0"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Finds out what a table means for this rank.
    fn examine(&self, table: &Table, own: &mut Own) -> Result<Found, Fault> {
        let mut on_loopback = Loopback::Fine;
        if table.stranded.contains(&self.rank) {
            let address = crate::network::address_for_others(table.elsewhere.iter().copied());
            on_loopback = match address {
                Some(address) if !self.has_chosen() && own.fabric.interface() != Some(address) => {
                    *own = Own::new(&[address], true, self)?;
                    self.introduce(own)?;
                    Loopback::Moved
                }
                _ => Loopback::Stranded,
            };
        }
        let places = table.places(self.size).ok_or_else(|| senseless("list of places"))?;
        let contacts = match table.contacts(self.size) {
            Some(contacts) => contacts.into_iter().map(Some).collect(),
            None => self.look_up(&places)?,
        };
        let mut peers = introduce(&own.fabric, &contacts, self.rank)?;
        let is_settled = table.stranded.is_empty();
        let host =
            if is_settled { self.find_host(&own.fabric, &contacts, &mut peers, &places)? } else { self.rank };
        Ok(Found { answer: Answer { host, attempt: own.attempt, on_loopback }, contacts, peers })
    }

    /// Reads the contacts of the ranks of this place, and of some others that this rank is likely to talk to.
    fn look_up(&self, places: &[Rank]) -> Result<Vec<Option<Contact>>, Fault> {
        let wanted = directory::neighbours(self.rank, places);
        let keys: Vec<String> = wanted.iter().map(|other| self.key(&format!("contact/{other}"))).collect();
        let values = self.store.multi_get(&keys).map_err(store_fault)?;
        let mut contacts = vec![None; self.size];
        for (other, value) in wanted.into_iter().zip(values) {
            contacts[other] = Some(parse::<Brief>(other, "contact", &value)?.into());
        }
        Ok(contacts)
    }

    /// The first rank of this rank's host: itself, or one whose memory it could map.
    fn find_host(
        &self,
        fabric: &FabricHandle,
        contacts: &[Option<Contact>],
        peers: &mut Peers,
        places: &[Rank],
    ) -> Result<Rank, Fault> {
        let first = places[self.rank];
        let (Some(peer), Some(contact)) = (&peers[first], &contacts[first]) else { return Ok(self.rank) };
        if self.transport == TransportChoice::Tcp {
            return Ok(self.rank);
        }
        peer.set_whereabouts(whereabouts(contact, true));
        fabric.dial(peer);
        let deadline = Deadline::after(MEETING_MAX);
        while peer.segment().is_none() {
            if deadline.passed() || peer.fate().is_some() {
                tracing::warn!(
                    "rank {first} ({peer}) seems to be on this host, but its memory cannot be mapped; using TCP instead: {:?}",
                    peer.fate()
                );
                peers[first] = Some(fabric.peer_anew(peer.id()));
                return Ok(self.rank);
            }
            // The helper thread meets it; a look every millisecond is often enough for something that happens once.
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(first)
    }

    fn key(&self, what: &str) -> String {
        format!("{}/{what}", self.prefix)
    }

    fn write(&self, what: &str, value: &impl Serialize) -> Result<(), Fault> {
        let value = serde_json::to_vec(value).map_err(|error| Fault::argument(error.to_string()))?;
        self.store.set(self.key(what), value).map_err(store_fault)
    }

    /// What rank 0 writes once all ranks have written `marks/<rank>`. If it takes too long, the ranks that have not are named.
    fn read<T: for<'de> Deserialize<'de>>(&self, what: &str, marks: &str) -> Result<T, Fault> {
        let ranks = StoreCollectives::new(Arc::clone(self.store), self.rank, self.size);
        let value = ranks.await_root(self.key(what), self.key(marks), self.left());
        parse(0, what, &value.map_err(store_fault)?)
    }

    /// The values of all ranks, on rank 0.
    fn gather<T: Serialize + for<'de> Deserialize<'de>>(&self, what: &str, own: &T) -> Result<Vec<T>, Fault> {
        let own = serde_json::to_vec(own).map_err(|error| Fault::argument(error.to_string()))?;
        let ranks = StoreCollectives::new(Arc::clone(self.store), self.rank, self.size);
        let values = ranks.all_gather(self.key(what), own, self.left()).map_err(store_fault)?;
        values.iter().enumerate().map(|(rank, value)| parse(rank, what, value)).collect()
    }

    fn left(&self) -> Duration {
        self.deadline.left().unwrap_or(Duration::MAX)
    }

    /// Removes what this rank left for others in an earlier group, which all have read: those who are here have joined since.
    /// Only to save memory, and not every store can delete.
    fn forget(&self, generation: i64) {
        if generation < 1 {
            return;
        }
        let old = |what: &str| format!("tenfold/{}/{generation}/{what}", self.options.name);
        let _ = self.store.delete_key(old(&format!("card/{}", self.rank)));
        if self.size > self.options.contacts_max {
            let _ = self.store.delete_key(old(&format!("contact/{}", self.rank)));
        }
        if self.rank == 0
            && self.store.check(&[old("table")]).unwrap_or(false)
            && let Ok(number) = self.store.get(old("table"))
            && let Ok(number) = serde_json::from_slice::<u64>(&number)
        {
            for what in [format!("table/{number}"), format!("hosts/{number}"), format!("found/{number}/0")] {
                let _ = self.store.delete_key(old(&what));
            }
            let _ = self.store.delete_key(old("table"));
        }
    }
}

fn parse<T: for<'de> Deserialize<'de>>(rank: Rank, what: &str, value: &Value) -> Result<T, Fault> {
    serde_json::from_slice(value).map_err(|error| {
        let message = format!("rank {rank} left a value for `{what}` in the store that is invalid: {error}");
        Fault::new(ErrorKind::Protocol, message).peer(rank)
    })
}

#[cold]
pub(super) fn senseless(what: &str) -> Fault {
    Fault::new(ErrorKind::Protocol, format!("rank 0 left an invalid {what} in the store")).peer(0)
}

/// Hosts by number, in the order of their first ranks.
pub(super) fn in_order(hosts: &[usize]) -> Vec<usize> {
    let mut numbers = std::collections::HashMap::new();
    hosts
        .iter()
        .map(|host| {
            let next = numbers.len();
            *numbers.entry(host).or_insert(next)
        })
        .collect()
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

/// The addresses on which to listen as long as nothing is known of the other ranks: at least one.
fn first_interfaces(
    store: &Arc<dyn Store>,
    options: &Options,
    environment: &Environment,
) -> Result<Vec<IpAddr>, Fault> {
    if !options.interfaces.is_empty() {
        return Ok(options.interfaces.clone());
    }
    let towards = crate::network::behind_relay(store.address(), environment.store);
    crate::network::addresses_towards(towards, environment.interfaces.as_ref())
        .map_err(|error| Fault::io("cannot choose an address for other hosts", error))
}

pub(super) fn fabric_options(
    interfaces: &[IpAddr],
    options: &Options,
    environment: &Environment,
) -> FabricOptions {
    FabricOptions {
        interface: interfaces.first().copied(),
        rails: interfaces.iter().skip(1).take(RAILS_MAX - 1).copied().collect(),
        ports: environment.ports.clone(),
        heartbeat: options.heartbeat.or(environment.heartbeat).unwrap_or(super::options::HEARTBEAT),
        in_place: options.in_place,
        stuck: StuckSettings {
            after: options
                .stuck_after
                .or(environment.stuck_after)
                .map_or(StuckSettings::default().after, |after| (!after.is_zero()).then_some(after)),
            policy: options.on_stuck.or(environment.on_stuck).unwrap_or_default(),
        },
        progress: environment.progress.clone(),
    }
}

/// Kernel and network namespace of this process.
pub(super) fn place() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

pub(super) fn whereabouts(contact: &Contact, near: bool) -> Whereabouts {
    let Contact { host, pid, socket, address, rails, .. } = contact.clone();
    Whereabouts { host, pid, socket_name: socket, near, address, rails }
}

type Peers = Vec<Option<Arc<crate::fabric::Peer>>>;

fn introduce(fabric: &FabricHandle, contacts: &[Option<Contact>], rank: Rank) -> Result<Peers, Fault> {
    let peer = |(other, contact): (usize, &Option<Contact>)| {
        let Some(contact) = contact else { return Ok(None) };
        let id = fabric_id(other, contact)?;
        Ok((other != rank).then(|| fabric.peer(id)))
    };
    contacts.iter().enumerate().map(peer).collect()
}

pub(super) fn fabric_id(rank: Rank, contact: &Contact) -> Result<FabricId, Fault> {
    let id = u128::from_str_radix(&contact.fabric, 16);
    id.map(FabricId)
        .map_err(|_| Fault::new(ErrorKind::Protocol, format!("rank {rank} has no proper card")).peer(rank))
}
