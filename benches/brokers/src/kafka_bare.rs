//! Kafka by rdkafka used as well as it can be, with nothing around: acks of all copies, librdkafka's own batches, a consumer
//! that polls and commits once for 500 messages, or for as many as come while a commit is under way: since Kafka 4 a coordinator
//! gathers commits for 10 ms and answers those of one connection in turn, so that one for each 500 would be all that is
//! measured. And one by one, each step awaited: what the batches have to be ten times faster than.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::{BorrowedMessage, DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, FutureProducer, FutureRecord, Producer, ProducerContext};
use rdkafka::topic_partition_list::TopicPartitionList;
use rdkafka::types::RDKafkaErrorCode;

use crate::job::{BATCH, Failed, GROUP, Job, KAFKA_FLYING, PATIENCE, Ran, payload};
use crate::meter::Meter;

/// As anymq makes topics.
const PARTITIONS: i32 = 12;

/// Counts what came back.
#[derive(Default)]
pub(crate) struct Counting {
    pub(crate) confirmed: AtomicUsize,
    pub(crate) failed: AtomicUsize,
}

#[derive(Clone, Default)]
pub(crate) struct Context(pub(crate) Arc<Counting>);

impl ClientContext for Context {}

impl ProducerContext for Context {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        let count = if result.is_ok() { &self.0.confirmed } else { &self.0.failed };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Knows whether a commit is under way.
#[derive(Default)]
pub(crate) struct Committing(AtomicBool);

impl ClientContext for Committing {}

impl ConsumerContext for Committing {
    fn commit_callback(&self, _: KafkaResult<()>, _: &TopicPartitionList) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A consumer that commits.
pub(crate) type Member = BaseConsumer<Committing>;

/// Whether it is time for the next commit; one is under way then.
pub(crate) fn is_due(consumer: &Member, got: usize) -> bool {
    got.is_multiple_of(BATCH) && !consumer.context().0.swap(true, Ordering::Relaxed)
}

fn config(job: &Job) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", job.url.trim_start_matches("kafka://"));
    config
}

pub(crate) async fn make_topic(job: &Job) -> Result<(), Failed> {
    let admin: AdminClient<DefaultClientContext> = config(job).create()?;
    let topic = NewTopic::new(&job.topic, PARTITIONS, TopicReplication::Fixed(1));
    match admin.create_topics([&topic], &AdminOptions::new()).await?.into_iter().next() {
        Some(Err((name, code))) => Err(format!("create {name}: {code}").into()),
        _ => Ok(()),
    }
}

/// A producer with these settings, and what it counts.
pub(crate) fn producer(job: &Job, settings: &[(&str, &str)]) -> Result<(BaseProducer<Context>, Arc<Counting>), Failed> {
    let mut config = config(job);
    // Compressed, as ours are: a fetch brings several times as many.
    config.set("acks", "all").set("compression.type", "lz4");
    config.set("queue.buffering.max.messages", KAFKA_FLYING.to_string());
    for (name, value) in settings {
        config.set(*name, *value);
    }
    let context = Context::default();
    Ok((config.create_with_context(context.clone())?, context.0))
}

/// Sends one message with these headers, waiting for room.
pub(crate) fn send(
    producer: &BaseProducer<Context>,
    job: &Job,
    payload: &[u8],
    mut headers: Option<OwnedHeaders>,
) -> Result<(), Failed> {
    loop {
        let mut record = BaseRecord::<(), [u8]>::to(&job.topic).payload(payload);
        record.headers = headers.take();
        match producer.send(record) {
            Ok(()) => return Ok(()),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                headers = back.headers;
                // It waits for all of the time that it is given.
                producer.poll(Duration::from_micros(200));
            }
            Err((error, _)) => return Err(error.into()),
        }
    }
}

/// Waits until so many were confirmed.
pub(crate) fn await_confirmed(producer: &BaseProducer<Context>, counting: &Counting, n: usize) -> Result<(), Failed> {
    let end = Instant::now() + PATIENCE;
    while counting.confirmed.load(Ordering::Relaxed) < n {
        producer.poll(Duration::from_millis(1));
        let failed = counting.failed.load(Ordering::Relaxed);
        if failed > 0 || Instant::now() > end {
            return Err(format!("{failed} sends failed; not all were confirmed within {PATIENCE:?}").into());
        }
    }
    Ok(())
}

/// A member that holds all partitions. It fetches ahead while the others send, as far as its queue goes: so does ours.
pub(crate) fn member(job: &Job) -> Result<Member, Failed> {
    let mut config = config(job);
    config.set("group.id", format!("{}-{GROUP}", job.topic));
    config.set("auto.offset.reset", "earliest").set("enable.auto.commit", "false");
    // By default a consumer whose queue was full looks again after a second.
    config.set("fetch.queue.backoff.ms", "20");
    // As far as ours: what is fetched ahead is not counted to receiving.
    config.set("queued.max.messages.kbytes", "16384").set("queued.min.messages", "10000");
    let consumer: Member = config.create_with_context(Committing::default())?;
    consumer.subscribe(&[&job.topic])?;
    let end = Instant::now() + PATIENCE;
    while consumer.assignment()?.count() < usize::try_from(PARTITIONS)? {
        if let Some(message) = consumer.poll(Duration::from_millis(50)) {
            message?;
        }
        if Instant::now() > end {
            return Err("the group did not give all partitions to its only member".into());
        }
    }
    Ok(consumer)
}

pub(crate) fn next(consumer: &Member) -> Result<BorrowedMessage<'_>, Failed> {
    match consumer.poll(PATIENCE) {
        Some(message) => Ok(message?),
        None => Err(format!("no message within {PATIENCE:?}").into()),
    }
}

/// In batches.
pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    make_topic(job).await?;
    let consumer = member(job)?;
    let payload = payload(job.size);
    let (producer, counting) = producer(job, &[("linger.ms", "5")])?;

    let meter = Meter::start();
    for _ in 0..job.n {
        send(&producer, job, &payload, None)?;
    }
    await_confirmed(&producer, &counting, job.n)?;
    let send = meter.stop();

    let meter = Meter::start();
    for got in 1..=job.n {
        next(&consumer)?;
        if got == job.n {
            consumer.commit_consumer_state(CommitMode::Sync)?;
        } else if is_due(&consumer, got) {
            consumer.commit_consumer_state(CommitMode::Async)?;
        }
    }
    let receive = meter.stop();
    producer.flush(PATIENCE)?;
    Ok(Ran { send, receive })
}

/// One by one.
pub(crate) async fn one_by_one(job: &Job) -> Result<Ran, Failed> {
    make_topic(job).await?;
    let consumer = member(job)?;
    let payload = payload(job.size);
    let producer: FutureProducer = config(job).set("acks", "all").set("linger.ms", "0").create()?;
    // Connected, as ours is when it is made.
    producer.client().fetch_metadata(Some(&job.topic), PATIENCE)?;
    let meter = Meter::start();
    for _ in 0..job.n {
        let record = FutureRecord::<(), [u8]>::to(&job.topic).payload(&payload);
        producer.send(record, PATIENCE).await.map_err(|(error, _)| error)?;
    }
    let send = meter.stop();
    let meter = Meter::start();
    for _ in 0..job.n {
        consumer.commit_message(&next(&consumer)?, CommitMode::Sync)?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}

/// Awaited sends alone, with nothing around; or idempotent and with an id of 16 bytes each, as ours are.
pub(crate) async fn single(job: &Job, same_promise: bool) -> Result<Ran, Failed> {
    make_topic(job).await?;
    let payload = payload(job.size);
    let idempotent = if same_promise { "true" } else { "false" };
    let mut config = config(job);
    config.set("acks", "all").set("linger.ms", "0").set("enable.idempotence", idempotent);
    let producer: FutureProducer = config.create()?;
    let send = async |number: usize| {
        let mut record = FutureRecord::<(), [u8]>::to(&job.topic).payload(&payload);
        if same_promise {
            let mut id = [0; 16];
            id[8..].copy_from_slice(&(number as u64).to_be_bytes());
            record = record
                .headers(OwnedHeaders::new_with_capacity(1).insert(Header { key: "mq-uid", value: Some(&id[..]) }));
        }
        producer.send(record, PATIENCE).await.map_err(|(error, _)| error)
    };
    // Connected, and with its number, as ours is when it is made.
    send(0).await?;
    let meter = Meter::start();
    for number in 0..job.n {
        send(number).await?;
    }
    Ok(Ran { send: meter.stop(), receive: Meter::start().stop() })
}
