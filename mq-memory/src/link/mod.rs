//! A connection that can be hurt. [`MemoryBroker::connect`](crate::MemoryBroker::connect) reaches the broker by plain calls, and
//! nothing can come between; a linked connection behaves as one over a network: it can be cut, the broker can be away, answers
//! can be lost. Sends go through the engine that the networked backends share, so its retries, bounds and outcomes are what a
//! test under faults sees.

mod consumer;
mod producer;

use crate::client::Client;
use crate::core::Core;
use async_trait::async_trait;
use futures_util::future::join_all;
use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, Error, ErrorKind, HealthWatch, Producer, ProducerSpec, Result,
    Subscription,
};
use mq_core::{ConnectPolicy, EngineProducer};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// What the link is like now. Everything that waits on it watches this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status {
    /// The broker can be reached.
    pub(crate) up: bool,
    /// What the broker answers does not arrive.
    pub(crate) hold: bool,
    /// Nothing passes, and nobody is told.
    pub(crate) frozen: bool,
    /// The program is dead.
    pub(crate) dead: bool,
    /// Rises whenever the connection is lost.
    pub(crate) losses: u64,
}

/// Power over one linked connection.
#[derive(Clone)]
pub struct Link {
    status: watch::Sender<Status>,
    client: Arc<Client>,
}

impl Link {
    fn change(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_modify(change);
    }

    /// The connection is lost now; a new one is made at once. What members held goes to others or comes back to them, and
    /// answers that were on their way never arrive.
    pub fn cut(&self) {
        self.reachable(false);
        self.reachable(true);
    }

    /// The broker goes away from this connection, or comes back.
    pub fn reachable(&self, yes: bool) {
        if self.status.borrow().up == yes {
            return;
        }
        self.change(|s| {
            s.up = yes;
            s.losses += u64::from(!yes);
        });
        self.client.live_members().iter().for_each(|member| match yes {
            true => member.come_back(),
            false => member.go_away("the connection was lost"),
        });
    }

    /// What the broker answers does not arrive until this is called with `false`, or the connection is lost.
    pub fn hold_answers(&self, hold: bool) {
        self.change(|s| s.hold = hold);
    }

    /// Nothing passes in either direction, and nobody is told: leases are not renewed. Ends without harm when no lease ran out.
    pub fn freeze(&self, frozen: bool) {
        self.change(|s| s.frozen = frozen);
        self.client.live_members().iter().for_each(|member| member.freeze(frozen));
    }

    /// The program dies: nothing of it is heard again, and what it held comes free when its leases end.
    pub fn crash(&self) {
        self.change(|s| s.dead = true);
        self.client.live_members().iter().for_each(|member| member.crash());
        self.client.shut_producers();
        self.client.forsake();
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({:?})", *self.status.borrow())
    }
}

/// A linked connection, and the power over it.
pub(crate) fn connect(core: Arc<Core>) -> (Arc<dyn Broker>, Link) {
    let client = Client::new(core);
    let status = watch::Sender::new(Status { up: true, hold: false, frozen: false, dead: false, losses: 0 });
    let link = Link { status: status.clone(), client: client.clone() };
    (Arc::new(LinkedBroker { client, status, producers: Mutex::default() }), link)
}

struct LinkedBroker {
    client: Arc<Client>,
    status: watch::Sender<Status>,
    producers: Mutex<Vec<Weak<EngineProducer>>>,
}

/// How long a call waits for a broker that is away.
const PATIENCE: Duration = Duration::from_secs(30);

impl LinkedBroker {
    async fn up(&self) -> Result<()> {
        let mut status = self.status.subscribe();
        let up = tokio::time::timeout(PATIENCE, status.wait_for(|s| s.up && !s.frozen || s.dead)).await;
        match up {
            Ok(Ok(now)) if !now.dead => Ok(()),
            Ok(_) => Err(Error::closed("the broker")),
            Err(_) => Err(Error::new(ErrorKind::Unavailable, format!("the broker was away for {PATIENCE:?}"))),
        }
    }
}

#[async_trait]
impl Broker for LinkedBroker {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.client.capabilities()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        self.client.open()?;
        let core = &self.client.core;
        // The broker itself tells the hooks of what it stores.
        let driver = producer::Wire::new(self.client.clone(), self.status.subscribe());
        let producer = EngineProducer::start(
            driver,
            spec,
            core.env.clone(),
            std::sync::Arc::new(mq_core::NoHooks),
            ConnectPolicy::default(),
        )
        .await?;
        let mut producers = self.producers.lock();
        producers.retain(|p| p.strong_count() > 0);
        producers.push(Arc::downgrade(&producer));
        Ok(producer)
    }

    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        self.up().await?;
        let inner = self.client.open_consumer(subscription).await?;
        Ok(Box::new(consumer::LinkedConsumer::new(inner, self.client.core.clone(), self.status.subscribe())))
    }

    fn admin(&self) -> Arc<dyn Admin> {
        self.client.admin()
    }

    fn health(&self) -> HealthWatch {
        self.client.health()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        let producers: Vec<_> = self.producers.lock().iter().filter_map(Weak::upgrade).collect();
        let until = self.client.core.env.after(deadline);
        let mut report = CloseReport::default();
        // Side by side, and the deadline is for all together.
        for closed in join_all(producers.iter().map(|producer| producer.close(deadline))).await {
            report += closed;
        }
        report += self.client.close(until.saturating_duration_since(self.client.core.env.now())).await;
        report
    }
}
