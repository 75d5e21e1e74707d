//! omniqueue over RabbitMQ: a durable quorum queue, persistent messages, acks side by side. It has no publisher confirms: its sends
//! promise less than ours, and are shown only.

use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use omniqueue::backends::{RabbitMqBackend, RabbitMqConfig};

use crate::{BATCH, FLYING, Failed, Job, Meter, Ran};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    // It expects the queue to be there.
    let connection = Connection::connect(&job.url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let mut quorum = FieldTable::default();
    quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    channel.queue_declare(&job.topic, durable, quorum).await?;
    let config = RabbitMqConfig {
        uri: job.url.clone(),
        connection_properties: ConnectionProperties::default(),
        publish_exchange: String::new(),
        publish_routing_key: job.topic.clone(),
        publish_options: BasicPublishOptions::default(),
        publish_properties: BasicProperties::default().with_delivery_mode(2),
        consume_queue: job.topic.clone(),
        consumer_tag: String::new(),
        consume_options: BasicConsumeOptions::default(),
        consume_arguments: FieldTable::default(),
        consume_prefetch_count: u16::try_from(2 * BATCH).ok(),
        requeue_on_nack: true,
    };
    let producer = RabbitMqBackend::builder(config.clone()).build_producer().await?;

    let meter = Meter::start();
    stream::iter(0..job.n)
        .map(|_| producer.send_raw(&job.payload))
        .buffer_unordered(FLYING)
        .try_for_each(|()| async { Ok(()) })
        .await?;
    let send = meter.stop();

    let mut consumer = RabbitMqBackend::builder(config).build_consumer().await?;
    let meter = Meter::start();
    let mut got = 0;
    while got < job.n {
        let batch = consumer.receive_all(BATCH, Duration::from_millis(100)).await?;
        got += batch.len();
        stream::iter(batch)
            .map(|delivery| async move { delivery.ack().await.map_err(|(error, _)| error) })
            .buffer_unordered(BATCH)
            .try_for_each(|()| async { Ok(()) })
            .await?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
