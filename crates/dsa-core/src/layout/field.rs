//! One field of a record.

use std::ops::Range;

/// A field: a run of `count` equal elements in a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// What it holds.
    pub name: &'static str,
    /// Where it lies in the record.
    pub bytes: Range<usize>,
    /// Bytes per element.
    pub element_bytes: usize,
    /// Elements.
    pub count: usize,
    /// Alignment that readers rely on, given an equally aligned record.
    pub align: usize,
}

/// True iff `fields` cover `0..record_bytes` in order without gap or overlap, each holding its elements, aligned.
pub fn tiles(fields: &[Field], record_bytes: usize) -> bool {
    let mut end = 0;
    for field in fields {
        let whole = field.bytes.len() == field.count * field.element_bytes;
        if field.bytes.start != end || !whole || !field.bytes.start.is_multiple_of(field.align) {
            return false;
        }
        end = field.bytes.end;
    }
    end == record_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_refuses_gaps_overlaps_and_misfits() {
        let field = |bytes: Range<usize>, count, align| Field { name: "f", bytes, element_bytes: 4, count, align };
        assert!(tiles(&[field(0..8, 2, 16), field(8..12, 1, 8)], 12));
        assert!(!tiles(&[field(0..8, 2, 16), field(12..16, 1, 4)], 16), "gap");
        assert!(!tiles(&[field(0..8, 2, 16), field(4..12, 2, 4)], 12), "overlap");
        assert!(!tiles(&[field(0..8, 1, 16)], 8), "elements do not fill the field");
        assert!(!tiles(&[field(0..8, 2, 16)], 12), "short");
        assert!(!tiles(&[field(0..8, 2, 4), field(8..12, 1, 16)], 12), "misaligned");
    }
}
