//! How long to spin before giving up the core.
//!
//! Waking a thread that sleeps takes tens of microseconds, spinning takes none but costs a core. So a wait that ended while
//! spinning makes the next one more patient, and one that had to sleep makes it less so. With more ranks than cores, the
//! peer that is waited for may need this very core: then yielding it is the quickest, and spinning is harmful.

use std::time::Duration;

/// What to do about a wait that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Spin,
    Yield,
    Sleep,
}

/// Turns of spinning at most, before the processor is offered to others.
const SPINS_MAX: u32 = 1024;
const SPINS_MIN: u32 = 16;

/// Turns of yielding where ranks share cores: others run meanwhile, so they are cheap; and without them.
const YIELDS_CROWDED: u32 = 64;
const YIELDS: u32 = 2;

/// A sleep as short as what it takes to fall asleep and be woken.
const SHORT: Duration = Duration::from_micros(200);

/// Looks at a short operation right after it was called.
const QUICK_TURNS: u32 = 200;

#[derive(Clone, Debug)]
pub(crate) struct Patience {
    crowded: bool,
    spins: u32,
    turn: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { crowded: false, spins: SPINS_MAX, turn: 0 }
    }

    /// Are there more ranks than cores?
    pub(crate) fn set_crowded(&mut self, crowded: bool) {
        self.crowded = crowded;
    }

    /// How often to look at a short operation before it is put aside: a few microseconds, if cores are free.
    #[inline]
    pub(crate) fn quick_turns(&self) -> u32 {
        if self.crowded { 1 } else { QUICK_TURNS }
    }

    /// A wait began, or something came: patience is counted from here.
    #[inline]
    pub(crate) fn restart(&mut self) {
        if self.turn > 0 && self.turn <= self.spins {
            self.spins = (self.spins * 2).min(SPINS_MAX);
        }
        self.turn = 0;
    }

    /// Nothing came: what now?
    #[inline]
    pub(crate) fn next(&mut self) -> Next {
        self.turn += 1;
        let (spins, yields) = if self.crowded { (0, YIELDS_CROWDED) } else { (self.spins, YIELDS) };
        if self.turn <= spins {
            Next::Spin
        } else if self.turn <= spins + yields {
            Next::Yield
        } else {
            self.turn = 0;
            Next::Sleep
        }
    }

    /// The sleep took so long. One that was over soon should not have been: it was most of what there was to wait for, and
    /// ranks that sleep make each other wait, and so sleep. After a long one there is no hurry.
    pub(crate) fn slept(&mut self, time: Duration) {
        self.spins = if time < SHORT { SPINS_MAX } else { (self.spins / 2).max(SPINS_MIN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spins_before_sleep(patience: &mut Patience) -> u32 {
        let mut spins = 0;
        loop {
            match patience.next() {
                Next::Spin => spins += 1,
                Next::Yield => {}
                Next::Sleep => {
                    patience.slept(SHORT);
                    return spins;
                }
            }
        }
    }

    #[test]
    fn fruitless_spinning_becomes_shorter_and_fruitful_spinning_longer_again() {
        let mut patience = Patience::new();
        let lengths: Vec<u32> = (0..9).map(|_| spins_before_sleep(&mut patience)).collect();
        assert_eq!(lengths, [1024, 512, 256, 128, 64, 32, 16, 16, 16]);
        for _ in 0..3 {
            assert_eq!(patience.next(), Next::Spin);
            patience.restart();
        }
        assert_eq!(spins_before_sleep(&mut patience), 128);
    }

    #[test]
    fn a_sleep_that_was_hardly_worth_it_makes_patient_again() {
        let mut patience = Patience::new();
        (0..9).for_each(|_| _ = spins_before_sleep(&mut patience));
        patience.slept(SHORT / 2);
        assert_eq!(spins_before_sleep(&mut patience), 1024);
    }

    #[test]
    fn with_more_ranks_than_cores_nobody_spins() {
        let mut patience = Patience::new();
        patience.set_crowded(true);
        assert_eq!(patience.next(), Next::Yield);
        assert_eq!(spins_before_sleep(&mut patience), 0);
        patience.set_crowded(false);
        assert_eq!(patience.next(), Next::Spin);
    }
}
