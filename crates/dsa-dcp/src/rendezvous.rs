//! How the ranks of a group find each other: an all-gather of bytes, and each other's memory.
//!
//! ```no_run
//! # use std::{net::TcpListener, sync::Arc, time::Duration};
//! # use dsa_dcp::{NcclAllGather, Rendezvous, TcpRendezvous};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (rank, ranks, device) = (0, 8, gpu::Device::cuda(0)?);
//! let (address, limit) = ("10.0.0.1:29400", Duration::from_secs(60));
//! let group: Arc<dyn Rendezvous> = Arc::new(match rank {
//!     0 => TcpRendezvous::host(TcpListener::bind(address)?, ranks, "run 42", limit)?,
//!     _ => TcpRendezvous::join(address.parse()?, rank, ranks, "run 42", limit)?,
//! });
//! // For ranks that cannot map each other's memory. It succeeds on all ranks or on none.
//! let gather = NcclAllGather::new(&device, group.clone(), limit).ok();
//! # drop((group, gather));
//! # Ok(())
//! # }
//! ```
//!
//! [`in_process`] is for ranks that are threads of one process, [`TcpRendezvous`] for a process per rank. An engine that
//! already has a group of its own implements [`Rendezvous`] over that.

mod tcp;

pub use tcp::TcpRendezvous;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu::{Buffer, Device};
use parking_lot::{Condvar, Mutex};

use crate::error::DcpError;

/// Why ranks did not come together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Not everybody came in time.
    #[error("rank {rank} waited {limit:?} for rank {missing}, which did not come")]
    Timeout {
        /// This rank.
        rank: usize,
        /// The first rank that is missing.
        missing: usize,
        /// How long was waited.
        limit: Duration,
    },
    /// Another rank has given up on this group.
    #[error("rank {by} has given up on the group")]
    Abandoned {
        /// Who.
        by: usize,
    },
    /// A rank outside the group.
    #[error("rank {rank} is outside the group of {ranks} ranks")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// A process that joins as a rank that is taken.
    #[error("rank {rank} has already joined the group")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// A process that counts other ranks than the group's host.
    #[error("rank {rank} expects {found} ranks, the group has {expected}")]
    WrongSize {
        /// The joining rank.
        rank: usize,
        /// Ranks that it expects.
        found: usize,
        /// Ranks of the group.
        expected: usize,
    },
    /// A process of another group: a run before, or a neighbour's.
    #[error("rank {rank} looks for the group {found:?}, this is {expected:?}")]
    WrongGroup {
        /// The joining rank.
        rank: usize,
        /// The name that it has.
        found: String,
        /// The name that the host has.
        expected: String,
    },
    /// Ranks that do not make the same calls in the same order.
    #[error(
        "rank {peer} is in round {theirs} of the group, this rank in round {ours}: all ranks must make the same calls in \
         the same order"
    )]
    OutOfStep {
        /// The other rank.
        peer: usize,
        /// This rank's round.
        ours: u64,
        /// The other's round.
        theirs: u64,
    },
    /// More bytes than a group over TCP moves in a round.
    #[error("{bytes} bytes in a round of the group, which takes {limit} at most")]
    TooLarge {
        /// Bytes of one rank, or of all together.
        bytes: usize,
        /// Bytes at most.
        limit: usize,
    },
    /// A rank whose process has ended, or whose connection broke.
    #[error("the connection to rank {peer} is lost: {reason}")]
    Lost {
        /// The other rank.
        peer: usize,
        /// What the system reports.
        reason: String,
    },
    /// The group's address cannot be used.
    #[error("{address}: {reason}")]
    Address {
        /// The address.
        address: String,
        /// What the system reports.
        reason: String,
    },
}

/// Another rank's memory as this rank's kernels address it.
#[derive(Debug, Clone)]
pub struct PeerMemory {
    /// Address on this rank's device.
    pub address: u64,
    /// Keeps the memory, if it can be kept from here.
    pub keep: Option<Arc<Buffer<u64>>>,
}

/// One rank of a group. Calls are collective: every rank makes the same ones in the same order.
pub trait Rendezvous: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn ranks(&self) -> usize;

    /// Every rank's bytes, by rank.
    ///
    /// # Errors
    /// [`RendezvousError`] if the others do not come within `limit`.
    fn all_gather(&self, bytes: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, RendezvousError>;

    /// An address under which this rank's kernels store to every rank's `memory` at once, if the group has one. `memory` is
    /// what this rank has [shared](Rendezvous::share). Collective.
    ///
    /// # Errors
    /// Ranks that do not come within `limit`.
    fn multicast(
        &self,
        device: &Device,
        memory: &Arc<Buffer<u64>>,
        limit: Duration,
    ) -> Result<Option<u64>, RendezvousError> {
        let _ = (device, memory, limit);
        Ok(None)
    }

    /// Makes every rank's `memory` accessible to the kernels of this rank's `device`, and returns them by rank. It succeeds
    /// on all ranks or on none.
    ///
    /// # Errors
    /// Ranks that do not come within `limit`; [`DcpError::PeerUnmappable`], the same on every rank, for the first pair of
    /// ranks that cannot.
    fn share(&self, device: &Device, memory: Arc<Buffer<u64>>, limit: Duration) -> Result<Vec<PeerMemory>, DcpError>;
}

/// Every rank's verdict becomes everybody's: `failure` is the peer whose memory this rank cannot map, and why.
pub(crate) fn agree(
    group: &(impl Rendezvous + ?Sized),
    failure: Option<(usize, String)>,
    limit: Duration,
) -> Result<(), DcpError> {
    let verdict =
        failure.map_or(Vec::new(), |(peer, reason)| [&(peer as u64).to_le_bytes(), reason.as_bytes()].concat());
    for (rank, verdict) in group.all_gather(&verdict, limit)?.iter().enumerate() {
        if let Some((peer, reason)) = verdict.split_first_chunk() {
            let (peer, reason) = (u64::from_le_bytes(*peer) as usize, String::from_utf8_lossy(reason).into_owned());
            return Err(DcpError::PeerUnmappable { rank, peer, reason });
        }
    }
    Ok(())
}

/// When `limit` from now has passed; however long it is, a time that there is.
pub(crate) fn deadline(limit: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    Instant::now() + limit.min(CENTURY)
}

/// All ranks share as much.
fn check_len(theirs: &Buffer<u64>, ours: usize) -> Result<(), String> {
    if theirs.len() == ours {
        return Ok(());
    }
    Err(format!("it has {} bytes, this rank's {}", theirs.bytes(), 8 * ours))
}

/// What a rank brings to a round.
#[derive(Clone)]
struct Deposit {
    bytes: Vec<u8>,
    memory: Option<Arc<Buffer<u64>>>,
}

/// One collective call.
struct Round {
    number: u64,
    deposits: Vec<Option<Deposit>>,
    taken: usize,
}

#[derive(Default)]
struct State {
    rounds: Vec<Round>,
    abandoned_by: Option<usize>,
}

struct Meeting {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// A rank of a group of threads in one process.
pub struct InProcess {
    rank: usize,
    next: AtomicU64,
    meeting: Arc<Meeting>,
}

/// The members of a group of `ranks` threads, by rank.
pub fn in_process(ranks: usize) -> Vec<InProcess> {
    let meeting = Arc::new(Meeting { ranks, state: Mutex::default(), changed: Condvar::new() });
    (0..ranks).map(|rank| InProcess { rank, next: AtomicU64::new(0), meeting: meeting.clone() }).collect()
}

impl InProcess {
    /// Everybody's deposits of this rank's next round, all with memory or all without.
    fn meet(&self, deposit: Deposit, limit: Duration) -> Result<Vec<Deposit>, RendezvousError> {
        let number = self.next.load(Ordering::Relaxed);
        let shares = deposit.memory.is_some();
        let all = self.meet_any(deposit, limit)?;
        match all.iter().position(|deposit| deposit.memory.is_some() != shares) {
            Some(peer) => Err(RendezvousError::OutOfStep { peer, ours: number, theirs: number }),
            None => Ok(all),
        }
    }

    fn meet_any(&self, deposit: Deposit, limit: Duration) -> Result<Vec<Deposit>, RendezvousError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let deadline = deadline(limit);
        let Meeting { ranks, state, changed } = &*self.meeting;
        let mut state = state.lock();
        if !state.rounds.iter().any(|round| round.number == number) {
            state.rounds.push(Round { number, deposits: vec![None; *ranks], taken: 0 });
        }
        let at = |state: &State| state.rounds.iter().position(|round| round.number == number).expect("until all took");
        let round = at(&state);
        state.rounds[round].deposits[self.rank] = Some(deposit);
        changed.notify_all();
        loop {
            if let Some(by) = state.abandoned_by {
                return Err(RendezvousError::Abandoned { by });
            }
            let round = at(&state);
            let Some(missing) = state.rounds[round].deposits.iter().position(Option::is_none) else { break };
            if changed.wait_until(&mut state, deadline).timed_out()
                && state.rounds[at(&state)].deposits[missing].is_none()
            {
                state.abandoned_by = Some(self.rank);
                changed.notify_all();
                return Err(RendezvousError::Timeout { rank: self.rank, missing, limit });
            }
        }
        let round = at(&state);
        let deposits = state.rounds[round].deposits.iter().flatten().cloned().collect();
        state.rounds[round].taken += 1;
        if state.rounds[round].taken == *ranks {
            state.rounds.swap_remove(round);
        }
        Ok(deposits)
    }
}

impl InProcess {
    /// Everybody's memory in this rank's next round.
    pub(crate) fn meet_with(
        &self,
        memory: Arc<Buffer<u64>>,
        limit: Duration,
    ) -> Result<Vec<Arc<Buffer<u64>>>, RendezvousError> {
        let all = self.meet(Deposit { bytes: Vec::new(), memory: Some(memory) }, limit)?;
        Ok(all.into_iter().filter_map(|deposit| deposit.memory).collect())
    }
}

impl Rendezvous for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.meeting.ranks
    }

    fn all_gather(&self, bytes: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let all = self.meet(Deposit { bytes: bytes.to_vec(), memory: None }, limit)?;
        Ok(all.into_iter().map(|deposit| deposit.bytes).collect())
    }

    fn multicast(
        &self,
        device: &Device,
        memory: &Arc<Buffer<u64>>,
        limit: Duration,
    ) -> Result<Option<u64>, RendezvousError> {
        let all: Vec<Arc<Buffer<u64>>> = self.meet_with(memory.clone(), limit)?;
        // One object for all, which rank 0 makes.
        let views: Vec<_> = all.iter().map(|memory| memory.as_view()).collect();
        let made = if self.rank == 0 { device.multicast(&views, memory.bytes()).ok() } else { None };
        let number = self.next.load(Ordering::Relaxed);
        let all = self.all_gather(&made.unwrap_or(0).to_le_bytes(), limit)?;
        let other_call = |_| RendezvousError::OutOfStep { peer: 0, ours: number, theirs: number };
        let address = u64::from_le_bytes(all[0][..].try_into().map_err(other_call)?);
        Ok((address != 0).then_some(address))
    }

    fn share(&self, device: &Device, memory: Arc<Buffer<u64>>, limit: Duration) -> Result<Vec<PeerMemory>, DcpError> {
        let all: Vec<Arc<Buffer<u64>>> = self.meet_with(memory, limit)?;
        let len = all[self.rank].len();
        let refused = all.iter().enumerate().find_map(|(peer, memory)| {
            let reached = if device.same(memory.device()) { Ok(()) } else { device.peer_access(memory.device()) };
            let refused = reached.map_err(|error| error.to_string()).and_then(|()| check_len(memory, len));
            refused.err().map(|reason| (peer, reason))
        });
        agree(self, refused, limit)?;
        let peers = all.into_iter().map(|memory| PeerMemory { address: memory.ptr().address(), keep: Some(memory) });
        Ok(peers.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn every_rank_gets_every_rank_s_bytes_round_by_round() {
        let members = in_process(5);
        std::thread::scope(|scope| {
            for member in &members {
                scope.spawn(move || {
                    for round in 0..200u8 {
                        let got = member.all_gather(&[member.rank() as u8, round], LIMIT).unwrap();
                        let want: Vec<_> = (0..5).map(|rank| vec![rank, round]).collect();
                        assert_eq!(got, want);
                    }
                });
            }
        });
        assert!(members[0].meeting.state.lock().rounds.is_empty(), "nothing is left behind");
    }

    #[test]
    fn simulated_devices_of_one_machine_have_a_multicast_address_and_one_device_has_none() {
        let group = Device::simulated_group(gpu::SimConfig { devices: 3, ..gpu::SimConfig::default() });
        for (devices, has) in [(group.clone(), true), (vec![group[0].clone(); 3], false)] {
            let members = in_process(3);
            let addresses: Vec<_> = std::thread::scope(|scope| {
                let calls: Vec<_> = members
                    .iter()
                    .zip(&devices)
                    .map(|(member, device)| {
                        scope.spawn(move || {
                            let memory = Arc::new(device.alloc_zeros(64).unwrap());
                            member.multicast(device, &memory, LIMIT).unwrap()
                        })
                    })
                    .collect();
                calls.into_iter().map(|call| call.join().unwrap()).collect()
            });
            assert!(addresses.iter().all(|address| *address == addresses[0] && address.is_some() == has));
        }
    }

    #[test]
    fn ranks_that_share_other_sizes_are_named() {
        let device = Device::simulated(gpu::SimConfig::default());
        std::thread::scope(|scope| {
            for (member, len) in in_process(3).into_iter().zip([4, 4, 5]) {
                let device = &device;
                scope.spawn(move || {
                    let memory = Arc::new(device.alloc_zeros(len).unwrap());
                    let error = member.share(device, memory, LIMIT).unwrap_err();
                    let DcpError::PeerUnmappable { rank: 0, peer: 2, reason } = &error else { panic!("{error:?}") };
                    assert_eq!(reason, "it has 40 bytes, this rank's 32");
                });
            }
        });
    }

    #[test]
    fn ranks_that_make_other_calls_are_told_so() {
        let device = Device::simulated(gpu::SimConfig::default());
        let memory = || Arc::new(device.alloc_zeros(4).unwrap());
        let members = in_process(3);
        let errors: Vec<RendezvousError> = std::thread::scope(|scope| {
            let calls: Vec<_> = members
                .iter()
                .map(|member| {
                    let memory = memory();
                    scope.spawn(move || match member.rank() {
                        1 => member.all_gather(&[1], LIMIT).unwrap_err(),
                        _ => member.meet_with(memory, LIMIT).unwrap_err(),
                    })
                })
                .collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        let other = |peer| RendezvousError::OutOfStep { peer, ours: 0, theirs: 0 };
        assert_eq!(errors, [other(1), other(0), other(1)]);
        assert!(errors[0].to_string().contains("must make the same calls"), "{}", errors[0]);
        // Nobody waits, and the next round is everybody's again.
        std::thread::scope(|scope| {
            members.iter().for_each(|member| {
                scope.spawn(move || assert_eq!(member.all_gather(&[7], LIMIT).unwrap(), [[7]; 3]));
            });
        });
    }

    #[test]
    fn no_limit_is_too_long() {
        for limit in [Duration::MAX, Duration::from_secs(u64::MAX), LIMIT] {
            assert!(deadline(limit) >= Instant::now() + LIMIT / 2);
            assert_eq!(in_process(1)[0].all_gather(&[7], limit).unwrap(), [[7]]);
        }
    }

    #[test]
    fn a_missing_rank_is_named_in_time_and_finds_the_group_abandoned() {
        let members = in_process(3);
        let limit = Duration::from_millis(50);
        let errors: Vec<_> = std::thread::scope(|scope| {
            let calls = [0, 2].map(|rank| {
                scope.spawn({
                    let member = &members[rank];
                    move || member.all_gather(&[], limit).unwrap_err()
                })
            });
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        assert!(errors.iter().any(|e| matches!(e, RendezvousError::Timeout { missing: 1, .. })), "{errors:?}");
        let late = members[1].all_gather(&[], LIMIT).unwrap_err();
        assert!(matches!(late, RendezvousError::Abandoned { by: 0 | 2 }));
    }
}
