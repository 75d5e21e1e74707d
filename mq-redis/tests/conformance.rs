//! The conformance suite on a real Redis: `cargo test -p mq-redis --test conformance -- redis` (or `redis-pubsub`), with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name of a backend it does nothing, so that
//! `cargo test` stays quick.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

use mq_api::{Broker, Result, Topic, async_trait};
use mq_conformance::{Clock, Environment, Factory, Hook, Lacking, Leftovers, Lines, OnServer, Site, World, on_server};
use mq_testbed::{Kind, Road, Roads, Server, ports_in};
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;

const SECRET: &str = "s3cret-of-the-suite";

struct Redis {
    pubsub: bool,
    ports: Vec<u16>,
}

impl Factory for Redis {
    fn name(&self) -> String {
        if self.pubsub { "redis-pubsub" } else { "redis" }.to_owned()
    }

    fn environment(&self, _: Clock, run: &str) -> Arc<dyn Environment> {
        let scheme = if self.pubsub { "redis+pubsub" } else { "redis" };
        Arc::new(World::new(OnRedis { scheme, ports: self.ports.clone(), run: run.to_owned() }))
    }
}

struct OnRedis {
    scheme: &'static str,
    /// One, or those of all nodes of a Cluster.
    ports: Vec<u16>,
    run: String,
}

fn raw(port: u16) -> redis::Connection {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    client.get_connection().expect("a connection")
}

impl OnRedis {
    /// On the node where the key lives.
    fn exec(&self, command: &redis::Cmd, what: &'static str) -> Hook {
        let mut answer = Err(Lacking(what));
        for port in &self.ports {
            match command.exec(&mut raw(*port)) {
                Err(error) if error.redirect_node().is_some() => {}
                ended => answer = ended.map_err(|_| Lacking(what)),
            }
        }
        answer
    }
}

fn dead_letters(topic: &Topic, group: &str) -> String {
    format!("{{{topic}}}..{group}..dlq")
}

#[async_trait]
impl Site for OnRedis {
    type Line = Roads;

    async fn connect(&self, lines: &Lines<Roads>, number: u64, parameters: &[(&str, &str)]) -> Result<Arc<dyn Broker>> {
        let roads: Vec<Road> = self.ports.iter().map(|port| Road::to(*port).expect("a proxy")).collect();
        let first = roads.first().map(Road::port).unwrap_or_default();
        // An answer that is held back is noticed within the suite's patience.
        let mut url = format!("{}://suite:{SECRET}@127.0.0.1:{first}/?response_timeout=3s", self.scheme);
        if self.ports.len() > 1 {
            let pair = |(told, road): (&u16, &Road)| format!("127.0.0.1:{told}=127.0.0.1:{}", road.port());
            let pairs: Vec<String> = self.ports.iter().zip(&roads).map(pair).collect();
            url.push_str(&format!("&address_map={}", pairs.join(",")));
        }
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        lines.lay(number, Roads(roads));
        mq_redis::connect_with_hooks(&url, lines.hooks()).await
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        let key = dead_letters(topic, group);
        // A key of another type, which takes no entries.
        let command =
            if refuse { redis::cmd("SET").arg(&key).arg("x").take() } else { redis::cmd("DEL").arg(&key).take() };
        self.exec(&command, "changing the key of dead letters")
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        let add = if self.scheme == "redis" {
            redis::cmd("XADD").arg(topic.as_str()).arg("*").arg("payload").arg(payload).take()
        } else {
            redis::cmd("PUBLISH").arg(topic.as_str()).arg(payload).take()
        };
        self.exec(&add, "writing by hand")
    }

    async fn leftovers(&self, died: bool) -> Leftovers {
        let mut left = Leftovers::default();
        // A member that died leaves its name for the janitor.
        if died {
            return left;
        }
        for port in &self.ports {
            members_left(&mut raw(*port), &self.run, &mut left);
        }
        left
    }

    fn secret(&self) -> Option<String> {
        Some(SECRET.to_owned())
    }
}

/// Names of members in the streams of one node whose names begin with `run`.
fn members_left(raw: &mut redis::Connection, run: &str, left: &mut Leftovers) {
    let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{run}*")).query(raw).unwrap_or_default();
    for key in keys {
        let groups: Vec<HashMap<String, redis::Value>> =
            redis::cmd("XINFO").arg("GROUPS").arg(&key).query(raw).unwrap_or_default();
        for group in groups.iter().filter_map(|g| g.get("name")) {
            let members: Vec<HashMap<String, redis::Value>> =
                redis::cmd("XINFO").arg("CONSUMERS").arg(&key).arg(text(group)).query(raw).unwrap_or_default();
            for name in members.iter().filter_map(|m| m.get("name")).map(text).filter(|n| n != "~parked") {
                left.members += 1;
                left.details.push(format!("member {name} of {key}"));
            }
        }
    }
}

fn text(value: &redis::Value) -> String {
    match value {
        redis::Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        other => format!("{other:?}"),
    }
}

fn start(backend: &str) -> std::result::Result<OnServer, String> {
    let named = std::env::var(Kind::Redis.variable()).ok().filter(|url| !url.is_empty());
    let (ports, own) = match named.as_deref().map(|url| ports_in(Kind::Redis, url)) {
        Some(ports) if !ports.is_empty() => (ports, None),
        Some(_) => return Err(format!("{} names no port", Kind::Redis.variable())),
        None => {
            let own = Server::start(Kind::Redis).map_err(|problem| problem.to_string())?;
            (vec![own.port()], Some(Box::new(own) as Box<dyn std::any::Any>))
        }
    };
    let user = format!(">{SECRET}");
    for port in &ports {
        redis::cmd("ACL").arg(&["SETUSER", "suite", "on", &user, "~*", "&*", "+@all"]).exec(&mut raw(*port)).unwrap();
    }
    let mut raw = raw(ports[0]);
    let info: String = redis::cmd("INFO").arg("server").query(&mut raw).unwrap_or_default();
    // Valkey gives the number of the Redis that it is compatible with too.
    let line =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(|version| version.trim().to_owned());
    let version = match (line("valkey_version:"), line("redis_version:")) {
        (Some(version), _) => format!("Valkey {version}"),
        (None, version) => format!("Redis {}", version.as_deref().unwrap_or("?")),
    };
    let factory: Arc<dyn Factory> = Arc::new(Redis { pubsub: backend == "redis-pubsub", ports: ports.clone() });
    let nodes = if ports.len() > 1 { format!(", Cluster of {}", ports.len()) } else { String::new() };
    Ok(OnServer { factory, server: format!("{version}{nodes}"), own })
}

fn main() -> ExitCode {
    mq_testbed::end_with_a_server();
    on_server(&["redis", "redis-pubsub"], start)
}
