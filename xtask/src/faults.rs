//! `cargo xtask faults`: the workload under faults.

use crate::Outcome;

/// Arguments of `cargo xtask faults`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_: Args) -> Outcome {
    Err("`cargo xtask faults` is not built yet".into())
}
