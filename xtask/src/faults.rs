//! `cargo xtask faults`: the workload under faults.

use crate::Outcome;

/// Arguments of `cargo xtask faults`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which client: `raw`, or a backend of the library.
    client: String,
    /// Few faults, for every change.
    #[arg(long)]
    short: bool,
    /// Many faults, for a release.
    #[arg(long, conflicts_with = "short")]
    long: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let _ = (args.client, args.short, args.long);
    println!("not built");
    Ok(())
}
