//! One bit per byte of a memory.

/// A bitmap over byte offsets.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByteBits {
    words: Vec<u64>,
}

impl ByteBits {
    /// All clear, for `bytes` bytes.
    pub(crate) fn new(bytes: usize) -> ByteBits {
        ByteBits { words: vec![0; bytes.div_ceil(64)] }
    }

    /// Bits of `size` bytes at `at`, when both fit one word (an access aligned to its size).
    #[inline(always)]
    fn small(at: usize, size: usize) -> (usize, u64) {
        debug_assert!(at % 64 + size <= 64 && size < 64);
        (at / 64, ((1u64 << size) - 1) << (at % 64))
    }

    /// Whether every byte of an aligned access of at most 16 bytes is set.
    #[inline(always)]
    pub(crate) fn all_small(&self, at: usize, size: usize) -> bool {
        let (word, mask) = ByteBits::small(at, size);
        self.words[word] & mask == mask
    }

    /// Whether some byte of an aligned access of at most 16 bytes is set.
    #[inline(always)]
    pub(crate) fn any_small(&self, at: usize, size: usize) -> bool {
        let (word, mask) = ByteBits::small(at, size);
        self.words[word] & mask != 0
    }

    /// Sets the bytes of an aligned access of at most 16 bytes.
    #[inline(always)]
    pub(crate) fn set_small(&mut self, at: usize, size: usize) {
        let (word, mask) = ByteBits::small(at, size);
        self.words[word] |= mask;
    }

    /// Whether byte `at` is set.
    #[cfg(test)]
    fn get(&self, at: usize) -> bool {
        self.words[at / 64] >> (at % 64) & 1 == 1
    }

    /// Calls `f(word, mask)` for every word that the range touches.
    fn each(range: std::ops::Range<usize>, mut f: impl FnMut(usize, u64) -> bool) {
        let mut at = range.start;
        while at < range.end {
            let n = (64 - at % 64).min(range.end - at);
            let mask = (u64::MAX >> (64 - n)) << (at % 64);
            if !f(at / 64, mask) {
                return;
            }
            at += n;
        }
    }

    /// Sets or clears a range.
    pub(crate) fn fill(&mut self, range: std::ops::Range<usize>, value: bool) {
        let words = &mut self.words;
        ByteBits::each(range, |w, mask| {
            if value {
                words[w] |= mask;
            } else {
                words[w] &= !mask;
            }
            true
        });
    }

    /// The first byte of the range whose bit is `value`.
    pub(crate) fn find(&self, range: std::ops::Range<usize>, value: bool) -> Option<usize> {
        let mut found = None;
        ByteBits::each(range, |w, mask| {
            let bits = if value { self.words[w] } else { !self.words[w] } & mask;
            if bits != 0 {
                found = Some(w * 64 + bits.trailing_zeros() as usize);
            }
            bits == 0
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_agree_with_single_bytes() {
        for (start, end) in [(0, 0), (0, 1), (3, 70), (64, 128), (63, 65), (10, 200), (199, 200)] {
            let mut bits = ByteBits::new(200);
            bits.fill(start..end, true);
            for at in 0..200 {
                assert_eq!(bits.get(at), (start..end).contains(&at), "{start}..{end} at {at}");
            }
            assert_eq!(bits.find(0..200, true), (start < end).then_some(start));
            assert_eq!(bits.find(start..200, false), (end < 200).then_some(end));
            bits.fill(start..end, false);
            assert_eq!(bits.find(0..200, true), None);
        }
    }

    #[test]
    fn small_accesses_agree_with_ranges() {
        let mut bits = ByteBits::new(256);
        for size in [1, 2, 4, 8, 16] {
            let at = 128 + size;
            assert!(!bits.any_small(at, size));
            bits.set_small(at, size);
            assert!(bits.all_small(at, size) && bits.find(at..at + size, false).is_none());
            bits.fill(at..at + 1, false);
            assert!(!bits.all_small(at, size));
            bits.fill(0..256, false);
        }
    }
}
