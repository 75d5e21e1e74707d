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
    let output = Command::new("cargo")
        .args(["build", "--bin", name, "--message-format", "json-render-diagnostics"])
        .args(features::everything()?)
        .stderr(Stdio::inherit())
        .output()
        .map_err(Problem::during("start cargo build"))?;
    if !output.status.success() {
        return Err(Problem::new(format!("cargo could not build {name}; what it said stands above")));
    }
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .ok_or_else(|| Problem::new(format!("cargo built no binary called {name}; is it a [[bin]] of the workspace?")))
}
