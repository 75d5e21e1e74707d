//! How a member is: what pauses it, what is wrong with it, whether it waits for room; and what its health says of that.

use super::Member;
use mq_api::HealthState;
use mq_core::Gate;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What may be wrong with a member while it runs. Of several at once health names the first of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// Its group or topic is not there.
    Group,
    /// Dead letters cannot be written.
    Letters,
    /// Too much waits behind delayed keys of this partition.
    Keys(usize),
}

impl Member {
    /// Something the handler depends on is down: pause, longer each time in a row.
    pub(crate) fn transient(&self) {
        if !self.flow.shut(Gate::Transient) {
            return;
        }
        let streak = self.streak.fetch_add(1, Ordering::SeqCst);
        self.plain.store(false, Ordering::SeqCst);
        let until = self.core.env.after(self.policy.transient_pause(streak));
        *self.paused_until.lock() = Some(until);
        self.refresh();
        let me = self.me.clone();
        self.core.timer.at(until, move || {
            if let Some(me) = me.upgrade() {
                *me.paused_until.lock() = None;
                me.flow.open(Gate::Transient);
                me.refresh();
                me.wake();
            }
        });
    }

    /// How long it takes nothing because of a transient failure, also one that is about to be counted.
    pub(crate) fn pause_ahead(&self, fails_now: bool) -> Duration {
        match *self.paused_until.lock() {
            Some(until) => until.saturating_duration_since(self.core.env.now()),
            None if fails_now => self.policy.transient_pause(self.streak.load(Ordering::SeqCst)),
            None => Duration::ZERO,
        }
    }

    /// It waits for room: health says so until something is settled.
    pub(crate) fn waits_for_room(&self) {
        if self.flow.in_flight() >= self.flow.max() && !self.full.swap(true, Ordering::SeqCst) {
            // What is settled is looked at from now on.
            self.plain.store(false, Ordering::SeqCst);
            self.refresh();
        }
    }

    /// Something was settled.
    pub(crate) fn has_room(&self) {
        if self.full.load(Ordering::Relaxed) && self.flow.in_flight() < self.flow.max() {
            self.full.store(false, Ordering::SeqCst);
            self.refresh();
        }
    }

    /// Something was handled: the next transient failure is the first again.
    pub(crate) fn handled(&self) {
        if self.flow.is_shut(Gate::Transient) {
            return;
        }
        self.streak.store(0, Ordering::SeqCst);
        self.plain.store(!self.core.watched, Ordering::SeqCst);
        // It may have died meanwhile.
        if self.crashed.load(Ordering::SeqCst) {
            self.plain.store(false, Ordering::SeqCst);
        }
    }

    /// What is wrong with its dead letters, its group or a partition's keys: each has a place of its own.
    pub(crate) fn trouble(&self, of: Trouble, reason: Option<String>) {
        let mut troubles = self.troubles.lock();
        if troubles.get(&of) == reason.as_ref() {
            return;
        }
        match reason {
            Some(reason) => drop(troubles.insert(of, reason)),
            None => drop(troubles.remove(&of)),
        }
        drop(troubles);
        self.refresh();
    }

    /// It holds these partitions now: what is wrong with the keys of others is not its trouble any more.
    pub(crate) fn holds_parts(&self, held: impl Fn(usize) -> bool) {
        let mut troubles = self.troubles.lock();
        let before = troubles.len();
        troubles.retain(|of, _| !matches!(of, Trouble::Keys(part) if !held(*part)));
        let changed = troubles.len() != before;
        drop(troubles);
        if changed {
            self.refresh();
        }
    }

    pub(crate) fn refresh(&self) {
        let (state, reason) = if self.flow.is_shut(Gate::Stopping) {
            (HealthState::Closed, String::new())
        } else if let Some(reason) = self.away.lock().clone() {
            (HealthState::Reconnecting, reason)
        } else if self.flow.is_shut(Gate::Paused) {
            (HealthState::Paused, "by the program".to_owned())
        } else if self.flow.is_shut(Gate::Transient) {
            (HealthState::Paused, "a transient failure: something the handler depends on is down".to_owned())
        } else if let Some(trouble) = self.troubles.lock().values().next().cloned() {
            (HealthState::Degraded, trouble)
        } else if self.flow.in_flight() >= self.flow.max() {
            (HealthState::Backpressured, format!("{} deliveries are in flight", self.flow.max()))
        } else {
            (HealthState::Running, String::new())
        };
        self.core.hooks.health(&self.sub.topic, state, &reason);
        self.health.set(state, reason, self.core.env.wall());
    }
}
