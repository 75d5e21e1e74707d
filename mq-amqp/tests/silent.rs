//! A broker that accepts and says nothing costs nothing that stays. In a file of its own: threads are counted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

use mq_api::{BrokerExt, Message, ProducerSpec, Subscription};
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Kind, SilentHosts, eventually, ports_in};
use std::time::{Duration, Instant};

fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.contains("lapin")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_and_goodbyes_without_answer_leave_no_thread_and_no_socket() {
    let Some(url) = mq_testbed::need(Kind::RabbitMq) else { return };
    let mut proxy = Proxy::before(ports_in(Kind::RabbitMq, &url)[0], 1).unwrap();
    let silent = SilentHosts::new(1).unwrap();
    let hosts = format!("127.0.0.1:{},{silent}", proxy.port());
    let broker = mq_amqp::connect(&format!("amqp://guest:guest@{hosts}/%2f?heartbeat=1s")).await.unwrap();
    let topic = format!("silent-{}", std::process::id());
    let producer = broker.producer(ProducerSpec::new(topic.as_str()).group("g")).await.unwrap();
    let consumer = broker.subscribe(Subscription::group(topic.as_str(), "g")).await.unwrap();
    assert_eq!(threads(), 2, "one that publishes, one that consumes");
    proxy.begin(Trouble::Refuse).unwrap();
    let began = Instant::now();
    let (mut most, mut sockets) = (0, 0);
    while began.elapsed() < Duration::from_secs(25) {
        (most, sockets) = (most.max(threads()), sockets.max(proxy.live()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("at most {most} threads, {sockets} sockets");
    // Each of the two may be made anew while the former is ending.
    assert!(most <= 4 && sockets <= 4, "{most} threads, {sockets} sockets: those that are given up stay");
    proxy.end(Trouble::Refuse).unwrap();
    producer.send(Message::new("x")).await.unwrap();
    broker.admin().delete_topic(&topic.as_str().into()).await.unwrap();
    proxy.begin(Trouble::Stall(Direction::Both)).unwrap();
    drop(consumer);
    broker.close(Duration::from_secs(1)).await;
    let gone = eventually(Duration::from_secs(3), || threads() == 0 && proxy.live() == 0);
    assert!(gone, "{} threads, {} sockets", threads(), proxy.live());
}
