//! `cargo xtask conformance <backend>`: the suite on one backend, or held against the profile that memory has of it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::{Outcome, build_program, features};

/// Arguments of `cargo xtask conformance`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// `memory`, `redis`, `redis-pubsub`, `amqp`, `amqp-classic` or `kafka`.
    #[arg(required_unless_present_any = ["write_table", "check_table"])]
    backend: Option<String>,
    /// Memory with the capabilities of this backend.
    #[arg(long)]
    profile: Option<String>,
    /// Runs the backend and memory with its profile, and prints each test whose result or counts differ.
    #[arg(long, conflicts_with = "profile")]
    compare_profile: bool,
    /// Only with this many partitions: 1 or 8.
    #[arg(long)]
    partitions: Option<u32>,
    /// Only tests whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Tests at a time.
    #[arg(long)]
    parallel: Option<u32>,
    /// Prints each result as it comes.
    #[arg(long)]
    verbose: bool,
    /// Prints the report as JSON.
    #[arg(long)]
    json: bool,
    /// Writes docs/capabilities.md from a run.
    #[arg(long)]
    write_table: bool,
    /// Checks that docs/capabilities.md is what a run gives.
    #[arg(long, conflicts_with = "write_table")]
    check_table: bool,
}

/// The test programs that run the suite on a real server: backend, and the directory of its crate.
const REAL: [(&str, &str); 5] = [
    ("redis", "mq-redis"),
    ("redis-pubsub", "mq-redis"),
    ("amqp", "mq-amqp"),
    ("amqp-classic", "mq-amqp"),
    ("kafka", "mq-kafka"),
];

const PROGRAM: &str = "mq-conformance";
const TABLE: &str = "docs/capabilities.md";

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    if args.write_table || args.check_table {
        return table(args.write_table);
    }
    let backend = args.backend.as_deref().unwrap_or("memory");
    if features::stubs().iter().any(|stub| backend.starts_with(stub)) {
        println!("not built");
        return Ok(());
    }
    if args.compare_profile {
        return compare(&args, backend);
    }
    let status = command(&args, backend)?.status().map_err(|e| format!("the suite could not be started: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("conformance {backend} failed; its report stands above")) }
}

/// The program that runs the suite on a backend, with the arguments of this call.
fn command(args: &Args, backend: &str) -> Result<Command, String> {
    let mut command = if backend == "memory" {
        let mut command = Command::new(build_program::build(PROGRAM)?);
        command.arg("conformance");
        if let Some(profile) = &args.profile {
            command.args(["--profile", profile]);
        }
        command
    } else {
        let Some((_, package)) = REAL.iter().find(|(name, _)| *name == backend) else {
            let all = REAL.map(|(name, _)| name).join(", ");
            return Err(format!("there is no backend '{backend}'; there are memory, {all}"));
        };
        if args.profile.is_some() {
            return Err("--profile is for memory; a real backend has the capabilities that it has".into());
        }
        let mut command = Command::new(build_program::build_test(package, "conformance")?);
        command.current_dir(package).arg(backend);
        command
    };
    if let Some(n) = args.partitions {
        command.args(["--partitions", &n.to_string()]);
    }
    if let Some(filter) = &args.filter {
        command.args(["--filter", filter]);
    }
    if let Some(n) = args.parallel {
        command.args(["--parallel", &n.to_string()]);
    }
    if args.verbose {
        command.arg("--verbose");
    }
    if args.json {
        command.arg("--json");
    }
    Ok(command)
}

/// Runs the backend and its profile, and lets the suite's own program hold one report against the other.
fn compare(args: &Args, backend: &str) -> Outcome {
    let folder = PathBuf::from("target/conformance");
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let quiet = |profile: Option<&str>| Args {
        backend: None,
        profile: profile.map(str::to_owned),
        compare_profile: false,
        partitions: args.partitions,
        filter: args.filter.clone(),
        parallel: args.parallel,
        verbose: false,
        json: true,
        write_table: false,
        check_table: false,
    };
    let profile = if backend == "memory" { None } else { Some(backend) };
    let mut paths = Vec::new();
    for (name, args, of) in [(backend, quiet(None), backend), ("profile", quiet(profile), "memory")] {
        let output = command(&args, of)?.output().map_err(|e| format!("the suite could not be started: {e}"))?;
        let path = folder.join(format!("{name}.json"));
        fs::write(&path, &output.stdout).map_err(|e| format!("{}: {e}", path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{name}: {}", text.lines().next_back().unwrap_or("no output"));
        paths.push(path);
    }
    let program = build_program::build(PROGRAM)?;
    let status = Command::new(program).arg("compare").args(&paths).status();
    match status.map_err(|e| format!("the comparison could not be started: {e}"))?.success() {
        true => Ok(()),
        false => Err(format!("{backend} differs from memory with its profile")),
    }
}

/// Writes the table of the documentation, or checks it.
fn table(write: bool) -> Outcome {
    let output = Command::new(build_program::build(PROGRAM)?).arg("table").output();
    let output = output.map_err(|e| format!("the suite could not be started: {e}"))?;
    if !output.status.success() {
        return Err(format!("the table could not be made: {}", String::from_utf8_lossy(&output.stderr)));
    }
    if write {
        return fs::write(TABLE, &output.stdout).map_err(|e| format!("{TABLE}: {e}"));
    }
    match fs::read(TABLE) {
        Ok(found) if found == output.stdout => {
            println!("{TABLE} is current");
            Ok(())
        }
        Ok(_) => Err(format!("{TABLE} is out of date; run `cargo xtask conformance --write-table`")),
        Err(e) => Err(format!("{TABLE}: {e}; run `cargo xtask conformance --write-table`")),
    }
}
