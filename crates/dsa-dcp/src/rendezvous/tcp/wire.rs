//! Messages on a connection, each with a deadline.
//!
//! | message | bytes |
//! |---|---|
//! | hello, to the host | magic 8, rank u32, ranks u32, then the group's name |
//! | a round's deposit, to the host | tag 1, round u64, then the bytes |
//! | a round's result, to the others | tag 1, round u64, then for each rank: length u32, bytes |
//! | a verdict, to the others | tag 2, then what [`encode`] says |
//!
//! Each has its length, u32, in front. Numbers are little-endian.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::rendezvous::RendezvousError;

pub(super) const MAGIC: &[u8; 8] = b"dsa-dcp1";
pub(super) const ROUND: u8 = 1;
pub(super) const VERDICT: u8 = 2;
/// No message is longer: what is deposited are handles and numbers.
pub(super) const MESSAGE_MAX: usize = 16 << 20;

/// The start of a deposit or a result.
pub(super) fn round_header(round: u64) -> Vec<u8> {
    [&[ROUND][..], &round.to_le_bytes()].concat()
}

/// A deposit's or result's round, and the rest.
pub(super) fn parse_round(message: &[u8]) -> Option<(u64, &[u8])> {
    let (round, rest) = message.strip_prefix(&[ROUND])?.split_first_chunk()?;
    Some((u64::from_le_bytes(*round), rest))
}

/// The message that tells why the group ends.
pub(super) fn verdict(error: &RendezvousError) -> Vec<u8> {
    [&[VERDICT], &encode(error)[..]].concat()
}

/// What [`verdict`] said.
pub(super) fn parse_verdict(message: &[u8]) -> Option<RendezvousError> {
    message.strip_prefix(&[VERDICT]).and_then(decode)
}

/// A verdict for the wire: a tag, three numbers, two texts.
pub(super) fn encode(error: &RendezvousError) -> Vec<u8> {
    use RendezvousError::*;
    let (tag, numbers, texts): (u8, [u64; 3], [&str; 2]) = match error {
        Timeout { rank, missing, limit } => {
            (0, [*rank as u64, *missing as u64, limit.as_nanos().try_into().unwrap_or(u64::MAX)], [""; 2])
        }
        Abandoned { by } => (1, [*by as u64, 0, 0], [""; 2]),
        RankOutOfRange { rank, ranks } => (2, [*rank as u64, *ranks as u64, 0], [""; 2]),
        DuplicateRank { rank } => (3, [*rank as u64, 0, 0], [""; 2]),
        WrongSize { rank, found, expected } => (4, [*rank as u64, *found as u64, *expected as u64], [""; 2]),
        WrongGroup { rank, found, expected } => (5, [*rank as u64, 0, 0], [found, expected]),
        OutOfStep { peer, ours, theirs } => (6, [*peer as u64, *ours, *theirs], [""; 2]),
        Lost { peer, reason } => (7, [*peer as u64, 0, 0], [reason, ""]),
        Address { address, reason } => (8, [0; 3], [address, reason]),
        TooLarge { bytes, limit } => (9, [*bytes as u64, *limit as u64, 0], [""; 2]),
    };
    let mut bytes = vec![tag];
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    for text in texts {
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// The inverse of [`encode`].
pub(super) fn decode(bytes: &[u8]) -> Option<RendezvousError> {
    use RendezvousError::*;
    let (&tag, bytes) = bytes.split_first()?;
    let (numbers, bytes) = bytes.split_at_checked(24)?;
    let n: Vec<u64> = numbers.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let text = |bytes: &[u8]| -> Option<(String, usize)> {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        Some((String::from_utf8_lossy(rest.get(..length)?).into_owned(), 4 + length))
    };
    let (first, length) = text(bytes)?;
    let (second, _) = text(&bytes[length..])?;
    let (a, b, c) = (n[0] as usize, n[1] as usize, n[2] as usize);
    Some(match tag {
        0 => Timeout { rank: a, missing: b, limit: Duration::from_nanos(n[2]) },
        1 => Abandoned { by: a },
        2 => RankOutOfRange { rank: a, ranks: b },
        3 => DuplicateRank { rank: a },
        4 => WrongSize { rank: a, found: b, expected: c },
        5 => WrongGroup { rank: a, found: first, expected: second },
        6 => OutOfStep { peer: a, ours: n[1], theirs: n[2] },
        7 => Lost { peer: a, reason: first },
        8 => Address { address: first, reason: second },
        9 => TooLarge { bytes: a, limit: b },
        _ => return None,
    })
}

/// Sends a message.
pub(super) fn send(stream: &mut TcpStream, message: &[u8], deadline: Instant) -> Result<()> {
    if message.len() > MESSAGE_MAX {
        return Err(Error::new(ErrorKind::InvalidInput, format!("a message of {} bytes", message.len())));
    }
    let bytes = [&(message.len() as u32).to_le_bytes()[..], message].concat();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => rest = &rest[n..],
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives a message; [`ErrorKind::TimedOut`] at the deadline, [`ErrorKind::UnexpectedEof`] from a peer that has ended.
pub(super) fn receive(stream: &mut TcpStream, deadline: Instant) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    receive_exact(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_MAX {
        return Err(Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut message = vec![0; length];
    receive_exact(stream, &mut message, deadline)?;
    Ok(message)
}

fn receive_exact(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut bytes[at..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Time until `deadline`.
fn left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Whether the deadline decides.
fn is_retry(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
