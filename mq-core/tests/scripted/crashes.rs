//! Crash suspects: handed over alone, recorded before, dead-lettered after so many deaths, and neighbours are innocent.

use crate::broker::Toy;
use crate::handler::{nothing_comes, take};
use crate::rig::{Rig, millis, secs, sub};
use mq_api::{Consumer, ConsumerExt, RetryPolicy};

/// A consumer process that dies with what it holds: its session ends, its handles are forgotten.
async fn die(rig: &Rig, consumer: mq_core::EngineConsumer, held: Vec<mq_api::Delivery>) {
    rig.script.fail_attaches(mq_api::ErrorKind::Unavailable, 10_000);
    rig.script.cut();
    tokio::time::sleep(millis(1)).await;
    held.into_iter().for_each(drop);
    drop(consumer);
    rig.env.no_tasks().await;
    rig.script.heal_attach();
}

fn dead_ids(toy: &Toy) -> Vec<(String, String)> {
    toy.with(|st| st.dead.iter().map(|d| (d.id.to_string(), d.reason.clone())).collect())
}

#[tokio::test(start_paused = true)]
async fn the_poison_dies_and_its_neighbours_live() {
    let rig = Rig::new();
    rig.toy.publish("m", 100, 10);
    let subscription = || sub().max_in_flight(64).retry(RetryPolicy::attempts(3));
    let (mut hand_overs, mut alone, mut rounds) = (std::collections::BTreeMap::<String, u32>::new(), 0, 0);
    // Handles one by one; dies when it holds m-50.
    'restart: while rig.toy.counts().2 > 0 {
        rounds += 1;
        assert!(rounds < 20, "it ends: {:?}", rig.toy.counts());
        let mut consumer = rig.reader(subscription()).await;
        while let Ok(next) = tokio::time::timeout(secs(1), consumer.recv()).await {
            let delivery = next.unwrap().unwrap();
            *hand_overs.entry(delivery.id.to_string()).or_default() += 1;
            if delivery.id.to_string() == "m-50" {
                alone += usize::from(rig.toy.with(|st| !st.trials.is_empty()));
                die(&rig, consumer, vec![delivery]).await;
                continue 'restart;
            }
            delivery.ack().await;
        }
        assert!(consumer.close(secs(1)).await.is_clean());
    }
    assert_eq!(dead_ids(&rig.toy), [("m-50".to_owned(), "crash".to_owned())]);
    assert_eq!(rig.toy.counts(), (99, 1, 0));
    assert_eq!(alone, 2, "handed over alone as often as crash_trials says");
    assert!(hand_overs.iter().all(|(id, n)| *n <= 2 || id == "m-50"), "{hand_overs:?}");
    rig.toy.with(|st| {
        let (poison, others): (Vec<_>, Vec<_>) = st.trials.iter().partition(|(id, _)| id.to_string() == "m-50");
        assert_eq!(poison.iter().map(|t| t.1).collect::<Vec<_>>(), [1, 2]);
        assert!(others.iter().all(|t| t.1 == 1), "suspected once, and handled");
    });
}

/// Publishes `ids` so that those in `suspects` look as if their consumers had died.
async fn suspects(rig: &Rig, ids: &[&str], suspects: &[&str]) {
    for id in ids {
        rig.toy.store(mq_api::Message::new("x").id(*id), 1);
    }
    rig.toy.suspect(suspects, 5);
}

#[tokio::test(start_paused = true)]
async fn a_suspect_waits_for_empty_hands_and_nothing_goes_out_beside_it() {
    let rig = Rig::new();
    suspects(&rig, &["a", "s", "t", "b"], &["s", "t"]).await;
    rig.script.set_settle_delay(secs(1));
    let mut consumer = rig.reader(sub()).await;
    let first = tokio::time::timeout(secs(9), consumer.recv()).await.unwrap().unwrap().unwrap();
    assert!(rig.toy.with(|st| st.trials.len()) == 1, "recorded before it is handed over");
    assert!(nothing_comes(&mut consumer).await, "alone");
    rig.toy.publish("later", 1, 10);
    assert!(nothing_comes(&mut consumer).await, "alone");
    let mut ids = vec![first.id.to_string()];
    drop(first.ack());
    for _ in 0..4 {
        let next = tokio::time::timeout(secs(9), consumer.recv()).await.expect("goes on").unwrap().unwrap();
        ids.push(next.id.to_string());
        next.ack().await;
    }
    assert_eq!(ids, ["s", "t", "a", "b", "later-0"]);
    assert_eq!(rig.toy.with(|st| st.trials.clone()).len(), 2);
    assert_eq!(consumer.control().in_flight(), 0);
}

/// The next could kill the process before the broker has heard of the settlement: the suspect would be blamed for it.
#[tokio::test(start_paused = true)]
async fn what_comes_after_a_suspect_waits_until_the_broker_has_its_settlement() {
    let rig = Rig::new();
    suspects(&rig, &["s", "t", "a"], &["s", "t"]).await;
    let mut consumer = rig.reader(sub()).await;
    let mut ids = Vec::new();
    for settled in 0..3 {
        rig.script.set_settle_delay(secs(0));
        let next = tokio::time::timeout(secs(9), consumer.recv()).await.expect("goes on").unwrap().unwrap();
        assert_eq!(rig.toy.counts().0, settled, "handed over before the one before it was settled");
        ids.push(next.id.to_string());
        rig.script.set_settle_delay(secs(5));
        // Nobody awaits it.
        drop(next.ack());
        assert!(tokio::time::timeout(secs(4), consumer.recv()).await.is_err(), "the broker has not heard of it");
    }
    assert_eq!(ids, ["s", "t", "a"]);
}

#[tokio::test(start_paused = true)]
async fn a_suspect_that_is_released_stays_one_and_is_not_forgotten() {
    let rig = Rig::new();
    suspects(&rig, &["s", "a"], &["s"]).await;
    // `PerKey` keeps a release in its place.
    let mut consumer = rig.reader(sub().ordering(mq_api::Ordering::PerKey)).await;
    for _ in 0..3 {
        let next = tokio::time::timeout(secs(9), consumer.recv()).await.expect("goes on").unwrap().unwrap();
        assert_eq!(next.id.to_string(), "s");
        assert!(nothing_comes(&mut consumer).await, "alone");
        next.release().await;
    }
    assert!(rig.toy.with(|st| st.trials.iter().all(|t| t.1 == 1)), "a release is no death");
    consumer.recv().await.unwrap().unwrap().ack().await;
    let next = tokio::time::timeout(secs(9), consumer.recv()).await.expect("goes on").unwrap().unwrap();
    assert_eq!(next.id.to_string(), "a");
}

#[tokio::test(start_paused = true)]
async fn a_suspect_that_fails_in_the_ordinary_way_is_none_any_more() {
    let rig = Rig::new();
    suspects(&rig, &["s"], &["s"]).await;
    let retry = RetryPolicy::attempts(5).delays([secs(1)]);
    let mut consumer = rig.reader(sub().ordering(mq_api::Ordering::PerKey).retry(retry)).await;
    for attempt in 1..=5 {
        let next = tokio::time::timeout(secs(9), consumer.recv()).await.expect("goes on").unwrap().unwrap();
        assert_eq!(next.attempt(), attempt);
        next.nack("failed").await;
    }
    assert_eq!(dead_ids(&rig.toy), [("s".to_owned(), "max-attempts".to_owned())]);
    assert_eq!(rig.toy.with(|st| st.trials.len()), 1);
}

#[tokio::test(start_paused = true)]
async fn the_session_ends_while_a_suspect_is_recorded_or_in_hand() {
    let rig = Rig::new();
    suspects(&rig, &["s", "a"], &["s"]).await;
    rig.script.set_settle_delay(secs(5));
    let mut consumer = rig.reader(sub()).await;
    assert!(nothing_comes(&mut consumer).await, "being recorded");
    rig.script.cut();
    rig.script.set_settle_delay(secs(0));
    let first = tokio::time::timeout(secs(9), consumer.recv()).await.expect("asked again").unwrap().unwrap();
    assert_eq!(first.id.to_string(), "s");
    rig.script.cut();
    tokio::time::sleep(secs(3)).await;
    assert!(nothing_comes(&mut consumer).await, "a delivery of the lost session is still in hand");
    drop(first);
    let mut ids = Vec::new();
    while let Ok(next) = tokio::time::timeout(secs(9), consumer.recv()).await {
        let next = next.unwrap().unwrap();
        ids.push(next.id.to_string());
        next.ack().await;
    }
    ids.sort();
    assert_eq!(ids, ["a", "s"]);
    assert_eq!(take_none(&mut consumer).await, 0);
}

async fn take_none(consumer: &mut mq_core::EngineConsumer) -> usize {
    tokio::time::timeout(millis(1), take(consumer, 1)).await.map_or(0, |t| t.len())
}

#[tokio::test(start_paused = true)]
async fn clean_restarts_make_nobody_a_suspect() {
    let rig = Rig::new();
    rig.toy.publish("m", 5, 10);
    for _ in 0..20 {
        let mut consumer = rig.reader(sub()).await;
        let held = take(&mut consumer, 2).await;
        let closing = consumer.close(secs(1));
        held.into_iter().for_each(|d| drop(d.release()));
        assert!(closing.await.is_clean());
    }
    let mut consumer = rig.reader(sub()).await;
    assert_eq!(take(&mut consumer, 5).await.len(), 5);
    assert!(rig.toy.with(|st| st.trials.is_empty() && st.dead.is_empty()));
}

/// As `what_comes_after_a_suspect_waits_until_the_broker_has_its_settlement`, for one that fails, where copies are published.
#[tokio::test(start_paused = true)]
async fn what_comes_after_a_suspect_waits_until_its_copy_is_confirmed() {
    for permanent in [true, false] {
        let rig = Rig::new();
        suspects(&rig, &["s", "a"], &["s"]).await;
        let mut consumer = rig.pusher(sub(), 10).await;
        let next = tokio::time::timeout(secs(9), consumer.recv()).await.expect("goes on").unwrap().unwrap();
        assert_eq!(next.id.to_string(), "s");
        // The broker answers the relay late.
        rig.script.set_write_delay(secs(5));
        match permanent {
            true => drop(next.dead_letter("bad")),
            false => drop(next.nack_after(secs(60), "later")),
        }
        let early = tokio::time::timeout(secs(4), consumer.recv()).await;
        assert_eq!(rig.toy.counts().1, 0, "no dead letter yet");
        assert!(
            early.is_err(),
            "'a' goes out while the broker still has 's' with its trial on it; permanent: {permanent}"
        );
    }
}
