//! What happened, as the members tell it, and whether it adds up.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};

/// One thing that happened to one line of the input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Entry {
    pub group: String,
    pub line: u32,
    pub what: What,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum What {
    /// The work was done; `None` where the line cannot be read (analytics counts those too).
    Handled { order: Option<String>, cents: Option<u64> },
    /// The handler failed.
    Failed,
    /// The group's dead letters have it.
    DeadLettered { reason: String },
}

#[derive(Default)]
struct Group {
    /// Lines and how often they were handled.
    handled: HashMap<u32, u32>,
    dead: HashMap<u32, String>,
    dead_twice: u64,
    failed: u64,
    cents: u64,
    unreadable: u64,
}

/// All books. Billing's stand for a database table with a unique order number: a second bill of one order changes nothing.
#[derive(Default)]
pub struct Ledger {
    groups: BTreeMap<String, Group>,
    billed: HashSet<String>,
    billed_cents: u64,
    repeated: HashSet<u32>,
    unique: bool,
    pub sent: u64,
}

impl Ledger {
    /// Without `unique`, an order that comes again is billed again.
    pub fn new(unique: bool) -> Self {
        Self { unique, ..Self::default() }
    }

    pub fn enter(&mut self, entry: Entry) {
        let billing = entry.group == "billing";
        let group = self.groups.entry(entry.group).or_default();
        match entry.what {
            What::Failed => group.failed += 1,
            What::DeadLettered { reason } => {
                if group.dead.insert(entry.line, reason).is_some() {
                    group.dead_twice += 1;
                }
            }
            What::Handled { order, cents } => {
                let times = group.handled.entry(entry.line).or_default();
                *times += 1;
                let first = *times == 1;
                if !billing && first {
                    group.cents += cents.unwrap_or(0);
                    group.unreadable += u64::from(order.is_none());
                }
                if let (true, Some(order)) = (billing, order) {
                    if self.billed.insert(order) {
                        self.billed_cents += cents.unwrap_or(0);
                    } else {
                        if first {
                            self.repeated.insert(entry.line);
                        }
                        if !self.unique {
                            self.billed_cents += cents.unwrap_or(0);
                        }
                    }
                }
            }
        }
    }

    /// Lines of a group whose fate is known.
    pub fn settled(&self, group: &str) -> u64 {
        self.groups.get(group).map_or(0, |g| {
            let dead = g.dead.keys().filter(|line| !g.handled.contains_key(line)).count();
            (g.handled.len() + dead) as u64
        })
    }

    pub fn failed(&self) -> u64 {
        self.groups.values().map(|g| g.failed).sum()
    }

    /// Handled more often than once: at-least-once delivery at work.
    pub fn duplicates(&self) -> u64 {
        let twice = |g: &Group| g.handled.values().map(|n| u64::from(n - 1)).sum::<u64>() + g.dead_twice;
        self.groups.values().map(twice).sum()
    }

    pub fn dead_by_reason(&self, group: &str) -> BTreeMap<String, u64> {
        let mut by_reason = BTreeMap::new();
        for reason in self.groups.get(group).iter().flat_map(|g| g.dead.values()) {
            *by_reason.entry(reason.clone()).or_default() += 1;
        }
        by_reason
    }

    /// What it came to, in the shape of `orders.expected.json`.
    pub fn totals(&self) -> Value {
        let empty = Group::default();
        let group = |name: &str| self.groups.get(name).unwrap_or(&empty);
        let (billing, analytics) = (group("billing"), group("analytics"));
        json!({
            "sent": self.sent,
            "billing": {
                "handled": billing.handled.len(),
                "billed_orders": self.billed.len(),
                "billed_cents": self.billed_cents,
                "repeated": self.repeated.len(),
                "dead_letters": self.dead_by_reason("billing"),
            },
            "analytics": {
                "handled": analytics.handled.len(),
                "unreadable": analytics.unreadable,
                "cents": analytics.cents,
            },
        })
    }
}

/// Where the totals differ from what was expected, one line for each number.
pub fn differences(path: &str, expected: &Value, actual: &Value) -> Vec<String> {
    match (expected, actual) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
            let at = |map: &serde_json::Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or(Value::Null);
            keys.into_iter().flat_map(|k| differences(&format!("{path}/{k}"), &at(a, k), &at(b, k))).collect()
        }
        _ if expected == actual => Vec::new(),
        _ => vec![format!("{path}: expected {expected}, got {actual}")],
    }
}
