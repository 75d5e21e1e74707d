//! Looking and tidying. Everything here is exact: the broker is in this process.

use crate::core::Core;
use crate::group::Group;
use crate::pending::{DELAYED, HELD};
use crate::topic::Topic;
use async_trait::async_trait;
use mq_api::{
    Admin, Backlog, Count, DeadLetter, Error, ErrorKind, Feature, Group as GroupName, GroupInfo, PendingDelivery,
    Position, Provisioning, RedriveOptions, RedriveReport, Result, Start, Topic as Name, TopicInfo, TopicSpec,
};
use mq_core::redrive::{self, DeadLetterStore};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(crate) struct MemoryAdmin {
    core: Arc<Core>,
}

impl MemoryAdmin {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    fn topic_of(&self, topic: &Name) -> Result<Arc<Topic>> {
        topic.validate()?;
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no topic '{topic}'"));
        self.core.find_topic(topic).ok_or_else(missing)
    }

    fn group_of(&self, topic: &Name, group: &GroupName) -> Result<(Arc<Topic>, Arc<Group>)> {
        let found = self.topic_of(topic)?;
        let missing = || Error::new(ErrorKind::NotFound, format!("topic '{topic}' has no group '{group}'"));
        let group = found.find_group(group).ok_or_else(missing)?;
        Ok((found, group))
    }

    fn require(&self, feature: Feature) -> Result<()> {
        self.core.capabilities.require(feature)
    }
}

/// What a group of a topic still has to do, counted.
pub(crate) fn count(core: &Core, topic: &Topic, group: &Group) -> (u64, u64, u64, u64) {
    let (mut ready, mut in_flight, mut delayed) = (0, 0, 0);
    for part in &topic.parts {
        let part = part.lock();
        let Some(slot) = part.groups.get(group.number) else { continue };
        for (_, entry) in slot.entries.iter().filter(|(_, e)| !e.is_settled()) {
            match () {
                () if entry.state & HELD != 0 => in_flight += 1,
                () if entry.state & DELAYED != 0 => delayed += 1,
                () => ready += 1,
            }
        }
        // Never taken: those of the log beyond the tail that are meant for this group.
        let only = group.number as u32 + 1;
        let new = (slot.entries.tail()..part.log.tail()).filter(|p| {
            part.log.get(*p).is_some_and(|cell| cell.stored.is_some() && (cell.only == 0 || cell.only == only))
        });
        ready += new.count() as u64;
    }
    let letters = core.find_topic(&Name::dead_letters(&topic.name, &group.name));
    let dead = letters.map_or(0, |t| t.parts.iter().map(|p| p.lock().count()).sum());
    (ready, in_flight, delayed, dead)
}

fn backlog(core: &Core, topic: &Topic, group: &Group) -> Backlog {
    let (ready, in_flight, delayed, dead) = count(core, topic, group);
    let exact = Count::Exact;
    Backlog { ready: exact(ready), in_flight: exact(in_flight), delayed: exact(delayed), dead: exact(dead) }
}

#[async_trait]
impl Admin for MemoryAdmin {
    async fn backlog(&self, topic: &Name, group: &GroupName) -> Result<Backlog> {
        self.require(Feature::Backlog)?;
        let (topic, group) = self.group_of(topic, group)?;
        Ok(backlog(&self.core, &topic, &group))
    }

    async fn create_topic(&self, spec: TopicSpec) -> Result<()> {
        self.require(Feature::Provision)?;
        spec.topic.validate()?;
        if spec.partitions.is_some_and(|n| n > 1) {
            self.require(Feature::Partitions)?;
        }
        if spec.partitions == Some(0) {
            return Err(Error::new(ErrorKind::Config, format!("topic '{}' cannot have 0 partitions", spec.topic)));
        }
        let most = self.core.capabilities.max_partitions;
        if let Some(n) = spec.partitions.filter(|n| *n > most) {
            let why =
                format_args!("topic '{}' with {n} partitions: at most {most} are supported", spec.topic).to_string();
            return Err(Error::unsupported(&self.core.capabilities.backend, Feature::Partitions, why));
        }
        let topic = self.core.topic(&spec.topic, spec.partitions, spec.retention, Provisioning::Create)?;
        for group in &spec.groups {
            group.validate()?;
            topic.group(group, Start::Oldest, false);
        }
        Ok(())
    }

    async fn topic(&self, topic: &Name) -> Result<Option<TopicInfo>> {
        topic.validate()?;
        Ok(self.core.find_topic(topic).map(|found| {
            let messages = found.parts.iter().map(|p| p.lock().count()).sum();
            TopicInfo::new(topic.clone(), found.parts.len() as u32, Some(messages))
        }))
    }

    async fn delete_topic(&self, topic: &Name) -> Result<bool> {
        self.require(Feature::Provision)?;
        topic.validate()?;
        let Some(found) = self.core.topics.lock().remove(topic.as_str()) else { return Ok(false) };
        found.deleted.store(true, Ordering::Release);
        found.live_groups().iter().for_each(|group| group.delete());
        self.core.live_members().iter().for_each(|member| member.wake());
        self.core.work_changed();
        Ok(true)
    }

    async fn create_group(&self, topic: &Name, group: &GroupName, start: Start) -> Result<()> {
        self.require(Feature::Provision)?;
        group.validate()?;
        if let Start::Replay(_) = start {
            self.require(Feature::Replay)?;
        }
        self.topic_of(topic)?.group(group, start, false);
        Ok(())
    }

    async fn delete_group(&self, topic: &Name, group: &GroupName) -> Result<bool> {
        self.require(Feature::Provision)?;
        match self.topic_of(topic)?.find_group(group) {
            Some(found) => {
                found.delete();
                self.core.work_changed();
                Ok(true)
            }
            None => Ok(false),
        }
    }

    async fn reset_group(&self, topic: &Name, group: &GroupName, to: Start) -> Result<()> {
        self.require(Feature::Reset)?;
        if let Start::Replay(_) = to {
            self.require(Feature::Replay)?;
        }
        let (topic, group) = self.group_of(topic, group)?;
        if group.member_count() > 0 {
            let text = format!(
                "group '{}' of topic '{}' has {} members; close them before moving it",
                group.name,
                topic.name,
                group.member_count()
            );
            return Err(Error::new(ErrorKind::Rejected, text));
        }
        topic.reset(&group, to);
        self.core.work_changed();
        Ok(())
    }

    async fn groups(&self, topic: &Name) -> Result<Vec<GroupInfo>> {
        self.require(Feature::Inspect)?;
        let topic = self.topic_of(topic)?;
        let info = |group: &Arc<Group>| {
            let mut members = Vec::new();
            group.each_member(|m| members.push(m.name.to_string()));
            GroupInfo::new(group.name.clone(), members, backlog(&self.core, &topic, group), group.idle())
        };
        Ok(topic.live_groups().iter().map(info).collect())
    }

    async fn pending(&self, topic: &Name, group: &GroupName, limit: usize) -> Result<Vec<PendingDelivery>> {
        self.require(Feature::Inspect)?;
        let (topic, group) = self.group_of(topic, group)?;
        self.core.env.notice_pause();
        let now = self.core.env.now();
        let mut members = std::collections::HashMap::new();
        group.each_member(|m| {
            members.insert(m.id, m.clone());
        });
        let mut all = Vec::new();
        for (number, part) in topic.parts.iter().enumerate() {
            let part = part.lock();
            let Some(slot) = part.groups.get(group.number) else { continue };
            for (position, entry) in slot.entries.iter().filter(|(_, e)| e.state & (HELD | DELAYED) != 0) {
                let member = if entry.is(HELD) { members.get(&entry.owner) } else { None };
                let owner = member.map(|m| m.name.to_string());
                let idle = match member {
                    Some(member) => member.clock.since(entry.at, now),
                    None => self.core.since_tenths(entry.at),
                };
                let position = Position::offset(position);
                all.push(PendingDelivery::new(Some(number as u32), position, owner, idle, entry.attempt()));
            }
        }
        all.sort_by_key(|p| (std::cmp::Reverse(p.idle), p.position, p.partition));
        all.truncate(limit);
        Ok(all)
    }

    async fn dead_letters(&self, topic: &Name, group: &GroupName, limit: usize) -> Result<Vec<DeadLetter>> {
        self.require(Feature::Peek)?;
        let store = Letters::of(&self.core, topic, group)?;
        store.page(None, limit).await
    }

    async fn redrive(&self, topic: &Name, group: &GroupName, options: RedriveOptions) -> Result<RedriveReport> {
        self.require(Feature::Redrive)?;
        if options.dry_run || options.filter.is_some() {
            self.require(Feature::Peek)?;
        }
        let store = Letters::of(&self.core, topic, group)?;
        redrive::redrive(&store, topic, group, &options).await
    }

    async fn discard_dead_letters(&self, topic: &Name, group: &GroupName, filter: RedriveOptions) -> Result<u64> {
        self.require(Feature::DeadLetters)?;
        redrive::discard(&Letters::of(&self.core, topic, group)?, &filter).await
    }
}

/// The dead letters of one group.
struct Letters {
    admin: MemoryAdmin,
    topic: Name,
    group: GroupName,
    letters: Option<Arc<Topic>>,
}

impl Letters {
    fn of(core: &Arc<Core>, topic: &Name, group: &GroupName) -> Result<Self> {
        let admin = MemoryAdmin::new(core.clone());
        let letters = core.find_topic(&Name::dead_letters(topic, group));
        if letters.is_none() {
            admin.group_of(topic, group)?;
        }
        Ok(Self { admin, topic: topic.clone(), group: group.clone(), letters })
    }

    /// Unless somebody deleted them meanwhile.
    fn there(&self) -> Option<&Arc<Topic>> {
        self.letters.as_ref().filter(|letters| !letters.deleted.load(Ordering::Acquire))
    }
}

impl DeadLetterStore for Letters {
    async fn page(&self, after: Option<Position>, n: usize) -> Result<Vec<DeadLetter>> {
        let Some(letters) = self.there() else { return Ok(Vec::new()) };
        let mut page = Vec::new();
        // One partition after the other; the second part of a position says which.
        let start = after.map_or(0, |p| p.minor as usize);
        for (number, part) in letters.parts.iter().enumerate().skip(start) {
            let part = part.lock();
            let first = after.filter(|p| p.minor as usize == number).map_or(0, |p| p.major + 1);
            let found = part.log.iter().filter(|(position, cell)| *position >= first && cell.stored.is_some());
            page.extend(found.take(n - page.len()).map(|(position, cell)| {
                let message = cell.stored.as_ref().map(|s| s.message.clone()).unwrap_or_default();
                DeadLetter::new(message, Some(Position { minor: number as u64, ..Position::offset(position) }))
            }));
            if page.len() == n {
                break;
            }
        }
        Ok(page)
    }

    async fn give_back(&self, letter: &DeadLetter) -> Result<()> {
        let message = redrive::back(letter);
        let size = message.size() as u32;
        // Looked up for each: somebody may delete them meanwhile, and what goes back to those that were would be lost.
        let (topic, group) = self.admin.group_of(&self.topic, &self.group)?;
        let (number, shared) = topic.pick(&message);
        let mut part = shared.lock();
        if topic.deleted.load(Ordering::Acquire) || group.is_deleted() {
            drop(part);
            let text = format!("group '{}' of topic '{}' was deleted while it had a letter", self.group, self.topic);
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        if !part.admits(size, &topic.keep) {
            drop(part);
            return Err(topic.full());
        }
        let spent = part.spent(&topic.keep);
        part.append(message, size, group.number as u32 + 1, spent);
        topic.after_append(&self.admin.core, &mut part, number);
        part.wake();
        Ok(())
    }

    async fn remove(&self, letter: &DeadLetter) -> Result<bool> {
        let (Some(letters), Some(position)) = (self.there(), letter.position) else { return Ok(false) };
        let Some(part) = letters.parts.get(position.minor as usize) else { return Ok(false) };
        let mut part = part.lock();
        let removed = part.remove(position.major);
        part.wake();
        drop(part);
        self.admin.core.work_changed();
        Ok(removed)
    }
}
