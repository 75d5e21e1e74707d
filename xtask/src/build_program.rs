//! Building a program of the workspace in the same way as everything else, so that nothing is built twice.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use mq_testbed::Problem;
use serde_json::Value;

use crate::features;

/// Builds the binary of that name, with the features of the whole workspace, and tells where it lies.
///
/// Commands that run a program of another crate should use this and not `cargo run -p`: with fewer features selected,
/// cargo would build the dependencies, librdkafka among them, once more.
pub(crate) fn build(name: &str) -> Result<PathBuf, Problem> {
    built(&["build", "--bin", name], |message| message["target"]["name"] == name)
        .and_then(|found| found.ok_or_else(|| Problem::new(format!("no [[bin]] of the workspace is called {name}"))))
}

/// Builds the test program of that name of one package, with the features of the whole workspace, and tells where it lies.
pub(crate) fn build_test(package: &str, name: &str) -> Result<PathBuf, Problem> {
    let manifest = format!("{package}/Cargo.toml");
    built(&["test", "--no-run", "--test", name], |message| {
        message["target"]["name"] == name && message["manifest_path"].as_str().is_some_and(|m| m.ends_with(&manifest))
    })
    .and_then(|found| found.ok_or_else(|| Problem::new(format!("{package} has no test program called {name}"))))
}

/// The executable that cargo built for the first target that is wanted.
fn built(what: &[&str], wanted: impl Fn(&Value) -> bool) -> Result<Option<PathBuf>, Problem> {
    let output = Command::new("cargo")
        .args(what)
        .args(["--message-format", "json-render-diagnostics"])
        .args(features::everything()?)
        .stderr(Stdio::inherit())
        .output()
        .map_err(Problem::during("start cargo"))?;
    if !output.status.success() {
        return Err(Problem::new(format!("cargo {} failed; what it said stands above", what.join(" "))));
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(wanted)
        .find_map(|message| Some(PathBuf::from(message["executable"].as_str()?))))
}
