//! Tables and block ids at the edges of what their integers hold.

mod common;

use common::*;
use dsa_core::generate::StepSpec;
use dsa_core::{DecodeStep, KvShape, oracle};
use dsa_kernels::Table;
use gpu::{Buffer, Device};

/// `table`'s rows laid `stride` entries apart; what lies between is never touched.
fn spread(
    device: &Device,
    table: &[i32],
    width: usize,
    from_stride: usize,
    requests: usize,
    stride: usize,
) -> Buffer<i32> {
    let stream = device.stream().unwrap();
    let spread = device.alloc::<i32>((requests - 1) * stride + width).unwrap();
    for request in 0..requests {
        let row = &table[request * from_stride..][..width];
        spread.view(request * stride..request * stride + width).unwrap().copy_from(&stream, row).unwrap();
    }
    spread
}

#[test]
fn table_rows_may_lie_more_than_2_to_the_32_entries_apart_in_all() {
    on_every_device(|device| {
        let step = StepSpec::new(5, 1, 128, &[300, 200, 700]).build().unwrap();
        let stride = (1 << 31) + 64;
        assert!(2 * stride > u32::MAX as usize);
        let inputs = Inputs::new(device, &step);
        let table = spread(device, &step.table, step.table_width, step.table_stride, 3, stride);
        let mut score_step = inputs.score_step(&step);
        score_step.table = Table { ids: table.as_view(), stride, width: step.table_width };
        let resident = Resident::new(device, &step);
        let (score, select) = kernels(device, &step);
        score.launch(resident.stream(), &score_step, &resident.compact()).unwrap();
        resident.stream().synchronize().unwrap();
        drop(table);

        let kv_table = spread(device, &step.kv_table, step.kv_table_width, step.kv_table_stride, 3, stride);
        let mut select_step = resident.select_step(&step);
        select_step.table = Table { ids: kv_table.as_view(), stride, width: step.kv_table_width };
        select.launch(resident.stream(), &select_step).unwrap();
        check_outputs(&step, &resident.read(&step));
    });
}

/// A step whose second request's MLA table names blocks that do not exist, and the size of its cache.
fn with_foreign_blocks() -> (DecodeStep, usize) {
    let mut step = StepSpec::new(6, 1, 128, &[700, 700]).build().unwrap();
    let blocks = *step.kv_table.iter().filter(|id| **id < 1 << 16).max().unwrap() as usize + 1;
    let row = step.kv_table_stride;
    let bad = [-1, i32::MIN, i32::MAX, blocks as i32, 1 << 26, 1_000_000];
    step.kv_table[row..row + bad.len()].copy_from_slice(&bad);
    (step, blocks)
}

#[test]
fn table_entries_that_name_no_block_give_minus_one() {
    on_every_device(|device| {
        let (step, blocks) = with_foreign_blocks();
        let resident = Resident::new(device, &step);
        let (score, select) = kernels(device, &step);
        let mut select_step = resident.select_step(&step);
        select_step.kv = KvShape::new(step.kv_page, step.kv_block_rows, blocks).unwrap();
        score.launch(resident.stream(), &resident.inputs.score_step(&step), &resident.compact()).unwrap();
        select.launch(resident.stream(), &select_step).unwrap();
        let got = resident.read(&step);
        let mut outside = 0;
        for row in 0..step.rows {
            let logits = got.logits[row].as_ref().unwrap();
            let ids = oracle::select::select_ids(logits, step.topk);
            let at = row * step.topk;
            assert_eq!(got.counts[row] as usize, ids.len());
            for (slot, id) in ids.iter().enumerate() {
                let block = step.kv_table_row(row)[id / step.kv_page];
                let inside = usize::try_from(block).is_ok_and(|block| block < blocks);
                outside += usize::from(!inside);
                let want = if inside { block * step.kv_block_rows as i32 + (id % step.kv_page) as i32 } else { -1 };
                assert_eq!(got.ids[at + slot], *id as i32);
                assert_eq!(got.out[at + slot], want, "row {row}, key {id}, block {block}");
            }
        }
        assert!(outside > 0);
    });
}
