//! Runs the suite on the backends that were built in: `mq-conformance conformance memory --profile kafka`.

use mq_conformance::memory::Memory;
use mq_conformance::{Factory, Options, planted};
use mq_memory::Profile;
use std::process::ExitCode;
use std::sync::Arc;

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
            "--json" => args.json = true,
            "--verbose" => args.verbose = true,
            "--write-unsupported" => args.write_unsupported = true,
            other if other.starts_with('-') => return Err(format!("there is no option {other}")),
            other => args.words.push(other.to_owned()),
        }
    }
    Ok(args)
}

fn command(words: Vec<String>) -> Result<bool, String> {
    let args = parse(words)?;
    let options = Options {
        filter: args.filter.clone(),
        partitions: args.partitions,
        parallel: args.parallel.unwrap_or(2),
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
        other => Err(format!("there is no command {other:?}")),
    }
}
