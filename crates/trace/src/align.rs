//! Aligns the ranks' records: which rank did what in which group, number by number.
//!
//! A ring only keeps the last records, and each rank's may begin elsewhere. So a rank is never reported to
//! lack a number that its ring may have lost. What counts is how far it has got, and the numbers that several
//! ranks still hold.
//!
//! Groups of one name may have different members (c10d's `split_group` makes such groups), so a group is
//! identified by its name and its members. If a recorder does not record the members (Gloo's does not), the
//! group has the ranks that were seen; for the default group that is every known rank.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenfold_console::one_line;

use super::dump::{Detail, Dump, Record};

pub(crate) struct Job<'a> {
    /// In the order of ranks.
    pub(crate) dumps: &'a [Dump],
    pub(crate) groups: Vec<Group<'a>>,
    /// Ranks that a group mentions but that have no dump, in ascending order.
    pub(crate) missing: Vec<u32>,
}

pub(crate) struct Group<'a> {
    pub(crate) name: Arc<str>,
    /// The user's name for it, or its name.
    pub(crate) title: String,
    /// The selected members, in ascending order.
    pub(crate) members: Vec<u32>,
    /// All members, in the order of the group, which may differ from that of ranks: group ranks are indices
    /// into it.
    pub(crate) everyone: Vec<u32>,
    /// The same in ascending order, each with its place in the group.
    places: Vec<(u32, usize)>,
    /// False if the recorder did not record the members.
    pub(crate) members_known: bool,
    /// By number.
    pub(crate) rows: BTreeMap<i64, Row<'a>>,
    /// Messages by sender and receiver, global ranks; `None` is a receiver that accepts any sender.
    pub(crate) sends: BTreeMap<(u32, u32), Vec<&'a Record>>,
    pub(crate) receives: BTreeMap<(Option<u32>, u32), Vec<&'a Record>>,
}

/// The collective of one number, by rank in ascending order. A coalesced one has several records per rank.
///
/// Two lists, because there are as many entries as records in all dumps.
#[derive(Debug, Default)]
pub(crate) struct Row<'a> {
    /// A rank, and where its records begin.
    ranks: Vec<(u32, u32)>,
    records: Vec<&'a Record>,
}

impl<'a> Row<'a> {
    /// Ranks are added in ascending order, since dumps are sorted.
    fn add(&mut self, rank: u32, record: &'a Record) {
        if self.ranks.last().is_none_or(|(last, _)| *last != rank) {
            self.ranks.push((rank, self.records.len() as u32));
        }
        self.records.push(record);
    }

    /// How many ranks have entered it.
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn get(&self, rank: u32) -> Option<&[&'a Record]> {
        let index = self.ranks.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
        Some(self.records_of(index))
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = u32> {
        self.ranks.iter().map(|(rank, _)| *rank)
    }

    /// Each rank's records.
    pub(crate) fn values(&self) -> impl Iterator<Item = &[&'a Record]> {
        (0..self.len()).map(|index| self.records_of(index))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &[&'a Record])> {
        self.ranks().zip(self.values())
    }

    /// Of all ranks.
    pub(crate) fn records(&self) -> &[&'a Record] {
        &self.records
    }

    fn records_of(&self, index: usize) -> &[&'a Record] {
        let end = self.ranks.get(index + 1).map_or(self.records.len(), |(_, start)| *start as usize);
        &self.records[self.ranks[index].1 as usize..end]
    }
}

/// How far a rank has got in a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Standing<'a> {
    /// It left no dump.
    NoDump,
    /// It has never made a call here.
    Nothing,
    /// It may have made some, which its ring has lost.
    Lost,
    Last(&'a Record),
}

/// The selected part of the dumps.
#[derive(Debug, Default)]
pub struct Filter {
    /// Empty: all.
    pub ranks: BTreeSet<u32>,
    /// Names or descriptions. Empty: all.
    pub groups: Vec<String>,
}

impl Filter {
    pub(crate) fn has_rank(&self, rank: u32) -> bool {
        self.ranks.is_empty() || self.ranks.contains(&rank)
    }

    fn has_group(&self, name: &str, description: &str) -> bool {
        self.groups.is_empty() || self.groups.iter().any(|group| group == name || group == description)
    }
}

/// A name, and the members in ascending order.
type Key = (Arc<str>, Option<Vec<u32>>);

/// What recorders report about a group.
#[derive(Default)]
struct Known {
    description: Arc<str>,
    /// The members in the order of the group.
    order: Vec<u32>,
}

impl<'a> Job<'a> {
    /// `mentioned` are ranks that exist although no named group has them.
    pub(crate) fn new(dumps: &'a [Dump], mentioned: &[u32], filter: &Filter) -> Job<'a> {
        let mut world: BTreeSet<u32> = dumps.iter().map(|dump| dump.rank).collect();
        world.extend(mentioned.iter().copied().filter(|&rank| filter.has_rank(rank)));
        let mut known: BTreeMap<Key, Known> = BTreeMap::new();
        for dump in dumps {
            for (name, config) in &dump.groups {
                if filter.has_group(name, &config.description) {
                    let ranks = sorted(&config.ranks);
                    world.extend(ranks.iter().copied().filter(|&rank| filter.has_rank(rank)));
                    let of_group =
                        Known { description: config.description.clone(), order: config.ranks.clone() };
                    known.insert((name.clone(), Some(ranks)), of_group);
                }
            }
        }
        let mut records: BTreeMap<Key, Vec<(u32, &'a Record)>> = BTreeMap::new();
        for dump in dumps {
            // A group's members are looked up once per dump, not once per record: there may be thousands of
            // both.
            let mut by_group: BTreeMap<&Arc<str>, Vec<(u32, &'a Record)>> = BTreeMap::new();
            for record in &dump.records {
                if filter.has_group(&record.group, &record.description) {
                    by_group.entry(&record.group).or_default().push((dump.rank, record));
                }
            }
            for of_group in by_group.into_values() {
                let first = of_group[0].1;
                let key = key_of(first, dump, &known);
                known
                    .entry(key.clone())
                    .or_insert_with(|| Known { description: first.description.clone(), order: Vec::new() });
                records.entry(key).or_default().extend(of_group);
            }
        }
        let mut groups = Vec::new();
        for (key, of_group) in &known {
            let records = records.remove(key).unwrap_or_default();
            let shared = known.values().filter(|other| other.description == of_group.description).count() > 1;
            let mut group = Group::new(key, of_group, shared, &records, &world);
            group.members.retain(|&rank| filter.has_rank(rank));
            records.into_iter().for_each(|(rank, record)| group.add(rank, record));
            groups.push(group);
        }
        let here: BTreeSet<u32> = dumps.iter().map(|dump| dump.rank).collect();
        Job { dumps, groups, missing: world.difference(&here).copied().collect() }
    }

    pub(crate) fn dump(&self, rank: u32) -> Option<&'a Dump> {
        let place = self.dumps.binary_search_by_key(&rank, |dump| dump.rank).ok()?;
        self.dumps.get(place)
    }

    pub(crate) fn has_several_hosts(&self) -> bool {
        let mut hosts = self.dumps.iter().filter_map(|dump| dump.host.as_ref());
        let first = hosts.next();
        hosts.any(|host| Some(host) != first)
    }

    /// The group that a rank's record is of.
    fn group_of(&self, record: &Record, rank: u32) -> Option<&Group<'a>> {
        let is_it = |group: &&Group<'a>| group.name == record.group && group.place_of(rank).is_some();
        self.groups.iter().find(is_it)
    }

    pub(crate) fn title_of(&self, record: &Record, rank: u32) -> String {
        self.group_of(record, rank)
            .map_or_else(|| format!("group {}", record.group), |group| group.title.clone())
    }

    /// The other side of a rank's message, as a rank of the job.
    pub(crate) fn peer_of(&self, record: &Record, rank: u32) -> Option<u32> {
        let Detail::Message { source, target } = record.detail else { return None };
        let index = if &*record.operation == "send" { target } else { source? };
        self.group_of(record, rank)?.member(index)
    }

    pub(crate) fn standing(&self, group: &Group<'a>, rank: u32) -> Standing<'a> {
        let Some(dump) = self.dump(rank) else { return Standing::NoDump };
        if let Some(last) = group.last(rank) {
            return Standing::Last(last);
        }
        let begins_later = dump.records.first().is_some_and(|record| record.id > 0);
        if begins_later { Standing::Lost } else { Standing::Nothing }
    }
}

/// The group's members as the rank itself recorded them; otherwise as another rank did whose group of this
/// name has the rank.
fn key_of(record: &Record, dump: &Dump, known: &BTreeMap<Key, Known>) -> Key {
    let name = record.group.clone();
    if let Some(config) = dump.groups.get(&name) {
        return (name, Some(sorted(&config.ranks)));
    }
    let others = known.keys().find(|(other, members)| {
        *other == name && members.as_ref().is_some_and(|members| members.binary_search(&dump.rank).is_ok())
    });
    others.cloned().unwrap_or((name, None))
}

fn sorted(ranks: &[u32]) -> Vec<u32> {
    let ranks: BTreeSet<u32> = ranks.iter().copied().collect();
    ranks.into_iter().collect()
}

impl<'a> Group<'a> {
    fn new(
        key: &Key,
        known: &Known,
        shared: bool,
        records: &[(u32, &'a Record)],
        world: &BTreeSet<u32>,
    ) -> Group<'a> {
        let ((name, configured), Known { description, order }) = (key, known);
        let members: Vec<u32> = match configured {
            Some(members) => members.clone(),
            None if &**description == "default_pg" => world.iter().copied().collect(),
            None => records.iter().map(|(rank, _)| *rank).collect::<BTreeSet<_>>().into_iter().collect(),
        };
        // A member that is mentioned twice, which no recorder does, would have two places.
        let everyone = if order.len() == members.len() { order.clone() } else { members.clone() };
        let mut places: Vec<(u32, usize)> = everyone.iter().copied().zip(0..).collect();
        places.sort_unstable();
        let title = match &**description {
            "" | "undefined" => format!("group {name}"),
            // Several groups may have the same description, such as the data-parallel groups of a mesh.
            description if shared => format!("group {description} ({name})"),
            description => format!("group {description}"),
        };
        Group {
            name: name.clone(),
            title: one_line(&title),
            members,
            everyone,
            places,
            members_known: configured.is_some(),
            rows: BTreeMap::new(),
            sends: BTreeMap::new(),
            receives: BTreeMap::new(),
        }
    }

    /// The rank of the job that has this group rank.
    fn member(&self, number: u32) -> Option<u32> {
        self.everyone.get(number as usize).copied()
    }

    /// The group rank of a rank of the job.
    pub(crate) fn place_of(&self, rank: u32) -> Option<usize> {
        let index = self.places.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
        Some(self.places[index].1)
    }

    /// The root of an operation as a rank of the job; the number that its recorder wrote, if the group has no such member.
    pub(crate) fn root_of(&self, record: &Record) -> Option<i64> {
        let root = record.root?;
        let member = u32::try_from(root).ok().and_then(|root| self.member(root));
        Some(member.map_or(root, i64::from))
    }

    fn add(&mut self, rank: u32, record: &'a Record) {
        match (&*record.operation, &record.detail) {
            ("send", Detail::Message { target, .. }) => {
                if let Some(target) = self.member(*target) {
                    self.sends.entry((rank, target)).or_default().push(record);
                }
            }
            ("recv", Detail::Message { source, .. }) => {
                let source = source.and_then(|source| self.member(source));
                self.receives.entry((source, rank)).or_default().push(record);
            }
            _ if record.is_p2p => {} // the frame around coalesced messages
            _ => self.rows.entry(record.sequence).or_default().add(rank, record),
        }
    }

    /// The last collective that the rank has entered.
    pub(crate) fn last(&self, rank: u32) -> Option<&'a Record> {
        let row = self.rows.values().rev().find_map(|row| row.get(rank))?;
        row.last().copied()
    }

    /// The collective of this number on this rank.
    pub(crate) fn at(&self, sequence: i64, rank: u32) -> Option<&'a Record> {
        self.rows.get(&sequence)?.get(rank)?.last().copied()
    }

    /// Ranks that have entered the collective of this number.
    pub(crate) fn ranks_in(&self, sequence: i64) -> Vec<u32> {
        self.rows.get(&sequence).map(|row| row.ranks().collect()).unwrap_or_default()
    }

    pub(crate) fn messages(&self) -> usize {
        self.sends.values().chain(self.receives.values()).map(Vec::len).sum()
    }
}
