//! What is measured: the reference table's cases, and the ones that could be worse than they look.

use crate::common::wanted;

/// Sequence lengths of a batch, and the rows per request that it is measured with.
#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub lengths: Vec<usize>,
    /// Rows per request; empty: those that were asked for.
    pub q: &'static [usize],
}

impl Case {
    pub fn keys(&self) -> usize {
        self.lengths.iter().sum()
    }
}

/// What the key pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Keys of moderate size, scales round 1.
    Random,
    /// 32 keys over and over: every row has at most 32 logits.
    Values32,
    /// One key: all logits of a row are equal.
    Equal,
}

impl Data {
    pub const ALL: [Data; 3] = [Data::Random, Data::Values32, Data::Equal];

    pub fn name(self) -> &'static str {
        match self {
            Data::Random => "random",
            Data::Values32 => "32 values",
            Data::Equal => "all equal",
        }
    }

    /// Distinct keys of a page pool.
    pub fn distinct_keys(self) -> Option<usize> {
        match self {
            Data::Random => None,
            Data::Values32 => Some(32),
            Data::Equal => Some(1),
        }
    }
}

fn case(name: &'static str, lengths: Vec<usize>, q: &'static [usize]) -> Case {
    Case { name, lengths, q }
}

/// Batch x context of the reference table. `BENCH_CASES` restricts them.
pub fn reference() -> Vec<Case> {
    // 1k to 128k tokens in equal ratios.
    let mixed = (0..32).map(|i| (1024.0 * 128f64.powf(i as f64 / 31.0)) as usize).collect();
    chosen(vec![
        case("b1_8k", vec![8192], &[]),
        case("b1_128k", vec![131_072], &[]),
        case("b8_32k", vec![32_768; 8], &[]),
        case("b64_8k", vec![8192; 64], &[]),
        case("b64_64k", vec![65_536; 64], &[]),
        case("b32_mixed", mixed, &[]),
    ])
}

/// Batches that a schedule or a selection may do badly on; each is measured with every kind of data. `BENCH_CASES`
/// restricts them.
pub fn worst() -> Vec<Case> {
    let mut one_long = vec![500; 63];
    one_long.insert(31, 1_000_000);
    chosen(vec![
        case("tied_1x128k", vec![131_072], &[1]),
        case("tied_8x32k", vec![32_768; 8], &[1]),
        case("tied_64x8k", vec![8192; 64], &[1]),
        case("one_1m_of_64", one_long, &[1]),
        case("rows_320_q4", vec![8192; 80], &[4]),
        case("all_under_k", (0..64).map(|i| 1000 + 16 * i).collect(), &[1, 4]),
    ])
}

/// As many keys as `one_1m_of_64`, in one row alone: what the skewed batch may cost.
pub fn one_row_of_1m() -> Case {
    case("one_1m_alone", vec![1_031_500], &[1])
}

fn chosen(cases: Vec<Case>) -> Vec<Case> {
    cases.into_iter().filter(|case| wanted("BENCH_CASES", case.name)).collect()
}
