use std::io::Write;

use super::wire::{decode, encode};
use super::*;

const LIMIT: Duration = Duration::from_secs(20);
/// Long beside what a busy machine takes to start a thread.
const SHORT: Duration = Duration::from_secs(1);

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// All ranks of a group, each made in a thread of its own.
fn group(ranks: usize) -> Vec<TcpRendezvous> {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let members: Vec<_> =
            (1..ranks).map(|rank| scope.spawn(move || TcpRendezvous::join(address, rank, ranks, "g", LIMIT))).collect();
        let host = TcpRendezvous::host(listener, ranks, "g", LIMIT).unwrap();
        std::iter::once(host).chain(members.into_iter().map(|member| member.join().unwrap().unwrap())).collect()
    })
}

#[test]
fn every_rank_gets_every_rank_s_bytes_round_by_round() {
    for ranks in [1, 2, 5] {
        let members = group(ranks);
        std::thread::scope(|scope| {
            for member in &members {
                scope.spawn(move || {
                    for round in 0..100usize {
                        let deposit = |rank: usize| vec![rank as u8; 37 * rank * round % 4000];
                        let got = member.all_gather(&deposit(member.rank()), LIMIT).unwrap();
                        assert_eq!(got, (0..ranks).map(deposit).collect::<Vec<_>>());
                    }
                });
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_join_is_named_to_everybody() {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let member = scope.spawn(move || TcpRendezvous::join(address, 1, 3, "g", SHORT).err());
        let host = TcpRendezvous::host(listener, 3, "g", SHORT).err();
        let want = Some(RendezvousError::Timeout { rank: 0, missing: 2, limit: SHORT });
        assert_eq!((host, member.join().unwrap()), (want.clone(), want));
    });
    // A host that does not come.
    let (unused, address) = self::listener();
    drop(unused);
    let start = Instant::now();
    let alone = TcpRendezvous::join(address, 1, 2, "g", SHORT).err();
    assert_eq!(alone, Some(RendezvousError::Timeout { rank: 1, missing: 0, limit: SHORT }));
    assert!(start.elapsed() < LIMIT);
    // Or that accepts, and says nothing.
    let (_silent, address) = self::listener();
    let alone = TcpRendezvous::join(address, 1, 2, "g", SHORT).err();
    assert_eq!(alone, Some(RendezvousError::Timeout { rank: 1, missing: 0, limit: SHORT }));
}

#[test]
fn a_rank_that_does_not_come_to_a_round_is_named_to_everybody() {
    let members = group(3);
    std::thread::scope(|scope| {
        let calls = [0, 2].map(|rank| {
            let member = &members[rank];
            scope.spawn(move || member.all_gather(&[], SHORT).unwrap_err())
        });
        let want = RendezvousError::Timeout { rank: 0, missing: 1, limit: SHORT };
        assert_eq!(calls.map(|call| call.join().unwrap()), [want.clone(), want.clone()]);
        // The late one learns it too, and so does every later call.
        assert_eq!(members[1].all_gather(&[], LIMIT).unwrap_err(), want);
        assert_eq!(members[0].all_gather(&[], LIMIT).unwrap_err(), want);
    });
    // The host itself does not come.
    let members = group(2);
    let alone = members[1].all_gather(&[], SHORT).unwrap_err();
    assert_eq!(alone, RendezvousError::Timeout { rank: 1, missing: 0, limit: SHORT });
    assert!(matches!(members[0].all_gather(&[], LIMIT).unwrap_err(), RendezvousError::Lost { peer: 1, .. }));
}

#[test]
fn a_rank_whose_process_ends_is_named_at_once() {
    let mut members = group(3);
    drop(members.remove(1));
    let start = Instant::now();
    let errors: Vec<_> = std::thread::scope(|scope| {
        let calls: Vec<_> =
            members.iter().map(|member| scope.spawn(move || member.all_gather(&[], LIMIT).unwrap_err())).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    assert!(errors.iter().all(|error| matches!(error, RendezvousError::Lost { peer: 1, .. })), "{errors:?}");
    assert!(start.elapsed() < LIMIT / 2);
    let mut members = group(2);
    drop(members.remove(0));
    assert!(matches!(members[0].all_gather(&[], LIMIT).unwrap_err(), RendezvousError::Lost { peer: 0, .. }));
}

/// What host and joining rank say when `rank` of `ranks` comes to the group "g" of 3 after rank 1 has.
fn intruder(rank: usize, ranks: usize, name: &'static str) -> [Option<RendezvousError>; 2] {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || TcpRendezvous::join(address, 1, 3, "g", LIMIT).err());
        let second = scope.spawn(move || {
            std::thread::sleep(SHORT);
            TcpRendezvous::join(address, rank, ranks, name, LIMIT).err()
        });
        let host = TcpRendezvous::host(listener, 3, "g", LIMIT).err();
        assert_eq!(first.join().unwrap(), host, "who had joined is told");
        [host, second.join().unwrap()]
    })
}

#[test]
fn ranks_of_another_group_or_size_and_taken_ranks_are_refused_by_name() {
    for (rank, ranks, name, want) in [
        (1, 3, "g", RendezvousError::DuplicateRank { rank: 1 }),
        (2, 4, "g", RendezvousError::WrongSize { rank: 2, found: 4, expected: 3 }),
        (2, 3, "old", RendezvousError::WrongGroup { rank: 2, found: "old".into(), expected: "g".into() }),
    ] {
        assert_eq!(intruder(rank, ranks, name), [Some(want.clone()), Some(want)]);
    }
    let (listener, address) = listener();
    for rank in [0, 3, 7] {
        let refused = TcpRendezvous::join(address, rank, 3, "g", LIMIT).err();
        assert_eq!(refused, Some(RendezvousError::RankOutOfRange { rank, ranks: 3 }));
    }
    assert!(TcpRendezvous::host(listener, 0, "g", LIMIT).is_err());
}

#[test]
fn strangers_do_not_disturb() {
    let (listener, address) = listener();
    let silent = TcpStream::connect(address).unwrap();
    let mut loud = TcpStream::connect(address).unwrap();
    loud.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(TcpStream::connect(address).unwrap());
    std::thread::scope(|scope| {
        let member = scope.spawn(move || TcpRendezvous::join(address, 1, 2, "g", LIMIT).unwrap());
        let host = TcpRendezvous::host(listener, 2, "g", LIMIT).unwrap();
        let member = member.join().unwrap();
        let call = scope.spawn(move || member.all_gather(&[1], LIMIT).unwrap());
        assert_eq!(host.all_gather(&[0], LIMIT).unwrap(), [[0], [1]]);
        assert_eq!(call.join().unwrap(), [[0], [1]]);
    });
    drop(silent);
}

#[test]
fn ranks_out_of_step_are_told_so() {
    let members = group(2);
    members[1].state.lock().round = 5;
    let errors: Vec<_> = std::thread::scope(|scope| {
        let calls: Vec<_> =
            members.iter().map(|member| scope.spawn(move || member.all_gather(&[], LIMIT).unwrap_err())).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    let want = RendezvousError::OutOfStep { peer: 1, ours: 0, theirs: 5 };
    assert_eq!(errors, [want.clone(), want]);
}

#[test]
fn deposits_that_are_too_large_are_refused_by_their_size_on_every_rank() {
    const LIMIT_BYTES: usize = 16 << 20;
    // One rank's alone; the host's alone; all together.
    for sizes in [[0, LIMIT_BYTES, 0], [LIMIT_BYTES, 0, 0], [LIMIT_BYTES / 2 - 100; 3]] {
        let members = group(3);
        let errors: Vec<_> = std::thread::scope(|scope| {
            let calls: Vec<_> = (members.iter().zip(sizes))
                .map(|(member, size)| scope.spawn(move || member.all_gather(&vec![7; size], LIMIT).unwrap_err()))
                .collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        for error in errors {
            let RendezvousError::TooLarge { bytes, limit: LIMIT_BYTES } = error else { panic!("{error:?}") };
            assert!(bytes > LIMIT_BYTES && bytes <= sizes.iter().sum::<usize>() + 100, "{bytes} of {sizes:?}");
        }
    }
    let fits = vec![7; LIMIT_BYTES / 2 - 100];
    let members = group(2);
    std::thread::scope(|scope| {
        for member in &members {
            scope.spawn(|| assert_eq!(member.all_gather(&fits, LIMIT).unwrap(), [&fits[..]; 2]));
        }
    });
}

#[test]
fn verdicts_survive_the_wire() {
    let text = || "text".to_string();
    for error in [
        RendezvousError::Timeout { rank: 1, missing: 2, limit: SHORT },
        RendezvousError::Abandoned { by: 3 },
        RendezvousError::RankOutOfRange { rank: 4, ranks: 2 },
        RendezvousError::DuplicateRank { rank: 5 },
        RendezvousError::WrongSize { rank: 1, found: 2, expected: 3 },
        RendezvousError::WrongGroup { rank: 1, found: text(), expected: String::new() },
        RendezvousError::OutOfStep { peer: 1, ours: u64::MAX, theirs: 0 },
        RendezvousError::Lost { peer: 1, reason: text() },
        RendezvousError::Address { address: text(), reason: text() },
        RendezvousError::TooLarge { bytes: 1 << 25, limit: 1 << 24 },
    ] {
        assert_eq!(decode(&encode(&error)), Some(error));
    }
    assert_eq!(decode(&[0; 7]), None);
    assert_eq!(decode(&[99; 40]), None);
}

#[test]
fn simulated_memory_is_not_shared_between_processes() {
    let members = group(2);
    let devices = Device::simulated_group(gpu::SimConfig { devices: 2, ..Default::default() });
    let errors: Vec<_> = std::thread::scope(|scope| {
        let calls: Vec<_> = (members.iter().zip(&devices))
            .map(|(member, device)| {
                let memory = Arc::new(device.alloc_zeros(4).unwrap());
                scope.spawn(move || member.share(device, memory, LIMIT).unwrap_err())
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    for error in errors {
        let DcpError::PeerUnmappable { rank: 0, peer: 0, reason } = &error else { panic!("{error:?}") };
        assert!(reason.contains("simulator"), "{reason}");
    }
}
