//! RabbitMQ by lapin with the promise that anymq gives, written for this one purpose: persistent and mandatory to a durable
//! topic exchange, every message with an id, a timestamp and the private number by which a returned one is known, each with
//! its own result; sending and receiving on connections of their own; messages are owned by what is received and decoded.

use std::collections::VecDeque;
use std::time::SystemTime;

use lapin::options::{BasicAckOptions, BasicPublishOptions, ExchangeDeclareOptions, QueueBindOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Confirmation, ExchangeKind};

use crate::amqp_bare::{connect, consume, declare, next};
use crate::job::{BATCH, FLYING, Failed, Job, Ran, payload};
use crate::meter::Meter;

/// What anymq writes beside the payload.
fn properties(number: u64, prefix: u64) -> BasicProperties {
    let mut headers = FieldTable::default();
    headers.insert("x-mq-n".into(), AMQPValue::LongLongInt(i64::try_from(number).unwrap_or(0)));
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let millis = i64::try_from(since.as_millis()).unwrap_or(0);
    headers.insert("x-mq-ms".into(), AMQPValue::LongLongInt(millis));
    BasicProperties::default()
        .with_delivery_mode(2)
        .with_message_id(format!("{prefix:016x}{number:016x}").into())
        .with_timestamp(since.as_secs())
        .with_headers(headers)
}

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let (_connection, channel) = connect(job).await?;
    declare(&channel, job).await?;
    let exchange = format!("{}-exchange", job.topic);
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let none = FieldTable::default;
    channel.exchange_declare(exchange.as_str().into(), ExchangeKind::Topic, durable, none()).await?;
    let bind = QueueBindOptions::default();
    channel.queue_bind(job.topic.as_str().into(), exchange.as_str().into(), "#".into(), bind, none()).await?;
    let payload = payload(job.size);
    let prefix = u64::from(std::process::id()) | 1 << 63;

    let meter = Meter::start();
    let mut flying = VecDeque::new();
    let confirmed = |confirmation| match confirmation {
        Confirmation::Ack(None) => Ok(()),
        other => Err(Failed::from(format!("not confirmed: {other:?}"))),
    };
    for number in 0..job.n {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let properties = properties(number as u64, prefix);
        let publish = channel.basic_publish(exchange.as_str().into(), "m".into(), options, &payload, properties);
        flying.push_back(publish.await?);
        if flying.len() == FLYING * BATCH {
            for confirm in flying.drain(..BATCH) {
                confirmed(confirm.await?)?;
            }
        }
    }
    for confirm in flying {
        confirmed(confirm.await?)?;
    }
    let send = meter.stop();

    let (_reading, channel) = connect(job).await?;
    let meter = Meter::start();
    let mut consumer = consume(&channel, job, 2 * BATCH).await?;
    for got in 1..=job.n {
        let delivery = next(&mut consumer).await?;
        let id = delivery.properties.message_id().as_ref().map(|id| u128::from_str_radix(id.as_str(), 16));
        if !matches!(id, Some(Ok(_))) || delivery.data.len() != job.size {
            return Err("a message that is not ours".into());
        }
        if got % BATCH == 0 || got == job.n {
            delivery.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
