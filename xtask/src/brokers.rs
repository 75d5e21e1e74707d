//! `cargo xtask brokers`: the real servers.

use crate::Outcome;

/// Arguments of `cargo xtask brokers`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_: Args) -> Outcome {
    Err("`cargo xtask brokers` is not built yet".into())
}
