//! A topic: its partitions, its groups, who holds which partition.

use crate::core::Core;
use crate::group::Group;
use crate::lines::Lines;
use crate::partition::{Keep, Part, SharedPart, Trimmed};
use crate::pending::{BLOCKED, GroupPart};
use crate::trace::{Place, What};
use mq_api::{
    Error, ErrorKind, Event, Gap, GapCause, Message, MessageId, Outcome, Position, ReplayFrom, Result, Start,
    Topic as Name,
};
use mq_core::key_hash;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(crate) struct Topic {
    pub(crate) name: Name,
    pub(crate) parts: Box<[SharedPart]>,
    pub(crate) groups: Mutex<Vec<Arc<Group>>>,
    pub(crate) keep: Keep,
    /// Whether a partition belongs to one member of a group at a time.
    pub(crate) exclusive: bool,
    pub(crate) deleted: AtomicBool,
    /// Dead letters cannot be written here (a fault).
    pub(crate) refuse: AtomicBool,
    round_robin: AtomicU64,
    /// Held while a group is made, so that of two that make the same one, one does.
    making: Mutex<()>,
}

impl Topic {
    pub(crate) fn new(name: Name, partitions: u32, keep: Keep, exclusive: bool, first: u64) -> Arc<Self> {
        let parts = (0..partitions).map(|_| SharedPart::default()).collect();
        Arc::new(Self {
            name,
            parts,
            groups: Mutex::default(),
            keep,
            exclusive,
            deleted: AtomicBool::new(false),
            refuse: AtomicBool::new(false),
            round_robin: AtomicU64::new(first),
            making: Mutex::default(),
        })
    }

    /// The partition of a message, and its number.
    #[inline(always)]
    pub(crate) fn pick(&self, message: &Message) -> (usize, &SharedPart) {
        if let [only] = &*self.parts {
            return (0, only);
        }
        let number = self.pick_of_many(message.key.as_deref());
        (number, &self.parts[number])
    }

    #[inline(never)]
    fn pick_of_many(&self, key: Option<&[u8]>) -> usize {
        let n = match key {
            Some(key) => key_hash(key),
            None => self.round_robin.fetch_add(1, Ordering::Relaxed),
        };
        (n % self.parts.len() as u64) as usize
    }

    /// After an append to a log: drops its oldest and reports what groups lost.
    #[inline]
    pub(crate) fn after_append(&self, core: &Core, part: &mut Part, number: usize) {
        if part.is_over(&self.keep) {
            self.expire(core, part, number);
        }
    }

    #[cold]
    pub(crate) fn expire(&self, core: &Core, part: &mut Part, number: usize) {
        let mut lost = Vec::new();
        part.expire(&self.keep, core.env.wall(), &mut lost);
        if lost.is_empty() {
            return;
        }
        // Groups are locked after partitions nowhere else; take a copy so that the order stays.
        let groups = self.groups.lock().clone();
        for lost in lost {
            if let Some(group) = groups.get(lost.group) {
                self.report(core, group, number, lost, GapCause::Retention);
            }
        }
    }

    /// Tells the members of a group, and the timeline, of what it lost.
    pub(crate) fn report(&self, core: &Core, group: &Group, number: usize, lost: Trimmed, cause: GapCause) {
        let Trimmed { from, to, count, .. } = lost;
        if let Some(trace) = &core.trace {
            let (topic, partition) = (&self.name, number as u32);
            let id = if count == 1 { trace.id_of(topic, partition, from) } else { MessageId::NIL };
            let place = Place { topic, group: Some(&group.name), partition, position: from, member: None };
            trace.push(What::Trimmed, place, &id);
        }
        let gap = Gap {
            topic: self.name.clone(),
            partition: Some(number as u32),
            from: Some(Position::offset(from)),
            to: Some(Position::offset(to)),
            count: Some(count),
            cause,
        };
        group.each_member(|member| member.events.push(Event::Gap(gap.clone())));
    }

    /// Where a start position is in one partition.
    fn start_in(part: &Part, start: Start) -> u64 {
        let (head, tail) = (part.log.head(), part.log.tail());
        match start {
            Start::Oldest | Start::Replay(ReplayFrom::Earliest) => head,
            Start::Latest => tail,
            Start::Replay(ReplayFrom::Time(time)) => part.position_at(time),
            Start::Replay(ReplayFrom::Position(position)) => position.major.clamp(head, tail),
        }
    }

    /// The group, made if it is new. `start` applies at creation only.
    pub(crate) fn group(self: &Arc<Self>, name: &mq_api::Group, start: Start, per_key: bool) -> Arc<Group> {
        self.make_group(name, per_key, |_, part| (Self::start_in(part, start), 0)).0
    }

    /// The group, and whether this call made it. `start` says for a partition where the group starts, and how many messages
    /// before that are lost to it. It can be found only when it stands in every partition; what was redriven to a deleted group
    /// of its name is meant for it.
    pub(crate) fn make_group(
        self: &Arc<Self>,
        name: &mq_api::Group,
        per_key: bool,
        start: impl Fn(usize, &Part) -> (u64, u64),
    ) -> (Arc<Group>, bool) {
        let _one_at_a_time = self.making.lock();
        let groups = self.groups.lock().clone();
        if let Some(found) = groups.iter().find(|g| g.name == *name && !g.is_deleted()) {
            return (found.clone(), false);
        }
        let before: Vec<u32> = groups.iter().filter(|g| g.name == *name).map(|g| g.number as u32 + 1).collect();
        let group = Arc::new(Group::new(name.clone(), groups.len(), self, per_key));
        for (number, part) in self.parts.iter().enumerate() {
            let mut part = part.lock();
            if !before.is_empty() {
                part.redirect(&before, group.number as u32 + 1);
            }
            let (at, lost) = start(number, &part);
            group.lose(lost);
            part.groups.push(GroupPart::starting_at(at, per_key));
        }
        self.groups.lock().push(group.clone());
        (group, true)
    }

    /// The group, with order per key or without: a group without members takes the order of the one that comes.
    pub(crate) fn group_with_order(self: &Arc<Self>, name: &mq_api::Group, start: Start, per_key: bool) -> Arc<Group> {
        let group = self.group(name, start, per_key);
        if group.per_key() != per_key {
            group.set_per_key(per_key);
            for part in &self.parts {
                let mut part = part.lock();
                match per_key {
                    true => Self::get_in_line(&group, &mut part),
                    false => Self::leave_lines(&group, &mut part),
                }
            }
        }
        group
    }

    /// What a group took before it asked for order per key gets in line, as it stands in the log.
    fn get_in_line(group: &Group, part: &mut Part) {
        let Some(slot) = part.groups.get_mut(group.number) else { return };
        let mut lines = Lines::default();
        let open: Vec<u64> = slot.entries.iter().filter(|(_, e)| !e.is_settled()).map(|(p, _)| p).collect();
        for position in open {
            let stored = part.log.get(position).and_then(|c| c.stored.as_ref());
            let Some(key) = stored.and_then(|s| s.message.key.as_deref()).map(key_hash) else { continue };
            if !lines.arrive(key, position)
                && let Some(entry) = slot.entries.get_mut(position)
                && entry.is_ready()
            {
                let attempt = entry.attempt();
                entry.set(attempt, BLOCKED);
                slot.again.remove(&position);
                slot.suspects.remove(&position);
            }
        }
        slot.gate = Some(lines);
    }

    /// Nothing waits for another of its key any more.
    fn leave_lines(group: &Group, part: &mut Part) {
        let Some(slot) = part.groups.get_mut(group.number) else { return };
        slot.gate = None;
        let blocked: Vec<u64> = slot.entries.iter().filter(|(_, e)| e.is(BLOCKED)).map(|(p, _)| p).collect();
        for position in blocked {
            slot.let_out(position);
        }
    }

    pub(crate) fn find_group(&self, name: &mq_api::Group) -> Option<Arc<Group>> {
        self.groups.lock().iter().find(|g| g.name == *name && !g.is_deleted()).cloned()
    }

    pub(crate) fn live_groups(&self) -> Vec<Arc<Group>> {
        self.groups.lock().iter().filter(|g| !g.is_deleted()).cloned().collect()
    }

    /// Whether anybody would get a message of this partition.
    pub(crate) fn has_takers_in(&self, part: &Part) -> bool {
        !part.broadcast.is_empty() || part.groups.iter().any(|g| !g.deleted)
    }

    /// Moves every partition of a group.
    pub(crate) fn reset(&self, group: &Group, start: Start) {
        for part in &self.parts {
            let mut part = part.lock();
            let at = Self::start_in(&part, start);
            if let Some(slot) = part.groups.get_mut(group.number) {
                let (gate, epoch, owner) = (slot.gate.is_some(), slot.epoch, slot.owner);
                *slot = GroupPart::starting_at(at, gate);
                (slot.epoch, slot.owner) = (epoch, owner);
            }
        }
    }

    #[cold]
    pub(crate) fn full(&self) -> Error {
        let text = format!(
            "topic '{}' is full ({} messages or {} bytes wait unhandled); let its groups catch up, delete idle groups, or raise the bound",
            self.name, self.keep.capacity, self.keep.bytes
        );
        Error::new(ErrorKind::Full, text).with_outcome(Outcome::Rejected)
    }

    #[cold]
    pub(crate) fn unroutable(&self) -> Error {
        let text = format!(
            "no queue took the message: topic '{}' has no group; make one, or list it in the producer",
            self.name
        );
        Error::new(ErrorKind::Unroutable, text).with_outcome(Outcome::Rejected)
    }

    pub(crate) fn same_partitions(&self, asked: Option<u32>) -> Result<()> {
        match asked {
            Some(n) if n as usize != self.parts.len() => Err(Error::new(
                ErrorKind::Topology,
                format!(
                    "topic '{}' has {} partitions, {n} were asked for; the count is fixed when a topic is made, since changing it would break the order of keys",
                    self.name,
                    self.parts.len()
                ),
            )),
            _ => Ok(()),
        }
    }
}
