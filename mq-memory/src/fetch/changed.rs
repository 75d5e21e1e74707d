//! What a consumer does when partitions moved, or its topic or group was deleted: it looks again, and makes again what is its to make.

use super::{MemoryConsumer, Pauses};
use crate::driver::CONNECT;
use crate::lane::MemoryLane;
use crate::member::Trouble;
use mq_api::{Event, Gap, GapCause, Provisioning, Result, Settled, Source};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl MemoryConsumer {
    /// Ownership changed, or the group is gone: looks again.
    #[cold]
    pub(super) fn refresh(&mut self) -> Result<()> {
        let (mut topic, _) = self.member.seat();
        loop {
            if self.group.is_deleted() || topic.deleted.load(Ordering::Acquire) {
                topic = self.make_again()?;
            }
            self.group.assign_free();
            self.version = self.group.version();
            // Deleted again while it was made, when nobody had joined who could be told.
            if !self.group.is_deleted() {
                break;
            }
        }
        let mut lanes = Vec::new();
        for (number, part) in topic.parts.iter().enumerate() {
            let guard = part.lock();
            let Some(slot) = guard.groups.get(self.group.number) else { continue };
            if topic.exclusive && slot.owner != Some(self.member.id) {
                continue;
            }
            let epoch = slot.epoch;
            drop(guard);
            let kept = self.lanes.iter().find(|l| {
                l.number == number
                    && l.source.epoch == epoch
                    && Arc::ptr_eq(&l.topic, &topic)
                    && Arc::ptr_eq(&l.group, &self.group)
            });
            lanes.push(kept.cloned().unwrap_or_else(|| {
                let source = Source::new(topic.name.clone(), Some(self.group.name.clone()));
                Arc::new(MemoryLane {
                    member: self.member.clone(),
                    topic: topic.clone(),
                    group: self.group.clone(),
                    part: part.clone(),
                    number,
                    turn: 0,
                    source: source.at(Some(number as u32), epoch),
                    settled: Settled::Confirmed(self.member.core.capabilities.settle_level),
                })
            }));
        }
        self.lanes = lanes;
        self.at = 0;
        self.member.holds_parts(|part| self.lanes.iter().any(|lane| lane.number == part));
        Ok(())
    }

    /// Somebody deleted the topic or the group that this member made: made again, at the lowest position not known settled, or
    /// at the beginning of a new topic.
    fn make_again(&mut self) -> Result<Arc<crate::topic::Topic>> {
        let (core, sub) = (&self.member.core, &self.member.sub);
        let (old, _) = self.member.seat();
        let topic = core.topic(&sub.topic, sub.partitions, sub.retention, sub.provisioning)?;
        let same = Arc::ptr_eq(&old, &topic);
        let per_key = self.group.per_key();
        match topic.find_group(&self.group.name) {
            Some(found) => found.refuse_other_order(per_key, &topic.name)?,
            None if sub.provisioning == Provisioning::Create => {}
            None => {
                let text = format!(
                    "group '{}' of topic '{}' was deleted and provisioning is not Create",
                    self.group.name, topic.name
                );
                return Err(mq_api::Error::new(mq_api::ErrorKind::Topology, text));
            }
        }
        // Of a new topic nothing is known: it begins at its beginning.
        let left = if same { self.group.left() } else { Vec::new() };
        topic.make_group(&self.group.name, per_key, |number, part| {
            let first = part.log.head();
            left.get(number).map_or((first, 0), |left| (left.resume(first), left.lost(first)))
        });
        // Made by another, it may have another order, and no members yet.
        let group = topic.group_with_order(&self.group.name, mq_api::Start::Oldest, per_key);
        let count = same.then(|| group.lost());
        let gap = Gap { count, ..Gap::new(topic.name.clone(), GapCause::Deleted) };
        self.member.events.push(Event::Gap(gap));
        self.member.take_seat(topic.clone(), Some(group.clone()));
        self.member.trouble(Trouble::Group, None);
        self.group = group;
        self.group.join(&self.member);
        Ok(topic)
    }

    /// What this member needs is gone and not its to make: health says so, and it looks again until somebody makes it.
    #[cold]
    pub(super) fn wait_for_topology(&mut self, error: &mq_api::Error) {
        let member = &self.member;
        member.trouble(Trouble::Group, Some(error.to_string()));
        let mut pauses: Pauses = self.absent.take().map_or_else(|| Box::new(CONNECT.pauses()) as Pauses, |(p, _)| p);
        let pause = pauses.next().unwrap_or(CONNECT.max_pause);
        let (me, again) = (member.handle(), member.core.env.now() + pause);
        self.absent = Some((pauses, again));
        member.core.timer.at(again, move || {
            if let Some(me) = me.upgrade() {
                me.wake();
            }
        });
    }
}
