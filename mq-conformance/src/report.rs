//! What a run found: by promise, as JSON, and in one last line.

use mq_api::{Capabilities, Feature, Support};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// What became of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "lowercase")]
pub enum Outcome {
    /// The promise holds.
    Passed,
    /// It does not, and why.
    Failed {
        /// What was found.
        text: String,
        /// What happened, in order.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        history: String,
    },
    /// The capabilities refuse it, and the refusal was tested.
    Unsupported {
        /// What is missing.
        missing: Vec<String>,
    },
}

/// One test of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Entry {
    /// Its name; with `@8` when it ran on eight partitions.
    pub name: String,
    /// The promise.
    pub promise: String,
    /// The features that it needs.
    #[serde(default)]
    pub needs: Vec<String>,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Numbers it came to.
    pub counts: BTreeMap<String, u64>,
    /// How long it took on the wall.
    #[serde(with = "millis", rename = "millis")]
    pub took: Duration,
}

mod millis {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub(super) fn serialize<S: Serializer>(took: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(took.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

/// What the backend says of one feature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stated {
    /// The feature.
    pub feature: String,
    /// `native`, `emulated` or `unsupported`.
    pub support: String,
    /// How it is emulated, or why it is missing.
    pub note: String,
}

impl Stated {
    /// All features of a backend.
    pub fn all(found: &Capabilities) -> Vec<Self> {
        let one = |feature: &Feature| {
            let (support, note) = match found.support(*feature) {
                Support::Native => ("native", ""),
                Support::Emulated(how) => ("emulated", *how),
                Support::Unsupported(why) => ("unsupported", *why),
            };
            Self { feature: feature.to_string(), support: support.to_owned(), note: note.to_owned() }
        };
        Feature::ALL.iter().map(one).collect()
    }
}

/// All tests of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// The backend.
    pub backend: String,
    /// What it says that it can do.
    #[serde(default)]
    pub capabilities: Vec<Stated>,
    /// Level of a confirmed send, and of a confirmed settlement.
    #[serde(default)]
    pub levels: (String, String),
    /// In the order of the suite.
    pub entries: Vec<Entry>,
}

impl Report {
    fn number(&self, wanted: impl Fn(&Outcome) -> bool) -> usize {
        self.entries.iter().filter(|e| wanted(&e.outcome)).count()
    }

    /// How many passed.
    pub fn passed(&self) -> usize {
        self.number(|o| matches!(o, Outcome::Passed))
    }

    /// How many failed.
    pub fn failed(&self) -> usize {
        self.number(|o| matches!(o, Outcome::Failed { .. }))
    }

    /// How many the capabilities refuse.
    pub fn unsupported(&self) -> usize {
        self.number(|o| matches!(o, Outcome::Unsupported { .. }))
    }

    /// Holds the run against the list of tests that may be refused: a refusal that is not listed fails, and so does a listed
    /// one that passed, because the list is then out of date.
    pub fn hold_against(&mut self, listed: &str) {
        let listed: Vec<&str> =
            listed.lines().map(|l| l.split('#').next().unwrap_or("").trim()).filter(|l| !l.is_empty()).collect();
        for entry in &mut self.entries {
            let known = listed.contains(&entry.name.as_str());
            let text = match &entry.outcome {
                Outcome::Unsupported { missing } if !known => {
                    format!("refused ({}), but unsupported/{}.txt does not list it", missing.join(", "), self.backend)
                }
                Outcome::Passed if known => {
                    format!("passed, though unsupported/{}.txt lists it: take it off", self.backend)
                }
                _ => continue,
            };
            entry.outcome = Outcome::Failed { text, history: String::new() };
        }
    }

    /// The lines of a file of expected refusals.
    pub fn refusals(&self) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            if let Outcome::Unsupported { missing } = &entry.outcome {
                let _ = writeln!(text, "{} # {}", entry.name, missing.join(", "));
            }
        }
        text
    }

    /// A table by promise: how many tests, what became of them, and those that did not pass by name.
    pub fn table(&self) -> String {
        let mut promises: Vec<&str> = self.entries.iter().map(|e| e.promise.as_str()).collect();
        promises.sort_by_key(|p| sort_key(p));
        promises.dedup();
        let mut text = String::from("promise   passed  failed  unsupported\n");
        for promise in promises {
            let of: Vec<&Entry> = self.entries.iter().filter(|e| e.promise == promise).collect();
            let n = |wanted: fn(&Outcome) -> bool| of.iter().filter(|e| wanted(&e.outcome)).count();
            let passed = n(|o| matches!(o, Outcome::Passed));
            let failed = n(|o| matches!(o, Outcome::Failed { .. }));
            let unsupported = n(|o| matches!(o, Outcome::Unsupported { .. }));
            let _ = writeln!(text, "{promise:<9} {passed:>6}  {failed:>6}  {unsupported:>11}");
            for entry in of {
                match &entry.outcome {
                    Outcome::Failed { text: why, .. } => {
                        let _ = writeln!(text, "    FAILED {}: {why}", entry.name);
                    }
                    Outcome::Unsupported { missing } => {
                        let _ = writeln!(text, "    unsupported {}: {}", entry.name, missing.join(", "));
                    }
                    Outcome::Passed => {}
                }
            }
        }
        text
    }

    /// The histories of the tests that failed.
    pub fn histories(&self) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            if let Outcome::Failed { text: why, history } = &entry.outcome {
                let _ = write!(text, "\n--- {}\n    {why}\n{history}", entry.name);
            }
        }
        text
    }

    /// Reads a report out of what a program printed: the JSON, with or without lines before and after it.
    ///
    /// # Errors
    /// That there is none, or what is wrong with it.
    pub fn read(text: &str) -> Result<Self, String> {
        let start = text.find("{\n").ok_or("no report in JSON")?;
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Self>();
        match values.next() {
            Some(Ok(report)) => Ok(report),
            Some(Err(e)) => Err(format!("the report cannot be read: {e}")),
            None => Err("no report in JSON".to_owned()),
        }
    }

    /// As JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// `N passed, 0 failed, M unsupported`.
    pub fn last_line(&self) -> String {
        format!("{} passed, {} failed, {} unsupported", self.passed(), self.failed(), self.unsupported())
    }

    /// The tests whose result or counts differ from those of another run, one line each.
    pub fn differences(&self, other: &Report) -> Vec<String> {
        let mut lines = Vec::new();
        let find = |in_: &Report, name: &str| in_.entries.iter().find(|e| e.name == name).cloned();
        for entry in &self.entries {
            match find(other, &entry.name) {
                None if entry.promise.starts_with("10.") => {}
                None => lines.push(format!("{}: ran on {} only", entry.name, self.backend)),
                Some(twin) => {
                    let (a, b) = (word(&entry.outcome), word(&twin.outcome));
                    if a != b {
                        lines.push(format!("{}: {a} on {}, {b} on {}", entry.name, self.backend, other.backend));
                    } else if entry.counts != twin.counts && a == "passed" {
                        lines.push(format!(
                            "{}: {:?} on {}, {:?} on {}",
                            entry.name, entry.counts, self.backend, twin.counts, other.backend
                        ));
                    }
                }
            }
        }
        // Promises to users' tests (section 10) are those of a broker that records: a server has none to keep.
        for entry in other.entries.iter().filter(|entry| !entry.promise.starts_with("10.")) {
            if find(self, &entry.name).is_none() {
                lines.push(format!("{}: ran on {} only", entry.name, other.backend));
            }
        }
        lines
    }
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed { .. } => "failed",
        Outcome::Unsupported { .. } => "unsupported",
    }
}

/// Numbers by value, words after them.
fn sort_key(promise: &str) -> (u32, u32, String) {
    let mut parts = promise.splitn(2, '.').map(|p| p.parse().unwrap_or(u32::MAX));
    (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0), promise.to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Entry, Outcome, Report};

    fn report(outcomes: &[(&str, Outcome)]) -> Report {
        let entry = |(name, outcome): &(&str, Outcome)| Entry {
            name: (*name).to_owned(),
            promise: "2.1".to_owned(),
            needs: Vec::new(),
            outcome: outcome.clone(),
            counts: Default::default(),
            took: Default::default(),
        };
        Report { backend: "x".into(), entries: outcomes.iter().map(entry).collect(), ..Report::default() }
    }

    #[test]
    fn refusals_are_held_against_the_list() {
        let refused = || Outcome::Unsupported { missing: vec!["replay".into()] };
        let mut run = report(&[("a", refused()), ("b", refused()), ("c", Outcome::Passed)]);
        run.hold_against("a # why\n\nc\n");
        assert_eq!(run.last_line(), "0 passed, 2 failed, 1 unsupported");
    }

    #[test]
    fn differences_are_named() {
        let mut one = report(&[("a", Outcome::Passed), ("b", Outcome::Passed)]);
        let two = report(&[("a", Outcome::Passed)]);
        one.entries[0].counts.insert("dead".into(), 1);
        assert_eq!(one.differences(&two).len(), 2);
        assert_eq!(two.differences(&two).len(), 0);
    }
}
