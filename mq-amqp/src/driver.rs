//! The seam to the engine.

use crate::connect::Connections;
use crate::probe::capabilities;
use crate::same::Streams;
use crate::topology::Place;
use crate::url::QueueType;
use mq_api::{Capabilities, Group, Result};
use mq_core::{Driver, Mechanics, MoveBy, ReleaseBy, RetryBy, Run, Session, TxSession};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// One client.
#[derive(Debug)]
pub(crate) struct Amqp {
    pub(crate) connections: Arc<Connections>,
    capabilities: Arc<Capabilities>,
    /// Groups that this program made or used: AMQP does not list bindings.
    groups: Mutex<BTreeMap<String, BTreeSet<Group>>>,
    pub(crate) streams: Streams,
    pub(crate) cancels: Cancels,
    pub(crate) missed: Missed,
    /// When this program began to use the broker.
    pub(crate) born: SystemTime,
}

/// Consumers that the broker cancelled, while connection and channel stayed: their queue was deleted. Where another
/// program, or a producer of this one, makes it again first, the member finds it there as if nothing had been lost.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cancels(Arc<Mutex<BTreeSet<u64>>>);

impl Cancels {
    pub(crate) fn note(&self, consumer: u64) {
        self.0.lock().insert(consumer);
    }

    /// Whether the last session of this consumer ended so; forgotten with the answer.
    pub(crate) fn take(&self, consumer: u64) -> bool {
        self.0.lock().remove(&consumer)
    }
}

/// Queues that were not there when they were asked for. Each such question costs a channel, and the connection when none is left
/// ([`channels`](crate::channels)): who looks at a backlog again and again asks once a minute, where a bound is all it can tell.
#[derive(Debug, Default)]
pub(crate) struct Missed(Mutex<BTreeMap<String, Instant>>);

impl Missed {
    const LATELY: Duration = Duration::from_secs(60);

    pub(crate) fn note(&self, name: String) {
        let mut missed = self.0.lock();
        missed.retain(|_, at| at.elapsed() < Self::LATELY);
        missed.insert(name, Instant::now());
    }

    pub(crate) fn lately(&self, name: &str) -> bool {
        self.0.lock().get(name).is_some_and(|at| at.elapsed() < Self::LATELY)
    }
}

impl Amqp {
    pub(crate) fn new(connections: Arc<Connections>, server: Option<String>) -> Self {
        let url = connections.url();
        let capabilities = Arc::new(capabilities(url.queue_type, url.heartbeat, server));
        Self {
            connections,
            capabilities,
            groups: Mutex::default(),
            streams: Streams::default(),
            cancels: Cancels::default(),
            missed: Missed::default(),
            born: SystemTime::now(),
        }
    }

    pub(crate) fn remember(&self, place: &Place, group: &Group) {
        self.groups.lock().entry(place.name().to_owned()).or_default().insert(group.clone());
    }

    pub(crate) fn forget(&self, place: &Place) -> BTreeSet<Group> {
        self.groups.lock().remove(place.name()).unwrap_or_default()
    }

    /// The type of queues that are made.
    pub(crate) fn queue_type(&self) -> QueueType {
        self.connections.url().queue_type
    }
}

impl Driver for Amqp {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Publish, dead_letter: MoveBy::Publish, release: ReleaseBy::Driver }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        self.capabilities.clone()
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        crate::read::open(self, session).await
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        crate::produce::open(self, tx).await
    }
}
