//! Runs the suite on the backends that were built in: `mq-conformance conformance memory --profile kafka`.

use mq_conformance::memory::Memory;
use mq_conformance::{Factory, Options, planted, sim};
use mq_memory::Profile;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn main() -> ExitCode {
    match command(std::env::args().skip(1).collect()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

#[derive(Default)]
struct Args {
    words: Vec<String>,
    profile: Option<String>,
    partitions: Option<u32>,
    filter: Option<String>,
    parallel: Option<usize>,
    json: bool,
    verbose: bool,
    write_unsupported: bool,
    seed: Option<u64>,
    runs: u64,
    seeds: Option<(u64, u64)>,
}

fn parse(words: Vec<String>) -> Result<Args, String> {
    let mut args = Args::default();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse::<u32>().map_err(|e| format!("'{text}' is no number: {e}"));
        match word.as_str() {
            "--profile" => args.profile = Some(value()?),
            "--partitions" => args.partitions = Some(number(value()?)?),
            "--filter" => args.filter = Some(value()?),
            "--parallel" => args.parallel = Some(number(value()?)? as usize),
            "--seed" => args.seed = Some(u64::from(number(value()?)?)),
            "--runs" => args.runs = u64::from(number(value()?)?),
            "--seeds" => args.seeds = Some(range(&value()?)?),
            "--json" => args.json = true,
            "--verbose" => args.verbose = true,
            "--write-unsupported" => args.write_unsupported = true,
            other if other.starts_with('-') => return Err(format!("there is no option {other}")),
            other => args.words.push(other.to_owned()),
        }
    }
    Ok(args)
}

/// Reads `1..1000`, both ends included.
fn range(text: &str) -> Result<(u64, u64), String> {
    let bad = || format!("'{text}' is no range of seeds; give 1..1000");
    let (from, to) = text.split_once("..").ok_or_else(bad)?;
    Ok((from.parse().map_err(|_| bad())?, to.parse().map_err(|_| bad())?))
}

/// `sim --seed 7 --runs 2` prints a hash for each run; `sim --seeds 1..1000` judges many seeds.
fn simulate(args: &Args) -> Result<bool, String> {
    if let Some(seed) = args.seed {
        let runs: Vec<_> = (0..args.runs.max(1)).map(|_| sim::run(seed)).collect();
        for run in &runs {
            if args.verbose {
                println!("{}", run.timeline);
            }
            run.violations.iter().for_each(|v| println!("seed {seed}: {v}"));
            println!("{:016x}", run.hash);
        }
        let same = runs.windows(2).all(|two| two[0].hash == two[1].hash);
        return Ok(same && runs.iter().all(|run| run.violations.is_empty()));
    }
    let (from, to) = args.seeds.unwrap_or((1, 1000));
    let next = AtomicU64::new(from);
    let broken = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..args.parallel.unwrap_or(2) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > to {
                        return;
                    }
                    let run = sim::run(seed);
                    broken.fetch_add(run.violations.len() as u64, Ordering::Relaxed);
                    run.violations.iter().for_each(|v| println!("seed {seed}: {v}"));
                }
            });
        }
    });
    let broken = broken.into_inner();
    println!("{} seeds, {broken} violations", to + 1 - from);
    Ok(broken == 0)
}

fn command(words: Vec<String>) -> Result<bool, String> {
    let args = parse(words)?;
    let options = Options {
        filter: args.filter.clone(),
        partitions: args.partitions,
        parallel: args.parallel.unwrap_or(2),
        wall: None,
        verbose: args.verbose,
    };
    let profile = match &args.profile {
        None => Profile::Memory,
        Some(name) => Profile::by_name(name).ok_or(format!("there is no profile '{name}'"))?,
    };
    let factory: Arc<dyn Factory> = Arc::new(Memory { profile });
    let words: Vec<&str> = args.words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["conformance", "memory"] => {
            let mut report = mq_conformance::run(&factory, &mq_conformance::all(), &options);
            if args.write_unsupported {
                let path = format!("mq-conformance/unsupported/{}.txt", report.backend);
                std::fs::write(&path, report.refusals()).map_err(|e| format!("{path}: {e}"))?;
            }
            report.hold_against(mq_conformance::expected_refusals(&report.backend.clone()));
            if args.json {
                println!("{}", report.json());
            } else {
                println!("{}", report.table());
                println!("{}", report.histories());
            }
            println!("{}", report.last_line());
            Ok(report.failed() == 0)
        }
        ["planted"] => {
            let harvest = planted::run(&factory, &mq_conformance::all(), &options);
            println!("{}", harvest.table());
            Ok(harvest.is_complete())
        }
        ["sim"] => simulate(&args),
        other => Err(format!("there is no command {other:?}")),
    }
}
