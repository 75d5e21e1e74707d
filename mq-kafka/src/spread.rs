//! Which partition a message goes to: one with a key as the Java client has it, one without to the next in turn.
//!
//! Requests hold messages of one partition each, so that a change with every message would make twelve small ones of a large one.
//! What is handed over while little is under way changes after some fifty, and with each new hand-over: a thousand tasks sent at
//! once are work for every member. A stream of messages changes after two thousand.

use crate::ffi;
use rdkafka::producer::{PARTITION_UA, Partitioner};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};

/// Messages without a key to one partition, of few.
const SHORT: u32 = 50;
/// Of many.
const LONG: u32 = 2_000;

/// See the module. Messages are handed over by one thread; should librdkafka ask from another, a run is a little longer or shorter.
#[derive(Debug)]
pub(crate) struct Spread {
    run: AtomicU32,
    left: AtomicU32,
    at: AtomicU32,
}

impl Default for Spread {
    fn default() -> Self {
        // Not all producers begin with the same.
        let begin = RandomState::new().hash_one(0_u8) as u32;
        Self { run: AtomicU32::new(SHORT), left: AtomicU32::new(0), at: AtomicU32::new(begin) }
    }
}

impl Spread {
    /// What is handed over next: `few`, and the first of them to another partition than what came before.
    pub(crate) fn begin(&self, few: bool) {
        self.run.store(if few { SHORT } else { LONG }, Ordering::Relaxed);
        if few {
            self.left.store(0, Ordering::Relaxed);
        }
    }

    fn next(&self, count: u32) -> u32 {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        } else {
            self.left.store(self.run.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
            self.at.fetch_add(1, Ordering::Relaxed);
        }
        self.at.load(Ordering::Relaxed) % count
    }
}

impl Partitioner for Spread {
    fn partition(&self, _: &str, key: Option<&[u8]>, count: i32, available: impl Fn(i32) -> bool) -> i32 {
        let Some(whole) = u32::try_from(count).ok().filter(|count| *count > 0) else { return PARTITION_UA };
        if let Some(key) = key {
            return ffi::murmur2(key, count);
        }
        for _ in 0..whole {
            let next = i32::try_from(self.next(whole)).unwrap_or_default();
            if available(next) {
                return next;
            }
            self.left.store(0, Ordering::Relaxed);
        }
        // None has a leader now: any will do, it waits.
        i32::try_from(self.next(whole)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::{LONG, Partitioner, SHORT, Spread};

    fn spread(spread: &Spread, n: usize, available: impl Fn(i32) -> bool) -> [usize; 12] {
        let mut counts = [0; 12];
        for _ in 0..n {
            counts[usize::try_from(spread.partition("t", None, 12, &available)).unwrap()] += 1;
        }
        counts
    }

    #[test]
    fn a_burst_is_work_for_all_partitions() {
        let few = Spread::default();
        few.begin(true);
        assert_eq!(spread(&few, SHORT as usize * 12, |_| true), [SHORT as usize; 12]);
    }

    #[test]
    fn a_stream_changes_seldom_and_single_messages_each_time() {
        let it = Spread::default();
        it.begin(false);
        assert_eq!(spread(&it, LONG as usize * 2, |_| true).iter().filter(|n| **n > 0).count(), 2);
        let it = Spread::default();
        let mut seen = [0; 12];
        for _ in 0..12 {
            it.begin(true);
            seen[usize::try_from(it.partition("t", None, 12, |_| true)).unwrap()] += 1;
        }
        assert_eq!(seen, [1; 12]);
    }

    #[test]
    fn partitions_without_a_leader_are_passed_over_and_keys_are_not_moved() {
        let it = Spread::default();
        it.begin(true);
        let counts = spread(&it, 550, |p| p != 3);
        assert_eq!((counts[3], counts.iter().sum::<usize>()), (0, 550));
        // What the Java client makes of it.
        let of = |key: &str| it.partition("t", Some(key.as_bytes()), 12, |_| false);
        assert_eq!(of("k"), of("k"));
        assert!((0..12).contains(&of("")));
    }
}
