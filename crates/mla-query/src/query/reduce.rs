//! Sums over the lanes of a warp.

use ptx::{Reg, lane_index, shuffle_xor};

/// The sum of `value` over the warp, in every lane: a tree of neighbours, then of pairs, and so on.
#[track_caller]
pub(crate) fn warp_sum(value: Reg<f32>) -> Reg<f32> {
    [1, 2, 4, 8, 16].into_iter().fold(value, |sum, distance| sum + shuffle_xor(sum, distance))
}

/// Sums many values over the warp at once: halves change lanes at each step, so `n` values cost about `n` shuffles.
///
/// Returns the sum of value `lane / (32 / slots)` in each lane, and `slots`, the number of values rounded up to a power
/// of two; lanes past the values hold 0.
#[track_caller]
pub(crate) fn warp_sums(values: &[Reg<f32>]) -> (Reg<f32>, u32) {
    let slots = values.len().next_power_of_two();
    assert!((1..=32).contains(&slots), "{} values do not fit a warp", values.len());
    let lane = lane_index();
    let mut held = values.to_vec();
    held.resize(slots, Reg::from(0.0f32));
    let mut distance = 16u32;
    while held.len() > 1 {
        let upper = (lane & distance).ne(0);
        let (low, high) = held.split_at(held.len() / 2);
        held = low
            .iter()
            .zip(high)
            .map(|(&low, &high)| {
                let (keep, send) = (upper.select::<f32>(high, low), upper.select::<f32>(low, high));
                keep + shuffle_xor(send, distance)
            })
            .collect();
        distance /= 2;
    }
    let mut sum = held[0];
    while distance > 0 {
        sum = sum + shuffle_xor(sum, distance);
        distance /= 2;
    }
    (sum, slots as u32)
}
