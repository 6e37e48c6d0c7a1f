//! The exact top-k of a row whose keys are spread over ranks, and the two-round protocol that finds it from less.
//!
//! [`merge_ids`] is the answer: gather every key, sort by (order16 descending, global id ascending), keep K. The protocol
//! sends each rank's first N keys; whoever may still hide a selected key, being *saturated*, then sends its first K.
//! [`Saturation`] says who that is. The order16 rule misses ties: see the test with the counterexample.

use std::cmp::Reverse;

use super::select::select_ids;
use crate::layout::b_row::Candidate;
use crate::numerics::order16;
use crate::ownership::Ownership;

/// A key of the total order: larger order16 first, then lower global id.
type Place = (Reverse<u16>, usize);

/// The keys of one rank's logits.
fn places(logits: &[u16], rank: usize, own: Ownership) -> Vec<Place> {
    let key = |(local, &bits): (usize, &u16)| (Reverse(order16::key_of(bits)), own.global_of(rank, local));
    logits.iter().enumerate().map(key).collect()
}

/// The first `count` keys, in order.
fn first(mut keys: Vec<Place>, count: usize) -> Vec<Place> {
    keys.sort();
    keys.truncate(count);
    keys
}

/// Global ids of the first `topk` keys, ascending; `ranks[r]` are all logits that rank `r` holds of the row.
pub fn merge_ids(ranks: &[Vec<u16>], own: Ownership, topk: usize) -> Vec<usize> {
    let all = ranks.iter().enumerate().flat_map(|(rank, logits)| places(logits, rank, own)).collect();
    let mut ids: Vec<usize> = first(all, topk).into_iter().map(|(_, id)| id).collect();
    ids.sort();
    ids
}

/// The physical KV rows of the ids that `rank` owns, by its own table: `physical(local)`, ascending.
pub fn owned_rows(ids: &[usize], rank: usize, own: Ownership, physical: impl Fn(usize) -> i32) -> Vec<i32> {
    let owned = ids.iter().filter(|&&id| own.rank_of(id) == rank);
    owned.map(|&id| physical(own.local_of(id))).collect()
}

/// The slots of the B' row of `n` of a rank with `logits`: of its first `n` keys those above the last one in index order,
/// then those equal to it in index order. A rank of at most `n` keys sends them all, in index order.
pub fn local_slots(logits: &[u16], n: usize) -> Vec<Candidate> {
    let candidate = |&local: &usize| Candidate { key: order16::key_of(logits[local]), local: local as u32 };
    let mut slots: Vec<Candidate> = select_ids(logits, n).iter().map(candidate).collect();
    if logits.len() > n {
        let threshold = slots.iter().map(|slot| slot.key).min();
        slots.sort_by_key(|slot| (Some(slot.key) == threshold, slot.local));
    }
    slots
}

/// Which ranks send their first K keys in round 2: those of N sent keys that are all ...
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saturation {
    /// ... before the K-th key of round 1 in the total order.
    FullKey,
    /// ... larger than it by order16 alone.
    Order16,
}

/// What the protocol arrives at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TwoRounds {
    /// Global ids, ascending.
    pub ids: Vec<usize>,
    /// The ranks that took part in round 2.
    pub saturated: Vec<usize>,
}

/// The protocol with `n` keys a rank in round 1.
pub fn two_rounds(ranks: &[Vec<u16>], own: Ownership, n: usize, topk: usize, rule: Saturation) -> TwoRounds {
    let keys: Vec<Vec<Place>> = ranks.iter().enumerate().map(|(rank, logits)| places(logits, rank, own)).collect();
    let sent: Vec<Vec<Place>> = keys.iter().map(|keys| first(keys.clone(), n)).collect();
    let round1 = first(sent.concat(), topk);
    let kth = (round1.len() == topk).then(|| round1[topk - 1]);
    let precedes = |key: &Place| match (kth, rule) {
        (None, _) => true,
        (Some(kth), Saturation::FullKey) => *key < kth,
        (Some(kth), Saturation::Order16) => key.0 < kth.0,
    };
    let saturated: Vec<usize> =
        (0..ranks.len()).filter(|&r| sent[r].len() == n && sent[r].iter().all(precedes)).collect();
    let round2 = (0..ranks.len()).flat_map(|rank| match saturated.contains(&rank) {
        true => first(keys[rank].clone(), topk),
        false => sent[rank].clone(),
    });
    let mut ids: Vec<usize> = first(round2.collect(), topk).into_iter().map(|(_, id)| id).collect();
    ids.sort();
    TwoRounds { ids, saturated }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::select::select_ids;
    use half::bf16;
    use proptest::prelude::*;

    fn bits(values: &[f32]) -> Vec<u16> {
        values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()
    }

    /// The row's logits in global order.
    fn gathered(ranks: &[Vec<u16>], own: Ownership) -> Vec<u16> {
        let len = ranks.iter().map(Vec::len).sum();
        (0..len).map(|id| ranks[own.rank_of(id)][own.local_of(id)]).collect()
    }

    /// `row` dealt to the ranks.
    fn dealt(row: &[u16], own: Ownership) -> Vec<Vec<u16>> {
        let mut ranks = vec![Vec::new(); own.ranks()];
        row.iter().enumerate().for_each(|(id, &bits)| ranks[own.rank_of(id)].push(bits));
        ranks
    }

    #[test]
    fn the_order16_rule_misses_a_tie_that_the_full_key_rule_finds() {
        let own = Ownership::new(2, 1).unwrap();
        let ranks = [bits(&[5.0, 5.0, 5.0]), bits(&[9.0, 1.0, 1.0, 5.0])];
        assert_eq!(merge_ids(&ranks, own, 4), [0, 1, 2, 4]);
        let full = two_rounds(&ranks, own, 2, 4, Saturation::FullKey);
        assert_eq!(full, TwoRounds { ids: vec![0, 1, 2, 4], saturated: vec![0] });
        let short = two_rounds(&ranks, own, 2, 4, Saturation::Order16);
        assert_eq!(short, TwoRounds { ids: vec![0, 1, 2, 7], saturated: vec![] });
    }

    #[test]
    fn slots_hold_the_keys_above_the_threshold_then_its_ties() {
        let locals = |n| local_slots(&bits(&[2.0, 5.0, 2.0, 7.0, 2.0]), n).iter().map(|s| s.local).collect::<Vec<_>>();
        assert_eq!(locals(3), [1, 3, 0]);
        assert_eq!(locals(4), [1, 3, 0, 2]);
        assert_eq!(locals(5), [0, 1, 2, 3, 4], "all keys are in index order");
        assert_eq!(locals(2), [3, 1]);
    }

    #[test]
    fn ranks_without_keys_and_minus_infinity() {
        let own = Ownership::new(4, 1).unwrap();
        let ranks = [bits(&[f32::NEG_INFINITY]), bits(&[f32::NAN]), vec![], vec![]];
        assert_eq!(merge_ids(&ranks, own, 8), [0, 1]);
        assert_eq!(merge_ids(&ranks, own, 1), [0]);
        assert_eq!(merge_ids(&[vec![], vec![], vec![], vec![]], own, 8), [0usize; 0]);
    }

    #[test]
    fn a_rank_maps_its_own_ids_by_its_own_table() {
        let own = Ownership::new(4, 1).unwrap();
        let table = [3, 7];
        let rows = owned_rows(&[1, 2, 21], 1, own, |local| table[local / 4] * 4 + (local % 4) as i32);
        assert_eq!(rows, [12, 7 * 4 + 1]);
    }

    proptest! {
        #[test]
        fn merged_ids_are_those_of_one_rank_and_the_protocol_finds_them(
            row in prop::collection::vec(0u16..6, 0..120),
            ranks in 1usize..6,
            interleave in 0u32..3,
            n in 1usize..8,
            topk in 1usize..24,
        ) {
            let own = Ownership::new(ranks, 1 << interleave).unwrap();
            let row: Vec<u16> = row.into_iter().map(|x| bits(&[f32::from(x)])[0]).collect();
            let ranks = dealt(&row, own);
            prop_assert_eq!(&gathered(&ranks, own), &row);
            let want = select_ids(&row, topk);
            prop_assert_eq!(&merge_ids(&ranks, own, topk), &want);
            if n < topk {
                let got = two_rounds(&ranks, own, n, topk, Saturation::FullKey);
                prop_assert_eq!(got.ids, want);
                prop_assert!(got.saturated.len() <= (topk - 1) / n, "rescue slots suffice");
            }
        }
    }
}
