//! All-gathers over NCCL, and machines without it. Every case of a library runs in a process whose library path starts
//! with that case's `libnccl.so.2`.
#![cfg(target_os = "linux")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;
use gpu::nccl::{self, Communicator, UniqueId};
use gpu::{Device, Error, Graph, SimConfig};

const CHILD: &str = "GPU_TEST_NCCL_CASE";
const LIMIT: Duration = Duration::from_secs(60);

/// Not a test of its own: what a child process does.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let error = nccl::version().unwrap_err();
    let kind = matches!(error, Error::NoNccl { .. });
    println!("ERROR {kind}: {error}");
    // Asking again, or for anything else, gives the same answer.
    assert_eq!(UniqueId::new().unwrap_err().to_string(), error.to_string());
}

/// A library with `symbols`, of version `level`; `None` without a compiler.
fn library(case: &str, symbols: &[&str], level: i32) -> Option<PathBuf> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{case}"));
    std::fs::create_dir_all(&directory).unwrap();
    let mut source = String::new();
    for name in symbols {
        let body = match *name {
            "ncclGetVersion" => format!("(level: *mut i32) -> i32 {{ unsafe {{ *level = {level} }}; 0 }}"),
            _ => "() -> i32 { 0 }".to_string(),
        };
        source += &format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}{body}\n");
    }
    let file = directory.join("libnccl.rs");
    std::fs::write(&file, source).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-o"]);
    let built = command.arg(directory.join("libnccl.so.2")).arg(&file).status();
    match built {
        Ok(status) => {
            assert!(status.success(), "the stand-in library must compile");
            Some(directory)
        }
        Err(error) => {
            eprintln!("SKIPPED: no rustc to make a stand-in library with ({error})");
            None
        }
    }
}

fn run_child(directory: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, "1").env("LD_LIBRARY_PATH", directory);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    printed.lines().find(|line| line.contains("ERROR ")).unwrap_or_default().to_string()
}

#[test]
fn a_library_that_is_too_old_or_lacks_a_function_is_a_typed_error() {
    let Some(old) = library("old", &["ncclGetVersion"], 21_703) else { return };
    let found = run_child(&old);
    assert!(found.contains("ERROR true") && found.contains("level 21703") && found.contains("2.18"), "{found}");
    let partial = library("partial", &["ncclGetVersion", "ncclGetUniqueId"], 22_203).unwrap();
    let found = run_child(&partial);
    assert!(found.contains("ERROR true") && found.contains("no ncclCommInitRankConfig"), "{found}");
}

#[test]
fn a_machine_without_the_library_is_a_typed_error() {
    let Err(error) = nccl::version() else {
        eprintln!("SKIPPED: there is an NCCL library here");
        return;
    };
    assert!(matches!(&error, Error::NoNccl { .. }) && error.to_string().contains("libnccl.so.2"), "{error}");
}

#[test]
fn the_simulator_has_no_nccl() {
    let device = Device::simulated(SimConfig::default());
    let id = UniqueId::from_bytes(&[0; UniqueId::BYTES]).unwrap();
    let error = Communicator::new(&device, &id, 0, 1, LIMIT).unwrap_err();
    assert!(matches!(error, Error::NotSimulated { .. }), "{error}");
}

/// CUDA device 0, if there is also an NCCL library.
fn cuda_and_nccl() -> Option<Device> {
    let device = cuda()?;
    match nccl::version() {
        Ok(version) => println!("NCCL {version}"),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return None;
        }
    }
    Some(device)
}

/// What rank `rank` sends in round `round`.
fn words(rank: usize, round: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ (rank as u32 * 7 + round)).collect()
}

/// Gathers as one rank, eagerly and captured.
fn gather(device: &Device, communicator: &Communicator) {
    let (rank, ranks) = (communicator.rank(), communicator.ranks());
    let stream = device.stream().unwrap();
    for len in [1, 132, 40_000] {
        let sent = device.alloc_zeros::<u32>(len).unwrap();
        let received = device.alloc_zeros::<u32>(len * ranks).unwrap();
        let put = |round| sent.copy_from(&stream, &words(rank, round, len)).unwrap();
        let check = |round| {
            let want: Vec<u32> = (0..ranks).flat_map(|rank| words(rank, round, len)).collect();
            assert_eq!(received.copy_to_vec(&stream).unwrap(), want, "rank {rank}, {len} words, round {round}");
        };
        put(0);
        communicator.all_gather(&stream, &sent.as_view(), &received.as_view()).unwrap();
        check(0);
        let graph =
            Graph::capture(&stream, |stream| communicator.all_gather(stream, &sent.as_view(), &received.as_view()));
        let graph = graph.unwrap();
        for round in 1..4 {
            put(round);
            graph.launch(&stream).unwrap();
            check(round);
        }
        communicator.check().unwrap();
    }
    let (one, two) = (device.alloc_zeros::<u32>(1).unwrap(), device.alloc_zeros::<u32>(2 * ranks).unwrap());
    let error = communicator.all_gather(&stream, &one.as_view(), &two.as_view()).unwrap_err();
    assert!(matches!(error, Error::SizeMismatch { .. }), "{error}");
}

#[test]
fn one_rank_gathers_its_own() {
    let Some(device) = cuda_and_nccl() else { return };
    let communicator = Communicator::new(&device, &UniqueId::new().unwrap(), 0, 1, LIMIT).unwrap();
    gather(&device, &communicator);
}

#[test]
fn two_devices_gather_each_other_s() {
    if cuda_and_nccl().is_none() {
        return;
    }
    if Device::cuda_count().unwrap() < 2 {
        eprintln!("SKIPPED: two CUDA devices needed, one found");
        return;
    }
    let id = UniqueId::new().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let device = Device::cuda(rank).unwrap();
                gather(&device, &Communicator::new(&device, &id, rank, 2, LIMIT).unwrap());
            });
        }
    });
}

#[test]
fn a_rank_that_never_joins_is_not_waited_for_for_ever() {
    let Some(device) = cuda_and_nccl() else { return };
    let (start, limit) = (Instant::now(), Duration::from_millis(700));
    let error = Communicator::new(&device, &UniqueId::new().unwrap(), 0, 2, limit).unwrap_err();
    assert!(matches!(error, Error::NcclTimeout { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    // The device is none the worse.
    device.upload(&[1u32]).unwrap();
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let Some(device) = cuda_and_nccl() else { return };
    let id = UniqueId::new().unwrap();
    let results: Vec<_> = std::thread::scope(|scope| {
        let join = |rank| {
            let device = device.clone();
            scope.spawn(move || Communicator::new(&device, &id, rank, 2, Duration::from_secs(20)).map(drop))
        };
        [join(0), join(1)].into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(
        results.iter().all(|result| matches!(result, Err(Error::Nccl { .. } | Error::NcclTimeout { .. }))),
        "{results:?}"
    );
}
