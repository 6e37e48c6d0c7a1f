//! A layer's decode step on one device, up to sparse attention: MLA query and KV insert, the indexer's query, score, select.
//!
//! ```text
//! in order:  query -> q_c -> (owner of the indexer's query) -> score -> select
//! late:      (owner of the indexer's query) -> score -> select | query, beside select
//! ```

use gpu::{Stream, View};
use mla_query::{MlaQuery, MlaStep};

use crate::error::Error;
use crate::indexer::{FusedIndexer, Selected};
use crate::step::{Step, expect_device};

/// The MLA query and the indexer of one layer.
pub struct DecodeLayer {
    query: MlaQuery,
    indexer: FusedIndexer,
}

impl std::fmt::Debug for DecodeLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DecodeLayer({}, {:?})", self.query.shape().name(), self.indexer)
    }
}

impl DecodeLayer {
    /// A layer of both. A query that is not [late](mla_query::MlaShape::with_late) must store `q_c`, from which the
    /// indexer's query is made.
    ///
    /// # Errors
    /// A query in order that stores no `q_c`.
    pub fn new(query: MlaQuery, indexer: FusedIndexer) -> Result<Self, Error> {
        let shape = query.shape();
        if !shape.late() && !shape.store_qc() {
            return Err(Error::NoQc { query: shape.name() });
        }
        Ok(DecodeLayer { query, indexer })
    }

    /// The MLA query.
    pub fn query(&self) -> &MlaQuery {
        &self.query
    }

    /// The indexer.
    pub fn indexer(&self) -> &FusedIndexer {
        &self.indexer
    }

    /// Launches a step; allocates and waits for nothing, so it can be captured. `project` is the owner of the indexer's
    /// query: it launches on the stream what writes `step.queries` and `step.weights`, from the `q_c` rows
    /// `[tokens, 1536]` of the query that runs before it; beside a late query it runs first and gets none.
    ///
    /// The query's tokens are the rows of the indexer's step, or more. In order, the rows, counts and the query are complete
    /// when whatever waits for select passes; beside a late query, when whatever waits for the query does.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; what `project`, a kernel or the device refuses.
    pub fn run<E: From<Error>>(
        &self,
        stream: &Stream,
        mla: &MlaStep<'_>,
        step: &Step<'_>,
        project: impl FnOnce(&Stream, Option<&View<'_, u16>>) -> Result<(), E>,
    ) -> Result<Selected<'_>, E> {
        let live = step.row_ends.len();
        if mla.tokens < live {
            let (found, needed) = (mla.tokens, live);
            return Err(Error::TooShort { buffer: "tokens of the MLA query", found, needed }.into());
        }
        expect_device(self.indexer.scratch().device(), "the MLA query's rows", mla.qkv.device())?;
        self.query.check(mla).map_err(Error::from)?;
        self.indexer.check_step(stream, step)?;
        if self.query.shape().late() {
            project(stream, None)?;
            let selected = self.indexer.run(stream, step)?;
            self.query.launch(stream, mla).map_err(Error::from)?;
            return Ok(selected);
        }
        self.query.launch(stream, mla).map_err(Error::from)?;
        project(stream, mla.q_c.as_ref())?;
        Ok(self.indexer.run(stream, step)?)
    }
}
