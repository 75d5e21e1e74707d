//! How a run of `cargo xtask test` closes: the table, what was skipped, the verdict, and `reports/full.json`.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use mq_testbed::{Problem, Want};
use serde_json::json;

use crate::Outcome;
use crate::steps::{Report, Step};
use crate::tally::{self, Count};

/// Where tests write the names of those that lacked a server, see `mq_testbed::need`.
pub(crate) struct Skips(PathBuf);

impl Skips {
    pub(crate) fn new() -> Result<Self, Problem> {
        let folder = mq_testbed::records().join("xtask");
        fs::create_dir_all(&folder).map_err(Problem::during(format!("make {}", folder.display())))?;
        let file = folder.join("skips");
        fs::write(&file, "").map_err(Problem::during(format!("write {}", file.display())))?;
        Ok(Self(file))
    }

    /// Has the step write its skips here.
    pub(crate) fn told_to(&self, step: Step) -> Step {
        step.env("MQ_TEST_SKIPS", self.0.display().to_string())
    }

    /// Notes something that was not run.
    pub(crate) fn note(&self, what: &str) {
        println!("NOT RUN: {what}");
        if let Ok(mut file) = fs::File::options().append(true).open(&self.0) {
            // It stands on the screen already.
            let _ = writeln!(file, "{}", what.replace('\n', " "));
        }
    }

    pub(crate) fn read(&self) -> Vec<String> {
        fs::read_to_string(&self.0).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

/// What there is to say beside the reports.
pub(crate) struct Left {
    pub(crate) full: bool,
    pub(crate) only: Option<String>,
    pub(crate) missing: Vec<Want>,
    pub(crate) skips: Vec<String>,
    pub(crate) wall: Duration,
}

impl Left {
    /// Prints all of it, and gives the verdict.
    pub(crate) fn finish(self, reports: &[Report]) -> Outcome {
        let mut sum = tally::table(reports);
        println!("wall time {:.0} s", self.wall.as_secs_f64());
        for report in reports.iter().filter(|report| !report.failures.is_empty()) {
            println!("failed in {}:\n  {}", report.step.row(), report.failures.join("\n  "));
        }
        for skip in &self.skips {
            println!("skipped: {skip}");
        }
        for want in &self.missing {
            println!("skipped: everything on {}, which is missing", want.name());
        }
        sum.skipped += u64::try_from(self.skips.len() + self.missing.len()).unwrap_or(u64::MAX);
        if sum.late > 0 {
            println!("{} tests failed beside others and passed when they ran alone (named above)", sum.late);
        }
        if sum.left_for_full > 0 {
            println!("{} tests are marked as long and run with --full", sum.left_for_full);
        }
        if sum.unsupported > 0 {
            println!("{} refusals that the contract lists (unsupported, not skipped)", sum.unsupported);
        }
        let problem = if self.full { self.write(reports, sum).err() } else { None };
        let Count { passed, failed, skipped, .. } = sum;
        let skips_fail = std::env::var("CI").is_ok_and(|value| value == "true");
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if let Some(problem) = problem {
            return Err(problem.into());
        }
        match (failed, skipped) {
            _ if reports.is_empty() => Err("no step has that in its row; `cargo xtask test` shows the rows".into()),
            (0, 0) => Ok(()),
            (0, _) if !skips_fail => Ok(()),
            (0, _) => Err("with CI=true a skip is a failure; what is missing stands above".into()),
            _ => Err("see the FAILED steps above; their logs are in target/xtask".into()),
        }
    }

    /// `reports/full.json`: what was run on which commit. Of a part of the run (`--only`) it says so.
    fn write(&self, reports: &[Report], sum: Count) -> Result<(), Problem> {
        let git = |args: &[&str]| {
            let output = Command::new("git").args(args).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
        };
        let row = |Report { step, count, took, .. }: &Report| {
            json!({
                "backend": step.backend,
                "suite": step.suite,
                "passed": count.passed,
                "failed": count.failed,
                "skipped": count.skipped,
                "late": count.late,
                "unsupported": count.unsupported,
                "not_built": count.not_built,
                "seconds": took.as_secs_f64(),
            })
        };
        let report = json!({
            "commit": git(&["rev-parse", "HEAD"]),
            "uncommitted_changes": !git(&["status", "--porcelain"]).is_empty(),
            "only": self.only,
            "passed": sum.passed,
            "failed": sum.failed,
            "skipped": sum.skipped,
            "late": sum.late,
            "skips": self.skips,
            "missing": self.missing.iter().map(|want| want.name()).collect::<Vec<_>>(),
            "wall_seconds": self.wall.as_secs_f64(),
            "steps": reports.iter().map(row).collect::<Vec<_>>(),
        });
        fs::create_dir_all("reports").map_err(Problem::during("make the folder reports"))?;
        fs::write("reports/full.json", format!("{report:#}\n")).map_err(Problem::during("write reports/full.json"))
    }
}
