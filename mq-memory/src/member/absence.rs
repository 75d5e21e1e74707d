//! What takes a member away for a while, or for good: a lost connection, a freeze, the death of its process.

use super::Member;
use crate::group::Group;
use crate::topic::Topic;
use mq_api::{Event, Gap, GapCause};
use mq_core::Gate;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Member {
    /// Its connection is lost: what it holds goes back, and it takes nothing until it comes back.
    pub(crate) fn go_away(&self, reason: &str) {
        *self.away.lock() = Some(reason.to_owned());
        self.flow.shut(Gate::Away);
        let (topic, group) = self.seat();
        self.core.lose_leases(self, true);
        match group {
            Some(group) => {
                group.leave(self.id);
            }
            None => self.unlisten(&topic),
        }
        self.refresh();
        self.wake();
    }

    /// Its connection is there again.
    pub(crate) fn come_back(&self) {
        *self.away.lock() = None;
        let (topic, group) = self.seat();
        let broadcast = group.is_none();
        self.join_again(group);
        // One that closed meanwhile has gone.
        if broadcast && !self.is_stopping() {
            self.hear_again(&topic);
        }
        self.flow.open(Gate::Away);
        self.refresh();
        self.wake();
    }

    /// Hears its topic again, or the one that was made in its place; what was sent meanwhile was not for it.
    fn hear_again(&self, topic: &Topic) {
        match self.core.find_topic(&topic.name) {
            Some(now) if std::ptr::eq(&*now, topic) => {
                let heard = self.heard.lock().upgrade();
                if let Some(buffer) = heard {
                    self.hear(topic, &buffer);
                }
                self.events.push(Event::Gap(Gap::new(topic.name.clone(), GapCause::Disconnected)));
            }
            // It will tell of the deletion when it looks.
            Some(other) => self.listen_again(&other),
            None => {}
        }
    }

    /// Nothing of it is heard, and it hears nothing; when its lease runs out meanwhile, it has lost what it held.
    pub(crate) fn freeze(&self, frozen: bool) {
        let number = self.freezes.load(Ordering::Relaxed);
        if (number % 2 == 1) == frozen {
            return;
        }
        let number = self.freezes.fetch_add(1, Ordering::Relaxed) + 1;
        if !frozen {
            self.join_again(self.seat().1);
            self.flow.open(Gate::Away);
            self.wake();
            return;
        }
        self.flow.shut(Gate::Away);
        let me = self.me.clone();
        self.core.timer.at(self.core.env.now() + self.core.silence(self.sub.lease), move || {
            let Some(me) = me.upgrade() else { return };
            if me.freezes.load(Ordering::Relaxed) != number {
                return;
            }
            me.core.lose_leases(&me, false);
            if let (_, Some(group)) = me.seat() {
                group.leave(me.id);
            }
        });
    }

    fn join_again(&self, group: Option<Arc<Group>>) {
        if let (Some(group), Some(me)) = (group, self.me.upgrade())
            && !self.is_stopping()
        {
            group.join(&me);
        }
    }

    /// Its process dies: nothing of it is heard again, and its deliveries come free when their leases end.
    pub(crate) fn crash(&self) {
        if self.crashed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.plain.store(false, Ordering::SeqCst);
        self.flow.shut(Gate::Stopping);
        self.wake();
        let me = self.me.clone();
        let lease = self.core.silence(self.sub.lease);
        self.core.timer.at(self.core.env.now() + lease, move || {
            if let Some(me) = me.upgrade() {
                me.lease_ended();
            }
        });
        // Keeps the member until its leases have ended.
        if let Some(me) = self.me.upgrade() {
            self.core.dying.lock().push(me);
        }
    }

    fn lease_ended(&self) {
        let (topic, group) = self.seat();
        if let Some(group) = group {
            for (number, part) in topic.parts.iter().enumerate() {
                let held = {
                    let part = part.lock();
                    part.groups.get(group.number).map(|g| g.held_positions(self.id)).unwrap_or_default()
                };
                for position in held {
                    self.core.lost_by(self, &topic, &group, number, position, false);
                }
            }
        }
        self.leave();
        self.core.dying.lock().retain(|m| m.id != self.id);
    }
}
