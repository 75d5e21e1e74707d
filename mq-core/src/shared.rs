//! What all parts of one consumer share.

use crate::env::Env;
use crate::flow::{Flow, Gate};
use crate::hold::Fenced;
use crate::hooks::Hooks;
use crate::inbox::Inbox;
use crate::keeper::Keeper;
use crate::mechanics::Mechanics;
use crate::policy::Policy;
use crate::settles::Tally;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use bytes::Bytes;
use mq_api::{
    Durability, EventLog, Failure, HealthSetter, HealthState, MessageId, Mode, OnDeadLetter, Reason, Source,
    Subscription,
};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use tokio::time::Instant;

/// What a close could not do.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Missing {
    /// Deliveries of sessions that were lost and not followed by another.
    pub(crate) orphans: u64,
    /// Given back, and not confirmed.
    pub(crate) returned: u64,
    /// Settlements whose fate is unknown.
    pub(crate) unknown: u64,
}

/// See the module.
pub(crate) struct Shared {
    pub(crate) sub: Arc<Subscription>,
    pub(crate) policy: Policy,
    pub(crate) flow: Arc<Flow>,
    /// What is in the application's hands, a part of `flow`.
    pub(crate) hands: Flow,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) events: EventLog,
    pub(crate) env: Env,
    pub(crate) keeper: Keeper,
    pub(crate) mechanics: Mechanics,
    pub(crate) hooks: Arc<dyn Hooks>,
    pub(crate) at_most_once: bool,
    pub(crate) broadcast: bool,
    pub(crate) crash_tracked: bool,
    pub(crate) max_blocked: usize,
    /// Whether the keys of dead letters are parked, and which are.
    pub(crate) parks_keys: bool,
    pub(crate) parked_keys: Mutex<HashSet<Bytes>>,
    given_back: AtomicU64,
    missing: Mutex<Missing>,
    reattached: tokio::sync::Notify,
    health: HealthSetter,
    level: AtomicU8,
    parked: AtomicUsize,
    streak: AtomicU32,
    discarded: AtomicU64,
    session: Mutex<(HealthState, String)>,
    trouble: Mutex<BTreeMap<String, String>>,
    transient_until: Mutex<Option<Instant>>,
}

impl Shared {
    pub(crate) fn new(
        sub: Arc<Subscription>,
        member: Arc<str>,
        mechanics: Mechanics,
        level: Durability,
        env: Env,
        hooks: Arc<dyn Hooks>,
    ) -> Arc<Self> {
        let flow = Arc::new(Flow::new(sub.max_in_flight, sub.max_in_flight_bytes));
        let at_most_once = sub.settles_first();
        Arc::new(Self {
            policy: Policy::new(&sub, member),
            hands: Flow::new(sub.max_in_flight, sub.max_in_flight_bytes),
            inbox: Inbox::new(flow.clone(), at_most_once),
            flow,
            events: EventLog::default(),
            keeper: Keeper::default(),
            mechanics,
            hooks,
            at_most_once,
            broadcast: sub.mode == Mode::Broadcast,
            crash_tracked: sub.dead_letter != mq_api::DeadLetterPolicy::Forever,
            max_blocked: sub.max_blocked,
            parks_keys: sub.ordering == mq_api::Ordering::PerKey && sub.on_dead_letter == OnDeadLetter::ParkKey,
            parked_keys: Mutex::default(),
            given_back: AtomicU64::new(0),
            missing: Mutex::default(),
            reattached: tokio::sync::Notify::new(),
            health: HealthSetter::new(HealthState::Connecting, env.wall()),
            level: AtomicU8::new(level as u8),
            parked: AtomicUsize::new(0),
            streak: AtomicU32::new(0),
            discarded: AtomicU64::new(0),
            session: Mutex::new((HealthState::Connecting, String::new())),
            trouble: Mutex::default(),
            transient_until: Mutex::default(),
            sub,
            env,
        })
    }

    pub(crate) fn health(&self) -> &HealthSetter {
        &self.health
    }

    pub(crate) fn settle_level(&self) -> Durability {
        [Durability::Sent, Durability::Memory, Durability::Disk, Durability::Replicated]
            [self.level.load(Ordering::Relaxed) as usize]
    }

    pub(crate) fn set_settle_level(&self, level: Durability) {
        self.level.store(level as u8, Ordering::Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.flow.is_shut(Gate::Stopping)
    }

    /// Whether one more may be parked.
    pub(crate) fn may_park(&self) -> bool {
        self.parked.load(Ordering::Relaxed) < self.sub.max_parked
    }

    /// One more parked; true if it is within the bound and its credit is given back.
    pub(crate) fn park(&self) -> bool {
        let more = |parked| (parked < self.sub.max_parked).then_some(parked + 1);
        self.parked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// One parked less; true if it still holds its credit.
    pub(crate) fn unpark(&self, uncharged: bool) -> bool {
        if uncharged {
            self.parked.fetch_sub(1, Ordering::Relaxed);
        }
        !uncharged
    }

    /// Deliveries are given back: counted while closing, unless they were settled before the hand-over.
    pub(crate) fn count_given_back(&self, n: usize) {
        if self.is_stopping() && !self.policy.untracked {
            self.given_back.fetch_add(n as u64, Ordering::Relaxed);
        }
    }

    /// How many were given back by close.
    pub(crate) fn given_back(&self) -> u64 {
        self.given_back.load(Ordering::Relaxed)
    }

    /// A session was fenced, with this open.
    pub(crate) fn fenced(&self, fenced: Fenced, tally: Tally) {
        let mut missing = self.missing.lock();
        // What is settled before the hand-over has nobody to go back to.
        let held = if self.policy.untracked { 0 } else { fenced.handed + fenced.waiting };
        missing.orphans += held as u64;
        if self.is_stopping() {
            missing.unknown += tally.unknown + fenced.moving as u64;
            missing.returned += tally.returned;
        }
    }

    /// A new session runs: what former ones left behind comes to it, or to others.
    pub(crate) fn attached(&self) {
        self.missing.lock().orphans = 0;
        self.reattached.notify_waiters();
    }

    /// Waits until nothing of a lost session is left behind. Cancel-safe.
    pub(crate) async fn no_orphans(&self) {
        loop {
            let reattached = self.reattached.notified();
            if self.missing.lock().orphans == 0 {
                return;
            }
            reattached.await;
        }
    }

    /// What a close could not do.
    pub(crate) fn missing(&self) -> Missing {
        *self.missing.lock()
    }

    /// Something left the application's hands: whoever waits for that looks again.
    #[inline]
    pub(crate) fn settled_one(&self) {
        self.inbox.nudge();
    }

    /// A message was handled: what it depends on is up.
    #[inline]
    pub(crate) fn handled(&self) {
        if self.streak.load(Ordering::Relaxed) != 0 && !self.flow.is_shut(Gate::Transient) {
            self.streak.store(0, Ordering::Relaxed);
        }
    }

    /// Something the handler depends on is down: the subscription pauses, longer each time in a row.
    pub(crate) fn transient(&self) {
        if !self.flow.shut(Gate::Transient) {
            return;
        }
        let streak = self.streak.fetch_add(1, Ordering::Relaxed);
        let pause = self.policy.transient_pause(streak);
        *self.transient_until.lock() = Some(self.env.now() + pause);
        self.refresh();
        self.keeper.wake();
    }

    /// Ends the pause if it is over; else says when.
    pub(crate) fn transient_due(&self) -> Option<Instant> {
        let mut until = self.transient_until.lock();
        let at = (*until)?;
        if at > self.env.now() {
            return Some(at);
        }
        *until = None;
        drop(until);
        self.flow.open(Gate::Transient);
        self.inbox.nudge();
        self.refresh();
        None
    }

    pub(crate) fn pause(&self, paused: bool) {
        match paused {
            true => {
                self.flow.shut(Gate::Paused);
            }
            false => self.flow.open(Gate::Paused),
        }
        self.inbox.nudge();
        self.refresh();
    }

    pub(crate) fn session_state(&self, state: HealthState, reason: impl Into<String>) {
        *self.session.lock() = (state, reason.into());
        self.refresh();
    }

    /// Names, or clears, something that needs attention.
    pub(crate) fn trouble(&self, what: &str, reason: Option<String>) {
        {
            let mut trouble = self.trouble.lock();
            match reason {
                Some(reason) if trouble.get(what) == Some(&reason) => return,
                Some(reason) => {
                    tracing::warn!(topic = %self.sub.topic, what, reason, "consumer degraded");
                    trouble.insert(what.to_owned(), reason);
                }
                None if trouble.remove(what).is_none() => return,
                None => {}
            }
        }
        self.refresh();
    }

    pub(crate) fn set_blocked(&self, source: &Source, full: bool) {
        if !full && self.trouble.lock().is_empty() {
            return;
        }
        let what = format!("partition {:?}", source.partition);
        let reason = || format!("{what} waits: {} messages are behind delayed keys", self.max_blocked);
        self.trouble(&what, full.then(reason));
    }

    pub(crate) fn discarded(&self, source: &Source, id: &MessageId, reason: &Reason, error: Option<&Failure>) {
        self.discarded.fetch_add(1, Ordering::Relaxed);
        self.hooks.discarded(source, reason);
        let error = error.map_or("", |e| e.chain());
        tracing::warn!(topic = %source.topic, %id, %reason, error, "message discarded: dead letters are off");
    }

    /// Computes the health from everything that bears on it.
    pub(crate) fn refresh(&self) {
        let (session, why) = self.session.lock().clone();
        let trouble = self.trouble.lock().values().next().cloned();
        let (state, reason) = if session != HealthState::Running {
            (session, why)
        } else if self.flow.is_shut(Gate::Paused) {
            (HealthState::Paused, "by the program".to_owned())
        } else if self.flow.is_shut(Gate::Transient) {
            (HealthState::Paused, "a transient failure: something the handler depends on is down".to_owned())
        } else if let Some(trouble) = trouble {
            (HealthState::Degraded, trouble)
        } else if self.flow.in_flight() >= self.flow.max() {
            (HealthState::Backpressured, format!("{} deliveries are in flight", self.flow.max()))
        } else {
            (HealthState::Running, String::new())
        };
        self.hooks.health(&self.sub.topic, state, &reason);
        self.health.set(state, reason, self.env.wall());
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({}, {} in flight)", self.sub.topic, self.flow.in_flight())
    }
}
