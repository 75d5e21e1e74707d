//! `cargo xtask test`: everything that has to hold before a change is merged.

use std::process::Command;

use crate::Outcome;

/// Arguments of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also what takes long: clusters, variants, long fault runs, each feature alone.
    #[arg(long)]
    pub(crate) full: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    if args.full {
        eprintln!("--full adds nothing yet");
    }
    for arguments in [&["build", "--workspace"][..], &["test", "--workspace"][..]] {
        let status =
            Command::new("cargo").args(arguments).status().map_err(|e| format!("cargo does not start: {e}"))?;
        if !status.success() {
            return Err(format!("cargo {} failed", arguments.join(" ")));
        }
    }
    Ok(())
}
