//! ruststream's Kafka adapter (`ruststream-rdkafka`): an idempotent producer, publishes side by side, each awaited; a subscription that
//! commits what was acknowledged (`Commit::Tracked`). The receiving is timed from the first message on: until then the group forms.

use std::pin::pin;

use futures_util::future::try_join_all;
use futures_util::stream::StreamExt;
use ruststream::{Broker, IncomingMessage, Subscriber};
use ruststream_rdkafka::{Commit, KafkaBroker, KafkaPublish, KafkaTopic, StartOffset};

use crate::{BATCH, Failed, Job, Meter, Ran, kafka_topic, ruststream_send};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    kafka_topic::make(job).await?;
    let broker = KafkaBroker::new([kafka_topic::servers(job)?]).producer_config("enable.idempotence", "true");
    let broker = broker.connect().await?;
    let publisher = broker.publisher(KafkaPublish::default());

    let send = ruststream_send::send(&publisher, job).await?;

    let topic = KafkaTopic::new(job.topic.as_str()).group(format!("{}-bench", job.topic));
    let topic = topic.start(StartOffset::Earliest).commit(Commit::Tracked);
    let mut subscriber = broker.subscribe_with(topic).await?;
    let mut deliveries = pin!(subscriber.stream().ready_chunks(BATCH));
    let (mut meter, mut got) = (None, 0);
    while got < job.n {
        let batch = deliveries.next().await.ok_or("the subscription ended")?;
        meter.get_or_insert_with(Meter::start);
        got += batch.len();
        let batch: Vec<_> = batch.into_iter().collect::<Result<_, _>>()?;
        try_join_all(batch.into_iter().map(IncomingMessage::ack)).await?;
    }
    let receive = meter.ok_or("no message")?.stop();
    Ok(Ran { send, receive })
}
