//! sea-streamer over Redis Streams: a producer that pipelines, each receipt awaited; a load-balanced consumer that acknowledges by
//! hand and commits along (`Rolling`, what its documentation recommends for at least once).

use sea_streamer_redis::{AutoCommit, AutoStreamReset, RedisConsumerOptions, RedisStreamer};
use sea_streamer_types::{
    Buffer, Consumer, ConsumerGroup, ConsumerMode, ConsumerOptions, Message, StreamKey, Streamer,
};

use crate::{BATCH, Failed, Job, Meter, Ran, sea_streamer_send};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let streamer = RedisStreamer::connect(job.url.parse()?, Default::default()).await?;
    let stream = StreamKey::new(&job.topic)?;
    let producer = streamer.create_producer(stream.clone(), Default::default()).await?;

    let send = sea_streamer_send::send(&producer, job).await?;

    let mut options = RedisConsumerOptions::new(ConsumerMode::LoadBalanced);
    options.set_consumer_group(ConsumerGroup::new("bench"))?;
    options.set_auto_stream_reset(AutoStreamReset::Earliest);
    options.set_auto_commit(AutoCommit::Rolling);
    options.set_batch_size(BATCH);
    let meter = Meter::start();
    let consumer = streamer.create_consumer(&[stream], options).await?;
    for _ in 0..job.n {
        let message = consumer.next().await?;
        if message.message().size() != job.payload.len() {
            return Err("a message that is not ours".into());
        }
        consumer.ack(&message)?;
    }
    consumer.end().await?;
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
