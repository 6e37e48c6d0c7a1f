//! What the host packs against what the kernels' texts declare.

use dsa_dcp::local_ends;
use dsa_dcp::mailbox::gather;
use dsa_dcp::merge;
use dsa_kernels::{local_topk, score, select};
use mla_query::query;

use crate::specialisations::specialisations;

/// Size and alignment of every `.param` in a text.
fn params_in(text: &str) -> Vec<(u32, u32)> {
    text.lines()
        .map(str::trim)
        .filter_map(|line| line.strip_prefix(".param ").map(|rest| rest.trim_end_matches(',')))
        .map(|declaration| match declaration.split_whitespace().collect::<Vec<_>>()[..] {
            [".b32", _] => (4, 4),
            [".b64", _] => (8, 8),
            [".align", align, ".b8", name] => {
                let bytes = name.split_once('[').and_then(|(_, n)| n.strip_suffix(']')).expect("an array");
                (bytes.parse().unwrap(), align.parse().unwrap())
            }
            _ => panic!("unknown parameter declaration {declaration:?}"),
        })
        .collect()
}

/// What `pack` wrote against what the text declares: the driver copies each parameter from the host's offset with the
/// device's size.
fn check_params(text: &str, offsets: &[u16], bytes: usize) {
    let mut end = 0u32;
    let laid_out: Vec<u16> = params_in(text)
        .into_iter()
        .map(|(size, align)| {
            let at = end.next_multiple_of(align);
            end = at + size;
            at as u16
        })
        .collect();
    assert_eq!((laid_out.as_slice(), end as usize), (offsets, bytes));
}

#[test]
fn parameters_have_the_sizes_that_the_host_packs() {
    use ptx::{ArgBuffer, DevicePtr, TensorMap};
    let map = TensorMap::from_bytes([0xA5; 128]);
    let score_args = score::ScoreArgs {
        logits: DevicePtr::from_address(1),
        tops: DevicePtr::from_address(2),
        queries: map,
        keys: map,
        weights: DevicePtr::from_address(3),
        table: DevicePtr::from_address(4),
        row_ends: DevicePtr::from_address(5),
        table_stride: 6,
        rows: i32::MAX as u32,
        length_max: (1 << 31) + 5,
        pitch: 1,
    };
    let packed = ArgBuffer::pack(&score_args);
    let select_args = select::SelectArgs {
        out: DevicePtr::from_address(1),
        counts: DevicePtr::from_address(2),
        ids: DevicePtr::NULL,
        logits: DevicePtr::from_address(3),
        tops: DevicePtr::from_address(4),
        table: DevicePtr::from_address(5),
        row_ends: DevicePtr::from_address(6),
        table_stride: 7,
        block_rows: 8,
        blocks: 9,
        length_max: 9,
        rows: 10,
        q: 11,
    };
    let select_packed = ArgBuffer::pack(&select_args);
    let mla_args = query::MlaArgs {
        query: DevicePtr::from_address(1),
        q_c: DevicePtr::from_address(2),
        cache: DevicePtr::from_address(3),
        dropped: DevicePtr::from_address(4),
        qkv: DevicePtr::from_address(5),
        w_qa: DevicePtr::from_address(6),
        w_kva: DevicePtr::from_address(7),
        w_qb: DevicePtr::from_address(8),
        w_qb_map: map,
        w_uk: map,
        slots: DevicePtr::from_address(9),
        q_scale_inv: DevicePtr::NULL,
        k_scale: DevicePtr::from_address(10),
        boxes: DevicePtr::from_address(11),
        peers: DevicePtr::NULL,
        multicast: 1 << 41,
        call: DevicePtr::from_address(12),
        status: DevicePtr::from_address(13),
        capacity: 14,
        page_stride: 1 << 40,
        token_stride: 15,
        qkv_stride: 16,
        tokens: 17,
        heads: 18,
        rank: 19,
        eps: 1e-5,
    };
    let gather_args = gather::GatherArgs {
        out: DevicePtr::NULL,
        boxes: DevicePtr::from_address(1),
        state: DevicePtr::from_address(2),
        status: DevicePtr::from_address(3),
        timeout_ns: 1 << 40,
        tokens: 4,
        parts: 5,
    };
    let mla_packed = ArgBuffer::pack(&mla_args);
    let local_args = local_topk::LocalTopkArgs {
        out: DevicePtr::from_address(1),
        counts: DevicePtr::from_address(2),
        logits: DevicePtr::from_address(3),
        tops: DevicePtr::from_address(4),
        row_ends: DevicePtr::from_address(5),
        pitch: 6,
        length_max: 7,
        rows: 8,
        peers: DevicePtr::from_address(9),
        epochs: DevicePtr::from_address(10),
        status: DevicePtr::NULL,
        rank: 11,
        slot_rows: 12,
    };
    let merge_args = merge::MergeArgs {
        rows_out: DevicePtr::from_address(1),
        valid_out: DevicePtr::from_address(2),
        ids: DevicePtr::NULL,
        memory: DevicePtr::from_address(3),
        peers: DevicePtr::from_address(4),
        epochs: DevicePtr::from_address(5),
        sequences: DevicePtr::from_address(6),
        status: DevicePtr::from_address(7),
        logits: DevicePtr::from_address(8),
        tops: DevicePtr::from_address(9),
        table: DevicePtr::from_address(10),
        row_ends: DevicePtr::from_address(11),
        lists_at: 1 << 40,
        timeout_ns: 1 << 42,
        pitch: 12,
        length_max: 13,
        rows: 14,
        table_stride: 15,
        block_rows: 16,
        blocks: 19,
        rank: 17,
        slot_rows: 18,
    };
    let ends_args = local_ends::LocalEndsArgs {
        ends: DevicePtr::from_address(1),
        out: DevicePtr::from_address(2),
        rows: 3,
        rank: 4,
        context_len_max: 5,
    };
    let kinds = [
        ("score", packed),
        ("select", select_packed),
        ("mla", mla_packed),
        ("local_topk", ArgBuffer::pack(&local_args)),
        ("merge", ArgBuffer::pack(&merge_args)),
        ("local_ends", ArgBuffer::pack(&ends_args)),
        ("gather", ArgBuffer::pack(&gather_args)),
    ];
    let mut seen = kinds.each_ref().map(|_| 0);
    for one in specialisations() {
        let kind = kinds.iter().position(|(kind, _)| one.ir.name.starts_with(kind)).expect("a kernel of a known kind");
        let packed = &kinds[kind].1;
        check_params(&one.text, packed.offsets(), packed.bytes().len());
        seen[kind] += 1;
    }
    assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
}
