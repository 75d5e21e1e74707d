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

/// A server that a test program found or started.
pub struct OnServer {
    /// How the suite reaches it.
    pub factory: Arc<dyn Factory>,
    /// What it is, printed above the last line.
    pub server: String,
    /// Ends with the program: the server, when it is the program's own.
    pub own: Option<Box<dyn std::any::Any>>,
}

/// The test program of a real backend. Does nothing unless the words name one of `backends`, so that `cargo test` stays
/// quick; then starts the server and runs the suite as [`program`] does, with the same words.
pub fn on_server(backends: &[&str], start: impl FnOnce(&str) -> Result<OnServer, String>) -> ExitCode {
    on_server_with(backends, Options { parallel: 4, ..Options::default() }, start)
}

/// The same, with other options where the words give none.
pub fn on_server_with(
    backends: &[&str],
    options: Options,
    start: impl FnOnce(&str) -> Result<OnServer, String>,
) -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let Some(at) = words.iter().position(|word| backends.contains(&word.as_str())) else {
        println!(
            "nothing to do: name a backend, {}",
            backends.iter().map(|b| format!("`-- {b}`")).collect::<Vec<_>>().join(" or ")
        );
        return ExitCode::SUCCESS;
    };
    let backend = words.remove(at);
    match start(&backend) {
        Ok(on) => {
            let code = run(&on.factory, words, options, Some(&on.server));
            drop(on.own);
            code
        }
        Err(problem) => {
            eprintln!("error: no server for {backend}: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the whole suite on `factory`, prints what the words ask for, and ends with `N passed, 0 failed, M unsupported`.
///
/// Words: `--filter WORD`, `--partitions N`, `--parallel N`, `--verbose`, `--json`, `--write-unsupported FILE`.
pub fn program(factory: &Arc<dyn Factory>, words: impl IntoIterator<Item = String>, options: Options) -> ExitCode {
    run(factory, words, options, None)
}

fn run(
    factory: &Arc<dyn Factory>,
    words: impl IntoIterator<Item = String>,
    mut options: Options,
    server: Option<&str>,
) -> ExitCode {
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
        if let Some(server) = server {
            println!("server: {server}");
        }
    }
    println!("{}", report.last_line());
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
