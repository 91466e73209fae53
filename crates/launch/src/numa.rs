//! Which processors each rank of this node runs on, for `--numa-binding`.
//!
//! The kernel reports the NUMA node, socket, core and L3 cache of every processor. From that and the mode
//! follows each local rank's list. It never has a processor that the launcher itself may not use. The device
//! that a rank will use is not known here, so NUMA nodes are assigned to ranks in turn.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::read_to_string;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::args::Binding;

/// Where one processor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Processor {
    number: usize,
    node: usize,
    socket: usize,
    /// The lowest processor of the same core, and of those with the same L3 cache.
    core: usize,
    cache: usize,
}

/// The processors of each of `ranks` local ranks.
pub(super) fn processors(binding: Binding, ranks: usize) -> Result<Vec<Vec<usize>>, String> {
    let own = sched_getaffinity(None)
        .map_err(|error| format!("cannot find out which processors may be used: {error}"))?;
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&number| own.is_set(number)).collect();
    deal(binding, ranks, &usable.into_iter().map(look_up).collect::<Vec<_>>())
}

fn look_up(number: usize) -> Processor {
    let folder = format!("/sys/devices/system/cpu/cpu{number}");
    let first = |file: &str| {
        let text = read_to_string(format!("{folder}/{file}")).ok()?;
        parse_list(&text).first().copied()
    };
    Processor {
        number,
        node: node_of(number).unwrap_or(0), // a kernel without NUMA has one node
        socket: first("topology/physical_package_id").unwrap_or(0),
        core: first("topology/thread_siblings_list").unwrap_or(number),
        cache: cache_of(&folder).unwrap_or(0),
    }
}

/// The folder of a processor holds a link `nodeN`.
fn node_of(number: usize) -> Option<usize> {
    let entries = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{number}")).ok()?;
    entries.flatten().find_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
}

fn cache_of(folder: &str) -> Option<usize> {
    let caches = std::fs::read_dir(format!("{folder}/cache")).ok()?;
    caches.flatten().map(|cache| cache.path()).find_map(|cache| {
        let level = read_to_string(cache.join("level")).ok()?;
        let shared = read_to_string(cache.join("shared_cpu_list")).ok()?;
        if level.trim() == "3" { parse_list(&shared).first().copied() } else { None }
    })
}

/// `0-3,8,10-11`.
fn parse_list(text: &str) -> Vec<usize> {
    const RANGE_MAX: usize = 1 << 16;
    let ranges = text.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (last < RANGE_MAX).then_some(first..=last)
    });
    ranges.flatten().collect()
}

fn deal(binding: Binding, ranks: usize, processors: &[Processor]) -> Result<Vec<Vec<usize>>, String> {
    let nodes: Vec<usize> =
        processors.iter().map(|processor| processor.node).collect::<BTreeSet<_>>().into_iter().collect();
    if nodes.is_empty() {
        return Err("no processor may be used".into());
    }
    let of_node = |node: usize| processors.iter().filter(move |processor| processor.node == node);
    let mut lists = vec![Vec::new(); ranks];
    for (turn, &node) in nodes.iter().enumerate() {
        let here: Vec<usize> = (turn..ranks).step_by(nodes.len()).collect();
        let parts: Vec<Vec<usize>> = match binding {
            Binding::Node => vec![of_node(node).map(|processor| processor.number).collect(); here.len()],
            Binding::Socket => {
                let sockets: BTreeSet<usize> = of_node(node).map(|processor| processor.socket).collect();
                let all = processors.iter().filter(|processor| sockets.contains(&processor.socket));
                vec![all.map(|processor| processor.number).collect(); here.len()]
            }
            Binding::Exclusive => {
                let cores = groups(of_node(node), |processor| processor.core);
                if cores.len() < here.len() {
                    return Err(format!(
                        "--numa-binding exclusive: {} ranks share NUMA node {node}, which has {} cores that may be \
                         used\n  hint: fewer ranks, or --numa-binding node",
                        here.len(),
                        cores.len()
                    ));
                }
                share(&cores, here.len())
            }
            Binding::CoreComplex => {
                let complexes = groups(of_node(node), |processor| processor.cache);
                (0..here.len()).map(|turn| complexes[turn % complexes.len()].clone()).collect()
            }
        };
        for (rank, part) in here.into_iter().zip(parts) {
            lists[rank] = part;
        }
    }
    Ok(lists)
}

/// Processors with the same key together, by key.
fn groups<'a>(
    processors: impl Iterator<Item = &'a Processor>,
    key: impl Fn(&Processor) -> usize,
) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for processor in processors {
        groups.entry(key(processor)).or_default().push(processor.number);
    }
    groups.into_values().collect()
}

/// Divides cores into `parts` whose sizes differ by at most one.
fn share(cores: &[Vec<usize>], parts: usize) -> Vec<Vec<usize>> {
    let cut = |part: usize| part * cores.len() / parts;
    let part = |part: usize| {
        let mut numbers = cores[cut(part)..cut(part + 1)].concat();
        numbers.sort_unstable();
        numbers
    };
    (0..parts).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of two NUMA nodes each; every node has two caches of two cores of two threads.
    fn machine() -> Vec<Processor> {
        const CORES: usize = 16;
        let threads = (0..2 * CORES).map(|number| {
            let core = number % CORES; // the second threads come after all first ones, as Linux counts
            Processor { number, node: core / 4, socket: core / 8, core, cache: core / 2 * 2 }
        });
        threads.collect()
    }

    #[test]
    fn ranks_are_bound_to_nodes_in_turn() {
        let lists = deal(Binding::Node, 5, &machine()).unwrap();
        assert_eq!(lists[0], [0, 1, 2, 3, 16, 17, 18, 19]);
        assert_eq!(lists[3], [12, 13, 14, 15, 28, 29, 30, 31]);
        assert_eq!(lists[4], lists[0]);
    }

    #[test]
    fn a_socket_is_all_of_its_nodes() {
        let lists = deal(Binding::Socket, 4, &machine()).unwrap();
        assert_eq!(lists[0], (0..8).chain(16..24).collect::<Vec<_>>());
        assert_eq!((&lists[1], &lists[3]), (&lists[0], &lists[2]));
        assert_ne!(lists[0], lists[2]);
    }

    #[test]
    fn exclusive_ranks_share_no_core() {
        let lists = deal(Binding::Exclusive, 9, &machine()).unwrap();
        assert_eq!(lists[0], [0, 16]);
        assert_eq!(lists[4], [1, 17]);
        assert_eq!(lists[8], [2, 3, 18, 19]);
        assert_eq!(lists[1], [4, 5, 20, 21]);
        let all = lists.concat();
        assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len());
        assert_eq!(
            deal(Binding::Exclusive, 17, &machine()).unwrap_err(),
            "--numa-binding exclusive: 5 ranks share NUMA node 0, which has 4 cores that may be used\n  hint: fewer \
             ranks, or --numa-binding node"
        );
    }

    #[test]
    fn a_core_complex_shares_a_cache() {
        let lists = deal(Binding::CoreComplex, 9, &machine()).unwrap();
        assert_eq!(lists[0], [0, 1, 16, 17]);
        assert_eq!(lists[4], [2, 3, 18, 19]);
        assert_eq!(lists[8], lists[0]);
    }

    #[test]
    fn processors_that_may_not_be_used_are_left_out() {
        let few: Vec<Processor> =
            machine().into_iter().filter(|processor| [1, 2, 30].contains(&processor.number)).collect();
        assert_eq!(deal(Binding::Node, 2, &few).unwrap(), [vec![1, 2], vec![30]]);
        assert_eq!(deal(Binding::Node, 1, &[]).unwrap_err(), "no processor may be used");
    }

    #[test]
    fn this_machine_has_processors_for_every_mode() {
        for binding in [Binding::Node, Binding::Socket, Binding::CoreComplex, Binding::Exclusive] {
            let lists = processors(binding, 1).unwrap();
            assert!(!lists[0].is_empty());
        }
    }

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("\n"), [0; 0]);
        assert_eq!(parse_list("1-99999999999,x,3"), [3]);
    }
}
