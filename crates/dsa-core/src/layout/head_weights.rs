//! The head weights of one row, the query's scale and the softmax and head factors folded in.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | weights | `0..64` | BF16 | 32 | 16 | the index projection | score |

use super::field::Field;
use crate::consts::HEADS;

/// Bytes of a row.
pub const BYTES: usize = HEADS * 2;

const _: () = assert!(BYTES == 64);

/// The table above.
pub fn fields() -> [Field; 1] {
    [Field { name: "weights", bytes: 0..BYTES, element_bytes: 2, count: HEADS, align: 16 }]
}

#[cfg(test)]
mod tests {
    #[test]
    fn fields_tile_the_row() {
        assert!(super::super::field::tiles(&super::fields(), super::BYTES));
    }
}
