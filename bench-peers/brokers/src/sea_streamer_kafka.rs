//! sea-streamer over Kafka: an idempotent producer that pipelines, each receipt awaited; a member of a group whose offsets are stored
//! by hand after each message and committed along (what its documentation recommends for at least once). The receiving is timed from
//! the first message on: until then the group forms.

use sea_streamer_kafka::{AutoOffsetReset, KafkaConsumerOptions, KafkaProducerOptions, KafkaStreamer};
use sea_streamer_types::{
    Buffer, Consumer, ConsumerGroup, ConsumerMode, ConsumerOptions, Message, StreamKey, Streamer,
};

use crate::{Failed, Job, Meter, Ran, kafka_topic, sea_streamer_send};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    kafka_topic::make(job).await?;
    let streamer = KafkaStreamer::connect(job.url.parse()?, Default::default()).await?;
    let stream = StreamKey::new(&job.topic)?;
    let mut options = KafkaProducerOptions::default();
    options.add_custom_option("enable.idempotence", "true");
    let producer = streamer.create_producer(stream.clone(), options).await?;

    let send = sea_streamer_send::send(&producer, job).await?;

    let mut options = KafkaConsumerOptions::new(ConsumerMode::LoadBalanced);
    options.set_consumer_group(ConsumerGroup::new(format!("{}-bench", job.topic)))?;
    options.set_auto_offset_reset(AutoOffsetReset::Earliest);
    options.set_enable_auto_offset_store(false);
    let mut consumer = streamer.create_consumer(&[stream], options).await?;
    let mut meter = None;
    for _ in 0..job.n {
        let (at, size) = {
            let message = consumer.next().await?;
            (message.identifier(), message.message().size())
        };
        meter.get_or_insert_with(Meter::start);
        if size != job.payload.len() {
            return Err("a message that is not ours".into());
        }
        consumer.store_offset_with(&at)?;
    }
    let receive = meter.ok_or("no message")?.stop();
    Ok(Ran { send, receive })
}
