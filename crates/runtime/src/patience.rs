//! How long to spin before giving up the core.
//!
//! Waking a thread that sleeps takes tens of microseconds, spinning takes none but costs a core. So a wait that ended while
//! spinning makes the next one more patient, and one that had to sleep makes it less so. With more ranks than cores, the
//! peer that is waited for may need this very core: then yielding it is the quickest, and spinning is harmful.
//!
//! Whether ranks share cores is counted when a group is made. Other programs are not counted, but felt: a yield that takes
//! long has given the core to another thread. If it comes back soon, that thread waits, too; then the core is yielded from
//! the first turn on for a while. If it does not, another program computes there: it would take a whole time slice at every
//! yield, but only a moment from a thread that sleeps, because the system prefers one that was just woken.

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

/// A yield that takes longer has given the core to another thread, and one that takes longer than a thread that waits would
/// keep it has given it to one that computes.
const GAVE_WAY: Duration = Duration::from_micros(5);
const LOST_SLICE: Duration = Duration::from_micros(700);

/// So many waits later it is found out again whether the core is free.
const MEMORY: u32 = 64;

/// Looks at a short operation right after it was called.
const QUICK_TURNS: u32 = 200;

/// What the last yields have told about the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Felt {
    Free,
    /// Threads want it that also wait.
    Shared,
    /// Another program computes on it.
    Taken,
}

#[derive(Clone, Debug)]
pub(crate) struct Patience {
    crowded: bool,
    spins: u32,
    turn: u32,
    felt: Felt,
    /// For how many more waits `felt` counts.
    memory: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { crowded: false, spins: SPINS_MAX, turn: 0, felt: Felt::Free, memory: 0 }
    }

    /// Are there more ranks than cores?
    pub(crate) fn set_crowded(&mut self, crowded: bool) {
        self.crowded = crowded;
    }

    #[cfg(test)]
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// How often to look at a short operation before it is put aside: a few microseconds, if cores are free.
    #[inline]
    pub(crate) fn quick_turns(&self) -> u32 {
        if self.crowded || self.felt != Felt::Free { 1 } else { QUICK_TURNS }
    }

    /// A wait began, or something came: patience is counted from here.
    #[inline]
    pub(crate) fn restart(&mut self) {
        if self.turn == 0 {
            return;
        }
        if self.turn <= self.spins {
            self.spins = (self.spins * 2).min(SPINS_MAX);
        }
        self.turn = 0;
        self.forget();
    }

    /// A wait is over that had to wait.
    fn forget(&mut self) {
        self.memory = self.memory.saturating_sub(1);
        if self.memory == 0 {
            self.felt = Felt::Free;
        }
    }

    /// Nothing came: what now?
    #[inline]
    pub(crate) fn next(&mut self) -> Next {
        self.turn += 1;
        let (spins, yields) = match self.felt {
            _ if self.crowded => (0, YIELDS_CROWDED), // ranks that compute also make a yield long
            Felt::Taken => (SPINS_MIN, 0),
            Felt::Shared => (0, YIELDS_CROWDED),
            Felt::Free => (self.spins, YIELDS),
        };
        if self.turn <= spins {
            Next::Spin
        } else if self.turn <= spins + yields {
            Next::Yield
        } else {
            self.turn = 0;
            self.forget();
            Next::Sleep
        }
    }

    /// The core was yielded, and came back after so long.
    #[inline]
    pub(crate) fn yielded(&mut self, time: Duration) {
        if time > GAVE_WAY {
            self.felt = if time > LOST_SLICE { Felt::Taken } else { Felt::Shared };
            self.memory = MEMORY;
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
    fn a_core_that_others_wait_on_is_yielded_and_one_that_is_taken_is_slept_for() {
        let turns = |patience: &mut Patience| {
            let (mut spins, mut yields) = (0, 0);
            loop {
                match patience.next() {
                    Next::Spin => spins += 1,
                    Next::Yield => yields += 1,
                    Next::Sleep => return (spins, yields),
                }
            }
        };
        let after = |time| {
            let mut patience = Patience::new();
            patience.yielded(time);
            patience
        };
        let usual = (SPINS_MAX, YIELDS);
        assert_eq!(turns(&mut after(GAVE_WAY)), usual, "the core was free");
        assert_eq!(turns(&mut after(GAVE_WAY * 2)), (0, YIELDS_CROWDED));
        let mut taken = after(LOST_SLICE * 2);
        assert_eq!(taken.quick_turns(), 1);
        for _ in 0..MEMORY {
            assert_eq!(turns(&mut taken), (SPINS_MIN, 0));
        }
        assert_eq!(turns(&mut taken), usual, "after some waits it is found out again");
        let mut crowded = after(LOST_SLICE * 2);
        crowded.set_crowded(true);
        assert_eq!(turns(&mut crowded), (0, YIELDS_CROWDED), "it was another rank that computed");
    }

    #[test]
    fn waits_that_end_while_spinning_also_make_forget_that_the_core_was_taken() {
        let mut patience = Patience::new();
        patience.yielded(LOST_SLICE * 2);
        for _ in 0..MEMORY {
            assert_eq!(patience.quick_turns(), 1);
            assert_eq!(patience.next(), Next::Spin);
            patience.restart();
        }
        assert_eq!(patience.quick_turns(), QUICK_TURNS);
        patience.restart();
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
