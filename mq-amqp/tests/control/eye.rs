//! Another program, which sees the queues of a group.

use super::Rabbit;
use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use std::time::{Duration, Instant};

/// Another program, which sees the queues.
pub(crate) struct Eye {
    raw: lapin::Connection,
}

impl Eye {
    pub(crate) async fn of(rabbit: &Rabbit) -> Self {
        Self { raw: rabbit.raw().await.0 }
    }

    /// What is ready in a queue; `None` if there is none.
    pub(crate) async fn waiting(&self, queue: &str) -> Option<u32> {
        let channel = self.raw.create_channel().await.unwrap();
        let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let found = channel.queue_declare(queue.into(), look, FieldTable::default()).await.ok()?;
        channel.close(200, "OK".into()).await.unwrap();
        Some(found.message_count())
    }

    pub(crate) async fn becomes(&self, queue: &str, wanted: Option<u32>, limit: Duration) {
        let began = Instant::now();
        while self.waiting(queue).await != wanted {
            assert!(began.elapsed() < limit, "'{queue}' has {:?}, not {wanted:?}", self.waiting(queue).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn delete(&self, queue: &str) {
        let channel = self.raw.create_channel().await.unwrap();
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
        channel.close(200, "OK".into()).await.unwrap();
    }

    /// No queue of the group holds anything.
    pub(crate) async fn nothing_left(&self, queue: &str) {
        let lengths = [1_000, 5_000, 30_000].map(|ms| [format!("..retry..{ms}"), format!("..step..{ms}")]);
        let others = ["", "..alone", "..steps", "..dlq"].map(str::to_owned);
        for suffix in lengths.into_iter().flatten().chain(others) {
            let waiting = self.waiting(&format!("{queue}{suffix}")).await;
            assert!(matches!(waiting, None | Some(0)), "'{queue}{suffix}' has {waiting:?}");
        }
    }
}

/// Puts one there that is due after this time.
pub(crate) async fn between(channel: &lapin::Channel, queue: &str, body: &str, after: Duration) {
    let mut headers = FieldTable::default();
    let due = std::time::SystemTime::now() + after;
    let due = due.duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
    headers.insert("x-mq-due".into(), AMQPValue::LongLongInt(due));
    let properties = lapin::BasicProperties::default().with_headers(headers);
    let sent =
        channel.basic_publish("".into(), queue.into(), BasicPublishOptions::default(), body.as_bytes(), properties);
    sent.await.unwrap().await.unwrap();
}
