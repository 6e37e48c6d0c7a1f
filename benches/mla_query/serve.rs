//! Samples on demand, so that another program can measure its own kernels in turn with these on the same device.
//!
//! A request is a line `HEADS TOKENS VARIANT` (`12 64 planned`), its answer a line with the microseconds of one launch, the
//! median of a few graphs, or `error TEXT`. Ends with the input.

use std::collections::HashMap;

use dsa_core::layout::mla_entry::MlaCacheForm;
use gpu::{Device, Graph};

use crate::common::{self, Result, graph_us, median_us};
use crate::rig::{Rig, Variant};

pub fn serve(device: &Device) -> Result<()> {
    let mut graphs: HashMap<String, (Rig, Graph)> = HashMap::new();
    let answer = |line: &str| -> Result<f64> {
        if !graphs.contains_key(line) {
            let mut words = line.split_whitespace();
            let mut word = || words.next().ok_or("a request is HEADS TOKENS VARIANT");
            let (heads, tokens, variant) = (word()?.parse()?, word()?.parse()?, Variant::parse(word()?)?);
            let rig = Rig::new(device, heads, tokens, MlaCacheForm::Fp8Ds, variant, None)?;
            rig.check()?;
            let graph = rig.graph()?;
            for _ in 0..3 {
                graph_us(&rig.stream, &graph, rig.launches())?;
            }
            graphs.insert(line.to_owned(), (rig, graph));
        }
        let (rig, graph) = &graphs[line];
        median_us(&rig.stream, graph, rig.launches())
    };
    common::serve(answer)
}
