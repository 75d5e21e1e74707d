//! Delays longer than a member holds in memory: retry topics of the group. Six of them, by length of the delay, so that
//! messages of one topic come due nearly in the order they were written; the first also takes what is redriven. The last keeps
//! what it takes until the group is deleted: any other retention would be shorter than some delay.

use crate::topology::Wanted;
use mq_api::{Group, Topic};
use std::time::{Duration, SystemTime};

/// Longest delay that is held in memory: the default policy's first three.
pub(crate) const PARK: Duration = Duration::from_secs(30);

/// When it is due, in milliseconds since 1970.
pub(crate) const DUE: &str = "mq-due";
/// The number of its next hand-over.
pub(crate) const ATTEMPT: &str = "mq-attempt";
/// The time stamp of the message, while the record has that of its copying (retention goes by it).
pub(crate) const STAMP: &str = "mq-timestamp";

/// Of a message in the topic itself: the group that it was redriven to. Others pass it by.
pub(crate) const ONLY: &str = "mq-redriven-to";

/// Ends of the classes, and their names.
const CLASSES: [(Duration, &str); 6] = [
    (Duration::from_secs(66), "retry"),
    (Duration::from_secs(330), "retry-5m"),
    (Duration::from_secs(1_980), "retry-30m"),
    (Duration::from_secs(23_760), "retry-6h"),
    // Two weeks are kept, and one who is late has two days for it.
    (Duration::from_secs(12 * 24 * 3600), "retry-long"),
    (Duration::MAX, "retry-longest"),
];

/// The retry topics of a group.
#[derive(Debug, Clone)]
pub(crate) struct RetryTopics(Vec<String>);

impl RetryTopics {
    pub(crate) fn new(topic: &Topic, group: &Group) -> Self {
        Self(CLASSES.iter().map(|(_, name)| format!("{topic}..{group}..{name}")).collect())
    }

    fn at(after: Duration) -> usize {
        CLASSES.iter().position(|(end, _)| after <= *end).unwrap_or(CLASSES.len() - 1)
    }

    /// The one for a delay.
    pub(crate) fn of(&self, after: Duration) -> &str {
        &self.0[Self::at(after)]
    }

    /// The same, as it has to be.
    pub(crate) fn wanted(&self, after: Duration) -> Wanted {
        let at = Self::at(after);
        Wanted::retries(self.0[at].clone(), at == CLASSES.len() - 1)
    }

    /// The one that is made at subscribe, and takes what is redriven.
    pub(crate) fn first(&self) -> &str {
        &self.0[0]
    }

    pub(crate) fn all(&self) -> &[String] {
        &self.0
    }
}

/// The group that reads the retry topics: apart from the group of the topic, so that its partitions stay evenly spread.
pub(crate) fn retry_group(topic: &Topic, group: &Group) -> String {
    format!("{topic}..{group}..retry")
}

/// Headers of a message that comes again: by a retry topic, or redriven.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Special {
    pub(crate) due: Option<u64>,
    pub(crate) attempt: Option<u32>,
    pub(crate) stamp: Option<u64>,
    pub(crate) only: Option<Box<str>>,
}

impl Special {
    /// Takes a header, if it is one of these.
    pub(crate) fn take(&mut self, name: &str, value: &[u8]) -> bool {
        let number = || std::str::from_utf8(value).ok()?.parse::<u64>().ok();
        match name {
            DUE => self.due = number(),
            ATTEMPT => self.attempt = number().and_then(|n| u32::try_from(n).ok()),
            STAMP => self.stamp = number(),
            ONLY => self.only = std::str::from_utf8(value).ok().map(Into::into),
            _ => return false,
        }
        true
    }

    /// How long until it is due. `written`: when the copy was, which is the whole delay before that: a clock that was set back
    /// since, or is late here, does not make it longer.
    pub(crate) fn rest(&self, written: Option<SystemTime>, now: SystemTime) -> Duration {
        let due = self.due.and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
        let until = |from: SystemTime| due.and_then(|due| due.duration_since(from).ok()).unwrap_or_default();
        written.map_or(Duration::MAX, until).min(until(now))
    }
}

#[cfg(test)]
mod tests {
    use super::{RetryTopics, Special};
    use std::time::{Duration, SystemTime};

    #[test]
    fn classes_hold_the_default_delays_with_their_jitter() {
        let topics = RetryTopics::new(&"orders".into(), &"billing".into());
        assert_eq!(topics.of(Duration::from_secs(31)), "orders..billing..retry");
        assert_eq!(topics.of(Duration::from_secs(132)), "orders..billing..retry-5m");
        assert_eq!(topics.of(Duration::from_secs(1_000_000)), "orders..billing..retry-long");
        assert_eq!(topics.of(Duration::from_secs(12 * 24 * 3600 + 1)), "orders..billing..retry-longest");
    }

    #[test]
    fn headers_are_read_and_damaged_ones_are_due_at_once() {
        let mut special = Special::default();
        assert!(special.take("mq-due", b"2000") && special.take("mq-attempt", b"4") && !special.take("mq-x", b"1"));
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(500);
        assert_eq!((special.rest(None, at), special.attempt), (Duration::from_millis(1500), Some(4)));
        // Written with a delay of a second, by a clock that was set back since.
        let written = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        assert_eq!(special.rest(Some(written), at), Duration::from_secs(1));
        assert!(special.take("mq-due", b"soon"));
        assert_eq!(special.rest(None, at), Duration::ZERO);
    }
}
