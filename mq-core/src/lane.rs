//! A lane: one ownership period of one ordered slice (a stream, a channel, a partition epoch). Deliveries settle only through
//! their lane, and closing it is the only fence: settle, close and reading what to commit share one lock.

use crate::keygate::{KeyGate, key_hash};
use crate::plan::{Carry, Token};
use crate::resume::Unsettled;
use crate::settles::SettleQueue;
use crate::shared::Shared;
use crate::slots::{Slot, SlotState, Slots, Trial};
use crate::sync::{Mutex, MutexGuard};
use mq_api::{Deliveries, Message, Position, Source, Stored};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::time::Instant;

/// A message that a driver fetched.
#[derive(Debug)]
pub struct Incoming {
    /// What the driver knows it by.
    pub token: Token,
    /// Where it is.
    pub position: Position,
    /// The message, library headers taken off.
    pub message: Message,
    /// The number of the hand-over that is to come, 1 for the first.
    pub attempt: u32,
    /// How often the broker says it was taken, this time included; 0 where it does not say. Suspicion only.
    pub takes: u32,
    /// How often it was recorded as handed over alone.
    pub trials: u32,
}

impl Incoming {
    /// A first delivery.
    pub fn new(token: Token, position: Position, message: Message) -> Self {
        Self { token, position, message, attempt: 1, takes: 1, trials: 0 }
    }
}

/// In the application's hands although no longer owned: still charged until the application lets go, or `max_processing`
/// passes.
pub(crate) struct Stray {
    pub(crate) bytes: u32,
    pub(crate) since: Option<Instant>,
}

pub(crate) struct Ring {
    pub(crate) open: bool,
    /// Hands out no more; what arrives goes back.
    pub(crate) draining: bool,
    pub(crate) slots: Slots,
    pub(crate) gate: KeyGate,
    /// Keys whose message that was out is settled: the next of each may go out.
    pub(crate) freed: Vec<u64>,
    /// By handle.
    pub(crate) strays: BTreeMap<u64, Stray>,
    /// By handle.
    pub(crate) lost: Vec<(u64, Waker)>,
    pub(crate) drained: Vec<Waker>,
    pub(crate) room: Vec<Waker>,
    pub(crate) wake: Vec<Waker>,
    pub(crate) seen: Option<Position>,
}

/// The number of a slot is in the low bits of a handle, the number of the hand-over in the high ones.
const HAND: u32 = 48;

pub(crate) fn slot_of(handle: u64) -> u64 {
    handle & ((1 << HAND) - 1)
}

impl Ring {
    /// What a delivery of this slot is known by now.
    pub(crate) fn handle(slot: &Slot, seq: u64) -> u64 {
        u64::from(slot.hand) << HAND | seq
    }

    /// The slot that `handle` still owns.
    #[inline]
    pub(crate) fn handed(&mut self, handle: u64) -> Option<&mut Slot> {
        if !self.open {
            return None;
        }
        let hand = (handle >> HAND) as u16;
        self.slots.get_mut(slot_of(handle)).filter(|s| s.state == SlotState::Handed && s.hand == hand)
    }
}

/// See the module.
pub struct Lane {
    id: u32,
    pub(crate) ring: Mutex<Ring>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) settles: Arc<SettleQueue>,
    pub(crate) unsettled: Arc<Unsettled>,
    pub(crate) source: Source,
    me: std::sync::Weak<Lane>,
}

impl Lane {
    pub(crate) fn new(
        id: u32,
        shared: Arc<Shared>,
        settles: Arc<SettleQueue>,
        unsettled: Arc<Unsettled>,
        source: Source,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            id,
            ring: Mutex::new(Ring {
                open: true,
                draining: false,
                slots: Slots::default(),
                gate: KeyGate::default(),
                freed: Vec::new(),
                strays: BTreeMap::new(),
                lost: Vec::new(),
                drained: Vec::new(),
                room: Vec::new(),
                wake: Vec::new(),
                seen: None,
            }),
            shared,
            settles,
            unsettled,
            source,
            me: me.clone(),
        })
    }

    /// Its number within the session, as in [`Ack::lane`](crate::Ack::lane).
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Topic, group, partition, epoch.
    pub fn source(&self) -> &Source {
        &self.source
    }

    pub(crate) fn weak(&self) -> std::sync::Weak<Lane> {
        self.me.clone()
    }

    pub(crate) fn strong(&self) -> Option<Arc<Lane>> {
        self.me.upgrade()
    }

    /// Gives up the lock, then wakes: whoever is woken may come straight back.
    pub(crate) fn unlock(&self, mut ring: MutexGuard<'_, Ring>) {
        let ring_mut = &mut *ring;
        if !ring_mut.drained.is_empty() && !self.is_busy(ring_mut) {
            ring_mut.wake.append(&mut ring_mut.drained);
        }
        if !ring_mut.room.is_empty() && ring_mut.gate.waiting() < self.shared.max_blocked {
            ring_mut.wake.append(&mut ring_mut.room);
        }
        if ring_mut.wake.is_empty() {
            return;
        }
        let wakers = std::mem::take(&mut ring_mut.wake);
        drop(ring);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_busy(&self, ring: &Ring) -> bool {
        // What was settled before the hand-over is still to be handed over.
        let owed = |state| self.shared.at_most_once && state == SlotState::Buffered;
        let busy = |state| matches!(state, SlotState::Handed | SlotState::Moving) || owed(state);
        ring.open && ring.slots.iter().any(|(_, s)| busy(s.state))
    }

    /// For the driver: messages arrived, in order. Charges the flow and wakes the consumer. Ignored after close; given back at
    /// once while the lane or the consumer drains.
    pub fn push(&self, incoming: impl IntoIterator<Item = Incoming>) {
        let Some(me) = self.strong() else { return };
        let policy = &self.shared.policy;
        let (mut first, mut n, mut count, mut bytes) = (0, 0u32, 0, 0usize);
        let (mut suspects, mut doomed, mut back) = (Vec::new(), Vec::new(), Vec::new());
        let (mut early, mut early_runs) = (Vec::new(), Vec::new());
        let at_most_once = self.shared.at_most_once;
        let mut ring = self.ring.lock();
        if !ring.open {
            return;
        }
        let ring_mut = &mut *ring;
        let known = self.unsettled.highest();
        let going_back = ring_mut.draining || self.shared.is_stopping();
        for item in incoming {
            let trials = item.trials;
            let (slot, cell) = self.fill(ring_mut, item, known);
            let (doubtful, size, token, key) = (cell.suspect, cell.bytes as usize, cell.token, cell.key);
            if going_back {
                cell.state = SlotState::Blocked;
                back.push(slot);
                continue;
            }
            if let Some(key) = key
                && !ring_mut.gate.arrive(key, slot)
            {
                // Not charged: it waits behind another of its key.
                continue;
            }
            if let Some(cell) = ring_mut.slots.get_mut(slot) {
                cell.state = SlotState::Buffered;
            }
            count += 1;
            bytes += size;
            if key.is_some() && self.is_parked_key(ring_mut, slot) || doubtful && trials >= policy.crash_trials {
                doomed.push(slot);
                continue;
            }
            if doubtful {
                suspects.push(slot);
                continue;
            }
            if n > 0 && first + u64::from(n) != slot {
                match at_most_once {
                    true => early_runs.push((first, n)),
                    false => self.shared.inbox.push(&me, first, n),
                }
                n = 0;
            }
            if n == 0 {
                first = slot;
            }
            n += 1;
            if at_most_once {
                early.push(token);
            }
        }
        self.shared.flow.take(count, bytes);
        doomed.into_iter().for_each(|slot| self.doom(&mut ring, slot));
        back.into_iter().for_each(|slot| self.give_back(&mut ring, slot));
        self.advance(&mut ring);
        ring.slots.retire();
        self.unlock(ring);
        for slot in suspects {
            self.shared.inbox.push_suspect(&me, slot);
        }
        if at_most_once && n > 0 {
            // Settled before the hand-over: handed out when the broker confirmed.
            early_runs.push((first, n));
            let op = self.settles.ack(self.id, early);
            early_runs.into_iter().for_each(|(first, n)| self.shared.inbox.push_after(&me, first, n, op));
        } else {
            self.shared.inbox.push(&me, first, n);
        }
        if self.shared.broadcast {
            self.shared.inbox.drop_beyond(&self.shared.hands, &self.shared.events);
        }
    }

    /// A new slot, blocked for now. `known`: positions up to this may have been delivered before.
    #[inline]
    fn fill<'r>(&self, ring: &'r mut Ring, item: Incoming, known: Option<Position>) -> (u64, &'r mut Slot) {
        let policy = &self.shared.policy;
        ring.seen = ring.seen.max(Some(item.position));
        let stored = Stored::new(item.message);
        let (slot, cell) = ring.slots.push();
        cell.key = if policy.per_key { stored.message.key.as_deref().map(key_hash) } else { None };
        (cell.token, cell.position, cell.attempt, cell.bytes) = (item.token, item.position, item.attempt, stored.size);
        (cell.hand, cell.trials, cell.handed_at, cell.trial) = (0, item.trials, None, Trial::Not);
        cell.again = known.is_some_and(|known| item.position <= known);
        cell.uncharged = false;
        cell.suspect = !policy.untracked && self.shared.crash_tracked && item.takes >= policy.suspect_at;
        cell.state = SlotState::Blocked;
        match cell.keep.as_mut().and_then(Arc::get_mut) {
            Some(reused) => *reused = stored,
            None => cell.keep = Some(Arc::new(stored)),
        }
        (slot, cell)
    }

    /// For the driver: one message arrived that is not due yet. It is parked, and handed out when it is.
    pub fn push_due(&self, item: Incoming, due: Instant) {
        let mut ring = self.ring.lock();
        if !ring.open {
            return;
        }
        let (slot, cell) = self.fill(&mut ring, item, self.unsettled.highest());
        // A copy has no place among those of its key.
        (cell.key, cell.suspect) = (None, false);
        if ring.draining || self.shared.is_stopping() {
            self.give_back(&mut ring, slot);
            return self.unlock(ring);
        }
        if let Some(cell) = ring.slots.get_mut(slot) {
            cell.state = SlotState::Parked;
            cell.uncharged = self.shared.park();
            if !cell.uncharged {
                self.shared.flow.take(1, cell.bytes as usize);
            }
        }
        drop(ring);
        self.shared.keeper.park(due, self, slot);
    }

    /// Hands out of `first..first + n` what is still buffered; says how many were handed and how many looked at.
    pub(crate) fn hand_out(&self, first: u64, n: u32, out: &mut Deliveries, now: Instant) -> (usize, u32) {
        let Some(me) = self.strong() else { return (0, n) };
        let mut ring = self.ring.lock();
        if !ring.open {
            return (0, n);
        }
        let (mut got, mut looked) = (0, 0);
        for slot in first..first + u64::from(n) {
            let Some(s) = ring.slots.get_mut(slot).filter(|s| s.state == SlotState::Buffered) else {
                looked += 1;
                continue;
            };
            let size = s.bytes as usize;
            if !self.shared.hands.fits(size) {
                break;
            }
            looked += 1;
            let Some(message) = s.keep.clone() else { continue };
            s.state = SlotState::Handed;
            s.handed_at = Some(now);
            if s.suspect {
                s.trials += 1;
            }
            self.shared.hands.take(1, size);
            out.run(&me, Ring::handle(s, slot)).push(message, s.position, s.attempt);
            got += 1;
        }
        drop(ring);
        if got > 0 {
            self.shared.hooks.delivered(&self.source, got);
        }
        (got, looked)
    }

    pub(crate) fn is_unsettled(&self, slot: u64) -> bool {
        let ring = self.ring.lock();
        ring.open && ring.slots.get(slot).is_some_and(|s| matches!(s.state, SlotState::Buffered | SlotState::Handed))
    }

    /// Whether the suspect is still in the application's hands.
    pub(crate) fn is_in_hand(&self, slot: u64) -> bool {
        let ring = self.ring.lock();
        ring.open && ring.slots.get(slot).is_some_and(|s| s.state == SlotState::Handed)
    }

    pub(crate) fn any_handed_here(&self) -> bool {
        self.shared.hands.in_flight() > 0
    }

    /// The trial of a suspect is recorded at the broker.
    pub(crate) fn poll_trial(&self, slot: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut ring = self.ring.lock();
        let Some(s) = ring.slots.get_mut(slot).filter(|s| s.is_held()) else { return Poll::Ready(()) };
        let token = s.token;
        match s.trial {
            Trial::Recorded => return Poll::Ready(()),
            Trial::Asked => {}
            Trial::Not => {
                s.trial = Trial::Asked;
                let (position, message, n) = (s.position, s.keep.clone(), s.trials + 1);
                self.settles.carry(self.id, token, position, message, Carry::Trial(n));
            }
        }
        let polled = self.settles.poll_trial(cx, self.id, token);
        if polled.is_ready() {
            s.trial = Trial::Recorded;
        }
        polled
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ring = self.ring.lock();
        write!(
            f,
            "Lane({} of {:?}, {} unsettled, open {})",
            self.id,
            self.source.partition,
            ring.slots.open(),
            ring.open
        )
    }
}
