//! The conformance suite on a real Apache Kafka: `cargo test -p mq-kafka --features tls --test conformance -- kafka`, with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name it does nothing, so that `cargo test` stays quick.
//!
//! Kafka tells its clients where to connect, so a proxy for each connection needs a listener for each: the broker is started
//! with a row of doors, and a test's connections take one each.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "world/requests.rs"]
mod requests;

use mq_api::{Broker, Result, Topic, async_trait};
use mq_conformance::{
    Clock, Environment, Factory, Hook, Lacking, Lines, OnServer, Options, Site, World, on_server_with,
};
use mq_testbed::proxy::Proxy;
use mq_testbed::{Doors, KafkaOptions, Road, Server, free_port};
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const DOORS: usize = 60;
/// Tests at a time: they wait for sessions and rebalances far more than they compute.
const PARALLEL: usize = 6;
/// The shortest session: two seconds were lost to a busy machine now and then; brokers themselves take no less than six unless
/// told otherwise, which would only make the tests of members that die longer. Heartbeats as often as with a shorter one, for
/// by them a rebalance is noticed.
const SESSION: &str = "min_session=5s&librdkafka.heartbeat.interval.ms=300";

struct Kafka {
    direct: String,
    doors: Doors,
}

impl Factory for Kafka {
    fn name(&self) -> String {
        "kafka".to_owned()
    }

    fn environment(&self, _: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World::new(OnKafka { direct: self.direct.clone(), doors: self.doors.clone() }))
    }
}

struct OnKafka {
    direct: String,
    doors: Doors,
}

impl OnKafka {
    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.direct);
        config
    }
}

#[async_trait]
impl Site for OnKafka {
    type Line = Road;

    fn settles_until_answered(&self) -> bool {
        // An offset that was not committed is committed again.
        true
    }

    async fn connect(&self, lines: &Lines<Road>, number: u64, parameters: &[(&str, &str)]) -> Result<Arc<dyn Broker>> {
        let Some(road) = self.doors.open() else { panic!("more than {DOORS} connections at a time: raise DOORS") };
        let mut url = format!("kafka://127.0.0.1:{}?{SESSION}", road.port());
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        lines.lay(number, road);
        mq_kafka::connect_with(&url, lines.hooks()).await
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        let name = Topic::dead_letters(topic.clone(), group).as_str().to_owned();
        let admin: AdminClient<DefaultClientContext> =
            self.config().create().map_err(|_| Lacking("an admin client"))?;
        let size = if refuse { "1" } else { "1300000" };
        // The controller's answer comes before the broker acts by it, and the broker tells a setting before it acts by it, but
        // takes one change after the other: when it tells the second, it acts by the first.
        for round in ["86400001", "86400002"] {
            let settings = [("max.message.bytes", size), ("delete.retention.ms", round)];
            set(&admin, &name, &settings).await.ok_or(Lacking("changing the dead-letter topic"))?;
        }
        Ok(())
    }

    async fn remove_group(&self, topic: &Topic, group: &str) -> Hook {
        // The library's group of the topic, and the one that reads its retries.
        for id in [format!("{topic}..{group}"), format!("{topic}..{group}..retry")] {
            let direct = self.direct.clone();
            let removed = tokio::task::spawn_blocking(move || requests::remove_group(&direct, &id)).await;
            if let Err(problem) = removed.map_err(|e| e.to_string()).and_then(|r| r) {
                eprintln!("removing a group: {problem}");
                return Err(Lacking("removing a group with members"));
            }
        }
        Ok(())
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        let producer: FutureProducer = self.config().create().map_err(|_| Lacking("a producer"))?;
        let record: FutureRecord<'_, (), [u8]> = FutureRecord::to(topic.as_str()).payload(payload);
        producer.send(record, Duration::from_secs(10)).await.map_err(|_| Lacking("writing"))?;
        Ok(())
    }
}

/// Changes settings of a topic, and waits until the broker tells them.
async fn set(admin: &AdminClient<DefaultClientContext>, topic: &str, settings: &[(&str, &str)]) -> Option<()> {
    let it = ResourceSpecifier::Topic(topic);
    let change = settings.iter().fold(AlterConfig::new(it), |change, (name, value)| change.set(name, value));
    let changed = admin.alter_configs([&change], &AdminOptions::new()).await.ok()?;
    changed.iter().all(std::result::Result::is_ok).then_some(())?;
    for _ in 0..1_000 {
        let told = admin.describe_configs([&it], &AdminOptions::new()).await.ok()?.pop()?.ok()?;
        let is_told =
            |(name, value): &(&str, &str)| told.get(name).and_then(|entry| entry.value.as_deref()) == Some(*value);
        if settings.iter().all(is_told) {
            return Some(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    None
}

fn start(_: &str) -> std::result::Result<OnServer, String> {
    let proxies: Vec<Proxy> = (0..DOORS as u64).map(|n| Proxy::leading_nowhere(n).unwrap()).collect();
    let doors: Vec<(u16, u16)> = proxies.iter().map(|p| (free_port().unwrap(), p.port())).collect();
    // It is never restarted here, so nothing asks for a short session with its controller; see the testbed.
    let lines = vec!["broker.session.timeout.ms=30000".to_owned()];
    let own = KafkaOptions { doors: doors.clone(), lines, ..KafkaOptions::default() }.start();
    let own = own.map_err(|problem| problem.to_string())?;
    proxies.iter().zip(&doors).for_each(|(proxy, (bound, _))| proxy.lead_to(*bound));
    let version = std::env::var("MQ_TEST_KAFKA_VERSION").unwrap_or_else(|_| "4.1.1".to_owned());
    let server = format!("Apache Kafka {version}, {}", Server::url(&own));
    let direct = format!("127.0.0.1:{}", own.port());
    let factory: Arc<dyn Factory> = Arc::new(Kafka { direct, doors: Doors::new(proxies) });
    Ok(OnServer { factory, server, own: Some(Box::new(own)) })
}

fn main() -> ExitCode {
    mq_testbed::end_with_a_server();
    on_server_with(&["kafka"], Options { parallel: PARALLEL, ..Options::default() }, start)
}
