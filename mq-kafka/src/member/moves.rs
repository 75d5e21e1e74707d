//! Changes of a member's assignment: new partitions start where the group is, leaving ones are drained, fenced and committed,
//! while all others flow.

use super::rounds::{Flight, ONE_REQUEST};
use super::{AGAIN, Member, News, Role};
use crate::client::{Change, KEYED_MOVE};
use crate::commit::{Job, Loaded, Place};
use crate::ffi;
use crate::partition::{Owner, Partition};
use crate::record::Record;
use crate::start::no_group;
use mq_api::{Ordering, Provisioning};
use rdkafka::consumer::Consumer;
use rdkafka::{Offset, TopicPartitionList};
use std::task::Context;
use std::time::{Duration, Instant};

/// A commit before a partition is given up is waited for this long: then the broker is away, and the new owner starts from
/// the commit before.
const LAST_COMMIT: Duration = Duration::from_secs(3);
/// How long what is in hand may hold back a partition that moves. Without order it is a courtesy: less is done twice.
const GRACE: Duration = Duration::from_secs(10);
/// Under `PerKey` ownership moves only when all that was taken has been handled; bounded by what the group waits.
const KEYED_GRACE: Duration = Duration::from_secs(KEYED_MOVE.as_secs() * 2 / 3);

pub(super) enum Moving {
    /// The offsets of new partitions are being read.
    Loading { list: TopicPartitionList },
    /// Reading them failed; again at this time.
    Waiting { list: TopicPartitionList, until: Instant },
    /// What is in hand is finished, at most until then.
    Draining { list: TopicPartitionList, until: Instant },
    /// The last commit is under way.
    Committing { list: TopicPartitionList, until: Instant },
}

impl Member {
    pub(super) fn advance(&mut self, cx: &mut Context<'_>) -> bool {
        match self.moving.take() {
            None => match self.ctx.next_change() {
                None => false,
                Some(Change::Assign(list)) => {
                    self.assign(list);
                    true
                }
                Some(Change::Revoke { list, lost }) => {
                    self.revoke(list, lost);
                    true
                }
            },
            Some(Moving::Waiting { list, until }) if Instant::now() >= until => {
                self.assign(list);
                true
            }
            Some(Moving::Draining { list, until }) => {
                let drained = self.partitions.iter().filter(|p| p.draining).all(|p| p.lane.poll_drained(cx).is_ready());
                if (drained || Instant::now() >= until) && self.flight.is_none() {
                    self.give_up(list);
                    return true;
                }
                self.moving = Some(Moving::Draining { list, until });
                false
            }
            Some(Moving::Committing { list, until }) => {
                let over = self.flight.is_none();
                if over || Instant::now() >= until {
                    if let Some(flight) = self.drop_flight() {
                        let lanes = flight.snapshots.iter().map(|s| s.lane).collect();
                        self.news.push(News::Unsure(lanes));
                    }
                    self.unassign(&list);
                    return true;
                }
                self.moving = Some(Moving::Committing { list, until });
                false
            }
            same => {
                self.moving = same;
                false
            }
        }
    }

    fn assign(&mut self, list: TopicPartitionList) {
        let wanted: Vec<Place> = ffi::entries(&list)
            .into_iter()
            .map(|e| {
                let seen = self.seen(e.partition).is_some();
                let resume = self.left_at(e.partition);
                Place { seen, resume, topic: e.topic, partition: e.partition }
            })
            .collect();
        if wanted.is_empty() {
            self.assigned(&list);
            return;
        }
        self.moving = Some(Moving::Loading { list });
        self.committer.ask(Job::Load(wanted));
    }

    pub(super) fn on_loaded(&mut self, result: mq_api::Result<Vec<Loaded>>) {
        let Some(Moving::Loading { list }) = self.moving.take() else { return };
        let entries = match result {
            Ok(entries) => entries,
            Err(error) => {
                // The group waits: its partitions are ours, and start when it is known where.
                self.session.trouble("offsets", Some(error.to_string()));
                self.moving = Some(Moving::Waiting { list, until: Instant::now() + AGAIN });
                return;
            }
        };
        self.session.trouble("offsets", None);
        let sub = &self.session.subscription;
        // Others are new in the topic: nothing can be committed of them yet.
        let mut begun = entries.iter().filter(|e| self.begun.contains(&e.entry.partition)).peekable();
        let lost = self.role == Role::Main && begun.peek().is_some() && begun.all(|e| e.fresh);
        if lost && sub.provisioning == Provisioning::Verify {
            // It was there when the session began: lost since. Only what this program made is made again.
            self.moving = Some(Moving::Loading { list });
            self.news.push(News::Gone(no_group(sub.topic.as_str())));
            return;
        }
        self.tell_loss(&entries);
        let epoch = ffi::group_generation(self.consumer.client());
        let mut places = TopicPartitionList::with_capacity(entries.len().max(1));
        for Loaded { entry, removed, .. } in entries {
            let start = u64::try_from(entry.offset).unwrap_or_default();
            // Split before it is assigned: else its first messages come to the main queue.
            let driver = self.driver.clone();
            let wake = move || driver.unpark();
            let Some(queue) = ffi::Queue::of(&self.consumer, &entry.topic, entry.partition, wake) else { continue };
            if let Err(error) = places.add_partition_offset(&entry.topic, entry.partition, Offset::Offset(entry.offset))
            {
                tracing::warn!(%error, topic = %entry.topic, "a partition that cannot be named");
                continue;
            }
            let shown = if self.role == Role::Main { u32::try_from(entry.partition).ok() } else { None };
            let lane = self.session.open_lane(shown, epoch);
            let sub = &self.session.subscription;
            let owner = Owner {
                group: sub.group_name().map_or_else(|| "".into(), |group| group.as_str().into()),
                keyed: sub.ordering == Ordering::PerKey,
                tracked: !self.session.at_most_once(),
            };
            let watched = self.cluster.watch(&lane, &self.session.member);
            let topic = entry.topic.clone();
            let mut known = Record::decode(start, &entry.metadata).unwrap_or_default();
            if let Some(removed) = removed {
                known.take_out(&removed);
            }
            self.partitions.push(Partition::new(topic, entry.partition, watched, queue, start, known, owner));
        }
        self.assigned(&places);
    }

    fn assigned(&mut self, list: &TopicPartitionList) {
        self.take_on(list);
        if !std::mem::replace(&mut self.joined, true) {
            self.news.push(News::Joined);
        }
    }

    fn revoke(&mut self, list: TopicPartitionList, lost: bool) {
        let leaving = ffi::entries(&list);
        for partition in &mut self.partitions {
            let leaves = leaving.iter().any(|e| e.partition == partition.number && e.topic == partition.topic);
            partition.draining |= leaves;
            if leaves && !lost {
                partition.lane.begin_drain();
            }
        }
        if !lost {
            let keyed = self.session.subscription.ordering == Ordering::PerKey;
            let until = Instant::now() + if keyed { KEYED_GRACE } else { GRACE };
            self.moving = Some(Moving::Draining { list, until });
            return;
        }
        // Somebody else may own them already: nothing is written any more. What was on its way may have been, unless its answer,
        // by which the loss may have become known, says that it was not.
        self.await_flight(ONE_REQUEST);
        let flying = self.drop_flight().map(|flight| flight.snapshots).unwrap_or_default();
        for mut partition in self.partitions.extract_if(.., |p| p.draining).collect::<Vec<_>>() {
            self.session.close_lane(&partition.lane);
            self.remember(&partition);
            let lane = partition.lane.id();
            let ending = partition.lost(flying.iter().find(|snapshot| snapshot.lane == lane));
            self.news.push(News::Over(lane, ending));
        }
        self.unassign(&list);
    }

    /// Fences the leaving partitions, then commits what they came to: what was accepted before the fence is in the commit.
    fn give_up(&mut self, list: TopicPartitionList) {
        let mut snapshots = Vec::new();
        for mut partition in self.partitions.extract_if(.., |p| p.draining).collect::<Vec<_>>() {
            self.session.close_lane(&partition.lane);
            self.remember(&partition);
            let snapshot = partition.snapshot(true);
            self.news.push(News::Over(partition.lane.id(), partition.given_up(&snapshot)));
            if !partition.is_committed(&snapshot) {
                snapshots.push(snapshot);
            }
        }
        if snapshots.is_empty() {
            self.unassign(&list);
            return;
        }
        self.committer.ask(Job::Commit(snapshots.iter().map(|s| s.mark.clone()).collect()));
        self.flight = Some(Flight::new(snapshots, true));
        self.moving = Some(Moving::Committing { list, until: Instant::now() + LAST_COMMIT });
    }

    /// Answers an assignment.
    pub(super) fn take_on(&self, list: &TopicPartitionList) {
        if let Err(error) = self.consumer.incremental_assign(list) {
            // The assignment was taken away meanwhile; a revocation follows.
            tracing::debug!(%error, topic = %self.topic, "assigning");
        }
    }

    pub(super) fn unassign(&self, list: &TopicPartitionList) {
        if let Err(error) = self.consumer.incremental_unassign(list) {
            tracing::debug!(%error, topic = %self.topic, "giving partitions back");
        }
    }
}
