//! A set of ranks of one group, as bits.

/// The largest group: what bounds every message and every table of this folder.
pub(super) const SIZE_MAX: usize = 4096;

/// Ranks below `size`. Two sets that are combined have the same size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ranks {
    size: usize,
    words: Vec<u64>,
}

impl Ranks {
    pub(super) fn none(size: usize) -> Ranks {
        Ranks { size, words: vec![0; size.div_ceil(64)] }
    }

    pub(super) fn of(size: usize, ranks: impl IntoIterator<Item = usize>) -> Ranks {
        let mut set = Ranks::none(size);
        ranks.into_iter().for_each(|rank| set.insert(rank));
        set
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn insert(&mut self, rank: usize) {
        debug_assert!(rank < self.size);
        self.words[rank / 64] |= 1 << (rank % 64);
    }

    pub(super) fn remove(&mut self, rank: usize) {
        self.words[rank / 64] &= !(1 << (rank % 64));
    }

    pub(super) fn contains(&self, rank: usize) -> bool {
        self.words.get(rank / 64).is_some_and(|word| word >> (rank % 64) & 1 == 1)
    }

    pub(super) fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    pub(super) fn add(&mut self, others: &Ranks) {
        self.words.iter_mut().zip(&others.words).for_each(|(word, other)| *word |= other);
    }

    /// The ranks that are not in it.
    pub(super) fn others(&self) -> Ranks {
        Ranks::of(self.size, (0..self.size).filter(|rank| !self.contains(*rank)))
    }

    /// In ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.size).filter(|rank| self.contains(*rank))
    }

    /// How many bytes a set takes in a message.
    pub(super) fn bytes_len(size: usize) -> usize {
        size.div_ceil(8)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let bytes = self.words.iter().flat_map(|word| word.to_le_bytes());
        out.extend(bytes.take(Ranks::bytes_len(self.size)));
    }

    /// Nothing if the number of bytes is not right, or a bit is set that stands for no rank.
    pub(super) fn decode(bytes: &[u8], size: usize) -> Option<Ranks> {
        let set = Ranks::of(
            size,
            (0..size).filter(|rank| bytes.get(rank / 8).is_some_and(|byte| byte >> (rank % 8) & 1 == 1)),
        );
        let mut again = Vec::with_capacity(bytes.len());
        set.encode(&mut again);
        (again == bytes).then_some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_survives_its_bytes_and_stray_bits_are_refused() {
        for size in [1, 7, 8, 9, 63, 64, 65, SIZE_MAX] {
            let set = Ranks::of(size, (0..size).filter(|rank| rank % 3 == 0));
            let mut bytes = Vec::new();
            set.encode(&mut bytes);
            assert_eq!(bytes.len(), Ranks::bytes_len(size));
            assert_eq!(Ranks::decode(&bytes, size).as_ref(), Some(&set));
            assert_eq!(Ranks::decode(&bytes[1..], size), None);
            assert_eq!(Ranks::decode(&[&bytes[..], &[0]].concat(), size), None);
            if !size.is_multiple_of(8) {
                *bytes.last_mut().expect("not empty") |= 0x80;
                assert_eq!(Ranks::decode(&bytes, size), None, "a bit beyond the last rank");
            }
        }
    }

    #[test]
    fn sets_are_added_and_turned_round() {
        let mut set = Ranks::of(70, [0, 69]);
        set.add(&Ranks::of(70, [1, 64]));
        set.remove(0);
        assert_eq!((set.iter().collect::<Vec<_>>(), set.len()), (vec![1, 64, 69], 3));
        assert_eq!((set.others().len(), set.others().contains(0), set.contains(1000)), (67, true, false));
    }
}
