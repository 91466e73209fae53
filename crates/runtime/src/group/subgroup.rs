//! Groups made from groups, without the store: the parent's own collectives carry what the members must know.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenfold_memory::Buffer;
use tenfold_plan::{Rank, Topology};

use super::connect::{Met, group_id, new_room};
use super::{Group, Options, forced_algorithms, planner};
use crate::debug;
use crate::fault::{Fault, Result};
use crate::label::{Label, OpKind};
use crate::transport::mesh::Member;

impl Group {
    /// A group of some ranks of this one. Every rank of this group must call it with the same ranks; those that are not
    /// among them get nothing. Members are numbered in the order given.
    ///
    /// # Errors
    /// If ranks are out of range or given twice, or this group fails.
    pub fn subgroup(&self, ranks: &[Rank], options: Options) -> Result<Option<Group>> {
        let label = Label::new(OpKind::Split, 0);
        if let Some(rank) = ranks.iter().find(|rank| **rank >= self.size()) {
            return self
                .refuse(&label, format!("rank {rank} is out of range: ranks are 0 to {}", self.size() - 1));
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return self.refuse(&label, format!("rank {} is given twice", twice[0]));
        }
        let number = self.inner.children.fetch_add(1, Ordering::Relaxed) + 1;
        let id = group_id(&options.name, self.inner.id.wrapping_add(number));
        self.make_child(ranks, options, id)
    }

    /// As MPI's: ranks with the same `colour` form a group, in the order of their `key` and then of their rank. Every rank of
    /// this group must call it; one without a colour gets nothing.
    ///
    /// # Errors
    /// If this group fails.
    pub fn split(&self, colour: Option<u32>, key: i64, options: Options) -> Result<Option<Group>> {
        let number = self.inner.children.fetch_add(1, Ordering::Relaxed) + 1;
        let own = [colour.map_or(-1, i64::from), key];
        let all = self.exchange(&own)?;
        let mut ranks: Vec<Rank> =
            (0..self.size()).filter(|rank| own[0] >= 0 && all[*rank][0] == own[0]).collect();
        ranks.sort_by_key(|rank| (all[*rank][1], *rank));
        let base = self.inner.id.wrapping_add(number);
        let id = group_id(&options.name, base.wrapping_add((own[0] as u64).rotate_left(32)));
        self.make_child(&ranks, options, id)
    }

    fn make_child(&self, ranks: &[Rank], options: Options, id: u64) -> Result<Option<Group>> {
        let inner = &self.inner;
        let label = Label::new(OpKind::Split, 0);
        let fail = |fault: Fault| self.error(label, fault);
        let place = ranks.iter().position(|rank| *rank == self.rank());
        let forced = forced_algorithms(&options).map_err(fail)?;
        let room = match place {
            Some(_) => Some(new_room(&inner.fabric, ranks.len(), id).map_err(fail)?),
            None => None,
        };
        let settings = planner::settings(options.deterministic, options.quorum, &forced);
        let is_detailed = i64::from(debug::level() == debug::Level::Detail);
        let own = [
            room.as_ref().map_or(0, |room| room.offset() as i64),
            group_id(&settings, 0) as i64,
            is_detailed,
        ];
        let rooms = self.exchange(&own)?;
        // Ranks of other subgroups may have other settings; but all ranks must exchange the same number of times.
        if rooms.iter().any(|other| other[1] != own[1]) {
            let all = self.exchange(&words(&settings))?;
            let all: Vec<String> = ranks.iter().map(|rank| text(&all[*rank])).collect();
            planner::check_settings(all.iter().map(String::as_str)).map_err(fail)?;
        }
        let (Some(place), Some(room)) = (place, room) else { return Ok(None) };
        let parents = inner.fabric.engine.with(|state| state.group(inner.index).members().to_vec());
        let members =
            ranks.iter().map(|rank| Member { room: rooms[*rank][0] as usize, ..parents[*rank].clone() });
        let members = members.collect();
        let topology = Topology::new(ranks.iter().map(|rank| inner.topology.host_of(*rank)).collect());
        let name: Arc<str> = options.name.as_str().into();
        let (fabric, control) = (inner.fabric.clone(), inner.control.clone());
        let confirms_roots = ranks.iter().all(|rank| rooms[*rank][2] == 1);
        let met = Met {
            fabric,
            id,
            room,
            members,
            directory: inner.directory.clone(),
            topology,
            control,
            confirms_roots,
            crowd: inner.crowd.among(ranks, place),
        };
        let global_ranks = inner.record.global_ranks_of(ranks);
        Ok(Some(Group::from_met(met, name, place, options, forced, global_ranks)))
    }

    /// All ranks of this group once more, in the same order and with the same options: what goes wrong there does no harm here.
    pub(crate) fn twin(&self, purpose: &str) -> Result<Group> {
        let timeout = self.timeout.unwrap_or(self.inner.options.timeout);
        let name = format!("{}/{purpose}", self.name());
        let options = Options { name, timeout, ..self.inner.options.clone() };
        let all: Vec<Rank> = (0..self.size()).collect();
        Ok(self.subgroup(&all, options)?.expect("every rank is a member"))
    }

    /// The numbers of all ranks, by rank.
    pub(crate) fn exchange<const N: usize>(&self, own: &[i64; N]) -> Result<Vec<[i64; N]>> {
        let mut input = Buffer::from_slice(own);
        let mut output = Buffer::zeros(tenfold_memory::DType::I64, N * self.size());
        self.start_all_gather_into(output.lend(), input.lend())?.wait()?;
        let (numbers, _) = output.as_slice::<i64>().as_chunks::<N>();
        Ok(numbers.to_vec())
    }
}

/// Longest text that ranks exchange, in words.
const WORDS: usize = 64;

/// A text as numbers, cut if need be.
fn words(text: &str) -> [i64; WORDS] {
    let mut bytes = text.bytes().chain(std::iter::repeat(0));
    std::array::from_fn(|_| i64::from_ne_bytes(std::array::from_fn(|_| bytes.next().unwrap_or(0))))
}

fn text(words: &[i64; WORDS]) -> String {
    let bytes: Vec<u8> =
        words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
