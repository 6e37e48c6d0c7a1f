//! `ptx`: a kernel's text.

use std::collections::BTreeMap;
use std::io::Write;
use std::str::FromStr;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use dsa_core::Ownership;
use dsa_core::layout::fp8_page::ScaleForm;
use dsa_dcp::mailbox::gather;
use dsa_dcp::merge::{self, MergeShape};
use dsa_dcp::{ExchangeShape, GatherShape, MailboxShape, QueryElement, recommended_local_topk};
use dsa_kernels::local_topk::{self, LocalTopkShape};
use dsa_kernels::score::{self, ScoreForm, ScoreShape};
use dsa_kernels::select::{self, SelectShape};
use mla_query::{MlaShape, query};
use ptx::Target;

use super::Failure;
use super::query::CacheArg;

/// Print a kernel's PTX; without a kernel, list them
#[derive(Args)]
pub struct PtxArgs {
    /// score, select, local_topk, merge, query or gather
    kernel: Option<String>,
    /// Architecture to generate for
    #[arg(long, default_value = "sm_90a")]
    target: String,
    /// Specialisation, as key=value or a flag: see the list
    spec: Vec<String>,
}

/// A kernel that can be printed.
struct Listed {
    name: &'static str,
    does: &'static str,
    /// Specialisation keys and what they take; flags take nothing.
    keys: &'static [(&'static str, &'static str)],
    print: fn(&Spec, Target) -> Result<String, Failure>,
}

const KERNELS: [Listed; 6] = [
    Listed {
        name: "score",
        does: "FP8 keys to BF16 logits",
        keys: &[
            ("q", "1..=8, rows per request (1)"),
            ("topk", "keys picked, of the compact form (2048)"),
            ("form", "compact or pitched (compact)"),
            ("scale", "ue8m0 or fp32 (ue8m0)"),
        ],
        print: print_score,
    },
    Listed {
        name: "select",
        does: "logits to the exact top-k as physical rows",
        keys: &[
            ("topk", "keys picked (2048)"),
            ("page", "tokens per MLA page (64)"),
            ("cluster", "1, 2, 4 or 8 CTAs per row (1)"),
            ("ids", ""),
            ("hold", ""),
            ("foreign", ""),
        ],
        print: print_select,
    },
    Listed {
        name: "local_topk",
        does: "a rank's logits to its first N keys, pushed to all ranks",
        keys: &[
            ("n", "keys per row (512)"),
            ("topk", "keys picked of all ranks' (2048)"),
            ("cluster", "1, 2, 4 or 8 CTAs per row (1)"),
            ("push", "1..=16, ranks to push to (none)"),
            ("foreign", ""),
        ],
        print: print_local_topk,
    },
    Listed {
        name: "merge",
        does: "all ranks' first keys to the exact top-k, this rank's rows of it",
        keys: &[
            ("ranks", "1..=16 (8)"),
            ("interleave", "consecutive tokens on a rank, a power of two (1)"),
            ("n", "keys that each rank sends (as is recommended for the ranks)"),
            ("topk", "keys picked (2048)"),
            ("context", "longest context, in tokens (1048576)"),
            ("q", "1..=8, rows per request (1)"),
            ("page", "tokens per MLA page (64)"),
            ("ids", ""),
            ("hold", ""),
            ("foreign", ""),
            ("gathered", ""),
        ],
        print: print_merge,
    },
    Listed {
        name: "query",
        does: "the MLA query and its KV insert",
        keys: &[
            ("heads", "1..=96 (12)"),
            ("batch", "1..=1024, tokens at most (1)"),
            ("cache", "ds, fp8-dsa, fp8-k3 or nvfp4 (ds)"),
            ("page", "tokens per page of the cache (64)"),
            ("tile", "16, 32, 64, or 0 for tokens one by one (the fastest as measured)"),
            ("qc", ""),
            ("hold", ""),
            ("late", ""),
            ("threads", ""),
        ],
        print: print_query,
    },
    Listed {
        name: "gather",
        does: "waits until a mailbox holds every rank's heads",
        keys: &[
            ("ranks", "1..=16 (8)"),
            ("heads", "of each rank (8)"),
            ("q_heads", "64 or 128, heads of a mailbox row (64)"),
            ("tokens", "1..=1024, at most (64)"),
            ("element", "bf16 or e4m3 (bf16)"),
            ("copy", ""),
            ("hold", ""),
        ],
        print: print_gather,
    },
];

/// Prints a kernel, or lists them.
pub fn run(args: &PtxArgs, stdout: &mut impl Write) -> Result<(), Failure> {
    let Some(name) = &args.kernel else {
        for kernel in &KERNELS {
            writeln!(stdout, "{:<10} {}", kernel.name, kernel.does)?;
            for (key, takes) in kernel.keys {
                let takes = if takes.is_empty() { "(flag)" } else { takes };
                writeln!(stdout, "  {key:<10} {takes}")?;
            }
        }
        return Ok(());
    };
    let kernel = KERNELS.iter().find(|kernel| kernel.name == name);
    let kernel = kernel.ok_or_else(|| {
        Failure::Unusable(format!("kernel {name:?}: needed {}", KERNELS.map(|kernel| kernel.name).join(" or ")))
    })?;
    let target = Target::ALL.into_iter().find(|target| target.name() == args.target).ok_or_else(|| {
        let names = Target::ALL.map(Target::name).join(" or ");
        Failure::Unusable(format!("--target: found {:?}, needed {names}", args.target))
    })?;
    let spec = Spec::parse(kernel, &args.spec)?;
    stdout.write_all((kernel.print)(&spec, target)?.as_bytes())?;
    Ok(())
}

fn hopper_only(kernel: &str, target: Target) -> Result<(), Failure> {
    match target {
        Target::Sm90a => Ok(()),
        _ => Err(Failure::Unusable(format!("kernel {kernel}: not built for {target} yet, needed sm_90a"))),
    }
}

fn print_score(spec: &Spec, target: Target) -> Result<String, Failure> {
    hopper_only("score", target)?;
    let topk = spec.value("topk", 2048)?;
    let form = spec.choice("form", &[("compact", ScoreForm::Compact { topk }), ("pitched", ScoreForm::Pitched)])?;
    if form == ScoreForm::Pitched && spec.has("topk") {
        return Err(Failure::Unusable("topk: only the compact form depends on it".into()));
    }
    let scale = spec.choice("scale", &[("ue8m0", ScaleForm::Ue8m0), ("fp32", ScaleForm::Fp32)])?;
    let shape = ScoreShape::new(spec.value("q", 1)?, form, scale).map_err(Failure::unusable)?;
    Ok(score::build(&shape, target).map_err(Failure::unusable)?.ptx())
}

fn print_select(spec: &Spec, target: Target) -> Result<String, Failure> {
    let shape = SelectShape::new(spec.value("topk", 2048)?, spec.value("page", 64)?);
    let shape = shape.map_err(Failure::unusable)?.with_cluster(spec.value("cluster", 1)?).map_err(Failure::unusable)?;
    let shape = shape.with_ids(spec.has("ids")).with_hold(spec.has("hold")).with_foreign_logits(spec.has("foreign"));
    Ok(select::build(&shape, target).map_err(Failure::unusable)?.ptx())
}

fn print_local_topk(spec: &Spec, target: Target) -> Result<String, Failure> {
    let shape = LocalTopkShape::new(spec.value("n", 512)?, spec.value("topk", 2048)?).map_err(Failure::unusable)?;
    let shape = shape.with_cluster(spec.value("cluster", 1)?).map_err(Failure::unusable)?;
    let shape = match spec.has("push") {
        true => shape.with_push(spec.value("push", 0)?).map_err(Failure::unusable)?,
        false => shape,
    };
    let shape = shape.with_foreign_logits(spec.has("foreign"));
    Ok(local_topk::build(&shape, target).map_err(Failure::unusable)?.ptx())
}

fn print_merge(spec: &Spec, target: Target) -> Result<String, Failure> {
    let (ranks, topk) = (spec.value("ranks", 8)?, spec.value("topk", 2048)?);
    let own = Ownership::new(ranks, spec.value("interleave", 1)?).map_err(Failure::unusable)?;
    let n = match spec.has("n") {
        true => spec.value("n", 0)?,
        false => recommended_local_topk(ranks, topk).map_err(Failure::unusable)?,
    };
    // Kernels do not depend on the rows.
    let exchange = ExchangeShape::new(own, 1, n, topk, spec.value("context", 1 << 20)?).map_err(Failure::unusable)?;
    let shape = MergeShape::new(exchange, spec.value("q", 1)?, spec.value("page", 64)?).map_err(Failure::unusable)?;
    let shape = shape.with_ids(spec.has("ids")).with_hold(spec.has("hold"));
    let shape = shape.with_foreign_logits(spec.has("foreign")).with_gathered(spec.has("gathered"));
    Ok(merge::build(&shape, target).map_err(Failure::unusable)?.ptx())
}

fn print_query(spec: &Spec, target: Target) -> Result<String, Failure> {
    hopper_only("query", target)?;
    let names: Vec<_> = CacheArg::value_variants().iter().filter_map(CacheArg::to_possible_value).collect();
    let forms: Vec<_> = names.iter().map(PossibleValue::get_name).zip(CacheArg::value_variants()).collect();
    let (heads, batch) = (spec.value("heads", 12)?, spec.value("batch", 1)?);
    let shape = MlaShape::new(heads, batch, spec.choice("cache", &forms)?.form(), spec.value("page", 64)?);
    let mut shape = shape.map_err(Failure::unusable)?;
    if spec.has("tile") {
        let tile = spec.value("tile", 0)?;
        shape = shape.with_tile((tile != 0).then_some(tile)).map_err(Failure::unusable)?;
    }
    let shape = shape.with_qc(spec.has("qc")).with_hold(spec.has("hold"));
    let shape = shape.with_late(spec.has("late")).map_err(Failure::unusable)?;
    let shape = shape.with_thread_copies(spec.has("threads")).map_err(Failure::unusable)?;
    Ok(query::build(&shape, target).map_err(Failure::unusable)?.ptx())
}

fn print_gather(spec: &Spec, target: Target) -> Result<String, Failure> {
    let element = spec.choice("element", &[("bf16", QueryElement::Bf16), ("e4m3", QueryElement::E4m3)])?;
    let (ranks, heads) = (spec.value("ranks", 8)?, spec.value("heads", 8)?);
    let mailbox = MailboxShape::new(ranks, heads, spec.value("q_heads", 64)?, spec.value("tokens", 64)?, element);
    let shape = GatherShape::new(mailbox.map_err(Failure::unusable)?);
    let shape = shape.with_copy(spec.has("copy")).with_hold(spec.has("hold"));
    Ok(gather::build(&shape, target).map_err(Failure::unusable)?.ptx())
}

/// The specialisation asked for; flags have an empty value.
struct Spec(BTreeMap<String, String>);

impl Spec {
    fn parse(kernel: &Listed, words: &[String]) -> Result<Spec, Failure> {
        let valid = || {
            let keys =
                kernel.keys.iter().map(|(key, takes)| if takes.is_empty() { (*key).into() } else { format!("{key}=") });
            keys.collect::<Vec<_>>().join(", ")
        };
        let mut spec = BTreeMap::new();
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let known = kernel.keys.iter().find(|(known, _)| *known == key);
            let (_, takes) = known.ok_or_else(|| {
                Failure::Unusable(format!("kernel {}: no specialisation {word:?}, needed {}", kernel.name, valid()))
            })?;
            if takes.is_empty() == word.contains('=') {
                let needed = if takes.is_empty() { key.to_string() } else { format!("{key}=VALUE") };
                return Err(Failure::Unusable(format!("kernel {}: found {word:?}, needed {needed}", kernel.name)));
            }
            if spec.insert(key.to_string(), value.to_string()).is_some() {
                return Err(Failure::Unusable(format!("kernel {}: {key} is given twice", kernel.name)));
            }
        }
        Ok(Spec(spec))
    }

    fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn value<T: FromStr>(&self, key: &str, default: T) -> Result<T, Failure> {
        let Some(text) = self.0.get(key) else { return Ok(default) };
        text.parse().map_err(|_| Failure::Unusable(format!("{key}: found {text:?}, needed a number")))
    }

    /// The value by name; the first choice is the default.
    fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<T, Failure> {
        let Some(text) = self.0.get(key) else { return Ok(choices[0].1) };
        choices.iter().find(|(name, _)| name == text).map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            Failure::Unusable(format!("{key}: found {text:?}, needed {}", names.join(" or ")))
        })
    }
}
