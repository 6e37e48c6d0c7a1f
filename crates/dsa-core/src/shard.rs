//! A rank's part of a decode step whose contexts are spread over ranks.

use crate::consts::PAGE;
use crate::error::ShapeError;
use crate::layout::fp8_page;
use crate::ownership::Ownership;
use crate::step::DecodeStep;

impl DecodeStep {
    /// The step as `rank` sees it: its keys in order of their local indices, in pages of its own, and its row ends, each from
    /// the row's global end. Queries, weights and the MLA block table are everybody's; the latter is over local indices.
    ///
    /// # Errors
    /// A context that is too long for the ranks.
    ///
    /// # Panics
    /// If the step does not pass [`DecodeStep::validate`].
    pub fn shard(&self, own: Ownership, rank: usize) -> Result<DecodeStep, ShapeError> {
        /// What pages hold where no key is.
        const JUNK: u8 = 0xA5;
        let context_len_max = own.local_len_max(self.context_len_max)?;
        let (requests, width) = (self.requests(), context_len_max.div_ceil(PAGE));
        // Blocks from the last down, so that no id is its own place.
        let table: Vec<i32> = (0..(requests * width) as i32).rev().collect();
        let mut cache = vec![JUNK; requests * width * fp8_page::BYTES];
        for request in 0..requests {
            let longest = (0..self.q).map(|i| self.row_len(request * self.q + i)).max().unwrap_or(0);
            for local in 0..own.local_len(rank, longest) {
                let token = own.global_of(rank, local);
                let from = self.table_row(request)[token / PAGE] as usize * self.page_stride;
                let (key, word) = fp8_page::read(&self.cache[from..], token % PAGE);
                let to = table[request * width + local / PAGE] as usize * fp8_page::BYTES;
                fp8_page::write(&mut cache[to..], local % PAGE, key, word);
            }
        }
        Ok(DecodeStep {
            context_len_max,
            cache,
            page_stride: fp8_page::BYTES,
            blocks: requests * width,
            table,
            table_stride: width,
            table_width: width,
            row_ends: (0..self.rows).map(|row| own.local_len(rank, self.row_len(row)) as i32).collect(),
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::StepSpec;

    #[test]
    fn every_key_lies_on_one_rank_at_its_local_index() {
        let step = StepSpec::new(3, 2, 128, &[700, 701, 129, 128, 0, 1]).build().unwrap();
        for (ranks, interleave) in [(1, 1), (3, 1), (4, 64), (16, 4)] {
            let own = Ownership::new(ranks, interleave).unwrap();
            let shards: Vec<_> = (0..ranks).map(|rank| step.shard(own, rank).unwrap()).collect();
            for (rank, shard) in shards.iter().enumerate() {
                shard.validate().unwrap();
                let ends = step.row_ends.iter().map(|&end| own.local_end(rank, end));
                assert_eq!(shard.row_ends, ends.collect::<Vec<_>>(), "{own:?}, rank {rank}");
            }
            for row in 0..step.rows {
                for token in 0..step.row_len(row) {
                    let shard = &shards[own.rank_of(token)];
                    assert!(own.local_of(token) < shard.row_len(row));
                    let request = row / step.q;
                    assert_eq!(shard.key(request, own.local_of(token)), step.key(request, token), "{own:?}, {token}");
                }
            }
        }
    }
}
