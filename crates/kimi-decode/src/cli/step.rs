//! `step`: a layer's whole decode step of a step file as one captured sequence, checked against its answers.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use dsa_core::oracle::step;
use gpu::{Device, Graph, Stream, View};
use kimi_decode::check::query::{QueryAnswer, check_query};
use kimi_decode::check::{self, Answer};
use kimi_decode::step_file::StepFile;
use kimi_decode::step_file::query::QueryFile;
use kimi_decode::{DecodeLayer, Error, FusedIndexer, IndexerConfig, IndexerScratch};
use mla_query::MlaShape;

use super::device::{self, DevicesArg};
use super::index::dcp::{Around, DcpAnswer, Sharding};
use super::index::device_step::{Inputs, StepTime, layer_of, replay_time, score_every_row, scratch_of, shape_of};
use super::output::{self, Output, Tensor};
use super::query::dcp::Ranks;
use super::query::rank::{Rank, RankAnswer};
use super::query::{self, CacheArg};
use super::{Failure, index, ranks};

/// Run a layer's whole step, MLA query, score and select, as one captured sequence, and check it against the file's
/// expected.* tensors
#[derive(Args)]
pub struct StepArgs {
    /// The step: the tensors of index, and those of query unless --query has them
    file: PathBuf,
    /// Take the tensors of query from this file
    #[arg(long)]
    query: Option<PathBuf>,
    /// Form of the MLA cache, which decides the query's too: BF16 beside ds, else FP8
    #[arg(long, value_enum, default_value = "ds")]
    cache: CacheArg,
    /// Run the query beside select, not before the indexer
    #[arg(long)]
    late: bool,
    /// Spread heads and contexts over this many ranks, each of which runs its part as one captured sequence
    #[arg(long, value_name = "W", conflicts_with = "late")]
    dcp: Option<usize>,
    /// sim or cuda:N, with --dcp also cuda:N,M,... in turn; by default GPUs if they are usable, else the simulator
    #[arg(long)]
    device: Option<DevicesArg>,
    /// Write ids, rows, counts, logits, qc, q and cache to this safetensors file; with --dcp rows.R and counts.R of each rank
    /// R, and no logits
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run the simulator with this seed's random schedule and completion times
    #[arg(long)]
    seed: Option<u64>,
}

/// What a step left.
struct Done {
    /// Over ranks, of one rank alone, which the ranks are held to.
    index: Answer,
    spread: Option<DcpAnswer>,
    /// The query's kernel.
    kernel: MlaShape,
    query: QueryAnswer,
    dropped: u32,
    time: StepTime,
}

/// Runs the command.
pub fn run(args: &StepArgs, stdout: &mut impl Write) -> Result<(), Failure> {
    let query_path = args.query.as_ref().unwrap_or(&args.file);
    let index_file = StepFile::read(&args.file).map_err(Failure::unusable)?;
    let query_file = QueryFile::read(query_path).map_err(|error| match args.query {
        Some(_) => Failure::unusable(error),
        None => Failure::Unusable(format!("{error}; --query FILE takes the query's tensors from another file")),
    })?;
    let rows = index_file.step.rows;
    if rows == 0 || rows > query_file.tokens {
        let (path, tokens) = (query_path.display(), query_file.tokens);
        return Err(Failure::Unusable(format!(
            "{path}: tensor qkv: found {tokens} tokens, needed one for each of the {rows} rows of {}, at least 1",
            args.file.display()
        )));
    }
    let shape = MlaShape::new(query_file.heads, rows, args.cache.form(), query_file.page_tokens);
    let shape = shape.and_then(|shape| shape.with_qc(true).with_late(args.late)).map_err(Failure::unusable)?;
    let out = args.out.as_ref().map(|out| Output::create(out, &[&args.file, query_path])).transpose()?;
    let (devices, why) = match args.dcp {
        None => {
            let device = args.device.as_ref().map(DevicesArg::single).transpose()?;
            let (device, why) = device::open(device, args.seed)?;
            (vec![device], why)
        }
        Some(ranks) => ranks::open(args.device.as_ref(), args.seed, ranks)?,
    };
    let done = match args.dcp {
        None => launch(&devices[0], &index_file, &query_file, shape)?,
        Some(_) => launch_over_ranks(&devices, &index_file, &query_file, shape)?,
    };
    let dot = devices[0].info().target.and_then(check::device_dot);
    let selected = step::select(&index_file.step, &done.index.logits).map_err(Failure::unusable)?;
    let index_checked = check::check(&index_file.step, &done.index, &selected, index_file.expected.as_ref(), dot);
    let query_checked = check_query(&query_file, shape.form(), &done.query);
    let same = done.spread.as_ref().map_or(Ok(()), |spread| spread.check(&index_file.step, &done.index));

    let tensors = || -> Vec<Tensor<String>> {
        let named = |(name, dtype, shape, bytes): Tensor<&'static str>| (name.to_string(), dtype, shape, bytes);
        let mut tensors = match &done.spread {
            Some(spread) => spread.tensors(&index_file.step),
            None => {
                let alone = output::tensors(&index_file.step, &done.index, index_file.logits_width());
                alone.into_iter().map(named).collect()
            }
        };
        tensors.extend(query::tensors(&query_file, shape, &done.query).into_iter().map(named));
        tensors
    };
    let written = out.map(|out| out.write(&tensors())).transpose();
    let mut print = || {
        index::print_header(stdout, &args.file, &index_file, &why)?;
        writeln!(stdout, "query       {}: the first {rows} tokens, {} heads", query_path.display(), query_file.heads)?;
        writeln!(stdout, "kernel      {}: {}", done.kernel.name(), done.kernel.plan())?;
        let order = match (args.dcp, args.late) {
            (Some(_), _) => "one graph per rank: query, published; score, exchange, merge; the gathered query",
            (None, true) => "one graph: score, select, and the query beside it",
            (None, false) => "one graph: query, score, select",
        };
        writeln!(stdout, "sequence    {order}; {} slots past the cache", done.dropped)?;
        index::print_rows(stdout, &index_file, &done.index, &selected, done.time)?;
        match (&done.spread, &same) {
            (Some(_), Err(difference)) => writeln!(stdout, "MISMATCH    {difference}")?,
            (Some(spread), Ok(())) => spread.print(stdout)?,
            (None, _) => {}
        }
        match &index_checked {
            Ok(report) => index::print_report(stdout, &index_file, report)?,
            Err(mismatch) => writeln!(stdout, "MISMATCH    {mismatch}")?,
        }
        match &query_checked {
            Ok(compared) => query::print_report(stdout, compared)?,
            Err(mismatch) => writeln!(stdout, "MISMATCH    {mismatch}")?,
        }
        if let (Some(out), Ok(_)) = (&args.out, &written) {
            writeln!(stdout, "wrote       {}", out.display())?;
        }
        Ok(())
    };
    let printed = print();
    // Whoever reads stdout or does not: the outcome is that of the step.
    written?;
    same.map_err(|difference| Failure::Mismatch(format!("{}: {difference}", args.file.display())))?;
    index_checked.map_err(|mismatch| Failure::Mismatch(format!("{}: {mismatch}", args.file.display())))?;
    query_checked.map_err(|mismatch| Failure::Mismatch(format!("{}: {mismatch}", query_path.display())))?;
    printed
}

/// Captures the sequence and runs it. The file's indexer queries stand for the projection that an engine makes of `q_c`:
/// they are copied in its place.
fn launch(device: &Device, index: &StepFile, query: &QueryFile, shape: MlaShape) -> Result<Done, Failure> {
    let step = &index.step;
    let slots = &query.slots[..step.rows];
    let rank = Rank::new(device, query, shape, 0..query.heads, slots).map_err(Error::from)?;
    let stream = &rank.stream;
    let inputs = Inputs::upload(device, step).map_err(Error::from)?;
    let projected = device.upload(&step.queries).map_err(Error::from)?;
    inputs.queries().fill_bytes(stream, 0x7F).map_err(Error::from)?;
    let scratch = IndexerScratch::reserve(device, scratch_of(step))?;
    let indexer = FusedIndexer::new(IndexerConfig {
        scratch: &scratch,
        layer: layer_of(index),
        keys: inputs.keys(),
        shapes: &[shape_of(step)],
        hold: &[],
        ids: true,
    })?;
    let layer = DecodeLayer::new(rank.query().clone(), indexer)?;
    let project = |stream: &Stream, _: Option<&View<'_, u16>>| -> Result<(), Error> {
        Ok(inputs.queries().copy_from_device(stream, &projected.as_view())?)
    };
    // The outputs lie where every step of the layer leaves them.
    let mut selected = None;
    let graph = Graph::capture_with(stream, |stream| -> Result<(), Error> {
        selected = Some(layer.run(stream, &rank.step(None), &inputs.step(step), project)?);
        Ok(())
    })?;
    let selected = selected.expect("the capture ran");

    let start = Instant::now();
    graph.launch(stream).map_err(Error::from)?;
    stream.synchronize().map_err(Error::from)?;
    let elapsed = start.elapsed();
    let read = |view: &View<'_, i32>| view.copy_to_vec(stream).map_err(Error::from);
    let (ids, rows, counts) =
        (read(selected.ids.as_ref().expect("built with ids"))?, read(&selected.rows)?, read(&selected.counts)?);
    let RankAnswer { q_c, query, cache, dropped } = rank.answer().map_err(Error::from)?;
    let time = match device.info().simulated {
        true => StepTime::Simulator(elapsed),
        false => StepTime::Device(replay_time(stream, &graph)?),
    };
    let logits = score_every_row(stream, &inputs, step)?;
    let index = Answer { logits, ids, rows, counts };
    let query = QueryAnswer { tokens: step.rows, q_c, query, cache };
    Ok(Done { index, spread: None, kernel: shape, query, dropped, time })
}

/// A query's ranks around the indexer's.
impl Around for Ranks {
    fn first(&self, rank: usize, stream: &Stream) -> Result<(), Failure> {
        self.publish(rank, stream)
    }

    fn last(&self, rank: usize, stream: &Stream) -> Result<(), Failure> {
        self.gather(rank, stream)
    }
}

/// Runs every rank's sequence, and the indexer once more on one rank alone.
fn launch_over_ranks(
    devices: &[Device],
    index: &StepFile,
    query: &QueryFile,
    shape: MlaShape,
) -> Result<Done, Failure> {
    let (ranks, rows) = (devices.len(), index.step.rows);
    let sharding = Sharding::new(&index.step, ranks, None, None, None)?;
    let mailbox = query::dcp::mailbox(query, ranks, rows, shape.element())?;
    let own = MlaShape::new(mailbox.heads(), rows, shape.form(), query.page_tokens).map_err(Failure::unusable)?;
    let queries = Ranks::new(devices, query, own.with_qc(true), mailbox, rows)?;
    let spread = index::dcp::launch_around(devices, index, sharding, &queries)?;
    let (kernel, answer, dropped) = queries.answer(query)?;
    let (alone, _) = index::device_step::run(&devices[0], index, |_| ())?;
    let time = spread.time;
    Ok(Done { index: alone, spread: Some(spread), kernel, query: answer, dropped, time })
}
