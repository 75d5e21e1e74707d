//! Who runs against whom on each backend, and how large a run is.

use crate::job::{Failed, Job, Ran};

/// A backend that can be measured.
pub(crate) struct Backend {
    pub(crate) name: &'static str,
    /// As people write it.
    pub(crate) title: &'static str,
    /// Messages of a run: about half a second of work on two cores.
    pub(crate) n: usize,
    /// Messages of a run one by one.
    pub(crate) one_by_one: usize,
    /// Backlogs between which the costs must not differ.
    pub(crate) backlogs: &'static [usize],
    /// Topics of one client, likewise.
    pub(crate) topics: &'static [usize],
    /// Partitions of a topic, likewise.
    pub(crate) partitions: &'static [usize],
    /// Deliveries in hand, likewise.
    pub(crate) in_hand: &'static [usize],
    /// How long an awaited send takes beside one by hand with the same promise, at most.
    pub(crate) one_send: Option<f64>,
    /// A run is void unless batches are so much faster than messages one by one.
    pub(crate) void: f64,
    /// Delete the topic of each run before the next: a server pays for each partition that is there.
    pub(crate) tidy: bool,
    /// Processor time of a received message, at most, as a share of what it costs to acknowledge each by itself.
    pub(crate) beside_single_acks: Option<f64>,
}

/// Below the million at which Redis's default retention begins to refuse.
const MILLION: usize = 990_000;

pub(crate) const BACKENDS: [Backend; 3] = [
    Backend {
        name: "redis",
        title: "Redis Streams",
        n: 120_000,
        one_by_one: 2_000,
        backlogs: &[1_000, 10_000, 100_000, MILLION],
        topics: &[1, 50, 500],
        partitions: &[],
        in_hand: &[],
        one_send: None,
        tidy: false,
        void: 10.0,
        beside_single_acks: None,
    },
    Backend {
        name: "amqp",
        title: "RabbitMQ, quorum queues",
        n: 10_000,
        one_by_one: 500,
        // A million takes RabbitMQ three minutes to write.
        backlogs: &[1_000, 10_000, 100_000],
        topics: &[1, 50, 500],
        partitions: &[],
        in_hand: &[],
        one_send: None,
        tidy: false,
        void: 5.0,
        beside_single_acks: Some(0.2),
    },
    Backend {
        name: "kafka",
        title: "Kafka",
        n: 300_000,
        one_by_one: 300,
        backlogs: &[1_000, 10_000, 100_000, MILLION],
        // Each is a member of a group of its own, with threads of librdkafka's: not what a client of hundreds is for.
        topics: &[1, 20],
        partitions: &[1, 10, 100, 1_000],
        in_hand: &[10, 100, 1_000, 10_000, 100_000],
        one_send: Some(1.1),
        tidy: true,
        void: 10.0,
        beside_single_acks: None,
    },
];

/// The contestants, in the order of a pair.
pub(crate) const CONTESTANTS: [&str; 3] = ["ours", "same", "bare"];

/// A bar beside another library: its name there, and at least how many times its rate ours sends and receives.
pub(crate) struct Peer {
    pub(crate) backend: &'static str,
    pub(crate) name: &'static str,
    pub(crate) send: f64,
    /// `None`: shown, not judged.
    pub(crate) receive: Option<f64>,
}

/// Other libraries. One that `bench-peers/brokers` knows and this does not is shown and not judged; so is receiving without a bar,
/// where theirs is not at the same guarantee: on Kafka sea-streamer and ruststream acknowledge by position and commit by time.
pub(crate) const PEERS: [Peer; 6] = [
    Peer { backend: "redis", name: "omniqueue", send: 1.0, receive: Some(5.0) },
    Peer { backend: "redis", name: "sea-streamer", send: 1.0, receive: Some(1.0) },
    Peer { backend: "redis", name: "ruststream", send: 1.0, receive: Some(1.0) },
    Peer { backend: "kafka", name: "sea-streamer", send: 1.0, receive: None },
    Peer { backend: "kafka", name: "ruststream", send: 1.0, receive: None },
    Peer { backend: "kafka", name: "mq-bridge (a commit a batch)", send: 1.0, receive: Some(1.0) },
];

/// Runs one contestant in this process.
pub(crate) async fn run(backend: &str, contestant: &str, job: &Job) -> Result<Ran, Failed> {
    match (backend, contestant) {
        (_, "ours") => crate::ours::run(job).await,
        (_, "ours-single") => crate::ours::single(job).await,
        #[cfg(feature = "redis")]
        ("redis", "same") => crate::redis_same::run(job).await,
        #[cfg(feature = "redis")]
        ("redis", "bare") => crate::redis_bare::run(job).await,
        #[cfg(feature = "redis")]
        ("redis", "one") => crate::redis_bare::one_by_one(job).await,
        #[cfg(feature = "amqp")]
        ("amqp", "same") => crate::amqp_same::run(job).await,
        #[cfg(feature = "amqp")]
        ("amqp", "bare") => crate::amqp_bare::run(job).await,
        #[cfg(feature = "amqp")]
        ("amqp", "one") => crate::amqp_bare::one_by_one(job).await,
        #[cfg(feature = "kafka")]
        ("kafka", "same") => crate::kafka_same::run(job).await,
        #[cfg(feature = "kafka")]
        ("kafka", "bare") => crate::kafka_bare::run(job).await,
        #[cfg(feature = "kafka")]
        ("kafka", "one") => crate::kafka_bare::one_by_one(job).await,
        #[cfg(feature = "kafka")]
        ("kafka", "same-single") => crate::kafka_bare::single(job, true).await,
        #[cfg(feature = "kafka")]
        ("kafka", "bare-single") => crate::kafka_bare::single(job, false).await,
        _ => Err(format!("no {contestant} for {backend} in this build; build with --features {backend}").into()),
    }
}
