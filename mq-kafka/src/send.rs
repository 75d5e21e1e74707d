//! Sending: one idempotent producer per outbox. Messages are handed to librdkafka in the order of the outbox, which keeps the
//! order of a partition through its own retries; reports come back in batches on a thread of their own.
//!
//! Handing over is on a thread too, since it ends with a flush: while little is under way, what was taken from the outbox together
//! goes out together and at once. Without the flush an awaited send waits for `linger.ms`; without the linger librdkafka begins a
//! request with the first message that it sees, which costs a stream of messages twice the processor time.

use crate::client::{self, Ctx};
use crate::delay;
use crate::driver::{or_panicked, spawn};
use crate::ffi;
use crate::relay::Relay;
use crate::reports::{Down, Odd, Reader, refused};
use crate::spread::Spread;
use crate::topology::{Cluster, LARGEST, Wanted};
use crate::url::native_options;
use crate::{fault, group, wire};
use mq_api::{Durability, Envelope, Error, ErrorKind, Outcome, Provisioning, Result, Start};
use mq_core::{End, Outbox, Outgoing, Purpose, Run, Stop, Target, TxSession};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::OwnedHeaders;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer, PurgeConfig};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Taken from the outbox at a time: more only waits inside librdkafka.
const TAKE: usize = 1_000;
const TAKE_BYTES: usize = 8 << 20;
/// With more under way there is a stream, which need not reach every partition at once, see `spread.rs`.
const FEW: usize = 1_000;
/// With more under way, a few milliseconds fill large requests and cost no rate; with fewer, somebody waits for them. Far below
/// `FEW`: a flush holds the next hand-over up, and what is flushed at a thousand goes out in small requests to all partitions.
/// Measured with 100,000 a second: 136 ms at the median with a flush up to a thousand, 11 ms with this.
const SINGLE: usize = 50;
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
        Purpose::Relay(sub) => Some(Relay::new(sub)?),
    };
    let anew = Arc::new(Notify::new());
    let writer = Writer {
        cluster,
        level,
        topic: spec.topic.as_str().to_owned(),
        max_message: if relay.is_some() { LARGEST } else { spec.max_message },
        retry_for: spec.retry_for,
        native,
        outbox: tx.outbox.clone(),
        stop: tx.stop.clone(),
        makes: relay.as_ref().map_or(spec.provisioning == Provisioning::Create, |relay| relay.makes),
        relay,
        anew: anew.clone(),
        open: None,
    };
    // The program's producer is made at once, so that wrong properties fail now. A relay's when it is first needed: most
    // subscriptions never dead-letter.
    let writer = match &tx.purpose {
        Purpose::Producer => writer.opened().await?,
        Purpose::Relay(_) => writer,
    };
    let (threads, handle) = (writer.cluster.threads.clone(), tx.env.handle().clone());
    let (ended, _) = spawn(&threads, "anymq-kafka-wr", move || Ok(handle.block_on(run(writer, tx, anew))))?;
    Ok(Box::pin(async move { or_panicked("writing", ended.await) }))
}

async fn run(mut writer: Writer, tx: TxSession, anew: Arc<Notify>) -> End {
    let mut batch = Vec::new();
    loop {
        // While no broker can be reached nothing is handed to librdkafka, so that it is known not to be written.
        if let Some(why) = writer.down() {
            tx.unreachable(Some(&why));
            tokio::select! { biased;
                () = tx.stop.cancelled() => break,
                () = writer.await_up() => {}
            }
            if writer.down().is_none() {
                tx.unreachable(None);
            }
            continue;
        }
        tokio::select! { biased;
            () = tx.stop.cancelled() => break,
            () = anew.notified() => {
                let why = writer.open.as_ref().and_then(|o| o.producer.client().fatal_error());
                let text = why.map_or_else(|| "a topic is gone".to_owned(), |(_, text)| text);
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
        let waited_for = before == 0 || before + batch.len() <= SINGLE;
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
            && waited_for
        {
            ffi::flush(open.producer.client(), FLUSH);
        }
    }
    writer.close().await;
    End::Closed
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
    /// Whether a topic that is gone is made again.
    makes: bool,
    /// Told when the producer has to be made anew.
    anew: Arc<Notify>,
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
        let (level, outbox, anew) = (self.level, self.outbox.clone(), self.anew.clone());
        let (topic, makes) = (self.topic.clone(), self.makes);
        let gathers = client::says_linger(&self.cluster.settings, &self.native);
        let open = self.cluster.blocking(move |_| {
            let made =
                config.create_with_context(Ctx::default()).map_err(|e| fault::error("making the producer", e))?;
            let producer: Arc<BaseProducer<Ctx, Spread>> = Arc::new(made);
            // Connected and told where the partitions are: else the first send waits for both. Twice, since the first answer
            // comes from a host of the URL, and ends that connection once it has named the brokers; the second comes from a
            // broker, which is then asked for the producer's number. Else librdkafka asks for that 500 ms later.
            for _ in 0..2 {
                if let Err(error) = producer.client().fetch_metadata(Some(&topic), Duration::from_secs(2)) {
                    tracing::debug!(%error, topic, "before the first send");
                    break;
                }
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
                anew,
                topic,
                makes,
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

    /// Why no broker can be reached, if so.
    fn down(&self) -> Option<String> {
        let down = &self.open.as_ref()?.down;
        down.is.load(Ordering::Acquire).then(|| down.why())
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
            Ok(()) => open.down.is_over(),
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
                let topic = relay.retry(&self.cluster, *after).await?;
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
                if let Some(relay) = &self.relay {
                    relay.letters(&self.cluster, &topic).await?;
                }
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
                    let gone = self.makes && fault::is_gone(code);
                    if gone || code == Code::Fatal {
                        self.anew.notify_one();
                    }
                    open.odd.take(outgoing.ticket);
                    return Err(refused(&place.topic, code, Outcome::NotSent, gone));
                }
            }
        }
    }
}

fn no_relay() -> Error {
    Error::new(ErrorKind::Other, "nothing to write with").with_outcome(Outcome::NotSent)
}
