//! `cargo xtask planted`: every mistake that the suite is said to notice, made on purpose.

use std::process::Command;

use crate::{Outcome, build_program};

/// Arguments of `cargo xtask planted`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only mistakes whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Prints each test and what it said of the mistake.
    #[arg(long)]
    verbose: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let mut command = Command::new(build_program::build("mq-conformance")?);
    command.arg("planted");
    if let Some(filter) = &args.filter {
        command.args(["--filter", filter]);
    }
    if args.verbose {
        command.arg("--verbose");
    }
    match command.status().map_err(|e| format!("the suite could not be started: {e}"))?.success() {
        true => Ok(()),
        false => Err("a planted mistake was not noticed, or a test notices none; see above".into()),
    }
}
