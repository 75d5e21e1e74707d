//! Carrying out a settlement on a lane: by the driver, by parking, or by publishing a copy.

use crate::keeper::{Move, Target};
use crate::lane::{Lane, Ring};
use crate::mechanics::{MoveBy, ReleaseBy, RetryBy};
use crate::plan::Carry;
use crate::policy::{LetterFacts, Settlement};
use crate::slots::SlotState;
use mq_api::{Envelope, Failure, Reason, SettleStart, Settled};
use std::time::Duration;

impl Lane {
    /// Carries out `settlement` on a slot that is charged to the flow and no longer in hand.
    pub(crate) fn apply(&self, ring: &mut Ring, slot: u64, settlement: Settlement) -> SettleStart {
        let Some(s) = ring.slots.get_mut(slot) else { return SettleStart::Done(Settled::Stale) };
        let (token, bytes) = (s.token, s.bytes as usize);
        match settlement {
            Settlement::Ack => {
                let op = self.settles.ack(self.id(), [token]);
                self.finish(ring, slot);
                self.shared.flow.give(1, bytes);
                SettleStart::Queued(op)
            }
            Settlement::Discard { reason, error } => {
                let id = s.keep.as_ref().map(|k| k.message.id.clone()).unwrap_or_default();
                self.shared.discarded(self.source(), &id, &reason, error.as_deref());
                self.apply(ring, slot, Settlement::Ack)
            }
            Settlement::Retry { after, attempt, cause } => self.retry(ring, slot, after, attempt, cause),
            Settlement::DeadLetter { reason, error, attempts } => {
                if self.shared.parks_keys
                    && let Some(key) = s.keep.as_ref().and_then(|k| k.message.key.clone())
                {
                    self.shared.parked_keys.lock().insert(key);
                }
                self.shared.hooks.dead_lettered(self.source(), &reason);
                match self.shared.mechanics.dead_letter {
                    MoveBy::Driver => {
                        let how = Carry::Settle(Settlement::DeadLetter { reason, error, attempts });
                        self.by_driver(ring, slot, how)
                    }
                    MoveBy::Publish => {
                        let target = self.letter(ring, slot, reason, error.as_deref(), attempts);
                        self.publish(ring, slot, target)
                    }
                }
            }
            Settlement::Release => match self.shared.mechanics.release {
                _ if ring.draining || self.shared.is_stopping() => match self.shared.mechanics.release {
                    ReleaseBy::Driver => self.by_driver(ring, slot, Carry::Settle(Settlement::Release)),
                    ReleaseBy::Engine => {
                        // Out of the application's hands already: only its credit is left to give back.
                        s.state = SlotState::Buffered;
                        self.let_go(ring, slot, SlotState::Left);
                        SettleStart::Done(Settled::Confirmed(self.shared.settle_level()))
                    }
                },
                // Under `PerKey` it keeps its place: what comes again from the broker comes after its successors.
                ReleaseBy::Driver if !self.shared.policy.per_key => {
                    self.by_driver(ring, slot, Carry::Settle(Settlement::Release))
                }
                _ => {
                    s.state = SlotState::Buffered;
                    // The trial that is recorded was none.
                    s.trials = s.trials.saturating_sub(u32::from(s.suspect));
                    let suspect = s.suspect;
                    self.reinbox(slot, suspect);
                    SettleStart::Done(Settled::Confirmed(self.shared.settle_level()))
                }
            },
        }
    }

    /// Dead-letters a charged slot that is not to be handed out at all.
    pub(crate) fn doom(&self, ring: &mut Ring, slot: u64) {
        let attempts = ring.slots.get(slot).map_or(0, |s| s.attempt.saturating_sub(1));
        let how = match self.is_parked_key(ring, slot) {
            true => self.shared.policy.key_parked(attempts),
            false => self.shared.policy.crashed(attempts),
        };
        self.apply(ring, slot, how);
    }

    /// Whether an earlier message of its key was dead-lettered, and the key goes with it.
    pub(crate) fn is_parked_key(&self, ring: &Ring, slot: u64) -> bool {
        self.shared.parks_keys
            && ring
                .slots
                .get(slot)
                .and_then(|s| s.keep.as_ref()?.message.key.as_ref())
                .is_some_and(|key| self.shared.parked_keys.lock().contains(key))
    }

    fn retry(
        &self,
        ring: &mut Ring,
        slot: u64,
        after: Duration,
        attempt: u32,
        cause: Option<Box<Failure>>,
    ) -> SettleStart {
        self.shared.hooks.retried(self.source(), attempt, after);
        // Under `PerKey` a retry never leaves its place: publishing a copy would put it behind its successors.
        let park = match self.shared.mechanics.retry {
            _ if self.shared.policy.per_key => true,
            RetryBy::Driver | RetryBy::Publish => false,
            // Past the bound of parked ones it waits at the broker.
            RetryBy::ParkThenPublish { park } => after <= park && self.shared.may_park(),
        };
        if park {
            let Some(s) = ring.slots.get_mut(slot) else { return SettleStart::Done(Settled::Stale) };
            s.attempt = attempt;
            s.state = SlotState::Parked;
            // Whoever settles it did not die with it.
            (s.suspect, s.trials) = (false, 0);
            let bytes = s.bytes as usize;
            s.uncharged = self.shared.park();
            if s.uncharged {
                self.shared.flow.give(1, bytes);
            }
            self.shared.keeper.park(self.shared.env.now() + after, self, slot);
            // Its new attempt number is confirmed when the driver has recorded it.
            return SettleStart::Queued(self.settles.note(self.id()));
        }
        match self.shared.mechanics.retry {
            RetryBy::Driver => self.by_driver(ring, slot, Carry::Settle(Settlement::Retry { after, attempt, cause })),
            _ => self.publish(ring, slot, Target::Retry { after, attempt, cause }),
        }
    }

    fn by_driver(&self, ring: &mut Ring, slot: u64, how: Carry) -> SettleStart {
        let Some(s) = ring.slots.get_mut(slot) else { return SettleStart::Done(Settled::Stale) };
        let (bytes, position) = (s.bytes as usize, s.position);
        let comes_again = !matches!(how, Carry::Settle(Settlement::DeadLetter { .. }));
        let op = self.settles.carry(self.id(), s.token, s.position, s.keep.clone(), how);
        self.finish(ring, slot);
        if comes_again {
            self.unsettled.add([position]);
        }
        self.shared.flow.give(1, bytes);
        SettleStart::Queued(op)
    }

    fn letter(&self, ring: &Ring, slot: u64, reason: Reason, error: Option<&Failure>, attempts: u32) -> Target {
        let slot = ring.slots.get(slot);
        let kept = slot.and_then(|s| s.keep.as_ref());
        let before = kept.and_then(|k| Envelope::read(&k.message.headers));
        let facts = LetterFacts {
            reason,
            error,
            attempts,
            position: slot.map(|s| s.position).unwrap_or_default(),
            first_seen: None,
            now: self.shared.env.wall(),
            redrives: kept
                .map_or(0, |k| crate::redrive::redrives(&k.message.headers))
                .max(before.map_or(0, |e| e.redrives)),
        };
        Target::DeadLetter(Box::new(self.shared.policy.envelope(self.source(), &facts)))
    }

    fn publish(&self, ring: &mut Ring, slot: u64, target: Target) -> SettleStart {
        let Some(s) = ring.slots.get_mut(slot) else { return SettleStart::Done(Settled::Stale) };
        let Some(message) = s.keep.clone() else { return SettleStart::Done(Settled::Stale) };
        s.state = SlotState::Moving;
        let op = self.shared.keeper.start_move(Move { lane: self.weak(), slot, message, target });
        SettleStart::Queued(op)
    }

    /// The copy of a moving slot is confirmed: the original is acknowledged.
    pub(crate) fn moved(&self, slot: u64) -> Option<u64> {
        let mut ring = self.ring.lock();
        let s = ring.slots.get_mut(slot).filter(|s| s.state == SlotState::Moving)?;
        let (token, bytes) = (s.token, s.bytes as usize);
        let op = self.settles.ack(self.id(), [token]);
        self.finish(&mut ring, slot);
        self.advance(&mut ring);
        ring.slots.retire();
        self.unlock(ring);
        self.shared.flow.give(1, bytes);
        self.shared.settled_one();
        Some(op)
    }

    /// Whether the lane still wants its moving slot moved.
    pub(crate) fn is_moving(&self, slot: u64) -> bool {
        let ring = self.ring.lock();
        ring.open && ring.slots.get(slot).is_some_and(|s| s.state == SlotState::Moving)
    }
}
