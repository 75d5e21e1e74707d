//! Brokers that break a promise on purpose: proof that the suite notices.
//!
//! [`Faulty`] wraps any factory and plants one [`Bug`]. Every test names the bugs that it has to notice; [`run`] plants each
//! of them and runs the tests that name it. A bug is caught when all of those fail.

mod admin;
mod broker;
mod bug;
mod consumer;
mod lane;
mod producer;
mod rewrite;
mod world;

pub use bug::Bug;
pub use world::Faulty;

use crate::{Case, Factory, Options, Outcome, Report};
use mq_api::{MessageId, Subscription};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::Duration;

/// What all connections of one faulty world share.
struct State {
    bug: Bug,
    /// The broker is away for connections to come.
    away: AtomicBool,
    crashes: AtomicUsize,
    blamed: AtomicBool,
    consumers: AtomicUsize,
    /// Connections that were cut.
    cut: Mutex<HashSet<u64>>,
    /// A group or topic was deleted.
    forget: AtomicBool,
    /// Ids that were handed over.
    seen: Mutex<HashSet<MessageId>>,
    /// Counts deliveries and sends, for bugs that hit every third.
    turn: AtomicU64,
    /// The first subscription of each topic and group.
    first: Mutex<HashMap<String, Subscription>>,
    /// The first topic and group of each made name.
    made: Mutex<HashMap<String, mq_api::Topic>>,
}

impl State {
    fn new(bug: Bug) -> Self {
        Self {
            bug,
            away: AtomicBool::new(false),
            crashes: AtomicUsize::new(0),
            blamed: AtomicBool::new(false),
            consumers: AtomicUsize::new(0),
            cut: Mutex::default(),
            forget: AtomicBool::new(false),
            seen: Mutex::default(),
            turn: AtomicU64::new(0),
            first: Mutex::default(),
            made: Mutex::default(),
        }
    }
}

/// What became of one planted bug.
#[derive(Debug, Clone)]
pub struct Caught {
    /// The bug.
    pub bug: Bug,
    /// Tests that failed, as they should.
    pub failed: Vec<String>,
    /// Tests that name the bug and did not notice it.
    pub missed: Vec<String>,
}

impl Caught {
    /// Whether every test that names the bug failed under it.
    pub fn is_caught(&self) -> bool {
        self.missed.is_empty() && !self.failed.is_empty()
    }
}

/// The result of all planted bugs.
#[derive(Debug, Clone, Default)]
pub struct Harvest {
    /// One for each bug.
    pub bugs: Vec<Caught>,
    /// Tests that fail under no bug.
    pub idle: Vec<String>,
}

impl Harvest {
    /// How many were caught.
    pub fn caught(&self) -> usize {
        self.bugs.iter().filter(|b| b.is_caught()).count()
    }

    /// Whether every bug was caught and every test failed under at least one.
    pub fn is_complete(&self) -> bool {
        self.caught() == self.bugs.len() && self.idle.is_empty()
    }

    /// One line for each bug, the tests that no bug makes fail, and `P planted, P caught` at the end.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for one in &self.bugs {
            let word = if one.is_caught() { "caught" } else { "MISSED" };
            let _ = writeln!(text, "{:<24} {word} by {:<2} {}", one.bug.to_string(), one.failed.len(), one.bug.says());
            for name in &one.missed {
                let _ = writeln!(text, "    {name} did not notice");
            }
        }
        for name in &self.idle {
            let _ = writeln!(text, "{name} fails under no planted bug");
        }
        let _ = write!(text, "{} planted, {} caught", self.bugs.len(), self.caught());
        text
    }
}

/// A planted bug may make a test spin for ever: it is given up after this.
const WALL: Duration = Duration::from_secs(15);

/// Plants every bug that a test names and runs the tests that name it. A test that runs on one and on eight partitions has
/// to fail on either.
pub fn run(factory: &Arc<dyn Factory>, cases: &[Case], options: &Options) -> Harvest {
    let mut harvest = Harvest::default();
    let mut failing: HashSet<&str> = HashSet::new();
    for bug in Bug::ALL {
        let named: Vec<Case> = cases.iter().filter(|c| c.bugs.contains(bug)).copied().collect();
        let wanted = options.filter.as_ref().is_none_or(|f| bug.to_string().contains(f.as_str()));
        if named.is_empty() || !wanted {
            continue;
        }
        let faulty: Arc<dyn Factory> = Arc::new(Faulty::new(factory.clone(), *bug));
        let alone = Options { filter: None, partitions: Some(1), wall: Some(WALL), ..options.clone() };
        let report: Report = crate::run(&faulty, &named, &alone);
        let mut one = Caught { bug: *bug, failed: Vec::new(), missed: Vec::new() };
        for entry in report.entries {
            match &entry.outcome {
                // Not what the test is to say of a bug.
                Outcome::Failed { text, .. } if text.starts_with(crate::runner::HANGS) => {
                    one.missed.push(format!("{} (it hangs)", entry.name));
                }
                Outcome::Failed { text, .. } => {
                    if options.verbose {
                        println!("{bug}: {} failed: {text}", entry.name);
                    }
                    one.failed.push(entry.name);
                }
                _ => one.missed.push(entry.name),
            }
        }
        failing.extend(named.iter().map(|c| c.name).filter(|n| one.failed.iter().any(|f| f == n)));
        harvest.bugs.push(one);
    }
    if options.filter.is_none() {
        harvest.idle = cases.iter().map(|c| c.name).filter(|n| !failing.contains(n)).map(str::to_owned).collect();
    }
    harvest
}
