//! `index --dcp`: the step with its contexts spread over ranks, held to the same step on one.

mod rank;

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use clap::ValueEnum;
use dsa_core::oracle::merge::owned_rows;
use dsa_core::{DecodeStep, Ownership};
use dsa_dcp::rendezvous::in_process;
use dsa_dcp::{Rounds, recommended_local_topk};
use gpu::{Device, Stream};
use kimi_decode::Transport;
use kimi_decode::check::Answer;
use kimi_decode::step_file::StepFile;
use safetensors::Dtype;

use super::device_step::StepTime;
use crate::cli::Failure;
use crate::cli::output::Tensor;
use rank::Rank;

/// How candidates get from rank to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// Every rank writes into every other's memory
    Push,
    /// By an all-gather
    Gather,
}

/// How a step is spread.
#[derive(Debug, Clone, Copy)]
pub struct Sharding {
    /// The dealing of tokens.
    pub own: Ownership,
    /// Keys that each rank sends of a row.
    pub local_topk: usize,
    /// The only transport to use.
    pub transport: Option<Transport>,
}

/// Ranks that share a GPU have a launch queue each; it has as many by default.
const RANKS_PER_GPU: usize = 8;

impl Sharding {
    /// From the arguments.
    pub fn new(
        step: &DecodeStep,
        ranks: usize,
        interleave: Option<usize>,
        topn: Option<usize>,
        transport: Option<TransportArg>,
    ) -> Result<Self, Failure> {
        let unusable = |argument: &str, error: dsa_core::ShapeError| Failure::Unusable(format!("{argument}: {error}"));
        let own = Ownership::new(ranks, 1).map_err(|error| unusable("--dcp", error))?;
        let own =
            Ownership::new(own.ranks(), interleave.unwrap_or(1)).map_err(|error| unusable("--interleave", error))?;
        own.local_len_max(step.context_len_max).map_err(|error| unusable("--dcp", error))?;
        let multiple = dsa_core::consts::TOPK_MULTIPLE;
        let largest = (step.topk - 1) / multiple * multiple;
        if largest == 0 {
            let topk = step.topk;
            return Err(Failure::Unusable(format!(
                "--dcp: top-k {topk} leaves no local top-N: a multiple of {multiple} below it is needed"
            )));
        }
        let local_topk = match topn {
            Some(n) => n,
            None => recommended_local_topk(ranks, step.topk).map_err(|error| unusable("--dcp", error))?,
        };
        if local_topk == 0 || !local_topk.is_multiple_of(multiple) || local_topk > largest {
            return Err(Failure::Unusable(format!(
                "--topn: found {local_topk}, needed a multiple of {multiple} in {multiple}..={largest}, below the step's top-k"
            )));
        }
        let transport = transport.map(|transport| match transport {
            TransportArg::Push => Transport::Push,
            TransportArg::Gather => Transport::Gather,
        });
        Ok(Sharding { own, local_topk, transport })
    }

    /// The same with a transport that does not let ranks wait for others that cannot start: on a GPU, a merge that waits
    /// holds its multiprocessors.
    fn placed(self, devices: &[Device], rows: usize) -> Result<Self, Failure> {
        let mut busiest = None;
        for device in devices.iter().filter(|device| !device.info().simulated) {
            let sharing = devices.iter().filter(|other| device.same(other)).count();
            let sms = device.info().sms as usize;
            if sharing > 1 && (sharing > RANKS_PER_GPU || sharing * rows > sms) {
                busiest = Some((sharing, sms));
            }
        }
        let Some((sharing, sms)) = busiest else { return Ok(self) };
        match self.transport {
            Some(Transport::Push) => Err(Failure::Unusable(format!(
                "--transport push: {sharing} ranks of {rows} rows cannot wait for each other on one GPU of {sms} \
                 multiprocessors, at most {RANKS_PER_GPU} ranks and {sms} rows in all can: use gather"
            ))),
            _ => Ok(Sharding { transport: Some(Transport::Gather), ..self }),
        }
    }
}

/// What the ranks selected.
pub struct DcpAnswer {
    /// `[rank][rows, topk]`: selected ids, -1 past the count.
    ids: Vec<Vec<i32>>,
    /// `[rank][rows, topk]`: physical rows of those that the rank owns, -1 past their count.
    rows: Vec<Vec<i32>>,
    /// `[rank][rows]`: how many.
    counts: Vec<Vec<i32>>,
    /// BF16 logits of all ranks put together: row `t` has as many as it sees keys.
    logits: Vec<Vec<u16>>,
    sharding: Sharding,
    transport: Option<Transport>,
    rounds: Rounds,
    /// What the step took.
    pub time: StepTime,
}

/// Runs the step with a rank on each of `devices`.
pub fn launch(devices: &[Device], file: &StepFile, sharding: Sharding) -> Result<DcpAnswer, Failure> {
    let sharding = sharding.placed(devices, file.step.rows)?;
    let members: Vec<_> = in_process(devices.len()).into_iter().map(Arc::new).collect();
    let ranks = on_every(devices, |rank, device| Rank::new(device, members[rank].clone(), file, sharding))?;
    let transport = if file.step.rows > 0 { Some(ranks[0].transport()?) } else { None };

    let start = Instant::now();
    match transport {
        // A gather waits for the other ranks' threads.
        Some(Transport::Gather) => on_every(&ranks, |_, rank| rank.push())?.into_iter().for_each(drop),
        // Ranks may share a device: nobody waits before all have pushed.
        Some(Transport::Push) => ranks.iter().try_for_each(Rank::push)?,
        None => {}
    }
    if transport.is_some() {
        ranks.iter().try_for_each(Rank::merge)?;
        check_all(&ranks)?;
    }
    let mut time = StepTime::Simulator(start.elapsed());
    if !devices[0].info().simulated {
        time = match transport {
            Some(Transport::Push) => StepTime::Device(rank::replay_time(&ranks)?),
            // Its waits are the host's.
            _ => StepTime::Device(start.elapsed()),
        };
    }
    collect(&ranks, file, sharding, transport, time)
}

/// What a rank enqueues around its part of the step.
pub trait Around: Sync {
    /// Before it.
    fn first(&self, rank: usize, stream: &Stream) -> Result<(), Failure>;
    /// After it.
    fn last(&self, rank: usize, stream: &Stream) -> Result<(), Failure>;
}

/// As [`launch`], with what is `around` the step in the same graph of each rank.
pub fn launch_around(
    devices: &[Device],
    file: &StepFile,
    sharding: Sharding,
    around: &impl Around,
) -> Result<DcpAnswer, Failure> {
    let sharding = sharding.placed(devices, file.step.rows)?;
    let members: Vec<_> = in_process(devices.len()).into_iter().map(Arc::new).collect();
    let ranks = on_every(devices, |rank, device| Rank::new(device, members[rank].clone(), file, sharding))?;
    let transport = ranks[0].transport()?;
    if transport != Transport::Push {
        let needed = "one captured sequence needs ranks that write into each other's memory";
        return Err(Failure::Unusable(format!("--dcp: {needed}, these ranks gather on the host")));
    }
    let capture =
        |(at, rank): (usize, &Rank)| rank.capture(|stream| around.first(at, stream), |stream| around.last(at, stream));
    let graphs = ranks.iter().enumerate().map(capture).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    ranks.iter().zip(&graphs).try_for_each(|(rank, graph)| rank.replay(graph))?;
    check_all(&ranks)?;
    let time = match devices[0].info().simulated {
        true => StepTime::Simulator(start.elapsed()),
        false => StepTime::Device(rank::replay_time_of(&ranks, &graphs)?),
    };
    collect(&ranks, file, sharding, Some(transport), time)
}

/// What the ranks' last step left.
fn collect(
    ranks: &[Rank],
    file: &StepFile,
    sharding: Sharding,
    transport: Option<Transport>,
    time: StepTime,
) -> Result<DcpAnswer, Failure> {
    let own = sharding.own;
    let logits = ranks.iter().map(Rank::logits).collect::<Result<Vec<_>, _>>()?;
    let row = |row: usize| {
        let logit = |id: usize| logits[own.rank_of(id)][row][own.local_of(id)];
        (0..file.step.row_len(row)).map(logit).collect()
    };
    let outputs = ranks.iter().map(Rank::outputs).collect::<Result<Vec<_>, _>>()?;
    let [ids, rows, counts] = [0, 1, 2].map(|which| outputs.iter().map(|outputs| outputs[which].clone()).collect());
    Ok(DcpAnswer {
        ids,
        rows,
        counts,
        logits: (0..file.step.rows).map(row).collect(),
        sharding,
        transport,
        rounds: ranks[0].rounds(),
        time,
    })
}

/// `body` for every rank at once, each in a thread of its own.
fn on_every<T: Sync, R: Send>(
    all: &[T],
    body: impl Fn(usize, &T) -> Result<R, Failure> + Sync,
) -> Result<Vec<R>, Failure> {
    let results: Vec<Result<R, Failure>> = std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = all.iter().enumerate().map(|(rank, one)| scope.spawn(move || body(rank, one))).collect();
        threads.into_iter().map(|thread| thread.join().expect("the thread's panic was reported")).collect()
    });
    all_or_cause(results)
}

/// What every rank has, or why one failed: rather a rank's own failure than that it waited in vain for another.
fn all_or_cause<R>(results: Vec<Result<R, Failure>>) -> Result<Vec<R>, Failure> {
    let is_cause = |result: &Result<R, Failure>| !matches!(result, Ok(_) | Err(Failure::RankLate(_)));
    let cause = results.iter().position(is_cause);
    match cause {
        Some(rank) => results.into_iter().skip(rank).take(1).collect(),
        None => results.into_iter().collect(),
    }
}

/// Waits for every rank's step.
fn check_all(ranks: &[Rank]) -> Result<(), Failure> {
    all_or_cause(ranks.iter().map(Rank::check).collect()).map(drop)
}

impl DcpAnswer {
    /// Compares with the same step on one rank: logits and ids are equal on every rank, each rank's rows are those of its own
    /// ids, and all counts together are the row's.
    pub fn check(&self, step: &DecodeStep, whole: &Answer) -> Result<(), String> {
        let (own, topk) = (self.sharding.own, step.topk);
        for (row, (got, want)) in self.logits.iter().zip(&whole.logits).enumerate() {
            if let Some(key) = (0..want.len()).find(|&key| got[key] != want[key]) {
                let (rank, got, want) = (own.rank_of(key), got[key], want[key]);
                return Err(format!("row {row} key {key}: rank {rank} scored {got:#06x}, one rank alone {want:#06x}"));
            }
        }
        for (rank, (ids, (rows, counts))) in self.ids.iter().zip(self.rows.iter().zip(&self.counts)).enumerate() {
            if let Some(at) = (0..whole.ids.len()).find(|&at| ids[at] != whole.ids[at]) {
                let (row, slot, got, want) = (at / topk, at % topk, ids[at], whole.ids[at]);
                return Err(format!("row {row} slot {slot}: rank {rank} selected id {got}, one rank alone {want}"));
            }
            for row in 0..step.rows {
                let selected = &whole.ids[row * topk..][..whole.counts[row] as usize];
                let selected: Vec<usize> = selected.iter().map(|&id| id as usize).collect();
                let table = step.kv_table_row(row / step.q);
                let physical = |local: usize| {
                    table[local / step.kv_page] * step.kv_block_rows as i32 + (local % step.kv_page) as i32
                };
                let mut want = owned_rows(&selected, rank, own, physical);
                if counts[row] as usize != want.len() {
                    let (got, want) = (counts[row], want.len());
                    return Err(format!("row {row}: rank {rank} counts {got} rows, it owns {want} of the ids"));
                }
                want.resize(topk, -1);
                let got = &rows[row * topk..][..topk];
                if let Some(slot) = (0..topk).find(|&slot| got[slot] != want[slot]) {
                    let (got, want) = (got[slot], want[slot]);
                    return Err(format!("row {row} slot {slot}: rank {rank} wrote row {got}, its own ids' is {want}"));
                }
            }
        }
        Ok(())
    }

    /// The tensors to write: `ids` `[rows, topk]`, and of each rank R `rows.R` `[rows, topk]` and `counts.R` `[rows]` (I32).
    pub fn tensors(&self, step: &DecodeStep) -> Vec<Tensor<String>> {
        let i32s = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let slots = vec![step.rows, step.topk];
        let mut tensors = vec![("ids".to_string(), Dtype::I32, slots.clone(), i32s(&self.ids[0]))];
        for (rank, (rows, counts)) in self.rows.iter().zip(&self.counts).enumerate() {
            tensors.push((format!("rows.{rank}"), Dtype::I32, slots.clone(), i32s(rows)));
            tensors.push((format!("counts.{rank}"), Dtype::I32, vec![step.rows], i32s(counts)));
        }
        tensors
    }

    /// How the step was spread, and that it makes no difference.
    pub fn print(&self, stdout: &mut impl Write) -> Result<(), Failure> {
        let Sharding { own, local_topk, .. } = self.sharding;
        let transport = match self.transport {
            Some(Transport::Push) => "pushed to every rank",
            Some(Transport::Gather) => "gathered",
            None => "nothing to exchange",
        };
        writeln!(
            stdout,
            "ranks       {}, tokens dealt {} at a time, local top-{local_topk}, {transport}",
            own.ranks(),
            own.interleave()
        )?;
        writeln!(stdout, "rounds      {}", self.rounds)?;
        writeln!(
            stdout,
            "exact       every rank's ids, and all logits, equal those of one rank alone; its rows are those of its own ids"
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(results: Vec<Result<usize, Failure>>) -> String {
        match all_or_cause(results) {
            Err(Failure::Unusable(line) | Failure::RankLate(line) | Failure::Mismatch(line)) => line,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_rank_s_own_failure_is_reported_rather_than_those_that_waited_for_it() {
        let late = |rank: usize| Err(Failure::RankLate(format!("rank {rank} waited in vain")));
        let cause = || Err(Failure::Unusable("no memory".into()));
        assert_eq!(failed(vec![late(0), late(1), cause(), late(3)]), "no memory");
        assert_eq!(failed(vec![Ok(0), late(1), late(2)]), "rank 1 waited in vain");
        assert_eq!(failed(vec![cause(), Ok(1)]), "no memory");
        assert_eq!(all_or_cause(vec![Ok(4), Ok(5)]).unwrap(), [4, 5]);
    }

    #[test]
    fn what_waited_in_vain_is_told_from_what_failed() {
        use dsa_dcp::{DcpError, RendezvousError};
        let failure = |error: DcpError| Failure::from(kimi_decode::Error::from(error));
        let timeout = RendezvousError::Timeout { rank: 0, missing: 1, limit: std::time::Duration::from_secs(1) };
        assert!(matches!(failure(timeout.into()), Failure::RankLate(_)));
        assert!(matches!(failure(RendezvousError::Abandoned { by: 1 }.into()), Failure::RankLate(_)));
        assert!(matches!(failure(DcpError::RowsOutOfRange { rows: 0, max: 1 }), Failure::Unusable(_)));
    }
}
