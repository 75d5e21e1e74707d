//! A private RabbitMQ and its command line.

#[allow(dead_code)] // Each test file uses a part of it.
pub(crate) mod eye;
#[allow(dead_code)] // Each test file uses a part of it.
pub(crate) mod load;

use mq_api::{Broker, Consumer, ConsumerExt, Delivery};
use mq_testbed::proxy::Proxy;
use mq_testbed::{Kind, RabbitOptions, Server, ports_in};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct Rabbit {
    server: Server,
}

#[allow(dead_code)] // Each test file uses a part of it.
impl Rabbit {
    pub(crate) fn start(options: RabbitOptions) -> Self {
        Self { server: options.start().expect("a RabbitMQ: `cargo xtask brokers up` once") }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) async fn connect(&self, parameters: &str) -> Arc<dyn Broker> {
        mq_amqp::connect(&format!("{}?{parameters}", self.url())).await.unwrap()
    }

    /// A client behind a proxy, and the proxy.
    pub(crate) async fn far(&self) -> (Proxy, Arc<dyn Broker>) {
        let url = self.url();
        let at = ports_in(Kind::RabbitMq, &url)[0];
        let proxy = Proxy::before(at, 1).unwrap();
        let far = mq_amqp::connect(&url.replace(&format!(":{at}/"), &format!(":{}/", proxy.port()))).await.unwrap();
        (proxy, far)
    }

    /// A connection and a channel of another program.
    pub(crate) async fn raw(&self) -> (lapin::Connection, lapin::Channel) {
        let connection = lapin::Connection::connect(&self.url(), lapin::ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    /// Waits until what was just declared outlives a `kill -9`. The server notes its quorum queues, and who runs its streams, in
    /// a table that it saves some half a second after the last change; one that is killed before has the queue's name and
    /// calls it down for ever. It tells nobody when it has saved, hence a time, and a generous one.
    pub(crate) async fn lasting() {
        tokio::time::sleep(Duration::from_secs(4)).await;
    }

    pub(crate) fn stop(&mut self) {
        self.server.stop().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.server.restart().unwrap();
    }

    pub(crate) fn kill_and_restart(&mut self) {
        self.server.kill().unwrap();
        self.server.restart().unwrap();
    }

    pub(crate) fn stop_and_restart(&mut self) {
        self.server.stop().unwrap();
        self.server.restart().unwrap();
    }

    pub(crate) fn freeze(&mut self, time: Duration) {
        self.server.freeze().unwrap();
        std::thread::sleep(time);
        self.server.thaw().unwrap();
    }

    /// Runs `rabbitmqctl`, with the environment that the server runs in.
    pub(crate) fn control(&self, words: &[&str]) -> String {
        let pid = self.server.pid().expect("it runs");
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let variables = environment.split(|b| *b == 0).filter_map(|v| std::str::from_utf8(v).ok()?.split_once('='));
        let output = Command::new(program())
            .arg("-q")
            .args(words)
            .env_clear()
            .envs(variables)
            .env("PATH", std::env::var("PATH").unwrap_or_default())
            .output()
            .unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// Not the installed wrapper, which changes the user.
fn program() -> PathBuf {
    let roots = [mq_testbed::root().join("cache"), "/usr/lib/rabbitmq/lib".into()];
    let homes = roots.iter().filter_map(|root| std::fs::read_dir(root).ok()).flatten().flatten();
    let mut found = homes.map(|home| home.path().join("sbin/rabbitmqctl")).filter(|path| path.exists());
    found.next().expect("rabbitmqctl")
}

#[allow(dead_code)] // Each test file uses a part of it.
pub(crate) async fn next(consumer: &mut Box<dyn Consumer>) -> Delivery {
    match tokio::time::timeout(Duration::from_secs(60), consumer.recv()).await {
        Ok(got) => got.unwrap().expect("a delivery"),
        Err(_) => panic!("nothing came: {:?}", consumer.control().health().current()),
    }
}

#[allow(dead_code)] // Each test file uses a part of it.
pub(crate) async fn quiet(consumer: &mut Box<dyn Consumer>, time: Duration) {
    let got = tokio::time::timeout(time, consumer.recv()).await;
    assert!(got.is_err(), "{got:?}");
}

#[allow(dead_code)] // Each test file uses a part of it.
pub(crate) fn text(delivery: &Delivery) -> String {
    String::from_utf8_lossy(delivery.payload_bytes()).into_owned()
}
