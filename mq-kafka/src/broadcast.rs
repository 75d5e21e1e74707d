//! Broadcast: every partition, from now on, without a group. Memory stays bounded because the engine drops the oldest.

use crate::client::{self, Ctx};
use crate::driver::spawn;
use crate::topology::{Cluster, REQUEST, Wanted};
use crate::url::native_options;
use crate::{fault, group, wire};
use mq_api::{Error, ErrorKind, Position, Result};
use mq_core::{End, Incoming, Lane, Run, Session, Token};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::Message as _;
use rdkafka::{Offset, TopicPartitionList};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Messages handed to the engine at a time.
const BATCH: usize = 256;

pub(crate) async fn attach(cluster: Arc<Cluster>, session: Session) -> Result<Run> {
    let asked = session.clone();
    let consumer = cluster.blocking(move |cluster| prepare(cluster, &asked)).await?;
    let (ended, _) = spawn("anymq-kafka", move || Ok(run(&consumer, &session)))?;
    Ok(Box::pin(async move {
        ended.await.unwrap_or_else(|_| End::Lost(Error::new(ErrorKind::Other, "the broadcast thread panicked")))
    }))
}

/// A consumer that is assigned every partition, from its end, or from where a former session was. Blocks.
fn prepare(cluster: &Cluster, session: &Session) -> Result<BaseConsumer<Ctx>> {
    let sub = &session.subscription;
    let topic = sub.topic.as_str();
    let wanted = Wanted::topic(&cluster.settings, topic, sub.partitions, sub.retention, 1_000_000)?;
    cluster.provision(&[wanted], sub.provisioning)?;
    let partitions = group::existing(cluster, topic)?;
    let native = native_options(&sub.native)?;
    // Never joined and never committed to: librdkafka wants a name all the same.
    let name = format!("anymq-broadcast-{}", session.member);
    let mut config = client::consumer(&cluster.settings, &name, sub.lease, &native);
    config.remove("group.instance.id");
    let ctx = Ctx::default();
    ctx.close();
    let consumer: BaseConsumer<Ctx> =
        config.create_with_context(ctx).map_err(|e| fault::error("making the consumer", e))?;
    let mut list = TopicPartitionList::with_capacity(partitions as usize);
    for partition in 0..partitions {
        let former = session.resume(Some(partition)).and_then(|r| r.seen);
        let start = match former {
            Some(seen) => seen.major as i64 + 1,
            None => {
                let marks = consumer.fetch_watermarks(topic, partition as i32, REQUEST);
                marks.map_err(|e| fault::error(format_args!("looking up the end of '{topic}'"), e))?.1
            }
        };
        let added = list.add_partition_offset(topic, partition as i32, Offset::Offset(start));
        added.map_err(|e| fault::error("assigning partitions", e))?;
    }
    consumer.assign(&list).map_err(|e| fault::error("assigning partitions", e))?;
    Ok(consumer)
}

fn run(consumer: &BaseConsumer<Ctx>, session: &Session) -> End {
    let mut lanes: BTreeMap<i32, (Arc<Lane>, Vec<Incoming>)> = BTreeMap::new();
    let mut down = false;
    while !session.stop.is_cancelled() {
        let mut wait = Duration::from_millis(50);
        for _ in 0..BATCH {
            match consumer.poll(wait) {
                None => break,
                Some(Ok(record)) => {
                    wait = Duration::ZERO;
                    let number = record.partition();
                    let offset = u64::try_from(record.offset()).unwrap_or_default();
                    let (_, batch) = lanes.entry(number).or_insert_with(|| {
                        (session.open_lane(u32::try_from(number).ok(), session.generation), Vec::new())
                    });
                    let message = wire::read(&record, |_, _| false);
                    batch.push(Incoming::new(Token(offset, 0), Position::offset(offset), message));
                }
                Some(Err(error)) => match gone(consumer, &error) {
                    Some(error) => return End::Lost(error),
                    None if error.rdkafka_error_code() == Some(Code::AllBrokersDown) => {
                        down = true;
                        session.trouble("connection", Some("no broker can be reached".to_owned()));
                    }
                    None => tracing::debug!(%error, "from the broadcast consumer"),
                },
            }
        }
        let mut any = false;
        for (lane, batch) in lanes.values_mut().filter(|(_, batch)| !batch.is_empty()) {
            any = true;
            lane.push(batch.drain(..));
        }
        if any && std::mem::take(&mut down) {
            session.trouble("connection", None);
        }
    }
    End::Closed
}

fn gone(consumer: &BaseConsumer<Ctx>, error: &KafkaError) -> Option<Error> {
    let code = error.rdkafka_error_code()?;
    let unknown = matches!(code, Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition);
    if unknown || consumer.client().fatal_error().is_some() || matches!(error, KafkaError::MessageConsumptionFatal(_)) {
        return Some(fault::coded("fetching", code));
    }
    None
}
