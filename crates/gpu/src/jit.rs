//! What the assembler said about a kernel.

use crate::cuda::Attributes;

/// The assembler's report of one loaded kernel.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct JitReport {
    /// Registers per thread; 0 on the simulator, which does not allocate registers.
    pub registers: u32,
    /// Bytes spilled per thread, the larger of stores and loads. Without a log (a compilation found in the driver's
    /// cache may have none) this is the local memory per thread.
    pub spill_bytes: u32,
    /// Local memory per thread in bytes: stack and spills.
    pub local_bytes: u32,
    /// Shared memory of a CTA in bytes, static and dynamic.
    pub shared_bytes: u32,
    /// Performance warnings of the assembler (codes `C75xx`), one line each.
    pub performance_notes: Vec<String>,
    /// The whole log.
    pub log: String,
    /// Time to compile and load in milliseconds.
    pub wall_ms: f64,
}

impl JitReport {
    pub(crate) fn new(log: String, attributes: Attributes, dynamic_shared_bytes: u32, wall_ms: f64) -> Self {
        JitReport {
            registers: attributes.registers,
            spill_bytes: spill_bytes(&log).unwrap_or(attributes.local_bytes),
            local_bytes: attributes.local_bytes,
            shared_bytes: attributes.static_shared_bytes + dynamic_shared_bytes,
            performance_notes: log.lines().filter(|l| l.contains("C75")).map(|l| l.trim().to_string()).collect(),
            log,
            wall_ms,
        }
    }
}

impl JitReport {
    /// The simulator assembles nothing.
    pub(crate) fn simulated(shared_bytes: u32) -> Self {
        JitReport { shared_bytes, ..JitReport::default() }
    }
}

/// The larger of "N bytes spill stores" and "N bytes spill loads" in an assembler log.
fn spill_bytes(log: &str) -> Option<u32> {
    let number_before = |what: &str| -> Option<u32> {
        let at = log.find(what)?;
        log[..at].split_whitespace().next_back()?.parse().ok()
    };
    let stores = number_before("bytes spill stores")?;
    Some(stores.max(number_before("bytes spill loads")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'score'
ptxas info    : Compiling entry function 'score' for 'sm_90a'
ptxas info    : Function properties for score
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size";

    #[test]
    fn reads_spills_and_performance_notes_from_the_log() {
        let attributes = Attributes { registers: 168, local_bytes: 16, static_shared_bytes: 0 };
        let report = JitReport::new(LOG.into(), attributes, 1024, 1.5);
        assert_eq!((report.registers, report.spill_bytes, report.local_bytes), (168, 12, 16));
        assert_eq!(report.shared_bytes, 1024);
        assert_eq!(report.performance_notes.len(), 1);
        assert!(report.performance_notes[0].contains("C7510"));
    }

    #[test]
    fn falls_back_to_local_memory_without_a_log() {
        let attributes = Attributes { registers: 10, local_bytes: 24, static_shared_bytes: 0 };
        let report = JitReport::new(String::new(), attributes, 0, 0.1);
        assert_eq!((report.spill_bytes, report.performance_notes.len()), (24, 0));
    }
}
