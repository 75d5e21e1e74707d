//! Nothing is left after close: no thread, no socket.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

use mq_api::{BrokerExt, ConsumerExt, Message, Subscription};
use mq_testbed::proxy::Proxy;
use mq_testbed::{Kind, eventually, ports_in};
use std::time::Duration;

fn threads() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .filter_map(|t| std::fs::read_to_string(t.path().join("comm")).ok())
        .map(|n| n.trim().to_owned())
        .filter(|n| n.contains("lapin") || n.contains("anymq") || n.contains("async-io"))
        .collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn no_thread_and_no_socket() {
    let Some(url) = mq_testbed::need(Kind::RabbitMq) else { return };
    let mut proxy = Proxy::before(ports_in(Kind::RabbitMq, &url)[0], 1).unwrap();
    let url = format!("amqp://guest:guest@127.0.0.1:{}/%2f", proxy.port());
    for round in 0..20 {
        let broker = mq_amqp::connect(&url).await.unwrap();
        let topic = format!("left-{}-{round}", std::process::id());
        let mut consumer = broker.subscribe(Subscription::group(&topic, "g")).await.unwrap();
        let producer = broker.producer(topic.as_str()).await.unwrap();
        producer.send(Message::new("x")).await.unwrap();
        let got = consumer.recv().await.unwrap().unwrap();
        if round % 4 == 3 {
            proxy.begin(mq_testbed::proxy::Trouble::Cut).unwrap();
        }
        got.ack().await;
        let receiver = broker.subscribe(Subscription::broadcast(&topic)).await.unwrap();
        if round % 2 == 0 {
            drop(consumer);
            drop(receiver);
        }
        let report = broker.close(Duration::from_secs(5)).await;
        assert_eq!(report.abandoned, 0, "{report:?}");
        let gone = eventually(Duration::from_secs(3), || threads().is_empty() && proxy.live() == 0);
        assert!(gone, "round {round}: {:?}, {} sockets", threads(), proxy.live());
    }
}
