//! What a launch moves and computes, for rooflines.

/// Unique bytes and operations of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Bytes read plus bytes written, each counted once.
    pub hbm_bytes: u64,
    /// Multiplications plus additions on the tensor cores.
    pub flops: u64,
}

impl Cost {
    /// The larger of the two times that the peaks allow, in microseconds.
    pub fn floor_us(&self, bytes_per_s: f64, flops_per_s: f64) -> f64 {
        (self.hbm_bytes as f64 / bytes_per_s).max(self.flops as f64 / flops_per_s) * 1e6
    }
}
