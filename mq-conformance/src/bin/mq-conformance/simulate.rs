//! `sim`: one seed several times, to see that it repeats, or many seeds, to see that no promise breaks.

use super::take;
use mq_conformance::sim;
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads `1..1000`, both ends included.
fn range(text: &str) -> Result<(u64, u64), String> {
    let bad = || format!("'{text}' is no range of seeds; give 1..1000");
    let (from, to) = text.split_once("..").ok_or_else(bad)?;
    Ok((from.parse().map_err(|_| bad())?, to.trim_start_matches('=').parse().map_err(|_| bad())?))
}

fn number(words: &mut Vec<String>, name: &str) -> Result<Option<u64>, String> {
    let parse = |text: String| text.parse().map_err(|e| format!("{name}: '{text}' is no number: {e}"));
    take(words, name)?.map(parse).transpose()
}

pub(super) fn run(mut words: Vec<String>) -> Result<bool, String> {
    let (seed, runs) = (number(&mut words, "--seed")?, number(&mut words, "--runs")?);
    let parallel = number(&mut words, "--parallel")?.unwrap_or(2);
    let seeds = take(&mut words, "--seeds")?;
    let verbose = words.iter().any(|w| w == "--verbose");
    if let Some(other) = words.iter().find(|w| *w != "--verbose") {
        return Err(format!("there is no option '{other}'"));
    }
    match seed {
        Some(seed) => Ok(again(seed, runs.unwrap_or(1), verbose)),
        None => {
            let (from, to) = range(seeds.as_deref().unwrap_or("1..1000"))?;
            Ok(many(from, to, parallel))
        }
    }
}

/// Prints one hash for each run of the seed; all have to be the same.
fn again(seed: u64, runs: u64, verbose: bool) -> bool {
    let runs: Vec<_> = (0..runs.max(1)).map(|_| sim::run(seed)).collect();
    for run in &runs {
        if verbose {
            println!("{}", run.timeline);
        }
        run.violations.iter().for_each(|v| println!("seed {seed}: {v}"));
    }
    runs.iter().for_each(|run| println!("{:016x}", run.hash));
    let same = runs.windows(2).all(|two| two[0].hash == two[1].hash);
    same && runs.iter().all(|run| run.violations.is_empty())
}

fn many(from: u64, to: u64, parallel: u64) -> bool {
    let next = AtomicU64::new(from);
    let broken = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..parallel.max(1) {
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
    println!("{} seeds, {broken} violations", (to + 1).saturating_sub(from));
    broken == 0
}
