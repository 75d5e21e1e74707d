//! What is not known settled, over all sessions of a consumer: where a group that was lost has to start again.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use mq_api::Position;
use std::collections::BTreeSet;

/// Where a partition was left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resume {
    /// The lowest position not known settled.
    pub unsettled: Option<Position>,
    /// The highest position seen.
    pub seen: Option<Position>,
}

/// Positions kept one by one; past it only the lowest is, which is never too high.
const KEPT: usize = 16_384;

/// One partition.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    positions: BTreeSet<Position>,
    floor: Option<Position>,
    seen: Option<Position>,
}

impl Unsettled {
    /// A session ended, or a retry was handed to the broker, before it was settled.
    pub(crate) fn add(&self, positions: impl IntoIterator<Item = Position>) {
        let mut st = self.state.lock();
        let floor = st.floor;
        st.positions.extend(positions.into_iter().filter(|p| floor.is_none_or(|floor| *p < floor)));
        if st.positions.len() > KEPT {
            st.floor = st.positions.first().copied();
            st.positions.clear();
        }
        self.any.store(!st.positions.is_empty(), Ordering::Relaxed);
    }

    /// It is settled after all.
    #[inline]
    pub(crate) fn settled(&self, position: Position) {
        if self.any.load(Ordering::Relaxed) {
            let mut st = self.state.lock();
            st.positions.remove(&position);
            self.any.store(!st.positions.is_empty(), Ordering::Relaxed);
        }
    }

    /// Positions above this were never seen before.
    pub(crate) fn highest(&self) -> Option<Position> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        self.state.lock().positions.last().copied()
    }

    pub(crate) fn saw(&self, position: Option<Position>) {
        let mut st = self.state.lock();
        st.seen = st.seen.max(position);
    }

    pub(crate) fn get(&self) -> Resume {
        let st = self.state.lock();
        let lowest = st.positions.first().copied();
        Resume { unsettled: lowest.or(st.floor), seen: st.seen }
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Unsettled};
    use mq_api::Position;

    #[test]
    fn the_lowest_is_never_too_high() {
        let unsettled = Unsettled::default();
        unsettled.add([5, 7, 6].map(Position::offset));
        unsettled.settled(Position::offset(5));
        assert_eq!(unsettled.get().unsettled, Some(Position::offset(6)));
        unsettled.add((100..100 + KEPT as u64).map(Position::offset));
        unsettled.settled(Position::offset(6));
        assert_eq!(unsettled.get().unsettled, Some(Position::offset(6)), "too many to tell apart");
        unsettled.add([Position::offset(3)]);
        assert_eq!(unsettled.get().unsettled, Some(Position::offset(3)));
        unsettled.settled(Position::offset(3));
        assert_eq!(unsettled.get().unsettled, Some(Position::offset(6)));
    }
}
