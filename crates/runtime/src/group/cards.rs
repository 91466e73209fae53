//! How ranks introduce themselves, and what all ranks must know about all others. Pure.
//!
//! Each rank writes a [`Card`]. Rank 0 reads all cards, compares them, and writes one [`Table`] for all. In a group of up to
//! [`FULL_MAX`] ranks the table contains the [`Contact`] of each rank. In a larger group that would be too many bytes for one
//! store: there the table says only who shares a host, in a few bytes, every rank writes its contact under a key of its own,
//! too, and a rank reads the contacts of those it talks to.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tenfold_plan::Rank;

use super::cores::{Cores, Crowd, crowded};
use super::planner;
use crate::fault::{ErrorKind, Fault};

pub(super) const VERSION: u32 = 6;

/// Groups of up to this many ranks have all contacts in their table: 256 tables of about 35 KB are 9 MB.
pub(super) const FULL_MAX: usize = 256;

/// Addresses on other hosts that a table has for ranks on loopback.
const ELSEWHERE_MAX: usize = 16;

/// What a rank needs to reach another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Contact {
    pub fabric: String,
    pub host: String,
    pub pid: u32,
    pub socket: String,
    pub address: Option<SocketAddr>,
    /// The same on further interfaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rails: Vec<SocketAddr>,
    /// Where its room for the group begins in its segment.
    pub room: usize,
}

/// A contact on its own, in few bytes: a rank of a large group reads some tens of them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Brief(
    String,
    String,
    u32,
    String,
    Option<SocketAddr>,
    usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")] Vec<SocketAddr>,
);

impl From<Contact> for Brief {
    fn from(Contact { fabric, host, pid, socket, address, rails, room }: Contact) -> Self {
        let door = socket.strip_prefix(&format!("tenfold/{pid}/")).map_or(socket.clone(), short);
        Brief(short(&fabric), host, pid, door, address, room, rails)
    }
}

impl From<Brief> for Contact {
    fn from(Brief(fabric, host, pid, door, address, room, rails): Brief) -> Self {
        let socket = if door.contains('/') { door } else { format!("tenfold/{pid}/{}", long(&door)) };
        Contact { fabric: long(&fabric), host, pid, socket, address, rails, room }
    }
}

/// Digits of numbers to base 64.
const DIGITS: &[u8; 64] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_";

/// A number of 32 hexadecimal digits to base 64, the last digit first; any other text as it is.
fn short(hexadecimal: &str) -> String {
    let Ok(number) = u128::from_str_radix(hexadecimal, 16) else { return hexadecimal.to_string() };
    (0..22).map(|at| char::from(DIGITS[(number >> (6 * at)) as usize & 63])).collect()
}

fn long(short: &str) -> String {
    let digit = |byte: u8| DIGITS.iter().position(|digit| *digit == byte);
    let digits: Option<Vec<usize>> = short.bytes().map(digit).collect();
    match digits {
        Some(digits) if digits.len() == 22 => {
            let number = digits.iter().rev().fold(0_u128, |number, digit| number << 6 | *digit as u128);
            format!("{number:032x}")
        }
        _ => short.to_string(),
    }
}

/// A rank, as it introduces itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Card {
    pub version: u32,
    pub size: usize,
    /// Another number whenever the rank writes a card: a card that was left by an attempt that failed is recognised.
    pub attempt: u64,
    #[serde(flatten)]
    pub contact: Contact,
    /// Kernel and network namespace: where these are equal, Unix sockets may reach.
    pub place: String,
    /// The same, also if this rank shares no memory: where these are equal, loopback reaches.
    pub loopback: String,
    /// What decides which plan an operation gets; see [`planner::settings`].
    pub settings: String,
    /// Is the rank at debug level DETAIL?
    pub detail: bool,
    pub cores: Cores,
}

impl Card {
    fn is_on_loopback(&self) -> bool {
        self.contact.address.is_none_or(|address| address.ip().to_canonical().is_loopback())
    }
}

/// What rank 0 tells all ranks about all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Table {
    /// By rank: where it is; ranks with equal numbers may share memory.
    places: Sequence,
    /// By rank: which kernel it runs on.
    kernels: Sequence,
    /// By rank: does it share its cores with others?
    crowded: Sequence,
    /// Are all ranks at debug level DETAIL?
    pub confirms_roots: bool,
    /// Ranks on loopback, although the group has ranks on other hosts.
    pub stranded: Vec<Rank>,
    /// If there are such ranks: addresses of others.
    pub elsewhere: Vec<SocketAddr>,
    /// How the group is refused if they find no address.
    pub refusal: Option<Refusal>,
    /// In a group of up to [`FULL_MAX`] ranks. Names of hosts, which contacts have by number, come first.
    contacts: Option<(Vec<String>, Vec<Row>)>,
}

/// A contact, without what is the same for many.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Row(
    String,
    usize,
    u32,
    String,
    Option<SocketAddr>,
    usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")] Vec<SocketAddr>,
);

impl Table {
    /// What `cards`, which are those of ranks 0, 1 and so on, say to all. Contacts are in it if there are at most `contacts_max`.
    ///
    /// # Errors
    /// If these ranks cannot form a group.
    pub(super) fn of(cards: &[Card], contacts_max: usize) -> Result<Table, Fault> {
        check(cards)?;
        let stranded: Vec<Rank> = (0..cards.len()).filter(|rank| is_stranded(cards, *rank)).collect();
        let mut elsewhere: Vec<SocketAddr> = Vec::new();
        if !stranded.is_empty() {
            let others = cards.iter().filter(|card| !card.is_on_loopback());
            let addresses = others.filter_map(|card| card.contact.address);
            for address in addresses {
                if elsewhere.len() < ELSEWHERE_MAX
                    && !elsewhere.iter().any(|known| known.ip() == address.ip())
                {
                    elsewhere.push(address);
                }
            }
        }
        let crowded = crowded(&cards.iter().map(|card| card.cores.clone()).collect::<Vec<_>>());
        let contacts = (cards.len() <= contacts_max).then(|| {
            let names = numbered(cards.iter().map(|card| &card.contact.host));
            let row = |(card, name): (&Card, &usize)| {
                let Contact { fabric, pid, socket, address, room, rails, .. } = card.contact.clone();
                Row(fabric, *name, pid, socket, address, room, rails)
            };
            (names.0.into_iter().cloned().collect(), cards.iter().zip(&names.1).map(row).collect())
        });
        Ok(Table {
            places: Sequence::of(&numbered(cards.iter().map(|card| &card.place)).1),
            kernels: Sequence::of(&numbered(cards.iter().map(|card| card.cores.kernel())).1),
            crowded: Sequence::of(&crowded.into_iter().map(usize::from).collect::<Vec<_>>()),
            confirms_roots: cards.iter().all(|card| card.detail),
            refusal: refuse_stranded(cards),
            stranded,
            elsewhere,
            contacts,
        })
    }

    /// By rank: the first rank of the same place.
    pub(super) fn places(&self, size: usize) -> Option<Vec<Rank>> {
        Some(firsts(&self.places.numbers(size)?))
    }

    /// How `rank` shares its cores.
    pub(super) fn crowd(&self, rank: Rank, size: usize) -> Option<Crowd> {
        let is_crowded = self.crowded.numbers(size)?[rank] == 1;
        Some(Crowd { is_crowded, kernels: self.kernels.numbers(size)?.into() })
    }

    /// By rank; nothing if the group is too large for that, or the table is invalid.
    pub(super) fn contacts(&self, size: usize) -> Option<Vec<Contact>> {
        let (names, rows) = self.contacts.as_ref()?;
        if rows.len() != size {
            return None;
        }
        let contact = |Row(fabric, name, pid, socket, address, room, rails): &Row| {
            Some(Contact {
                fabric: fabric.clone(),
                host: names.get(*name)?.clone(),
                pid: *pid,
                socket: socket.clone(),
                address: *address,
                rails: rails.clone(),
                room: *room,
            })
        };
        rows.iter().map(contact).collect()
    }
}

/// Numbers by rank in a few bytes, where hosts have equal numbers of consecutive ranks, or take turns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Sequence {
    /// Each number is one more than the one before: `(8, 512)` are 512 numbers, each for 8 ranks.
    Steps(Vec<(usize, usize)>),
    /// The numbers below this one take turns.
    Turns(usize),
    /// All of them, as runs of a number and its count.
    Runs(Vec<(usize, usize)>),
}

impl Sequence {
    pub(super) fn of(numbers: &[usize]) -> Self {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for &number in numbers {
            match runs.last_mut() {
                Some((last, count)) if *last == number => *count += 1,
                _ => runs.push((number, 1)),
            }
        }
        let turns = numbers.iter().max().map_or(0, |most| most + 1);
        if runs.iter().enumerate().all(|(index, (number, _))| *number == index) {
            let mut steps: Vec<(usize, usize)> = Vec::new();
            for (_, len) in runs {
                match steps.last_mut() {
                    Some((same, count)) if *same == len => *count += 1,
                    _ => steps.push((len, 1)),
                }
            }
            Sequence::Steps(steps)
        } else if numbers.iter().enumerate().all(|(index, number)| *number == index % turns) {
            Sequence::Turns(turns)
        } else {
            Sequence::Runs(runs)
        }
    }

    /// The numbers; nothing if they are not `size`.
    pub(super) fn numbers(&self, size: usize) -> Option<Vec<usize>> {
        let mut numbers = Vec::new();
        let mut extend = |number: usize, count: usize| {
            let fits = count <= size - numbers.len();
            numbers.extend(std::iter::repeat_n(number, if fits { count } else { 0 }));
            fits.then_some(())
        };
        match self {
            Sequence::Steps(steps) => {
                let mut number = 0;
                for &(len, count) in steps {
                    if len == 0 || count > size {
                        return None;
                    }
                    for _ in 0..count {
                        extend(number, len)?;
                        number += 1;
                    }
                }
            }
            Sequence::Turns(turns) if *turns > 0 => numbers = (0..size).map(|index| index % turns).collect(),
            Sequence::Turns(_) => return None,
            Sequence::Runs(runs) => runs.iter().try_for_each(|&(number, count)| extend(number, count))?,
        }
        (numbers.len() == size).then_some(numbers)
    }
}

/// The distinct values in the order of their first appearance, and the number of each value.
fn numbered<'a, T: std::hash::Hash + Eq>(values: impl Iterator<Item = &'a T>) -> (Vec<&'a T>, Vec<usize>) {
    let (mut known, mut distinct) = (std::collections::HashMap::new(), Vec::new());
    let numbers = values
        .map(|value| {
            *known.entry(value).or_insert_with(|| {
                distinct.push(value);
                distinct.len() - 1
            })
        })
        .collect();
    (distinct, numbers)
}

/// Of each number, the index where it first appears.
fn firsts(numbers: &[usize]) -> Vec<usize> {
    let mut known = std::collections::HashMap::new();
    numbers.iter().enumerate().map(|(index, number)| *known.entry(number).or_insert(index)).collect()
}

/// A fault, as it travels through the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Refusal {
    kind: ErrorKind,
    peer: Option<Rank>,
    message: String,
    hint: Option<String>,
}

impl From<Fault> for Refusal {
    fn from(Fault { kind, peer, message, hint, .. }: Fault) -> Self {
        Refusal { kind, peer, message, hint }
    }
}

impl From<Refusal> for Fault {
    fn from(Refusal { kind, peer, message, hint }: Refusal) -> Self {
        Fault { peer, hint, ..Fault::new(kind, message) }
    }
}

/// Can ranks on other hosts not reach this one?
fn is_stranded(cards: &[Card], rank: Rank) -> bool {
    cards[rank].is_on_loopback() && cards.iter().any(|other| other.loopback != cards[rank].loopback)
}

fn refuse_stranded(cards: &[Card]) -> Option<Refusal> {
    let rank = (0..cards.len()).find(|rank| is_stranded(cards, *rank))?;
    let card = &cards[rank];
    let other = cards.iter().position(|other| other.loopback != card.loopback).unwrap_or(rank);
    let (own, others) = (&card.contact, &cards[other].contact);
    let message = format!(
        "rank {rank} (host {}, pid {}) listens on loopback only, and rank {other} (host {}, pid {}) is on another host",
        own.host, own.pid, others.host, others.pid
    );
    let hint = format!(
        "on host {}, set TENFOLD_INTERFACE (or GLOO_SOCKET_IFNAME) to the network interface that other hosts reach",
        own.host
    );
    Some(Fault::new(ErrorKind::Connect, message).peer(rank).hint(hint).into())
}

/// Do these cards belong to one group?
fn check(cards: &[Card]) -> Result<(), Fault> {
    let mut fabrics = std::collections::HashMap::new();
    for (other, card) in cards.iter().enumerate() {
        if card.version != VERSION {
            let message =
                format!("rank {other} speaks version {} and rank 0 version {VERSION}", card.version);
            return Err(Fault::new(ErrorKind::Protocol, message)
                .peer(other)
                .hint("run the same tenfold everywhere"));
        }
        if card.size != cards.len() {
            let message = format!(
                "rank {other} says that the group has {} ranks, rank 0 says {}",
                card.size,
                cards.len()
            );
            return Err(Fault::new(ErrorKind::Mismatch, message).peer(other));
        }
        if let Some(twin) = fabrics.insert(&card.contact.fabric, other) {
            let message = format!("ranks {twin} and {other} are the same process");
            return Err(Fault::new(ErrorKind::Mismatch, message).peer(other));
        }
    }
    planner::check_settings(cards.iter().map(|card| card.settings.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(rank: Rank, size: usize, host: usize) -> Card {
        let contact = Contact {
            fabric: format!("{rank:032x}"),
            host: format!("node-{host}"),
            pid: 1000 + rank as u32,
            socket: format!("tenfold/{}/{rank:032x}", 1000 + rank),
            address: Some(SocketAddr::from(([10, 0, (host >> 8) as u8, host as u8], 4000 + rank as u16))),
            rails: Vec::new(),
            room: 65536,
        };
        Card {
            version: VERSION,
            size,
            attempt: 7,
            contact,
            place: format!("boot-{host} net"),
            loopback: format!("boot-{host} net"),
            settings: "auto".to_string(),
            detail: false,
            cores: Cores::default(),
        }
    }

    fn cards(size: usize, host: impl Fn(Rank) -> usize) -> Vec<Card> {
        (0..size).map(|rank| card(rank, size, host(rank))).collect()
    }

    #[test]
    fn a_table_says_where_each_rank_is_and_how_to_reach_it() {
        let cards = cards(5, |rank| [0, 0, 1, 0, 2][rank]);
        let table = Table::of(&cards, FULL_MAX).unwrap();
        assert_eq!(table.places(5).unwrap(), [0, 0, 2, 0, 4]);
        let contacts: Vec<Contact> = cards.iter().map(|card| card.contact.clone()).collect();
        assert_eq!(table.contacts(5).unwrap(), contacts);
        assert!(table.stranded.is_empty() && table.refusal.is_none());
        assert_eq!((table.places(4), table.contacts(4)), (None, None));
    }

    #[test]
    fn a_table_for_4096_ranks_is_a_few_bytes_however_they_are_distributed() {
        for (name, host) in [("blocks", (|rank| rank / 8) as fn(Rank) -> usize), ("turns", |rank| rank % 512)]
        {
            let table = Table::of(&cards(4096, host), FULL_MAX).unwrap();
            let bytes = serde_json::to_vec(&table).unwrap().len();
            assert!(bytes < 400, "{name}: {bytes} bytes");
            let places = table.places(4096).unwrap();
            assert!((0..4096).all(|rank| host(places[rank]) == host(rank)));
            assert_eq!(table.contacts(4096), None);
        }
    }

    #[test]
    fn a_brief_contact_is_the_same_contact_again() {
        let mut contact = card(5, 8, 300).contact;
        contact.fabric = "f00dcafe0123456789abcdef00000001".to_string();
        assert_eq!(Contact::from(Brief::from(contact.clone())), contact);
        contact.socket = "another/name".to_string();
        assert_eq!(Contact::from(Brief::from(contact.clone())), contact);
    }

    /// Calculated from what is really written, for ranks that talk to their likely neighbours.
    #[test]
    fn less_than_20_mb_go_through_the_store_when_4096_ranks_make_a_group() {
        const RANKS: usize = 4096;
        let len = |value: &dyn erased::Json| value.len();
        let mut cards = cards(RANKS, |rank| rank / 8);
        for card in &mut cards {
            card.place = "01234567-89ab-cdef-0123-456789abcdef net:[4026531840]".to_string();
            card.loopback = card.place.clone();
            card.attempt = u64::MAX;
            card.cores = Cores::here();
        }
        let cards_bytes: usize = cards.iter().map(|card| len(card)).sum();
        let contact = len(&Brief::from(cards[2051].contact.clone()));
        let places: Vec<Rank> = (0..RANKS).map(|rank| rank / 8 * 8).collect();
        let read = super::super::directory::neighbours(2051, &places).len() * contact;
        let table = len(&Table::of(&super::tests::cards(RANKS, |rank| rank / 8), FULL_MAX).unwrap());
        // The table, its number, the answer and the verdict, which has the hosts as the table has the places.
        let shared = 2 * table + 100 + 100;
        let all = 2 * cards_bytes + RANKS * (contact + read + shared);
        assert!(all < 20_000_000, "{all} bytes, of which {cards_bytes} are cards and {contact} a contact");
    }

    mod erased {
        pub(super) trait Json {
            fn len(&self) -> usize;
        }

        impl<T: serde::Serialize> Json for T {
            fn len(&self) -> usize {
                serde_json::to_vec(self).unwrap().len()
            }
        }
    }

    #[test]
    fn ranks_on_loopback_are_stranded_if_there_are_other_hosts() {
        let mut cards = cards(4, |rank| rank / 2);
        cards[3].contact.address = Some(SocketAddr::from(([127, 0, 0, 1], 5)));
        let table = Table::of(&cards, FULL_MAX).unwrap();
        assert_eq!(table.stranded, [3]);
        assert_eq!(table.elsewhere.len(), 2);
        let fault = Fault::from(table.refusal.unwrap());
        assert_eq!(fault.peer, Some(3));
        assert!(fault.message.contains("rank 3 (host node-1, pid 1003) listens on loopback only"));
        assert!(Table::of(&cards[2..2], FULL_MAX).is_ok(), "no rank at all is refused elsewhere");
    }

    #[test]
    fn ranks_that_do_not_fit_together_are_refused() {
        let refused = |change: fn(&mut Vec<Card>)| {
            let mut cards = cards(3, |_| 0);
            change(&mut cards);
            Table::of(&cards, FULL_MAX).unwrap_err()
        };
        let fault = refused(|cards| cards[2].size = 4);
        assert_eq!(fault.message, "rank 2 says that the group has 4 ranks, rank 0 says 3");
        let fault = refused(|cards| cards[1].version = 4);
        assert_eq!((fault.kind, fault.peer), (ErrorKind::Protocol, Some(1)));
        let fault = refused(|cards| cards[2].contact.fabric = cards[0].contact.fabric.clone());
        assert_eq!(fault.message, "ranks 0 and 2 are the same process");
    }

    #[test]
    fn a_sequence_becomes_the_same_numbers_again() {
        let cases: [&[usize]; 8] = [
            &[0],
            &[0, 0, 1, 1, 2, 2],
            &[0, 1, 2, 0, 1, 2, 0],
            &[0, 0, 1, 0, 0],
            &[0, 0, 0, 1],
            &[1, 1, 0],
            &[0, 0],
            &[1],
        ];
        for numbers in cases {
            let sequence = Sequence::of(numbers);
            assert_eq!(sequence.numbers(numbers.len()).as_deref(), Some(numbers), "{sequence:?}");
            assert_eq!(sequence.numbers(numbers.len() + 1).is_some(), matches!(sequence, Sequence::Turns(_)));
        }
    }

    #[test]
    fn a_sequence_that_makes_no_sense_takes_no_memory() {
        let wrong = [
            Sequence::Steps(vec![(usize::MAX, usize::MAX)]),
            Sequence::Steps(vec![(0, usize::MAX)]),
            Sequence::Steps(vec![(1, 3), (usize::MAX, 1)]),
            Sequence::Turns(0),
            Sequence::Runs(vec![(0, usize::MAX), (1, usize::MAX)]),
            Sequence::Runs(vec![(7, 3)]),
        ];
        for sequence in wrong {
            assert_eq!(sequence.numbers(4), None, "{sequence:?}");
        }
    }
}
