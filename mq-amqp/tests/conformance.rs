//! The conformance suite on a real RabbitMQ: `cargo test -p mq-amqp --test conformance -- amqp` (or `amqp-classic`), with
//! `--filter WORD`, `--parallel N`, `--verbose`, `--json`. Without the name of a backend it does nothing, so that
//! `cargo test` stays quick.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Connection as Raw, ConnectionProperties};
use mq_api::{Broker, Result, Topic, async_trait};
use mq_conformance::{Clock, Environment, Factory, Hook, Lacking, Lines, OnServer, Site, World, on_server};
use mq_testbed::{Kind, Road, Server, ports_in};
use std::process::ExitCode;
use std::sync::Arc;

struct Rabbit {
    classic: bool,
    port: u16,
}

impl Factory for Rabbit {
    fn name(&self) -> String {
        if self.classic { "amqp-classic" } else { "amqp" }.to_owned()
    }

    fn environment(&self, _: Clock, _run: &str) -> Arc<dyn Environment> {
        let kind = if self.classic { "classic" } else { "quorum" };
        Arc::new(World::new(OnRabbit { kind, port: self.port }))
    }
}

struct OnRabbit {
    kind: &'static str,
    port: u16,
}

impl OnRabbit {
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
impl Site for OnRabbit {
    type Line = Road;

    async fn connect(&self, lines: &Lines<Road>, number: u64, parameters: &[(&str, &str)]) -> Result<Arc<dyn Broker>> {
        let road = Road::to(self.port).expect("a proxy");
        let mut url = format!("amqp://guest:guest@127.0.0.1:{}/%2f?queue_type={}", road.port(), self.kind);
        // As fast as the protocol can, so that what is frozen is noticed within the suite's patience.
        if !parameters.iter().any(|(name, _)| *name == "heartbeat") {
            url.push_str("&heartbeat=2s");
        }
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        lines.lay(number, road);
        mq_amqp::connect_with_hooks(&url, lines.hooks()).await
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
}

fn start(backend: &str) -> std::result::Result<OnServer, String> {
    let named = std::env::var(Kind::RabbitMq.variable()).ok().filter(|url| !url.is_empty());
    let (port, own) = match named.as_deref().and_then(|url| ports_in(Kind::RabbitMq, url).first().copied()) {
        Some(port) => (port, None),
        None => {
            let own = Server::start(Kind::RabbitMq).map_err(|problem| problem.to_string())?;
            (own.port(), Some(Box::new(own) as Box<dyn std::any::Any>))
        }
    };
    let factory: Arc<dyn Factory> = Arc::new(Rabbit { classic: backend == "amqp-classic", port });
    Ok(OnServer { factory, server: format!("RabbitMQ on port {port}"), own })
}

fn main() -> ExitCode {
    mq_testbed::end_with_a_server();
    on_server(&["amqp", "amqp-classic"], start)
}
