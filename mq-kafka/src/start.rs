//! Where a new group starts: resolved once, and committed at once, so that nothing sent afterwards is skipped, whatever dies
//! or is added in between.

use crate::client::Ctx;
use crate::commit::{Mark, commit_within};
use crate::ffi;
use crate::topology::REQUEST;
use crate::{fault, wire};
use mq_api::ErrorKind as K;
use mq_api::{Error, ErrorKind, Provisioning, ReplayFrom, Result, Start};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::{Offset, TopicPartitionList};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Under `verify` a group has to be there; it is there when something is committed.
pub(crate) fn no_group(topic: &str) -> Error {
    let text = format!("a group of topic '{topic}' does not exist; create it, or use Provisioning::Create");
    Error::new(ErrorKind::Topology, text)
}

/// Offsets of a committed list, by partition; below zero where nothing is committed.
pub(crate) fn committed(consumer: &BaseConsumer<Ctx>, topic: &str, partitions: u32) -> Result<Vec<ffi::Entry>> {
    let until = Instant::now() + REQUEST;
    loop {
        let error = match committed_once(consumer, topic, partitions) {
            Err(error) if matches!(error.kind(), K::Timeout | K::Unavailable | K::Disconnected) => error,
            done => return done,
        };
        // A group that is refused has no coordinator: the call just waits, and the refusal comes as an event.
        match refusal(consumer, topic) {
            Some(refusal) => return Err(refusal),
            None if Instant::now() >= until => return Err(error),
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn refusal(consumer: &BaseConsumer<Ctx>, topic: &str) -> Option<Error> {
    for _ in 0..64 {
        let Err(error) = consumer.poll(Duration::ZERO)? else { continue };
        let error = fault::error(format_args!("the group for '{topic}'"), error);
        if matches!(error.kind(), K::Permission | K::Auth | K::Tls) {
            return Some(error);
        }
    }
    None
}

/// One look takes this long at most: then it is seen whether it was refused.
const LOOK: Duration = Duration::from_secs(2);

fn committed_once(consumer: &BaseConsumer<Ctx>, topic: &str, partitions: u32) -> Result<Vec<ffi::Entry>> {
    let mut list = TopicPartitionList::with_capacity(partitions as usize);
    list.add_partition_range(topic, 0, partitions as i32 - 1);
    let doing = || format!("reading the offsets of the group for '{topic}'");
    let found = consumer.committed_offsets(list, LOOK).map_err(|e| fault::error(doing(), e))?;
    let found = ffi::entries(&found);
    match found.iter().find_map(|e| e.error) {
        Some(code) => Err(fault::coded(doing(), code)),
        None => Ok(found),
    }
}

/// The client calls a partition unknown that has no leader just now. That it exists was seen before it was asked about, so that it
/// is worth to ask again.
fn of_leader(code: Option<Code>) -> Code {
    match code {
        Some(Code::UnknownPartition) => Code::LeaderNotAvailable,
        code => code.unwrap_or(Code::Fail),
    }
}

/// The first offset of a partition, and the one behind its last. Blocks.
pub(crate) fn told_ends(
    consumer: &BaseConsumer<Ctx>,
    topic: &str,
    partition: i32,
    limit: Duration,
) -> std::result::Result<(u64, u64), Code> {
    let (low, high) = consumer.fetch_watermarks(topic, partition, limit).map_err(|error| {
        let code = of_leader(error.rdkafka_error_code());
        if code == Code::LeaderNotAvailable {
            // Else the client goes on by what it knows of the leader. Nothing is wanted of the answer but that it has it.
            let _ = consumer.fetch_metadata(Some(topic), limit);
        }
        code
    })?;
    let low = u64::try_from(low).unwrap_or_default();
    // They are asked for apart: retention may have taken more than there was when the end was told.
    Ok((low, u64::try_from(high).unwrap_or_default().max(low)))
}

/// The same, for one who cannot go on without.
pub(crate) fn ends(
    consumer: &BaseConsumer<Ctx>,
    topic: &str,
    partition: i32,
    limit: Duration,
    doing: impl std::fmt::Display,
) -> Result<(u64, u64)> {
    told_ends(consumer, topic, partition, limit).map_err(|code| fault::coded(doing, code))
}

/// The offset at which a partition starts by `start`. Blocks.
pub(crate) fn resolve(consumer: &BaseConsumer<Ctx>, topic: &str, partitions: u32, start: Start) -> Result<Vec<u64>> {
    let doing = || format!("looking up where to start in '{topic}'");
    let ends = |partition: i32| ends(consumer, topic, partition, REQUEST, doing());
    let mut out = Vec::with_capacity(partitions as usize);
    match start {
        Start::Replay(ReplayFrom::Time(at)) => {
            let mut list = TopicPartitionList::with_capacity(partitions as usize);
            for partition in 0..partitions {
                let offset = Offset::Offset(wire::millis(at));
                list.add_partition_offset(topic, partition as i32, offset).map_err(|e| fault::error(doing(), e))?;
            }
            let found = consumer.offsets_for_times(list, REQUEST);
            let found = found.map_err(|e| fault::coded(doing(), of_leader(e.rdkafka_error_code())))?;
            for entry in ffi::entries(&found) {
                if entry.error.is_some() {
                    // The others were answered all the same. What stands here as an offset is none: it is the time that was
                    // asked for, or that of a first try, which reads as "nothing is that young".
                    return Err(fault::coded(doing(), of_leader(entry.error)));
                }
                // Below zero: nothing is that young, so from now on.
                out.push(match u64::try_from(entry.offset) {
                    Ok(offset) => offset,
                    Err(_) => ends(entry.partition)?.1,
                });
            }
        }
        _ => {
            for partition in 0..partitions {
                let (low, high) = ends(partition as i32)?;
                out.push(match start {
                    Start::Latest => high,
                    Start::Replay(ReplayFrom::Position(p)) => p.major.clamp(low, high),
                    _ => low,
                });
            }
        }
    }
    Ok(out)
}

/// Commits the start of a group that has none yet. An existing group goes on where it was; partitions that were added to its
/// topic start at their first message. `left`: where a partition was left, by one who has read of it before. Says in which
/// partitions it had begun before. Blocks.
pub(crate) fn begin(
    consumer: &BaseConsumer<Ctx>,
    topic: &str,
    partitions: u32,
    start: Start,
    how: Provisioning,
    left: impl Fn(i32) -> Option<u64>,
) -> Result<BTreeSet<i32>> {
    let known = committed(consumer, topic, partitions)?;
    let begun = known.iter().filter(|e| e.offset >= 0).map(|e| e.partition).collect::<BTreeSet<_>>();
    if begun.len() == known.len() {
        return Ok(begun);
    }
    if how == Provisioning::Verify && begun.is_empty() {
        return Err(no_group(topic));
    }
    let start = if begun.is_empty() { start } else { Start::Oldest };
    let offsets = resolve(consumer, topic, partitions, start)?;
    let marks: Vec<Mark> = known
        .iter()
        .zip(offsets)
        .filter(|(entry, _)| entry.offset < 0)
        .map(|(entry, offset)| Mark {
            topic: entry.topic.clone(),
            partition: entry.partition,
            offset: left(entry.partition).unwrap_or(offset),
            metadata: String::new(),
        })
        .collect();
    match commit_within(consumer, &marks, REQUEST) {
        Ok(()) => Ok(begun),
        // Another member is there: the group began, by that one's start.
        Err(Code::UnknownMemberId | Code::IllegalGeneration | Code::RebalanceInProgress) => Ok(begun),
        Err(code) => {
            let error = fault::coded(format_args!("committing where the group starts in '{topic}'"), code);
            Err(match error.kind() {
                // The coordinator is being found or loaded: tried again.
                ErrorKind::Other => error.of_kind(ErrorKind::Unavailable),
                _ => error,
            })
        }
    }
}
