//! One messaging API over Redis Streams, Redis Pub/Sub, RabbitMQ, Kafka and an in-memory broker, with one meaning
//! everywhere.
//!
//! ```no_run
//! use anymq::prelude::*;
//! # #[derive(serde::Serialize, serde::Deserialize)] struct Order { customer: String, total: u64 }
//!
//! async fn bill(Json(order): Json<Order>) -> Result<(), std::io::Error> {
//!     println!("{} owes {}", order.customer, order.total);
//!     Ok(()) // an error is tried again after a back-off, and dead-lettered after the last attempt
//! }
//!
//! # async fn run() -> anymq::Result<()> {
//! let broker = anymq::connect("memory://shop").await?; // or redis://, amqp://, kafka://
//! let order = Order { customer: "ada".into(), total: 42 };
//! let producer = broker.producer(ProducerSpec::new("orders").group("billing")).await?; // made, if it is not there yet
//! producer.send(Message::json(&order)?.key("ada")).await?; // Ok = the broker has it
//! Worker::new(broker).route(Subscription::group("orders", "billing"), bill).run_until_signal().await?;
//! # Ok(()) }
//! ```
//!
//! | if you want to | look at |
//! |---|---|
//! | connect | [`connect`], [`Config`] |
//! | send | [`Producer`], [`Message`] |
//! | run handlers | [`worker`] |
//! | receive in a loop of your own | [`Consumer`], [`Delivery`] |
//! | test a handler without a server | `testing` |
//! | know what a broker can do | [`Capabilities`] |

mod config;
mod connect;
pub mod prelude;
#[cfg(feature = "memory")]
pub mod testing;
pub mod worker;

pub use config::Config;
pub use connect::connect;
pub use mq_api::{
    Admin, AttemptCounts, Backlog, Batch as SendBatch, BoxError, Broker, BrokerExt, Capabilities, Class, CloseReport,
    Consumer, ConsumerControl, ConsumerExt, ContentType, Count, DeadLetter, DeadLetterPolicy, Deliveries, Delivery,
    Disposition, Durability, Envelope, Error, ErrorKind, Event, Events, Failure, Feature, Gap, GapCause, Group,
    GroupInfo, Guarantee, Headers, Health, HealthState, HealthWatch, Lost, Message, MessageId, MessageSink, Mode,
    OnDeadLetter, Ordering, Outcome as SendOutcome, PendingDelivery, Position, Producer, ProducerExt, ProducerSpec,
    Provisioning, Reason, Receipt, RedriveOptions, RedriveReport, ReplayFrom, Result, Retention, RetryPolicy,
    SendOptions, SendResult, Sending, Settled, Settling, Source, Start, Subscription, Support, Takeover, Topic,
    TopicInfo, TopicSpec, Typed, TypedDelivery, TypedProducer,
};
pub use worker::{Outcome, Worker};

/// The in-memory broker from the operator's side: faults, members, what happened.
#[cfg(feature = "memory")]
pub use mq_memory as memory;

/// Codecs of typed producers and consumers.
pub mod codec {
    pub use mq_api::{Decode, Encode, Json, Raw};
}

/// The README and the guides are compiled as they stand.
#[cfg(all(doctest, feature = "memory"))]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/guide/worker.md")]
    struct WorkerGuide;
    #[doc = include_str!("../docs/guide/settling.md")]
    struct SettlingGuide;
    #[doc = include_str!("../docs/guide/testing.md")]
    struct TestingGuide;
    #[doc = include_str!("../docs/guide/configuration.md")]
    struct ConfigurationGuide;
    #[doc = include_str!("../docs/guide/watching.md")]
    struct WatchingGuide;
}
