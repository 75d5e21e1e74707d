//! TLS, several hosts, clusters, and lines that misbehave.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use mq_api::{Broker, BrokerExt, ConsumerExt, ErrorKind, HealthState, Message, ProducerSpec, Subscription};
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Certificates, Cluster, Folder, Formation, Kind, Pair, RabbitOptions, free_port};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

async fn works(broker: &Arc<dyn Broker>, topic: &str) {
    let mut consumer = broker.subscribe(Subscription::group(topic, "g")).await.unwrap();
    broker.producer(topic).await.unwrap().send(Message::new("x")).await.unwrap();
    let delivery = tokio::time::timeout(Duration::from_secs(10), consumer.recv()).await.unwrap().unwrap().unwrap();
    assert!(delivery.ack().await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_a_client_certificate_and_an_authority_of_ones_own() {
    let folder = Folder::for_run().unwrap();
    let made = Certificates::make(&folder.path().join("certificates")).unwrap();
    let client = |pair: &Pair| format!("cert={}&key={}", pair.certificate.display(), pair.key.display());
    let good = format!("ca={}&{}", made.authority.display(), client(&made.client));
    for (server, trusted) in [(&made.server, true), (&made.misnamed_server, false), (&made.expired_server, false)] {
        let port = free_port().unwrap();
        let rabbit = RabbitOptions::default().tls(port, &made, server).start().unwrap();
        let url = format!("amqps://guest:guest@localhost:{port}/%2f");
        let began = Instant::now();
        match (mq_amqp::connect(&format!("{url}?{good}")).await, trusted) {
            (Ok(broker), true) => {
                works(&broker, "t").await;
                broker.close(Duration::from_secs(5)).await;
            }
            (Err(error), false) => assert_eq!(error.kind(), ErrorKind::Tls, "{error}"),
            (other, _) => panic!("{:?} for {server:?}", other.map(|_| ())),
        }
        if trusted {
            for (parameters, why) in [
                (client(&made.client), "an authority that nobody named"),
                (format!("ca={}&{}", made.other_authority.display(), client(&made.client)), "another authority"),
                (format!("ca={}&{}", made.authority.display(), client(&made.foreign_client)), "a foreign client"),
                (format!("ca={}", made.authority.display()), "no client certificate"),
            ] {
                let error = mq_amqp::connect(&format!("{url}?{parameters}")).await.err().expect(why);
                assert_eq!(error.kind(), ErrorKind::Tls, "{why}: {error}");
            }
        }
        assert!(began.elapsed() < Duration::from_secs(15), "at once: {:?}", began.elapsed());
        drop(rabbit);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_is_tried() {
    let rabbit = control::Rabbit::start(RabbitOptions::default());
    let down = free_port().unwrap();
    let (_, up) = rabbit.url().rsplit_once('@').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let broker = mq_amqp::connect(&format!("amqp://guest:guest@127.0.0.1:{down},{up}")).await.unwrap();
    works(&broker, "t").await;
    broker.close(Duration::from_secs(5)).await;
}

/// Sends and receives while the line is in trouble; all confirmed arrive, and it goes on within `limit` after the end.
async fn line(trouble: Trouble, time: Duration, limit: Duration) {
    let (server, mut proxy) = Proxy::with_server(Kind::RabbitMq, 7).unwrap();
    let url = format!("{}?heartbeat=2s&confirm_timeout=5s", server.url_at(proxy.port()));
    let broker = mq_amqp::connect(&url).await.unwrap();
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let sending = tokio::spawn(async move {
        let mut sends = Vec::new();
        for n in 0..3000u32 {
            sends.push((n, producer.send(Message::new(n.to_string()))));
            if n % 10 == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        let mut confirmed = BTreeSet::new();
        for (n, send) in sends {
            if send.await.is_ok() {
                confirmed.insert(n);
            }
        }
        confirmed
    });
    let receiving = tokio::spawn(async move {
        let mut seen = BTreeSet::new();
        while let Ok(got) = tokio::time::timeout(Duration::from_secs(20), consumer.recv()).await {
            let delivery = got.unwrap().unwrap();
            seen.insert(String::from_utf8_lossy(delivery.payload_bytes()).parse::<u32>().unwrap());
            drop(delivery.ack());
        }
        (seen, consumer)
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    tokio::task::block_in_place(|| {
        proxy.begin(trouble).unwrap();
        std::thread::sleep(time);
        proxy.end(trouble).unwrap();
    });
    let back = Instant::now();
    let confirmed = sending.await.unwrap();
    println!("{trouble}: {} of 3000 confirmed {:?} after the end", confirmed.len(), back.elapsed());
    assert!(back.elapsed() < limit, "{:?}", back.elapsed());
    assert_eq!(confirmed.len(), 3000, "tried again, with the same id");
    let (seen, consumer) = receiving.await.unwrap();
    let lost: Vec<_> = confirmed.difference(&seen).collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert_eq!(consumer.control().health().current().state, HealthState::Running);
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_stalls() {
    line(Trouble::Stall(Direction::Both), Duration::from_secs(3), Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_line() {
    // Noticed by the heartbeat, two of 2 s.
    line(Trouble::Swallow(Direction::Both), Duration::from_secs(3), Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn confirmations_that_never_come() {
    line(Trouble::Swallow(Direction::ToClient), Duration::from_secs(8), Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_cut() {
    line(Trouble::Cut, Duration::ZERO, Duration::from_secs(10)).await;
}

/// A cluster of three: the node that the client is on dies under load, then another is frozen.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: three nodes; run with --ignored"]
async fn a_cluster_whose_nodes_die_and_freeze() {
    let mut cluster = tokio::task::block_in_place(|| Cluster::start(Formation::RabbitMq)).unwrap();
    let url = format!("{}?heartbeat=2s&confirm_timeout=5s", cluster.url());
    let broker = mq_amqp::connect(&url).await.unwrap();
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let sending = tokio::spawn(async move {
        let (mut confirmed, mut unknown) = (BTreeSet::new(), 0);
        for round in 0..400u32 {
            let sends: Vec<_> =
                (0..50).map(|n| (round * 50 + n, producer.send(Message::new((round * 50 + n).to_string())))).collect();
            for (n, send) in sends {
                match send.await {
                    Ok(_) => drop(confirmed.insert(n)),
                    Err(_) => unknown += 1,
                }
            }
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        (confirmed, unknown)
    });
    let receiving = tokio::spawn(async move {
        let mut seen = BTreeSet::new();
        while let Ok(got) = tokio::time::timeout(Duration::from_secs(40), consumer.recv()).await {
            let delivery = got.unwrap().unwrap();
            seen.insert(String::from_utf8_lossy(delivery.payload_bytes()).parse::<u32>().unwrap());
            drop(delivery.ack());
        }
        seen
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    tokio::task::block_in_place(|| {
        // The first made the queue, so it leads.
        cluster.nodes()[0].kill().unwrap();
        std::thread::sleep(Duration::from_secs(8));
        cluster.nodes()[0].restart().unwrap();
        std::thread::sleep(Duration::from_secs(8));
        cluster.nodes()[1].freeze().unwrap();
        std::thread::sleep(Duration::from_secs(15));
        cluster.nodes()[1].thaw().unwrap();
    });
    let (confirmed, unknown) = sending.await.unwrap();
    let seen = receiving.await.unwrap();
    let lost: Vec<_> = confirmed.difference(&seen).collect();
    println!("{} confirmed, {unknown} unknown, {} lost", confirmed.len(), lost.len());
    assert!(lost.is_empty(), "{lost:?}");
    assert!(confirmed.len() > 15_000, "{}", confirmed.len());
    broker.close(Duration::from_secs(5)).await;
}
