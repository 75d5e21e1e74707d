//! The slots of a lane, found by number: a ring, and aside from it the few that stay unsettled while very many pass them, so
//! that one slow handler does not keep the bookkeeping of everything behind it.

use crate::plan::Token;
use crate::ring::SeqRing;
use mq_api::{Position, Stored};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Waits behind another of its key.
    Blocked,
    /// In the inbox.
    Buffered,
    /// In the application's hands.
    Handed,
    /// Held until it is due again.
    Parked,
    /// A copy is being published; acknowledged when that is confirmed.
    Moving,
    /// Given back or lost without settlement: it must never count as settled.
    Left,
    #[default]
    Done,
}

/// Whether the broker knows that a suspect is handed over alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Trial {
    #[default]
    Not,
    Asked,
    Recorded,
}

#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) token: Token,
    pub(crate) position: Position,
    pub(crate) attempt: u32,
    pub(crate) bytes: u32,
    pub(crate) state: SlotState,
    /// How often it was taken back from the application: a handle of an earlier hand-over is stale.
    pub(crate) hand: u16,
    pub(crate) suspect: bool,
    pub(crate) trial: Trial,
    /// Not its first delivery: a former session or a retry may have left it unsettled.
    pub(crate) again: bool,
    /// Parked within the bound of parked messages: its credit was given back.
    pub(crate) uncharged: bool,
    pub(crate) trials: u32,
    pub(crate) key: Option<u64>,
    pub(crate) handed_at: Option<Instant>,
    /// Kept while unsettled: retry and dead letter by publishing need it after the program took the message apart. A
    /// settled cell keeps the emptied allocation.
    pub(crate) keep: Option<Arc<Stored>>,
}

impl Slot {
    pub(crate) fn is_held(&self) -> bool {
        !matches!(self.state, SlotState::Done | SlotState::Left)
    }
}

/// Slots between the first unsettled one and the last, beyond which the first ones are set aside. Well above the span that a
/// driver with a commit bitmap can use.
const SPAN: usize = 65_536;

/// See the module.
#[derive(Default)]
pub(crate) struct Slots {
    ring: SeqRing<Slot>,
    aside: BTreeMap<u64, Slot>,
    open: usize,
}

impl Slots {
    /// The next slot; counts as unsettled from now on.
    #[inline]
    pub(crate) fn push(&mut self) -> (u64, &mut Slot) {
        if self.ring.len() >= SPAN {
            self.make_room();
        }
        self.open += 1;
        self.ring.push_cell()
    }

    #[cold]
    fn make_room(&mut self) {
        let seq = self.ring.head();
        if let Some(slot) = self.ring.front_mut() {
            self.aside.insert(seq, std::mem::take(slot));
            self.ring.retire();
        }
        self.retire();
    }

    #[inline]
    pub(crate) fn get(&self, seq: u64) -> Option<&Slot> {
        match self.ring.get(seq) {
            None if !self.aside.is_empty() => self.aside.get(&seq),
            found => found,
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, seq: u64) -> Option<&mut Slot> {
        if seq < self.ring.head() {
            return if self.aside.is_empty() { None } else { self.aside.get_mut(&seq) };
        }
        self.ring.get_mut(seq)
    }

    /// Settles one; its message is let go of at once, however long those before it take. Call [`retire`](Self::retire) after.
    #[inline]
    pub(crate) fn done(&mut self, seq: u64) {
        let Some(slot) = self.get_mut(seq) else { return };
        if slot.state == SlotState::Done {
            return;
        }
        slot.state = SlotState::Done;
        match slot.keep.as_mut().map(Arc::get_mut) {
            Some(Some(unique)) => unique.message.clear(),
            _ => slot.keep = None,
        }
        self.open -= 1;
        if seq < self.ring.head() {
            self.aside.remove(&seq);
        }
    }

    /// Retires the settled prefix.
    #[inline]
    pub(crate) fn retire(&mut self) {
        while let Some(slot) = self.ring.front_mut()
            && slot.state == SlotState::Done
        {
            self.ring.retire();
        }
    }

    /// Unsettled slots.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// From the first unsettled one to the last.
    pub(crate) fn span(&self) -> usize {
        self.ring.len() + self.aside.len()
    }

    /// All from the first unsettled one on, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Slot)> {
        self.aside.iter().map(|(seq, slot)| (*seq, slot)).chain(self.ring.iter())
    }

    /// The numbers of those that `f` chooses.
    pub(crate) fn which(&self, mut f: impl FnMut(&Slot) -> bool) -> Vec<u64> {
        self.iter().filter(|(_, slot)| f(slot)).map(|(seq, _)| seq).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{SPAN, SlotState, Slots};
    use crate::plan::Token;

    #[test]
    fn one_that_stays_does_not_keep_those_that_pass() {
        let mut slots = Slots::default();
        let push = |slots: &mut Slots| {
            let (seq, slot) = slots.push();
            (slot.token, slot.state) = (Token(seq, 0), SlotState::Handed);
            seq
        };
        let slow = [push(&mut slots), push(&mut slots)];
        for _ in 0..10 * SPAN {
            let seq = push(&mut slots);
            slots.done(seq);
            slots.retire();
        }
        assert!(slots.span() <= SPAN + 2 && slots.open() == 2);
        assert_eq!(slots.iter().take(2).map(|(seq, _)| seq).collect::<Vec<_>>(), slow);
        assert!(slots.get(slow[0]).is_some() && slots.get_mut(slow[1]).is_some());
        slow.iter().for_each(|seq| slots.done(*seq));
        slots.retire();
        assert_eq!((slots.open(), slots.span()), (0, 0));
    }
}
