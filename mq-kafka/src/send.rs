//! Sending: one idempotent producer per outbox. Messages are handed to librdkafka in the order of the outbox, which keeps the
//! order of a partition through its own retries; reports come back in batches on a thread of their own.
//!
//! Handing over is on a thread too, since it ends with a flush: while little is under way, what was taken from the outbox together
//! goes out together and at once. Without the flush an awaited send waits for `linger.ms`; without the linger librdkafka begins a
//! request with the first message that it sees, which costs a stream of messages twice the processor time.

use crate::client::{self, Ctx};
use crate::delay::{self, RetryTopics};
use crate::driver::{or_panicked, spawn};
use crate::ffi;
use crate::reports::{Down, Odd, Reader};
use crate::spread::Spread;
use crate::topology::{Cluster, LARGEST, Wanted};
use crate::url::native_options;
use crate::{fault, group, wire};
use mq_api::{Durability, Envelope, Error, ErrorKind, Outcome, Provisioning, Result, Start};
use mq_core::{End, Outbox, Outgoing, Purpose, Run, Stop, Target, TxSession};
use parking_lot::Mutex;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::OwnedHeaders;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer, PurgeConfig};
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Taken from the outbox at a time: more only waits inside librdkafka.
const TAKE: usize = 1_000;
const TAKE_BYTES: usize = 8 << 20;
/// With more under way, a few milliseconds fill large requests and cost no rate; with fewer, somebody waits for them.
const FEW: usize = 1_000;
/// A flush ends when everything was answered. What is slower than this goes on while the next messages are handed over;
/// librdkafka counts in milliseconds.
const FLUSH: Duration = Duration::from_millis(1);

/// Opens a producer's session.
pub(crate) async fn open(cluster: Arc<Cluster>, level: Durability, tx: TxSession) -> Result<Run> {
    let spec = tx.spec.clone();
    let native = native_options(&spec.native)?;
    let relay = match &tx.purpose {
        Purpose::Producer => {
            let spec = spec.clone();
            let group_native = native.clone();
            cluster
                .blocking(move |cluster| {
                    let topic = Wanted::topic(
                        &cluster.settings,
                        spec.topic.as_str(),
                        spec.partitions,
                        spec.retention,
                        spec.max_message,
                    )?;
                    cluster.provision(&[topic], spec.provisioning)?;
                    if spec.provisioning == Provisioning::None {
                        return Ok(());
                    }
                    spec.groups.iter().try_for_each(|g| {
                        group::begin(
                            cluster,
                            spec.topic.as_str(),
                            &group::group_id(&spec.topic, g),
                            Start::Oldest,
                            spec.provisioning,
                            &group_native,
                        )
                    })
                })
                .await?;
            None
        }
        Purpose::Relay(sub) => {
            let Some(group) = sub.group_name() else {
                return Err(Error::new(ErrorKind::Other, "a relay without group"));
            };
            Some(Relay {
                retries: RetryTopics::new(&sub.topic, group),
                provisioning: sub.provisioning,
                made: Mutex::default(),
            })
        }
    };
    let fatal = Arc::new(Notify::new());
    let writer = Writer {
        cluster,
        level,
        topic: spec.topic.as_str().to_owned(),
        max_message: if relay.is_some() { LARGEST } else { spec.max_message },
        retry_for: spec.retry_for,
        native,
        outbox: tx.outbox.clone(),
        stop: tx.stop.clone(),
        relay,
        fatal: fatal.clone(),
        open: None,
    };
    // The program's producer is made at once, so that wrong properties fail now. A relay's when it is first needed: most
    // subscriptions never dead-letter.
    let writer = match &tx.purpose {
        Purpose::Producer => writer.opened().await?,
        Purpose::Relay(_) => writer,
    };
    let (threads, handle) = (writer.cluster.threads.clone(), tx.env.handle().clone());
    let (ended, _) = spawn(&threads, "anymq-kafka-wr", move || Ok(handle.block_on(run(writer, tx, fatal))))?;
    Ok(Box::pin(async move { or_panicked("writing", ended.await) }))
}

async fn run(mut writer: Writer, tx: TxSession, fatal: Arc<Notify>) -> End {
    let mut batch = Vec::new();
    loop {
        // While no broker can be reached nothing is handed to librdkafka, so that it is known not to be written.
        if writer.is_down() {
            tokio::select! { biased;
                () = tx.stop.cancelled() => break,
                () = writer.await_up() => {}
            }
            continue;
        }
        tokio::select! { biased;
            () = tx.stop.cancelled() => break,
            () = fatal.notified() => {
                let why = writer.open.as_ref().and_then(|o| o.producer.client().fatal_error());
                let text = why.map_or_else(|| "the producer failed".to_owned(), |(_, text)| text);
                writer.close().await;
                return End::Lost(Error::new(ErrorKind::Disconnected, format!("the producer has to be made anew: {text}")));
            }
            () = writer.went_down() => continue,
            () = tx.outbox.take(TAKE, TAKE_BYTES, &mut batch) => {}
        }
        if writer.open.is_none() {
            writer = match writer.opened().await {
                Ok(writer) => writer,
                Err(error) => return End::Lost(error),
            };
        }
        let before = writer.unanswered();
        let few = before == 0 || before + batch.len() <= FEW;
        if let Some(open) = &writer.open {
            open.producer.context().spread().begin(few);
        }
        for outgoing in batch.drain(..) {
            if let Err(failed) = writer.write(&outgoing).await {
                tx.outbox.complete([(outgoing.ticket, Err(failed))]);
            }
        }
        if let Some(open) = &writer.open
            && !open.gathers
            && few
        {
            ffi::flush(open.producer.client(), FLUSH);
        }
    }
    writer.close().await;
    End::Closed
}

struct Relay {
    retries: RetryTopics,
    provisioning: Provisioning,
    /// Retry topics that were seen to exist.
    made: Mutex<HashSet<String>>,
}

struct Writer {
    cluster: Arc<Cluster>,
    level: Durability,
    topic: String,
    max_message: usize,
    retry_for: Duration,
    native: Vec<(String, String)>,
    outbox: Arc<Outbox>,
    stop: Stop,
    relay: Option<Relay>,
    fatal: Arc<Notify>,
    open: Option<Open>,
}

struct Open {
    producer: Arc<BaseProducer<Ctx, Spread>>,
    /// Whether a property of the user's says how long messages gather: then that is kept to.
    gathers: bool,
    odd: Arc<Odd>,
    down: Arc<Down>,
    stop: EndsReader,
    thread: std::thread::JoinHandle<()>,
}

/// Ends the thread that reads reports, whatever ends the one that writes.
struct EndsReader(Arc<AtomicBool>);

impl Drop for EndsReader {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A message as it goes out.
struct Place<'w> {
    topic: Cow<'w, str>,
    headers: OwnedHeaders,
    stamp: i64,
    now: i64,
}

impl Writer {
    /// Makes the producer: off the runtime, since it reads certificates and starts threads.
    async fn opened(mut self) -> Result<Self> {
        let config = client::producer(&self.cluster.settings, self.max_message, self.retry_for, &self.native);
        let (level, outbox, fatal) = (self.level, self.outbox.clone(), self.fatal.clone());
        let topic = self.topic.clone();
        let gathers = client::says_linger(&self.cluster.settings, &self.native);
        let open = self.cluster.blocking(move |_| {
            let made =
                config.create_with_context(Ctx::default()).map_err(|e| fault::error("making the producer", e))?;
            let producer: Arc<BaseProducer<Ctx, Spread>> = Arc::new(made);
            // Connected and told where the partitions are: else the first send waits for both.
            if let Err(error) = producer.client().fetch_metadata(Some(&topic), Duration::from_secs(2)) {
                tracing::debug!(%error, topic, "before the first send");
            }
            let stop = Arc::new(AtomicBool::new(false));
            let down = Arc::new(Down::default());
            let odd = Arc::new(Odd::default());
            let reader = Reader {
                odd: odd.clone(),
                producer: producer.clone(),
                down: down.clone(),
                stop: stop.clone(),
                outbox,
                level,
                fatal,
                topic,
            };
            let thread = std::thread::Builder::new().name("anymq-kafka-tx".to_owned()).spawn(move || reader.run());
            let thread =
                thread.map_err(|e| Error::new(ErrorKind::Other, "no thread for the producer").with_source(e))?;
            Ok(Open { producer, gathers, odd, down, stop: EndsReader(stop), thread })
        });
        self.open = Some(open.await?);
        Ok(self)
    }

    /// How many messages librdkafka holds, written or not.
    fn unanswered(&self) -> usize {
        self.open.as_ref().map_or(0, |open| usize::try_from(open.producer.in_flight_count()).unwrap_or_default())
    }

    fn is_down(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.down.is.load(Ordering::Acquire))
    }

    async fn went_down(&self) {
        match &self.open {
            Some(open) => open.down.changed.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Asks until a broker answers: librdkafka connects only when there is something to do.
    async fn await_up(&self) {
        let Some(open) = &self.open else { return };
        let (producer, topic) = (open.producer.clone(), self.topic.clone());
        let asked = self.cluster.blocking(move |cluster| {
            let client = producer.client();
            match client.fetch_metadata(Some(&topic), Duration::from_millis(500)) {
                Ok(_) => {
                    client.context().is_up();
                    Ok(())
                }
                Err(error) => {
                    client.context().remind(client, &cluster.settings.brokers);
                    Err(fault::error("looking whether the broker is back", error))
                }
            }
        });
        match asked.await {
            Ok(()) => open.down.is.store(false, Ordering::Release),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }

    async fn close(&mut self) {
        let Some(Open { producer, stop, thread, .. }) = self.open.take() else { return };
        drop(stop);
        // What is still open was counted as unknown; nothing of it may be written later.
        let closed = self.cluster.blocking(move |_| {
            producer.purge(PurgeConfig::default().queue().inflight());
            let ended = thread.join().is_ok();
            drop(producer);
            Ok(ended)
        });
        if let Err(error) = closed.await {
            tracing::debug!(%error, "closing a producer");
        }
    }

    /// Where a message goes, and as what.
    async fn place(&self, outgoing: &Outgoing) -> Result<Place<'_>> {
        let message = &outgoing.message;
        let stamp = message.timestamp.map_or(0, wire::millis);
        let now = wire::millis(self.cluster.env.wall());
        match &outgoing.target {
            Target::Topic => {
                Ok(Place { topic: self.topic.as_str().into(), headers: wire::headers(message, &[]), stamp, now })
            }
            Target::Retry { after, attempt, .. } => {
                let Some(relay) = &self.relay else { return Err(no_relay()) };
                let topic = relay.retries.of(*after);
                self.ensure(relay, topic).await?;
                let due = now.saturating_add(i64::try_from(after.as_millis()).unwrap_or(i64::MAX));
                let (due, attempt, stamp) = (due.to_string(), attempt.to_string(), stamp.to_string());
                let extra = [
                    (delay::DUE, due.as_bytes()),
                    (delay::ATTEMPT, attempt.as_bytes()),
                    (delay::STAMP, stamp.as_bytes()),
                ];
                Ok(Place { topic: topic.into(), headers: wire::headers(message, &extra), stamp: now, now })
            }
            Target::DeadLetter(envelope) => {
                let topic = format!("{}..{}..dlq", envelope.topic, envelope.group);
                let mut envelope: Envelope = (**envelope).clone();
                if envelope.partition.is_none() {
                    // It came by a retry topic: its place there says nothing of its source.
                    envelope.position = None;
                }
                let letter = envelope.dead_letter(message);
                let stamp = stamp.to_string();
                let extra = [(delay::STAMP, stamp.as_bytes())];
                Ok(Place { topic: topic.into(), headers: wire::headers(&letter, &extra), stamp: now, now })
            }
        }
    }

    /// Makes a retry topic at its first use.
    async fn ensure(&self, relay: &Relay, topic: &str) -> Result<()> {
        if relay.provisioning == Provisioning::None || relay.made.lock().contains(topic) {
            return Ok(());
        }
        let (wanted, how) = (Wanted::retries(topic.to_owned()), relay.provisioning);
        let made = self.cluster.blocking(move |cluster| cluster.provision(&[wanted], how)).await;
        made.map_err(|e| e.with_outcome(Outcome::NotSent))?;
        relay.made.lock().insert(topic.to_owned());
        Ok(())
    }

    async fn write(&self, outgoing: &Outgoing) -> Result<()> {
        let place = self.place(outgoing).await?;
        let Some(open) = &self.open else { return Err(no_relay()) };
        let message = &outgoing.message;
        let mut record: BaseRecord<'_, [u8], [u8], usize> =
            BaseRecord::with_opaque_to(&place.topic, outgoing.ticket as usize)
                .headers(place.headers)
                .timestamp(place.stamp);
        open.odd.note(outgoing.ticket, place.stamp, place.now);
        record.key = message.key.as_deref();
        record.payload = message.payload.as_deref();
        loop {
            match open.producer.send(record) {
                Ok(()) => return Ok(()),
                // Above our own window: only when a property made the queue small. It empties as reports come.
                Err((KafkaError::MessageProduction(Code::QueueFull), same)) => {
                    if self.stop.is_cancelled() {
                        // Nobody waits for it any more.
                        return Err(Error::closed("the producer"));
                    }
                    record = same;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err((error, _)) => {
                    let code = error.rdkafka_error_code().unwrap_or(Code::Fail);
                    if code == Code::Fatal {
                        self.fatal.notify_one();
                    }
                    open.odd.take(outgoing.ticket);
                    return Err(fault::send_error(&place.topic, code, Outcome::NotSent));
                }
            }
        }
    }
}

fn no_relay() -> Error {
    Error::new(ErrorKind::Other, "nothing to write with").with_outcome(Outcome::NotSent)
}
