//! The conformance suite on a real RabbitMQ: `cargo test -p mq-amqp --test conformance -- amqp` (or `amqp-classic`), with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name of a backend it does nothing, so that
//! `cargo test` stays quick.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Connection as Raw, ConnectionProperties};
use mq_api::{Feature, HealthState, HealthWatch, Result, Source, Topic, async_trait};
use mq_conformance::{Clock, Connection, Environment, Factory, Fired, Hook, Lacking, Leftovers, Options, Pace};
use mq_core::Hooks;
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Kind, Server};
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

struct Rabbit {
    classic: bool,
    port: u16,
}

impl Rabbit {
    fn kind(&self) -> &'static str {
        if self.classic { "classic" } else { "quorum" }
    }
}

impl Factory for Rabbit {
    fn name(&self) -> String {
        if self.classic { "amqp-classic" } else { "amqp" }.to_owned()
    }

    fn environment(&self, _: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World {
            kind: self.kind(),
            port: self.port,
            hooks: Arc::default(),
            proxies: Mutex::default(),
            accepting: Mutex::new(true),
            waiting: Mutex::default(),
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

/// A proxy, and the health of the connection that comes through it.
type Line = (Arc<Mutex<Proxy>>, HealthWatch);

struct World {
    kind: &'static str,
    port: u16,
    hooks: Arc<Counts>,
    /// Each connection comes through a proxy of its own, so that faults hit it alone.
    proxies: Mutex<HashMap<u64, Line>>,
    accepting: Mutex<bool>,
    waiting: Mutex<Vec<Arc<Mutex<Proxy>>>>,
    numbers: AtomicU64,
}

impl World {
    fn with(&self, of: &Connection, act: impl FnOnce(&mut Proxy)) -> Hook {
        let proxy = self.proxies.lock().unwrap().get(&of.number).cloned();
        let (proxy, _) = proxy.ok_or(Lacking("a connection of that number"))?;
        act(&mut proxy.lock().unwrap());
        Ok(())
    }

    fn trouble(&self, of: &Connection, trouble: Trouble, on: bool) -> Hook {
        self.with(of, |proxy| {
            if on {
                proxy.begin(trouble).expect("the proxy obeys");
            } else {
                // One that met no traffic is fine here: the suite looks at the effect.
                let _ = proxy.end(trouble);
            }
        })
    }

    /// Acts as another program: in a runtime of its own, so that nothing of it is taken for a leftover of the library.
    fn raw<T: Send + 'static>(
        &self,
        act: impl AsyncFnOnce(lapin::Channel) -> lapin::Result<T> + Send + 'static,
    ) -> Hook<T> {
        let url = format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let raw = Raw::connect(&url, ConnectionProperties::default()).await?;
                let done = act(raw.create_channel().await?).await?;
                // The channel is closing already, which the connection may call an error.
                let _ = raw.close(200, "OK".into()).await;
                Ok::<_, lapin::Error>(done)
            })
        });
        let done = thread.join().map_err(|_| Lacking("a connection by hand"))?;
        done.map_err(|error| {
            eprintln!("by hand: {error}");
            Lacking("acting by hand")
        })
    }
}

fn exchange_of(topic: &Topic) -> (String, String) {
    match topic.is_native() {
        true => (String::new(), topic.as_str().to_owned()),
        false => (topic.as_str().to_owned(), String::new()),
    }
}

#[async_trait]
impl Environment for World {
    fn pace(&self) -> Pace {
        Pace::real()
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        // The proxies of closed connections have threads, which the suite would count.
        self.proxies.lock().unwrap().retain(|_, (proxy, health)| {
            health.current().state != HealthState::Closed || proxy.lock().unwrap().live() > 0
        });
        let proxy = Proxy::leading_nowhere(1).expect("a proxy");
        let port = proxy.port();
        let accepting = *self.accepting.lock().unwrap();
        if accepting {
            proxy.lead_to(self.port);
        }
        let proxy = Arc::new(Mutex::new(proxy));
        if !accepting {
            self.waiting.lock().unwrap().push(proxy.clone());
        }
        let mut url = format!("amqp://guest:guest@127.0.0.1:{port}/%2f?queue_type={}", self.kind);
        // As fast as the protocol can, so that what is frozen is noticed within the suite's patience.
        if !parameters.iter().any(|(name, _)| *name == "heartbeat") {
            url.push_str("&heartbeat=2s");
        }
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        let broker = mq_amqp::connect_with_hooks(&url, self.hooks.clone()).await?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.proxies.lock().unwrap().insert(number, (proxy, broker.health()));
        Ok(Connection { broker, number })
    }

    async fn connect_lacking(&self, feature: Feature) -> Hook<Connection> {
        let connection = self.connect().await.map_err(|_| Lacking("a connection"))?;
        match connection.broker.capabilities().has(feature) {
            false => Ok(connection),
            true => Err(Lacking("a RabbitMQ without that feature")),
        }
    }

    async fn crash(&self, of: &Connection) -> Hook {
        // The sockets are reset and no new ones come: all that a broker sees of a death.
        self.trouble(of, Trouble::Refuse, true)
    }

    async fn cut(&self, of: &Connection) -> Hook {
        self.trouble(of, Trouble::Cut, true)
    }

    async fn reachable(&self, of: &Connection, yes: bool) -> Hook {
        self.trouble(of, Trouble::Refuse, !yes)
    }

    async fn accepting(&self, yes: bool) -> Hook {
        *self.accepting.lock().unwrap() = yes;
        if yes {
            for proxy in self.waiting.lock().unwrap().drain(..) {
                proxy.lock().unwrap().lead_to(self.port);
            }
        }
        Ok(())
    }

    async fn hold_answers(&self, of: &Connection, hold: bool) -> Hook {
        self.trouble(of, Trouble::Stall(Direction::ToClient), hold)
    }

    async fn freeze(&self, of: &Connection, frozen: bool) -> Hook {
        self.trouble(of, Trouble::Stall(Direction::Both), frozen)
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        let queue = Topic::dead_letters(topic.clone(), group).as_str().to_owned();
        self.raw(async move |channel| {
            channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await?;
            let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
            let mut arguments = FieldTable::default();
            if refuse {
                // A queue without room, which refuses what is published.
                arguments.insert("x-max-length".into(), AMQPValue::LongInt(0));
                arguments.insert("x-overflow".into(), AMQPValue::LongString(LongString::from("reject-publish")));
                channel.queue_declare(queue.as_str().into(), durable, arguments).await?;
            }
            Ok(())
        })
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        let (exchange, key) = exchange_of(topic);
        let payload = payload.to_vec();
        self.raw(async move |channel| {
            channel.confirm_select(lapin::options::ConfirmSelectOptions::default()).await?;
            let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
            channel.basic_publish(exchange.into(), key.into(), options, &payload, properties).await?.await?;
            Ok(())
        })
    }

    async fn leftovers(&self) -> Leftovers {
        let mut left = Leftovers::default();
        for (number, (proxy, health)) in self.proxies.lock().unwrap().iter() {
            if health.current().state != HealthState::Closed {
                continue;
            }
            let proxy = proxy.lock().unwrap();
            // The proxy sees the end of a socket a moment after both sides do.
            mq_testbed::eventually(std::time::Duration::from_secs(2), || proxy.live() == 0);
            let live = proxy.live();
            if live > 0 {
                left.connections += live as u64;
                left.details.push(format!("{live} sockets of connection {number}"));
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

fn port_of(url: &str) -> Option<u16> {
    let host = url.rsplit('@').next()?.split('/').next()?;
    host.rsplit(':').next()?.parse().ok()
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let mut options = Options { parallel: 4, ..Options::default() };
    let (mut backend, mut json, mut write) = (None, false, false);
    while let Some(word) = words.next() {
        match word.as_str() {
            "amqp" | "amqp-classic" => backend = Some(word),
            "--filter" => options.filter = words.next(),
            "--parallel" => options.parallel = words.next().and_then(|n| n.parse().ok()).unwrap_or(4),
            "--verbose" => options.verbose = true,
            "--json" => json = true,
            "--write-unsupported" => write = true,
            // Those of libtest.
            _ => {}
        }
    }
    let Some(backend) = backend else {
        println!("nothing to do: name a backend, `-- amqp` or `-- amqp-classic`");
        return ExitCode::SUCCESS;
    };
    let named = std::env::var(Kind::RabbitMq.variable()).ok().filter(|url| !url.is_empty());
    let mut server = None;
    let port = match named.as_deref().and_then(port_of) {
        Some(port) => port,
        None => match Server::start(Kind::RabbitMq) {
            Ok(own) => server.insert(own).port(),
            Err(problem) => {
                eprintln!("error: no RabbitMQ: {problem}");
                return ExitCode::FAILURE;
            }
        },
    };
    let factory: Arc<dyn Factory> = Arc::new(Rabbit { classic: backend == "amqp-classic", port });
    let mut report = mq_conformance::run(&factory, &mq_conformance::all(), &options);
    if write {
        let path = format!("{}/../mq-conformance/unsupported/{backend}.txt", env!("CARGO_MANIFEST_DIR"));
        if let Err(error) = std::fs::write(&path, report.refusals()) {
            eprintln!("error: {path}: {error}");
        }
    }
    report.hold_against(mq_conformance::expected_refusals(&backend));
    if json {
        println!("{}", report.json());
    } else {
        println!("{}", report.table());
        println!("{}", report.histories());
    }
    println!("{}", report.last_line());
    drop(server);
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
