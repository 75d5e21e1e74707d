//! The suite on the in-memory broker, the planted bugs, the simulation, and the comparison of reports.
//!
//! ```text
//! mq-conformance conformance [--profile P] [--filter W] [--partitions N] [--parallel N] [--verbose] [--json]
//! mq-conformance planted [--filter W] [--parallel N] [--verbose]
//! mq-conformance sim [--seed S [--runs N]] [--seeds A..B] [--parallel N] [--verbose]
//! mq-conformance compare A.json B.json
//! mq-conformance table
//! ```

mod simulate;

use mq_conformance::memory::Memory;
use mq_conformance::{Factory, Options, Report, planted};
use mq_memory::Profile;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if words.is_empty() {
        eprintln!("error: give a command: conformance, planted, sim, compare or table");
        return ExitCode::FAILURE;
    }
    let command = words.remove(0);
    let done = match command.as_str() {
        "conformance" => return conformance(words),
        "planted" => plant(words),
        "sim" => simulate::run(words),
        "compare" => compare(&words),
        "table" => table(),
        other => Err(format!("there is no command '{other}'")),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Takes an option and its value out of the words.
fn take(words: &mut Vec<String>, name: &str) -> Result<Option<String>, String> {
    let Some(at) = words.iter().position(|w| w == name) else { return Ok(None) };
    if at + 1 >= words.len() {
        return Err(format!("{name} needs a value"));
    }
    words.remove(at);
    Ok(Some(words.remove(at)))
}

fn memory(profile: Profile) -> Arc<dyn Factory> {
    Arc::new(Memory { profile })
}

fn conformance(mut words: Vec<String>) -> ExitCode {
    let profile = take(&mut words, "--profile").and_then(|name| match name {
        None => Ok(Profile::Memory),
        Some(name) => Profile::by_name(&name).ok_or_else(|| {
            let all = Profile::ALL.map(Profile::as_str).join(", ");
            format!("there is no profile '{name}'; there are {all}")
        }),
    });
    match profile {
        Ok(profile) => mq_conformance::program(&memory(profile), words, Options::default()),
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

fn plant(mut words: Vec<String>) -> Result<bool, String> {
    let mut options = Options { filter: take(&mut words, "--filter")?, ..Options::default() };
    if let Some(n) = take(&mut words, "--parallel")? {
        options.parallel = n.parse().map_err(|e| format!("'{n}' is no number: {e}"))?;
    }
    for word in words {
        match word.as_str() {
            "--verbose" => options.verbose = true,
            other => return Err(format!("there is no option '{other}'")),
        }
    }
    let harvest = planted::run(&memory(Profile::Memory), &mq_conformance::all(), &options);
    println!("{}", harvest.table());
    Ok(harvest.is_complete())
}

fn compare(paths: &[String]) -> Result<bool, String> {
    let [one, two] = paths else { return Err("compare takes two files".to_owned()) };
    let read = |path: &String| {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
        Report::read(&text).map_err(|e| format!("{path}: {e}"))
    };
    let differences = read(one)?.differences(&read(two)?);
    differences.iter().for_each(|line| println!("{line}"));
    println!("{} differences", differences.len());
    Ok(differences.is_empty())
}

/// The tests of the capabilities under every profile.
fn table() -> Result<bool, String> {
    let options = Options { filter: Some("cap_".to_owned()), ..Options::default() };
    let reports: Vec<Report> = Profile::ALL
        .into_iter()
        .map(|profile| mq_conformance::run(&memory(profile), &mq_conformance::all(), &options))
        .collect();
    print!("{}", mq_conformance::table(&reports));
    match reports.iter().map(Report::failed).sum::<usize>() {
        0 => Ok(true),
        n => Err(format!("{n} tests of capabilities failed")),
    }
}
