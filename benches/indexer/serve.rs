//! Samples on demand, so that another program can measure its own kernels in turn with these on the same device.
//!
//! A request is a line `CASE Q WHAT` (`b1_8k 1 select`), its answer a line with the microseconds of one launch, the median of a
//! few graphs, or `error TEXT`. Ends with the input.

use std::collections::HashMap;

use gpu::{Device, Graph};

use crate::What;
use crate::cases::{self, Data};
use crate::common::{self, Result, graph_us, median_us};
use crate::rig::{Pool, Rig};

pub fn serve(device: &Device, pool_pages: usize, topk: usize) -> Result<()> {
    let pool = Pool::new(device, &device.stream()?, pool_pages, Data::Random)?;
    let mut graphs: HashMap<String, (Rig, Graph, usize)> = HashMap::new();
    let answer = |line: &str| -> Result<f64> {
        if !graphs.contains_key(line) {
            let mut words = line.split_whitespace();
            let mut word = || words.next().ok_or("a request is CASE Q WHAT");
            let (name, q, what) = (word()?, word()?.parse()?, What::parse(word()?)?);
            let case = cases::reference().into_iter().find(|c| c.name == name).ok_or("no such case")?;
            let rig = Rig::new(device, pool_pages, &case, q, topk, None)?;
            rig.check(&pool)?;
            let launches = crate::launches(&case);
            let graph = rig.graph(&pool, launches, what)?;
            for _ in 0..3 {
                graph_us(&rig.stream, &graph, launches)?;
            }
            graphs.insert(line.to_owned(), (rig, graph, launches));
        }
        let (rig, graph, launches) = &graphs[line];
        median_us(&rig.stream, graph, *launches)
    };
    common::serve(answer)
}
