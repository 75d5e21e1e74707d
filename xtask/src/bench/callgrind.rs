//! Counts instructions: `(Ir(2N) - Ir(N)) / N`, so that what happens once (start, buffers that grow) is not in the number.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A program with scenarios: `PROGRAM SCENARIO N`.
pub(super) struct Program(PathBuf);

/// What a message costs.
pub(super) struct Cost {
    pub(super) instructions: f64,
    /// `None` where the program does not count them.
    pub(super) allocations: Option<f64>,
}

impl Program {
    /// Builds a program by cargo and finds it.
    pub(super) fn build(args: &[&str]) -> Result<Self, String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(args)
            .arg("--message-format=json-render-diagnostics")
            .stderr(std::process::Stdio::inherit())
            .output()
            .map_err(|e| format!("cargo does not start: {e}"))?;
        if !output.status.success() {
            return Err(format!("cargo {} failed; its words are above", args.join(" ")));
        }
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
            .next_back()
            .map(Self)
            .ok_or_else(|| format!("cargo {} built no program", args.join(" ")))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// The names of its scenarios.
    pub(super) fn scenarios(&self) -> Result<Vec<String>, String> {
        Ok(self.output(&["--list"])?.lines().map(str::to_owned).collect())
    }

    fn output(&self, args: &[&str]) -> Result<String, String> {
        let output = Command::new(&self.0).args(args).output().map_err(|e| format!("{}: {e}", self.0.display()))?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{} {} failed: {words}", self.0.display(), args.join(" ")));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What a message of this scenario costs, measured over `n` of them.
    pub(super) fn cost(&self, scenario: &str, n: u64) -> Result<Cost, String> {
        let (once, twice) = (self.instructions(scenario, n)?, self.instructions(scenario, 2 * n)?);
        let text = self.output(&[scenario, &(n * 10).to_string()])?;
        let allocations = text.split("allocs/msg ").nth(1).and_then(|t| t.trim().parse().ok());
        Ok(Cost { instructions: (twice as f64 - once as f64) / n as f64, allocations })
    }

    fn instructions(&self, scenario: &str, n: u64) -> Result<u64, String> {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(&self.0)
            .args([scenario, &n.to_string()])
            .output()
            .map_err(|e| format!("valgrind does not start ({e}); install it: apt-get install valgrind"))?;
        let words = String::from_utf8_lossy(&output.stderr);
        words
            .split("Collected : ")
            .nth(1)
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse().ok())
            .filter(|_| output.status.success())
            .ok_or_else(|| format!("valgrind gave no count for {scenario} {n}:\n{words}"))
    }
}
