//! Order per key in one partition of a group: which messages wait behind another of their key. Each is known by its position,
//! so that one whose message is gone can still leave.

use mq_core::KeyGate;
use std::collections::HashMap;

struct Place {
    key: u64,
    waits: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Lines {
    gate: KeyGate,
    places: HashMap<u64, Place>,
}

impl Lines {
    /// A message of this key came. True: it may go out. False: it waits in line.
    pub(crate) fn arrive(&mut self, key: u64, position: u64) -> bool {
        let goes = self.gate.arrive(key, position);
        self.places.insert(position, Place { key, waits: !goes });
        goes
    }

    /// It is over for good, wherever it stood. If it was the one that was out: the next of its key, which is out from now on.
    pub(crate) fn leave(&mut self, position: u64) -> Option<u64> {
        let Place { key, waits } = self.places.remove(&position)?;
        if waits {
            self.gate.forget(key, position);
            return None;
        }
        let next = self.gate.leave(key)?;
        if let Some(place) = self.places.get_mut(&next) {
            place.waits = false;
        }
        Some(next)
    }

    /// Whether it waits behind another.
    pub(crate) fn waits(&self, position: u64) -> bool {
        self.places.get(&position).is_some_and(|place| place.waits)
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        self.gate.waiting()
    }
}

#[cfg(test)]
mod tests {
    use super::Lines;

    #[test]
    fn one_that_is_gone_leaves_from_where_it_stands() {
        let mut lines = Lines::default();
        assert!(lines.arrive(7, 0));
        assert!((1..4).all(|position| !lines.arrive(7, position)));
        assert_eq!((lines.leave(2), lines.waiting()), (None, 2), "out of the middle, and the others stay in line");
        assert_eq!((lines.leave(0), lines.waits(1), lines.waits(3)), (Some(1), false, true));
        assert_eq!((lines.leave(0), lines.leave(1), lines.leave(3)), (None, Some(3), None), "each leaves once");
        assert!(lines.arrive(7, 9), "the key is free again");
    }
}
