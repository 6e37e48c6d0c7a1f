//! A group of processes, over TCP: rank 0 hosts, the others join it, and every round passes through it.
//!
//! Nothing outlives the processes: no file is left behind that a later run could take for its own, and a rank whose
//! process ends is noticed at once. Connections are not authenticated: use addresses of a trusted network.

mod wire;

use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use gpu::{Buffer, Device, IpcHandle};
use parking_lot::Mutex;

use super::{PeerMemory, Rendezvous, RendezvousError, agree, check_len, deadline};
use crate::error::DcpError;
use wire::{MAGIC, MESSAGE_MAX, ROUND, parse_round, parse_verdict, receive, round_header, send, verdict};

/// Between two attempts at something that is not ready.
const PAUSE: Duration = Duration::from_millis(2);

/// One rank of a group of processes.
pub struct TcpRendezvous {
    rank: usize,
    ranks: usize,
    state: Mutex<State>,
}

struct State {
    round: u64,
    links: Links,
    /// Why the group is of no more use.
    failed: Option<RendezvousError>,
}

enum Links {
    /// Of the host to ranks 1, 2, ..
    Host(Vec<TcpStream>),
    /// To the host.
    Member(TcpStream),
}

impl TcpRendezvous {
    /// Hosts the group as rank 0: waits on `listener` for the other ranks. Port 0 of an address finds a free port, which
    /// [`TcpListener::local_addr`] names. `group` tells this group from others that may come to the same address.
    ///
    /// # Errors
    /// [`RendezvousError::Timeout`] for the first rank that does not come within `limit`; a joining process with a wrong
    /// name, size or rank ends the group, and everybody is told.
    pub fn host(listener: TcpListener, ranks: usize, group: &str, limit: Duration) -> Result<Self, RendezvousError> {
        let deadline = deadline(limit);
        if ranks == 0 {
            return Err(RendezvousError::RankOutOfRange { rank: 0, ranks });
        }
        let mut members: Vec<Option<TcpStream>> = (1..ranks).map(|_| None).collect();
        if let Err(failed) = gather_members(&listener, &mut members, group, (deadline, limit)) {
            tell(members.iter_mut().flatten(), &failed);
            return Err(failed);
        }
        let mut links: Vec<TcpStream> = members.into_iter().flatten().collect();
        for (stream, peer) in links.iter_mut().zip(1..) {
            send(stream, &[ROUND], deadline + grace(limit)).map_err(|error| lost(peer, &error))?;
        }
        Ok(Self::new(0, ranks, Links::Host(links)))
    }

    /// Joins the group that is, or will be, hosted at `address`, as `rank` > 0 of `ranks`.
    ///
    /// # Errors
    /// [`RendezvousError::Timeout`] if the group is not complete within `limit`; what the host refuses.
    pub fn join(
        address: SocketAddr,
        rank: usize,
        ranks: usize,
        group: &str,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        if !(1..ranks).contains(&rank) {
            return Err(RendezvousError::RankOutOfRange { rank, ranks });
        }
        let deadline = deadline(limit);
        let no_host = RendezvousError::Timeout { rank, missing: 0, limit };
        let mut stream = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(no_host);
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => break stream,
                // The host is not there yet.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::TimedOut) => {
                    std::thread::sleep(PAUSE);
                }
                Err(error) => {
                    return Err(RendezvousError::Address { address: address.to_string(), reason: error.to_string() });
                }
            }
        };
        // Only latency depends on it.
        let _ = stream.set_nodelay(true);
        let hello = [MAGIC, &(rank as u32).to_le_bytes()[..], &(ranks as u32).to_le_bytes(), group.as_bytes()].concat();
        let sent = send(&mut stream, &hello, deadline);
        // The host's own verdict says more than this rank's.
        match receive(&mut stream, deadline + grace(limit)) {
            Ok(welcome) if welcome == [ROUND] => Ok(Self::new(rank, ranks, Links::Member(stream))),
            Ok(message) => Err(parse_verdict(&message).unwrap_or_else(|| garbled(0))),
            Err(error) if error.kind() == ErrorKind::TimedOut => Err(no_host),
            Err(error) => Err(lost(0, &sent.err().unwrap_or(error))),
        }
    }

    fn new(rank: usize, ranks: usize, links: Links) -> Self {
        TcpRendezvous { rank, ranks, state: Mutex::new(State { round: 0, links, failed: None }) }
    }
}

/// How much longer than its own limit a rank listens for the host's verdict, which names the rank that is missing.
fn grace(limit: Duration) -> Duration {
    (limit / 2).min(Duration::from_secs(1))
}

/// What a joining process says of itself.
struct Hello {
    rank: usize,
    ranks: usize,
    group: String,
}

/// Waits until every member has joined.
fn gather_members(
    listener: &TcpListener,
    members: &mut [Option<TcpStream>],
    group: &str,
    (deadline, limit): (Instant, Duration),
) -> Result<(), RendezvousError> {
    let refuse = |error: std::io::Error| {
        let address = listener.local_addr().map_or_else(|_| "the listener".into(), |address| address.to_string());
        RendezvousError::Address { address, reason: error.to_string() }
    };
    listener.set_nonblocking(true).map_err(refuse)?;
    let (sender, hellos) = mpsc::channel();
    while let Some(missing) = members.iter().position(Option::is_none) {
        match listener.accept() {
            // A stranger that says nothing must not keep the others waiting.
            Ok((stream, _)) => {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    // Nobody listens any more if the group is complete.
                    let _ = sender.send(hello(stream, deadline));
                });
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) => {}
            Err(error) => return Err(refuse(error)),
        }
        match hellos.recv_timeout(PAUSE) {
            Ok(Some((mut stream, hello))) => {
                if let Err(error) = admit(&hello, group, members) {
                    tell(std::iter::once(&mut stream), &error);
                    return Err(error);
                }
                members[hello.rank - 1] = Some(stream);
            }
            // A stranger has gone, or nobody has come.
            Ok(None) | Err(_) if Instant::now() < deadline => {}
            Ok(None) | Err(_) => return Err(RendezvousError::Timeout { rank: 0, missing: missing + 1, limit }),
        }
    }
    Ok(())
}

/// A connection's hello; `None` if it is no rank's.
fn hello(mut stream: TcpStream, deadline: Instant) -> Option<(TcpStream, Hello)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_nodelay(true).ok()?;
    let message = receive(&mut stream, deadline).ok()?;
    let (rank, rest) = message.strip_prefix(MAGIC)?.split_first_chunk()?;
    let (ranks, group) = rest.split_first_chunk()?;
    let (rank, ranks) = (u32::from_le_bytes(*rank) as usize, u32::from_le_bytes(*ranks) as usize);
    Some((stream, Hello { rank, ranks, group: String::from_utf8_lossy(group).into_owned() }))
}

/// Whether the host takes a rank.
fn admit(hello: &Hello, group: &str, members: &[Option<TcpStream>]) -> Result<(), RendezvousError> {
    let (rank, ranks) = (hello.rank, members.len() + 1);
    if hello.group != group {
        let (found, expected) = (hello.group.clone(), group.to_string());
        return Err(RendezvousError::WrongGroup { rank, found, expected });
    }
    if hello.ranks != ranks {
        return Err(RendezvousError::WrongSize { rank, found: hello.ranks, expected: ranks });
    }
    match rank.checked_sub(1).and_then(|at| members.get(at)) {
        Some(None) => Ok(()),
        Some(Some(_)) => Err(RendezvousError::DuplicateRank { rank }),
        None => Err(RendezvousError::RankOutOfRange { rank, ranks }),
    }
}

impl State {
    fn run(&mut self, rank: usize, bytes: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, RendezvousError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let (round, deadline) = (self.round, deadline(limit));
        self.round += 1;
        let result = match &mut self.links {
            Links::Host(members) => host_round(members, round, bytes, (deadline, limit)),
            Links::Member(host) => member_round(host, (rank, round), bytes, (deadline, limit)),
        };
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            // Whoever waits for this rank learns at once that it does not come.
            match &mut self.links {
                Links::Host(members) => tell(members.iter_mut(), error),
                Links::Member(host) => close(host),
            }
        }
        result
    }
}

fn host_round(
    members: &mut [TcpStream],
    round: u64,
    bytes: &[u8],
    (deadline, limit): (Instant, Duration),
) -> Result<Vec<Vec<u8>>, RendezvousError> {
    let mut all = vec![bytes.to_vec()];
    for (member, peer) in members.iter_mut().zip(1..) {
        let message = receive(member, deadline).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => RendezvousError::Timeout { rank: 0, missing: peer, limit },
            _ => lost(peer, &error),
        })?;
        // A rank that cannot take part says why.
        let (theirs, deposit) =
            parse_round(&message).ok_or_else(|| parse_verdict(&message).unwrap_or_else(|| garbled(peer)))?;
        if theirs != round {
            return Err(RendezvousError::OutOfStep { peer, ours: round, theirs });
        }
        all.push(deposit.to_vec());
    }
    // Who deposited and then gave up, because this rank came late, has not come.
    for (member, peer) in members.iter_mut().zip(1..) {
        if has_ended(member) {
            return Err(lost(peer, &ErrorKind::UnexpectedEof.into()));
        }
    }
    let mut result = round_header(round);
    for deposit in &all {
        result.extend((deposit.len() as u32).to_le_bytes());
        result.extend(deposit);
    }
    check_size(result.len())?;
    for (member, peer) in members.iter_mut().zip(1..) {
        send(member, &result, deadline + grace(limit)).map_err(|error| lost(peer, &error))?;
    }
    Ok(all)
}

fn member_round(
    host: &mut TcpStream,
    (rank, round): (usize, u64),
    bytes: &[u8],
    (deadline, limit): (Instant, Duration),
) -> Result<Vec<Vec<u8>>, RendezvousError> {
    let message = [round_header(round), bytes.to_vec()].concat();
    if let Err(error) = check_size(message.len()) {
        // Whoever is not told will see the connection end.
        let _ = send(host, &verdict(&error), deadline);
        return Err(error);
    }
    let sent = send(host, &message, deadline);
    // A host that has given up says why before it closes.
    let message = receive(host, deadline + grace(limit)).map_err(|error| match error.kind() {
        ErrorKind::TimedOut => RendezvousError::Timeout { rank, missing: 0, limit },
        _ => lost(0, &sent.err().unwrap_or(error)),
    })?;
    let Some((theirs, mut rest)) = parse_round(&message) else {
        return Err(parse_verdict(&message).unwrap_or_else(|| garbled(0)));
    };
    if theirs != round {
        return Err(RendezvousError::OutOfStep { peer: 0, ours: round, theirs });
    }
    let mut all = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let (deposit, after) = after.split_at_checked(length).ok_or_else(|| garbled(0))?;
        all.push(deposit.to_vec());
        rest = after;
    }
    Ok(all)
}

/// A round's message, which holds some bytes besides the ranks' own, is not too long.
fn check_size(bytes: usize) -> Result<(), RendezvousError> {
    if bytes > MESSAGE_MAX {
        return Err(RendezvousError::TooLarge { bytes, limit: MESSAGE_MAX });
    }
    Ok(())
}

/// Tells ranks why the group ends, and ends it.
fn tell<'a>(members: impl Iterator<Item = &'a mut TcpStream>, error: &RendezvousError) {
    for member in members {
        // Whoever cannot be told will see the connection end.
        let _ = send(member, &verdict(error), Instant::now() + Duration::from_millis(100));
        let _ = member.shutdown(Shutdown::Write);
    }
}

/// Whether the other side has closed the connection.
fn has_ended(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let blocking = stream.set_nonblocking(false);
    blocking.is_err() || !matches!(peeked, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn close(stream: &TcpStream) {
    // It may be closed already.
    let _ = stream.shutdown(Shutdown::Both);
}

fn garbled(peer: usize) -> RendezvousError {
    RendezvousError::Lost { peer, reason: "what it sent is no message of this protocol".into() }
}

fn lost(peer: usize, error: &std::io::Error) -> RendezvousError {
    let reason = match error.kind() {
        ErrorKind::UnexpectedEof => "it has closed it, or its process has ended".to_string(),
        _ => error.to_string(),
    };
    RendezvousError::Lost { peer, reason }
}

impl Rendezvous for TcpRendezvous {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&self, bytes: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let all = self.state.lock().run(self.rank, bytes, limit)?;
        if all.len() != self.ranks {
            return Err(garbled(0));
        }
        Ok(all)
    }

    /// Over CUDA IPC. A rank's memory must stay for as long as others have it mapped: end with a collective call, such as a
    /// last [`all_gather`](Rendezvous::all_gather), after which nobody's kernels use it.
    fn share(&self, device: &Device, memory: Arc<Buffer<u64>>, limit: Duration) -> Result<Vec<PeerMemory>, DcpError> {
        // Handles mean nothing on other nodes.
        let node = node();
        let own = memory.ipc_handle();
        let handle = own.as_ref().map_or(Vec::new(), |handle| handle.to_bytes().to_vec());
        let offers = self.all_gather(&[&[node.len() as u8][..], &node, &handle].concat(), limit)?;
        let map = |peer: usize| -> Result<PeerMemory, String> {
            if peer == self.rank {
                let address = memory.ptr().address();
                return match &own {
                    Ok(_) => Ok(PeerMemory { address, keep: Some(memory.clone()) }),
                    Err(error) => Err(error.to_string()),
                };
            }
            let garbled = || "what it offered is no message of this protocol".to_string();
            let parts = offers[peer].split_first().and_then(|(&length, rest)| rest.split_at_checked(length as usize));
            let (their_node, handle) = parts.ok_or_else(garbled)?;
            if handle.is_empty() {
                return Err("it cannot share it".into());
            }
            if their_node != node {
                return Err("it is on another node".into());
            }
            let handle = IpcHandle::from_bytes(handle).ok_or_else(garbled)?;
            let mapped = device.open_ipc(&handle).map_err(|error| error.to_string())?;
            check_len(&mapped, memory.len())?;
            Ok(PeerMemory { address: mapped.ptr().address(), keep: Some(Arc::new(mapped)) })
        };
        // This rank first: why it cannot share its own says more than that it cannot.
        let mut peers: Vec<Option<PeerMemory>> = vec![None; self.ranks];
        let order = std::iter::once(self.rank).chain((0..self.ranks).filter(|&peer| peer != self.rank));
        let refused = order.into_iter().find_map(|peer| match map(peer) {
            Ok(memory) => {
                peers[peer] = Some(memory);
                None
            }
            Err(reason) => Some((peer, reason)),
        });
        agree(self, refused, limit)?;
        Ok(peers.into_iter().flatten().collect())
    }
}

/// By which processes of one running system know each other.
fn node() -> Vec<u8> {
    let id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim_ascii().iter().copied().take(u8::MAX as usize).collect()
}

#[cfg(test)]
mod tests;
