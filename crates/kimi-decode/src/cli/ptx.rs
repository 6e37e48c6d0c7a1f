//! `ptx`: a kernel's text.

use std::collections::BTreeMap;
use std::io::Write;
use std::str::FromStr;

use clap::Args;
use dsa_core::layout::fp8_page::ScaleForm;
use dsa_kernels::score::{self, ScoreForm, ScoreShape};
use dsa_kernels::select::{self, SelectShape};
use ptx::Target;

use super::Failure;

/// Print a kernel's PTX; without a kernel, list them
#[derive(Args)]
pub struct PtxArgs {
    /// score or select
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

const KERNELS: [Listed; 2] = [
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
            ("q", "1..=8, rows per request (1)"),
            ("topk", "keys picked (2048)"),
            ("page", "tokens per MLA page (64)"),
            ("cluster", "1, 2, 4, 8 or 16 CTAs per row (1)"),
            ("ids", ""),
            ("hold", ""),
            ("foreign", ""),
        ],
        print: print_select,
    },
];

/// Prints a kernel, or lists them.
pub fn run(args: &PtxArgs, stdout: &mut impl Write) -> Result<(), Failure> {
    let Some(name) = &args.kernel else {
        for kernel in &KERNELS {
            writeln!(stdout, "{:<8} {}", kernel.name, kernel.does)?;
            for (key, takes) in kernel.keys {
                let takes = if takes.is_empty() { "(flag)" } else { takes };
                writeln!(stdout, "  {key:<8} {takes}")?;
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

fn print_score(spec: &Spec, target: Target) -> Result<String, Failure> {
    if target != Target::Sm90a {
        return Err(Failure::Unusable(format!("kernel score: not built for {target} yet, needed sm_90a")));
    }
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
    let shape = SelectShape::new(spec.value("q", 1)?, spec.value("topk", 2048)?, spec.value("page", 64)?);
    let shape = shape.map_err(Failure::unusable)?.with_cluster(spec.value("cluster", 1)?).map_err(Failure::unusable)?;
    let shape = shape.with_ids(spec.has("ids")).with_hold(spec.has("hold")).with_foreign_logits(spec.has("foreign"));
    Ok(select::build(&shape, target).map_err(Failure::unusable)?.ptx())
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
