//! What a disposition means: the retry and dead-letter policy, pure, in one place for all backends.

use mq_api::{
    Class, DeadLetterPolicy, Disposition, Envelope, Failure, LONGEST, Mode, Ordering, Reason, RetryPolicy, Source,
    Subscription,
};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What is to be done with a delivery. Data: the lane and the driver only carry it out.
#[derive(Debug, Clone)]
pub enum Settlement {
    /// Done.
    Ack,
    /// Deliver again.
    Retry {
        /// Not before this has passed.
        after: Duration,
        /// With this attempt number.
        attempt: u32,
        /// Why, for listings and the envelope of a later dead letter.
        cause: Option<Box<Failure>>,
    },
    /// Dead-letter.
    DeadLetter {
        /// Why.
        reason: Reason,
        /// The last error.
        error: Option<Box<Failure>>,
        /// Hand-overs so far.
        attempts: u32,
    },
    /// Drop, counted and logged.
    Discard {
        /// Why.
        reason: Reason,
        /// The last error.
        error: Option<Box<Failure>>,
    },
    /// Back at once, not counted.
    Release,
}

/// The parts of a subscription that decide about failures.
#[derive(Debug, Clone)]
pub struct Policy {
    retry: RetryPolicy,
    dead_letter: DeadLetterPolicy,
    /// Takes from which on a message is a crash suspect.
    pub suspect_at: u32,
    /// Deaths alone after which a suspect is dead-lettered.
    pub crash_trials: u32,
    /// Whether the order of a key is kept.
    pub per_key: bool,
    /// Whether deliveries have nothing to settle.
    pub untracked: bool,
    member: Arc<str>,
}

/// What the engine must do besides the settlement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Plain,
    /// Pause the subscription: something it depends on is down.
    Transient,
}

impl Policy {
    /// That of a subscription; `member` names the consumer in envelopes.
    pub fn new(sub: &Subscription, member: Arc<str>) -> Self {
        Self {
            retry: sub.retry.clone(),
            dead_letter: sub.dead_letter,
            suspect_at: sub.retry.max_attempts.max(2),
            crash_trials: sub.crash_trials,
            per_key: sub.ordering == Ordering::PerKey,
            untracked: sub.mode == Mode::Broadcast || sub.guarantee == mq_api::Guarantee::AtMostOnce,
            member,
        }
    }

    /// The settlement of hand-over number `attempt`. `random` in 0..1 places the delay within its jitter; `stopping` turns a
    /// dropped delivery into a release: it goes back at once.
    pub fn decide(&self, how: Disposition, attempt: u32, random: f64, stopping: bool) -> (Settlement, Verdict) {
        let settlement = match how {
            Disposition::Ack => Settlement::Ack,
            Disposition::Release => Settlement::Release,
            Disposition::Dropped if stopping => Settlement::Release,
            Disposition::Dropped => self.again(attempt, None, None, random),
            Disposition::DeadLetter { reason, error } => self.dead(reason, error, attempt),
            Disposition::Nack { failure, after } => match failure.as_ref().map_or(Class::Failed, |f| f.class()) {
                Class::Failed => self.again(attempt, after, failure, random),
                Class::Permanent => self.dead(Reason::Permanent, failure, attempt),
                Class::Transient => {
                    // Not counted: the same attempt number again. The pause of the subscription is the back-off.
                    let after = after.unwrap_or(self.retry.transient.0).min(LONGEST);
                    return (Settlement::Retry { after, attempt, cause: failure }, Verdict::Transient);
                }
            },
        };
        (settlement, Verdict::Plain)
    }

    /// The settlement of a delivery that was held longer than `max_processing`.
    pub fn timed_out(&self, attempt: u32, random: f64) -> Settlement {
        let failure = Some(Box::new(Failure::failed("held longer than max_processing")));
        match self.again(attempt, None, failure, random) {
            Settlement::DeadLetter { error, attempts, .. } => {
                Settlement::DeadLetter { reason: Reason::Timeout, error, attempts }
            }
            Settlement::Discard { error, .. } => Settlement::Discard { reason: Reason::Timeout, error },
            other => other,
        }
    }

    /// The settlement of a suspect whose consumers died with it alone.
    pub fn crashed(&self, attempts: u32) -> Settlement {
        let error = Some(Box::new(Failure::failed("its consumer died while it was handed over alone")));
        self.dead(Reason::Crash, error, attempts)
    }

    /// The settlement of a message whose key went to the dead letters before it.
    pub(crate) fn key_parked(&self, attempts: u32) -> Settlement {
        let error = Some(Box::new(Failure::failed("an earlier message of its key was dead-lettered")));
        self.dead(Reason::Other("key-parked".into()), error, attempts)
    }

    fn again(&self, attempt: u32, after: Option<Duration>, cause: Option<Box<Failure>>, random: f64) -> Settlement {
        if attempt >= self.retry.max_attempts && self.dead_letter != DeadLetterPolicy::Forever {
            return self.dead(Reason::MaxAttempts, cause, attempt);
        }
        // Upward only: a delay is never early.
        let after = after.unwrap_or_else(|| {
            let delay = self.retry.delay_after(attempt).min(LONGEST);
            delay + delay.mul_f64(self.retry.jitter * random)
        });
        let after = after.min(LONGEST);
        Settlement::Retry { after, attempt: attempt.saturating_add(1), cause }
    }

    fn dead(&self, reason: Reason, error: Option<Box<Failure>>, attempt: u32) -> Settlement {
        match self.dead_letter {
            DeadLetterPolicy::On => Settlement::DeadLetter { reason, error, attempts: attempt },
            DeadLetterPolicy::Discard => Settlement::Discard { reason, error },
            DeadLetterPolicy::Forever => {
                let after = self.retry.delays.last().copied().unwrap_or(self.retry.transient.1);
                Settlement::Retry { after, attempt: attempt.saturating_add(1), cause: error }
            }
        }
    }

    /// Pause of the subscription after the n-th transient failure in a row (from 0).
    pub fn transient_pause(&self, streak: u32) -> Duration {
        let (shortest, longest) = self.retry.transient;
        shortest.saturating_mul(1u32 << streak.min(20)).min(longest)
    }

    /// The envelope of a dead letter.
    pub fn envelope(&self, source: &Source, letter: &LetterFacts<'_>) -> Envelope {
        let group = source.group.as_ref().map_or("", |g| g.as_str());
        let mut envelope = Envelope::new(source.topic.shared_name(), group, letter.reason.clone(), letter.attempts);
        envelope.partition = source.partition;
        envelope.position = Some(letter.position);
        envelope.first_seen = letter.first_seen;
        envelope.failed_at = Some(letter.now);
        envelope.error = letter.error.map(|e| e.chain().into());
        envelope.consumer = Some(self.member.clone());
        envelope.redrives = letter.redrives;
        envelope
    }
}

/// What goes into the envelope of one dead letter.
#[derive(Debug)]
pub struct LetterFacts<'a> {
    /// Why.
    pub reason: Reason,
    /// The last error.
    pub error: Option<&'a Failure>,
    /// Hand-overs.
    pub attempts: u32,
    /// Where it was.
    pub position: mq_api::Position,
    /// When the group first saw it, where known.
    pub first_seen: Option<SystemTime>,
    /// Now.
    pub now: SystemTime,
    /// How often it was redriven before.
    pub redrives: u32,
}

#[cfg(test)]
mod tests {
    use super::{Policy, Settlement, Verdict};
    use mq_api::{DeadLetterPolicy, Disposition, Failure, Reason, Subscription};
    use std::time::Duration;

    fn policy(dead_letter: DeadLetterPolicy) -> Policy {
        Policy::new(&Subscription::group("t", "g").dead_letter(dead_letter), "m".into())
    }

    fn nack(failure: Failure) -> Disposition {
        Disposition::Nack { failure: Some(Box::new(failure)), after: None }
    }

    #[test]
    fn failures_are_retried_with_upward_jitter_and_then_dead_lettered() {
        let p = policy(DeadLetterPolicy::On);
        for (attempt, low, high) in [(1, 1.0, 1.1), (2, 5.0, 5.5), (3, 30.0, 33.0), (4, 120.0, 132.0)] {
            for random in [0.0, 0.5, 1.0] {
                let (Settlement::Retry { after, attempt: next, .. }, Verdict::Plain) =
                    p.decide(nack(Failure::failed("x")), attempt, random, false)
                else {
                    panic!("retried")
                };
                assert_eq!(next, attempt + 1);
                assert!((low..=high).contains(&after.as_secs_f64()), "{after:?}");
            }
        }
        let (last, _) = p.decide(nack(Failure::failed("x")), 5, 0.0, false);
        assert!(matches!(last, Settlement::DeadLetter { reason: Reason::MaxAttempts, attempts: 5, .. }));
    }

    #[test]
    fn classes_decide() {
        let p = policy(DeadLetterPolicy::On);
        let (s, _) = p.decide(nack(Failure::permanent("x")), 1, 0.0, false);
        assert!(matches!(s, Settlement::DeadLetter { reason: Reason::Permanent, .. }));
        let (s, verdict) = p.decide(nack(Failure::transient("x")), 5, 0.0, false);
        assert!(matches!(s, Settlement::Retry { attempt: 5, .. }) && verdict == Verdict::Transient, "not counted");
        let (s, _) = p.decide(Disposition::Dropped, 1, 0.0, true);
        assert!(matches!(s, Settlement::Release), "a drop while stopping goes back at once");
    }

    #[test]
    fn off_is_forever_or_discard() {
        let (s, _) = policy(DeadLetterPolicy::Forever).decide(nack(Failure::failed("x")), 99, 0.0, false);
        assert!(matches!(s, Settlement::Retry { after, attempt: 100, .. } if after == Duration::from_secs(120)));
        let (s, _) = policy(DeadLetterPolicy::Discard).decide(nack(Failure::permanent("x")), 1, 0.0, false);
        assert!(matches!(s, Settlement::Discard { .. }));
    }

    #[test]
    fn a_time_out_is_the_reason_wherever_it_ends() {
        let last = |how| policy(how).timed_out(5, 0.0);
        assert!(matches!(last(DeadLetterPolicy::On), Settlement::DeadLetter { reason: Reason::Timeout, .. }));
        assert!(matches!(last(DeadLetterPolicy::Discard), Settlement::Discard { reason: Reason::Timeout, .. }));
    }
}
