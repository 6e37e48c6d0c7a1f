//! Tensor-core results recorded on an H200, and the rules that the recordings do not reach.

use std::path::Path;

use ptx_sim::numeric::tensor_core::{dot_bf16_k16, dot_e4m3_k32, mma_bf16_k16, mma_e4m3_k32};

/// Columns of every recorded tile.
const COLUMNS: usize = 8;
/// Bytes of a row or column of operands.
const OPERAND_BYTES: usize = 32;

/// One recorded MMA: `result[row * 8 + column]` from rows of A, columns of B and accumulators.
struct Tile {
    a: Vec<[u8; OPERAND_BYTES]>,
    b: Vec<[u8; OPERAND_BYTES]>,
    acc: Vec<f32>,
    result: Vec<u32>,
}

/// Reads a recording: u32 tiles, rows, 8, 32; per tile rows x 32 bytes of A, 8 x 32 of B, rows x 8 accumulators,
/// rows x 8 results, all little-endian.
fn recording(name: &str) -> Vec<Tile> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/hardware").join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut rest = bytes.as_slice();
    let mut take = |count: usize| {
        let (head, tail) = rest.split_at(count);
        rest = tail;
        head
    };
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let operands = |bytes: &[u8]| -> Vec<[u8; OPERAND_BYTES]> {
        bytes.chunks_exact(OPERAND_BYTES).map(|chunk| chunk.try_into().unwrap()).collect()
    };
    let header = words(take(16));
    let (tiles, rows) = (header[0] as usize, header[1] as usize);
    assert_eq!(header[2..], [COLUMNS as u32, OPERAND_BYTES as u32]);
    let recorded: Vec<Tile> = (0..tiles)
        .map(|_| Tile {
            a: operands(take(rows * OPERAND_BYTES)),
            b: operands(take(COLUMNS * OPERAND_BYTES)),
            acc: words(take(rows * COLUMNS * 4)).into_iter().map(f32::from_bits).collect(),
            result: words(take(rows * COLUMNS * 4)),
        })
        .collect();
    assert!(rest.is_empty(), "{} bytes after the last tile", rest.len());
    assert_eq!(recorded.iter().map(|tile| tile.result.len()).sum::<usize>(), 102_400);
    recorded
}

fn bf16_operands(bytes: &[u8; OPERAND_BYTES]) -> [u16; 16] {
    std::array::from_fn(|k| u16::from_le_bytes([bytes[2 * k], bytes[2 * k + 1]]))
}

#[track_caller]
fn assert_bits(tile: usize, computed: &[f32], recorded: &[u32]) {
    for (i, (computed, &recorded)) in computed.iter().zip(recorded).enumerate() {
        let computed = computed.to_bits();
        assert!(
            computed == recorded,
            "tile {tile} row {} column {}: got {computed:#010x}, want {recorded:#010x}",
            i / COLUMNS,
            i % COLUMNS
        );
    }
}

#[test]
fn wgmma_e4m3_equals_every_recorded_result() {
    for (index, tile) in recording("wgmma_e4m3_k32.bin").iter().enumerate() {
        let singles: Vec<f32> = (0..tile.acc.len())
            .map(|i| dot_e4m3_k32(&tile.a[i / COLUMNS], &tile.b[i % COLUMNS], tile.acc[i]))
            .collect();
        assert_bits(index, &singles, &tile.result);
        let mut acc = tile.acc.clone();
        mma_e4m3_k32(&tile.a, &tile.b, &mut acc);
        assert_bits(index, &acc, &tile.result);
    }
}

#[track_caller]
fn check_bf16_recording(name: &str) {
    for (index, tile) in recording(name).iter().enumerate() {
        let a: Vec<[u16; 16]> = tile.a.iter().map(bf16_operands).collect();
        let b: Vec<[u16; 16]> = tile.b.iter().map(bf16_operands).collect();
        let singles: Vec<f32> =
            (0..tile.acc.len()).map(|i| dot_bf16_k16(&a[i / COLUMNS], &b[i % COLUMNS], tile.acc[i])).collect();
        assert_bits(index, &singles, &tile.result);
        let mut acc = tile.acc.clone();
        mma_bf16_k16(&a, &b, &mut acc);
        assert_bits(index, &acc, &tile.result);
    }
}

#[test]
fn wgmma_bf16_equals_every_recorded_result() {
    check_bf16_recording("wgmma_bf16_k16.bin");
}

#[test]
fn mma_sync_bf16_equals_every_recorded_result() {
    check_bf16_recording("mma_sync_bf16_k16.bin");
}
