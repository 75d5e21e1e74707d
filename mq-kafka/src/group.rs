//! Groups looked at and moved from outside: by a client with the group's name that never joins it.

use crate::client::{self, Ctx};
use crate::topology::Cluster;
use crate::{fault, start};
use mq_api::{Error, ErrorKind, Group, Provisioning, Result, Start, Topic};
use rdkafka::consumer::BaseConsumer;
use std::time::Duration;

/// A client that reads and writes the offsets of a group. Blocks when it is dropped.
pub(crate) fn visitor(cluster: &Cluster, group: &str, native: &[(String, String)]) -> Result<BaseConsumer<Ctx>> {
    let native: Vec<_> = native.iter().filter(|(name, _)| name.starts_with("socket.")).cloned().collect();
    let mut config = client::consumer(&cluster.settings, group, Duration::from_secs(45), false, &native);
    config.remove("group.instance.id");
    config.create_with_context(Ctx::default()).map_err(|e| fault::error("making a client for the group", e))
}

/// Makes a group: commits where it starts, unless it has begun.
pub(crate) fn begin(
    cluster: &Cluster,
    topic: &str,
    group: &str,
    start: Start,
    how: Provisioning,
    native: &[(String, String)],
) -> Result<()> {
    let partitions = existing(cluster, topic)?;
    start::begin(&visitor(cluster, group, native)?, topic, partitions, start, how, |_| None).map(drop)
}

/// The partitions of a topic that has to exist.
pub(crate) fn existing(cluster: &Cluster, topic: &str) -> Result<u32> {
    let missing = || {
        Error::new(
            ErrorKind::NotFound,
            format!("topic '{topic}' does not exist; make it first, or use Provisioning::Create"),
        )
    };
    cluster.partitions(topic)?.ok_or_else(missing)
}

/// The name that the brokers know a group of a topic by. A group belongs to its topic, so that members of another topic's
/// group of this name neither rebalance it nor are deleted with it. Foreign topics have foreign groups: as they are.
pub(crate) fn group_id(topic: &Topic, group: &Group) -> String {
    match topic.is_native() {
        true => group.as_str().to_owned(),
        false => format!("{topic}..{group}"),
    }
}
