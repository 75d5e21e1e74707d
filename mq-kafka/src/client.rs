//! The clients of librdkafka: their settings, each with its reason, and what they tell us by call-back.

use crate::spread::Spread;
use crate::url::Settings;
use crate::{fault, ffi};
use mq_api::{Error, ErrorKind};
use parking_lot::Mutex;
use rdkafka::client::{Client, ClientContext};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::producer::{DeliveryResult, ProducerContext};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Statistics, TopicPartitionList};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A change of the assignment that the driver has still to act on.
pub(crate) enum Change {
    Assign(TopicPartitionList),
    Revoke { list: TopicPartitionList, lost: bool },
}

#[derive(Default)]
struct Told {
    changes: Mutex<VecDeque<Change>>,
    refused: Mutex<Option<(ErrorKind, String)>>,
    down: Mutex<Option<String>>,
    /// A host of the URL that is none. That alone is no outage: there may be others.
    unresolved: Mutex<Option<String>>,
    driven: AtomicBool,
    /// When the brokers are named to it again, and the pause before that.
    reminder: Mutex<Option<(Instant, Duration)>>,
    /// A producer's.
    spread: Spread,
}

/// First and longest pause between two times that the brokers are named again. The first is well below what fetching may wait
/// for after a broker is back; and librdkafka, which remembers each time, should not have thousands to remember.
const REMIND: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// What a client tells by call-back. Nothing here blocks: the driver acts later, from its own loop.
#[derive(Clone, Default)]
pub(crate) struct Ctx(Arc<Told>);

impl Ctx {
    pub(crate) fn next_change(&self) -> Option<Change> {
        self.0.changes.lock().pop_front()
    }

    /// From now on somebody acts on changes of the assignment. Before that they are answered at once: one that is dropped
    /// before it was driven would wait for the answers for ever.
    pub(crate) fn drive(&self) {
        self.0.driven.store(true, Ordering::Release);
    }

    /// How it spreads what it sends.
    pub(crate) fn spread(&self) -> &Spread {
        &self.0.spread
    }

    /// From now on nobody does any more.
    pub(crate) fn close(&self) {
        self.0.driven.store(false, Ordering::Release);
    }

    /// Credentials, permissions or TLS that the broker refused.
    pub(crate) fn refused(&self) -> Option<Error> {
        let (kind, text) = self.0.refused.lock().clone()?;
        Some(Error::new(kind, text))
    }

    pub(crate) fn forget_refusal(&self) {
        *self.0.refused.lock() = None;
    }

    /// Why no broker can be reached, if so.
    pub(crate) fn down(&self) -> Option<String> {
        self.0.down.lock().clone()
    }

    /// The same, or which host is none: for one who was never connected.
    pub(crate) fn away(&self) -> Option<String> {
        self.down().or_else(|| self.0.unresolved.lock().clone())
    }

    pub(crate) fn is_up(&self) {
        *self.0.down.lock() = None;
        *self.0.reminder.lock() = None;
    }

    /// For each time that no broker could be reached: names them to the client again, now and then. An answer without brokers,
    /// which one that was just put out by its controller gives, makes librdkafka forget all it had, and it comes back to those it
    /// began with only if it does so after it forgot. Else it would look for a broker for ever.
    pub(crate) fn remind<C: ClientContext>(&self, client: &Client<C>, brokers: &str) {
        let now = Instant::now();
        let mut reminder = self.0.reminder.lock();
        let pause = match *reminder {
            None => REMIND.0,
            Some((at, _)) if now < at => return,
            Some((_, pause)) => {
                ffi::add_brokers(client, brokers);
                (pause * 2).min(REMIND.1)
            }
        };
        *reminder = Some((now + pause, pause));
    }
}

impl ClientContext for Ctx {
    fn log(&self, level: RDKafkaLogLevel, fac: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!(target: "librdkafka", fac, "{message}");
            }
            // An outage gives dozens a second; health says it once.
            RDKafkaLogLevel::Error | RDKafkaLogLevel::Warning | RDKafkaLogLevel::Notice => {
                tracing::debug!(target: "librdkafka", fac, "{message}");
            }
            _ => tracing::trace!(target: "librdkafka", fac, "{message}"),
        }
    }

    fn stats(&self, _: Statistics) {}

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", %error, "{reason}");
        let Some(code) = error.rdkafka_error_code() else { return };
        let kind = if refuses_by_alert(reason) { ErrorKind::Tls } else { fault::kind(code) };
        match kind {
            ErrorKind::Auth | ErrorKind::Tls | ErrorKind::Permission => {
                let code = if kind == ErrorKind::Tls { KafkaError::Global(Code::SSL) } else { error };
                let refusal = fault::error("the broker refused", code);
                *self.0.refused.lock() = Some((kind, format!("{} ({reason})", refusal.context())));
            }
            _ if code == Code::Resolve => *self.0.unresolved.lock() = Some(reason.to_owned()),
            _ if code == Code::AllBrokersDown => {
                let host = self.0.unresolved.lock().clone().map(|host| format!("; {host}")).unwrap_or_default();
                *self.0.down.lock() = Some(format!("{reason}{host}"));
            }
            _ => {}
        }
    }
}

/// A server that wants a client's certificate, or another one, says so by an alert after the handshake (TLS 1.3), which
/// librdkafka tells as a broken connection. Two alerts are no refusal: an error inside the server (80), and its end (90).
fn refuses_by_alert(reason: &str) -> bool {
    let Some((_, rest)) = reason.split_once("SSL alert number ") else { return false };
    let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
    !matches!(number.as_str(), "80" | "90")
}

impl ConsumerContext for Ctx {
    /// Only takes note. The assignment changes when the driver calls `incremental_assign` or `incremental_unassign`, so that
    /// what is in hand can be finished while other partitions flow.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, code: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let assigns = code == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        if !self.0.driven.load(Ordering::Acquire) {
            let _ = if assigns { consumer.incremental_assign(list) } else { consumer.incremental_unassign(list) };
            return;
        }
        let change = match assigns {
            true => Change::Assign(list.clone()),
            false => Change::Revoke { list: list.clone(), lost: consumer.assignment_lost() },
        };
        self.0.changes.lock().push_back(change);
    }
}

impl ProducerContext<Spread> for Ctx {
    type DeliveryOpaque = usize;

    fn get_custom_partitioner(&self) -> Option<&Spread> {
        Some(&self.0.spread)
    }

    /// Not used: reports are read in batches, see `send`.
    fn delivery(&self, _: &DeliveryResult<'_>, _: usize) {}
}

fn set_all(config: &mut ClientConfig, properties: &[(&str, &str)]) {
    for (name, value) in properties {
        config.set(*name, *value);
    }
}

/// What every client has.
pub(crate) fn base(settings: &Settings) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set_log_level(RDKafkaLogLevel::Warning);
    config.set("bootstrap.servers", &settings.brokers);
    set_all(
        &mut config,
        &[
            ("client.id", "anymq"),
            // Half-open connections are noticed by the kernel too.
            ("socket.keepalive.enable", "true"),
            // A request that is not answered within this ends its connection: that is how one whose peer is gone without a
            // word is noticed. Default 60 s, for which nothing would be fetched. No shorter, for a megabyte has to pass in
            // that time on a slow line too (100 kB/s), and a broker that collects garbage is not gone.
            ("socket.timeout.ms", "10000"),
            // A topic made by another program is seen within this time. Default 5 min.
            ("topic.metadata.refresh.interval.ms", "5000"),
            // Back within 2 s after the broker is. Default 10 s.
            ("reconnect.backoff.max.ms", "1000"),
            // A connection that cannot be made is tried again sooner. Default 30 s.
            ("socket.connection.setup.timeout.ms", "10000"),
        ],
    );
    let protocol = match (settings.tls, settings.user.is_some()) {
        (false, false) => "plaintext",
        (true, false) => "ssl",
        (false, true) => "sasl_plaintext",
        (true, true) => "sasl_ssl",
    };
    config.set("security.protocol", protocol);
    if let Some(user) = &settings.user {
        config.set("sasl.mechanisms", &settings.mechanism);
        config.set("sasl.username", user);
        config.set("sasl.password", settings.password.as_deref().unwrap_or_default());
    }
    for (name, value) in &settings.native {
        if !is_for_one_kind(name) {
            config.set(name, value);
        }
    }
    config
}

/// librdkafka warns of properties that are for the other kind of client.
fn is_for_one_kind(name: &str) -> bool {
    is_consumers(name) || is_producers(name)
}

fn is_consumers(name: &str) -> bool {
    name.starts_with("fetch.")
        || name.starts_with("queued.")
        || name.starts_with("group.")
        || name.starts_with("heartbeat.")
        || name == "check.crcs"
        || name == "max.partition.fetch.bytes"
}

fn is_producers(name: &str) -> bool {
    name.starts_with("queue.buffering.")
        || name.starts_with("compression.")
        || name.starts_with("linger.")
        || name.starts_with("batch.")
        || name.starts_with("sticky.")
        || matches!(name, "retry.backoff.ms" | "max.in.flight" | "request.timeout.ms")
}

/// A consumer: of a group, or of one of its own for broadcast and looking.
pub(crate) fn consumer(
    settings: &Settings,
    group: &str,
    lease: Duration,
    keyed: bool,
    native: &[(String, String)],
) -> ClientConfig {
    let mut config = base(settings);
    config.set("group.id", group);
    set_all(
        &mut config,
        &[
            // Commits carry metadata, are awaited and fenced: ours.
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            // The start of the subscription is resolved once and committed; this is for partitions added later.
            ("auto.offset.reset", "earliest"),
            // All that one answer brings: with the time-out above, half a megabyte a second is a line that works. Default
            // 50 MB. A larger message comes all the same.
            ("fetch.max.bytes", "4194304"),
            // A full queue is looked at again after this. Default 1000 ms, which stalls the consumer for a second.
            ("fetch.queue.backoff.ms", "20"),
            // What librdkafka holds beside our own bound, per partition; its default of 64 MB is per partition too.
            ("queued.max.messages.kbytes", "16384"),
            ("queued.min.messages", "10000"),
            ("enable.partition.eof", "false"),
            ("allow.auto.create.topics", "false"),
            ("check.crcs", "true"),
            ("isolation.level", "read_committed"),
        ],
    );
    let by_broker = settings.native.get("group.protocol").is_some_and(|p| p == "consumer");
    if !by_broker {
        let session = session(settings, lease);
        config.set("session.timeout.ms", session.as_millis().to_string());
        config.set("heartbeat.interval.ms", heartbeat(session).as_millis().to_string());
        config.set("partition.assignment.strategy", "cooperative-sticky");
        // The driver polls by itself, so this bounds only how long a partition may take to move, and how long a member hangs
        // whose line dies while it joins: the one request that has this time limit instead of the socket's.
        let limit = if keyed { KEYED_MOVE } else { MOVE };
        config.set("max.poll.interval.ms", session.max(limit).as_millis().to_string());
    }
    let set = settings.native.iter().filter(|(name, _)| is_consumers(name));
    for (name, value) in set.chain(native.iter().map(|(n, v)| (n, v))) {
        config.set(name, value);
    }
    config
}

/// Longest time that a partition may take to move: what is in hand may hold it back for 10 s, and requests take theirs.
const MOVE: Duration = Duration::from_secs(60);
/// Under `PerKey`, where what is in hand has to be handled first: librdkafka's default.
pub(crate) const KEYED_MOVE: Duration = Duration::from_secs(300);

/// The session of a lease: a member that is silent this long is dead.
pub(crate) fn session(settings: &Settings, lease: Duration) -> Duration {
    // Half an hour is the brokers' default maximum.
    let shortest = settings.shortest_session();
    lease.clamp(shortest, Duration::from_secs(1800).max(shortest))
}

/// Heartbeats: a rebalance is noticed within one, so never more than librdkafka's default of 3 s.
fn heartbeat(session: Duration) -> Duration {
    (session / 6).clamp(Duration::from_millis(100), Duration::from_secs(3))
}

/// A producer. `retry_for` is the time in which librdkafka retries, without duplicates and in order.
pub(crate) fn producer(
    settings: &Settings,
    max_message: usize,
    retry_for: Duration,
    native: &[(String, String)],
) -> ClientConfig {
    let mut config = base(settings);
    set_all(
        &mut config,
        &[
            ("acks", "all"),
            // The leader gives up on its followers before we do on the leader; then it is tried again. Default 30 s.
            ("request.timeout.ms", "8000"),
            // As the Java client and most others do; librdkafka's default is CRC32.
            ("partitioner", "murmur2_random"),
            // Only where much is under way: else what was handed over together is flushed at once, see `send.rs`. Until then it
            // gathers, or the first messages of a batch would go out in requests of their own. librdkafka's default.
            ("linger.ms", "5"),
            // Those without a key are ours to place, see `spread.rs`. By default one partition gets all for 10 ms, and so a burst of
            // tasks is work for one member.
            ("sticky.partitioning.linger.ms", "0"),
            ("compression.type", "lz4"),
            // Our own window is below these, so that the queue is never full.
            ("queue.buffering.max.messages", "10000000"),
            ("queue.buffering.max.kbytes", "2097151"),
            ("enable.gapless.guarantee", "false"),
        ],
    );
    if retry_for.is_zero() {
        // Nothing is written twice; so nothing can overtake what is tried again.
        set_all(&mut config, &[("enable.idempotence", "false"), ("message.send.max.retries", "0")]);
    } else {
        config.set("enable.idempotence", "true");
    }
    // Room for the dead-letter envelope above the largest message.
    config.set("message.max.bytes", max_message.saturating_add(ENVELOPE).clamp(1_000_000, 1_000_000_000).to_string());
    config.set("message.timeout.ms", retry_for.clamp(SHORTEST_SEND, LONGEST_SEND).as_millis().to_string());
    let set = settings.native.iter().filter(|(name, _)| is_producers(name));
    for (name, value) in set.chain(native.iter().map(|(n, v)| (n, v))) {
        config.set(name, value);
    }
    config
}

/// Whether a property says how long messages gather before they are sent.
pub(crate) fn says_linger(settings: &Settings, native: &[(String, String)]) -> bool {
    let mut names = settings.native.keys().chain(native.iter().map(|(name, _)| name));
    names.any(|name| name == "linger.ms" || name == "queue.buffering.max.ms")
}

/// Shortest time limit of a message inside librdkafka: less ends idempotence with a fatal error after a short brown-out.
const SHORTEST_SEND: Duration = Duration::from_secs(10);

/// The longest that it takes, 24 days: later the outbox tries again by itself.
const LONGEST_SEND: Duration = Duration::from_millis(i32::MAX as u64);

/// Room for the headers of an envelope, and for our own.
pub(crate) const ENVELOPE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::refuses_by_alert;

    #[test]
    fn alerts_are_refusals() {
        let wanted = "ssl://h:1/bootstrap: error:0A00045C:SSL routines::tlsv13 alert certificate required: SSL alert \
                      number 116 (after 3ms in state APIVERSION_QUERY)";
        assert!(refuses_by_alert(wanted));
        assert!(!refuses_by_alert("error:0A000438:SSL routines::tlsv1 alert internal error: SSL alert number 80"));
        assert!(!refuses_by_alert("Disconnected: connection reset by peer"));
    }
}
