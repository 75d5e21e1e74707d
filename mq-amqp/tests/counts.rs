//! What an admin says and does while messages move.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next};
use mq_api::{BrokerExt, Count, Message, ProducerSpec, RedriveOptions, Subscription};
use mq_testbed::RabbitOptions;
use std::time::{Duration, Instant};

/// Delayed messages come back to their group while they are counted, one queue after the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_counts_no_message_twice_or_never() {
    const ALL: u64 = 400;
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let sends: Vec<_> = (0..ALL).map(|n| producer.send(Message::new(n.to_string()))).collect();
    for send in sends {
        send.await.unwrap();
    }
    for _ in 0..ALL {
        let delivery = next(&mut consumer).await;
        assert!(delivery.nack_after(Duration::from_millis(1_500), "later").await.is_ok());
    }
    consumer.control().close(Duration::from_secs(5)).await;
    let (topic, group) = ("t".into(), "g".into());
    let began = Instant::now();
    let mut looks = 0;
    loop {
        let backlog = broker.admin().backlog(&topic, &group).await.unwrap();
        looks += 1;
        assert!(began.elapsed() < Duration::from_secs(30), "{backlog:?}");
        // All that is due is in the queue; what is on its way there is in no queue's number.
        let (ready, delayed) = match (backlog.ready, backlog.delayed) {
            (Count::AtMost(ready), Count::AtLeast(delayed)) => (ready, delayed),
            // The broker counts the member that left a little longer.
            (Count::AtLeast(_), Count::AtLeast(_)) => continue,
            _ => panic!("look {looks}: {backlog:?}, which nobody can know so exactly"),
        };
        assert!(ready + delayed <= ALL, "look {looks}: {backlog:?} counts a message twice");
        if (ready, delayed) == (ALL, 0) {
            break;
        }
    }
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redrive_that_nobody_waits_for_stops() {
    const ALL: usize = 60;
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    for n in 0..ALL {
        producer.send(Message::new(n.to_string())).await.unwrap();
        assert!(next(&mut consumer).await.dead_letter("bad").await.is_ok());
    }
    consumer.control().close(Duration::from_secs(5)).await;
    let (topic, group) = ("t".into(), "g".into());
    let admin = broker.admin();
    let redriving = admin.redrive(&topic, &group, RedriveOptions::default().rate(10));
    assert!(tokio::time::timeout(Duration::from_millis(1_500), redriving).await.is_err(), "it takes 6 s");
    let look = async || admin.backlog(&topic, &group).await.unwrap().ready.exact().unwrap();
    // One may be on its way still.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (before, began) = (look().await, Instant::now());
    assert!(before > 0);
    while began.elapsed() < Duration::from_secs(2) {
        assert_eq!(look().await, before, "it goes on");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // What was not sent back is there for the next, which loses nothing.
    let report = admin.redrive(&topic, &group, RedriveOptions::default()).await.unwrap();
    assert!(report.redriven + before >= ALL as u64, "{report:?} after {before}");
    broker.close(Duration::from_secs(5)).await;
}
