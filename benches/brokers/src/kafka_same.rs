//! Kafka by rdkafka with the promise that anymq gives, written for this one purpose: idempotent, every message with an id of
//! 16 bytes as a header and a result of its own; messages are owned by what is received and decoded, and committed when
//! handled, with what the commit has to say beside its offsets.

use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::Producer;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::job::{Failed, Job, PATIENCE, Ran, payload};
use crate::kafka_bare::{await_confirmed, is_due, make_topic, member, next, producer, send};
use crate::meter::Meter;

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    make_topic(job).await?;
    let consumer = member(job)?;
    let payload = payload(job.size);
    let prefix = u64::from(std::process::id()) | 1 << 63;
    let (producer, counting) = producer(job, &[("linger.ms", "5"), ("enable.idempotence", "true")])?;

    let meter = Meter::start();
    for number in 0..job.n {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&prefix.to_be_bytes());
        id[8..].copy_from_slice(&(number as u64).to_be_bytes());
        let headers = OwnedHeaders::new_with_capacity(1).insert(Header { key: "mq-uid", value: Some(&id[..]) });
        send(&producer, job, &payload, Some(headers))?;
    }
    await_confirmed(&producer, &counting, job.n)?;
    let sent = meter.stop();

    let meter = Meter::start();
    let mut upto = TopicPartitionList::new();
    for partition in consumer.assignment()?.elements() {
        upto.add_partition(&job.topic, partition.partition());
    }
    for got in 1..=job.n {
        let message = next(&consumer)?;
        let owned = message.payload().map(<[u8]>::to_vec);
        let id = message.headers().and_then(|headers| <[u8; 16]>::try_from(headers.try_get(0)?.value?).ok());
        if id.is_none() || owned.is_none_or(|owned| owned.len() != job.size) {
            return Err("a message that is not ours".into());
        }
        upto.set_partition_offset(&job.topic, message.partition(), Offset::Offset(message.offset() + 1))?;
        if got == job.n {
            consumer.commit(&handled(&upto)?, CommitMode::Sync)?;
        } else if is_due(&consumer, got) {
            consumer.commit(&handled(&upto)?, CommitMode::Async)?;
        }
    }
    let receive = meter.stop();
    producer.flush(PATIENCE)?;
    Ok(Ran { send: sent, receive })
}

/// Partitions of which something was handled, each with a word beside its offset.
fn handled(upto: &TopicPartitionList) -> Result<TopicPartitionList, Failed> {
    let mut list = TopicPartitionList::new();
    for place in upto.elements().iter().filter(|place| matches!(place.offset(), Offset::Offset(_))) {
        let mut entry = list.add_partition(place.topic(), place.partition());
        entry.set_offset(place.offset())?;
        entry.set_metadata("mq1.");
    }
    Ok(list)
}
