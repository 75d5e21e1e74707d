//! The command line of a program that runs the suite on one backend, so that all of them take and print the same.

use crate::{Factory, Options, expected_refusals};
use std::process::ExitCode;
use std::sync::Arc;

/// What the words ask for beside [`Options`].
#[derive(Default)]
struct Printing {
    json: bool,
    write_unsupported: Option<String>,
}

fn parse(words: impl IntoIterator<Item = String>, options: &mut Options) -> Result<Printing, String> {
    let mut printing = Printing::default();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse::<u32>().map_err(|e| format!("'{text}' is no number: {e}"));
        match word.as_str() {
            "--filter" => options.filter = Some(value()?),
            "--partitions" => options.partitions = Some(number(value()?)?),
            "--parallel" => options.parallel = number(value()?)? as usize,
            "--verbose" => options.verbose = true,
            "--json" => printing.json = true,
            "--write-unsupported" => printing.write_unsupported = Some(value()?),
            // What cargo's own test harness takes is passed to every test program alike.
            "--include-ignored" | "--nocapture" | "--no-capture" | "--quiet" => {}
            other => return Err(format!("there is no option '{other}'")),
        }
    }
    Ok(printing)
}

/// Runs the whole suite on `factory`, prints what the words ask for, and ends with `N passed, 0 failed, M unsupported`.
///
/// Words: `--filter WORD`, `--partitions N`, `--parallel N`, `--verbose`, `--json`, `--write-unsupported FILE`.
pub fn program(factory: &Arc<dyn Factory>, words: impl IntoIterator<Item = String>, mut options: Options) -> ExitCode {
    let printing = match parse(words, &mut options) {
        Ok(printing) => printing,
        Err(text) => {
            eprintln!("error: {text}");
            return ExitCode::FAILURE;
        }
    };
    let mut report = crate::run(factory, &crate::all(), &options);
    if let Some(path) = printing.write_unsupported
        && let Err(e) = std::fs::write(&path, report.refusals())
    {
        eprintln!("error: {path}: {e}");
        return ExitCode::FAILURE;
    }
    report.hold_against(expected_refusals(&factory.name()));
    if printing.json {
        println!("{}", report.json());
    } else {
        println!("{}", report.table());
        println!("{}", report.histories());
    }
    println!("{}", report.last_line());
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
