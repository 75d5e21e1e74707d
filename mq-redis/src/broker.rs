//! The connection as programs see it.

use crate::admin::StreamsAdmin;
use crate::connect::Hub;
use crate::driver::Streams;
use crate::probe::capabilities;
use crate::pubsub::{NoAdmin, PubSub};
use crate::url::{Options, Transport};
use backoff::wait_for_server;
use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, HealthWatch, Producer, ProducerSpec, Result, Subscription,
    async_trait,
};
use mq_core::{ConnectPolicy, EngineConsumer, EngineProducer, Env, Hooks, Roster};
use std::sync::Arc;
use std::time::Duration;

/// Longest time that a close spends on leaving what members could not leave: a new connection to a server on a busy machine takes
/// more than one second, and one that is away refuses at once.
const LEAVING: Duration = Duration::from_secs(3);

enum Kind {
    Streams(Arc<Streams>),
    PubSub(Arc<PubSub>),
}

/// A connection to Redis.
pub(crate) struct Redis {
    hub: Arc<Hub>,
    kind: Kind,
    env: Env,
    policy: ConnectPolicy,
    hooks: Arc<dyn Hooks>,
    roster: Roster,
}

impl Redis {
    pub(crate) async fn connect(url: &str, hooks: Arc<dyn Hooks>) -> Result<Arc<Self>> {
        let options = Options::parse(url)?;
        let env = Env::own_thread("anymq-redis", None)?;
        let policy = ConnectPolicy { first: options.connect_timeout, ..ConnectPolicy::default() };
        let transport = options.transport;
        let hub = Hub::new(options, env.clone());
        if let Err(error) = wait_for_server(&hub).await {
            hub.close().await;
            env.shut_down(Duration::from_secs(1)).await;
            return Err(error);
        }
        let kind = match transport {
            Transport::Streams => Kind::Streams(Arc::new(Streams::new(hub.clone()))),
            Transport::PubSub => Kind::PubSub(Arc::new(PubSub::new(hub.clone()))),
        };
        Ok(Arc::new(Self { hub, kind, env, policy, hooks, roster: Roster::default() }))
    }
}

impl Redis {
    /// What is left to do once consumers and producers are closed; says how much had to be abandoned.
    async fn hang_up(&self) -> u64 {
        match &self.kind {
            Kind::Streams(driver) => {
                let (driver, env) = (driver.clone(), self.env.clone());
                let leaving = env.spawn(async move { tokio::time::timeout(LEAVING, driver.leave_names()).await });
                // Out of time: the names are forgotten by the janitor of other members.
                let _ = leaving.await;
            }
            Kind::PubSub(driver) => driver.hang_up().await,
        }
        self.hub.close().await;
        if tokio::time::timeout(Duration::from_secs(2), self.env.no_tasks()).await.is_err() {
            tracing::warn!(tasks = self.env.tasks(), "tasks were left at close and are ended with their thread");
        }
        u64::from(!self.env.shut_down(Duration::from_secs(2)).await)
    }
}

mod backoff {
    use super::{Hub, Options};
    use mq_api::{Error, ErrorKind, Result};
    use mq_core::ConnectPolicy;
    use std::sync::Arc;
    use std::time::Duration;

    /// Waits for a server that is down; what no waiting mends fails at once.
    pub(super) async fn wait_for_server(hub: &Arc<Hub>) -> Result<()> {
        let until = tokio::time::Instant::now() + hub.options.connect_timeout;
        let policy = ConnectPolicy { min_pause: Duration::from_millis(50), ..ConnectPolicy::default() };
        let mut pauses = policy.pauses();
        let mut last = None;
        loop {
            let error = match tokio::time::timeout_at(until, hub.link("")).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) => error,
                // Each of several hosts that say nothing has its own limit. What an attempt said before tells more.
                Err(_) => {
                    return Err(last.unwrap_or_else(|| {
                        let Options { place, connect_timeout, .. } = &hub.options;
                        let text = format!("connecting to Redis at {place}: no greeting within {connect_timeout:?}");
                        Error::new(ErrorKind::Unavailable, text)
                    }));
                }
            };
            let now = tokio::time::Instant::now();
            let hopeless =
                !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Disconnected);
            if hopeless || now >= until {
                return Err(error);
            }
            let pause = hub.env.jittered(pauses.next().unwrap_or(policy.max_pause));
            last = Some(error);
            tokio::time::sleep(pause.min(until - now)).await;
        }
    }
}

#[async_trait]
impl Broker for Redis {
    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(capabilities(&self.hub.options, self.hub.facts().as_deref()))
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        self.roster.open()?;
        let (env, hooks) = (self.env.clone(), self.hooks.clone());
        let producer = match &self.kind {
            Kind::Streams(driver) => EngineProducer::start(driver.clone(), spec, env, hooks, self.policy).await?,
            Kind::PubSub(driver) => EngineProducer::start(driver.clone(), spec, env, hooks, self.policy).await?,
        };
        self.roster.producer(&producer).await?;
        Ok(producer)
    }

    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        let name = self.roster.admit(&subscription)?;
        let (env, hooks) = (self.env.clone(), self.hooks.clone());
        let consumer = match &self.kind {
            Kind::Streams(driver) => {
                EngineConsumer::start(driver.clone(), subscription, env, hooks, self.policy).await?
            }
            Kind::PubSub(driver) => {
                EngineConsumer::start(driver.clone(), subscription, env, hooks, self.policy).await?
            }
        };
        self.roster.consumer(consumer.control(), name).await?;
        Ok(Box::new(consumer))
    }

    fn admin(&self) -> Arc<dyn Admin> {
        match &self.kind {
            Kind::Streams(_) => Arc::new(StreamsAdmin::new(self.hub.clone())),
            Kind::PubSub(_) => Arc::new(NoAdmin),
        }
    }

    fn health(&self) -> HealthWatch {
        self.hub.health.watch()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.roster.close(deadline, self.hang_up()).await
    }
}
