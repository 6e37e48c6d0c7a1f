//! Differences that are not allowed.

use dsa_core::ShapeError;
use dsa_core::numerics::order16::bits_of;
use dsa_core::oracle::select::SelectionMismatch;
use half::bf16;

use crate::step_file::Tolerance;

/// The first difference that is not allowed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The selection is not the one that the device's own logits imply.
    #[error("the selection is not exact for the device's own logits: {0}")]
    Selection(#[from] SelectionMismatch),
    /// A selected key's physical row is no row at all.
    #[error(transparent)]
    Row(#[from] ShapeError),
    /// A logit is too far off.
    #[error(
        "row {row} key {key}: logit {} ({got:#06x}), expected.logits has {} ({want:#06x}), {ulp} ulp apart, the tolerance is {tolerance}",
        bf16::from_bits(*.got), bf16::from_bits(*.want)
    )]
    Logit {
        /// The row.
        row: usize,
        /// The key.
        key: usize,
        /// BF16 bits of the device's.
        got: u16,
        /// BF16 bits expected.
        want: u16,
        /// Values between them.
        ulp: u16,
        /// What is allowed.
        tolerance: Tolerance,
    },
    /// An expected logit does not follow from the inputs.
    #[error(
        "row {row} key {key}: logit {} ({got:#06x}), expected.logits has {} ({want:#06x}), {ulp} ulp from what exact dot products give, {} ({exact:#06x}), the tolerance is {tolerance}",
        bf16::from_bits(*.got), bf16::from_bits(*.want), bf16::from_bits(*.exact)
    )]
    ExpectedLogit {
        /// The row.
        row: usize,
        /// The key.
        key: usize,
        /// BF16 bits of the device's.
        got: u16,
        /// BF16 bits expected.
        want: u16,
        /// BF16 bits from exact dot products.
        exact: u16,
        /// Values between the last two.
        ulp: u16,
        /// What is allowed.
        tolerance: Tolerance,
    },
    /// A count, id or physical row differs.
    #[error("row {row} slot {slot}: found {got}, {tensor} has {want}")]
    Value {
        /// The expected tensor.
        tensor: &'static str,
        /// The row.
        row: usize,
        /// The slot of the row; 0 for counts.
        slot: usize,
        /// Found.
        got: i32,
        /// Expected.
        want: i32,
    },
    /// An expected value is not the exact top-k of the expected logits.
    #[error("row {row} slot {slot}: {tensor} has {found}, the top-k of expected.logits has {implied}")]
    Expected {
        /// The expected tensor.
        tensor: &'static str,
        /// The row.
        row: usize,
        /// The slot of the row; 0 for counts.
        slot: usize,
        /// The file's value.
        found: i32,
        /// What the file's logits imply.
        implied: i32,
    },
    /// Only one of both selected a key, and it is not near the threshold.
    #[error(
        "row {row}: key {id} is selected {}, its expected logit {} is {ulp} ulp from the expected threshold {}, the tolerance is {tolerance}",
        if *.expected_only { "in expected.ids only" } else { "by the device only" },
        bf16::from_bits(*.logit), bf16::from_bits(bits_of(*.threshold))
    )]
    Id {
        /// The row.
        row: usize,
        /// The key.
        id: i32,
        /// Whether it is among the expected ids.
        expected_only: bool,
        /// BF16 bits of its expected logit.
        logit: u16,
        /// The smallest expected key, as order16.
        threshold: u16,
        /// Values between them.
        ulp: u16,
        /// What is allowed.
        tolerance: Tolerance,
    },
    /// Expected ids that do not ascend.
    #[error("row {row} slot {slot}: expected.ids has {id} after {before}, ids ascend")]
    NotAscending {
        /// The row.
        row: usize,
        /// The slot.
        slot: usize,
        /// The expected id.
        id: i32,
        /// The one before it.
        before: i32,
    },
    /// An expected id that is no key of its row.
    #[error("row {row} slot {slot}: expected.ids has {id}, the row has {length} keys")]
    NoSuchKey {
        /// The row.
        row: usize,
        /// The slot.
        slot: usize,
        /// The expected id.
        id: i32,
        /// Keys of the row.
        length: usize,
    },
}
