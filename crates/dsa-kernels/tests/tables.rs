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

/// A step in whose MLA tables every third entry names a block that does not exist, and the size of its cache.
fn with_foreign_blocks(kv_page: usize) -> (DecodeStep, usize) {
    // A row that takes all its keys; of those that select, with pages of one token the last has a table too long for
    // shared memory.
    let spec = StepSpec::new(6, 1, 128, &[100, 700, 3000]);
    let mut step = StepSpec { kv_page, kv_block_rows: kv_page + 3, ..spec }.build().unwrap();
    let blocks = (0..step.rows).map(|row| step.row_len(row).div_ceil(kv_page)).sum();
    let bad = [-1, i32::MIN, i32::MAX, blocks as i32, 1 << 26, 1_000_000];
    for row in 0..step.rows {
        let first = row * step.kv_table_stride;
        let needed = first..first + step.row_len(row).div_ceil(kv_page);
        step.kv_table[needed].iter_mut().step_by(3).zip(bad.into_iter().cycle()).for_each(|(id, bad)| *id = bad);
    }
    (step, blocks)
}

#[test]
fn table_entries_that_name_no_block_give_minus_one() {
    on_every_device(|device| {
        for kv_page in [1, 64] {
            let (step, blocks) = with_foreign_blocks(kv_page);
            let resident = Resident::new(device, &step);
            let (score, select) = kernels(device, &step);
            let mut select_step = resident.select_step(&step);
            select_step.kv = KvShape::new(kv_page, step.kv_block_rows, blocks).unwrap();
            score.launch(resident.stream(), &resident.inputs.score_step(&step), &resident.compact()).unwrap();
            select.launch(resident.stream(), &select_step).unwrap();
            let got = resident.read(&step);
            for row in 0..step.rows {
                let all = || (0..step.row_len(row)).collect();
                let ids =
                    got.logits[row].as_ref().map_or_else(all, |logits| oracle::select::select_ids(logits, step.topk));
                let at = row * step.topk;
                assert_eq!(got.counts[row] as usize, ids.len());
                let mut outside = 0;
                for (slot, id) in ids.iter().enumerate() {
                    let block = step.kv_table_row(row)[id / kv_page];
                    let inside = usize::try_from(block).is_ok_and(|block| block < blocks);
                    outside += usize::from(!inside);
                    let want = if inside { block * step.kv_block_rows as i32 + (id % kv_page) as i32 } else { -1 };
                    assert_eq!(got.ids[at + slot], *id as i32);
                    assert_eq!(got.out[at + slot], want, "row {row}, key {id}, block {block}");
                }
                assert!(outside > 0 && outside < ids.len(), "row {row}");
            }
        }
    });
}
