//! What happened, counted by topic and group.

use mq_api::{Group, Topic};
use mq_memory::{Happened, What};
use std::collections::BTreeMap;

/// What can be asserted about a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Handled,
    Attempts,
    Retried,
    DeadLettered,
    Discarded,
    Released,
    Lost,
    Stale,
    Trimmed,
}

impl Kind {
    pub(super) const ALL: [Self; 9] = [
        Self::Handled,
        Self::Attempts,
        Self::Retried,
        Self::DeadLettered,
        Self::Discarded,
        Self::Released,
        Self::Lost,
        Self::Stale,
        Self::Trimmed,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Handled => "handled",
            Self::Attempts => "attempts",
            Self::Retried => "retried",
            Self::DeadLettered => "dead_lettered",
            Self::Discarded => "discarded",
            Self::Released => "released",
            Self::Lost => "lost",
            Self::Stale => "stale",
            Self::Trimmed => "trimmed",
        }
    }
}

/// The numbers of one group.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    counts: BTreeMap<Kind, u64>,
    /// Of the dead-lettered and discarded, by reason.
    pub(super) reasons: BTreeMap<String, u64>,
}

impl Tally {
    pub(super) fn get(&self, kind: Kind) -> u64 {
        let count = |kind| self.counts.get(&kind).copied().unwrap_or(0);
        match kind {
            // A message that was given back untried was not attempted.
            Kind::Attempts => count(Kind::Attempts).saturating_sub(count(Kind::Released)),
            kind => count(kind),
        }
    }

    fn add(&mut self, kind: Kind) {
        *self.counts.entry(kind).or_default() += 1;
    }
}

/// All numbers.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) groups: BTreeMap<(Topic, Group), Tally>,
    pub(super) sent: BTreeMap<Topic, u64>,
    pub(super) refused: BTreeMap<Topic, u64>,
}

impl Totals {
    pub(super) fn of(events: &[Happened]) -> Self {
        let mut totals = Self::default();
        for event in events {
            totals.add(event);
        }
        totals
    }

    fn add(&mut self, event: &Happened) {
        match (&event.what, &event.group) {
            (What::Sent, _) => *self.sent.entry(event.topic.clone()).or_default() += 1,
            (What::Refused(_), _) => *self.refused.entry(event.topic.clone()).or_default() += 1,
            (_, None) => {}
            (what, Some(group)) => {
                let tally = self.groups.entry((event.topic.clone(), group.clone())).or_default();
                match what {
                    What::Delivered { .. } => tally.add(Kind::Attempts),
                    What::Acked => tally.add(Kind::Handled),
                    What::Retried { .. } => tally.add(Kind::Retried),
                    What::DeadLettered { reason, .. } => {
                        tally.add(Kind::DeadLettered);
                        *tally.reasons.entry(reason.clone()).or_default() += 1;
                    }
                    What::Discarded { reason, .. } => {
                        tally.add(Kind::Discarded);
                        *tally.reasons.entry(reason.clone()).or_default() += 1;
                    }
                    What::Released => tally.add(Kind::Released),
                    What::Stale => tally.add(Kind::Stale),
                    What::Lost => tally.add(Kind::Lost),
                    What::Trimmed => tally.add(Kind::Trimmed),
                    _ => {}
                }
            }
        }
    }
}
