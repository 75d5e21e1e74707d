//! What the broker lost: partitions that end before what was seen of them, and groups whose commits are gone.

use super::{Member, Role};
use crate::commit::{Job, Loaded};
use crate::group::group_id;
use crate::partition::Partition;
use mq_api::{Event, Gap, GapCause, Position};
use std::time::{Duration, Instant};

/// Pause after offsets were missing for another reason than retention: where transactions are, each leaves one.
const WHY: Duration = Duration::from_secs(1);

impl Member {
    pub(super) fn gap(&self, partition: i32, from: u64, to: u64, cause: GapCause, count: Option<u64>) {
        self.session.events.push(Event::Gap(Gap {
            topic: self.session.subscription.topic.clone(),
            partition: u32::try_from(partition).ok(),
            from: from.checked_sub(1).map(Position::offset),
            to: Some(Position::offset(to)),
            count,
            cause,
        }));
    }

    /// Asks for the first offset that a partition still has, if some are missing.
    pub(super) fn ask_why(&mut self) {
        if self.asking_why {
            return;
        }
        let mut missing = self.partitions.iter_mut().filter(|p| p.missing.is_some());
        let Some(partition) = missing.next() else { return };
        if Instant::now() < self.next_why {
            return;
        }
        let Some(missing) = partition.missing.take() else { return };
        self.asking_why = true;
        self.committer.ask(Job::Low { topic: partition.topic.clone(), partition: partition.number, missing });
    }

    pub(super) fn on_low(&mut self, partition: i32, missing: (u64, u64), low: Option<u64>) {
        self.asking_why = false;
        let (expected, found) = missing;
        match low {
            // More may have been taken meanwhile: of what was read already.
            Some(low) if low > expected => {
                let low = low.min(found);
                self.gap(partition, expected, low, GapCause::Retention, Some(low - expected));
            }
            Some(_) => self.next_why = Instant::now() + WHY,
            None => {
                self.next_why = Instant::now() + WHY;
                if let Some(partition) = self.partitions.iter_mut().find(|p| p.number == partition) {
                    partition.misses(expected, found);
                }
            }
        }
    }

    /// The last offset that was seen of a partition in an earlier period, unless its loss was told.
    pub(super) fn seen(&self, partition: i32) -> Option<Position> {
        let main = self.role == Role::Main && !self.reading.remade && !self.told.contains(&partition);
        main.then(|| self.session.resume(u32::try_from(partition).ok()).and_then(|r| r.seen)).flatten()
    }

    /// A partition that ends before what was seen of it is another, or lost its end. One gap says so.
    pub(super) fn tell_loss(&mut self, entries: &[Loaded]) {
        let mut lost: Option<Gap> = None;
        for Loaded { entry, high, .. } in entries {
            let (Some(high), Some(seen)) = (*high, self.seen(entry.partition)) else { continue };
            if high > seen.major {
                continue;
            }
            self.told.insert(entry.partition);
            let partition = u32::try_from(entry.partition).ok();
            let gap = lost.get_or_insert(Gap {
                partition,
                from: Some(seen),
                to: Some(Position::offset(high)),
                ..Gap::new(self.session.subscription.topic.clone(), GapCause::Deleted)
            });
            if gap.partition != partition {
                // Several: the topic as a whole.
                (gap.partition, gap.from, gap.to) = (None, None, None);
            }
        }
        lost.into_iter().for_each(|gap| self.session.events.push(Event::Gap(gap)));
    }

    /// Notes how far a partition is that is given up, should the group be lost.
    pub(super) fn remember(&self, partition: &Partition) {
        if let Some(group) = self.group_id() {
            let at = partition.confirmed();
            self.cluster.leave_at(self.session.consumer, &group, &partition.topic, partition.number, at);
        }
    }

    /// Where this member left a partition.
    pub(super) fn left_at(&self, partition: i32) -> Option<u64> {
        self.cluster.left_at(self.session.consumer, &self.group_id()?, &self.topic, partition)
    }

    /// The group of the topic; retry topics are not remembered: what they hold is read from the start.
    fn group_id(&self) -> Option<String> {
        let sub = &self.session.subscription;
        let group = sub.group_name().filter(|_| self.role == Role::Main);
        group.map(|group| group_id(&sub.topic, group))
    }
}
