//! Steps of several ranks at once, and the link between two of them.

use std::time::Duration;

use gpu::nccl::{Communicator, UniqueId};
use gpu::{Buffer, Device, Function, Graph, LaunchConfig, Stream};

use crate::common::{Report, Result, in_turn};
use crate::link::{self, GatherArgs, PingPongArgs, PushArgs};
use crate::rig::{Rank, Rig, Spec};

/// Steps in one graph: enough that the ranks' different starts do not show.
const STEPS: usize = 200;
/// How long NCCL may take to come together.
const NCCL_LIMIT: Duration = Duration::from_secs(30);

/// Ranks, and what else moves their rows.
pub struct Group {
    rig: Rig,
    bare: Vec<Bare>,
    nccl: Option<Vec<Nccl>>,
}

/// A rank's LL all-gather and nothing else.
struct Bare {
    function: Function<GatherArgs>,
    memory: Buffer<u64>,
    peers: Buffer<u64>,
    epochs: Buffer<u32>,
    out: Buffer<u32>,
}

struct Nccl {
    communicator: Communicator,
    gathered: Buffer<u32>,
}

impl Bare {
    /// One per device, with each other's addresses.
    fn on(devices: &[Device], ranks: usize, rows: usize, words: usize) -> Result<Vec<Bare>> {
        for (a, b) in devices.iter().flat_map(|a| devices.iter().map(move |b| (a, b))) {
            if !a.same(b) {
                a.peer_access(b)?;
            }
        }
        let device = |rank: usize| &devices[rank % devices.len()];
        let memories: Vec<Buffer<u64>> =
            (0..ranks).map(|rank| device(rank).alloc_zeros(2 * ranks * rows * words)).collect::<Result<_, _>>()?;
        let addresses: Vec<u64> = memories.iter().map(|memory| memory.ptr().address()).collect();
        memories
            .into_iter()
            .enumerate()
            .map(|(rank, memory)| {
                let device = device(rank);
                Ok(Bare {
                    function: link::gather(device, ranks as u32, words as u32)?,
                    memory,
                    peers: device.upload(&addresses)?,
                    epochs: device.alloc_zeros(rows)?,
                    out: device.alloc(ranks * rows * words)?,
                })
            })
            .collect()
    }

    fn launch(&self, rows: &Buffer<u32>, rank: usize, stream: &Stream) -> Result<(), gpu::Error> {
        let slot_rows = self.epochs.len() as u32;
        let args = GatherArgs {
            out: self.out.ptr(),
            rows: rows.ptr(),
            memory: self.memory.ptr(),
            peers: self.peers.ptr(),
            epochs: self.epochs.ptr(),
            rank: rank as u32,
            slot_rows,
        };
        self.function.launch(stream, LaunchConfig::new(slot_rows).overlap(true), &args)
    }
}

impl Group {
    pub fn new(devices: &[Device], spec: Spec) -> Result<Group> {
        let rig = Rig::new(devices, spec)?;
        let words = spec.exchange()?.sent().words();
        let bare = Bare::on(devices, spec.ranks, spec.rows, words)?;
        // NCCL demands a device per rank.
        let nccl = if devices.len() == spec.ranks { join_nccl(&rig, words)? } else { None };
        Ok(Group { rig, bare, nccl })
    }

    /// A graph of `STEPS` per rank.
    fn graphs(&self, step: impl Fn(usize, usize, &Stream) -> Result<()>) -> Result<Vec<Graph>> {
        (0..self.rig.ranks.len())
            .map(|r| {
                let mut failed = None;
                let graph = Graph::capture(&self.rig.ranks[r].stream, |stream| {
                    failed = (0..STEPS).try_for_each(|i| step(r, i, stream)).err();
                    Ok(())
                });
                match failed {
                    Some(error) => Err(error),
                    None => Ok(graph?),
                }
            })
            .collect()
    }

    /// Microseconds of a step when every rank runs its graph, by rank 0's clock.
    fn once(&self, graphs: &[Graph]) -> Result<f64> {
        let first = &self.rig.ranks[0].stream;
        let (start, end) = (first.device().event()?, first.device().event()?);
        start.record(first)?;
        for (graph, rank) in graphs.iter().zip(&self.rig.ranks) {
            graph.launch(&rank.stream)?;
        }
        end.record(first)?;
        self.rig.ranks.iter().try_for_each(|rank| rank.stream.synchronize())?;
        let ms = start.elapsed_ms(&end)?.ok_or("the device's events carry no time")?;
        Ok(f64::from(ms) * 1e3 / STEPS as f64)
    }

    /// Times a step in turn with its parts and its rivals.
    pub fn bench(&self, report: &mut Report, samples: usize) -> Result<()> {
        let Group { rig, bare, nccl } = self;
        let (spec, ranks) = (rig.spec, &rig.ranks);
        rig.run_checked()?;
        self.check_bare()?;
        let step = self.graphs(|r, _, stream| {
            ranks[r].launch_push(stream)?;
            Ok(ranks[r].launch_merge(spec, stream)?)
        })?;
        let local = self.graphs(|r, _, stream| Ok(ranks[r].launch_quiet(stream)?))?;
        let gather = self.graphs(|r, _, stream| Ok(bare[r].launch(&ranks[r].b_rows, r, stream)?))?;
        let again = ranks.iter().map(|rank| rank.merges_again(spec, STEPS, false)).collect::<Result<Vec<_>>>()?;
        let rival = match nccl {
            None => None,
            Some(nccl) => Some(self.graphs(|r, i, stream| {
                ranks[r].launch_quiet(stream)?;
                nccl[r].gather(&ranks[r], stream)?;
                match spec.exchange()?.is_direct() {
                    // As the gathered exchange does it.
                    true => ranks[r].launch_gathered(spec, &nccl[r].gathered, stream),
                    false => Ok(again[r].launch(i, stream)?),
                }
            })?),
        };
        let mut variants: Vec<Box<dyn Fn() -> Result<f64> + '_>> =
            [&step, &local, &gather].map(|graphs| Box::new(move || self.once(graphs)) as Box<dyn Fn() -> _>).into();
        if let Some(rival) = &rival {
            variants.push(Box::new(|| {
                again.iter().try_for_each(|again| again.prepare())?;
                self.once(rival)
            }));
        }
        let variants: Vec<&dyn Fn() -> Result<f64>> = variants.iter().map(|variant| variant.as_ref()).collect();
        ranks.iter().try_for_each(Rank::poison)?;
        let timed = in_turn(samples, &variants)?;
        rig.check()?;
        self.check_bare()?;
        if let Some(nccl) = nccl {
            nccl.iter().zip(ranks).try_for_each(|(nccl, rank)| nccl.check(ranks, rank))?;
        }

        let label = spec.label();
        let [step, local, gather] = [0, 1, 2].map(|i| timed[i].median());
        report.number(&format!("step           {label}"), step, "us");
        report.number(&format!("exchange+merge {label}"), step - local, "us");
        report.number(&format!("bare LL gather {label}"), gather, "us");
        report.number(&format!("  gather/both  {label}"), gather / (step - local), "of exchange + merge");
        if let Some(rival) = timed.get(3) {
            let rival = rival.median();
            report.number(&format!("NCCL step      {label}"), rival, "us");
            report.number(&format!("NCCL+merge     {label}"), rival - local, "us");
            report.number(&format!("  ours/NCCL's  {label}"), (step - local) / (rival - local), "of NCCL + merge");
        }
        Ok(())
    }

    /// A bare gather of every rank, its answer checked.
    fn check_bare(&self) -> Result<()> {
        let ranks = &self.rig.ranks;
        for ((r, rank), bare) in ranks.iter().enumerate().zip(&self.bare) {
            bare.out.fill_bytes(&rank.stream, 0xA5)?;
            bare.launch(&rank.b_rows, r, &rank.stream)?;
        }
        let want = all_rows(ranks)?;
        for (rank, bare) in ranks.iter().zip(&self.bare) {
            if bare.out.copy_to_vec(&rank.stream)? != want {
                return Err("the bare gather lost words".into());
            }
        }
        Ok(())
    }
}

/// Every rank's B' rows, rank after rank.
fn all_rows(ranks: &[Rank]) -> Result<Vec<u32>> {
    let rows = ranks.iter().map(|rank| rank.b_rows.copy_to_vec(&rank.stream)).collect::<Result<Vec<_>, _>>()?;
    Ok(rows.concat())
}

impl Nccl {
    fn gather(&self, rank: &Rank, stream: &Stream) -> Result<(), gpu::Error> {
        self.communicator.all_gather(stream, &rank.b_rows.as_view(), &self.gathered.as_view())
    }

    fn check(&self, ranks: &[Rank], rank: &Rank) -> Result<()> {
        match self.gathered.copy_to_vec(&rank.stream)? == all_rows(ranks)? {
            true => Ok(()),
            false => Err("NCCL's gather differs from the rows".into()),
        }
    }
}

/// A communicator per rank, after one gather; `None`, with a word why, where there is no NCCL.
fn join_nccl(rig: &Rig, words: usize) -> Result<Option<Vec<Nccl>>> {
    let id = match UniqueId::new() {
        Ok(id) => id,
        Err(error) => {
            println!("without NCCL: {error}");
            return Ok(None);
        }
    };
    let (ranks, spec) = (&rig.ranks, rig.spec);
    let joined = std::thread::scope(|scope| {
        let threads: Vec<_> = (ranks.iter().enumerate())
            .map(|(r, rank)| {
                scope.spawn(move || -> Result<Nccl, gpu::Error> {
                    let device = rank.stream.device();
                    let nccl = Nccl {
                        communicator: Communicator::new(device, &id, r, spec.ranks, NCCL_LIMIT)?,
                        gathered: device.alloc(spec.ranks * spec.rows * words)?,
                    };
                    nccl.gather(rank, &rank.stream)?;
                    rank.stream.synchronize()?;
                    Ok(nccl)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect::<Result<Vec<_>, _>>()
    })?;
    Ok(Some(joined))
}

/// Two ends of a link: on two GPUs if there are two.
struct Ends {
    streams: [Stream; 2],
    words: [Buffer<u64>; 2],
    elapsed: [Buffer<u64>; 2],
    ping_pong: [Function<PingPongArgs>; 2],
}

impl Ends {
    fn new(devices: &[Device]) -> Result<Ends> {
        let ends = [&devices[0], &devices[devices.len().min(2) - 1]];
        if !ends[0].same(ends[1]) {
            ends[0].peer_access(ends[1])?;
            ends[1].peer_access(ends[0])?;
        }
        let [a, b] = ends;
        Ok(Ends {
            streams: [a.stream()?, b.stream()?],
            words: [a.alloc_zeros(1)?, b.alloc_zeros(1)?],
            elapsed: [a.alloc_zeros(1)?, b.alloc_zeros(1)?],
            ping_pong: [link::ping_pong(a)?, link::ping_pong(b)?],
        })
    }

    /// Nanoseconds from one end to the other.
    fn hop_ns(&self, rounds: u32) -> Result<f64> {
        for (words, stream) in self.words.iter().zip(&self.streams) {
            words.fill_bytes(stream, 0)?;
            stream.synchronize()?;
        }
        for end in [1, 0] {
            let args = PingPongArgs {
                mine: self.words[end].ptr(),
                theirs: self.words[1 - end].ptr(),
                rounds,
                second: end as u32,
                elapsed: self.elapsed[end].ptr(),
            };
            self.ping_pong[end].launch(&self.streams[end], LaunchConfig::new(1), &args)?;
        }
        self.streams.iter().try_for_each(Stream::synchronize)?;
        let last = u64::from(rounds) << 32 | u64::from(rounds);
        for (words, stream) in self.words.iter().zip(&self.streams) {
            if words.copy_to_vec(stream)?[0] != last {
                return Err("the ping-pong ended early".into());
            }
        }
        let ns = self.elapsed[0].copy_to_vec(&self.streams[0])?[0];
        Ok(ns as f64 / (2.0 * f64::from(rounds)))
    }
}

/// A few round trips.
pub fn check_link(devices: &[Device]) -> Result<()> {
    Ends::new(devices)?.hop_ns(5).map(|_| ())
}

/// Latency and push bandwidth from rank 0 to rank 1.
pub fn link(devices: &[Device], report: &mut Report, samples: usize) -> Result<()> {
    const ROUNDS: u32 = 2000;
    const PAIRS: usize = 132 * link::THREADS as usize * 64;
    const PUSHES: usize = 8;
    let ends = Ends::new(devices)?;
    let hops = in_turn(samples, &[&|| ends.hop_ns(ROUNDS)])?;
    let between = if devices.len() > 1 { "NVLink" } else { "one GPU" };
    report.number(&format!("LL ping-pong, {between}"), hops[0].median(), "ns per hop");

    let (device, to) = (&devices[0], &devices[devices.len().min(2) - 1]);
    let push = link::push(device)?;
    let target = to.alloc::<u64>(2 * PAIRS)?;
    let args = PushArgs { theirs: target.ptr(), pairs: PAIRS as u32, threads: 132 * link::THREADS };
    let graph = Graph::capture(&ends.streams[0], |stream| {
        (0..PUSHES).try_for_each(|_| push.launch(stream, LaunchConfig::new(132).overlap(true), &args))
    })?;
    let timed = in_turn(samples, &[&|| crate::common::graph_us(&ends.streams[0], &graph, PUSHES)])?;
    let sent = target.copy_to_vec(&ends.streams[1])?;
    if sent.chunks(2).enumerate().any(|(i, pair)| pair != [1 << 32 | i as u64; 2]) {
        return Err("the push lost pairs".into());
    }
    let gb_per_s = (16 * PAIRS) as f64 / timed[0].median() / 1e3;
    report.number(&format!("LL push, {between}, words and epochs"), gb_per_s, "GB/s");
    Ok(())
}
