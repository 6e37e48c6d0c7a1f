//! A query step whose heads are spread over ranks: each computes its own, publishes them, and gathers everybody's.

use std::sync::Arc;

use dsa_dcp::rendezvous::in_process;
use dsa_dcp::{DcpError, Gather, GatherShape, GatherStep, MailboxShape, QueryElement, QueryMailbox, Rendezvous};
use gpu::Device;
use kimi_decode::check::query::QueryAnswer;
use kimi_decode::step_file::query::QueryFile;
use mla_query::{MlaShape, Publication};

use super::rank::{Rank, RankAnswer};
use crate::cli::Failure;

/// The mailbox of `ranks` ranks of the file's heads.
///
/// # Errors
/// Ranks that the heads cannot be dealt to evenly.
pub fn mailbox(file: &QueryFile, ranks: usize, tokens: usize, is_fp8: bool) -> Result<MailboxShape, Failure> {
    if !file.heads.is_multiple_of(ranks) {
        let heads = file.heads;
        return Err(Failure::Unusable(format!("--dcp: found {ranks}, needed a divisor of {heads} (metadata heads)")));
    }
    let element = if is_fp8 { QueryElement::E4m3 } else { QueryElement::Bf16 };
    let q_heads = if file.heads <= 64 { 64 } else { 128 };
    MailboxShape::new(ranks, file.heads / ranks, q_heads, tokens, element).map_err(Failure::unusable)
}

/// Runs the first tokens of the file on every rank. Token t's KV row belongs to rank t modulo ranks; the others get a
/// negative slot. Also what each rank's kernel was, and the number of slots past the cache.
///
/// # Errors
/// What a device refuses; ranks that did not all gather the same, as a mismatch.
pub fn launch(
    devices: &[Device],
    file: &QueryFile,
    shape: MlaShape,
    mailbox: MailboxShape,
    tokens: usize,
) -> Result<(MlaShape, QueryAnswer, u32), Failure> {
    let (ranks, heads) = (mailbox.ranks(), mailbox.heads());
    let members = in_process(ranks).into_iter().map(|member| Arc::new(member) as Arc<dyn Rendezvous>);
    let mailboxes: Vec<QueryMailbox> = std::thread::scope(|scope| {
        let calls: Vec<_> = members
            .zip(devices)
            .map(|(member, device)| scope.spawn(move || QueryMailbox::new(device, member, mailbox)))
            .collect();
        // A thread that panicked is a defect here.
        calls.into_iter().map(|call| call.join().expect("set up without a panic")).collect::<Result<_, DcpError>>()
    })
    .map_err(Failure::unusable)?;
    let multicast = mailboxes.iter().all(QueryMailbox::has_multicast);
    let shape = shape.with_publication(Publication { mailbox, multicast }).map_err(Failure::unusable)?;
    let gather_shape = GatherShape::new(mailbox).with_copy(true);
    let mut running = Vec::new();
    for (rank, device) in devices.iter().enumerate() {
        let owned = |(token, slot): (usize, &i64)| if token % ranks == rank { *slot } else { -1 };
        let slots: Vec<i64> = file.slots[..tokens].iter().enumerate().map(owned).collect();
        let own =
            Rank::new(device, file, shape, rank * heads..(rank + 1) * heads, &slots).map_err(Failure::unusable)?;
        let gather = Gather::new(device, gather_shape).map_err(Failure::unusable)?;
        let gathered = device.alloc::<u32>(tokens * mailbox.token_bytes() / 4).map_err(Failure::unusable)?;
        running.push((own, gather, gathered));
    }
    // All queries first: ranks that share a GPU may share its launch queues.
    for ((own, ..), mailbox) in running.iter().zip(&mailboxes) {
        own.launch(Some(mailbox)).map_err(Failure::unusable)?;
    }
    for ((own, gather, gathered), mailbox) in running.iter().zip(&mailboxes) {
        let step = GatherStep { tokens, out: Some(gathered.as_view()) };
        gather.launch(&own.stream, mailbox, &step).map_err(Failure::unusable)?;
    }
    let mut answers = Vec::new();
    for ((own, _, gathered), on) in running.iter().zip(&mailboxes) {
        on.check(&own.stream).map_err(Failure::unusable)?;
        let words = gathered.copy_to_vec(&own.stream).map_err(Failure::unusable)?;
        answers.push((own.answer().map_err(Failure::unusable)?, published(&mailbox, &words)));
    }
    agree(file, &answers)?;
    let dropped = answers.iter().map(|(own, _)| own.dropped).sum();
    let cache = merged(file.cache_fill, &answers);
    let (first, query) = answers.swap_remove(0);
    Ok((shape, QueryAnswer { tokens, q_c: first.q_c, query, cache }, dropped))
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
