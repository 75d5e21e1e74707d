//! The conformance suite on a real Redis: `cargo test -p mq-redis --test conformance -- redis` (or `redis-pubsub`), with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name of a backend it does nothing, so that
//! `cargo test` stays quick.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, Feature, HealthWatch, Producer, ProducerSpec, Result, Source,
    Subscription, Topic, async_trait,
};
use mq_conformance::{Clock, Connection, Environment, Factory, Fired, Hook, Lacking, Leftovers, Options, Pace};
use mq_core::Hooks;
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Kind, Server};
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECRET: &str = "s3cret-of-the-suite";

struct Redis {
    pubsub: bool,
    port: u16,
}

impl Factory for Redis {
    fn name(&self) -> String {
        if self.pubsub { "redis-pubsub" } else { "redis" }.to_owned()
    }

    fn environment(&self, _: Clock, run: &str) -> Arc<dyn Environment> {
        Arc::new(World {
            scheme: if self.pubsub { "redis+pubsub" } else { "redis" },
            port: self.port,
            run: run.to_owned(),
            hooks: Arc::default(),
            proxies: Mutex::default(),
            leaks: Arc::default(),
            died: AtomicBool::new(false),
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

/// Takes the proxy down with the connection, whose threads would be counted as the library's.
struct Proxied {
    broker: Arc<dyn Broker>,
    proxy: Arc<Mutex<Option<Proxy>>>,
    leaks: Arc<Mutex<Vec<String>>>,
}

#[async_trait]
impl Broker for Proxied {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.broker.capabilities()
    }
    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        self.broker.open_producer(spec).await
    }
    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        self.broker.open_consumer(subscription).await
    }
    fn admin(&self) -> Arc<dyn Admin> {
        self.broker.admin()
    }
    fn health(&self) -> HealthWatch {
        self.broker.health()
    }
    async fn close(&self, deadline: Duration) -> CloseReport {
        let report = self.broker.close(deadline).await;
        // The proxy needs a moment to see that a socket was closed.
        for _ in 0..100 {
            if self.proxy.lock().unwrap().as_ref().is_none_or(|p| p.live() == 0) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if let Some(proxy) = self.proxy.lock().unwrap().take()
            && proxy.live() > 0
        {
            self.leaks.lock().unwrap().push(format!("{} sockets", proxy.live()));
        }
        report
    }
}

struct World {
    scheme: &'static str,
    port: u16,
    run: String,
    hooks: Arc<Counts>,
    /// Each connection comes through a proxy of its own, so that faults hit it alone.
    proxies: Mutex<HashMap<u64, Arc<Mutex<Option<Proxy>>>>>,
    leaks: Arc<Mutex<Vec<String>>>,
    /// A member that died leaves its name for the janitor.
    died: AtomicBool,
    accepting: Mutex<bool>,
    waiting: Mutex<Vec<Arc<Mutex<Option<Proxy>>>>>,
    numbers: AtomicU64,
}

impl World {
    fn trouble(&self, of: &Connection, trouble: Trouble, on: bool) -> Hook {
        let proxy = self.proxies.lock().unwrap().get(&of.number).cloned();
        let proxy = proxy.ok_or(Lacking("a connection of that number"))?;
        let mut proxy = proxy.lock().unwrap();
        let Some(proxy) = proxy.as_mut() else { return Ok(()) };
        if on {
            self.died.fetch_or(trouble == Trouble::Refuse, Ordering::Relaxed);
            proxy.begin(trouble).expect("the proxy obeys");
        } else {
            // One that met no traffic is fine here: the suite looks at the effect.
            let _ = proxy.end(trouble);
        }
        Ok(())
    }

    fn raw(&self) -> redis::Connection {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", self.port)).expect("a URL");
        client.get_connection().expect("a connection")
    }
}

fn dead_letters(topic: &Topic, group: &str) -> String {
    format!("{{{topic}}}..{group}..dlq")
}

#[async_trait]
impl Environment for World {
    fn pace(&self) -> Pace {
        Pace::real()
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        let proxy = Proxy::leading_nowhere(1).expect("a proxy");
        let port = proxy.port();
        let accepting = *self.accepting.lock().unwrap();
        if accepting {
            proxy.lead_to(self.port);
        }
        let proxy = Arc::new(Mutex::new(Some(proxy)));
        if !accepting {
            self.waiting.lock().unwrap().push(proxy.clone());
        }
        // An answer that is held back is noticed within the suite's patience.
        let mut url = format!("{}://suite:{SECRET}@127.0.0.1:{port}/?response_timeout=3s", self.scheme);
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        let broker = mq_redis::connect_with_hooks(&url, self.hooks.clone()).await?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.proxies.lock().unwrap().insert(number, proxy.clone());
        let broker = Arc::new(Proxied { broker, proxy, leaks: self.leaks.clone() });
        Ok(Connection { broker, number })
    }

    async fn connect_lacking(&self, feature: Feature) -> Hook<Connection> {
        let connection = self.connect().await.map_err(|_| Lacking("a connection"))?;
        match connection.broker.capabilities().has(feature) {
            false => Ok(connection),
            true => Err(Lacking("a Redis without that feature")),
        }
    }

    async fn crash(&self, of: &Connection) -> Hook {
        // The sockets are reset and no new ones come: all that a server sees of a death.
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
                if let Some(proxy) = proxy.lock().unwrap().as_ref() {
                    proxy.lead_to(self.port);
                }
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
        let key = dead_letters(topic, group);
        let mut raw = self.raw();
        // A key of another type, which takes no entries.
        let command =
            if refuse { redis::cmd("SET").arg(&key).arg("x").take() } else { redis::cmd("DEL").arg(&key).take() };
        command.exec(&mut raw).map_err(|_| Lacking("changing the key of dead letters"))
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        let add = if self.scheme == "redis" {
            redis::cmd("XADD").arg(topic.as_str()).arg("*").arg("payload").arg(payload).take()
        } else {
            redis::cmd("PUBLISH").arg(topic.as_str()).arg(payload).take()
        };
        add.exec(&mut self.raw()).map_err(|_| Lacking("writing by hand"))
    }

    async fn leftovers(&self) -> Leftovers {
        let mut left = Leftovers::default();
        left.details = self.leaks.lock().unwrap().clone();
        left.connections = left.details.len() as u64;
        if self.died.load(Ordering::Relaxed) {
            return left;
        }
        let mut raw = self.raw();
        let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{}*", self.run)).query(&mut raw).unwrap_or_default();
        for key in keys {
            let groups: Vec<HashMap<String, redis::Value>> =
                redis::cmd("XINFO").arg("GROUPS").arg(&key).query(&mut raw).unwrap_or_default();
            for group in groups.iter().filter_map(|g| g.get("name")) {
                let members: Vec<HashMap<String, redis::Value>> =
                    redis::cmd("XINFO").arg("CONSUMERS").arg(&key).arg(text(group)).query(&mut raw).unwrap_or_default();
                for name in members.iter().filter_map(|m| m.get("name")).map(text).filter(|n| n != "~parked") {
                    left.members += 1;
                    left.details.push(format!("member {name} of {key}"));
                }
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

    fn secret(&self) -> Option<String> {
        Some(SECRET.to_owned())
    }
}

fn text(value: &redis::Value) -> String {
    match value {
        redis::Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        other => format!("{other:?}"),
    }
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let mut options = Options { parallel: 4, ..Options::default() };
    let (mut backend, mut json, mut write) = (None, false, false);
    while let Some(word) = words.next() {
        match word.as_str() {
            "redis" | "redis-pubsub" => backend = Some(word),
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
        println!("nothing to do: name a backend, `-- redis` or `-- redis-pubsub`");
        return ExitCode::SUCCESS;
    };
    let named = std::env::var(Kind::Redis.variable()).ok().filter(|url| !url.is_empty());
    let mut server = None;
    let named = named.as_deref().and_then(|url| url.trim_end_matches('/').rsplit(':').next()?.parse().ok());
    let port = match named {
        Some(port) => port,
        None => match Server::start(Kind::Redis) {
            Ok(own) => server.insert(own).port(),
            Err(problem) => {
                eprintln!("error: no Redis: {problem}");
                return ExitCode::FAILURE;
            }
        },
    };
    let mut raw = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap().get_connection().unwrap();
    let user = format!(">{SECRET}");
    redis::cmd("ACL").arg(&["SETUSER", "suite", "on", &user, "~*", "&*", "+@all"]).exec(&mut raw).unwrap();
    let factory: Arc<dyn Factory> = Arc::new(Redis { pubsub: backend == "redis-pubsub", port });
    let mut report = mq_conformance::run(&factory, &mq_conformance::all(), &options);
    if write {
        let path = format!("{}/../mq-conformance/unsupported/{backend}.txt", env!("CARGO_MANIFEST_DIR"));
        if let Err(error) = std::fs::write(&path, report.refusals()) {
            eprintln!("error: {path}: {error}");
        }
    }
    report.hold_against(mq_conformance::expected_refusals(&backend));
    let info: String = redis::cmd("INFO").arg("server").query(&mut raw).unwrap_or_default();
    let version = info.lines().find_map(|l| l.strip_prefix("redis_version:")).unwrap_or("?").trim().to_owned();
    if json {
        println!("{}", report.json());
    } else {
        println!("{}", report.table());
        println!("{}", report.histories());
        println!("server: Redis {version}");
    }
    println!("{}", report.last_line());
    drop(server);
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
