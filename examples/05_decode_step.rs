//! One decode step of the lightning indexer: score every key of the context, select the exact top-k, compare with the
//! scalar oracle.
//!
//! `cargo run --example 05_decode_step`

use dsa_core::generate::StepSpec;
use dsa_core::layout::fp8_page::ScaleForm;
use dsa_core::oracle::step as oracle;
use gpu::Device;
use kimi_decode::check::device_dot;
use kimi_decode::{FusedIndexer, IndexerConfig, IndexerScratch, LayerSpec, ScratchSpec, Step, StepShape, StepTable};

const TOPK: usize = 128;
/// Query rows per request: the token and one draft.
const Q: usize = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (device, why) = Device::best();
    println!("{why}");
    let stream = device.stream()?;

    // Three requests of two rows: keys that each row sees. The second request's rows take all they have.
    let input = StepSpec::new(42, Q, TOPK, &[700, 701, 127, 128, 0, 1]).build()?;
    let shape = StepShape { rows: input.rows, q: Q };

    // Once per device: scratch for all layers.
    let spec = ScratchSpec { rows_max: input.rows, length_max: input.context_len_max, topk: TOPK, ids: true };
    let scratch = IndexerScratch::reserve(&device, spec)?;

    // Once per layer: its key cache, and compiled kernels for the shapes that steps will have.
    let cache = device.upload(&input.cache)?;
    let layer = LayerSpec {
        topk: TOPK,
        context_len_max: input.context_len_max,
        scale_form: ScaleForm::Ue8m0,
        index_page: 64,
        index_blocks: input.blocks,
        index_page_stride: input.page_stride,
        kv_page: input.kv_page,
        kv_block_rows: input.kv_block_rows,
        // Blocks of the MLA cache that the rows address; the table's entries past a row's end are garbage.
        kv_blocks: 16,
    };
    let indexer = FusedIndexer::new(IndexerConfig {
        scratch: &scratch,
        layer,
        keys: cache.as_view(),
        shapes: &[shape],
        hold: &[],
        ids: true,
    })?;

    // Every step: two overlapping launches, no allocation, no waiting.
    let (queries, weights) = (device.upload(&input.queries)?, device.upload(&input.weights)?);
    let row_ends = device.upload(&input.row_ends)?;
    let (table, kv_table) = (device.upload(&input.table)?, device.upload(&input.kv_table)?);
    let step = Step {
        shape,
        queries: queries.as_view(),
        weights: weights.as_view(),
        row_ends: row_ends.as_view(),
        index_table: StepTable::per_request(table.as_view(), input.table_stride, input.table_width),
        kv_table: StepTable::per_request(kv_table.as_view(), input.kv_table_stride, input.kv_table_width),
    };
    let selected = indexer.run(&stream, &step)?;

    let counts = selected.counts.copy_to_vec(&stream)?;
    let rows = selected.rows.copy_to_vec(&stream)?;
    let ids = selected.ids.expect("asked for").copy_to_vec(&stream)?;

    // The oracle: scalar, sequential, with the tensor core's dot products.
    let dot = device_dot(device.target()?).ok_or("this device's tensor core has no model")?;
    let want = oracle::select(&input, &oracle::logits(&input, dot))?;
    for (row, want) in want.iter().enumerate() {
        let at = row * TOPK..(row + 1) * TOPK;
        assert_eq!(counts[row] as usize, want.count, "row {row}");
        assert_eq!(ids[at.clone()], want.ids, "row {row}");
        assert_eq!(rows[at.clone()], want.rows, "row {row}");
        let first = &ids[at][..want.count.min(8)];
        println!("row {row}: {:4} keys, {:3} selected, first ids {first:?}", input.row_ends[row], want.count);
    }
    println!("every id and physical row equals the oracle's");
    Ok(())
}
