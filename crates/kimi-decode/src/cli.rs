//! Commands and exit codes: 0 done and matching, 1 a mismatch, 2 unusable input or device with one line on stderr.

mod device;
mod index;
mod info;
mod output;
mod ptx;
mod query;
mod ranks;
mod step;

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

/// The decode-time sparse attention front end: indexer scores and exact top-k, on a GPU or on the simulator.
///
/// Exit codes: 0 done and matching; 1 a mismatch with expected.*; 2 unusable input or device, with one line on stderr
/// and nothing written.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Index(index::IndexArgs),
    Query(query::QueryArgs),
    Step(step::StepArgs),
    Ptx(ptx::PtxArgs),
    /// Say which devices are here, what runs on them, and why not the rest
    Info,
}

/// How a command ends when it does not end well.
#[derive(Debug)]
enum Failure {
    /// The answer differs from what is expected.
    Mismatch(String),
    /// The input, the device or the output cannot be used.
    Unusable(String),
    /// Another rank did not come, which knows the reason.
    RankLate(String),
    /// Nobody reads stdout any more.
    StdoutClosed,
}

impl Failure {
    fn unusable(error: impl std::fmt::Display) -> Self {
        Failure::Unusable(error.to_string())
    }
}

impl From<kimi_decode::Error> for Failure {
    fn from(error: kimi_decode::Error) -> Self {
        match &error {
            kimi_decode::Error::Dcp(late) if late.is_another_ranks() => Failure::RankLate(error.to_string()),
            _ => Failure::unusable(error),
        }
    }
}

impl From<gpu::Error> for Failure {
    fn from(error: gpu::Error) -> Self {
        Failure::unusable(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Failure::StdoutClosed,
            _ => Failure::Unusable(format!("stdout: {error}")),
        }
    }
}

/// Parses the arguments, runs the command, reports how it ended.
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // --help and --version.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => return fail(2, &usage(&error)),
    };
    let stdout = &mut std::io::stdout().lock();
    let ended = match cli.command {
        Command::Index(args) => index::run(&args, stdout),
        Command::Query(args) => query::run(&args, stdout),
        Command::Step(args) => step::run(&args, stdout),
        Command::Ptx(args) => ptx::run(&args, stdout),
        Command::Info => info::run(stdout),
    };
    let ended = ended.and_then(|()| Ok(stdout.flush()?));
    match ended {
        Ok(()) | Err(Failure::StdoutClosed) => ExitCode::SUCCESS,
        Err(Failure::Mismatch(line)) => fail(1, &line),
        Err(Failure::Unusable(line) | Failure::RankLate(line)) => fail(2, &line),
    }
}

/// What is wrong with the arguments: the first paragraph of what clap says, without the usage that follows.
fn usage(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let names: Vec<String> =
            Cli::command().get_subcommands().map(|command| command.get_name().to_string()).collect();
        return format!("a command is needed: {}; try --help", names.join(", "));
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let paragraph: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    format!("{}; try --help", paragraph.join(" "))
}

/// Says why on stderr.
fn fail(code: u8, line: &str) -> ExitCode {
    // One line, whatever a file name or a driver's log contains. Nobody is left to tell if stderr is closed.
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let _ = writeln!(std::io::stderr(), "kimi-decode: {line}");
    ExitCode::from(code)
}
