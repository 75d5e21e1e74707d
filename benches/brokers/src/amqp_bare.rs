//! RabbitMQ by lapin used as well as it can be, with nothing around: one connection, persistent messages straight to a durable
//! quorum queue, confirms awaited by the batch, a prefetch of two batches, one ack for 500 messages. And one by one, each step
//! awaited: what the batches have to be ten times faster than.

use std::collections::VecDeque;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer};

use crate::job::{BATCH, FLYING, Failed, Job, PATIENCE, Ran, payload};
use crate::meter::Meter;

/// A connection, and on it a channel that confirms.
pub(crate) async fn connect(job: &Job) -> Result<(Connection, Channel), Failed> {
    let connection = Connection::connect(&job.url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok((connection, channel))
}

pub(crate) async fn declare(channel: &Channel, job: &Job) -> Result<(), Failed> {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(job.topic.as_str().into(), durable, arguments).await?;
    Ok(())
}

pub(crate) async fn consume(channel: &Channel, job: &Job, prefetch: usize) -> Result<Consumer, Failed> {
    channel.basic_qos(u16::try_from(prefetch)?, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    Ok(channel.basic_consume(job.topic.as_str().into(), "c".into(), options, FieldTable::default()).await?)
}

pub(crate) async fn next(consumer: &mut Consumer) -> Result<Delivery, Failed> {
    match tokio::time::timeout(PATIENCE, consumer.next()).await? {
        Some(delivery) => Ok(delivery?),
        None => Err("the consumer was cancelled".into()),
    }
}

/// In batches.
pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let (_connection, channel) = connect(job).await?;
    declare(&channel, job).await?;
    let payload = payload(job.size);
    let persistent = BasicProperties::default().with_delivery_mode(2);

    let meter = Meter::start();
    let mut flying = VecDeque::new();
    for _ in 0..job.n {
        let options = BasicPublishOptions::default();
        let publish =
            channel.basic_publish("".into(), job.topic.as_str().into(), options, &payload, persistent.clone());
        flying.push_back(publish.await?);
        if flying.len() == FLYING * BATCH {
            for confirm in flying.drain(..BATCH) {
                confirm.await?;
            }
        }
    }
    for confirm in flying {
        confirm.await?;
    }
    let send = meter.stop();

    let (_reading, channel) = connect(job).await?;
    let meter = Meter::start();
    let mut consumer = consume(&channel, job, 2 * BATCH).await?;
    for got in 1..=job.n {
        let delivery = next(&mut consumer).await?;
        if got % BATCH == 0 || got == job.n {
            delivery.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}

/// One by one.
pub(crate) async fn one_by_one(job: &Job) -> Result<Ran, Failed> {
    let (_connection, channel) = connect(job).await?;
    declare(&channel, job).await?;
    let payload = payload(job.size);
    let persistent = BasicProperties::default().with_delivery_mode(2);
    let meter = Meter::start();
    for _ in 0..job.n {
        let options = BasicPublishOptions::default();
        let publish =
            channel.basic_publish("".into(), job.topic.as_str().into(), options, &payload, persistent.clone());
        publish.await?.await?;
    }
    let send = meter.stop();
    let meter = Meter::start();
    let mut consumer = consume(&channel, job, 1).await?;
    for _ in 0..job.n {
        next(&mut consumer).await?.ack(BasicAckOptions::default()).await?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
