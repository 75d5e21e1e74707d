//! A group: its members, and which of them holds which partition.

use crate::member::Member;
use crate::partition::Part;
use crate::pending::GroupPart;
use crate::topic::Topic;
use mq_api::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;

pub(crate) struct Group {
    pub(crate) name: mq_api::Group,
    /// Index in every partition's list.
    pub(crate) number: usize,
    topic: Weak<Topic>,
    per_key: AtomicBool,
    members: Mutex<BTreeMap<u32, Weak<Member>>>,
    /// Changes with every change of ownership: members then look again.
    version: AtomicU64,
    deleted: AtomicBool,
    /// After a deletion: what each partition held for it then.
    left: Mutex<Vec<Left>>,
    /// Messages that were gone when it was made in place of a deleted one that had not handled them.
    lost: AtomicU64,
    /// When the last member left, or it was made.
    deserted: Mutex<Instant>,
}

/// What a deleted group had not handled in one partition.
#[derive(Debug, Clone)]
pub(crate) struct Left {
    /// The lowest unsettled position, where members make it again.
    head: u64,
    /// What beyond that was settled, or was not meant for it.
    not: Vec<u64>,
}

impl Left {
    fn of(part: &Part, slot: &GroupPart, only: u32) -> Self {
        let settled = slot.entries.iter().filter(|(_, e)| e.is_settled()).map(|(position, _)| position);
        let others = (slot.entries.tail()..part.log.tail()).filter(|p| {
            part.log.get(*p).is_none_or(|cell| cell.stored.is_none() || cell.only != 0 && cell.only != only)
        });
        Self { head: slot.entries.head(), not: settled.chain(others).collect() }
    }

    /// Where it goes on in a log that begins at `first`.
    pub(crate) fn resume(&self, first: u64) -> u64 {
        self.head.max(first)
    }

    /// How many messages it had not handled that are gone from a log that begins at `first`.
    pub(crate) fn lost(&self, first: u64) -> u64 {
        let not = self.not.iter().filter(|position| **position < first).count() as u64;
        first.saturating_sub(self.head).saturating_sub(not)
    }
}

impl Group {
    pub(crate) fn new(name: mq_api::Group, number: usize, topic: &Arc<Topic>, per_key: bool) -> Self {
        Self {
            name,
            number,
            topic: Arc::downgrade(topic),
            per_key: AtomicBool::new(per_key),
            members: Mutex::default(),
            version: AtomicU64::new(1),
            deleted: AtomicBool::new(false),
            left: Mutex::default(),
            lost: AtomicU64::new(0),
            deserted: Mutex::new(Instant::now()),
        }
    }

    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn per_key(&self) -> bool {
        self.per_key.load(Ordering::Acquire)
    }

    /// Members of a group have one order.
    pub(crate) fn refuse_other_order(&self, per_key: bool, topic: &mq_api::Topic) -> Result<()> {
        if self.per_key() == per_key || self.member_count() == 0 {
            return Ok(());
        }
        let text = format!(
            "members of group '{}' of topic '{topic}' must ask for the same order; those that run have {}",
            self.name,
            if self.per_key() { "PerKey" } else { "None" }
        );
        Err(Error::new(ErrorKind::Topology, text))
    }

    pub(crate) fn set_per_key(&self, per_key: bool) {
        self.per_key.store(per_key, Ordering::Release);
    }

    pub(crate) fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::Acquire)
    }

    pub(crate) fn each_member(&self, mut f: impl FnMut(&Arc<Member>)) {
        let members: Vec<_> = self.members.lock().values().filter_map(Weak::upgrade).collect();
        members.iter().for_each(&mut f);
    }

    pub(crate) fn member_count(&self) -> usize {
        self.members.lock().len()
    }

    /// How long nobody was there to fetch. Of one with members that is not known: they fetch when the program asks.
    pub(crate) fn idle(&self) -> Option<Duration> {
        let deserted = self.members.lock().is_empty();
        deserted.then(|| self.deserted.lock().elapsed())
    }

    /// A member comes, and has its share of the partitions. Never called with a partition locked, as [`leave`](Self::leave).
    pub(crate) fn join(&self, member: &Arc<Member>) {
        self.members.lock().insert(member.id, Arc::downgrade(member));
        self.rebalance();
        self.assign_free();
    }

    /// A member goes, and others have its partitions.
    pub(crate) fn leave(&self, member: u32) {
        let (left, deserted) = {
            let mut members = self.members.lock();
            (members.remove(&member).is_some(), members.is_empty())
        };
        if left && deserted {
            *self.deserted.lock() = Instant::now();
        }
        if left {
            self.rebalance();
        }
        // Keys are parked until the member that parked them restarts.
        for part in self.topic.upgrade().iter().flat_map(|topic| &topic.parts) {
            if let Some(slot) = part.lock().groups.get_mut(self.number) {
                slot.parked_keys.retain(|_, by| *by != member);
            }
        }
        self.assign_free();
    }

    /// The group is gone: its members' handles turn stale, and they make it again when they fetch.
    pub(crate) fn delete(&self) {
        self.deleted.store(true, Ordering::Release);
        let Some(topic) = self.topic.upgrade() else { return };
        // What is in hand is settled as stale later, which gives nothing back.
        let mut held: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for part in &topic.parts {
            let mut guard = part.lock();
            let part = &mut *guard;
            if let Some(slot) = part.groups.get(self.number) {
                self.left.lock().push(Left::of(part, slot, self.number as u32 + 1));
            }
            if let Some(group) = part.groups.get_mut(self.number) {
                for (_, entry) in group.entries.iter().filter(|(_, e)| e.is(crate::pending::HELD)) {
                    let (n, bytes) = held.entry(entry.owner).or_default();
                    (*n, *bytes) = (*n + 1, *bytes + entry.size as usize);
                }
                group.deleted = true;
                group.entries.clear();
                group.again.clear();
                group.suspects.clear();
                group.delayed.clear();
                group.history.clear();
                group.gate = None;
                let lost = std::mem::take(&mut group.lost);
                lost.into_iter().for_each(|(_, _, waker)| waker.wake());
            }
            part.trim(&topic.keep, u64::MAX);
        }
        self.each_member(|member| {
            member.forget_suspect();
            if let Some((n, bytes)) = held.remove(&member.id) {
                member.flow.give(n, bytes);
            }
        });
        self.changed();
    }

    /// What a deleted one had not handled, for each partition.
    pub(crate) fn left(&self) -> Vec<Left> {
        self.left.lock().clone()
    }

    /// See [`lost`](Self::lost).
    pub(crate) fn lose(&self, n: u64) {
        self.lost.fetch_add(n, Ordering::Relaxed);
    }

    /// How many messages were lost when it was made in place of a deleted one.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.each_member(|member| member.wake());
    }

    /// Spreads the partitions: each member holds p/n, rounded; owners keep what they may keep. A partition moves when all that
    /// its owner took from it was settled.
    pub(crate) fn rebalance(&self) {
        let Some(topic) = self.topic.upgrade() else { return };
        if topic.exclusive {
            let members: Vec<u32> = self.members.lock().keys().copied().collect();
            let mut load: BTreeMap<u32, usize> = members.iter().map(|m| (*m, 0)).collect();
            let fair = topic.parts.len().checked_div(members.len()).unwrap_or(0);
            let mut spare = if members.is_empty() { 0 } else { topic.parts.len() % members.len() };
            for part in &topic.parts {
                let mut part = part.lock();
                let Some(group) = part.groups.get_mut(self.number) else { continue };
                let Some(owner) = group.owner else { continue };
                match load.get_mut(&owner) {
                    Some(n) if *n < fair || (*n == fair && spare > 0) => {
                        spare -= usize::from(*n == fair);
                        *n += 1;
                        group.draining = false;
                    }
                    // One too many, or no member any more: it moves when nothing of it is in hand.
                    Some(_) => group.draining = true,
                    None => group.draining = true,
                }
            }
            for part in &topic.parts {
                self.move_if_free(&mut part.lock());
            }
        }
        self.changed();
    }

    /// Gives a partition that nobody uses any more to the member with the fewest. Called with the partition locked; the number
    /// of members is small, so counting is cheap enough.
    fn move_if_free(&self, part: &mut crate::partition::Part) -> bool {
        let Some(group) = part.groups.get_mut(self.number) else { return false };
        if let Some(owner) = group.owner {
            if !group.draining || group.holds(owner) {
                return false;
            }
            group.owner = None;
        }
        true
    }

    /// Hands out partitions without owner. Never called with a partition locked.
    pub(crate) fn assign_free(&self) -> bool {
        let Some(topic) = self.topic.upgrade() else { return false };
        let members: Vec<u32> = self.members.lock().keys().copied().collect();
        if members.is_empty() || !topic.exclusive {
            return false;
        }
        let mut load: BTreeMap<u32, usize> = members.iter().map(|m| (*m, 0)).collect();
        let mut free = Vec::new();
        for (number, part) in topic.parts.iter().enumerate() {
            let mut part = part.lock();
            self.move_if_free(&mut part);
            let Some(group) = part.groups.get_mut(self.number) else { continue };
            match group.owner {
                Some(owner) if !group.draining => {
                    load.entry(owner).and_modify(|n| *n += 1);
                }
                Some(_) => {}
                None => free.push(number),
            }
        }
        let any = !free.is_empty();
        for number in free {
            let Some((&member, _)) = load.iter().min_by_key(|(_, n)| **n) else { break };
            let mut part = topic.parts[number].lock();
            if let Some(group) = part.groups.get_mut(self.number)
                && group.owner.is_none()
            {
                group.owner = Some(member);
                group.draining = false;
                group.epoch += 1;
                load.entry(member).and_modify(|n| *n += 1);
            }
        }
        if any {
            self.changed();
        }
        any
    }

    /// Something was settled in a partition that is to move: maybe it can now.
    #[cold]
    pub(crate) fn drained_maybe(&self, part: &mut crate::partition::Part) -> bool {
        self.move_if_free(part)
    }
}
