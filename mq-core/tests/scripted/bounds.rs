//! At most `max_in_flight` deliveries and bytes are in hand, and credit is never lost.

use crate::handler::{nothing_comes, take};
use crate::rig::{Rig, millis, secs, sub};
use mq_api::{Consumer, ConsumerExt, Deliveries, Message};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[tokio::test(start_paused = true)]
async fn a_broker_that_pushes_more_than_the_bound_does_not_break_it() {
    let rig = Rig::new();
    rig.toy.publish("m", 50, 10);
    let mut consumer = rig.pusher(sub().max_in_flight(5), 50).await;
    let mut held = take(&mut consumer, 5).await;
    assert!(nothing_comes(&mut consumer).await);
    while let Some(delivery) = held.pop() {
        assert!(held.len() < 5);
        delivery.ack().await;
        if let Ok(next) = tokio::time::timeout(millis(10), consumer.recv()).await {
            held.push(next.unwrap().unwrap());
        }
    }
    assert_eq!(rig.toy.counts(), (50, 0, 0));
    assert_eq!(consumer.control().in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn bytes_are_bounded_and_a_large_message_goes_alone() {
    let rig = Rig::new();
    for size in [40, 40, 40, 500, 40, 60] {
        rig.toy.store(Message::new(vec![0; size]), 1);
    }
    let mut consumer = rig.pusher(sub().max_in_flight_bytes(100), 50).await;
    let mut sizes = Vec::new();
    while sizes.iter().flatten().count() < 6 {
        let mut batch = Deliveries::new();
        consumer.recv_batch(10, &mut batch).await.unwrap();
        assert!(nothing_comes(&mut consumer).await, "the bound is reached or nothing is left");
        sizes.push(batch.messages().map(Message::size).collect::<Vec<_>>());
        batch.ack_all().await;
    }
    assert_eq!(sizes, [vec![40, 40], vec![40], vec![500], vec![40, 60]]);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_on_another_thread_wakes_a_receiver_that_waits_for_room() {
    // The same on two threads, without paused time: see `hammered`.
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    let mut consumer = rig.pusher(sub().max_in_flight(1), 10).await;
    let first = take(&mut consumer, 1).await.remove(0);
    let waiting = tokio::spawn(async move { consumer.recv().await.unwrap().unwrap().ack().await });
    tokio::time::sleep(millis(1)).await;
    first.ack().await;
    tokio::time::timeout(secs(1), waiting).await.expect("woken").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn hammered() {
    let rig = Rig::new();
    const N: usize = 20_000;
    rig.toy.publish("m", N, 10);
    let mut consumer = rig.pusher(sub().max_in_flight(2), 64).await;
    let hands = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..N {
        let next = tokio::time::timeout(secs(20), consumer.recv()).await.expect("no wake-up is lost");
        let delivery = next.unwrap().unwrap();
        assert!(hands.fetch_add(1, Ordering::SeqCst) < 2);
        let hands = hands.clone();
        tasks.spawn(async move {
            hands.fetch_sub(1, Ordering::SeqCst);
            drop(delivery.ack());
        });
        while tasks.try_join_next().is_some() {}
    }
    tasks.join_all().await;
    assert!(consumer.close(secs(5)).await.is_clean());
    assert_eq!((rig.toy.counts(), consumer.control().in_flight()), ((N, 0, 0), 0));
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn credit_comes_back_by_every_way_out() {
    let rig = Rig::new();
    rig.toy.publish("m", 8, 10);
    let mut consumer = rig.reader(sub().max_in_flight(4)).await;
    for round in 0..2 {
        let mut held = take(&mut consumer, 4).await;
        assert_eq!(consumer.control().in_flight(), 4, "round {round}");
        drop(held.remove(0).ack());
        drop(held.remove(0).nack_after(secs(3600), "later"));
        drop(held.remove(0).dead_letter("no"));
        drop(held.remove(0));
    }
    tokio::time::sleep(millis(1)).await;
    assert_eq!(consumer.control().in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn pause_stops_hand_outs_and_fetching_and_resume_goes_on() {
    let rig = Rig::new();
    let mut consumer = rig.reader(sub()).await;
    let control = consumer.control();
    rig.toy.publish("a", 2, 10);
    let held = take(&mut consumer, 1).await;
    control.pause();
    control.pause();
    tokio::time::sleep(millis(1)).await;
    assert_eq!(control.health().current().state, mq_api::HealthState::Paused);
    assert!(nothing_comes(&mut consumer).await, "not even what is buffered");
    held.into_iter().for_each(|d| drop(d.ack()));
    // A read that waits already may still return, one more is not begun.
    rig.toy.publish("b", 1, 10);
    tokio::time::sleep(millis(1)).await;
    rig.toy.publish("c", 1, 10);
    tokio::time::sleep(secs(3600)).await;
    assert_eq!(rig.toy.ready(), 1, "fetching stopped");
    control.resume();
    assert_eq!(take(&mut consumer, 3).await.len(), 3);
    assert_eq!(control.health().current().state, mq_api::HealthState::Running);
}
