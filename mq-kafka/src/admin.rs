//! Looking and tidying. Offsets, watermarks and group descriptions come from the brokers; what is in hand only the member
//! itself knows, so counts of other processes' hands are bounds, never guesses.

use crate::backlog::{backlog, standing};
use crate::client::Ctx;
use crate::commit::{Mark, commit_within};
use crate::delay::{RetryTopics, retry_group};
use crate::ffi::Entry;
use crate::group::{self, group_id};
use crate::letters::Store;
use crate::record::Record;
use crate::topology::{Cluster, REQUEST, Wanted, options, patient};
use crate::{fault, start};
use mq_api::{
    Admin, Backlog, DeadLetter, Error, ErrorKind, Group, GroupInfo, PendingDelivery, Provisioning, RedriveOptions,
    RedriveReport, Result, Start, Topic, TopicInfo, TopicSpec, async_trait,
};
use mq_core::redrive::{self, DeadLetterStore};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode as Code;
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct KafkaAdmin {
    cluster: Arc<Cluster>,
}

impl KafkaAdmin {
    pub(crate) fn new(cluster: Arc<Cluster>) -> Self {
        Self { cluster }
    }

    /// Fails when there is neither such a group nor a topic of its dead letters.
    async fn letters(&self, topic: &Topic, group: &Group) -> Result<Store> {
        check(topic, Some(group))?;
        let (of, group_of) = (topic.clone(), group.clone());
        let look = move |c: &Cluster| match c.partitions(Topic::dead_letters(&of, &group_of).as_str())? {
            Some(_) => Ok(()),
            None => backlog(c, &of, &group_of).map(drop),
        };
        self.cluster.blocking(look).await?;
        Ok(Store::new(self.cluster.clone(), topic, group))
    }
}

pub(crate) fn watermarks(consumer: &BaseConsumer<Ctx>, topic: &str, partition: i32) -> Result<(u64, u64)> {
    patient(|| start::ends(consumer, topic, partition, REQUEST, format_args!("looking up the ends of '{topic}'")))
}

pub(crate) fn no_group(topic: &Topic, group: &Group) -> Error {
    Error::new(ErrorKind::NotFound, format!("topic '{topic}' has no group '{group}'"))
}

pub(crate) fn no_topic(topic: &Topic) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no topic '{topic}'"))
}

/// Names of a group's members. Blocks.
pub(crate) fn members(cluster: &Cluster, id: &str) -> Result<Vec<String>> {
    let looker = cluster.looker()?;
    let found = cluster.answered(&looker, looker.fetch_group_list(Some(id), REQUEST));
    let found = match found {
        Ok(found) => found,
        Err(error) if error.rdkafka_error_code() == Some(Code::GroupIdNotFound) => return Ok(Vec::new()),
        Err(error) => return Err(fault::error(format_args!("looking up group '{id}'"), error)),
    };
    let members = found.groups().iter().filter(|g| g.name() == id).flat_map(|g| g.members());
    Ok(members.map(|m| m.client_id().to_owned()).collect())
}

/// The groups that have begun in a topic, by their names here. Blocks.
fn groups_of(cluster: &Cluster, topic: &Topic) -> Result<Vec<Group>> {
    let looker = cluster.looker()?;
    let all = cluster.answered(&looker, looker.fetch_group_list(None, REQUEST));
    let all = all.map_err(|e| fault::error("listing groups", e))?;
    let prefix = format!("{topic}..");
    let mut out = Vec::new();
    for found in all.groups() {
        let name = match topic.is_native() {
            true => Some(found.name()),
            false => found.name().strip_prefix(&prefix).filter(|name| !name.contains("..")),
        };
        let Some(name) = name.filter(|n| !n.is_empty()) else { continue };
        let group = Group::new(name);
        if !found.members().is_empty() || standing(cluster, topic.as_str(), found.name())?.begun {
            out.push(group);
        }
    }
    Ok(out)
}

fn delete_group(cluster: &Cluster, topic: &Topic, group: &Group) -> Result<bool> {
    let admin = cluster.admin()?;
    let ids = [group_id(topic, group), retry_group(topic, group)];
    let mut there = false;
    for (i, id) in ids.iter().enumerate() {
        let doing = || format!("deleting group '{group}' of '{topic}'");
        let told = cluster.wait(admin.delete_groups(&[id], &options())).map_err(|e| fault::error(doing(), e))?;
        match told.into_iter().next() {
            Some(Ok(_)) => there |= i == 0,
            Some(Err((_, Code::GroupIdNotFound))) | None => {}
            Some(Err((_, Code::NonEmptyGroup))) => {
                let text = format!("group '{group}' of '{topic}' has members; close them first");
                return Err(Error::new(ErrorKind::Topology, text));
            }
            Some(Err((_, code))) => return Err(fault::coded(doing(), code)),
        }
    }
    delete_topics(cluster, RetryTopics::new(topic, group).all())?;
    Ok(there)
}

/// Deletes those that are there; says whether any was. Blocks until they are gone.
fn delete_topics(cluster: &Cluster, names: &[String]) -> Result<bool> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let admin = cluster.admin()?;
    let told = cluster.wait(admin.delete_topics(&names, &options()));
    let mut there = false;
    for result in told.map_err(|e| fault::error("deleting topics", e))? {
        match result {
            Ok(_) => there = true,
            Err((_, Code::UnknownTopicOrPartition)) => {}
            Err((name, code)) => return Err(fault::coded(format_args!("deleting topic '{name}'"), code)),
        }
    }
    let until = std::time::Instant::now() + REQUEST;
    while there && std::time::Instant::now() < until {
        let mut left = false;
        for name in &names {
            left |= cluster.partitions(name)?.is_some();
        }
        if !left {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(there)
}

fn reset(cluster: &Cluster, topic: &Topic, group: &Group, to: Start) -> Result<()> {
    let id = group_id(topic, group);
    if !members(cluster, &id)?.is_empty() {
        let text = format!("group '{group}' of '{topic}' has members; close them before it is moved");
        return Err(Error::new(ErrorKind::Topology, text));
    }
    let partitions = cluster.partitions(topic.as_str())?.ok_or_else(|| no_topic(topic))?;
    let visitor = group::visitor(cluster, &id, &[])?;
    if start::committed(&visitor, topic.as_str(), partitions)?.iter().all(|e| e.offset < 0) {
        return Err(no_group(topic, group));
    }
    let offsets = patient(|| start::resolve(&visitor, topic.as_str(), partitions, to))?;
    let marks = offsets.into_iter().zip(0i32..).map(|(offset, partition)| Mark {
        topic: topic.shared_name(),
        partition,
        offset,
        metadata: String::new(),
    });
    commit(&visitor, &marks.collect::<Vec<_>>())
}

/// Commits as a visitor: accepted while the group has no members. Blocks.
pub(crate) fn commit(visitor: &BaseConsumer<Ctx>, marks: &[Mark]) -> Result<()> {
    patient(|| commit_within(visitor, marks, REQUEST).map_err(|code| fault::coded("moving a group", code)))
}

/// The record of a committed entry.
pub(crate) fn known(entry: &Entry) -> (u64, Record) {
    let base = u64::try_from(entry.offset).unwrap_or_default();
    (base, Record::decode(base, &entry.metadata).unwrap_or_default())
}

fn pending(cluster: &Cluster, topic: &Topic, group: &Group, limit: usize) -> Vec<PendingDelivery> {
    let mut out = Vec::new();
    let now = cluster.env.now();
    for watched in cluster.watched(topic, group) {
        watched.lane.visit(|slot| {
            if slot.in_hand {
                let partition = watched.lane.source().partition;
                let position = mq_api::Position::offset(slot.token.0);
                let owner = Some(watched.member.to_string());
                let idle = slot.since.map(|since| now - since).unwrap_or_default();
                out.push(PendingDelivery::new(partition, position, owner, idle, slot.attempt));
            }
        });
    }
    // Oldest first.
    out.sort_by_key(|p| (std::cmp::Reverse(p.idle), p.partition, p.position));
    out.truncate(limit);
    out
}

#[async_trait]
impl Admin for KafkaAdmin {
    async fn backlog(&self, topic: &Topic, group: &Group) -> Result<Backlog> {
        check(topic, Some(group))?;
        let (topic, group) = (topic.clone(), group.clone());
        self.cluster.blocking(move |c| backlog(c, &topic, &group)).await
    }

    async fn create_topic(&self, spec: TopicSpec) -> Result<()> {
        check(&spec.topic, None)?;
        if spec.partitions == Some(0) {
            return Err(Error::new(ErrorKind::Config, format!("topic '{}' cannot have 0 partitions", spec.topic)));
        }
        self.cluster
            .blocking(move |c| {
                let topic = spec.topic.as_str();
                let wanted = Wanted::topic(&c.settings, topic, spec.partitions, spec.retention, 1_000_000)?;
                c.provision(&[wanted], Provisioning::Create)?;
                spec.groups.iter().try_for_each(|g| {
                    g.validate()?;
                    group::begin(c, topic, &group_id(&spec.topic, g), Start::Oldest, Provisioning::Create, &[])
                })
            })
            .await
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        check(topic, None)?;
        let topic = topic.clone();
        self.cluster
            .blocking(move |c| {
                let Some(partitions) = c.partitions(topic.as_str())? else { return Ok(None) };
                let looker = c.looker()?;
                let mut messages = 0;
                for partition in 0..partitions {
                    let (low, high) = watermarks(&looker, topic.as_str(), partition as i32)?;
                    messages += high - low;
                }
                Ok(Some(TopicInfo::new(topic, partitions, Some(messages))))
            })
            .await
    }

    async fn delete_topic(&self, topic: &Topic) -> Result<bool> {
        check(topic, None)?;
        let topic = topic.clone();
        self.cluster
            .blocking(move |c| {
                if c.partitions(topic.as_str())?.is_none() {
                    return Ok(false);
                }
                let groups = groups_of(c, &topic)?;
                let there = delete_topics(c, &[topic.as_str().to_owned()])?;
                for group in groups {
                    // One with members loses its offsets with the topic.
                    if let Err(error) = delete_group(c, &topic, &group) {
                        tracing::debug!(%error, "a group of a deleted topic");
                    }
                }
                Ok(there)
            })
            .await
    }

    async fn create_group(&self, topic: &Topic, group: &Group, start: Start) -> Result<()> {
        check(topic, Some(group))?;
        let (topic, id) = (topic.clone(), group_id(topic, group));
        self.cluster.blocking(move |c| group::begin(c, topic.as_str(), &id, start, Provisioning::Create, &[])).await
    }

    async fn delete_group(&self, topic: &Topic, group: &Group) -> Result<bool> {
        check(topic, Some(group))?;
        let (topic, group) = (topic.clone(), group.clone());
        self.cluster.blocking(move |c| delete_group(c, &topic, &group)).await
    }

    async fn reset_group(&self, topic: &Topic, group: &Group, to: Start) -> Result<()> {
        check(topic, Some(group))?;
        let (topic, group) = (topic.clone(), group.clone());
        self.cluster.blocking(move |c| reset(c, &topic, &group, to)).await
    }

    async fn groups(&self, topic: &Topic) -> Result<Vec<GroupInfo>> {
        check(topic, None)?;
        let topic = topic.clone();
        self.cluster
            .blocking(move |c| {
                let mut out = Vec::new();
                for group in groups_of(c, &topic)? {
                    let members = members(c, &group_id(&topic, &group))?;
                    let backlog = backlog(c, &topic, &group)?;
                    out.push(GroupInfo::new(group, members, backlog, None));
                }
                Ok(out)
            })
            .await
    }

    async fn pending(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<PendingDelivery>> {
        check(topic, Some(group))?;
        Ok(pending(&self.cluster, topic, group, limit))
    }

    async fn dead_letters(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<DeadLetter>> {
        self.letters(topic, group).await?.page(None, limit).await
    }

    async fn redrive(&self, topic: &Topic, group: &Group, options: RedriveOptions) -> Result<RedriveReport> {
        let store = self.letters(topic, group).await?;
        redrive::redrive(&store, topic, group, &options).await
    }

    async fn discard_dead_letters(&self, topic: &Topic, group: &Group, filter: RedriveOptions) -> Result<u64> {
        let store = self.letters(topic, group).await?;
        redrive::discard(&store, &filter).await
    }
}

fn check(topic: &Topic, group: Option<&Group>) -> Result<()> {
    topic.validate()?;
    group.map_or(Ok(()), Group::validate)
}
