//! A producer whose sends are written into the record of the test.

use crate::{Check, Doing, History, TestFailure};
use mq_api::{Message, Producer, ProducerExt, Receipt, SendResult};
use std::sync::Arc;
use std::time::Duration;

/// A producer of one topic.
#[derive(Clone)]
pub struct Sender {
    producer: Arc<dyn Producer>,
    history: History,
}

impl Sender {
    pub(crate) fn new(producer: Arc<dyn Producer>, history: History) -> Self {
        Self { producer, history }
    }

    /// The producer itself.
    pub fn producer(&self) -> &Arc<dyn Producer> {
        &self.producer
    }

    /// Sends a message with this payload; it has to be confirmed.
    ///
    /// # Errors
    /// Why it was not.
    pub async fn send(&self, label: &str) -> Check<Receipt> {
        self.send_message(Message::new(label.to_owned())).await
    }

    /// Sends a message with this key and payload; it has to be confirmed.
    ///
    /// # Errors
    /// Why it was not.
    pub async fn send_keyed(&self, key: &str, label: &str) -> Check<Receipt> {
        self.send_message(Message::new(label.to_owned()).key(key.to_owned())).await
    }

    /// Sends any message; it has to be confirmed.
    ///
    /// # Errors
    /// Why it was not.
    pub async fn send_message(&self, message: Message) -> Check<Receipt> {
        let label = label_of(&message);
        self.try_send(message).await.doing(format_args!("sending {label}"))
    }

    /// Sends any message.
    pub async fn try_send(&self, message: Message) -> SendResult {
        let label = label_of(&message);
        self.history.note(format_args!("send {label}"));
        let result = self.producer.send(message).await;
        self.note_result(&label, &result);
        result
    }

    /// Sends any message within a limit.
    pub async fn try_send_within(&self, message: Message, limit: Duration) -> SendResult {
        let label = label_of(&message);
        self.history.note(format_args!("send {label} within {limit:?}"));
        let result = self.producer.send_timeout(message, limit).await;
        self.note_result(&label, &result);
        result
    }

    fn note_result(&self, label: &str, result: &SendResult) {
        match result {
            Ok(receipt) => {
                self.history.note(format_args!("sent {label}: {:?} {:?}", receipt.partition, receipt.position))
            }
            Err(e) => self.history.note(format_args!("send of {label} failed: {e} [{:?} {:?}]", e.kind(), e.outcome())),
        }
    }

    /// Sends `m0`, `m1`, … without key; all have to be confirmed. Returns their labels.
    ///
    /// # Errors
    /// The first that was not confirmed.
    pub async fn send_numbered(&self, n: usize) -> Check<Vec<String>> {
        let labels: Vec<String> = (0..n).map(|i| format!("m{i}")).collect();
        self.send_all(labels.iter().map(|l| Message::new(l.clone())).collect()).await?;
        Ok(labels)
    }

    /// Sends many at once; all have to be confirmed.
    ///
    /// # Errors
    /// The first that was not confirmed.
    pub async fn send_all(&self, messages: Vec<Message>) -> Check {
        let labels: Vec<_> = messages.iter().map(label_of).collect();
        let results = self.producer.send_all(messages).await;
        if results.len() != labels.len() {
            return Err(TestFailure::new(format!("{} results for {} messages", results.len(), labels.len())));
        }
        for (label, result) in labels.iter().zip(results) {
            self.note_result(label, &result);
            result.doing(format_args!("sending {label}"))?;
        }
        Ok(())
    }
}

fn label_of(message: &Message) -> String {
    let mut label = String::from_utf8_lossy(message.payload_bytes()).into_owned();
    if label.len() > 40 {
        label = format!("a message of {} bytes", message.size());
    }
    label
}
