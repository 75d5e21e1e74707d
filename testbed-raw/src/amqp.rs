//! RabbitMQ through lapin: a durable quorum queue, mandatory publishing with confirms, one connection per process.

use std::time::Duration;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Consumer};
use mq_testbed::client::{Order, id_in};
use mq_testbed::history::{Sent, Settled};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::roles::{Failed, Got, Raw, Receiver, Sender};

/// An answer that takes longer than this does not come.
const ANSWER: Duration = Duration::from_secs(3);

/// A consumer that hears nothing for this long asks whether the queue is still there.
const SILENCE: Duration = Duration::from_secs(1);

pub(crate) struct Amqp {
    order: Order,
    runtime: Runtime,
}

/// Puts a time limit and words to a call.
async fn within<T>(what: &str, call: impl Future<Output = lapin::Result<T>>) -> Result<T, String> {
    match timeout(ANSWER, call).await {
        Ok(answer) => answer.map_err(|error| format!("{what}: {error}")),
        Err(_) => Err(format!("{what}: no answer within {ANSWER:?}")),
    }
}

impl Amqp {
    pub(crate) fn new(order: &Order) -> Result<Self, String> {
        // One worker thread of its own, which keeps the heartbeats going while the program works.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Self { order: order.clone(), runtime: runtime.map_err(|error| error.to_string())? })
    }

    async fn connect(&self) -> Result<(Connection, Channel), String> {
        let url = format!("{}?heartbeat=2", self.order.url);
        let connection = within("connect", Connection::connect(&url, ConnectionProperties::default())).await?;
        let channel = within("open a channel", connection.create_channel()).await?;
        Ok((connection, channel))
    }

    fn queue(&self) -> String {
        format!("{}.{}", self.order.topic, self.order.group)
    }
}

async fn declare(channel: &Channel, queue: &str) -> Result<(), String> {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    within("declare", channel.queue_declare(queue.into(), options, arguments)).await.map(|_| ())
}

impl Raw for Amqp {
    fn prepare(&self) -> Result<(), String> {
        self.runtime.block_on(async {
            let (_connection, channel) = self.connect().await?;
            declare(&channel, &self.queue()).await
        })
    }

    fn sender(&self) -> Result<Box<dyn Sender>, String> {
        let (connection, channel) = self.runtime.block_on(async {
            let (connection, channel) = self.connect().await?;
            // A queue that was destroyed is declared again by the members alone, who so know of it: until then publishes
            // come back.
            within("ask for confirms", channel.confirm_select(ConfirmSelectOptions::default())).await?;
            Ok::<_, String>((connection, channel))
        })?;
        let handle = self.runtime.handle().clone();
        Ok(Box::new(Publisher { handle, _connection: connection, channel, queue: self.queue() }))
    }

    fn receiver(&self) -> Result<Box<dyn Receiver>, String> {
        let (connection, channel, consumer, was_gone) = self.runtime.block_on(async {
            let (connection, channel) = self.connect().await?;
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let there = channel.queue_declare(self.queue().into(), passive, FieldTable::default());
            let missing = |words: &String| words.contains("NOT_FOUND");
            let was_gone = within("look for the queue", there).await.is_err_and(|words| missing(&words));
            let (connection, channel) = if was_gone {
                // The failed look closed the channel; a fresh connection is the plainest way on.
                let (connection, channel) = self.connect().await?;
                declare(&channel, &self.queue()).await?;
                (connection, channel)
            } else {
                (connection, channel)
            };
            within("set the prefetch", channel.basic_qos(10, BasicQosOptions::default())).await?;
            let options = BasicConsumeOptions::default();
            let name = self.order.name.as_str().into();
            let consumer = channel.basic_consume(self.queue().into(), name, options, FieldTable::default());
            let consumer = within("consume", consumer).await?;
            Ok::<_, String>((connection, channel, consumer, was_gone))
        })?;
        let handle = self.runtime.handle().clone();
        let queue = self.queue();
        Ok(Box::new(Subscriber { handle, _connection: connection, channel, consumer, queue, in_hand: None, was_gone }))
    }

    fn remaining(&self) -> Result<Vec<String>, String> {
        self.runtime.block_on(async {
            let (_connection, channel) = self.connect().await?;
            let mut found = Vec::new();
            // Left unacked, so that they are back when this connection ends.
            while let Some(got) =
                within("get", channel.basic_get(self.queue().into(), BasicGetOptions::default())).await?
            {
                found.push(id_in(&got.delivery.data));
            }
            Ok(found)
        })
    }

    fn destroy(&self) -> Result<(), String> {
        self.runtime.block_on(async {
            let (_connection, channel) = self.connect().await?;
            within("delete", channel.queue_delete(self.queue().into(), QueueDeleteOptions::default())).await.map(|_| ())
        })
    }
}

struct Publisher {
    handle: tokio::runtime::Handle,
    _connection: Connection,
    channel: Channel,
    queue: String,
}

impl Sender for Publisher {
    fn send(&mut self, _: &str, payload: &[u8]) -> Result<(), Failed> {
        // Mandatory: without it, a message for a queue that is gone is confirmed and thrown away.
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        // Persistent.
        let properties = BasicProperties::default().with_delivery_mode(2);
        let confirmation = self.handle.block_on(async {
            let published =
                self.channel.basic_publish("".into(), self.queue.as_str().into(), options, payload, properties);
            let confirm = within("publish", published).await?;
            within("confirm", confirm).await
        });
        match confirmation {
            Ok(Confirmation::Ack(None)) => Ok(()),
            // Returned: no queue took it.
            Ok(Confirmation::Ack(Some(_))) => {
                Err(Failed { outcome: Sent::Rejected, words: "the queue is gone".into() })
            }
            Ok(other) => Err(Failed { outcome: Sent::Unknown, words: format!("{other:?}") }),
            Err(words) => Err(Failed { outcome: Sent::Unknown, words }),
        }
    }
}

struct Subscriber {
    handle: tokio::runtime::Handle,
    _connection: Connection,
    channel: Channel,
    consumer: Consumer,
    queue: String,
    in_hand: Option<Delivery>,
    was_gone: bool,
}

impl Receiver for Subscriber {
    fn receive(&mut self) -> Result<Vec<Got>, String> {
        let next = self.handle.block_on(async { timeout(SILENCE, self.consumer.next()).await });
        match next {
            Ok(Some(Ok(delivery))) => {
                let id = id_in(&delivery.data);
                self.in_hand = Some(delivery);
                Ok(vec![Got { id, place: None, ours_until: None }])
            }
            Ok(Some(Err(error))) => Err(error.to_string()),
            // The queue was deleted, or the connection lost.
            Ok(None) => Err("the consumer was cancelled".into()),
            Err(_) => {
                let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
                let there = self.channel.queue_declare(self.queue.as_str().into(), passive, FieldTable::default());
                self.handle.block_on(within("look for the queue", there))?;
                Ok(Vec::new())
            }
        }
    }

    fn ack(&mut self, _: &Got) -> Result<Settled, String> {
        let Some(delivery) = self.in_hand.take() else { return Ok(Settled::Stale) };
        match self.handle.block_on(within("ack", delivery.ack(BasicAckOptions::default()))) {
            // RabbitMQ never answers an ack.
            Ok(_) => Ok(Settled::Sent),
            Err(words) => Err(words),
        }
    }

    fn found_destroyed(&mut self) -> bool {
        std::mem::take(&mut self.was_gone)
    }
}
