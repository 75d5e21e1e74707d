//! `cargo xtask bench redis | amqp | kafka`: builds the program in `benches/brokers`, starts the server, runs it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use mq_testbed::{Fleet, KafkaOptions, Kind, Problem, Server, Want};

use super::callgrind::Program;
use super::page;
use crate::Outcome;

/// Arguments of these commands.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Alternating runs of each contestant; fewer than 15 decide little.
    #[arg(long, default_value_t = 15)]
    pairs: usize,
    /// Without the other libraries, which take some minutes to build.
    #[arg(long)]
    no_peers: bool,
    /// Put the table into docs/performance.md.
    #[arg(long)]
    write: bool,
}

/// Runs one of them.
pub(crate) fn run(backend: &str, kind: Kind, args: &Args) -> Outcome {
    // A folder of its own: other features than those of the tests must not have everything built again.
    let program = Program::build(&[
        "build",
        "--release",
        "--package",
        "bench-brokers",
        "--features",
        backend,
        "--target-dir",
        "target/bench",
    ])?;
    let peers = match args.no_peers {
        true => None,
        false => Some(Program::build(&[
            "build",
            "--release",
            "--manifest-path",
            "bench-peers/brokers/Cargo.toml",
            "--features",
            backend,
            "--target-dir",
            "target/peers",
        ])?),
    };
    // For measuring Kafka gets what its start script gives it; the tests' starts sooner and computes slower.
    let in_full = match kind {
        Kind::Kafka if Want::Single(kind).given().is_none() => {
            mq_testbed::provide(&[Want::Single(kind)], |line| println!("{line}"))?;
            Some(KafkaOptions { in_full: true, ..KafkaOptions::default() }.start()?)
        }
        _ => None,
    };
    let fleet = match in_full {
        Some(_) => None,
        None => Some(Fleet::for_run(&[kind], |line| println!("{line}"))?),
    };
    let given = || fleet.as_ref()?.variables().into_iter().next().map(|(_, url)| url);
    let Some(url) = in_full.as_ref().map(Server::url).or_else(given) else {
        return Err(format!("no server: {:?}", fleet.and_then(|fleet| Some(fleet.entries().first()?.origin.clone()))));
    };
    let mut child = Command::new(program.path())
        .args(["all", backend, &url, &args.pairs.to_string()])
        .args(peers.as_ref().map(Program::path))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(Problem::during("start the benchmark"))?;
    let mut table = String::new();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            println!("{line}");
            table += &line;
            table.push('\n');
        }
    }
    let status = child.wait().map_err(Problem::during("wait for the benchmark"))?;
    if !status.success() {
        return Err(format!("bench {backend} could not be run to its end; what it said stands above"));
    }
    if args.write {
        page::write(backend, &table)?;
    }
    let last = table.lines().next_back().unwrap_or_default();
    // Undecided is no failure of the library, and no proof either.
    if last.contains(" 0 missed") && !last.contains("void") { Ok(()) } else { Err(format!("bench {backend}: {last}")) }
}
