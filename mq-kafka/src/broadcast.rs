//! Broadcast: every partition, from now on, without a group. Memory stays bounded because the engine drops the oldest.

use crate::block::Block;
use crate::client::{self, Ctx};
use crate::delay::Special;
use crate::driver::{or_panicked, spawn};
use crate::ffi::Raw;
use crate::topology::{Cluster, REQUEST, Wanted};
use crate::url::native_options;
use crate::{fault, group, start, wire};
use mq_api::{Error, Event, Gap, GapCause, Position, Result};
use mq_core::{End, Incoming, Lane, Run, Session, Token};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::{Offset, TopicPartitionList};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Messages handed to the engine at a time.
const BATCH: usize = 256;

pub(crate) async fn attach(cluster: Arc<Cluster>, session: Session) -> Result<Run> {
    let asked = session.clone();
    let consumer = cluster.blocking(move |cluster| prepare(cluster, &asked)).await?;
    let (ended, _) = spawn(&cluster.threads, "anymq-kafka", move || Ok(run(&consumer, &session)))?;
    Ok(Box::pin(async move { or_panicked("broadcast", ended.await) }))
}

/// A consumer that is assigned every partition, from its end. Blocks.
fn prepare(cluster: &Cluster, session: &Session) -> Result<BaseConsumer<Ctx>> {
    let sub = &session.subscription;
    let topic = sub.topic.as_str();
    let wanted = Wanted::topic(&cluster.settings, topic, sub.partitions, sub.retention, 1_000_000)?;
    cluster.provision(&[wanted], sub.provisioning)?;
    let partitions = group::existing(cluster, topic)?;
    let native = native_options(&sub.native)?;
    // Never joined and never committed to: librdkafka wants a name all the same.
    let name = format!("anymq-broadcast-{}", session.member);
    let mut config = client::consumer(&cluster.settings, &name, sub.lease, false, &native);
    config.remove("group.instance.id");
    let consumer: BaseConsumer<Ctx> =
        config.create_with_context(Ctx::default()).map_err(|e| fault::error("making the consumer", e))?;
    let mut list = TopicPartitionList::with_capacity(partitions as usize);
    let mut gaps = Vec::new();
    for partition in 0..partitions {
        let doing = format_args!("looking up the end of '{topic}'");
        let (_, start) = start::ends(&consumer, topic, partition as i32, REQUEST, doing)?;
        // What was sent while it was away is no part of "from now on": told, not delivered.
        let seen = session.resume(Some(partition)).and_then(|r| r.seen);
        let missed = seen.map(|seen| start.saturating_sub(seen.major + 1));
        if session.again && missed != Some(0) {
            gaps.push(Gap {
                topic: sub.topic.clone(),
                partition: Some(partition),
                from: seen,
                to: Some(Position::offset(start)),
                count: missed,
                cause: GapCause::Disconnected,
            });
        }
        let added = list.add_partition_offset(topic, partition as i32, Offset::Offset(start as i64));
        added.map_err(|e| fault::error("assigning partitions", e))?;
    }
    consumer.assign(&list).map_err(|e| fault::error("assigning partitions", e))?;
    gaps.into_iter().for_each(|gap| session.events.push(Event::Gap(gap)));
    Ok(consumer)
}

fn run(consumer: &BaseConsumer<Ctx>, session: &Session) -> End {
    let mut block = Block::default();
    let mut lanes: BTreeMap<i32, (Arc<Lane>, Vec<Incoming>)> = BTreeMap::new();
    while !session.stop.is_cancelled() {
        let mut wait = Duration::from_millis(50);
        for _ in 0..BATCH {
            match consumer.poll(wait) {
                None => break,
                Some(Ok(record)) => {
                    let Some(record) = Raw::of(&record) else { continue };
                    wait = Duration::ZERO;
                    let mut special = Special::default();
                    let message = wire::read(record, &mut block, |name, value| special.take(name, value));
                    if special.only.is_some() {
                        // Redriven to a group.
                        continue;
                    }
                    let number = record.partition();
                    let offset = u64::try_from(record.offset()).unwrap_or_default();
                    let (_, batch) = lanes.entry(number).or_insert_with(|| {
                        (session.open_lane(u32::try_from(number).ok(), session.generation), Vec::new())
                    });
                    batch.push(Incoming::new(Token(offset, 0), Position::offset(offset), message));
                }
                Some(Err(error)) => match gone(consumer, &error) {
                    Some(error) => return End::Lost(error),
                    None => tracing::debug!(%error, "from the broadcast consumer"),
                },
            }
        }
        for (lane, batch) in lanes.values_mut().filter(|(_, batch)| !batch.is_empty()) {
            lane.push(batch.drain(..));
        }
    }
    End::Closed
}

fn gone(consumer: &BaseConsumer<Ctx>, error: &KafkaError) -> Option<Error> {
    let code = error.rdkafka_error_code()?;
    if fault::is_gone(code)
        || code == Code::AllBrokersDown
        || consumer.client().fatal_error().is_some()
        || matches!(error, KafkaError::MessageConsumptionFatal(_))
    {
        return Some(fault::coded("fetching", code));
    }
    None
}
