//! How much of a group is left to do. Messages move while they are counted: from the topic to the retry topics, among these, to
//! the dead letters and back. Each is written where it goes before it leaves where it was, so that one is overlooked only if
//! something was written in between; then it is counted again.

use crate::admin::{members, no_group, no_topic, watermarks};
use crate::client::Ctx;
use crate::delay::{RetryTopics, retry_group};
use crate::group::{self, group_id};
use crate::letters::Letters;
use crate::record::Record;
use crate::start;
use crate::topology::Cluster;
use mq_api::{Backlog, Count, ErrorKind, Group, Result, Topic};
use rdkafka::consumer::BaseConsumer;

/// How often it is counted until nothing moved meanwhile.
const TRIES: usize = 4;

/// What is known of a group in one topic.
#[derive(Default)]
pub(crate) struct Standing {
    /// Not settled, by the offsets: those in hand or delayed included.
    pub(crate) lag: u64,
    /// Whether the group has begun.
    pub(crate) begun: bool,
    /// The ends of all partitions: it rises with each message.
    ends: u64,
}

/// How far a group is in a topic. Blocks.
pub(crate) fn standing(cluster: &Cluster, topic: &str, id: &str) -> Result<Standing> {
    stands(cluster, &group::visitor(cluster, id, &[])?, topic)
}

fn stands(cluster: &Cluster, visitor: &BaseConsumer<Ctx>, topic: &str) -> Result<Standing> {
    let mut standing = Standing::default();
    let Some(partitions) = cluster.partitions(topic)? else { return Ok(standing) };
    for entry in start::committed(visitor, topic, partitions)? {
        let (low, high) = watermarks(visitor, topic, entry.partition)?;
        standing.ends += high;
        let Ok(offset) = u64::try_from(entry.offset) else {
            standing.lag += high - low;
            continue;
        };
        standing.begun = true;
        let base = offset.max(low);
        let known = Record::decode(offset, &entry.metadata).unwrap_or_default();
        let done: u64 = known.done.iter().map(|(first, end)| end.min(&high).saturating_sub(*first.max(&base))).sum();
        standing.lag += high.saturating_sub(base).saturating_sub(done);
    }
    Ok(standing)
}

/// Where messages of a group are beside its topic.
struct Places<'c> {
    cluster: &'c Cluster,
    retries: RetryTopics,
    visitor: BaseConsumer<Ctx>,
    letters: Option<Letters<'c>>,
}

impl Places<'_> {
    fn count(&self) -> Result<Aside> {
        let mut aside = Aside { delayed: 0, dead: 0, written: 0 };
        for name in self.retries.all() {
            let found = stands(self.cluster, &self.visitor, name)?;
            aside.delayed += found.lag;
            aside.written += found.ends;
        }
        if let Some(letters) = &self.letters {
            let (dead, ends) = letters.count()?;
            aside.dead = dead;
            aside.written += ends;
        }
        Ok(aside)
    }
}

/// What is there.
struct Aside {
    delayed: u64,
    dead: u64,
    /// How much was ever written there.
    written: u64,
}

impl Aside {
    /// How many messages may have been overlooked since `before`: those that came here, or were sent back from the dead letters.
    fn moved_since(&self, before: &Self) -> u64 {
        self.written.abs_diff(before.written) + before.dead.saturating_sub(self.dead)
    }
}

/// The backlog of a group. Blocks.
pub(crate) fn backlog(cluster: &Cluster, topic: &Topic, group: &Group) -> Result<Backlog> {
    if cluster.partitions(topic.as_str())?.is_none() {
        return Err(no_topic(topic));
    }
    let id = group_id(topic, group);
    let places = Places {
        cluster,
        retries: RetryTopics::new(topic, group),
        visitor: group::visitor(cluster, &retry_group(topic, group), &[])?,
        letters: Letters::open(cluster, topic, group)?,
    };
    let visitor = group::visitor(cluster, &id, &[])?;
    let mut before = places.count()?;
    let mut tries = 0;
    let (main, aside, moved) = loop {
        let main = stands(cluster, &visitor, topic.as_str())?;
        let aside = places.count()?;
        let moved = aside.moved_since(&before);
        tries += 1;
        if moved == 0 || tries == TRIES {
            break (main, aside, moved);
        }
        before = aside;
    };
    let idle = match members(cluster, &id) {
        Ok(members) => members.is_empty(),
        // There may be members: the counts are bounds all the same.
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Permission) => false,
        Err(error) => return Err(error),
    };
    if !main.begun && idle {
        return Err(no_group(topic, group));
    }
    // Offsets count markers and compacted messages too, so these are bounds.
    let at_most = |n: u64| if n == 0 { Count::Exact(0) } else { Count::AtMost(n) };
    let (all, delayed) = (main.lag + aside.delayed + moved, aside.delayed + moved);
    Ok(Backlog {
        ready: at_most(all),
        in_flight: at_most(if idle { 0 } else { all }),
        delayed: at_most(if idle { delayed } else { all }),
        dead: Count::Exact(aside.dead),
    })
}
