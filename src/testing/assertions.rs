use super::Test;
use super::tally::{Kind, Tally, Totals};
use mq_api::{Group, Topic};
use std::fmt::Write;

/// Assertions about what one group did with one topic. Each panics with the timeline if it does not hold.
#[derive(Debug)]
pub struct On<'a> {
    test: &'a Test,
    topic: Topic,
    group: Group,
    tally: Tally,
}

impl<'a> On<'a> {
    pub(super) fn new(test: &'a Test, topic: Topic, group: Group) -> Self {
        let totals = Totals::of(&test.events());
        let tally = totals.groups.get(&(topic.clone(), group.clone())).cloned().unwrap_or_default();
        Self { test, topic, group, tally }
    }

    #[track_caller]
    fn is(self, kind: Kind, expected: u64) -> Self {
        self.test.cover(&self.topic, &self.group, kind);
        let actual = self.tally.get(kind);
        if actual != expected {
            self.test.fail(format_args!(
                "{}/{}: {} is {actual}, expected {expected}",
                self.topic,
                self.group,
                kind.name()
            ));
        }
        self
    }

    /// Messages acknowledged: handled with success.
    #[track_caller]
    pub fn handled(self, n: u64) -> Self {
        self.is(Kind::Handled, n)
    }

    /// Hand-overs to the handler, all messages together. Messages given back untried were not attempted.
    #[track_caller]
    pub fn attempts(self, n: u64) -> Self {
        self.is(Kind::Attempts, n)
    }

    /// Failures after which the message came again.
    #[track_caller]
    pub fn retried(self, n: u64) -> Self {
        self.is(Kind::Retried, n)
    }

    /// Messages that went to the dead letters.
    #[track_caller]
    pub fn dead_lettered(self, n: u64) -> Self {
        self.is(Kind::DeadLettered, n)
    }

    /// Of the dead-lettered and discarded messages, those with this reason: `max-attempts`, `permanent`, `undecodable`,
    /// `timeout`, `crash`, or the handler's own. Says why, not how many: `nothing_else` still wants
    /// [`dead_lettered`](Self::dead_lettered) or [`discarded`](Self::discarded).
    #[track_caller]
    pub fn because(self, reason: &str, n: u64) -> Self {
        let actual = self.tally.reasons.get(reason).copied().unwrap_or(0);
        if actual != n {
            let all = &self.tally.reasons;
            let place = format_args!(
                "{}/{}: ended because of '{reason}': {actual}, expected {n}; reasons: {all:?}",
                self.topic, self.group
            )
            .to_string();
            self.test.fail(format_args!("{place}"));
        }
        self
    }

    /// Messages that failed for good and were dropped, under [`DeadLetterPolicy::Discard`](mq_api::DeadLetterPolicy).
    #[track_caller]
    pub fn discarded(self, n: u64) -> Self {
        self.is(Kind::Discarded, n)
    }

    /// Messages given back untried.
    #[track_caller]
    pub fn released(self, n: u64) -> Self {
        self.is(Kind::Released, n)
    }

    /// Deliveries whose member died or lost them.
    #[track_caller]
    pub fn lost(self, n: u64) -> Self {
        self.is(Kind::Lost, n)
    }

    /// Settlements that came too late.
    #[track_caller]
    pub fn stale(self, n: u64) -> Self {
        self.is(Kind::Stale, n)
    }

    /// Times that the retention of the topic took messages which the group had not handled.
    #[track_caller]
    pub fn trimmed(self, n: u64) -> Self {
        self.is(Kind::Trimmed, n)
    }
}

/// What happened that nobody asserted, one line each.
pub(super) fn not_covered(test: &Test) -> String {
    let totals = Totals::of(&test.events());
    let mut text = String::new();
    for ((topic, group), tally) in &totals.groups {
        for kind in Kind::ALL {
            let n = tally.get(kind);
            // An attempt ends in something that is asserted by itself, how often it was tried says how often it was retried, and
            // what was given back or settled too late changed nothing.
            let implied = match kind {
                Kind::Attempts | Kind::Released | Kind::Stale => true,
                Kind::Retried => test.covers(topic, group, Kind::Attempts),
                _ => false,
            };
            if n > 0 && !implied && !test.covers(topic, group, kind) {
                let _ = writeln!(text, "  {topic}/{group}: {} {n}", kind.name());
            }
        }
    }
    for (what, counts) in [("sent", &totals.sent), ("refused", &totals.refused)] {
        for (topic, n) in counts {
            let expected = if what == "sent" { test.sent_by_test(topic) } else { 0 };
            let covered = if what == "sent" { test.covers_topic(topic) } else { test.covers_refusals(topic) };
            // Dead letters are sent by the broker, and asserted as such.
            if *n != expected && topic.dead_letters_of().is_none() && !covered {
                let _ = writeln!(text, "  {topic}: {what} {n}, of which the test sent {expected}");
            }
        }
    }
    text
}
