//! NVIDIA's PTX assembler as an oracle for tests: finds it, runs it, reads its report.
//!
//! The assembler is proprietary and never part of the repository. It comes from PyPI:
//!
//! ```text
//! python3 -m pip install --no-deps --target target/ptxas 'nvidia-cuda-nvcc==13.0.88'
//! ```
//!
//! Tests call [`Ptxas::for_test`]: without an assembler they print `SKIPPED` and check nothing, unless
//! `DSA_REQUIRE_PTXAS=1` (as in CI), where its absence is a failure.
#![forbid(unsafe_code)]

mod report;

pub use report::Report;

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where CI installs the assembler, relative to the workspace.
pub const INSTALLED_AT: &str = "target/ptxas/nvidia/cu13/bin/ptxas";

/// Why a text was not assembled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `PTXAS` names something that is not a file.
    #[error("PTXAS={0} is not a file")]
    NotAFile(PathBuf),
    /// The program does not start or its pipes break.
    #[error("running {program}")]
    Run {
        /// The assembler.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The assembler refuses the text.
    #[error("refused:\n{log}")]
    Refused {
        /// Its messages.
        log: String,
    },
    /// The assembler accepts the text but its report lacks an expected line.
    #[error("the report lacks {missing}:\n{log}")]
    Report {
        /// What was looked for.
        missing: &'static str,
        /// The whole report.
        log: String,
    },
}

/// A found assembler.
#[derive(Clone, Debug)]
pub struct Ptxas {
    program: PathBuf,
}

impl Ptxas {
    /// The program that the environment variable `PTXAS` names, else `ptxas` on `PATH`, else the one that CI installs.
    ///
    /// # Errors
    /// [`Error::NotAFile`] if `PTXAS` is set and wrong: a setting is never silently ignored.
    pub fn find() -> Result<Option<Ptxas>, Error> {
        if let Some(named) = env::var_os("PTXAS") {
            let program = PathBuf::from(named);
            return if program.is_file() { Ok(Some(Ptxas { program })) } else { Err(Error::NotAFile(program)) };
        }
        let on_path = env::var_os("PATH").into_iter().flat_map(|path| env::split_paths(&path).collect::<Vec<_>>());
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let candidates = on_path.map(|dir| dir.join("ptxas")).chain([workspace.join(INSTALLED_AT)]);
        Ok(candidates.into_iter().find(|program| program.is_file()).map(|program| Ptxas { program }))
    }

    /// The assembler for a test, or `None` after printing that the test is skipped.
    ///
    /// # Panics
    /// Without an assembler if `DSA_REQUIRE_PTXAS=1`, and for a wrong `PTXAS`.
    pub fn for_test() -> Option<Ptxas> {
        let found = Ptxas::find().unwrap_or_else(|error| panic!("{error}"));
        if found.is_none() {
            assert!(
                env::var_os("DSA_REQUIRE_PTXAS").is_none_or(|v| v != "1"),
                "DSA_REQUIRE_PTXAS=1, but there is no ptxas in PTXAS, on PATH or at {INSTALLED_AT}"
            );
            println!("SKIPPED: no ptxas");
        }
        found
    }

    /// Assembles one kernel for `arch` (`sm_90a`); the machine code is discarded.
    ///
    /// # Errors
    /// [`Error::Refused`] with the assembler's messages, or a failure to run it.
    pub fn assemble(&self, arch: &str, ptx: &str) -> Result<Report, Error> {
        let failed = |source| Error::Run { program: self.program.clone(), source };
        let mut child = Command::new(&self.program)
            .args([&format!("-arch={arch}"), "-v", "--warn-on-spills", "-", "-o", "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        // The assembler reads everything before it reports, so writing first cannot block both sides. One that ends
        // early closes the pipe; what it said is worth more than the broken pipe.
        let written = child.stdin.take().expect("stdin is piped").write_all(ptx.as_bytes());
        let output = child.wait_with_output().map_err(failed)?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(Error::Refused { log });
        }
        written.map_err(failed)?;
        Report::parse(&log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str =
        ".version 8.4\n.target sm_90a\n.address_size 64\n.visible .entry empty()\n.reqntid 32, 1, 1\n{\n    ret;\n}\n";

    #[test]
    fn assembles_what_is_right_and_refuses_what_is_not() {
        let Some(ptxas) = Ptxas::for_test() else { return };
        let report = ptxas.assemble("sm_90a", EMPTY).unwrap();
        assert_eq!((report.entry.as_str(), report.spill_bytes(), report.notes.len()), ("empty", 0, 0));
        let Err(Error::Refused { log }) = ptxas.assemble("sm_90a", &EMPTY.replace("ret", "return")) else {
            panic!("an unknown instruction is refused")
        };
        assert!(log.contains("error"), "{log}");
        assert!(matches!(ptxas.assemble("sm_100a", EMPTY), Err(Error::Refused { .. })), "another target's text");
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let absent = Ptxas { program: PathBuf::from("/nonexistent/ptxas") };
        assert!(matches!(absent.assemble("sm_90a", EMPTY), Err(Error::Run { .. })));
    }
}
