//! The commands of the anymq repository: `cargo xtask <command>`.
//!
//! One module per command, each with an `Args` (its arguments, read by clap) and a `run(Args) -> Outcome`. To add one:
//! write the module, and give it its line in the three places below (module, [`Command`], [`dispatch`]), in
//! alphabetical order so that two people adding commands rarely touch the same line.
//!
//! Keep this crate light: a command that needs the libraries runs a program of their crate by cargo instead of
//! depending on them, so that `cargo xtask brokers` builds in seconds.

mod bench;
mod brokers;
mod build_program;
mod conformance;
mod containers;
mod deny;
mod failures;
mod faults;
mod features;
mod guard;
mod lots;
mod planted;
mod reports;
mod run_report;
mod second_look;
mod sim;
mod steps;
mod tally;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// What every command returns: `Err` holds the text that is printed before the process ends with code 1. It names the
/// likely cause and what to do.
pub(crate) type Outcome = Result<(), String>;

/// The commands of the anymq repository.
#[derive(Parser)]
#[command(name = "cargo xtask", about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure what a message costs, beside other libraries.
    Bench(bench::Args),
    /// Start, list and end the real servers that the tests use.
    Brokers(brokers::Args),
    /// Run the conformance suite on a backend.
    Conformance(conformance::Args),
    /// Run a workload under faults and check its history.
    Faults(faults::Args),
    /// Ends what a killed xtask left running; started by `test` itself.
    #[command(hide = true)]
    Guard(guard::Args),
    /// Make every mistake that the suite is said to notice.
    Planted(planted::Args),
    /// Check that every public report about a broker's clients has a test or a reason.
    Reports(reports::Args),
    /// Run a random workload under seeded faults and judge it.
    Sim(sim::Args),
    /// Everything that has to hold before a change is merged; CI runs this.
    Test(test::Args),
}

fn dispatch(command: Command) -> Outcome {
    match command {
        Command::Bench(args) => bench::run(args),
        Command::Brokers(args) => brokers::run(args),
        Command::Conformance(args) => conformance::run(args),
        Command::Faults(args) => faults::run(args),
        Command::Guard(args) => guard::run(args),
        Command::Planted(args) => planted::run(args),
        Command::Reports(args) => reports::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Test(args) => test::run(args),
    }
}

/// This program, to be started once more. By way of the process and not of the file: building the workspace replaces
/// the file while we run.
pub(crate) fn this_program() -> PathBuf {
    PathBuf::from(format!("/proc/{}/exe", std::process::id()))
}

/// Whether this program has a command of that name: `test` runs what exists.
pub(crate) fn has_command(name: &str) -> bool {
    Cli::command().find_subcommand(name).is_some()
}

fn main() -> ExitCode {
    // Paths are written as seen from the root of the checkout, wherever the command is called.
    if let Err(error) = std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")) {
        eprintln!("error: the checkout that this xtask was built in is gone ({error}); build it again");
        return ExitCode::FAILURE;
    }
    match dispatch(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}
