//! Connecting, and the broker that programs hold.

use crate::admin::KafkaAdmin;
use crate::driver::{self, Kafka};
use crate::topology::Cluster;
use crate::url::Settings;
use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, Error, ErrorKind, HealthSetter, HealthState, HealthWatch,
    Producer, ProducerSpec, Result, Subscription, async_trait,
};
use mq_core::{ConnectPolicy, Driver, EngineConsumer, EngineProducer, Env, Hooks, NoHooks, Roster};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Connects to the brokers of a `kafka://` or `kafkas://` URL. See the crate's documentation for its parameters.
///
/// # Errors
/// `Config` names what is wrong with the URL. `Auth`, `Tls` and `Permission` carry the broker's words and come at once. A broker
/// that is down is waited for, up to `connect_timeout` (30 s); then `Unavailable`.
pub async fn connect(url: &str) -> Result<Arc<dyn Broker>> {
    connect_with(url, Arc::new(NoHooks)).await
}

/// The same, with listeners for metrics and traces.
///
/// # Errors
/// As [`connect`].
pub async fn connect_with(url: &str, hooks: Arc<dyn Hooks>) -> Result<Arc<dyn Broker>> {
    let settings = Arc::new(Settings::parse(url)?);
    if settings.exposes_password() {
        tracing::warn!("the password goes in clear to {}; use kafkas:// (TLS) or sasl=scram-sha-512", settings.brokers);
    }
    let env = Env::own_thread("anymq-kafka-rt", None)?;
    let limit = settings.connect_timeout;
    let cluster = Arc::new(Cluster::new(settings, env.clone())?);
    let up = cluster.blocking(move |cluster| {
        let id = cluster.wait_up(limit)?;
        Ok((id, cluster.level()))
    });
    let (id, level) = match up.await {
        Ok(up) => up,
        Err(error) => {
            let closing = cluster.clone();
            let _ = cluster.blocking(move |_| closing.close()).await;
            env.shut_down(Duration::from_secs(1)).await;
            return Err(error);
        }
    };
    let mut capabilities = driver::capabilities(&cluster.settings, level);
    // Brokers do not tell their version; the cluster's id is what they tell of themselves.
    capabilities.server = id.map(|id| format!("Kafka cluster {id}"));
    let health = HealthSetter::new(HealthState::Running, env.wall());
    let stop = CancellationToken::new();
    env.spawn(watch(cluster.clone(), health.clone(), stop.clone()));
    Ok(Arc::new(KafkaBroker {
        driver: Arc::new(Kafka::new(cluster.clone(), capabilities)),
        cluster,
        env,
        hooks,
        health,
        stop,
        roster: Roster::default(),
    }))
}

/// Health of the connection: what the looking client tells, and whether it is back.
async fn watch(cluster: Arc<Cluster>, health: HealthSetter, stop: CancellationToken) {
    let mut refusal = None;
    loop {
        tokio::select! { biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(Duration::from_millis(250)) => {}
        }
        cluster.serve();
        let Some(why) = cluster.down() else {
            health.set(HealthState::Running, "", cluster.env.wall());
            continue;
        };
        health.set(HealthState::Reconnecting, refusal.take().unwrap_or(why), cluster.env.wall());
        // Clears it when a broker answers. A refusal is tried again: it may be over.
        let answer = cluster.blocking(|cluster| cluster.look_again(Duration::from_millis(500))).await;
        let refused = |error: &Error| matches!(error.kind(), ErrorKind::Auth | ErrorKind::Tls | ErrorKind::Permission);
        refusal = answer.err().filter(refused).map(|error| error.to_string());
    }
}

/// A connection to Kafka.
struct KafkaBroker {
    driver: Arc<Kafka>,
    cluster: Arc<Cluster>,
    env: Env,
    hooks: Arc<dyn Hooks>,
    health: HealthSetter,
    stop: CancellationToken,
    roster: Roster,
}

impl KafkaBroker {
    /// What is left to do once consumers and producers are closed; says how much had to be abandoned.
    async fn hang_up(&self) -> u64 {
        self.stop.cancel();
        self.health.set(HealthState::Closed, "", self.env.wall());
        let closing = self.cluster.clone();
        let over = async {
            let _ = self.cluster.blocking(move |_| closing.close()).await;
            self.env.no_tasks().await;
        };
        // Clients that hang are left to themselves: they are on threads of their own.
        let limit = Duration::from_secs(2);
        let (over, _) =
            tokio::join!(tokio::time::timeout(limit, over), tokio::time::timeout(limit, self.cluster.threads.none()));
        let ended = self.env.shut_down(Duration::from_secs(1)).await;
        u64::from(over.is_err()) + self.cluster.threads.alive() + u64::from(!ended)
    }

    fn policy(&self) -> ConnectPolicy {
        ConnectPolicy {
            first: self.cluster.settings.connect_timeout,
            attempt: Duration::from_secs(20),
            ..Default::default()
        }
    }
}

#[async_trait]
impl Broker for KafkaBroker {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.driver.capabilities()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        self.roster.open()?;
        let producer =
            EngineProducer::start(self.driver.clone(), spec, self.env.clone(), self.hooks.clone(), self.policy())
                .await?;
        self.roster.producer(&producer).await?;
        Ok(producer)
    }

    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        let name = self.roster.admit(&subscription)?;
        let hooks = self.hooks.clone();
        let consumer =
            EngineConsumer::start(self.driver.clone(), subscription, self.env.clone(), hooks, self.policy()).await?;
        self.roster.consumer(consumer.control(), name).await?;
        Ok(Box::new(consumer))
    }

    fn admin(&self) -> Arc<dyn Admin> {
        Arc::new(KafkaAdmin::new(self.cluster.clone()))
    }

    fn health(&self) -> HealthWatch {
        self.health.watch()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.roster.close(deadline, self.hang_up()).await
    }
}

impl Drop for KafkaBroker {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
