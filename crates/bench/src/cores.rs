//! Which process runs on which core.
//!
//! Otherwise the kernel may keep a server on the generator's core or away from it, as long as it runs: two
//! runs of the same server differed by a factor of five, consistently. So the generator has the first core to
//! itself, and every server has all the others.

use super::Failure;

/// The cores we may use, divided up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cores {
    /// The generator's; none if it may run anywhere.
    pub(crate) generator: Option<usize>,
    /// The servers'; empty if they may run anywhere.
    pub(crate) servers: Vec<usize>,
}

impl Cores {
    fn share(allowed: &[usize]) -> Self {
        match allowed {
            [] | [_] => Cores::default(),
            [first, others @ ..] => Cores { generator: Some(*first), servers: others.to_vec() },
        }
    }

    /// Keeps this thread, and those it starts, on the generator's core.
    pub(crate) fn settle() -> Result<Self, Failure> {
        let cores = Cores::share(&allowed());
        if let Some(core) = cores.generator {
            stay_on(&[core])?;
        }
        Ok(cores)
    }
}

#[cfg(target_os = "linux")]
fn allowed() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Keeps this thread, and those it starts, on these cores.
#[cfg(target_os = "linux")]
pub(crate) fn stay_on(cores: &[usize]) -> Result<(), Failure> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU {
            return Err(Failure::new(format!("there is no core {core}")));
        }
        set.set(core);
    }
    sched_setaffinity(None, &set)
        .map_err(|error| Failure::new(format!("cannot stay on the cores {cores:?}: {error}")))
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn stay_on(_cores: &[usize]) -> Result<(), Failure> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_has_a_core_for_itself_where_there_are_two() {
        assert_eq!(Cores::share(&[2, 5, 7]), Cores { generator: Some(2), servers: vec![5, 7] });
        assert_eq!(Cores::share(&[0]), Cores::default());
        assert_eq!(Cores::share(&[]), Cores::default());
    }
}
