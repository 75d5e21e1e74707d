//! `cargo xtask reports <backend>`: every public bug report of the list has a test, or a reason why it has none.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mq_testbed::Problem;
use serde::Deserialize;

use crate::Outcome;

/// Arguments of `cargo xtask reports`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Whose list, of docs/reports: redis, amqp or kafka.
    backend: String,
}

/// A list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reports {
    report: Vec<Entry>,
}

/// One report: with a test, or with a reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    source: String,
    symptom: String,
    test: Option<String>,
    reason: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let file = format!("docs/reports/{}.toml", args.backend);
    let text =
        fs::read_to_string(&file).map_err(Problem::during(format!("read {file}; there is one for each backend")))?;
    let list: Reports = toml::from_str(&text).map_err(|e| format!("{file} is not a list of reports: {e}"))?;
    let mut functions = BTreeSet::new();
    for folder in [&*format!("mq-{}", args.backend), "mq-conformance/src/tests", "mq-core/tests"] {
        collect(Path::new(folder), &mut functions)?;
    }
    let (mut tested, mut documented, mut missing) = (0, 0, 0);
    for Entry { source, symptom, test, reason } in &list.report {
        match (test, reason) {
            (Some(test), None) if functions.contains(test.rsplit("::").next().unwrap_or(test)) => tested += 1,
            (Some(test), None) => {
                missing += 1;
                println!("missing: {source}: there is no test {test} ({symptom})");
            }
            (None, Some(reason)) if !reason.trim().is_empty() => documented += 1,
            _ => {
                missing += 1;
                println!("missing: {source}: it needs either a test or a reason ({symptom})");
            }
        }
    }
    println!("{} reports: {tested} tested, {documented} documented, {missing} missing", list.report.len());
    if missing > 0 { Err("write the tests, or the reasons".into()) } else { Ok(()) }
}

/// The names of all functions in the Rust files of a folder.
fn collect(folder: &Path, into: &mut BTreeSet<String>) -> Result<(), Problem> {
    let entries = fs::read_dir(folder).map_err(Problem::during(format!("read {}", folder.display())))?;
    for entry in entries {
        let path = entry.map_err(Problem::during(format!("read {}", folder.display())))?.path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, into)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).map_err(Problem::during(format!("read {}", path.display())))?;
            for part in text.split("fn ").skip(1) {
                let end = part.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(part.len());
                into.insert(part[..end].to_owned());
            }
        }
    }
    Ok(())
}
