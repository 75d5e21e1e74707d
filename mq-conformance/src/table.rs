//! The capability table of the documentation, made from runs and nothing else.

use crate::{Outcome, Report};
use std::fmt::Write;

/// Rows are features, columns the backends of `reports`, as they were run.
pub fn table(reports: &[Report]) -> String {
    let mut text = String::from(
        "# Capabilities\n\n\
         Made by `cargo xtask conformance --write-table` from a run of the suite; `cargo xtask test` checks that it is\n\
         current. The columns are the in-memory broker and its profiles, which have the capabilities of the brokers they are\n\
         named after; each backend's own run is held against its profile.\n\n\
         **yes**: the broker does it. **emulated**: the library does it on top of the broker. **no**: a program that asks for\n\
         it is refused at start, and the refusal names the feature. Behind each word: the tests that passed of those\n\
         that need the feature, or the tests of the refusal.\n\n",
    );
    let Some(first) = reports.first() else { return text };
    let columns: Vec<&str> = reports.iter().map(|r| r.backend.as_str()).collect();
    let _ = writeln!(text, "| feature | {} |", columns.join(" | "));
    let _ = writeln!(text, "|---|{}", "---|".repeat(columns.len()));
    for stated in &first.capabilities {
        let cells: Vec<String> = reports.iter().map(|r| cell(r, &stated.feature)).collect();
        let _ = writeln!(text, "| {} | {} |", stated.feature, cells.join(" | "));
    }
    let levels = |of: fn(&Report) -> &str| reports.iter().map(of).collect::<Vec<_>>().join(" | ");
    let _ = writeln!(text, "| level of a confirmed send | {} |", levels(|r| &r.levels.0));
    let _ = writeln!(text, "| level of a settlement | {} |", levels(|r| &r.levels.1));
    text.push_str(
        "\nA networked backend states the levels that it found at the server; those above are a default server's.\n",
    );
    notes(&mut text, reports);
    text
}

fn cell(report: &Report, feature: &str) -> String {
    let Some(stated) = report.capabilities.iter().find(|s| s.feature == feature) else { return "?".to_owned() };
    let short = match feature {
        "per-key order" => "per_key".to_owned(),
        other => other.replace(' ', "_"),
    };
    let of = |outcome: fn(&Outcome) -> bool| {
        let about = |e: &&crate::Entry| {
            e.needs.iter().any(|n| n == feature)
                || e.name == format!("cap_without_{short}_refused")
                || e.name.starts_with(&format!("cap_{short}_work"))
        };
        report.entries.iter().filter(about).filter(|e| outcome(&e.outcome)).count()
    };
    let failed = of(|o| matches!(o, Outcome::Failed { .. }));
    if failed > 0 {
        return format!("FAILED ({failed})");
    }
    if of(|_| true) == 0 {
        // Nothing in the interface asks for it yet, so nothing is claimed.
        return "untested".to_owned();
    }
    match stated.support.as_str() {
        "unsupported" => format!("no ({})", of(|_| true)),
        other => {
            let word = if other == "native" { "yes" } else { "emulated" };
            format!("{word} ({})", of(|o| matches!(o, Outcome::Passed)))
        }
    }
}

/// How it is emulated, and what is missing and why, by backend.
fn notes(text: &mut String, reports: &[Report]) {
    for report in reports {
        let noted: Vec<_> = report.capabilities.iter().filter(|s| !s.note.is_empty()).collect();
        if noted.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\n## {}\n", report.backend);
        for stated in noted {
            let _ = writeln!(text, "- {} ({}): {}", stated.feature, stated.support, stated.note);
        }
    }
}
