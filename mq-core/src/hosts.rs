//! The hosts of a URL in turn, for drivers that look for one that answers.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Which host of a list is tried next: the one that worked last, else the one behind the one that was tried last.
#[derive(Debug, Default)]
pub struct HostTurns(AtomicUsize);

impl HostTurns {
    /// The places of `count` hosts, each once. One is taken down as tried before it is: an attempt that is given up midway must
    /// not begin there again, or hosts that say nothing hide those behind them for ever.
    pub fn of(&self, count: usize) -> impl Iterator<Item = usize> {
        let first = self.next();
        (first..first + count).map(move |at| {
            self.0.store((at + 1) % count, Ordering::Relaxed);
            at % count
        })
    }

    /// This one works.
    pub fn worked(&self, at: usize) {
        self.0.store(at, Ordering::Relaxed);
    }

    /// The one that is tried next.
    pub fn next(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::HostTurns;

    #[test]
    fn what_was_tried_is_behind_what_was_not() {
        let turns = HostTurns::default();
        assert_eq!(turns.of(3).take(2).collect::<Vec<_>>(), [0, 1], "given up at the second");
        assert_eq!(turns.of(3).collect::<Vec<_>>(), [2, 0, 1]);
        turns.worked(1);
        assert_eq!((turns.next(), turns.of(3).collect::<Vec<_>>()), (1, vec![1, 2, 0]));
        assert_eq!(turns.of(0).count(), 0);
    }
}
