//! One entry, and what is to be done with it: acknowledged, again now or later, dead-lettered, discarded.

use crate::core::Core;
use crate::group::Group;
use crate::member::{Member, Trouble};
use crate::partition::{Part, Trimmed};
use crate::pending::{DELAYED, History};
use crate::topic::Topic;
use crate::trace::What;
use mq_api::{Class, Envelope, Failure, GapCause, OnDeadLetter, Position, Reason, Settled, Source};
use mq_core::{LetterFacts, Settlement, key_hash};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

/// An entry is settled for good. Says whether a draining partition may move now.
pub(crate) fn finish(topic: &Topic, group: &Group, part: &mut Part, position: u64) -> bool {
    let Some(slot) = part.groups.get_mut(group.number) else { return false };
    let freed = slot.end(position);
    let draining = slot.draining;
    let moved = slot.advance();
    let upto = slot.entries.head();
    part.waiting |= freed;
    if moved {
        part.trim(&topic.keep, upto);
    }
    draining && group.drained_maybe(part)
}

/// An entry whose message left the log while it was in hand, and which was not handled: there is nothing to hand over again,
/// so it ends here, and the group hears of it. Says whether a draining partition may move now.
fn gone(core: &Core, topic: &Topic, group: &Group, number: usize, part: &mut Part, position: u64) -> bool {
    let cause = if topic.keep.is_log { GapCause::Retention } else { GapCause::Deleted };
    let lost = Trimmed { group: group.number, from: position, to: position + 1, count: 1 };
    topic.report(core, group, number, lost, cause);
    finish(topic, group, part, position)
}

/// What was in hand is due again, for hand-over number `attempt`. Says whether a draining partition may move now.
pub(crate) fn give_back(
    core: &Core,
    (topic, number): (&Topic, usize),
    group: &Group,
    part: &mut Part,
    (position, attempt): (u64, u32),
    suspect_at: u32,
) -> bool {
    if part.stored(position).is_none() {
        return gone(core, topic, group, number, part, position);
    }
    let Some(slot) = part.groups.get_mut(group.number) else { return false };
    slot.wake_lost(position);
    slot.make_due(position, attempt, suspect_at);
    slot.draining && group.drained_maybe(part)
}

/// For the engine's driver: carries out a settlement that the engine decided; stale if the member does not hold it.
pub(crate) fn carry(
    member: &Arc<Member>,
    topic: &Arc<Topic>,
    group: &Arc<Group>,
    number: usize,
    position: u64,
    how: Settlement,
) -> Settled {
    let Some(shared) = topic.parts.get(number) else { return Settled::Stale };
    let mut guard = shared.lock();
    let part = &mut *guard;
    let held = part.groups.get_mut(group.number).and_then(|g| g.held_by_member(member.id, position).copied());
    let Some(entry) = held.filter(|_| !member.is_crashed()) else { return Settled::Stale };
    if let (Settlement::Ack, Some(trace)) = (&how, &member.core.trace) {
        let source = Source::new(topic.name.clone(), Some(group.name.clone())).at(Some(number as u32), 0);
        let id = part.stored(position).map(|s| s.message.id.clone()).unwrap_or_default();
        trace.push(What::Acked, member.place(&source, position), &id);
    }
    let letter = Letter { topic, group, part: number, position, attempt: entry.attempt(), member };
    letter.carry_out(guard, entry.size, how);
    Settled::Confirmed(member.core.capabilities.settle_level)
}

/// A delivery was held too long.
pub(crate) fn time_out(member: &Arc<Member>, topic: &Arc<Topic>, group: &Arc<Group>, number: usize, position: u64) {
    let Some(shared) = topic.parts.get(number) else { return };
    let mut guard = shared.lock();
    let part = &mut *guard;
    let Some(entry) = part.groups.get_mut(group.number).and_then(|g| g.held_by_member(member.id, position).copied())
    else {
        return;
    };
    let how = member.policy.timed_out(entry.attempt(), member.core.env.random_share());
    let letter = Letter { topic, group, part: number, position, attempt: entry.attempt(), member };
    letter.carry_out(guard, entry.size, how);
}

/// One entry, and what is to be done with it.
pub(crate) struct Letter<'a> {
    pub(crate) topic: &'a Arc<Topic>,
    pub(crate) group: &'a Arc<Group>,
    pub(crate) part: usize,
    pub(crate) position: u64,
    pub(crate) attempt: u32,
    pub(crate) member: &'a Member,
}

impl Letter<'_> {
    fn trace(&self, core: &Core, part: &Part, what: What) {
        if let Some(trace) = &core.trace {
            let source = self.source();
            let id = part.stored(self.position).map(|s| s.message.id.clone()).unwrap_or_default();
            trace.push(what, self.member.place(&source, self.position), &id);
        }
    }

    /// When a retry comes at the earliest: when it is due, and one of the members takes anything.
    fn comes_after(&self, after: Duration, cause: Option<&Failure>) -> Duration {
        if !cause.is_some_and(|cause| cause.class() == Class::Transient) {
            return after;
        }
        let mut pause = self.member.pause_ahead(true);
        self.group.each_member(|other| {
            if other.id != self.member.id {
                pause = pause.min(other.pause_ahead(false));
            }
        });
        after.max(pause)
    }

    fn source(&self) -> Source {
        Source::new(self.topic.name.clone(), Some(self.group.name.clone())).at(Some(self.part as u32), 0)
    }

    /// Carries out a settlement of what the member holds, and what follows once the partition is unlocked.
    pub(crate) fn carry_out(&self, mut part: MutexGuard<'_, Part>, size: u32, how: Settlement) {
        let free = self.settle(&self.member.core, &mut part, how);
        part.waiting = true;
        part.wake();
        drop(part);
        self.member.end_suspect(self.part, self.position);
        self.member.flow.give(1, size as usize);
        self.member.has_room();
        if free {
            self.group.assign_free();
        }
    }

    /// Carries out a settlement under the partition's lock. Says whether a draining partition may move now.
    pub(crate) fn settle(&self, core: &Core, part: &mut Part, how: Settlement) -> bool {
        match how {
            Settlement::Ack => finish(self.topic, self.group, part, self.position),
            Settlement::Release => {
                self.trace(core, part, What::Released);
                self.on_history(part, History::untried);
                self.again(core, part, Duration::ZERO, self.attempt, None)
            }
            Settlement::Retry { after, attempt, cause } => {
                let error = cause.as_ref().map(|c| c.chain().to_owned());
                if core.trace.is_some() {
                    let after = self.comes_after(after, cause.as_deref());
                    self.trace(core, part, What::Retried { after, error });
                }
                core.hooks.retried(&self.source(), attempt, after);
                self.on_history(part, History::survived);
                self.again(core, part, after, attempt, cause)
            }
            Settlement::Discard { reason, error } => {
                let id = part.stored(self.position).map(|s| s.message.id.clone()).unwrap_or_default();
                let error = error.as_ref().map(|e| e.chain().to_owned());
                let last = error.as_deref().unwrap_or_default();
                tracing::warn!(topic = %self.topic.name, %id, %reason, error = last, "message discarded: dead letters are off");
                core.hooks.discarded(&self.source(), &reason);
                self.trace(core, part, What::Discarded { reason: reason.to_string(), error });
                finish(self.topic, self.group, part, self.position)
            }
            Settlement::DeadLetter { reason, error, attempts } => {
                self.dead_letter(core, part, reason, error.as_deref(), attempts)
            }
        }
    }

    fn on_history(&self, part: &mut Part, change: impl FnOnce(&mut History)) {
        if let Some(slot) = part.groups.get_mut(self.group.number) {
            slot.on_history(self.position, change);
        }
    }

    /// Its consumers died with it alone.
    pub(crate) fn settle_crashed(&self, core: &Core, part: &mut Part) {
        let how = self.member.policy.crashed(self.attempt);
        self.settle(core, part, how);
    }

    /// The dead letter could not be written: the original stays, in nobody's hands, and the write is tried again. When its
    /// member is gone by then, it is anybody's.
    fn write_later(&self, core: &Core, part: &mut Part, reason: Reason, error: Option<&Failure>, attempts: u32) {
        let Some(slot) = part.groups.get_mut(self.group.number) else { return };
        slot.wake_lost(self.position);
        if let Some(entry) = slot.entries.get_mut(self.position) {
            entry.set(self.attempt, DELAYED);
            entry.at = core.tenths();
        }
        let error = error.cloned().map(Box::new);
        let (topic, group) = (Arc::downgrade(self.topic), Arc::downgrade(self.group));
        let (member, number) = (self.member.handle(), self.part);
        let (position, attempt, suspect_at) = (self.position, self.attempt, self.member.suspect_at());
        core.timer.at(core.env.now() + Duration::from_secs(1), move || {
            let (Some(topic), Some(group)) = (topic.upgrade(), group.upgrade()) else { return };
            if let Some(member) = member.upgrade() {
                member.renew_dead();
            }
            let mut guard = topic.parts[number].lock();
            let part = &mut *guard;
            let Some(slot) = part.groups.get_mut(group.number) else { return };
            if slot.deleted || !slot.entries.get(position).is_some_and(|e| e.is(DELAYED)) {
                return;
            }
            let free = match member.upgrade().filter(|m| !m.is_crashed()) {
                Some(member) => {
                    let letter =
                        Letter { topic: &topic, group: &group, part: number, position, attempt, member: &member };
                    letter.settle(&member.core, part, Settlement::DeadLetter { reason, error, attempts })
                }
                None => {
                    slot.make_due(position, attempt, suspect_at);
                    slot.draining && group.drained_maybe(part)
                }
            };
            part.waiting = true;
            part.wake();
            drop(guard);
            if free {
                group.assign_free();
            }
        });
    }

    /// Says whether a draining partition may move now.
    fn again(&self, core: &Core, part: &mut Part, after: Duration, attempt: u32, cause: Option<Box<Failure>>) -> bool {
        let (topic, group, suspect_at) = (self.topic, self.group, self.member.suspect_at());
        if part.stored(self.position).is_none() {
            return gone(core, topic, group, self.part, part, self.position);
        }
        let Some(slot) = part.groups.get_mut(self.group.number) else { return false };
        if let Some(cause) = cause {
            slot.history.entry(self.position).or_default().failure = Some(cause);
        }
        if after.is_zero() {
            return give_back(core, (topic, self.part), group, part, (self.position, attempt), suspect_at);
        }
        slot.wake_lost(self.position);
        let due = core.env.now() + after;
        if let Some(entry) = slot.entries.get_mut(self.position) {
            entry.set(attempt, DELAYED);
            entry.at = core.tenths();
        }
        slot.delayed.insert((due, self.position), ());
        let (topic, number, group) = (Arc::downgrade(self.topic), self.part, self.group.number);
        let env = core.env.clone();
        let free = slot.draining && self.group.drained_maybe(part);
        core.timer.at(due, move || {
            let Some(topic) = topic.upgrade() else { return };
            let mut part = topic.parts[number].lock();
            let Some(slot) = part.groups.get_mut(group) else { return };
            if slot.release_due(env.now(), suspect_at).0 {
                part.waiting = true;
                part.wake();
            }
        });
        free
    }

    /// Written to the dead letters and settled here in one step.
    fn dead_letter(
        &self,
        core: &Core,
        part: &mut Part,
        reason: Reason,
        error: Option<&Failure>,
        attempts: u32,
    ) -> bool {
        let Some(stored) = part.stored(self.position).cloned() else {
            return gone(core, self.topic, self.group, self.part, part, self.position);
        };
        let Some(dead) = self.member.dead() else {
            return finish(self.topic, self.group, part, self.position);
        };
        let source = self.source();
        let facts = LetterFacts {
            reason: reason.clone(),
            error,
            attempts,
            position: Position::offset(self.position),
            first_seen: None,
            now: core.env.wall(),
            redrives: mq_core::redrive::redrives(&stored.message.headers),
        };
        let envelope: Envelope = self.member.policy.envelope(&source, &facts);
        let message = envelope.dead_letter(&stored.message);
        let size = message.size() as u32;
        {
            // Partitions of two topics, the dead-letter one last; a dead-letter topic has no dead letters of its own.
            let mut letters = dead.pick(&message).1.lock();
            if dead.deleted.load(Acquire) || dead.refuse.load(Acquire) || !letters.admits(size, &dead.keep) {
                drop(letters);
                let why = match dead.deleted.load(Acquire) {
                    true => format!("topic '{}' was deleted", dead.name),
                    false => dead.full().to_string(),
                };
                let text = format!("dead letters cannot be written, so originals wait: {why}");
                self.member.trouble(Trouble::Letters, Some(text));
                self.write_later(core, part, reason, error, attempts);
                return false;
            }
            let spent = letters.spent(&dead.keep);
            letters.append(message, size, 0, spent);
            letters.wake();
        }
        self.member.trouble(Trouble::Letters, None);
        core.hooks.dead_lettered(&source, &reason);
        let last = error.map(|e| e.chain().to_owned());
        self.trace(core, part, What::DeadLettered { reason: reason.to_string(), error: last });
        let key = stored.message.key.as_deref().map(key_hash);
        drop(stored);
        if self.member.sub.on_dead_letter == OnDeadLetter::ParkKey
            && self.member.sub.ordering == mq_api::Ordering::PerKey
            && let Some(key) = key
            && let Some(slot) = part.groups.get_mut(self.group.number)
        {
            slot.parked_keys.insert(key, self.member.id);
        }
        finish(self.topic, self.group, part, self.position)
    }
}
