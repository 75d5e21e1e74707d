//! What the actors saw, held against the promises.

use mq_api::{Durability, Position, Settled};
use mq_memory::{Trace, What};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A message in its partition.
pub(super) type Place = (u32, Position);

/// What became of a send, as the producer was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    Confirmed,
    Unknown,
    Refused,
}

/// How a delivery left the application's hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Let {
    Acked,
    Failed,
    Released,
    Dead,
    Dropped,
}

/// Everything that the actors did and saw.
#[derive(Default)]
pub(super) struct Book {
    pub(super) violations: Vec<String>,
    pub(super) lines: Vec<String>,
    sends: BTreeMap<String, Told>,
    /// By group and place: attempt numbers in order, and how the last one ended.
    handed: HashMap<(&'static str, Place), Vec<u32>>,
    ended: HashMap<(&'static str, Place), (Let, Settled)>,
    /// Places whose ack was confirmed.
    done: BTreeSet<(&'static str, Place)>,
    labels: HashMap<(&'static str, Place), String>,
    /// In the group with order: the last place first handed over, by key.
    firsts: HashMap<Vec<u8>, BTreeMap<u32, Position>>,
}

/// Violations that are listed; the rest only count.
const LISTED: usize = 20;

impl Book {
    pub(super) fn violation(&mut self, text: String) {
        self.lines.push(format!("VIOLATION {text}"));
        if self.violations.len() < LISTED {
            self.violations.push(text);
        }
    }

    pub(super) fn sent(&mut self, label: &str, told: Told) {
        self.lines.push(format!("sent {label}: {told:?}"));
        self.sends.insert(label.to_owned(), told);
    }

    /// A hand-over. `ordered` when the group asked for order by key.
    pub(super) fn handed(
        &mut self,
        group: &'static str,
        place: Place,
        label: &str,
        attempt: u32,
        key: Option<&[u8]>,
        ordered: bool,
    ) {
        self.lines.push(format!("{group} handed {label} {place:?} attempt {attempt}"));
        if self.sends.get(label) == Some(&Told::Refused) {
            self.violation(format!("{label} was refused, stored nowhere, and came to {group}"));
        }
        if self.done.contains(&(group, place)) {
            self.violation(format!("{label} at {place:?} came to {group} again after its ack was confirmed"));
        }
        self.labels.insert((group, place), label.to_owned());
        let before = self.handed.entry((group, place)).or_default();
        let last = before.last().copied();
        before.push(attempt);
        if let Some(last) = last {
            let ended = self.ended.remove(&(group, place));
            let wrong = match ended {
                // One more when its next member died with it unseen.
                Some((Let::Failed, Settled::Confirmed(_))) => attempt <= last,
                // Lost with its member or connection: counted or not, never backwards.
                _ => attempt < last,
            };
            if wrong {
                self.violation(format!(
                    "{label} at {place:?}: attempt {attempt} after {last}, which ended as {ended:?}"
                ));
            }
        } else if ordered && let Some(key) = key {
            let partitions = self.firsts.entry(key.to_vec()).or_default();
            let newest = partitions.insert(place.0, place.1);
            if newest.is_some_and(|newest| newest > place.1) {
                self.violation(format!("{label} at {place:?} came to {group} first after a later one of its key"));
            }
        }
    }

    pub(super) fn settled(&mut self, group: &'static str, place: Place, how: Let, settled: Settled) {
        self.lines.push(format!("{group} {how:?} {place:?}: {settled:?}"));
        if how == Let::Acked && matches!(settled, Settled::Confirmed(level) if level > Durability::Sent) {
            self.done.insert((group, place));
        }
        self.ended.insert((group, place), (how, settled));
    }

    /// At the end: nothing that was confirmed is missing in any group.
    pub(super) fn nothing_missing(&mut self, groups: &[&'static str], trace: &Trace) {
        // An ack whose answer was lost may well have been carried out, and dead letters are the broker's own work.
        let mut dead: BTreeSet<(String, u32, u64)> = BTreeSet::new();
        for event in trace.events() {
            if let What::DeadLettered { .. } | What::Acked = event.what
                && let Some(group) = &event.group
            {
                dead.insert((group.as_str().to_owned(), event.partition, event.position));
            }
        }
        for group in groups {
            let mut finished: BTreeSet<&str> = BTreeSet::new();
            for ((g, place), label) in &self.labels {
                let is_dead = dead.contains(&((*g).to_owned(), place.0, place.1.major));
                if g == group && (self.done.contains(&(g, *place)) || is_dead) {
                    finished.insert(label);
                }
            }
            let missing: Vec<String> = self
                .sends
                .iter()
                .filter(|(label, told)| **told == Told::Confirmed && !finished.contains(label.as_str()))
                .map(|(label, _)| label.clone())
                .collect();
            for label in missing {
                self.violation(format!("{label} was confirmed and {group} neither acked it nor has it among the dead"));
            }
        }
    }
}
