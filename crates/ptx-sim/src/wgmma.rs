//! Operands and product of a warpgroup MMA: m64nN, K = 32 bytes per instruction (32 E4M3 or 16 BF16 elements).
//!
//! A shared-memory operand is named by a 64-bit descriptor:
//!
//! | bits | meaning |
//! |---|---|
//! | 0..14 | start address >> 4 |
//! | 16..30 | leading byte offset >> 4, ignored for K-major operands in swizzled layouts |
//! | 32..46 | stride byte offset >> 4: between groups of 8 rows |
//! | 49..52 | base offset, 0 for a pattern that starts at a multiple of its size |
//! | 62..64 | layout: 0 no swizzle, 1 128-byte, 2 64-byte, 3 32-byte swizzle |
//!
//! Here rows are 128 bytes (128-byte swizzle, K-major): row r starts at `start + r / 8 * stride + r % 8 * 128`. A k-step
//! advances `start` by 32 bytes inside the row, and bits 4..7 of every address are XORed with bits 7..10. Encoding, k-step
//! and exactness for N = 32, 64, 128, 256 are measured on an H200.
//!
//! Fragments: register j of thread t of the warpgroup holds the accumulator of row
//! `16 * (t / 32) + t % 32 / 4 + 8 * (j / 2 % 2)`, column `8 * (j / 4) + 2 * (t % 4) + j % 2`. Register j of an A operand
//! in registers holds row `16 * (t / 32) + t % 32 / 4 + 8 * (j % 2)`, bytes `16 * (j / 2) + 4 * (t % 4) ..+ 4` (PTX ISA,
//! not measured).

use ptx::Swizzle;
use ptx::op::MmaInput;

use crate::numeric::tensor_core::{mma_bf16_k16, mma_e4m3_k32};
use crate::tensor_copy::swizzle_address;

/// Rows of A and of the accumulator.
pub const M: usize = 64;
/// Bytes of K per instruction.
pub const K_BYTES: usize = 32;
/// Largest number of columns.
pub const N_MAX: u32 = 256;

const ROW_BYTES: u32 = 128;
const PATTERN_BYTES: u32 = 1024;

/// One row of an operand: its 32 bytes of K, in order.
pub type OperandRow = [u8; K_BYTES];

/// Why a descriptor or an access through it is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WgmmaError {
    /// A layout that the simulator does not model.
    #[error("matrix descriptor layout {0:?} is not supported, only the 128-byte swizzle")]
    UnsupportedLayout(Swizzle),
    /// A pattern that does not start at a multiple of its size.
    #[error("matrix descriptor base offset {0} is not supported, only 0")]
    UnsupportedBaseOffset(u8),
    /// Bits that no field owns are set.
    #[error("matrix descriptor {0:#018x} has reserved bits set")]
    ReservedBits(u64),
    /// The first row is not the first of a 1024-byte pattern, or the k-step is not one of the four of a row.
    #[error("matrix descriptor address {0:#x} is not a 1024-byte aligned tile plus 0, 32, 64 or 96")]
    Misaligned(u32),
    /// The stride between groups of 8 rows breaks the pattern.
    #[error("matrix descriptor stride {0} is not a multiple of 1024")]
    BadStride(u32),
    /// The column count is not one of the instruction's.
    #[error("{0} columns: a multiple of 8 up to 256 is needed")]
    BadColumns(u32),
    /// The operand leaves shared memory.
    #[error("matrix operand reaches shared address {0:#x}, outside the CTA's shared memory")]
    OutOfBounds(u32),
}

/// A K-major shared-memory operand of one instruction, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedOperand {
    start: u32,
    stride: u32,
    rows: u32,
}

impl SharedOperand {
    /// Decodes the descriptor of an operand of `rows` rows: [`M`] for A, N for B.
    ///
    /// # Errors
    /// When the descriptor means something that is not modelled, or is malformed.
    pub fn decode(descriptor: u64, rows: u32) -> Result<Self, WgmmaError> {
        let layout = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        if layout != Swizzle::B128 {
            return Err(WgmmaError::UnsupportedLayout(layout));
        }
        let base_offset = (descriptor >> 49 & 7) as u8;
        if base_offset != 0 {
            return Err(WgmmaError::UnsupportedBaseOffset(base_offset));
        }
        let fields = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62;
        if descriptor & !fields != 0 {
            return Err(WgmmaError::ReservedBits(descriptor));
        }
        let start = ((descriptor & 0x3FFF) << 4) as u32;
        if start % PATTERN_BYTES >= ROW_BYTES || !start.is_multiple_of(K_BYTES as u32) {
            return Err(WgmmaError::Misaligned(start));
        }
        let stride = ((descriptor >> 32 & 0x3FFF) << 4) as u32;
        if !stride.is_multiple_of(PATTERN_BYTES) {
            return Err(WgmmaError::BadStride(stride));
        }
        if rows == 0 || !rows.is_multiple_of(8) || rows > N_MAX {
            return Err(WgmmaError::BadColumns(rows));
        }
        Ok(Self { start, stride, rows })
    }

    /// Number of rows.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Shared addresses of the 32 bytes that each row's k-step occupies, 32-byte aligned. In odd rows the two halves are
    /// exchanged.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + use<> {
        let Self { start, stride, rows } = *self;
        (0..rows).map(move |row| {
            let plain = start + row / 8 * stride + row % 8 * ROW_BYTES;
            // The swizzle moves both chunks of the 32 bytes to the same 32 bytes.
            swizzle_address(Swizzle::B128, plain) & !(K_BYTES as u32 - 1)
        })
    }

    /// Reads the operand from the CTA's shared memory, whose first byte has address `base`.
    ///
    /// # Errors
    /// When a row is outside.
    pub fn gather(&self, shared: &[u8], base: u32) -> Result<Vec<OperandRow>, WgmmaError> {
        self.blocks()
            .enumerate()
            .map(|(row, address)| {
                let at = address.checked_sub(base).ok_or(WgmmaError::OutOfBounds(address))? as usize;
                let block = shared.get(at..at + K_BYTES).ok_or(WgmmaError::OutOfBounds(address))?;
                let mut bytes: OperandRow = block.try_into().expect("32 bytes");
                if row % 2 == 1 {
                    bytes.rotate_left(K_BYTES / 2);
                }
                Ok(bytes)
            })
            .collect()
    }
}

/// Puts one warp's A fragment in registers, `regs[j][lane]`, into the rows of A that the warp owns.
///
/// # Panics
/// If `warp`, within its warpgroup, is not below 4.
pub fn place_register_operand(warp: usize, regs: &[[u32; 32]; 4], a: &mut [OperandRow; M]) {
    assert!(warp < 4, "a warpgroup has 4 warps");
    for (j, lanes) in regs.iter().enumerate() {
        for (lane, bits) in lanes.iter().enumerate() {
            let row = 16 * warp + lane / 4 + 8 * (j % 2);
            let byte = 16 * (j / 2) + 4 * (lane % 4);
            a[row][byte..byte + 4].copy_from_slice(&bits.to_le_bytes());
        }
    }
}

/// Row and column of accumulator register `j` of thread `thread` of a warpgroup.
#[inline]
pub fn accumulator_element(thread: usize, j: usize) -> (usize, usize) {
    (16 * (thread / 32) + thread % 32 / 4 + 8 * (j / 2 % 2), 8 * (j / 4) + 2 * (thread % 4) + j % 2)
}

/// The accumulators of a warpgroup, 64 rows x n columns, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tile {
    n: usize,
    values: Vec<f32>,
}

impl Tile {
    /// All +0, as if scale-d were 0.
    ///
    /// # Errors
    /// When `n` is not a multiple of 8 up to 256.
    pub fn zero(n: u32) -> Result<Self, WgmmaError> {
        if n == 0 || !n.is_multiple_of(8) || n > N_MAX {
            return Err(WgmmaError::BadColumns(n));
        }
        Ok(Self { n: n as usize, values: vec![0.0; M * n as usize] })
    }

    /// Number of columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// The element at a row and column.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.n + column]
    }

    /// Takes accumulator register `j` of the 32 lanes of warp `warp` of the warpgroup (FP32 bits).
    pub fn load(&mut self, warp: usize, j: usize, lanes: &[u32; 32]) {
        for (lane, bits) in lanes.iter().enumerate() {
            let (row, column) = accumulator_element(32 * warp + lane, j);
            self.values[row * self.n + column] = f32::from_bits(*bits);
        }
    }

    /// Accumulator register `j` of the 32 lanes of warp `warp` of the warpgroup (FP32 bits).
    pub fn store(&self, warp: usize, j: usize) -> [u32; 32] {
        std::array::from_fn(|lane| {
            let (row, column) = accumulator_element(32 * warp + lane, j);
            self.values[row * self.n + column].to_bits()
        })
    }

    /// Adds the product of one k-step, bit for bit as the hardware does: `self[m][n] += a[m] . b[n]`.
    ///
    /// # Panics
    /// If `b` does not hold [`Tile::n`] rows.
    pub fn accumulate(&mut self, input: MmaInput, a: &[OperandRow; M], b: &[OperandRow]) {
        match input {
            MmaInput::E4m3 => mma_e4m3_k32(a, b, &mut self.values),
            MmaInput::Bf16 => {
                let a = a.map(|row| bf16_row(&row));
                let b: Vec<[u16; 16]> = b.iter().map(bf16_row).collect();
                mma_bf16_k16(&a, &b, &mut self.values);
            }
        }
    }
}

fn bf16_row(row: &OperandRow) -> [u16; 16] {
    std::array::from_fn(|i| u16::from_le_bytes([row[2 * i], row[2 * i + 1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::tensor_core::{dot_bf16_k16, dot_e4m3_k32};
    use crate::tensor_copy::TensorCopy;
    use ptx::{DESCRIPTOR_K_MAJOR_128, TensorMapDesc};
    use std::collections::HashSet;

    const BASE: u32 = 1024;

    fn descriptor(address: u32) -> u64 {
        DESCRIPTOR_K_MAJOR_128 | u64::from(address >> 4)
    }

    /// A byte of row `r`, unlike its neighbours'. Never the code of an E4M3 NaN.
    fn byte(r: usize, k: usize) -> u8 {
        ((r * 131 + k * 7) % 113) as u8
    }

    /// Shared memory with `rows` rows of [`byte`]s as a tensor copy with the 128-byte swizzle leaves them.
    fn copied_tile(rows: usize) -> Vec<u8> {
        let mut shared = vec![0xEE; rows * 128];
        let dims = [128, rows as u64];
        let map = TensorMapDesc::new(0, &dims, &[128], &[128, rows as u32], Swizzle::B128).unwrap();
        for piece in TensorCopy::new(&map, &[0, 0], BASE).unwrap() {
            for i in 0..piece.len {
                let at = piece.global.unwrap() as usize + i as usize;
                shared[(piece.shared - BASE + i) as usize] = byte(at / 128, at % 128);
            }
        }
        shared
    }

    #[test]
    fn a_descriptor_reads_what_a_tensor_copy_wrote() {
        for rows in [8, 64, 256] {
            let shared = copied_tile(rows);
            for step in 0..4 {
                // A k-step adds 2 to the descriptor.
                let operand = SharedOperand::decode(descriptor(BASE) + 2 * step as u64, rows as u32).unwrap();
                let gathered = operand.gather(&shared, BASE).unwrap();
                assert_eq!(gathered.len(), rows);
                for (r, row) in gathered.iter().enumerate() {
                    let expected: OperandRow = std::array::from_fn(|k| byte(r, 32 * step + k));
                    assert_eq!(*row, expected, "row {r} of step {step}");
                }
            }
        }
    }

    #[test]
    fn the_four_steps_read_every_byte_once() {
        let mut seen = HashSet::new();
        for step in 0..4 {
            for block in SharedOperand::decode(descriptor(BASE) + 2 * step, 64).unwrap().blocks() {
                assert!(block.is_multiple_of(32) && seen.insert(block));
            }
        }
        assert_eq!(seen.len() * 32, 64 * 128);
        assert!(seen.iter().all(|block| (BASE..BASE + 64 * 128).contains(block)));
    }

    #[test]
    fn the_stride_separates_groups_of_eight_rows() {
        let wide = descriptor(2048) & !(0x3FFF << 32) | (3072 >> 4) << 32;
        let blocks: Vec<u32> = SharedOperand::decode(wide, 16).unwrap().blocks().collect();
        assert_eq!(blocks[8] - blocks[0], 3072);
    }

    #[test]
    fn what_is_not_modelled_is_refused_by_name() {
        let good = descriptor(BASE);
        let decode = |bits| SharedOperand::decode(bits, 64).unwrap_err();
        let layout = |n: u64| good & !(3 << 62) | n << 62;
        assert_eq!(decode(layout(0)), WgmmaError::UnsupportedLayout(Swizzle::None));
        assert_eq!(decode(layout(2)), WgmmaError::UnsupportedLayout(Swizzle::B64));
        assert_eq!(decode(layout(3)), WgmmaError::UnsupportedLayout(Swizzle::B32));
        assert_eq!(decode(good | 5 << 49), WgmmaError::UnsupportedBaseOffset(5));
        assert_eq!(decode(good | 1 << 14), WgmmaError::ReservedBits(good | 1 << 14));
        assert_eq!(decode(descriptor(BASE + 128)), WgmmaError::Misaligned(BASE + 128));
        assert_eq!(decode(descriptor(BASE + 16)), WgmmaError::Misaligned(BASE + 16));
        assert_eq!(decode(good & !(0x3FFF << 32) | 1 << 32), WgmmaError::BadStride(16));
        assert_eq!(SharedOperand::decode(good, 12), Err(WgmmaError::BadColumns(12)));
        assert_eq!(Tile::zero(264), Err(WgmmaError::BadColumns(264)));
    }

    #[test]
    fn operands_stay_inside_shared_memory() {
        let operand = SharedOperand::decode(descriptor(BASE), 64).unwrap();
        assert!(operand.gather(&vec![0; 64 * 128], BASE).is_ok());
        assert!(matches!(operand.gather(&vec![0; 64 * 128 - 1], BASE), Err(WgmmaError::OutOfBounds(_))));
        assert_eq!(operand.gather(&vec![0; 1 << 16], 2048), Err(WgmmaError::OutOfBounds(BASE)));
    }

    #[test]
    fn fragments_are_a_bijection_onto_the_tile() {
        for n in [8, 32, 256] {
            let mut seen = HashSet::new();
            for thread in 0..128 {
                for j in 0..n / 2 {
                    let (row, column) = accumulator_element(thread, j);
                    assert!(row < M && column < n && seen.insert((row, column)));
                }
            }
            assert_eq!(seen.len(), M * n);
        }
    }

    #[test]
    fn register_operands_are_a_bijection_onto_a() {
        let mut a = [[0xFF; K_BYTES]; M];
        for warp in 0..4 {
            let regs = std::array::from_fn(|j| {
                std::array::from_fn(|lane| u32::from_le_bytes([warp as u8, j as u8, lane as u8, 0xAA]))
            });
            place_register_operand(warp, &regs, &mut a);
        }
        let words: HashSet<[u8; 4]> = a.iter().flat_map(|row| row.as_chunks().0).copied().collect();
        assert_eq!(words.len(), M * K_BYTES / 4);
        assert_eq!(a[16 + 8 + 2][16 + 4..16 + 8], [1, 3, 9, 0xAA], "row 8 + 2 of warp 1, second half, lane 4 * 2 + 1");
    }

    #[test]
    fn products_go_through_fragments_and_back() {
        let rows = |seed: usize, n: usize| -> Vec<OperandRow> {
            (0..n).map(|r| std::array::from_fn(|k| byte(r + seed, k * k))).collect()
        };
        let (a, b) = (rows(1, M), rows(77, 24));
        let a: [OperandRow; M] = a.try_into().unwrap();
        for input in [MmaInput::E4m3, MmaInput::Bf16] {
            let mut tile = Tile::zero(24).unwrap();
            let old = |row: usize, column: usize| (row as f32 - 31.5) * (column as f32 + 0.25);
            for warp in 0..4 {
                for j in 0..12 {
                    let lanes = std::array::from_fn(|lane| {
                        let (row, column) = accumulator_element(32 * warp + lane, j);
                        old(row, column).to_bits()
                    });
                    tile.load(warp, j, &lanes);
                    assert_eq!(tile.store(warp, j), lanes);
                }
            }
            tile.accumulate(input, &a, &b);
            for (row, a) in a.iter().enumerate() {
                for (column, b) in b.iter().enumerate() {
                    let acc = old(row, column);
                    let expected = match input {
                        MmaInput::E4m3 => dot_e4m3_k32(a, b, acc),
                        MmaInput::Bf16 => dot_bf16_k16(&bf16_row(a), &bf16_row(b), acc),
                    };
                    assert_eq!(tile.get(row, column).to_bits(), expected.to_bits());
                }
            }
        }
    }
}
