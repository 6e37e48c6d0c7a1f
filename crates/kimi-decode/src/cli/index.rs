//! `index`: score and select of a step file, checked against its answers.

pub mod dcp;
pub mod device_step;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use dsa_core::consts::PAGE;
use dsa_core::numerics::order16::bits_of;
use dsa_core::oracle::select::Selection;
use dsa_core::oracle::step;
use gpu::Device;
use half::bf16;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kimi_decode::check::{self, Answer, LogitsReport, Report};
use kimi_decode::step_file::StepFile;

use super::device::{self, DevicesArg};
use super::output::{self, Output};
use super::{Failure, ranks};
use dcp::{Sharding, TransportArg};
use device_step::StepTime;

/// Run score and select on a decode step from a safetensors file, and check it against the file's expected.* tensors
#[derive(Args)]
pub struct IndexArgs {
    /// The decode step
    file: PathBuf,
    /// Spread the contexts over this many ranks: local top-k, exchange and merge, held to one rank alone
    #[arg(long, value_name = "W")]
    dcp: Option<usize>,
    /// Consecutive tokens dealt to a rank at a time, a power of two; by default 1
    #[arg(long, value_name = "I", requires = "dcp")]
    interleave: Option<usize>,
    /// Keys that each rank sends of a row, a multiple of 128 below the top-k; by default as many as seldom take a
    /// second round: of 2048 for 2 ranks 1152, for 8 and more 512
    #[arg(long, value_name = "N", requires = "dcp")]
    topn: Option<usize>,
    /// How candidates get from rank to rank; by default pushed where ranks can map each other's memory
    #[arg(long, requires = "dcp")]
    transport: Option<TransportArg>,
    /// sim or cuda:N, with --dcp also cuda:N,M,... in turn; by default GPUs if they are usable, else the simulator
    #[arg(long)]
    device: Option<DevicesArg>,
    /// Write ids, rows, counts and logits to this safetensors file; with --dcp ids, and rows.R and counts.R of each rank R
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run the simulator with this seed's random schedule and completion times
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the command.
pub fn run(args: &IndexArgs, stdout: &mut impl Write) -> Result<(), Failure> {
    let file = StepFile::read(&args.file).map_err(Failure::unusable)?;
    let out = args.out.as_ref().map(|out| Output::create(out, &[&args.file])).transpose()?;
    let (devices, why, sharding) = match args.dcp {
        None => {
            let device = args.device.as_ref().map(DevicesArg::single).transpose()?;
            let (device, why) = device::open(device, args.seed)?;
            (vec![device], why, None)
        }
        Some(ranks) => {
            let sharding = Sharding::new(&file.step, ranks, args.interleave, args.topn, args.transport)?;
            let (devices, why) = ranks::open(args.device.as_ref(), args.seed, ranks)?;
            (devices, why, Some(sharding))
        }
    };
    let device = &devices[0];
    let progress = progress(device, &file);
    let (answer, mut time) = device_step::run(device, &file, |stage| progress.set_message(stage))?;
    let mut spread = None;
    if let Some(sharding) = sharding {
        progress.set_message("all ranks");
        let answer = dcp::launch(&devices, &file, sharding)?;
        time = answer.time;
        spread = Some(answer);
    }
    progress.set_message("checking");
    let dot = device.info().target.and_then(check::device_dot);
    let selected = step::select(&file.step, &answer.logits).map_err(Failure::unusable)?;
    let checked = check::check(&file.step, &answer, &selected, file.expected.as_ref(), dot);
    progress.finish_and_clear();

    // What one rank alone selects is what the ranks are held to; that itself is held to the file.
    let same = spread.as_ref().map_or(Ok(()), |spread| spread.check(&file.step, &answer));

    let write = |out: Output| match &spread {
        Some(spread) => out.write(&spread.tensors(&file.step)),
        None => out.write(&output::tensors(&file.step, &answer, file.logits_width())),
    };
    let written = out.map(write).transpose();
    let mut print = || {
        print_header(stdout, &args.file, &file, &why)?;
        print_rows(stdout, &file, &answer, &selected, time)?;
        match (&spread, &same) {
            (Some(_), Err(difference)) => writeln!(stdout, "MISMATCH    {difference}")?,
            (Some(spread), Ok(())) => spread.print(stdout)?,
            (None, _) => {}
        }
        match &checked {
            Ok(report) => print_report(stdout, &file, report)?,
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
    checked.map_err(|mismatch| Failure::Mismatch(format!("{}: {mismatch}", args.file.display())))?;
    printed
}

/// Which step, on what.
pub fn print_header(stdout: &mut impl Write, path: &Path, file: &StepFile, why: &str) -> Result<(), Failure> {
    let step = &file.step;
    writeln!(stdout, "step        {}", path.display())?;
    writeln!(
        stdout,
        "            {} rows = {} requests x q {}, top-k {}, {} index pages of {PAGE}, KV pages of {} ({} rows apart)",
        step.rows,
        step.requests(),
        step.q,
        step.topk,
        step.blocks,
        step.kv_page,
        step.kv_block_rows,
    )?;
    writeln!(stdout, "device      {why}")?;
    Ok(())
}

/// A line per row.
pub fn print_rows(
    stdout: &mut impl Write,
    file: &StepFile,
    answer: &Answer,
    selected: &[Selection],
    time: StepTime,
) -> Result<(), Failure> {
    if file.step.rows == 0 {
        writeln!(stdout, "rows        none: nothing was launched")?;
        return Ok(());
    }
    let time = time.to_string();
    writeln!(stdout, "{:>5} {:>8} {:>6} {:>12} {:>7}  step time", "row", "length", "count", "threshold", "key")?;
    for (row, selected) in selected.iter().enumerate() {
        let (threshold, key) = match selected.threshold {
            Some(key) => (bf16::from_bits(bits_of(key)).to_string(), format!("{key:#06x}")),
            None => ("-".into(), "-".into()),
        };
        let (length, count) = (file.step.row_len(row), answer.counts[row]);
        writeln!(stdout, "{row:>5} {length:>8} {count:>6} {threshold:>12} {key:>7}  {time}")?;
    }
    Ok(())
}

/// What was compared.
pub fn print_report(stdout: &mut impl Write, file: &StepFile, report: &Report) -> Result<(), Failure> {
    writeln!(stdout, "selection   exact for the device's logits: ids, rows and counts equal the oracle's")?;
    let Some(expected) = &file.expected else {
        writeln!(stdout, "expected    nothing in the file to compare with")?;
        return Ok(());
    };
    if let Some(LogitsReport { compared, differing, beyond, ulp_max, difference_max }) = report.logits {
        let equal = compared - differing;
        match (differing, beyond) {
            (0, _) => writeln!(stdout, "logits      all {compared} equal expected.logits bit for bit")?,
            (_, 0) => writeln!(
                stdout,
                "logits      {equal} of {compared} equal expected.logits bit for bit, the others differ by at most {ulp_max} BF16 ulp"
            )?,
            _ => writeln!(
                stdout,
                "logits      {equal} of {compared} equal expected.logits bit for bit, {beyond} differ by more than {}, by at most {difference_max}",
                expected.tolerance,
            )?,
        }
    }
    if !report.compared.is_empty() {
        let names = report.compared.iter().map(|name| format!("expected.{name}")).collect::<Vec<_>>().join(", ");
        match report.ids_differing {
            0 => writeln!(stdout, "outputs     equal {names} bit for bit")?,
            n => writeln!(stdout, "outputs     equal {names} but for {n} ids near the threshold and their rows")?,
        }
    }
    if report.modelled {
        writeln!(
            stdout,
            "model       each logit is bit for bit the oracle's with this target's FP8 tensor-core dot products, and the\n            \
             expected ones are the oracle's with exact dot products: the differences are the tensor core's rounding"
        )?;
        writeln!(stdout, "MATCH       bit for bit, by this target's arithmetic")?;
    } else {
        writeln!(stdout, "MATCH       within the file's tolerance: {}", expected.tolerance)?;
    }
    Ok(())
}

/// A spinner that names the stage, where somebody watches and the simulator takes its time.
fn progress(device: &Device, file: &StepFile) -> ProgressBar {
    /// Row-keys that the simulator scores in well under a second.
    const QUICK_ROW_KEYS: usize = 500;
    let row_keys: usize = (0..file.step.rows).map(|row| file.step.row_len(row)).sum();
    if !device.info().simulated || row_keys < QUICK_ROW_KEYS || !std::io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}").expect("a constant template");
    let bar = ProgressBar::new_spinner().with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
