//! Traits and types of the anymq messaging library.
//!
//! Programs use these through the `anymq` crate; authors of backends use this crate together with `mq-core`.
//! Nothing here needs a runtime: every future is a small concrete type that is driven by whoever awaits it.
//!
//! | if you want to | look at |
//! |---|---|
//! | send | [`Producer`], [`Message`], [`Sending`], [`Batch`] |
//! | receive | [`Subscription`], [`Consumer`], [`Delivery`], [`Deliveries`] |
//! | say what became of a delivery | [`Delivery::ack`], [`Delivery::nack`], [`Settling`], [`Settled`] |
//! | know what a broker can do | [`Capabilities`], [`Feature`], [`Support`] |
//! | know how it is doing | [`HealthWatch`], [`Event`], [`Backlog`] |
//! | write a backend | the object-safe traits [`Broker`], [`Producer`], [`Consumer`], [`Admin`] and the crate `mq-core` |

mod admin;
mod backends;
mod backlog;
mod batch;
mod broker;
mod capabilities;
mod codec;
mod consumer;
mod deliveries;
mod delivery;
mod envelope;
mod error;
mod event;
mod ext;
mod failure;
mod headers;
mod health;
mod id;
mod level;
mod message;
mod position;
mod producer;
mod retry;
mod sending;
mod settle;
mod sink;
mod subscription;
mod topic;
mod typed;

pub use admin::{Admin, DeadLetter, GroupInfo, PendingDelivery, RedriveOptions, RedriveReport, TopicInfo, TopicSpec};
pub use backlog::{Backlog, Count};
pub use batch::{Batch, Run, SendingBatch};
pub use broker::{Broker, CloseReport};
pub use capabilities::{AttemptCounts, Capabilities, Feature, Support, Takeover};
pub use codec::{Decode, Encode, Json, Raw};
pub use consumer::{Consumer, ConsumerControl, Control};
pub use deliveries::{AckRun, Deliveries, DeliveriesIter, RunWriter};
pub use delivery::{Delivery, Stored, Ticket};
pub use envelope::{Envelope, Reason};
pub use error::{Class, Error, ErrorKind, Outcome, Result};
pub use event::{Event, EventLog, Events, Gap, GapCause};
pub use ext::{BrokerExt, ConsumerExt, DeliveryStream, ProducerExt, Recv, RecvBatch};
pub use failure::{BoxError, Failure};
pub use headers::Headers;
pub use health::{Health, HealthSetter, HealthState, HealthWatch};
pub use id::MessageId;
pub use level::Durability;
pub use message::{ContentType, Message};
pub use position::Position;
pub use producer::{Producer, ProducerSpec, SendOptions};
pub use retry::{DeadLetterPolicy, OnDeadLetter, RetryPolicy};
pub use sending::{Receipt, SendResult, SendTable, Sending};
pub use settle::{Disposition, Lost, Settle, SettleStart, Settled, Settling, Source};
pub use sink::MessageSink;
pub use subscription::{
    Guarantee, LONGEST, MOST_IN_FLIGHT, Mode, Ordering, Provisioning, ReplayFrom, Retention, Start, Subscription,
};
pub use topic::{Group, Topic};
pub use typed::{Typed, TypedDelivery, TypedProducer};

pub use async_trait::async_trait;
