//! Delays: queues of a group with a fixed time to live, made when first needed. A message waits in the longest that is not longer
//! than its rest. When less than a second is left then, it comes back into the group's queue (`…..retry..ms`), and its holder waits
//! for that. Else it comes into a queue of its own beside the group's (`…..step..ms` to `…..steps`), where members find it and pass
//! it on: in the group's queue it would wait behind the backlog at every step, and be counted as ready without being due.

use crate::topology::{Declarer, keeping, text};
use crate::url::QueueType;
use lapin::types::{AMQPValue, FieldTable};
use mq_api::Result;
use std::time::{Duration, SystemTime};

/// Six lengths cover every delay in a few steps; shorter ones are waited for by the holder, since a queue more costs the broker
/// more than a second costs a slot.
const LADDER: [Duration; 6] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
    Duration::from_secs(3600),
];

/// What is left at the end at most is waited for by the holder. It is also what members have to pass on what is between two steps.
const LAST: Duration = Duration::from_secs(1);

/// A delay queue of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rung {
    at: usize,
    /// No further one comes behind it.
    last: bool,
}

impl Rung {
    /// For this rest; `None` when the holder waits.
    pub(crate) fn of(rest: Duration) -> Option<Self> {
        let at = LADDER.iter().rposition(|length| *length <= rest)?;
        Some(Self { at, last: rest - LADDER[at] < LAST })
    }

    fn length(self) -> Duration {
        LADDER[self.at]
    }

    fn name(self, queue: &str) -> String {
        let word = if self.last { "retry" } else { "step" };
        format!("{queue}..{word}..{}", self.length().as_millis())
    }

    /// Where its messages come when their time is over.
    fn then(self, queue: &str) -> String {
        if self.last { queue.to_owned() } else { crate::steps::queue(queue) }
    }

    /// All, those first that come last on a message's way.
    fn all() -> impl Iterator<Item = Self> {
        [true, false].into_iter().flat_map(|last| (0..LADDER.len()).map(move |at| Self { at, last }))
    }
}

/// Milliseconds since 1970.
pub(crate) fn millis(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// The delay queues of one group, as far as they are known to exist.
#[derive(Debug)]
pub(crate) struct Ladder {
    queue: String,
    /// Type of the queue between the steps.
    kind: QueueType,
    made: Vec<Rung>,
}

impl Ladder {
    pub(crate) fn new(queue: String, kind: QueueType) -> Self {
        Self { queue, kind, made: Vec::new() }
    }

    /// The group's queue.
    pub(crate) fn queue(&self) -> &str {
        &self.queue
    }

    /// All names of delay queues that a group may have. A message that moves on while they are looked at in this order is never
    /// seen twice: a step is never longer than the one before.
    pub(crate) fn names(queue: &str) -> impl Iterator<Item = String> {
        Rung::all().map(move |rung| rung.name(queue))
    }

    /// The queue for this rest and its rung, made if need be, whatever the provisioning says: its name is no user's, and without
    /// it nothing could be retried. The group's own queue when the holder is to wait.
    pub(crate) async fn place(
        &mut self,
        rest: Duration,
        declarer: &mut Declarer<'_>,
    ) -> Result<(String, Option<Rung>)> {
        let Some(rung) = Rung::of(rest) else { return Ok((self.queue.clone(), None)) };
        let name = rung.name(&self.queue);
        if !self.made.contains(&rung) {
            if !rung.last {
                // First: what its time is over for has to come somewhere. Members make it too, who look into it.
                let steps = crate::steps::queue(&self.queue);
                if declarer.depth(&steps).await?.is_none() {
                    declarer.make(&steps, keeping(self.kind)).await?;
                }
            }
            declarer.make(&name, arguments(&rung.then(&self.queue), rung.length())).await?;
            self.made.push(rung);
        }
        Ok((name, Some(rung)))
    }

    /// It is gone: made again at the next need.
    pub(crate) fn forget(&mut self, rung: Rung) {
        self.made.retain(|made| *made != rung);
    }
}

/// A delay queue: one fixed time to live, so that nothing waits behind a longer one; quorum with at-least-once
/// dead-lettering also for classic groups, since a classic queue may lose what it moves when it is killed.
fn arguments(then: &str, after: Duration) -> FieldTable {
    let mut table = FieldTable::default();
    table.insert("x-queue-type".into(), text("quorum"));
    table.insert("x-message-ttl".into(), AMQPValue::LongLongInt(after.as_millis() as i64));
    table.insert("x-dead-letter-exchange".into(), text(""));
    table.insert("x-dead-letter-routing-key".into(), text(then));
    table.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    table.insert("x-overflow".into(), text("reject-publish"));
    table
}

#[cfg(test)]
mod tests {
    use super::{LAST, Ladder, Rung, arguments};
    use std::time::Duration;

    #[test]
    fn any_length_is_reached_in_few_steps_and_never_passed() {
        assert_eq!(Rung::of(Duration::from_millis(999)), None);
        assert_eq!(Rung::of(Duration::from_secs(1)), Some(Rung { at: 0, last: true }));
        for total in [1_500u64, 8_000, 59_000, 3_599_000, 7 * 24 * 3_600_000] {
            let mut rest = Duration::from_millis(total);
            let mut steps = 0;
            while let Some(rung) = Rung::of(rest) {
                rest -= rung.length();
                steps += 1;
                assert_eq!(rung.last, rest < LAST, "{total}: {rest:?} left");
            }
            assert!(rest < LAST && steps < 200, "{total}: {steps}");
        }
    }

    #[test]
    fn only_a_last_step_ends_in_the_queue_of_the_group() {
        let ends = |rest| Rung::of(Duration::from_millis(rest)).map(|rung| (rung.name("t..g"), rung.then("t..g")));
        assert_eq!(ends(5_999), Some(("t..g..retry..5000".into(), "t..g".into())));
        assert_eq!(ends(6_000), Some(("t..g..step..5000".into(), "t..g..steps".into())));
        assert_eq!(Ladder::names("t..g").count(), 12);
    }

    #[test]
    fn delay_queues_never_expire_with_messages_inside() {
        let table = arguments("t..g", Duration::from_secs(1));
        assert!(!table.contains_key("x-expires") && table.contains_key("x-message-ttl"));
    }
}
