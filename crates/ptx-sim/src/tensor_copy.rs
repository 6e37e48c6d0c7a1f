//! What a tensor-map copy moves where.
//!
//! The box lies in shared memory densely, dimension 0 innermost, in 16-byte chunks whose addresses are then swizzled:
//!
//! | swizzle | address bits | are XORed with bits |
//! |---|---|---|
//! | 128 bytes | 4..7 | 7..10 |
//! | 64 bytes | 4..6 | 7..9 |
//! | 32 bytes | 4 | 7 |
//!
//! Since these are bits of the address and not of the offset in the box, a box that starts in the middle of the pattern
//! continues it. Bytes outside the tensor are written as zero, and count as copied bytes.
//!
//! The 128-byte swizzle of whole 128-byte rows is measured on an H200; the others follow the CUDA documentation.

use ptx::{Swizzle, TENSOR_RANK_MAX, TensorMapDesc};

/// Required alignment of the shared destination, in bytes.
pub const DESTINATION_ALIGN: u32 = 128;

const CHUNK_BYTES: u32 = 16;

/// Why a copy cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorCopyError {
    /// The shared destination is not aligned.
    #[error("shared destination {address:#x} of a tensor copy is not {DESTINATION_ALIGN}-byte aligned")]
    Misaligned {
        /// The destination.
        address: u32,
    },
    /// As many coordinates as dimensions are needed.
    #[error("{coords} coordinates for a tensor map of rank {rank}")]
    Rank {
        /// Coordinates given.
        coords: usize,
        /// Dimensions of the map.
        rank: usize,
    },
}

/// Swizzles a shared-memory address.
#[inline]
pub fn swizzle_address(swizzle: Swizzle, address: u32) -> u32 {
    let mask = match swizzle {
        Swizzle::None => 0,
        Swizzle::B32 => 1,
        Swizzle::B64 => 3,
        Swizzle::B128 => 7,
    };
    address ^ ((address >> 7) & mask) << 4
}

/// A contiguous part of a copy, within one 16-byte chunk of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Shared address of its first byte.
    pub shared: u32,
    /// Global address of its first byte; `None`: zeros.
    pub global: Option<u64>,
    /// Bytes, 1..=16. Less than 16 only where a chunk straddles the tensor's edge.
    pub len: u32,
}

/// The pieces of one copy, in the order of the box. Every byte of the box is in exactly one piece.
#[derive(Clone, Debug)]
pub struct TensorCopy<'a> {
    map: &'a TensorMapDesc,
    coords: [i64; TENSOR_RANK_MAX],
    shared: u32,
    /// Row of the box: indices in dimensions 1...
    index: [u32; TENSOR_RANK_MAX],
    /// Byte of the row.
    at: u32,
    /// Global address of the row's byte 0, `None` if the row is outside the tensor or all rows are done.
    row: Option<u64>,
    rows_left: u32,
}

impl<'a> TensorCopy<'a> {
    /// The copy of the box at `coords` (innermost first, in bytes and rows; negative and past the end is allowed) to
    /// shared address `shared`.
    ///
    /// # Errors
    /// When the destination is misaligned or coordinates are missing.
    pub fn new(map: &'a TensorMapDesc, coords: &[i32], shared: u32) -> Result<Self, TensorCopyError> {
        if !shared.is_multiple_of(DESTINATION_ALIGN) {
            return Err(TensorCopyError::Misaligned { address: shared });
        }
        if coords.len() != map.rank {
            return Err(TensorCopyError::Rank { coords: coords.len(), rank: map.rank });
        }
        let mut wide = [0; TENSOR_RANK_MAX];
        for (wide, coord) in wide.iter_mut().zip(coords) {
            *wide = i64::from(*coord);
        }
        let rows_left = map.box_dims[1..map.rank].iter().product();
        let mut copy = Self { map, coords: wide, shared, index: [0; TENSOR_RANK_MAX], at: 0, row: None, rows_left };
        copy.row = copy.row_address();
        Ok(copy)
    }

    /// Bytes that the copy completes on its mbarrier: the full box, bytes outside the tensor included.
    pub fn bytes(&self) -> u32 {
        self.map.box_bytes()
    }

    fn row_address(&self) -> Option<u64> {
        let mut address = self.map.base as i64;
        for d in 1..self.map.rank {
            let position = self.coords[d] + i64::from(self.index[d]);
            if position < 0 || position as u64 >= self.map.dims[d] {
                return None;
            }
            address = address.wrapping_add(position.wrapping_mul(self.map.strides[d - 1] as i64));
        }
        // Byte 0 of a row may lie before the tensor; only bytes inside are ever addressed.
        Some(address.wrapping_add(self.coords[0]) as u64)
    }

    fn next_row(&mut self) {
        self.at = 0;
        self.shared += self.map.box_dims[0];
        self.rows_left -= 1;
        for d in 1..self.map.rank {
            self.index[d] += 1;
            if self.index[d] < self.map.box_dims[d] {
                break;
            }
            self.index[d] = 0;
        }
        self.row = self.row_address();
    }
}

impl Iterator for TensorCopy<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        if self.rows_left == 0 {
            return None;
        }
        let left = CHUNK_BYTES - self.at % CHUNK_BYTES;
        let (global, len) = match self.row {
            None => (None, left),
            Some(row) => {
                let position = self.coords[0] + i64::from(self.at);
                let size = self.map.dims[0] as i64;
                if position < 0 {
                    (None, left.min(position.unsigned_abs().min(16) as u32))
                } else if position >= size {
                    (None, left)
                } else {
                    (Some(row.wrapping_add(u64::from(self.at))), left.min((size - position).min(16) as u32))
                }
            }
        };
        let piece = Piece { shared: swizzle_address(self.map.swizzle, self.shared + self.at), global, len };
        self.at += len;
        if self.at == self.map.box_dims[0] {
            self.next_row();
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of shared memory after the copy, from a global memory whose byte `a` is `a % 251 + 1`.
    fn copied(map: &TensorMapDesc, coords: &[i32], shared: u32) -> Vec<Option<u8>> {
        let mut out = vec![None; shared as usize + map.box_bytes() as usize + 1024];
        let copy = TensorCopy::new(map, coords, shared).unwrap();
        assert_eq!(copy.bytes(), map.box_bytes());
        for piece in copy {
            assert!(piece.shared / 16 == (piece.shared + piece.len - 1) / 16, "within a chunk");
            for i in 0..piece.len {
                let slot = &mut out[(piece.shared + i) as usize];
                assert!(slot.is_none(), "byte written twice");
                *slot = Some(piece.global.map_or(0, |at| global(at + u64::from(i))));
            }
        }
        assert_eq!(out.iter().flatten().count(), map.box_bytes() as usize);
        out
    }

    fn global(address: u64) -> u8 {
        (address % 251) as u8 + 1
    }

    #[test]
    fn chunk_c_of_row_r_lands_at_chunk_c_xor_r() {
        let map = TensorMapDesc::new(4096, &[128, 64, 3], &[128, 8448], &[128, 64, 1], Swizzle::B128).unwrap();
        let out = copied(&map, &[0, 0, 2], 2048);
        for r in 0..64u64 {
            for c in 0..8 {
                for i in 0..16 {
                    let at = 2048 + r * 128 + (c ^ (r & 7)) * 16 + i;
                    assert_eq!(out[at as usize], Some(global(4096 + 2 * 8448 + r * 128 + c * 16 + i)));
                }
            }
        }
    }

    #[test]
    fn the_pattern_follows_the_address_not_the_box() {
        let map = TensorMapDesc::new(0, &[128, 64], &[128], &[128, 8], Swizzle::B128).unwrap();
        let first = TensorCopy::new(&map, &[0, 0], 1024 + 3 * 128).unwrap().next().unwrap();
        assert_eq!((first.shared, first.global), (1024 + 3 * 128 + 3 * 16, Some(0)));
    }

    #[test]
    fn each_swizzle_moves_its_bits() {
        let rows = |swizzle| (0..8).map(|row| swizzle_address(swizzle, row * 128) % 128 / 16).collect::<Vec<_>>();
        assert_eq!(rows(Swizzle::None), [0; 8]);
        assert_eq!(rows(Swizzle::B32), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(rows(Swizzle::B64), [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(rows(Swizzle::B128), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn swizzles_are_their_own_inverse() {
        for swizzle in [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            for address in 0..8192 {
                assert_eq!(swizzle_address(swizzle, swizzle_address(swizzle, address)), address);
            }
        }
    }

    #[test]
    fn bytes_outside_the_tensor_are_zero() {
        // 100 bytes wide, so the last chunk inside is cut; 5 rows.
        let map = TensorMapDesc::new(64, &[100, 5], &[112], &[64, 4], Swizzle::None).unwrap();
        for (x, y) in [(0, 0), (60, 3), (-20, -2), (100, 0), (0, 5), (-64, 0), (7, 1), (i32::MAX, i32::MIN)] {
            let out = copied(&map, &[x, y], 128);
            for row in 0..4i64 {
                for byte in 0..64i64 {
                    let (px, py) = (i64::from(x) + byte, i64::from(y) + row);
                    let inside = (0..100).contains(&px) && (0..5).contains(&py);
                    let expected = if inside { global((64 + py * 112 + px) as u64) } else { 0 };
                    assert_eq!(out[(128 + row * 64 + byte) as usize], Some(expected), "({x}, {y}) + ({byte}, {row})");
                }
            }
        }
    }

    #[test]
    fn higher_dimensions_nest() {
        let map =
            TensorMapDesc::new(0, &[32, 4, 4, 4, 4], &[32, 128, 512, 2048], &[16, 2, 1, 3, 2], Swizzle::None).unwrap();
        let out = copied(&map, &[16, 1, 2, 1, 3], 0);
        let mut at = 0;
        for e in 0..2u64 {
            for d in 0..3 {
                for b in 0..2 {
                    let inside = e == 0;
                    let address = 16 + (1 + b) * 32 + 2 * 128 + (1 + d) * 512 + (3 + e) * 2048;
                    assert_eq!(out[at], Some(if inside { global(address) } else { 0 }));
                    at += 16;
                }
            }
        }
    }

    #[test]
    fn one_dimension_is_a_row() {
        let map = TensorMapDesc::new(32, &[1000], &[], &[48], Swizzle::None).unwrap();
        let pieces: Vec<Piece> = TensorCopy::new(&map, &[16], 256).unwrap().collect();
        let expected = [(256, 48), (272, 64), (288, 80)];
        assert_eq!(pieces, expected.map(|(shared, at)| Piece { shared, global: Some(at), len: 16 }));
    }

    #[test]
    fn misuse_is_named() {
        let map = TensorMapDesc::new(0, &[128, 64], &[128], &[128, 8], Swizzle::B128).unwrap();
        assert_eq!(TensorCopy::new(&map, &[0, 0], 64).unwrap_err(), TensorCopyError::Misaligned { address: 64 });
        assert_eq!(TensorCopy::new(&map, &[0], 128).unwrap_err(), TensorCopyError::Rank { coords: 1, rank: 2 });
    }
}
