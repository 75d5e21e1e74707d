//! The workload's own randomness: small, seeded, the same everywhere.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// SplitMix64. Shared by all actors of a run, whose order of turns the paused clock decides.
#[derive(Debug, Clone)]
pub(super) struct Rng(Arc<Mutex<u64>>);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed)))
    }

    pub(super) fn next(&self) -> u64 {
        let mut state = self.0.lock();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `n`.
    pub(super) fn below(&self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// Up to `most`, in milliseconds.
    pub(super) fn pause(&self, most: u64) -> Duration {
        Duration::from_millis(self.below(most + 1))
    }
}
