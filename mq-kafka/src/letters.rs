//! The dead letters of a group, looked at, sent back and discarded. A log cannot lose a message from its middle: what was
//! removed is kept in the commit of a group of our own on the dead-letter topic, and the removed head is deleted for good.

use crate::admin::{commit, known, watermarks};
use crate::block::Block;
use crate::client::{self, Ctx};
use crate::commit::Mark;
use crate::delay::{ATTEMPT, ONLY, RetryTopics, STAMP, Special};
use crate::ffi::Raw;
use crate::group;
use crate::record::{Record, SPAN};
use crate::topology::{Cluster, LARGEST, REQUEST, options};
use crate::{fault, start, wire};
use mq_api::{DeadLetter, Error, ErrorKind, Group, Position, Provisioning, Result, Topic};
use mq_core::redrive::{self, DeadLetterStore};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::util::Timeout;
use rdkafka::{Offset, TopicPartitionList};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Partitions of a dead-letter topic that another program made: positions count through them.
const STRIDE: u64 = 1 << 48;

fn removed_group(name: &str) -> String {
    format!("{name}..removed")
}

/// Stretches of letters of a partition that were redriven or discarded. Blocks.
pub(crate) fn removed(cluster: &Cluster, name: &str, partition: i32) -> Result<Vec<(u64, u64)>> {
    let visitor = group::visitor(cluster, &removed_group(name), &[])?;
    let partitions = u32::try_from(partition).unwrap_or_default() + 1;
    let mut found = start::committed(&visitor, name, partitions)?;
    let Some(entry) = found.pop() else { return Ok(Vec::new()) };
    let (base, mut record) = known(&entry);
    record.take_out(&[(0, base)]);
    Ok(record.done)
}

/// The dead letters at one moment.
pub(crate) struct Letters<'c> {
    cluster: &'c Cluster,
    name: String,
    visitor: BaseConsumer<Ctx>,
    partitions: u32,
}

impl<'c> Letters<'c> {
    /// `None`: there is no dead-letter topic. Blocks.
    pub(crate) fn open(cluster: &'c Cluster, topic: &Topic, group: &Group) -> Result<Option<Self>> {
        let name = Topic::dead_letters(topic, group).as_str().to_owned();
        let Some(partitions) = cluster.partitions(&name)? else { return Ok(None) };
        let visitor = group::visitor(cluster, &removed_group(&name), &[])?;
        Ok(Some(Self { cluster, name, visitor, partitions }))
    }

    /// First letter left, record of the removed, end: for each partition.
    fn state(&self) -> Result<Vec<(u64, Record, u64)>> {
        let mut out = Vec::new();
        for entry in start::committed(&self.visitor, &self.name, self.partitions)? {
            let (low, high) = watermarks(&self.visitor, &self.name, entry.partition)?;
            let (base, record) = known(&entry);
            out.push((record.skip_done(base.max(low)), record, high));
        }
        Ok(out)
    }

    /// How many are left, and the ends of all partitions. Blocks.
    pub(crate) fn count(&self) -> Result<(u64, u64)> {
        let (mut n, mut ends) = (0, 0);
        for (base, record, high) in self.state()? {
            let removed: u64 = record.done.iter().map(|(a, b)| b.min(&high).saturating_sub(*a.max(&base))).sum();
            n += high.saturating_sub(base).saturating_sub(removed);
            ends += high;
        }
        Ok((n, ends))
    }

    /// Letters after a position, oldest first, at most `n`. Blocks.
    pub(crate) fn page(&self, after: Option<Position>, n: usize) -> Result<Vec<DeadLetter>> {
        let mut out = Vec::new();
        for (number, (base, record, high)) in self.state()?.into_iter().enumerate() {
            let offset_of = |p: Position| match (p.major / STRIDE, number as u64) {
                (of, here) if of < here => None,
                (of, here) if of == here => Some(p.major % STRIDE + 1),
                _ => Some(u64::MAX),
            };
            let from = after.and_then(offset_of).unwrap_or(0).max(base);
            if from >= high || out.len() >= n {
                continue;
            }
            self.read(number as i32, from, high, |offset, message| {
                if !record.is_done(offset) {
                    let position = Position::offset(number as u64 * STRIDE + offset);
                    out.push(DeadLetter::new(message, Some(position)));
                }
                out.len() < n
            })?;
        }
        Ok(out)
    }

    fn read(
        &self,
        partition: i32,
        from: u64,
        to: u64,
        mut each: impl FnMut(u64, mq_api::Message) -> bool,
    ) -> Result<()> {
        let doing = || format!("reading '{}'", self.name);
        let mut list = TopicPartitionList::with_capacity(1);
        let added = list.add_partition_offset(&self.name, partition, Offset::Offset(from as i64));
        added.map_err(|e| fault::error(doing(), e))?;
        self.visitor.assign(&list).map_err(|e| fault::error(doing(), e))?;
        let until = Instant::now() + REQUEST;
        let mut block = Block::default();
        let mut next = from;
        let mut result = Ok(());
        while next < to {
            match self.visitor.poll(Duration::from_millis(50)) {
                Some(Ok(record)) => {
                    let Some(record) = Raw::of(&record) else { continue };
                    let offset = u64::try_from(record.offset()).unwrap_or_default();
                    next = offset + 1;
                    let mut special = Special::default();
                    let mut message = wire::read(record, &mut block, |name, value| special.take(name, value));
                    if let Some(ms) = special.stamp.filter(|ms| *ms > 0) {
                        message.timestamp = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
                    }
                    if offset >= to || !each(offset, message) {
                        break;
                    }
                }
                Some(Err(error)) => tracing::debug!(%error, "reading dead letters"),
                // Markers at the end of a log are offsets without message.
                None if next > from && self.position() >= Some(to) => break,
                None if Instant::now() >= until => {
                    result = Err(Error::new(ErrorKind::Timeout, format!("{}: no answer within {REQUEST:?}", doing())));
                    break;
                }
                None => {}
            }
        }
        let _ = self.visitor.unassign();
        result
    }

    fn position(&self) -> Option<u64> {
        let list = self.visitor.position().ok()?;
        crate::ffi::entries(&list).first().and_then(|e| u64::try_from(e.offset).ok())
    }

    /// Marks a letter as removed; false if it was. Blocks.
    fn remove(&self, position: Position) -> Result<bool> {
        let (partition, offset) = ((position.major / STRIDE) as i32, position.major % STRIDE);
        let Some((base, mut record, high)) = self.state()?.into_iter().nth(partition as usize) else {
            return Ok(false);
        };
        if offset < base || record.is_done(offset) {
            return Ok(false);
        }
        if offset - base >= SPAN {
            let text = format!(
                "letter {offset} of '{}' is {SPAN} behind the first that stays; discard or redrive that first",
                self.name
            );
            return Err(Error::new(ErrorKind::Full, text));
        }
        record.take_out(&[(offset, offset + 1)]);
        let head = record.skip_done(base);
        let (metadata, _) = record.encode(head);
        commit(&self.visitor, &[Mark { topic: self.name.as_str().into(), partition, offset: head, metadata }])?;
        if head > base && head == high {
            self.delete_head(partition, head);
        }
        Ok(true)
    }

    /// Deletes what was removed from the head on. It is hidden already; a cluster that refuses keeps it until retention.
    fn delete_head(&self, partition: i32, upto: u64) {
        let mut list = TopicPartitionList::with_capacity(1);
        if list.add_partition_offset(&self.name, partition, Offset::Offset(upto as i64)).is_ok()
            && let Ok(admin) = self.cluster.admin()
            && let Err(error) = self.cluster.wait(admin.delete_records(&list, &options()))
        {
            tracing::debug!(%error, topic = self.name, "deleting removed dead letters");
        }
    }
}

/// Dead letters for a redrive.
pub(crate) struct Store {
    cluster: Arc<Cluster>,
    topic: Topic,
    group: Group,
    way: tokio::sync::OnceCell<Way>,
}

/// How letters go back to their group.
struct Way {
    producer: FutureProducer<Ctx>,
    topic: String,
    /// By the topic itself, marked for the group.
    marked: bool,
}

impl Store {
    pub(crate) fn new(cluster: Arc<Cluster>, topic: &Topic, group: &Group) -> Self {
        Self { cluster, topic: topic.clone(), group: group.clone(), way: tokio::sync::OnceCell::new() }
    }

    /// A group that keeps the order of keys gets its letters by the topic itself: there each joins the line of its key, behind
    /// what was sent meanwhile. Other groups pass them by; a foreign topic is not written to for that. All other groups get
    /// them by their first retry topic.
    async fn way(&self) -> Result<&Way> {
        let (topic, group) = (self.topic.clone(), self.group.clone());
        let open = move |c: &Cluster| {
            let marked = !topic.is_native() && is_keyed(c, &topic, &group)?;
            let mut config = client::producer(&c.settings, LARGEST, Duration::from_secs(30), &[]);
            // Letters go one by one, each awaited: nothing more comes that waiting could gather.
            config.set("linger.ms", "0");
            let producer =
                config.create_with_context(Ctx::default()).map_err(|e| fault::error("making a producer", e))?;
            let name = match marked {
                true => topic.as_str().to_owned(),
                false => {
                    let wanted = RetryTopics::new(&topic, &group).wanted(Duration::ZERO);
                    let name = wanted.name.clone();
                    c.provision(&[wanted], Provisioning::Create)?;
                    name
                }
            };
            Ok(Way { producer, topic: name, marked })
        };
        self.way.get_or_try_init(|| self.cluster.blocking(open)).await
    }
}

/// Whether the members of a group keep the order of keys, by what they commit. Blocks.
fn is_keyed(cluster: &Cluster, topic: &Topic, group: &Group) -> Result<bool> {
    let Some(partitions) = cluster.partitions(topic.as_str())? else { return Ok(false) };
    let visitor = group::visitor(cluster, &group::group_id(topic, group), &[])?;
    let committed = start::committed(&visitor, topic.as_str(), partitions)?;
    Ok(committed.iter().any(|entry| known(entry).1.keyed))
}

impl DeadLetterStore for Store {
    async fn page(&self, after: Option<Position>, n: usize) -> Result<Vec<DeadLetter>> {
        let (topic, group) = (self.topic.clone(), self.group.clone());
        self.cluster
            .blocking(move |c| match Letters::open(c, &topic, &group)? {
                Some(letters) => letters.page(after, n),
                None => Ok(Vec::new()),
            })
            .await
    }

    async fn give_back(&self, letter: &DeadLetter) -> Result<()> {
        let message = redrive::back(letter);
        let way = self.way().await?;
        let stamp = message.timestamp.map_or(0, wire::millis).to_string();
        let mut extra = vec![(ATTEMPT, b"1".as_slice()), (STAMP, stamp.as_bytes())];
        if way.marked {
            extra.push((ONLY, self.group.as_str().as_bytes()));
        }
        let mut record: FutureRecord<'_, [u8], [u8]> =
            FutureRecord::to(&way.topic).headers(wire::headers(&message, &extra));
        record.key = message.key.as_deref();
        record.payload = message.payload.as_deref();
        let sent = way.producer.send(record, Timeout::After(Duration::from_secs(30))).await;
        sent.map(drop).map_err(|(e, _)| fault::error("redriving", e))
    }

    async fn remove(&self, letter: &DeadLetter) -> Result<bool> {
        let Some(position) = letter.position else { return Ok(false) };
        let (topic, group) = (self.topic.clone(), self.group.clone());
        self.cluster
            .blocking(move |c| match Letters::open(c, &topic, &group)? {
                Some(letters) => letters.remove(position),
                None => Ok(false),
            })
            .await
    }
}
