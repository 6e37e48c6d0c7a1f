//! A query step whose heads are spread over ranks: each computes its own, publishes them, and gathers everybody's.

use dsa_dcp::{Gather, GatherShape, GatherStep, Limits, MailboxShape, QueryElement, QueryMailbox};
use gpu::{Buffer, Device, Stream};
use kimi_decode::check::query::QueryAnswer;
use kimi_decode::step_file::query::QueryFile;
use mla_query::{MlaShape, Publication};

use super::rank::{Rank, RankAnswer};
use crate::cli::Failure;

/// The mailbox of `ranks` ranks of the file's heads.
///
/// # Errors
/// Ranks that the heads cannot be dealt to evenly.
pub fn mailbox(file: &QueryFile, ranks: usize, tokens: usize, element: QueryElement) -> Result<MailboxShape, Failure> {
    if !file.heads.is_multiple_of(ranks) {
        let heads = file.heads;
        return Err(Failure::Unusable(format!("--dcp: found {ranks}, needed a divisor of {heads} (metadata heads)")));
    }
    MailboxShape::padded(ranks, file.heads / ranks, tokens, element).map_err(Failure::unusable)
}

/// One rank: its query, and where it gathers.
struct Member {
    mailbox: QueryMailbox,
    own: Rank,
    gather: Gather,
    gathered: Buffer<u32>,
}

/// Every rank of a query step.
pub struct Ranks {
    members: Vec<Member>,
    shape: MlaShape,
    mailbox: MailboxShape,
    tokens: usize,
}

impl Ranks {
    /// The first tokens of the file on every rank. Token t's KV row belongs to rank t modulo ranks; the others get a negative
    /// slot.
    ///
    /// # Errors
    /// What a device refuses.
    pub fn new(
        devices: &[Device],
        file: &QueryFile,
        shape: MlaShape,
        mailbox: MailboxShape,
        tokens: usize,
    ) -> Result<Self, Failure> {
        let (ranks, heads) = (mailbox.ranks(), mailbox.heads());
        let mailboxes = QueryMailbox::in_process(devices, mailbox, Limits::default()).map_err(Failure::unusable)?;
        let multicast = mailboxes.iter().all(QueryMailbox::has_multicast);
        let shape = shape.with_publication(Publication { mailbox, multicast }).map_err(Failure::unusable)?;
        let gather = GatherShape::new(mailbox).with_copy(true);
        let member = |(rank, (device, on)): (usize, (&Device, QueryMailbox))| -> Result<Member, Failure> {
            let owned = |(token, slot): (usize, &i64)| if token % ranks == rank { *slot } else { -1 };
            let slots: Vec<i64> = file.slots[..tokens].iter().enumerate().map(owned).collect();
            let own = Rank::new(device, file, shape, rank * heads..(rank + 1) * heads, &slots);
            let own = own.map_err(Failure::unusable)?;
            // Its buffers may be used from another stream.
            own.stream.synchronize().map_err(Failure::unusable)?;
            let gathered = device.alloc(tokens * mailbox.token_bytes() / 4).map_err(Failure::unusable)?;
            let gather = Gather::new(device, gather).map_err(Failure::unusable)?;
            Ok(Member { mailbox: on, own, gather, gathered })
        };
        let members = devices.iter().zip(mailboxes).enumerate().map(member).collect::<Result<Vec<_>, _>>()?;
        Ok(Ranks { members, shape, mailbox, tokens })
    }

    /// The publishing kernel of `rank`.
    pub fn publish(&self, rank: usize, stream: &Stream) -> Result<(), Failure> {
        let Member { own, mailbox, .. } = &self.members[rank];
        own.launch_on(stream, Some(mailbox)).map_err(Failure::unusable)
    }

    /// The gather of `rank`.
    pub fn gather(&self, rank: usize, stream: &Stream) -> Result<(), Failure> {
        let Member { mailbox, gather, gathered, .. } = &self.members[rank];
        let step = GatherStep { tokens: self.tokens, out: Some(gathered.as_view()) };
        gather.launch(stream, mailbox, &step).map_err(Failure::unusable)
    }

    /// What the ranks computed, once their streams have done it; also what each rank's kernel was, and the number of slots past
    /// the cache.
    ///
    /// # Errors
    /// A rank that was late; ranks that did not all gather the same, as a mismatch.
    pub fn answer(&self, file: &QueryFile) -> Result<(MlaShape, QueryAnswer, u32), Failure> {
        let mut answers = Vec::new();
        for Member { mailbox, own, gathered, .. } in &self.members {
            mailbox.check(&own.stream).map_err(Failure::unusable)?;
            let words = gathered.copy_to_vec(&own.stream).map_err(Failure::unusable)?;
            answers.push((own.answer().map_err(Failure::unusable)?, published(&self.mailbox, &words)));
        }
        agree(file, &answers)?;
        let dropped = answers.iter().map(|(own, _)| own.dropped).sum();
        let cache = merged(file.cache_fill, &answers);
        let (first, query) = answers.swap_remove(0);
        Ok((self.shape, QueryAnswer { tokens: self.tokens, q_c: first.q_c, query, cache }, dropped))
    }
}

/// Runs the first tokens of the file on every rank.
///
/// # Errors
/// As [`Ranks::new`] and [`Ranks::answer`].
pub fn launch(
    devices: &[Device],
    file: &QueryFile,
    shape: MlaShape,
    mailbox: MailboxShape,
    tokens: usize,
) -> Result<(MlaShape, QueryAnswer, u32), Failure> {
    let ranks = Ranks::new(devices, file, shape, mailbox, tokens)?;
    let streams = || ranks.members.iter().map(|member| &member.own.stream).enumerate();
    // All queries first: ranks that share a GPU may share its launch queues.
    streams().try_for_each(|(rank, stream)| ranks.publish(rank, stream))?;
    streams().try_for_each(|(rank, stream)| ranks.gather(rank, stream))?;
    ranks.answer(file)
}

/// The published rows of a copied box, without its padding.
fn published(mailbox: &MailboxShape, words: &[u32]) -> Vec<u8> {
    let tokens = words.chunks(mailbox.token_bytes() / 4);
    let rows = tokens.flat_map(|token| &token[..mailbox.published() * mailbox.row_bytes() / 4]);
    rows.flat_map(|word| word.to_le_bytes()).collect()
}

/// Every rank has the same compressed queries, and gathered the same rows.
fn agree(file: &QueryFile, answers: &[(RankAnswer, Vec<u8>)]) -> Result<(), Failure> {
    let (first, rows) = &answers[0];
    let token_bytes = rows.len() / (first.q_c.len() / dsa_core::consts::Q_LORA);
    for (rank, (own, gathered)) in answers.iter().enumerate().skip(1) {
        let differs = own.q_c.iter().zip(&first.q_c).position(|(a, b)| a != b);
        let what = differs.map(|at| ("q_c", at / dsa_core::consts::Q_LORA));
        let gathered = || Some(("gathered rows", gathered.iter().zip(rows).position(|(a, b)| a != b)? / token_bytes));
        if let Some((what, token)) = what.or_else(gathered) {
            let heads = file.heads;
            return Err(Failure::Mismatch(format!(
                "rank {rank}, token {token} of {heads} heads: {what} differ from rank 0's"
            )));
        }
    }
    Ok(())
}

/// One cache of all ranks': of each byte what some rank wrote. A rank that wrote where it owns nothing shows.
fn merged(fill: u8, answers: &[(RankAnswer, Vec<u8>)]) -> Vec<u8> {
    let mut cache = answers[0].0.cache.clone();
    for (own, _) in &answers[1..] {
        for (byte, written) in cache.iter_mut().zip(&own.cache).filter(|(_, written)| **written != fill) {
            *byte = *written;
        }
    }
    cache
}
