//! SplitMix64 (Steele, Lea, Flood 2014): a 64-bit state, full period, fixed for ever.

/// A seeded source of random numbers. Not for secrets.
#[derive(Debug, Clone)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// A generator of the given seed.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// 64 random bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound` (not 0). The bias is below `bound / 2^64`.
    pub const fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0);
        ((self.next_u64() as u128 * bound as u128) >> 64) as usize
    }

    /// Roughly normal, mean 0 and variance 1: the sum of twelve uniform numbers, minus 6. Within ±6.
    pub fn gaussian(&mut self) -> f32 {
        // Four 16-bit uniforms per draw; integer sums keep the result independent of the order of additions.
        let sum: u64 = (0..3)
            .map(|_| {
                let bits = self.next_u64();
                (0..4).map(|i| (bits >> (16 * i)) & 0xFFFF).sum::<u64>()
            })
            .sum();
        (sum as i64 - 6 * 0xFFFF) as f32 / 65536.0
    }

    /// Overwrites `bytes` with random ones.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }

    /// A random order of `items` (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_sequence() {
        let mut rng = SplitMix64::new(1_234_567);
        let first: [u64; 3] = std::array::from_fn(|_| rng.next_u64());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn gaussian_has_mean_zero_and_variance_one() {
        let mut rng = SplitMix64::new(1);
        let draws: Vec<f64> = (0..100_000).map(|_| f64::from(rng.gaussian())).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn shuffle_permutes_and_below_stays_below() {
        let mut rng = SplitMix64::new(2);
        let mut items: Vec<usize> = (0..1000).collect();
        rng.shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
        let mut seen = [false; 7];
        (0..1000).for_each(|_| seen[rng.below(7)] = true);
        assert_eq!(seen, [true; 7]);
    }
}
