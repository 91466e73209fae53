//! Which ranks share a host.

/// A member of a group, counted from 0.
pub type Rank = usize;

/// Who is near whom: ranks with the same host number reach each other through shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    hosts: Vec<usize>,
}

impl Topology {
    /// `size` ranks on one host.
    pub fn one_host(size: usize) -> Self {
        Topology { hosts: vec![0; size] }
    }

    /// The host of each rank; any numbers will do, equal ones mean the same host.
    pub fn new(hosts: Vec<usize>) -> Self {
        Topology { hosts }
    }

    pub fn size(&self) -> usize {
        self.hosts.len()
    }
}
