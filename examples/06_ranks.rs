//! The step of `05_decode_step` with its contexts spread over three ranks: every rank scores its own keys, and all select
//! what one with the whole context would.
//!
//! `cargo run --example 06_ranks`

use std::sync::{Arc, Barrier};

use dsa_core::generate::StepSpec;
use dsa_core::layout::fp8_page::ScaleForm;
use dsa_core::oracle::step as oracle;
use dsa_core::{DecodeStep, Ownership};
use dsa_dcp::rendezvous::{InProcess, in_process};
use gpu::{Device, SimConfig};
use kimi_decode::check::device_dot;
use kimi_decode::{
    DcpGroup, DcpIndexerConfig, DcpScratch, DcpSpec, FusedIndexer, LayerSpec, Step, StepShape, StepTable,
};

type Error = Box<dyn std::error::Error + Send + Sync>;

const RANKS: usize = 3;
const TOPK: usize = 256;
/// Keys that each rank sends of a row; one that may hide more is asked for them.
const LOCAL_TOPK: usize = 128;

fn main() -> Result<(), Error> {
    // A device per rank: simulated ones, or the GPU that there is for all.
    let (best, why) = Device::best();
    println!("{why}");
    let devices = match best.info().simulated {
        true => Device::simulated_group(SimConfig { devices: RANKS, ..SimConfig::default() }),
        false => vec![best; RANKS],
    };
    let input = StepSpec::new(42, 1, TOPK, &[2000, 900, 100, 1]).build()?;
    let dot = device_dot(devices[0].target()?).ok_or("this device's tensor core has no model")?;
    let want = oracle::select(&input, &oracle::logits(&input, dot))?;

    // Ranks are threads here. For processes there is `TcpRendezvous`.
    let barrier = Barrier::new(RANKS);
    let counts = std::thread::scope(|scope| {
        let ranks: Vec<_> = (in_process(RANKS).into_iter().zip(&devices))
            .map(|(member, device)| scope.spawn(|| run(member, device, &input, &barrier)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank's panic")).collect::<Result<Vec<_>, Error>>()
    })?;
    for (row, want) in want.iter().enumerate() {
        let owned: Vec<i32> = counts.iter().map(|(_, counts)| counts[row]).collect();
        assert!(counts.iter().all(|(ids, _)| ids[row * TOPK..(row + 1) * TOPK] == want.ids), "row {row}");
        assert_eq!(owned.iter().sum::<i32>() as usize, want.count, "row {row}");
        println!(
            "row {row}: {:4} keys, {:3} selected, of which each rank owns {owned:?}",
            input.row_ends[row], want.count
        );
    }
    println!("every rank's ids equal the oracle's");
    Ok(())
}

/// One rank: the ids of every row, and how many of them it owns.
fn run(
    member: InProcess,
    device: &Device,
    input: &DecodeStep,
    barrier: &Barrier,
) -> Result<(Vec<i32>, Vec<i32>), Error> {
    let group = DcpGroup::new(Arc::new(member));
    // Tokens are dealt one by one; this rank's lie in pages of its own.
    let shard = input.shard(Ownership::new(RANKS, 1)?, group.group.rank())?;
    let stream = device.stream()?;

    // Once per device: scratch, and the exchanges with the other ranks.
    let context_len_max = input.context_len_max;
    let spec = DcpSpec {
        rows_max: input.rows,
        push_rows_max: input.rows,
        interleave: 1,
        context_len_max,
        topk: TOPK,
        ids: true,
    };
    let scratch = DcpScratch::reserve(device, group, spec)?;

    // Once per layer, on every rank in the same order.
    let cache = device.upload(&shard.cache)?;
    let shape = StepShape { rows: input.rows, q: 1 };
    let layer = LayerSpec {
        topk: TOPK,
        context_len_max,
        scale_form: ScaleForm::Ue8m0,
        index_page: 64,
        index_blocks: shard.blocks,
        index_page_stride: shard.page_stride,
        kv_page: shard.kv_page,
        kv_block_rows: shard.kv_block_rows,
        kv_blocks: 64,
    };
    let indexer = FusedIndexer::sharded(DcpIndexerConfig {
        scratch: &scratch,
        layer,
        keys: cache.as_view(),
        local_topk: Some(LOCAL_TOPK),
        shapes: &[shape],
        hold: &[],
        ids: true,
    })?;

    // Every step: this rank's row ends from everybody's, then three launches a layer.
    let (queries, weights) = (device.upload(&shard.queries)?, device.upload(&shard.weights)?);
    let (table, kv_table) = (device.upload(&shard.table)?, device.upload(&shard.kv_table)?);
    let global_ends = device.upload(&input.row_ends)?;
    let step = Step {
        shape,
        queries: queries.as_view(),
        weights: weights.as_view(),
        row_ends: scratch.local_ends(&stream, &global_ends.as_view())?,
        index_table: StepTable::per_request(table.as_view(), shard.table_stride, shard.table_width),
        kv_table: StepTable::per_request(kv_table.as_view(), shard.kv_table_stride, shard.kv_table_width),
    };
    // With a device of its own a rank calls `run_exchange`. Where ranks share one, all push before any waits.
    indexer.run_push(&stream, &step)?;
    barrier.wait();
    let selected = indexer.run_merge(&stream, &step)?;
    barrier.wait();

    // A rank that did not come would be named here.
    scratch.check(&stream)?;
    let ids = selected.ids.ok_or("asked for")?.copy_to_vec(&stream)?;
    Ok((ids, selected.counts.copy_to_vec(&stream)?))
}
