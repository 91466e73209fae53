//! Which ranks share a host.
//!
//! Algorithms need three facts from it: how many ranks there are, which are near (reached through shared
//! memory), and which rank stands in for a rank on another host. All answers are stored, none is computed, so
//! that a plan for one of hundreds of ranks costs no more than its steps.

/// The number of a rank in a group, from 0.
pub type Rank = usize;

/// Which ranks are near each other: ranks with the same host number communicate through shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// The ranks of each host, ascending; hosts are numbered in the order of their first rank.
    hosts: Vec<Vec<Rank>>,
    /// Each rank's host, and its index among the ranks there.
    places: Vec<(usize, usize)>,
}

impl Topology {
    /// `size` ranks on one host.
    pub fn one_host(size: usize) -> Self {
        Topology::new(vec![0; size])
    }

    /// The host of each rank; equal numbers mean the same host.
    ///
    /// ```
    /// let topology = tenfold_plan::Topology::new(vec![7, 9, 7]);
    /// assert_eq!(topology.hosts(), 2);
    /// assert_eq!(topology.ranks_of(topology.host_of(2)), [0, 2]);
    /// ```
    pub fn new(hosts: Vec<usize>) -> Self {
        assert!(!hosts.is_empty(), "a group has at least one rank");
        let mut numbers = std::collections::HashMap::new();
        let mut ranks: Vec<Vec<Rank>> = Vec::new();
        let mut places = Vec::with_capacity(hosts.len());
        for (rank, name) in hosts.into_iter().enumerate() {
            let host = *numbers.entry(name).or_insert(ranks.len());
            if host == ranks.len() {
                ranks.push(Vec::new());
            }
            places.push((host, ranks[host].len()));
            ranks[host].push(rank);
        }
        Topology { hosts: ranks, places }
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.places.len()
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The host of `rank`, counted from 0 in the order of the hosts' first ranks.
    pub fn host_of(&self, rank: Rank) -> usize {
        self.places[rank].0
    }

    /// The ranks of a host, ascending.
    pub fn ranks_of(&self, host: usize) -> &[Rank] {
        &self.hosts[host]
    }

    /// The index of `rank` among the ranks of its host, from 0.
    pub fn local_index(&self, rank: Rank) -> usize {
        self.places[rank].1
    }

    /// How many ranks the fullest host has.
    pub fn fullest(&self) -> usize {
        self.hosts.iter().map(Vec::len).max().expect("a group has at least one rank")
    }

    /// The rank that stands in for `rank` on `host`: the one with the same local index, modulo the number of
    /// ranks there. On its own host a rank stands in for itself.
    pub fn deputy(&self, host: usize, rank: Rank) -> Rank {
        let ranks = &self.hosts[host];
        ranks[self.local_index(rank) % ranks.len()]
    }

    /// The deputies of `rank` on all hosts except its own, ascending.
    pub(crate) fn deputies(&self, rank: Rank) -> Vec<Rank> {
        let elsewhere = (0..self.hosts()).filter(|&host| host != self.host_of(rank));
        let mut deputies: Vec<Rank> = elsewhere.map(|host| self.deputy(host, rank)).collect();
        deputies.sort_unstable();
        deputies
    }

    /// All ranks except `rank`, ascending.
    pub(crate) fn others(&self, rank: Rank) -> Vec<Rank> {
        (0..self.size()).filter(|&other| other != rank).collect()
    }

    /// The other ranks on the host of `rank`, ascending.
    pub(crate) fn neighbours(&self, rank: Rank) -> Vec<Rank> {
        self.ranks_of(self.host_of(rank)).iter().copied().filter(|&other| other != rank).collect()
    }

    /// The ranks of each host but that of `rank`.
    pub(crate) fn hosts_without(&self, rank: Rank) -> impl Iterator<Item = &[Rank]> {
        let host = self.host_of(rank);
        self.hosts.iter().enumerate().filter(move |(other, _)| *other != host).map(|(_, ranks)| &**ranks)
    }

    /// What `rank` does where the first rank of each host, its leader, speaks for all ranks there.
    pub(crate) fn role(&self, rank: Rank) -> Role {
        let leader = |host: usize| self.hosts[host][0];
        let host = self.host_of(rank);
        if rank != leader(host) {
            return Role::Follower { leader: leader(host) };
        }
        let elsewhere = (0..self.hosts()).filter(|&other| other != host);
        Role::Leader { followers: self.neighbours(rank), peers: elsewhere.map(leader).collect() }
    }

    /// The ranks of a host as runs of consecutive numbers: the first and how many. Usually there is one.
    pub(crate) fn runs_of(&self, host: usize) -> Vec<(Rank, usize)> {
        let runs = self.hosts[host].chunk_by(|&rank, &next| rank + 1 == next);
        runs.map(|run| (run[0], run.len())).collect()
    }

    /// All ranks in a circle, host by host, so that only one link of a host leads out of it.
    pub(crate) fn ring(&self, rank: Rank) -> Ring {
        let order: Vec<Rank> = self.hosts.iter().flatten().copied().collect();
        let place = order.iter().position(|&member| member == rank).expect("the ring holds every rank");
        Ring { order, place }
    }
}

/// A rank of a host that has a leader.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Talks to the leaders of the other hosts, in the order of the hosts, for the other ranks of its host.
    Leader { followers: Vec<Rank>, peers: Vec<Rank> },
    /// Talks only to the leader of its host.
    Follower { leader: Rank },
}

/// The circle of all ranks, seen from one of them.
#[derive(Debug)]
pub(crate) struct Ring {
    order: Vec<Rank>,
    place: usize,
}

impl Ring {
    pub(crate) fn next(&self) -> Rank {
        self.behind(self.order.len() - 1)
    }

    pub(crate) fn previous(&self) -> Rank {
        self.behind(1)
    }

    /// The rank `distance` places behind this one.
    pub(crate) fn behind(&self, distance: usize) -> Rank {
        let size = self.order.len();
        self.order[(self.place + size - distance % size) % size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_as_they_appear_and_ranks_may_be_interleaved() {
        let topology = Topology::new(vec![30, 10, 30, 10, 10]);
        assert_eq!((topology.size(), topology.hosts(), topology.fullest()), (5, 2, 3));
        assert_eq!(topology.ranks_of(0), [0, 2]);
        assert_eq!(topology.ranks_of(1), [1, 3, 4]);
        assert_eq!(topology.local_index(4), 2);
    }

    #[test]
    fn a_deputy_is_the_rank_itself_on_its_host_and_shared_on_smaller_hosts() {
        let topology = Topology::new(vec![0, 1, 0, 1, 1]);
        assert!((0..5).all(|rank| topology.deputy(topology.host_of(rank), rank) == rank));
        assert_eq!(topology.deputy(0, 1), 0);
        assert_eq!(topology.deputy(0, 4), 0, "the third rank of host 1 shares the first rank of host 0");
        assert_eq!(topology.deputies(2), [3]);
    }

    #[test]
    fn the_first_rank_of_a_host_leads_it() {
        let topology = Topology::new(vec![0, 0, 1, 0, 1, 2]);
        assert_eq!(topology.role(0), Role::Leader { followers: vec![1, 3], peers: vec![2, 5] });
        assert_eq!(topology.role(5), Role::Leader { followers: vec![], peers: vec![0, 2] });
        assert_eq!(topology.role(4), Role::Follower { leader: 2 });
        assert_eq!(topology.runs_of(0), [(0, 2), (3, 1)]);
    }

    #[test]
    fn the_ring_leaves_each_host_once() {
        let topology = Topology::new((0..12).map(|rank| rank % 3).collect());
        let leaving =
            (0..12).filter(|&rank| topology.host_of(topology.ring(rank).next()) != topology.host_of(rank));
        assert_eq!(leaving.count(), 3);
        assert!((0..12).all(|rank| topology.ring(topology.ring(rank).next()).previous() == rank));
    }
}
