//! Who got what, how often: the exact counts that tests assert. Nothing is ever de-duplicated.

use crate::{Check, TestFailure};
use mq_api::{Position, Settled};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One hand-over.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// The test's name for the message: its payload.
    pub label: String,
    /// The test's name for the member that got it.
    pub member: String,
    /// Attempt number of the delivery.
    pub attempt: u32,
    /// Key, as text.
    pub key: Option<String>,
    /// Partition.
    pub partition: Option<u32>,
    /// Position.
    pub position: Position,
}

#[derive(Default)]
struct Book {
    seen: BTreeMap<String, Vec<Seen>>,
    settled: Vec<(String, String, Settled)>,
}

/// All hand-overs of a test, by group.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Book>>);

impl Ledger {
    pub(crate) fn saw(&self, group: &str, seen: Seen) {
        self.0.lock().seen.entry(group.to_owned()).or_default().push(seen);
    }

    pub(crate) fn settled(&self, group: &str, label: &str, how: Settled) {
        self.0.lock().settled.push((group.to_owned(), label.to_owned(), how));
    }

    /// All hand-overs to a group, in order.
    pub fn of(&self, group: &str) -> Vec<Seen> {
        self.0.lock().seen.get(group).cloned().unwrap_or_default()
    }

    /// Labels handed over to a group, in order, repeated ones repeated.
    pub fn labels(&self, group: &str) -> Vec<String> {
        self.of(group).into_iter().map(|s| s.label).collect()
    }

    /// Labels in order of their first hand-over.
    pub fn firsts(&self, group: &str) -> Vec<String> {
        let mut firsts: Vec<String> = Vec::new();
        for label in self.labels(group) {
            if !firsts.contains(&label) {
                firsts.push(label);
            }
        }
        firsts
    }

    /// Attempt numbers of one message in a group, in order.
    pub fn attempts(&self, group: &str, label: &str) -> Vec<u32> {
        self.of(group).iter().filter(|s| s.label == label).map(|s| s.attempt).collect()
    }

    /// Hand-overs per label.
    pub fn counts(&self, group: &str) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for seen in self.of(group) {
            *counts.entry(seen.label).or_insert(0) += 1;
        }
        counts
    }

    /// Labels whose acknowledgement was confirmed in a group at any level above `Sent`.
    pub fn confirmed(&self, group: &str) -> Vec<String> {
        let book = self.0.lock();
        let sure = |s: &Settled| matches!(s, Settled::Confirmed(level) if *level > mq_api::Durability::Sent);
        book.settled.iter().filter(|(g, _, s)| g == group && sure(s)).map(|(_, l, _)| l.clone()).collect()
    }

    /// Fails unless each of `labels` was handed over exactly once to `group`, and nothing else was.
    ///
    /// # Errors
    /// Which label was handed over how often.
    #[track_caller]
    pub fn exactly_once<S: AsRef<str>>(&self, group: &str, labels: impl IntoIterator<Item = S>) -> Check {
        let mut counts = self.counts(group);
        let mut wrong = Vec::new();
        for label in labels {
            match counts.remove(label.as_ref()) {
                Some(1) => {}
                n => wrong.push(format!("{} {} times", label.as_ref(), n.unwrap_or(0))),
            }
        }
        wrong.extend(counts.into_iter().map(|(l, n)| format!("{l}, which nobody sent, {n} times")));
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(TestFailure::new(format!("group {group} got {}", wrong.join(", ")))),
        }
    }

    /// Fails unless each of `labels` was handed over at least once and at most `most` times to `group`.
    ///
    /// # Errors
    /// Which label was handed over how often.
    #[track_caller]
    pub fn between<S: AsRef<str>>(&self, group: &str, labels: impl IntoIterator<Item = S>, most: usize) -> Check {
        let counts = self.counts(group);
        let wrong: Vec<_> = labels
            .into_iter()
            .map(|l| (l.as_ref().to_owned(), counts.get(l.as_ref()).copied().unwrap_or(0)))
            .filter(|(_, n)| *n == 0 || *n > most)
            .map(|(l, n)| format!("{l} {n} times"))
            .collect();
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(TestFailure::new(format!("group {group}, at most {most} each: got {}", wrong.join(", ")))),
        }
    }
}
