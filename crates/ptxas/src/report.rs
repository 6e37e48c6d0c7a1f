//! What the assembler says about a kernel.

use crate::Error;

/// Resources of one entry function, and remarks on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entry name.
    pub entry: String,
    /// Registers per thread.
    pub registers: u32,
    /// Stack frame per thread in bytes.
    pub stack_bytes: u32,
    /// Bytes stored by spills, per thread.
    pub spill_store_bytes: u32,
    /// Bytes loaded by spills, per thread.
    pub spill_load_bytes: u32,
    /// Static shared memory in bytes; what a launch adds is the kernel's own affair.
    pub shared_bytes: u32,
    /// Warnings and performance notes (`C75xx`: the assembler repaired or serialised something), whole lines. They do not
    /// change the exit status.
    pub notes: Vec<String>,
}

impl Report {
    /// Spill traffic per thread in bytes.
    pub fn spill_bytes(&self) -> u32 {
        self.spill_store_bytes + self.spill_load_bytes
    }

    /// Reads the log of a run with `-v` over a text with one entry.
    ///
    /// # Errors
    /// [`Error::Report`] if a line that every report has is missing.
    pub fn parse(log: &str) -> Result<Report, Error> {
        let missing = |missing| Error::Report { missing, log: log.to_string() };
        let mut report = Report::default();
        let (mut properties, mut used) = (false, false);
        for line in log.lines() {
            if let Some(rest) = after(line, "Compiling entry function '") {
                report.entry = rest.split('\'').next().unwrap_or_default().to_string();
            } else if line.contains(" bytes stack frame") {
                report.stack_bytes = before(line, " bytes stack frame").ok_or_else(|| missing("stack bytes"))?;
                report.spill_store_bytes =
                    before(line, " bytes spill stores").ok_or_else(|| missing("spilled bytes"))?;
                report.spill_load_bytes = before(line, " bytes spill loads").ok_or_else(|| missing("spilled bytes"))?;
                properties = true;
            } else if line.contains("Used ") && line.contains(" registers") {
                report.registers = before(line, " registers").ok_or_else(|| missing("registers"))?;
                report.shared_bytes = before(line, " bytes smem").unwrap_or(0);
                used = true;
            } else if line.contains("(C7") || line.contains("Potential Performance Loss") || line.contains("warning") {
                report.notes.push(line.trim().to_string());
            }
        }
        match (report.entry.is_empty(), properties, used) {
            (true, ..) => Err(missing("the entry's name")),
            (_, false, _) => Err(missing("the entry's properties")),
            (_, _, false) => Err(missing("the registers")),
            _ => Ok(report),
        }
    }
}

/// What follows `marker`.
fn after<'a>(line: &'a str, marker: &str) -> Option<&'a str> {
    line.split_once(marker).map(|(_, rest)| rest)
}

/// The number right before `marker`.
fn before(line: &str, marker: &str) -> Option<u32> {
    line.split_once(marker)?.0.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_number_of_a_report() {
        let report = Report::parse(
            "ptxas warning : Registers are spilled to local memory in function 'k', 524 bytes spill stores, 520 bytes spill loads\n\
             ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
             ptxas info    : Function properties for k\n    528 bytes stack frame, 524 bytes spill stores, 520 bytes spill loads\n\
             ptxas info    : Used 32 registers, used 1 barriers, 528 bytes cumulative stack size, 64 bytes smem\n\
             ptxas info    : Compile time = 18.613 ms\n",
        )
        .unwrap();
        assert_eq!(report.entry, "k");
        assert_eq!((report.registers, report.stack_bytes, report.shared_bytes), (32, 528, 64));
        assert_eq!((report.spill_store_bytes, report.spill_load_bytes, report.spill_bytes()), (524, 520, 1044));
        assert_eq!(report.notes.len(), 1, "{:?}", report.notes);
    }

    #[test]
    fn performance_notes_are_kept() {
        let log = "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
                   insufficient register resources for the function 'k'\n\
                   ptxas info    : Compiling entry function 'k' for 'sm_90a'\n    0 bytes stack frame, 0 bytes spill stores, 0 \
                   bytes spill loads\nptxas info    : Used 90 registers, used 0 barriers\n";
        let report = Report::parse(log).unwrap();
        assert!(report.notes[0].contains("C7514"), "{:?}", report.notes);
        assert_eq!((report.registers, report.shared_bytes), (90, 0));
    }

    #[test]
    fn a_report_without_its_lines_is_an_error() {
        assert!(matches!(Report::parse(""), Err(Error::Report { .. })));
        let only_name = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n";
        assert!(matches!(Report::parse(only_name), Err(Error::Report { .. })));
    }
}
