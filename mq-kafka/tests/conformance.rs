//! The conformance suite on a real Apache Kafka: `cargo test -p mq-kafka --features tls --test conformance -- kafka`, with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name it does nothing, so that `cargo test` stays quick.
//!
//! Kafka tells its clients where to connect, so a proxy for each connection needs a listener for each: the broker is started
//! with a row of doors, and a test's connections take one each.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "world/requests.rs"]
mod requests;

use mq_api::{Broker, HealthState, Result, Source, Topic, async_trait};
use mq_conformance::{Clock, Connection, Environment, Factory, Fired, Hook, Lacking, Leftovers, Options, Pace};
use mq_core::Hooks;
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{KafkaOptions, Server, eventually, free_port};
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const DOORS: usize = 40;

type Row = Arc<Mutex<Vec<Proxy>>>;

struct Kafka {
    direct: String,
    doors: Row,
}

impl Factory for Kafka {
    fn name(&self) -> String {
        "kafka".to_owned()
    }

    fn environment(&self, _: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World {
            direct: self.direct.clone(),
            doors: self.doors.clone(),
            hooks: Arc::default(),
            taken: Mutex::default(),
            brokers: Mutex::default(),
            accepting: Mutex::new(true),
            numbers: AtomicU64::new(0),
        })
    }
}

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    delivered: AtomicU64,
    acked: AtomicU64,
}

impl Hooks for Counts {
    fn sent(&self, _: &Topic, n: usize) {
        self.sent.fetch_add(n as u64, Ordering::Relaxed);
    }
    fn delivered(&self, _: &Source, n: usize) {
        self.delivered.fetch_add(n as u64, Ordering::Relaxed);
    }
    fn acked(&self, _: &Source, n: usize) {
        self.acked.fetch_add(n as u64, Ordering::Relaxed);
    }
}

struct World {
    direct: String,
    doors: Row,
    hooks: Arc<Counts>,
    /// Proxies by the number of their connection, with the trouble they are in.
    taken: Mutex<HashMap<u64, (Proxy, Option<Trouble>)>>,
    brokers: Mutex<HashMap<u64, Arc<dyn Broker>>>,
    accepting: Mutex<bool>,
    numbers: AtomicU64,
}

impl World {
    fn trouble(&self, of: u64, trouble: Option<Trouble>) -> Hook {
        let mut taken = self.taken.lock().unwrap();
        let Some((proxy, present)) = taken.get_mut(&of) else { return Err(Lacking("a connection of that number")) };
        if let Some(before) = present.take() {
            // It may have met no traffic.
            let _ = proxy.end(before);
        }
        if let Some(trouble) = trouble {
            proxy.begin(trouble).map_err(|_| Lacking("that trouble"))?;
            *present = (trouble != Trouble::Cut).then_some(trouble);
        }
        Ok(())
    }

    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.direct);
        config
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let taken = std::mem::take(&mut *self.taken.lock().unwrap());
        for (_, (mut proxy, present)) in taken {
            if let Some(trouble) = present {
                let _ = proxy.end(trouble);
            }
            let _ = proxy.begin(Trouble::Cut);
            self.doors.lock().unwrap().push(proxy);
        }
    }
}

#[async_trait]
impl Environment for World {
    fn pace(&self) -> Pace {
        Pace::real()
    }

    fn settles_until_answered(&self) -> bool {
        // An offset that was not committed is committed again.
        true
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let door = self.doors.lock().unwrap().pop();
        let Some(mut proxy) = door else { panic!("more than {DOORS} connections at a time: raise DOORS") };
        let mut present = None;
        if !*self.accepting.lock().unwrap() {
            proxy.begin(Trouble::Refuse).unwrap();
            present = Some(Trouble::Refuse);
        }
        let mut url = format!("kafka://127.0.0.1:{}?min_session=2s", proxy.port());
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        self.taken.lock().unwrap().insert(number, (proxy, present));
        let broker = mq_kafka::connect_with(&url, self.hooks.clone()).await?;
        self.brokers.lock().unwrap().insert(number, broker.clone());
        Ok(Connection { broker, number })
    }

    async fn crash(&self, of: &Connection) -> Hook {
        self.trouble(of.number, Some(Trouble::Refuse))
    }

    async fn cut(&self, of: &Connection) -> Hook {
        self.trouble(of.number, Some(Trouble::Cut))
    }

    async fn reachable(&self, of: &Connection, yes: bool) -> Hook {
        self.trouble(of.number, (!yes).then_some(Trouble::Refuse))
    }

    async fn accepting(&self, yes: bool) -> Hook {
        *self.accepting.lock().unwrap() = yes;
        let numbers: Vec<u64> = self.taken.lock().unwrap().keys().copied().collect();
        if yes {
            for number in numbers {
                self.trouble(number, None)?;
            }
        }
        Ok(())
    }

    async fn hold_answers(&self, of: &Connection, hold: bool) -> Hook {
        self.trouble(of.number, hold.then_some(Trouble::Stall(Direction::ToClient)))
    }

    async fn freeze(&self, of: &Connection, frozen: bool) -> Hook {
        self.trouble(of.number, frozen.then_some(Trouble::Stall(Direction::Both)))
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        let name = Topic::dead_letters(topic.clone(), group).as_str().to_owned();
        let admin: AdminClient<DefaultClientContext> =
            self.config().create().map_err(|_| Lacking("an admin client"))?;
        let size = if refuse { "1" } else { "1300000" };
        let change = AlterConfig::new(ResourceSpecifier::Topic(&name)).set("max.message.bytes", size);
        match admin.alter_configs([&change], &AdminOptions::new()).await {
            Ok(results) if results.iter().all(std::result::Result::is_ok) => Ok(()),
            _ => Err(Lacking("changing the dead-letter topic")),
        }
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

    async fn leftovers(&self) -> Leftovers {
        let mut left = Leftovers::default();
        let taken = self.taken.lock().unwrap();
        // Only those that the test closed.
        let brokers = self.brokers.lock().unwrap();
        let is_closed = |n: &u64| brokers.get(n).is_some_and(|b| b.health().current().state == HealthState::Closed);
        let closed = || taken.iter().filter(|(n, _)| is_closed(n));
        eventually(Duration::from_secs(2), || closed().all(|(_, (proxy, _))| proxy.live() == 0));
        for (number, (proxy, _)) in closed() {
            if proxy.live() > 0 {
                left.connections += proxy.live() as u64;
                left.details.push(format!("connection {number}: {} sockets", proxy.live()));
            }
        }
        left
    }

    fn fired(&self) -> Hook<Fired> {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Ok(Fired {
            sent: read(&self.hooks.sent),
            delivered: read(&self.hooks.delivered),
            acked: read(&self.hooks.acked),
        })
    }
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let mut options = Options { parallel: 4, ..Options::default() };
    let (mut named, mut json) = (false, false);
    while let Some(word) = words.next() {
        match word.as_str() {
            "kafka" => named = true,
            "--filter" => options.filter = words.next(),
            "--parallel" => options.parallel = words.next().and_then(|n| n.parse().ok()).unwrap_or(4),
            "--verbose" => options.verbose = true,
            "--json" => json = true,
            // Those of libtest.
            _ => {}
        }
    }
    if !named {
        println!("nothing to do: name the backend, `-- kafka`");
        return ExitCode::SUCCESS;
    }
    let proxies: Vec<Proxy> = (0..DOORS as u64).map(|n| Proxy::leading_nowhere(n).unwrap()).collect();
    let doors: Vec<(u16, u16)> = proxies.iter().map(|p| (free_port().unwrap(), p.port())).collect();
    let server = match (KafkaOptions { doors: doors.clone(), ..KafkaOptions::default() }).start() {
        Ok(server) => server,
        Err(problem) => {
            eprintln!("error: no Kafka: {problem}");
            return ExitCode::FAILURE;
        }
    };
    proxies.iter().zip(&doors).for_each(|(proxy, (bound, _))| proxy.lead_to(*bound));
    let version = std::env::var("MQ_TEST_KAFKA_VERSION").unwrap_or_else(|_| "4.1.1".to_owned());
    let direct = format!("127.0.0.1:{}", server.port());
    let factory: Arc<dyn Factory> = Arc::new(Kafka { direct, doors: Arc::new(Mutex::new(proxies)) });
    let mut report = mq_conformance::run(&factory, &mq_conformance::all(), &options);
    report.hold_against(mq_conformance::expected_refusals("kafka"));
    if json {
        println!("{}", report.json());
    } else {
        println!("{}", report.table());
        println!("{}", report.histories());
        println!("server: Apache Kafka {version}, {}", Server::url(&server));
    }
    println!("{}", report.last_line());
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
