//! The random numbers of the schedules in `model` and `reshape::tests`.

/// SplitMix64, good enough for this.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn pick(&mut self, length: usize) -> usize {
        (self.next() % length as u64) as usize
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}
