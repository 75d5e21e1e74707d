//! Whether a stream that is read again is the one that was read before. One that was deleted and made again while its reader was
//! away has the same name and places from 0 on, and a reader that goes on at its old place waits for what comes there: what is
//! before it is never heard of. So a reader begins again with the last message that it saw. Where another is in its place, it is
//! another stream; and where nothing comes at all, though the stream has something to read, that place does not exist in it.

use crate::connect::{Connections, Role, within};
use crate::topology::short;
use futures_util::stream::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use mq_api::{Message, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// What is there comes at once. After so long without it the stream is asked whether it has anything.
const SILENT: Duration = Duration::from_secs(2);
/// Longest wait for an answer to that.
const ASKED: Duration = Duration::from_secs(4);

/// The last message that a reader saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) offset: u64,
    print: u64,
}

impl Mark {
    pub(crate) fn new(offset: u64, message: &Message) -> Self {
        let mut hasher = std::hash::DefaultHasher::new();
        (&message.id, &message.key, &message.payload).hash(&mut hasher);
        Self { offset, print: hasher.finish() }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Read {
    /// How often it was made again.
    made: u32,
    last: Option<Mark>,
}

/// What the readers of one client know of their streams, by the number of the reader.
#[derive(Debug, Clone, Default)]
pub(crate) struct Streams(Arc<Mutex<BTreeMap<u64, Read>>>);

impl Streams {
    /// Which of the streams that followed each other this reader reads now, `None` for the first, and what it saw last of it.
    /// `again`: one more was made.
    pub(crate) fn attached(&self, reader: u64, again: bool) -> (Option<u32>, Option<Mark>) {
        let mut streams = self.0.lock();
        if again {
            let read = streams.entry(reader).or_default();
            *read = Read { made: read.made + 1, last: None };
        }
        let read = streams.get(&reader).copied().unwrap_or_default();
        ((read.made > 0).then_some(read.made), read.last)
    }

    /// It saw this.
    pub(crate) fn saw(&self, reader: u64, mark: Mark) {
        self.0.lock().entry(reader).or_default().last = Some(mark);
    }
}

/// The doubt of a reader that came back, until the first message dispels it.
pub(crate) struct Doubt {
    connections: Arc<Connections>,
    stream: String,
    next: Instant,
}

impl Doubt {
    pub(crate) fn new(connections: Arc<Connections>, stream: String) -> Self {
        Self { connections, stream, next: Instant::now() + SILENT }
    }

    /// Ready when the stream has something to read and nothing at the reader's place: drop it when anything came there.
    pub(crate) async fn confirmed(doubt: &mut Option<Self>) {
        let Some(it) = doubt else { return std::future::pending().await };
        loop {
            tokio::time::sleep_until(it.next).await;
            // What goes wrong here goes wrong for the reader too, sooner or later.
            let has_something = it.has_something().await.unwrap_or(false);
            it.next = Instant::now() + SILENT;
            if has_something {
                // The server is well, and what it has at our place would have been first.
                tokio::time::sleep(SILENT).await;
                return;
            }
        }
    }

    async fn has_something(&self) -> Result<bool> {
        let channel = self.connections.channel(Role::Consume).await?;
        within(ASKED, "set the prefetch", channel.basic_qos(1, BasicQosOptions { global: false })).await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-stream-offset".into(), AMQPValue::LongString("first".into()));
        let consume = channel.basic_consume(short(&self.stream)?, "".into(), BasicConsumeOptions::default(), arguments);
        let mut consumer = within(ASKED, "look into the stream", consume).await?;
        let got = tokio::time::timeout(ASKED, consumer.next()).await;
        let _ = within(ASKED, "close a channel", channel.close(200, "OK".into())).await;
        Ok(matches!(got, Ok(Some(Ok(_)))))
    }
}
