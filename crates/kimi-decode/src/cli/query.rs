//! `query`: the MLA query and KV insert of a step file, checked against its answers.

pub mod dcp;
pub mod rank;

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use dsa_core::consts::Q_LORA;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::QUERY;
use gpu::Device;
use kimi_decode::check::query::{Compared, QueryAnswer, check_query};
use kimi_decode::step_file::query::QueryFile;
use mla_query::{MlaError, MlaShape};
use safetensors::Dtype;

use super::device::{self, DevicesArg};
use super::output::{Output, Tensor};
use super::{Failure, ranks};
use rank::{Rank, RankAnswer};

/// Run the MLA query and KV insert on a step from a safetensors file, and check it against the file's expected.* tensors
#[derive(Args)]
pub struct QueryArgs {
    /// The step
    file: PathBuf,
    /// Form of the cache, which decides the query's too: BF16 beside ds, else FP8
    #[arg(long, value_enum, default_value = "ds")]
    cache: CacheArg,
    /// Take only the first tokens of the file
    #[arg(long)]
    batch: Option<usize>,
    /// Spread the heads over this many ranks, which publish their rows and gather everybody's
    #[arg(long)]
    dcp: Option<usize>,
    /// sim or cuda:N, with --dcp also cuda:N,M,... in turn; by default GPUs if they are usable, else the simulator
    #[arg(long)]
    device: Option<DevicesArg>,
    /// Write qc, q and cache to this safetensors file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run the simulator with this seed's random schedule and completion times
    #[arg(long)]
    seed: Option<u64>,
}

/// The forms of a cache.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum CacheArg {
    /// fp8_ds_mla, 656 bytes per token
    Ds,
    /// per-tensor FP8, divided by the scale
    Fp8Dsa,
    /// per-tensor FP8, multiplied by the inverse scale
    Fp8K3,
    /// nvfp4_ds_mla, 352 bytes per token
    Nvfp4,
}

impl CacheArg {
    /// As the kernels name it.
    pub fn form(self) -> MlaCacheForm {
        match self {
            CacheArg::Ds => MlaCacheForm::Fp8Ds,
            CacheArg::Fp8Dsa => MlaCacheForm::Fp8Divide,
            CacheArg::Fp8K3 => MlaCacheForm::Fp8Multiply,
            CacheArg::Nvfp4 => MlaCacheForm::Nvfp4Ds,
        }
    }
}

/// Runs the command.
pub fn run(args: &QueryArgs, stdout: &mut impl Write) -> Result<(), Failure> {
    let file = QueryFile::read(&args.file).map_err(Failure::unusable)?;
    let tokens = args.batch.unwrap_or(file.tokens);
    if tokens == 0 || tokens > file.tokens {
        return Err(Failure::Unusable(format!("--batch: found {tokens}, needed 1..={} (tokens of qkv)", file.tokens)));
    }
    let out = args.out.as_ref().map(|out| Output::create(out, &[&args.file])).transpose()?;
    let shape = |heads| MlaShape::new(heads, tokens, args.cache.form(), file.page_tokens).map_err(Failure::unusable);
    let (shape, why, answer, dropped) = match args.dcp {
        None => {
            let device = args.device.as_ref().map(DevicesArg::single).transpose()?;
            let (device, why) = device::open(device, args.seed)?;
            let shape = shape(file.heads)?.with_qc(true);
            let (answer, dropped) = launch(&device, &file, shape, tokens).map_err(Failure::unusable)?;
            (shape, why, answer, dropped)
        }
        Some(ranks) => {
            let (devices, why) = ranks::open(args.device.as_ref(), args.seed, ranks)?;
            let mailbox = dcp::mailbox(&file, ranks, tokens, shape(file.heads)?.element())?;
            let shape = shape(mailbox.heads())?.with_qc(true);
            let (shape, answer, dropped) = dcp::launch(&devices, &file, shape, mailbox, tokens)?;
            (shape, why, answer, dropped)
        }
    };
    let checked = check_query(&file, shape.form(), &answer);

    let written = out.map(|out| out.write(&tensors(&file, shape, &answer))).transpose();
    let mut print = || {
        writeln!(stdout, "step        {}", args.file.display())?;
        writeln!(
            stdout,
            "            {tokens} of {} tokens, {} heads, {} pages of {} tokens, {} bytes each",
            file.tokens,
            file.heads,
            file.pages,
            file.page_tokens,
            shape.form().entry_bytes()
        )?;
        writeln!(stdout, "device      {why}")?;
        writeln!(stdout, "kernel      {}: {}", shape.name(), shape.plan())?;
        if let Some(ranks) = args.dcp {
            let heads = shape.heads();
            writeln!(stdout, "ranks       {ranks} with {heads} heads each: all gathered the same rows")?;
        }
        let skipped = file.slots[..tokens].iter().filter(|slot| **slot < 0).count();
        writeln!(
            stdout,
            "cache       {} tokens inserted, {skipped} skipped, {dropped} dropped: their slots lie past the cache",
            tokens - skipped - dropped as usize
        )?;
        match &checked {
            Ok(compared) => print_report(stdout, compared)?,
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
    checked.map_err(|mismatch| Failure::Mismatch(format!("{}: {mismatch}", args.file.display())))?;
    printed
}

/// Runs the first `tokens` tokens over a fresh cache; also the number of slots past it.
fn launch(device: &Device, file: &QueryFile, shape: MlaShape, tokens: usize) -> Result<(QueryAnswer, u32), MlaError> {
    let rank = Rank::new(device, file, shape, 0..file.heads, &file.slots[..tokens])?;
    rank.launch(None)?;
    let RankAnswer { q_c, query, cache, dropped } = rank.answer()?;
    Ok((QueryAnswer { tokens, q_c, query, cache }, dropped))
}

/// What was compared.
pub fn print_report(stdout: &mut impl Write, compared: &[Compared]) -> Result<(), Failure> {
    if compared.is_empty() {
        writeln!(stdout, "expected    nothing in the file to compare with")?;
        return Ok(());
    }
    for Compared { name, elements, differing } in compared {
        let equal = elements - differing;
        writeln!(
            stdout,
            "compared    {equal} of {elements} equal {name} bit for bit, the others are in its tolerance"
        )?;
    }
    writeln!(stdout, "MATCH       within the tolerances of an MLA query")?;
    Ok(())
}

/// What `--out` holds.
pub fn tensors(file: &QueryFile, shape: MlaShape, answer: &QueryAnswer) -> [Tensor; 3] {
    let bytes = answer.q_c.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let dtype = if shape.is_fp8() { Dtype::F8_E4M3 } else { Dtype::BF16 };
    let cache = vec![file.pages, file.page_tokens, shape.form().entry_bytes()];
    [
        ("qc", Dtype::BF16, vec![answer.tokens, Q_LORA], bytes),
        ("q", dtype, vec![answer.tokens, file.heads, QUERY], answer.query.clone()),
        ("cache", Dtype::U8, cache, answer.cache.clone()),
    ]
}
