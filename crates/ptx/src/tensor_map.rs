//! Tensor maps: what a tiled bulk copy needs to know about a tensor in device memory.

use crate::op::RegId;

/// Shared-memory swizzle of the copied tile: 16-byte chunks are permuted within each row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Rows follow each other.
    None,
    /// 32-byte swizzle.
    B32,
    /// 64-byte swizzle.
    B64,
    /// 128-byte swizzle: chunk `c` of 128-byte line `r` lands at chunk `c ^ (r & 7)`.
    B128,
}

/// Most dimensions of a tensor map.
pub const TENSOR_RANK_MAX: usize = 5;

/// A tensor of bytes in device memory and the box that one copy moves. Dimension 0 is innermost and contiguous;
/// elements outside the tensor read as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapDesc {
    /// Device address, 16-byte aligned.
    pub base: u64,
    /// Number of dimensions, 1..=5.
    pub rank: usize,
    /// Sizes in bytes (dimension 0) and rows.
    pub dims: [u64; TENSOR_RANK_MAX],
    /// Byte strides of dimensions 1.., multiples of 16 below 2^40.
    pub strides: [u64; TENSOR_RANK_MAX - 1],
    /// Box sizes, each 1..=256.
    pub box_dims: [u32; TENSOR_RANK_MAX],
    /// Shared-memory swizzle.
    pub swizzle: Swizzle,
}

/// Why a tensor map is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor map refused: {0}")]
pub struct TensorMapError(pub String);

impl TensorMapDesc {
    /// A byte tensor of the given dimensions; strides are those of dimensions 1.. in bytes.
    ///
    /// # Errors
    /// When a size, stride, box or the alignment is outside what the hardware accepts.
    pub fn new(
        base: u64,
        dims: &[u64],
        strides: &[u64],
        box_dims: &[u32],
        swizzle: Swizzle,
    ) -> Result<Self, TensorMapError> {
        let rank = dims.len();
        let fail = |why: String| Err(TensorMapError(why));
        if rank == 0 || rank > TENSOR_RANK_MAX || strides.len() + 1 != rank || box_dims.len() != rank {
            return fail(format!("rank {rank}, {} strides, {} box dimensions", strides.len(), box_dims.len()));
        }
        if !base.is_multiple_of(16) {
            return fail(format!("base {base:#x} is not 16-byte aligned"));
        }
        if let Some(d) = dims.iter().find(|d| **d == 0 || **d > 1 << 32) {
            return fail(format!("dimension {d} is not in 1..=2^32"));
        }
        if let Some(s) = strides.iter().find(|s| !s.is_multiple_of(16) || **s >= 1 << 40) {
            return fail(format!("stride {s} is not a multiple of 16 below 2^40"));
        }
        if let Some(b) = box_dims.iter().find(|b| **b == 0 || **b > 256) {
            return fail(format!("box size {b} is not in 1..=256"));
        }
        let inner = box_dims[0];
        let limit = match swizzle {
            Swizzle::None => 256,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        };
        if inner > limit || !inner.is_multiple_of(16) {
            return fail(format!(
                "inner box of {inner} bytes with swizzle {swizzle:?} (multiple of 16, at most {limit})"
            ));
        }
        let mut desc = TensorMapDesc {
            base,
            rank,
            dims: [1; TENSOR_RANK_MAX],
            strides: [0; TENSOR_RANK_MAX - 1],
            box_dims: [1; TENSOR_RANK_MAX],
            swizzle,
        };
        desc.dims[..rank].copy_from_slice(dims);
        desc.strides[..rank - 1].copy_from_slice(strides);
        desc.box_dims[..rank].copy_from_slice(box_dims);
        Ok(desc)
    }

    /// Bytes that one copy moves into shared memory.
    pub fn box_bytes(&self) -> u32 {
        self.box_dims[..self.rank].iter().product()
    }

    /// The simulator's encoding (the driver's is opaque).
    pub fn to_simulated(&self) -> TensorMap {
        let mut bytes = [0u8; 128];
        let mut put = |at: usize, v: u64| bytes[at..at + 8].copy_from_slice(&v.to_le_bytes());
        put(0, SIM_MAGIC);
        put(8, self.base);
        for (i, d) in self.dims.iter().enumerate() {
            put(16 + 8 * i, *d);
        }
        for (i, s) in self.strides.iter().enumerate() {
            put(56 + 8 * i, *s);
        }
        let swizzle = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B32 => 1,
            Swizzle::B64 => 2,
            Swizzle::B128 => 3,
        };
        put(88, self.rank as u64 | swizzle << 8);
        for (i, b) in self.box_dims.iter().enumerate() {
            bytes[96 + 4 * i..100 + 4 * i].copy_from_slice(&b.to_le_bytes());
        }
        TensorMap { bytes }
    }

    /// Decodes [`TensorMapDesc::to_simulated`]; `None` if the bytes are not such an encoding.
    pub fn from_simulated(bytes: &[u8; 128]) -> Option<Self> {
        let get = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if get(0) != SIM_MAGIC {
            return None;
        }
        let swizzle = match get(88) >> 8 {
            0 => Swizzle::None,
            1 => Swizzle::B32,
            2 => Swizzle::B64,
            _ => Swizzle::B128,
        };
        Some(TensorMapDesc {
            base: get(8),
            rank: (get(88) & 0xff) as usize,
            dims: std::array::from_fn(|i| get(16 + 8 * i)),
            strides: std::array::from_fn(|i| get(56 + 8 * i)),
            box_dims: std::array::from_fn(|i| {
                u32::from_le_bytes(bytes[96 + 4 * i..100 + 4 * i].try_into().expect("four bytes"))
            }),
            swizzle,
        })
    }
}

const SIM_MAGIC: u64 = u64::from_le_bytes(*b"simtmap\0");

/// An encoded tensor map, passed to a kernel by value.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    bytes: [u8; 128],
}

impl TensorMap {
    /// From a device's own encoding.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        TensorMap { bytes }
    }

    /// The encoding.
    pub fn bytes(&self) -> &[u8; 128] {
        &self.bytes
    }
}

impl std::fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match TensorMapDesc::from_simulated(&self.bytes) {
            Some(desc) => desc.fmt(f),
            None => f.write_str("TensorMap(device encoding)"),
        }
    }
}

/// A tensor map as the device code sees it.
#[derive(Clone, Copy, Debug)]
pub struct TensorMapHandle {
    reg: RegId,
}

impl TensorMapHandle {
    pub(crate) fn from_reg(reg: RegId) -> Self {
        TensorMapHandle { reg }
    }

    pub(crate) fn reg(self) -> RegId {
        self.reg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_encoding_round_trips() {
        let desc =
            TensorMapDesc::new(0x1000, &[128, 2, 4, 4, 9], &[512, 128, 1024, 4096], &[128, 2, 4, 4, 2], Swizzle::B128)
                .unwrap();
        assert_eq!(TensorMapDesc::from_simulated(desc.to_simulated().bytes()), Some(desc));
        assert_eq!(desc.box_bytes(), 128 * 64);
        assert_eq!(TensorMapDesc::from_simulated(&[0; 128]), None);
    }

    #[test]
    fn refuses_what_the_hardware_refuses() {
        let new =
            |base, dims: &[u64], strides: &[u64], b: &[u32]| TensorMapDesc::new(base, dims, strides, b, Swizzle::B128);
        assert!(new(8, &[128, 64], &[128], &[128, 64]).is_err());
        assert!(new(0, &[128, 64], &[120], &[128, 64]).is_err());
        assert!(new(0, &[128, 0], &[128], &[128, 64]).is_err());
        assert!(new(0, &[128, 64], &[128], &[128, 257]).is_err());
        assert!(new(0, &[256, 64], &[256], &[256, 64]).is_err());
        assert!(new(0, &[128, 64], &[], &[128, 64]).is_err());
        assert!(new(0, &[128, 64], &[128], &[128, 64]).is_ok());
    }
}
