//! The connection that programs hold.

use crate::admin::AmqpAdmin;
use crate::connect::{Connections, Role};
use crate::driver::Amqp;
use crate::url::AmqpUrl;
use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, Error, ErrorKind, HealthWatch, Producer, ProducerSpec, Result,
    Subscription, async_trait,
};
use mq_core::{ConnectPolicy, Driver, EngineConsumer, EngineProducer, Env, Hooks, NoHooks, Roster};
use std::sync::Arc;
use std::time::Duration;

/// Connects to RabbitMQ. See the crate's documentation for the URL.
///
/// # Errors
/// [`ErrorKind::Config`] for what the URL gets wrong; [`ErrorKind::Auth`], [`ErrorKind::Permission`] and [`ErrorKind::Tls`] at
/// once, with the broker's words; [`ErrorKind::Unavailable`] when the broker is still away after `connect_timeout`.
pub async fn connect(url: &str) -> Result<Arc<dyn Broker>> {
    connect_with_hooks(url, Arc::new(NoHooks)).await
}

/// As [`connect`], with a listener for metrics and traces.
///
/// # Errors
/// As [`connect`].
pub async fn connect_with_hooks(url: &str, hooks: Arc<dyn Hooks>) -> Result<Arc<dyn Broker>> {
    let url = AmqpUrl::parse(url)?;
    if url.password_in_clear() {
        tracing::warn!("the password goes to the broker in clear; use amqps:// for hosts that are not this one");
    }
    let env = Env::own_thread("anymq-amqp", None)?;
    let connections = Arc::new(Connections::new(url, env.clone())?);
    let first = connections.clone();
    let clock = env.clone();
    let connected = env.spawn(async move { first_connection(&first, &clock).await }).await;
    let server = match connected {
        Ok(Ok(server)) => server,
        Ok(Err(error)) => {
            env.shut_down(Duration::from_secs(1)).await;
            return Err(error);
        }
        Err(gone) => return Err(Error::new(ErrorKind::Other, "the connecting task ended").with_source(gone)),
    };
    let policy = ConnectPolicy { first: connections.url().connect_timeout, ..ConnectPolicy::default() };
    let driver = Arc::new(Amqp::new(connections.clone(), server));
    let admin = Arc::new(AmqpAdmin::new(driver.clone(), env.clone()));
    let roster = Roster::default();
    Ok(Arc::new(AmqpBroker { env, connections, driver, admin, policy, hooks, roster }))
}

/// Waits for a broker that is down; what no waiting can mend fails at once. Says which server it is.
async fn first_connection(connections: &Connections, env: &Env) -> Result<Option<String>> {
    let give_up = env.now() + connections.url().connect_timeout;
    // Fetching again at most 2 s after it is back.
    let policy = ConnectPolicy::default();
    let mut pauses = policy.pauses();
    loop {
        // Also a host that accepts and says nothing is waited for no longer than that.
        let left = give_up.saturating_duration_since(env.now());
        let Err(error) = connections.get_within(Role::Publish, left).await else {
            return Ok(connections.server().await);
        };
        let final_one = matches!(
            error.kind(),
            ErrorKind::Auth | ErrorKind::Permission | ErrorKind::Tls | ErrorKind::Config | ErrorKind::Unsupported
        );
        let pause = pauses.next().unwrap_or(policy.max_pause);
        if final_one || env.now() + pause > give_up {
            return Err(error);
        }
        tracing::info!(%error, "the broker is not there yet");
        tokio::time::sleep(env.jittered(pause)).await;
    }
}

struct AmqpBroker {
    env: Env,
    connections: Arc<Connections>,
    driver: Arc<Amqp>,
    admin: Arc<AmqpAdmin>,
    policy: ConnectPolicy,
    hooks: Arc<dyn Hooks>,
    roster: Roster,
}

impl AmqpBroker {
    /// What is left to do once consumers and producers are closed; says how much had to be abandoned.
    async fn hang_up(&self, deadline: Duration) -> u64 {
        let connections = self.connections.clone();
        // Closed where they were made; a broker that is away cannot be told.
        let _ = self.env.spawn(async move { connections.close(Duration::from_secs(1)).await }).await;
        let no_tasks = tokio::time::timeout(deadline.max(Duration::from_secs(1)), self.env.no_tasks()).await;
        let ended = self.env.shut_down(Duration::from_secs(2)).await;
        u64::from(no_tasks.is_err()) + u64::from(!ended)
    }
}

#[async_trait]
impl Broker for AmqpBroker {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.driver.capabilities()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        self.roster.open()?;
        let (driver, env) = (self.driver.clone(), self.env.clone());
        let producer = EngineProducer::start(driver, spec, env, self.hooks.clone(), self.policy).await?;
        self.roster.producer(&producer).await?;
        Ok(producer)
    }

    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        let name = self.roster.admit(&subscription)?;
        let (driver, env) = (self.driver.clone(), self.env.clone());
        let consumer = EngineConsumer::start(driver, subscription, env, self.hooks.clone(), self.policy).await?;
        self.roster.consumer(consumer.control(), name).await?;
        Ok(Box::new(consumer))
    }

    fn admin(&self) -> Arc<dyn Admin> {
        self.admin.clone()
    }

    fn health(&self) -> HealthWatch {
        self.connections.health().watch()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.roster.close(deadline, self.hang_up(deadline)).await
    }
}
