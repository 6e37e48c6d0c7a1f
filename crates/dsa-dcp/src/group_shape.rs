//! Sizes that every rank of a group has alike.

use std::time::Duration;

use crate::error::DcpError;
use crate::rendezvous::Rendezvous;

/// Sizes that ranks compare when they set something up together.
pub(crate) trait GroupShape: std::fmt::Display {
    /// Ranks of the group.
    fn ranks(&self) -> usize;

    /// The sizes as bytes, equal exactly if the sizes are.
    fn encode(&self) -> Vec<u8>;

    /// What [`encode`](GroupShape::encode) of another rank says, for people.
    fn describe(bytes: &[u8]) -> String;
}

/// Every rank of `group` has the same shape. Collective.
pub(crate) fn agree_on_shape<S: GroupShape>(
    group: &dyn Rendezvous,
    shape: &S,
    limit: Duration,
) -> Result<(), DcpError> {
    if group.ranks() != shape.ranks() {
        return Err(DcpError::GroupSize { group: group.ranks(), shape: shape.ranks() });
    }
    let (rank, ours) = (group.rank(), shape.encode());
    for (peer, theirs) in group.all_gather(&ours, limit)?.iter().enumerate() {
        if *theirs != ours {
            let (ours, theirs) = (shape.to_string(), S::describe(theirs));
            return Err(DcpError::PeerMismatch { rank, peer, ours, theirs });
        }
    }
    Ok(())
}
