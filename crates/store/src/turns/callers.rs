//! How many connections each host has, so that no single host takes all of them.

use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};

use foldhash::HashMap;

/// Connections by host.
#[derive(Debug)]
pub(super) struct Callers {
    count: HashMap<IpAddr, usize>,
    limit: usize,
}

impl Callers {
    pub(super) fn new(limit: usize) -> Self {
        Callers { count: HashMap::default(), limit }
    }

    /// Counts a new connection; false if its host already has the maximum.
    pub(super) fn admit(&mut self, peer: SocketAddr) -> bool {
        let Some(host) = host(peer) else { return true };
        let count = self.count.entry(host).or_default();
        let admits = *count < self.limit;
        *count += usize::from(admits);
        admits
    }

    /// Stops counting a connection that was admitted.
    pub(super) fn forget(&mut self, peer: SocketAddr) {
        let Some(host) = host(peer) else { return };
        if let Entry::Occupied(mut count) = self.count.entry(host) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// The key under which connections are counted together. A host with IPv6 can have any address of its
/// network. This machine itself is not counted: a job on one machine may need all connections.
fn host(peer: SocketAddr) -> Option<IpAddr> {
    match peer.ip().to_canonical() {
        address if address.is_loopback() => None,
        IpAddr::V6(address) => Some((address.to_bits() >> 64 << 64).to_be_bytes().into()),
        address => Some(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_its_share_and_others_have_theirs() {
        let mut callers = Callers::new(2);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let admits = |callers: &mut Callers, peer: &str, often: usize| {
            (0..often).filter(|_| callers.admit(at(peer))).count()
        };
        assert_eq!(admits(&mut callers, "10.0.0.1:1", 5), 2);
        assert_eq!(admits(&mut callers, "[::ffff:10.0.0.1]:2", 1), 0, "the same host");
        assert_eq!(admits(&mut callers, "10.0.0.2:1", 5), 2);
        assert_eq!(admits(&mut callers, "[2001:db8::1]:1", 1), 1);
        assert_eq!(admits(&mut callers, "[2001:db8::2]:1", 5), 1, "the same network");
        assert_eq!(admits(&mut callers, "[2001:db8:1::2]:1", 5), 2);
        assert_eq!(admits(&mut callers, "127.0.0.1:1", 100), 100);
        callers.forget(at("10.0.0.1:7"));
        assert_eq!(admits(&mut callers, "10.0.0.1:1", 5), 1);
        for _ in 0..2 {
            callers.forget(at("10.0.0.2:1"));
        }
        assert!(!callers.count.contains_key(&at("10.0.0.2:1").ip()), "it is forgotten");
    }
}
