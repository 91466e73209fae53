//! Makes a group of any processes that know each other's handles. No store takes part.

use std::sync::Arc;

use tenfold_memory::Room;
use tenfold_plan::{Rank, Topology};
use tenfold_store::Deadline;

use super::cards::{Card, Contact, FULL_MAX, Table, VERSION};
use super::connect::{
    Met, fabric_id, fabric_options, group_id, in_order, new_room, place, senseless, whereabouts,
};
use super::cores::{Cores, Crowd};
use super::{Group, Options, connect_error, forced_algorithms, planner};
use crate::debug;
use crate::environment::{Environment, TransportChoice};
use crate::fabric::{FabricHandle, Peer, random};
use crate::fault::{ErrorKind, Fault, Result};
use crate::label::{Label, OpKind};
use crate::transport::mesh::Member;
use crate::wire::FabricId;

type Faulty<T> = std::result::Result<T, Fault>;

/// Handles begin with it.
const SCHEME: &str = "tenfold:";

/// Keeps ids of such groups apart from others.
const RECONFIGURED: u64 = 0x3ab1_c75e_0e5a_77d3;

impl Group {
    /// A group of this process alone, which [`Group::reconfigure`] makes larger. It has a fabric of its own: processes that are
    /// in several such groups, or several ranks that are threads of one process, do not mix them up.
    ///
    /// Other hosts reach this process by [`Options::interfaces`], `TENFOLD_INTERFACE`, or the address that leads to other
    /// networks.
    ///
    /// # Errors
    /// If the system refuses sockets or memory.
    pub fn alone(options: Options) -> Result<Group> {
        let deadline = Deadline::after(options.timeout);
        let name: Arc<str> = options.name.as_str().into();
        let made = || -> Faulty<(Met, _)> {
            let environment = Environment::read()?;
            let control = crate::control::start_if_asked(environment.worker_server.as_deref(), 0)?;
            let interfaces = match (&options.interfaces[..], environment.interfaces.as_ref()) {
                ([], Some(named)) => crate::network::addresses_towards(None, Some(named))
                    .map_err(|error| Fault::io("cannot choose an address for other hosts", error))?,
                ([], None) => crate::network::address_for_others([]).into_iter().collect(),
                (chosen, _) => chosen.to_vec(),
            };
            let fabric = FabricHandle::new(fabric_options(&interfaces, &options, &environment))?;
            let id = group_id(&options.name, random()? as u64);
            let room = new_room(&fabric, 1, id)?;
            let members = vec![Member { peer: None, near: true, room: room.offset() }];
            let met = Met {
                fabric,
                id,
                room,
                members,
                directory: None,
                topology: Topology::new(vec![0]),
                control,
                confirms_roots: debug::level() == debug::Level::Detail,
                crowd: Crowd { is_crowded: false, kernels: vec![0].into() },
            };
            Ok((met, forced_algorithms(&options)?))
        };
        match made() {
            Ok((met, forced)) => Ok(Group::from_met(met, name, 0, options.clone(), forced, None)),
            Err(fault) => Err(connect_error(&name, 0, 1, deadline, fault)),
        }
    }

    /// What other processes need to know of this one to make a group with it: text in one line. It stays the same for as long as
    /// the process has this group or one that was made from it. A program that has it can connect to this process, so treat it as a
    /// secret.
    ///
    /// # Errors
    /// In a forked child, and if settings in the environment are invalid.
    pub fn handle(&self) -> Result<String> {
        let card = self.inner.fabric.check_process().and_then(|()| self.card());
        let text = card.and_then(|card| {
            serde_json::to_string(&card).map_err(|error| Fault::argument(error.to_string()))
        });
        match text {
            Ok(text) => Ok(format!("{SCHEME}{text}")),
            Err(fault) => Err(self.error(Label::new(OpKind::Reconfigure, 0), fault)),
        }
    }

    /// Makes a group of the processes with these handles, of which this is one; its rank is its position in the list. All of
    /// them must call it with the same list and the same `id`, from whatever groups they are in. So ranks leave, join, are
    /// replaced, and groups merge. Blocks until it is decided.
    ///
    /// It is all or nothing: all processes return the new group, or each of them keeps the one that it has and may try again.
    /// Then the error says which process did not take part. Only if a process loses all connections to a majority of the list
    /// between its vote and the decision, it does not know what the others did; its error says that, and it must try again.
    ///
    /// The new group's name is that of this one with the `id`, as in `default@7`, so the processes need groups of the same name.
    /// An `id` is used once by a process, also if the attempt failed. When the new group is made, everything that is under way in
    /// this one fails here, and other members of it see that this rank has left. Connections and shared memory with processes that this one knows are kept.
    ///
    /// ```
    /// use std::sync::{Barrier, Mutex};
    /// use tenfold::{Group, Options, ReduceOp};
    ///
    /// let (handles, ready) = (Mutex::new(Vec::new()), Barrier::new(3));
    /// std::thread::scope(|threads| {
    ///     for _ in 0..3 {
    ///         threads.spawn(|| {
    ///             let alone = Group::alone(Options::default())?;
    ///             handles.lock().unwrap().push(alone.handle()?); // or by any other way
    ///             ready.wait();
    ///             let handles = handles.lock().unwrap().clone();
    ///             let group = alone.reconfigure(&handles, 1)?;
    ///             let mut sum = [1];
    ///             group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///             assert_eq!(sum, [3]);
    ///             Ok::<(), tenfold::Error>(())
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    /// If a handle is invalid or given twice, the `id` was used, a process does not call in time or cannot be reached (it is
    /// named), or processes have other lists or settings.
    pub fn reconfigure(&self, handles: &[impl AsRef<str>], id: u64) -> Result<Group> {
        self.reconfigure_as(handles, id, &super::survivors::name_of(&self.inner.name, id))
    }

    /// The same with a name, which all give to the new group: names of groups that are made from it begin with it.
    pub(crate) fn reconfigure_as(&self, handles: &[impl AsRef<str>], id: u64, name: &str) -> Result<Group> {
        let deadline = self.deadline();
        let handles: Vec<&str> = handles.iter().map(AsRef::as_ref).collect();
        let fabric = &self.inner.fabric;
        let made = fabric.check_process().and_then(|()| self.become_one_of(&handles, id, name, &deadline));
        made.map_err(|fault| self.error_after(Label::new(OpKind::Reconfigure, 0), &deadline, fault))
    }

    fn card(&self) -> Faulty<Card> {
        let inner = &self.inner;
        let transport = inner.options.transport.unwrap_or(Environment::read()?.transport);
        let forced = forced_algorithms(&inner.options)?;
        let (fabric, place) = (&inner.fabric, place());
        Ok(Card {
            version: VERSION,
            size: 0,
            attempt: 0,
            contact: Contact {
                fabric: fabric.id().to_string(),
                host: fabric.host().to_string(),
                pid: fabric.pid(),
                socket: fabric.socket_name().to_string(),
                address: fabric.address(),
                rails: fabric.rails().to_vec(),
                room: 0,
            },
            place: if transport == TransportChoice::Tcp { fabric.id().to_string() } else { place.clone() },
            loopback: place,
            settings: planner::settings(inner.options.deterministic, inner.options.quorum, &forced),
            detail: debug::level() == debug::Level::Detail,
            cores: Cores::here(),
        })
    }

    fn become_one_of(&self, handles: &[&str], id: u64, name: &str, deadline: &Deadline) -> Faulty<Group> {
        let inner = &self.inner;
        let cards = read(handles)?;
        let ids: Vec<FabricId> = cards
            .iter()
            .enumerate()
            .map(|(rank, card)| fabric_id(rank, &card.contact))
            .collect::<Faulty<_>>()?;
        let size = cards.len();
        let Some(rank) = ids.iter().position(|other| *other == inner.fabric.id()) else {
            return Err(Fault::argument("the list of handles does not contain this process")
                .hint("only processes that are in the list call"));
        };
        let table = Table::of(&cards, FULL_MAX)?;
        if let Some(refusal) = table.refusal.clone() {
            return Err(refusal.into());
        }
        let places = table.places(size).ok_or_else(|| senseless("list of places"))?;
        let peer = |(other, id): (usize, &FabricId)| {
            (other != rank).then(|| {
                let peer = inner.fabric.peer(*id);
                peer.set_whereabouts(whereabouts(&cards[other].contact, places[other] == places[rank]));
                peer
            })
        };
        let roster: Vec<Option<Arc<Peer>>> = ids.iter().enumerate().map(peer).collect();
        let group = group_id("reconfigured", id ^ RECONFIGURED);
        let room = new_room(&inner.fabric, size, group)?;
        let rooms = inner.fabric.reshape(id, &ids, &roster, room.offset() as u64, deadline)?;
        self.replace(&table, group, name, rank, room, roster, &rooms, in_order(&places))
    }

    #[expect(clippy::too_many_arguments, reason = "all of what was agreed on")]
    fn replace(
        &self,
        table: &Table,
        id: u64,
        name: &str,
        rank: Rank,
        room: Arc<Room>,
        roster: Vec<Option<Arc<Peer>>>,
        rooms: &[u64],
        hosts: Vec<usize>,
    ) -> Faulty<Group> {
        let inner = &self.inner;
        let members = roster.into_iter().enumerate().map(|(other, peer)| Member {
            peer,
            near: hosts[other] == hosts[rank],
            room: usize::try_from(rooms[other]).unwrap_or(0),
        });
        let members: Vec<Member> = members.collect();
        let crowd = table.crowd(rank, members.len()).ok_or_else(|| senseless("list of kernels"))?;
        let forced = forced_algorithms(&inner.options)?;
        let options = Options { name: name.to_string(), ..inner.options.clone() };
        let name: Arc<str> = options.name.as_str().into();
        let met = Met {
            fabric: inner.fabric.clone(),
            id,
            room,
            members,
            directory: None,
            topology: Topology::new(hosts),
            control: inner.control.clone(),
            confirms_roots: table.confirms_roots,
            crowd,
        };
        let replaced = Group::from_met(met, name, rank, options, forced, None);
        let message = format!("this process left the group: it is in `{}` now", replaced.name());
        inner.fabric.engine.leave(&inner.fabric, inner.index, Fault::new(ErrorKind::Closed, message));
        Ok(replaced)
    }
}

/// # Errors
/// Says which handle is not one.
fn read(handles: &[&str]) -> Faulty<Vec<Card>> {
    let mut cards = Vec::with_capacity(handles.len());
    for (at, handle) in handles.iter().enumerate() {
        let invalid = |why: String| {
            Fault::argument(format!("handle {at} is invalid: {why}"))
                .hint("pass what `handle()` of each process has returned, unchanged")
        };
        let json = handle.strip_prefix(SCHEME);
        let json = json.ok_or_else(|| invalid(format!("it does not begin with `{SCHEME}`")))?;
        let card: Card = serde_json::from_str(json).map_err(|error| invalid(error.to_string()))?;
        let twin = cards.iter().position(|other: &Card| other.contact.fabric == card.contact.fabric);
        if let Some(twin) = twin {
            return Err(Fault::new(ErrorKind::Argument, format!("handles {twin} and {at} are the same")));
        }
        cards.push(Card { size: handles.len(), ..card });
    }
    Ok(cards)
}
