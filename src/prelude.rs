//! Everything most programs use: `use anymq::prelude::*;`.

pub use crate::worker::{Attempt, Batch, Json, Key, Outcome, Payload, State, TimeoutLayer, Worker, WorkerHandle};
pub use crate::{
    Broker, BrokerExt, Config, Consumer, ConsumerExt, Delivery, Failure, Headers, Message, MessageId, Ordering,
    Producer, ProducerExt, ProducerSpec, ReplayFrom, RetryPolicy, Settled, Source, Start, Subscription, Topic, connect,
};
