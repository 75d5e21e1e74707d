//! Models: random sequences of operations on a part of the engine, against what must always hold; and interleavings of
//! threads, with the feature `shuttle`, which puts that scheduler's locks and atomics in place of the ordinary ones.

#[cfg(not(feature = "shuttle"))]
mod lane;
#[cfg(not(feature = "shuttle"))]
mod lists;
#[cfg(not(feature = "shuttle"))]
mod outbox;
#[cfg(not(feature = "shuttle"))]
mod settles;
#[cfg(feature = "shuttle")]
mod threads;

use crate::env::Env;
use crate::hooks::NoHooks;
use crate::lane::{Incoming, Lane};
use crate::mechanics::{Mechanics, MoveBy, ReleaseBy, RetryBy};
use crate::plan::Token;
use crate::resume::Unsettled;
use crate::settles::SettleQueue;
use crate::shared::Shared;
use mq_api::{Durability, Message, Position, Source, Subscription};
use std::sync::Arc;
use std::time::Duration;

/// A lane without a driver.
pub(crate) struct Bench {
    pub(crate) shared: Arc<Shared>,
    pub(crate) settles: Arc<SettleQueue>,
    pub(crate) lane: Arc<Lane>,
}

impl Bench {
    /// Must be called inside a tokio runtime.
    pub(crate) fn new(sub: Subscription, mechanics: Mechanics) -> Self {
        let env = Env::current(Some(1)).expect("in a runtime");
        let source = Source::new(sub.topic.clone(), sub.group_name().cloned());
        let level = Durability::Memory;
        let shared = Shared::new(Arc::new(sub), "me".into(), mechanics, level, env, Arc::new(NoHooks));
        let settles = SettleQueue::new(level);
        let unsettled = Arc::new(Unsettled::default());
        let lane = Lane::new(1, shared.clone(), settles.clone(), unsettled, source);
        Self { shared, settles, lane }
    }
}

pub(crate) fn mechanics(n: u8) -> Mechanics {
    let (retry, dead_letter, release) = match n % 3 {
        0 => (RetryBy::Driver, MoveBy::Driver, ReleaseBy::Driver),
        1 => (RetryBy::Publish, MoveBy::Publish, ReleaseBy::Driver),
        _ => (RetryBy::ParkThenPublish { park: Duration::from_secs(5) }, MoveBy::Publish, ReleaseBy::Engine),
    };
    Mechanics { retry, dead_letter, release }
}

pub(crate) fn incoming(n: u64, key: Option<u8>, size: usize) -> Incoming {
    let mut message = Message::new(vec![0; size]);
    message.key = key.map(|k| vec![k].into());
    Incoming::new(Token(n, 0), Position::offset(n), message)
}
