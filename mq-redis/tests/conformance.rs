//! The conformance suite on a real Redis: `cargo test -p mq-redis --test conformance -- redis` (or `redis-pubsub`), with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name of a backend it does nothing, so that
//! `cargo test` stays quick.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

use mq_api::{Broker, Result, Topic, async_trait};
use mq_conformance::{Clock, Environment, Factory, Hook, Lacking, Leftovers, Lines, OnServer, Site, World, on_server};
use mq_testbed::{Kind, Road, Server};
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;

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
        let scheme = if self.pubsub { "redis+pubsub" } else { "redis" };
        Arc::new(World::new(OnRedis { scheme, port: self.port, run: run.to_owned() }))
    }
}

struct OnRedis {
    scheme: &'static str,
    port: u16,
    run: String,
}

impl OnRedis {
    fn raw(&self) -> redis::Connection {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", self.port)).expect("a URL");
        client.get_connection().expect("a connection")
    }
}

fn dead_letters(topic: &Topic, group: &str) -> String {
    format!("{{{topic}}}..{group}..dlq")
}

#[async_trait]
impl Site for OnRedis {
    type Line = Road;

    async fn connect(&self, lines: &Lines<Road>, number: u64, parameters: &[(&str, &str)]) -> Result<Arc<dyn Broker>> {
        let road = Road::to(self.port).expect("a proxy");
        // An answer that is held back is noticed within the suite's patience.
        let mut url = format!("{}://suite:{SECRET}@127.0.0.1:{}/?response_timeout=3s", self.scheme, road.port());
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        lines.lay(number, road);
        mq_redis::connect_with_hooks(&url, lines.hooks()).await
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

    async fn leftovers(&self, died: bool) -> Leftovers {
        let mut left = Leftovers::default();
        // A member that died leaves its name for the janitor.
        if died {
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

fn start(backend: &str) -> std::result::Result<OnServer, String> {
    let named = std::env::var(Kind::Redis.variable()).ok().filter(|url| !url.is_empty());
    let named = named.as_deref().and_then(|url| url.trim_end_matches('/').rsplit(':').next()?.parse().ok());
    let (port, own) = match named {
        Some(port) => (port, None),
        None => {
            let own = Server::start(Kind::Redis).map_err(|problem| problem.to_string())?;
            (own.port(), Some(Box::new(own) as Box<dyn std::any::Any>))
        }
    };
    let mut raw = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap().get_connection().unwrap();
    let user = format!(">{SECRET}");
    redis::cmd("ACL").arg(&["SETUSER", "suite", "on", &user, "~*", "&*", "+@all"]).exec(&mut raw).unwrap();
    let info: String = redis::cmd("INFO").arg("server").query(&mut raw).unwrap_or_default();
    let version = info.lines().find_map(|l| l.strip_prefix("redis_version:")).unwrap_or("?").trim().to_owned();
    let factory: Arc<dyn Factory> = Arc::new(Redis { pubsub: backend == "redis-pubsub", port });
    Ok(OnServer { factory, server: format!("Redis {version}"), own })
}

fn main() -> ExitCode {
    on_server(&["redis", "redis-pubsub"], start)
}
