//! The quick part of the conformance suite on librdkafka's mock cluster: no server, no Java, some seconds. What the mock cannot
//! do is left to the real one: administration, faults of the line, starts by time.
#![allow(clippy::unwrap_used, clippy::panic)]

use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, HealthWatch, Producer, ProducerSpec, Result, Subscription,
    async_trait,
};
use mq_conformance::{Clock, Connection, Environment, Factory, Options, Pace};
use rdkafka::mocking::MockCluster;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Asks the mock for a topic; it cannot be asked by the protocol.
type Asked = (String, u32, mpsc::Sender<()>);

/// The mock's handle stays on the thread that made it.
fn start_mock() -> (String, mpsc::Sender<Asked>) {
    let (tell, told) = mpsc::channel();
    let (ask, asked) = mpsc::channel::<Asked>();
    std::thread::spawn(move || {
        let cluster = MockCluster::new(1).unwrap();
        tell.send(cluster.bootstrap_servers()).unwrap();
        while let Ok((name, partitions, done)) = asked.recv() {
            // It may be there already.
            let _ = cluster.create_topic(&name, partitions as i32, 1);
            let _ = done.send(());
        }
    });
    (told.recv().unwrap(), ask)
}

struct Mock {
    servers: String,
    ask: mpsc::Sender<Asked>,
}

impl Factory for Mock {
    fn name(&self) -> String {
        "kafka".to_owned()
    }

    fn environment(&self, _: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World { servers: self.servers.clone(), ask: self.ask.clone(), numbers: AtomicU64::new(0) })
    }
}

struct World {
    servers: String,
    ask: mpsc::Sender<Asked>,
    numbers: AtomicU64,
}

#[async_trait]
impl Environment for World {
    fn pace(&self) -> Pace {
        // The mock lets a group wait for 3 s before its first member has anything: a session has to outlast that.
        Pace { lease: Duration::from_secs(6), ..Pace::real() }
    }

    fn settles_until_answered(&self) -> bool {
        true
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        let mut url = format!("kafka://{}?min_session=1s&librdkafka.fetch.wait.max.ms=20", self.servers);
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        let inner = mq_kafka::connect(&url).await?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Ok(Connection { broker: Arc::new(WithTopics { inner, ask: self.ask.clone() }), number })
    }
}

/// The library's broker, before which somebody makes the topics.
struct WithTopics {
    inner: Arc<dyn Broker>,
    ask: mpsc::Sender<Asked>,
}

impl WithTopics {
    fn make(&self, name: &str, partitions: u32) {
        let (done, is_done) = mpsc::channel();
        self.ask.send((name.to_owned(), partitions, done)).unwrap();
        is_done.recv().unwrap();
    }
}

#[async_trait]
impl Broker for WithTopics {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.inner.capabilities()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        if spec.topic.validate().is_ok() {
            self.make(spec.topic.as_str(), spec.partitions.unwrap_or(12));
        }
        self.inner.open_producer(spec).await
    }

    async fn open_consumer(&self, sub: Subscription) -> Result<Box<dyn Consumer>> {
        if sub.topic.validate().is_ok() {
            let letters = sub.topic.dead_letters_of().is_some();
            self.make(sub.topic.as_str(), if letters { 1 } else { sub.partitions.unwrap_or(12) });
            if let Some(letters) = sub.dead_letter_topic() {
                self.make(letters.as_str(), 1);
            }
            if let Some(group) = sub.group_name() {
                self.make(&format!("{}..{group}..retry", sub.topic), 4);
            }
        }
        self.inner.open_consumer(sub).await
    }

    fn admin(&self) -> Arc<dyn Admin> {
        self.inner.admin()
    }

    fn health(&self) -> HealthWatch {
        self.inner.health()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.inner.close(deadline).await
    }
}

/// Tests that need nothing that the mock lacks.
const QUICK: &[&str] = &[];

#[test]
fn the_quick_part_of_the_suite_passes_on_the_mock() {
    let (servers, ask) = start_mock();
    let factory: Arc<dyn Factory> = Arc::new(Mock { servers, ask });
    let wanted = std::env::var("MQ_MOCK_ALL").is_ok();
    let cases: Vec<_> = mq_conformance::all().into_iter().filter(|case| wanted || QUICK.contains(&case.name)).collect();
    assert!(wanted || cases.len() == QUICK.len(), "a test of the list is gone");
    let options = Options { parallel: 6, verbose: wanted, partitions: Some(1), ..Options::default() };
    let report = mq_conformance::run(&factory, &cases, &options);
    println!("{}", report.last_line());
    assert_eq!(report.failed(), 0, "{}\n{}", report.table(), report.histories());
}
