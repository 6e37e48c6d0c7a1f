//! Row ends as the device sees them, shared by score and select: both must agree on every row's length and on where
//! its scratch lies.

use dsa_core::consts::{Q_MAX, TILE};
use ptx::{Global, LoadMode, Reg, Var, when};

/// log2 of the keys of a tile.
pub(crate) const TILE_SHIFT: u32 = TILE.trailing_zeros();

/// `end` bounded to what the table and the scratch allow: at or below 0 is none, above `length_max` is `length_max`.
#[track_caller]
pub fn clamp_length(end: Reg<i32>, length_max: Reg<u32>) -> Reg<u32> {
    end.max(0).as_u32().min(length_max)
}

/// Longest row of a request: its `q` row ends, 1 to 8, start at `row_ends[request * q]`. All its loads are under way at once,
/// whether `q` is a constant or not.
#[track_caller]
pub(crate) fn longest_row(
    row_ends: Global<i32>,
    request: Reg<u32>,
    q: impl Into<Reg<u32>>,
    length_max: Reg<u32>,
) -> Reg<u32> {
    let q = q.into();
    let first = row_ends.at(request * q);
    let end = |i: u32| first.offset(i as i32).load_as(LoadMode::STREAM);
    let ends: Vec<Reg<i32>> = match q.constant() {
        Some(q) => (0..q as u32).map(end).collect(),
        None => {
            let ends = (0..Q_MAX as u32).map(|i| {
                let loaded = Var::new(0i32);
                when(q.gt(i), || loaded.set(end(i)));
                loaded
            });
            ends.collect::<Vec<_>>().into_iter().map(|loaded| loaded.get()).collect()
        }
    };
    let longest = ends.into_iter().reduce(|longest, end| longest.max(end)).expect("at least one row");
    clamp_length(longest, length_max)
}

/// 128-key tiles of a request whose longest row is `longest`; 0 if all its rows fit `topk` (they take all their keys
/// unscored; 0 scores every request).
#[track_caller]
pub(crate) fn tiles(longest: Reg<u32>, topk: u32) -> Reg<u32> {
    let tiles = (longest + (TILE as u32 - 1)) >> TILE_SHIFT;
    if topk == 0 { tiles } else { longest.gt(topk).select::<u32>(tiles, 0u32) }
}
