//! Delays: fixed-TTL queues of a group, made when first needed. A message waits in the largest that is not longer than its
//! rest, comes back, and is parked again until less than a second is left, which its holder waits for.

use crate::topology::{Declarer, delay_queue};
use mq_api::Result;
use std::time::{Duration, SystemTime};

/// Six queues cover every delay in a few steps; shorter ones are waited for by the holder, since a queue more costs the broker
/// more than a second costs a slot.
const LADDER: [Duration; 6] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
    Duration::from_secs(3600),
];

/// The queue for this rest; `None` when the holder waits.
pub(crate) fn step(rest: Duration) -> Option<usize> {
    LADDER.iter().rposition(|length| *length <= rest)
}

/// Milliseconds since 1970.
pub(crate) fn millis(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// The delay queues of one group, as far as they are known to exist.
#[derive(Debug)]
pub(crate) struct Ladder {
    queue: String,
    made: [bool; LADDER.len()],
}

impl Ladder {
    pub(crate) fn new(queue: String) -> Self {
        Self { queue, made: Default::default() }
    }

    /// The group's queue.
    pub(crate) fn queue(&self) -> &str {
        &self.queue
    }

    /// All names a group may have.
    pub(crate) fn names(queue: &str) -> impl Iterator<Item = String> {
        LADDER.map(|length| delay_queue(queue, length)).into_iter()
    }

    /// The queue for this rest and its number, made if need be; the group's own queue when the holder is to wait.
    pub(crate) async fn place(
        &mut self,
        rest: Duration,
        declarer: &mut Declarer<'_>,
    ) -> Result<(String, Option<usize>)> {
        let Some(at) = step(rest) else { return Ok((self.queue.clone(), None)) };
        if !self.made[at] {
            declarer.delay(&self.queue, LADDER[at]).await?;
            self.made[at] = true;
        }
        Ok((delay_queue(&self.queue, LADDER[at]), Some(at)))
    }

    /// It is gone: made again at the next need.
    pub(crate) fn forget(&mut self, at: usize) {
        if let Some(made) = self.made.get_mut(at) {
            *made = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LADDER, step};
    use std::time::Duration;

    #[test]
    fn any_length_is_reached_in_few_steps_and_never_passed() {
        assert_eq!(step(Duration::from_millis(999)), None);
        assert_eq!(step(Duration::from_secs(1)), Some(0));
        for total in [1_500u64, 8_000, 59_000, 3_599_000, 7 * 24 * 3_600_000] {
            let mut rest = Duration::from_millis(total);
            let mut steps = 0;
            while let Some(at) = step(rest) {
                rest -= LADDER[at];
                steps += 1;
            }
            assert!(rest < Duration::from_secs(1) && steps < 200, "{total}: {steps}");
        }
    }
}
