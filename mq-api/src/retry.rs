//! What becomes of messages that failed.

use std::time::Duration;

/// When failed messages come again.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// Hand-overs before the dead letters. Default 5.
    pub max_attempts: u32,
    /// Delay before the second, third, … hand-over; the last one repeats. Default 1 s, 5 s, 30 s, 2 min: a hiccup, a restart,
    /// a failover, an incident.
    pub delays: Vec<Duration>,
    /// Random addition, as a share of the delay; upward only, so that a delay is never early. Default 0.1.
    pub jitter: f64,
    /// Shortest and longest pause of the subscription after a transient failure. Default 1 s to 60 s, doubling.
    pub transient: (Duration, Duration),
}

impl RetryPolicy {
    /// The default delays with this many attempts.
    pub fn attempts(max_attempts: u32) -> Self {
        Self { max_attempts, ..Self::default() }
    }

    /// Sets the delays.
    pub fn delays(mut self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.delays = delays.into_iter().collect();
        self
    }

    /// Sets the jitter.
    pub fn jitter(mut self, share: f64) -> Self {
        self.jitter = share;
        self
    }

    /// Sets the pauses after transient failures.
    pub fn transient(mut self, shortest: Duration, longest: Duration) -> Self {
        self.transient = (shortest, longest);
        self
    }

    /// The delay after hand-over number `attempt` failed, without jitter.
    pub fn delay_after(&self, attempt: u32) -> Duration {
        let at = attempt.saturating_sub(1) as usize;
        self.delays.get(at).or(self.delays.last()).copied().unwrap_or(Duration::ZERO)
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: 5,
            delays: [1, 5, 30, 120].map(Duration::from_secs).to_vec(),
            jitter: 0.1,
            transient: (Duration::from_secs(1), Duration::from_secs(60)),
        }
    }
}

/// What becomes of messages that failed for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeadLetterPolicy {
    /// They go to `Topic::dead_letters(topic, group)`, confirmed before the original is acknowledged.
    #[default]
    On,
    /// They are tried for ever, at the longest delay.
    Forever,
    /// They are dropped, counted, and logged with their id.
    Discard,
}

/// Under [`Ordering::PerKey`](crate::Ordering::PerKey): what becomes of a key whose message was dead-lettered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDeadLetter {
    /// The key goes on.
    #[default]
    Continue,
    /// Later messages of the key go to the dead letters too, until this member restarts. Refused without an order of keys.
    ParkKey,
}

#[cfg(test)]
mod tests {
    use super::RetryPolicy;
    use std::time::Duration;

    #[test]
    fn the_last_delay_repeats() {
        let retry = RetryPolicy::default();
        assert_eq!(retry.delay_after(1), Duration::from_secs(1));
        assert_eq!(retry.delay_after(4), Duration::from_secs(120));
        assert_eq!(retry.delay_after(9), Duration::from_secs(120));
        assert_eq!(RetryPolicy::attempts(2).delays([]).delay_after(1), Duration::ZERO);
    }
}
