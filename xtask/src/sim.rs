//! `cargo xtask sim`: a random workload under seeded faults, judged by the promises.

use std::process::Command;

use crate::{Outcome, build_program};

/// Arguments of `cargo xtask sim`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One seed; prints a hash of everything that happened.
    #[arg(long)]
    seed: Option<u64>,
    /// How often that seed is run; all hashes have to be equal.
    #[arg(long, default_value_t = 1, requires = "seed")]
    runs: u64,
    /// Many seeds, from..to, both included.
    #[arg(long, default_value = "1..1000", conflicts_with = "seed")]
    seeds: String,
    /// With one seed: prints what happened when a promise was broken.
    #[arg(long, requires = "seed")]
    verbose: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let mut command = Command::new(build_program::build("mq-conformance")?);
    command.arg("sim");
    match args.seed {
        Some(seed) => command.args(["--seed", &seed.to_string(), "--runs", &args.runs.to_string()]),
        None => command.args(["--seeds", &args.seeds]),
    };
    if args.verbose {
        command.arg("--verbose");
    }
    match command.status().map_err(|e| format!("the simulation could not be started: {e}"))?.success() {
        true => Ok(()),
        false => Err("a promise was broken, or a seed does not repeat; see above".into()),
    }
}
