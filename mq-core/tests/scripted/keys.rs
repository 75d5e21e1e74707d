//! Order per key: one at a time, in order, through retries, releases, dead letters and losses.

use crate::handler::{nothing_comes, take};
use crate::rig::{Rig, millis, secs, sub, until};
use mq_api::{
    Consumer, ConsumerExt, Delivery, Failure, HealthState, Message, OnDeadLetter, Ordering, RetryPolicy, Subscription,
};
use mq_core::{Incoming, Token};
use std::collections::BTreeMap;

fn keyed() -> Subscription {
    sub().ordering(Ordering::PerKey).retry(RetryPolicy::attempts(3).delays([secs(1)]).jitter(0.0))
}

/// `a-0, b-0, a-1, b-1, …`
fn publish(rig: &Rig, keys: &[&str], n: usize) {
    for i in 0..n {
        for key in keys {
            rig.toy.store(Message::new("x").key(key.to_string()).id(format!("{key}-{i}")), 1);
        }
    }
}

fn id(delivery: &Delivery) -> String {
    delivery.id.to_string()
}

/// Handles everything; every third hand-over fails. First successes of each key, in order.
async fn in_order(rig: &Rig, mut consumer: mq_core::EngineConsumer) {
    let (mut done, mut out, mut turn) = (BTreeMap::<String, Vec<String>>::new(), Vec::<Delivery>::new(), 0u32);
    loop {
        match tokio::time::timeout(secs(10), consumer.recv()).await {
            Ok(next) => out.push(next.unwrap().unwrap()),
            Err(_) if out.is_empty() => break,
            Err(_) => {}
        }
        let mut keys: Vec<_> = out.iter().map(|d| d.key.clone()).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), out.len(), "one of a key at a time");
        if out.len() < 2 && turn % 5 != 0 {
            turn += 1;
            continue;
        }
        turn += 1;
        let delivery = out.remove(turn as usize % out.len());
        match turn % 7 {
            0 if delivery.attempt() < 3 => drop(delivery.nack("failed").await),
            1 => drop(delivery.release().await),
            2 if delivery.attempt() < 3 => drop(delivery),
            _ => {
                let key = String::from_utf8(delivery.key.clone().unwrap().to_vec()).unwrap();
                done.entry(key).or_default().push(id(&delivery));
                delivery.ack().await;
            }
        }
    }
    for (key, ids) in &done {
        assert_eq!(*ids, (0..50).map(|i| format!("{key}-{i}")).collect::<Vec<_>>());
    }
    assert_eq!(done.len(), 3);
    assert_eq!(consumer.control().in_flight(), 0);
    assert_eq!(rig.script.lane().span(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn through_retries_releases_and_drops() {
    let rig = Rig::new();
    publish(&rig, &["a", "b", "c"], 50);
    let consumer = rig.reader(keyed()).await;
    in_order(&rig, consumer).await;
    let rig = Rig::new();
    publish(&rig, &["a", "b", "c"], 50);
    let consumer = rig.pusher(keyed(), 40).await;
    in_order(&rig, consumer).await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_holds_its_key_until_it_is_written_and_then_the_key_goes_on() {
    let rig = Rig::new();
    publish(&rig, &["a"], 2);
    rig.script.set_write_delay(secs(1));
    let mut consumer = rig.pusher(keyed(), 40).await;
    let first = take(&mut consumer, 1).await.remove(0);
    drop(first.nack(Failure::permanent("never")));
    assert!(nothing_comes(&mut consumer).await);
    let second = tokio::time::timeout(millis(1500), consumer.recv()).await.expect("goes on").unwrap().unwrap();
    assert_eq!(id(&second), "a-1");
}

#[tokio::test(start_paused = true)]
async fn a_parked_key_goes_to_the_dead_letters_with_its_first() {
    for pusher in [false, true] {
        let rig = Rig::new();
        publish(&rig, &["a", "b"], 3000);
        let sub = keyed().on_dead_letter(OnDeadLetter::ParkKey).max_in_flight(8000);
        let mut consumer = match pusher {
            false => rig.reader(sub).await,
            true => rig.pusher(sub, 8000).await,
        };
        let mut b = 0;
        while let Ok(next) = tokio::time::timeout(secs(30), consumer.recv()).await {
            let delivery = next.unwrap().unwrap();
            if id(&delivery) == "a-2" {
                delivery.nack(Failure::permanent("never")).await;
                continue;
            }
            assert!(id(&delivery).starts_with('b') || id(&delivery).as_str() < "a-2", "{}", id(&delivery));
            b += 1;
            delivery.ack().await;
        }
        assert_eq!((b, rig.toy.counts().1), (3002, 2998), "pusher {pusher}");
        rig.toy.with(|st| {
            let dead: Vec<_> = st.dead.iter().map(|d| d.id.to_string()).collect();
            let order: Vec<_> = (2..3000).map(|i| format!("a-{i}")).collect();
            assert_eq!(dead, order, "in order");
            assert!(st.dead[1..].iter().all(|d| d.reason == "key-parked" && d.attempts == 0));
        });
        assert_eq!(consumer.control().in_flight(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_message_does_not_keep_its_key() {
    let rig = Rig::new();
    publish(&rig, &["a"], 6);
    let mut consumer = rig.reader(keyed()).await;
    let first = take(&mut consumer, 1).await.remove(0);
    let lane = rig.script.lane();
    let mut tokens = Vec::new();
    lane.held(&mut tokens);
    assert_eq!(tokens.len(), 6);
    // Two that wait, then the one in hand.
    lane.lose(&tokens[1..3]);
    assert!(nothing_comes(&mut consumer).await);
    lane.lose(&tokens[..1]);
    first.lost().await;
    for expected in ["a-3", "a-4", "a-5"] {
        let next = tokio::time::timeout(secs(1), consumer.recv()).await.expect("the key goes on").unwrap().unwrap();
        assert_eq!(id(&next), expected);
        next.ack().await;
    }
    assert_eq!(first.ack().await, mq_api::Settled::Stale);
    assert_eq!((consumer.control().in_flight(), lane.span()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn at_most_so_many_wait_and_the_driver_is_woken_when_there_is_room() {
    let rig = Rig::new();
    let mut consumer = rig.reader(keyed().max_blocked(10)).await;
    let lane = rig.script.lane();
    let mut next = 0;
    let mut fill = |lane: &mq_core::Lane| {
        while lane.has_room() {
            let token = Token(1000 + next, 0);
            let message = Message::new("x").key("k");
            lane.push([Incoming::new(token, mq_api::Position::offset(1000 + next), message)]);
            next += 1;
        }
        next
    };
    assert_eq!(fill(&lane), 11, "one may go out, ten wait");
    let head = take(&mut consumer, 1).await.remove(0);
    head.nack_after(secs(3600), "later").await;
    until(consumer.control().health(), HealthState::Degraded).await;
    assert!(consumer.control().health().current().reason.contains("delayed keys"));
    let waiting = lane.clone();
    let room = tokio::spawn(async move { std::future::poll_fn(|cx| waiting.poll_room(cx)).await });
    lane.push([Incoming::new(Token(1, 0), mq_api::Position::offset(1), Message::new("x").key("other"))]);
    let other = take(&mut consumer, 1).await.remove(0);
    assert_eq!(other.key.as_deref(), Some(&b"other"[..]), "other keys go on");
    other.ack().await;
    assert!(!room.is_finished());
    let head = take(&mut consumer, 1).await.remove(0);
    assert_eq!((head.attempt(), head.position().major), (2, 1000), "the head comes first");
    head.ack().await;
    tokio::time::timeout(secs(1), room).await.expect("woken").unwrap();
    until(consumer.control().health(), HealthState::Running).await;
    assert_eq!(fill(&lane), 12);
}

#[tokio::test(start_paused = true)]
async fn parked_ones_have_a_bound_of_their_own() {
    let rig = Rig::new();
    rig.toy.publish("m", 10, 10);
    // Without keys all go out at once; `PerKey` parks in place.
    let mut consumer = rig.reader(keyed().max_in_flight(4).max_parked(3)).await;
    let control = consumer.control();
    for parked in 1..=7usize {
        let next = tokio::time::timeout(millis(10), consumer.recv()).await.expect("parked ones do not count");
        next.unwrap().unwrap().nack_after(secs(3600), "later").await;
        tokio::time::sleep(millis(1)).await;
        let in_flight = control.in_flight();
        assert!(in_flight <= 4 && in_flight >= parked.saturating_sub(3), "{in_flight} with {parked}");
    }
    assert!(nothing_comes(&mut consumer).await, "past the bound they hold credit, so the rest waits at the broker");
    assert_eq!((control.in_flight(), rig.toy.ready()), (4, 3));
    tokio::time::sleep(secs(3600)).await;
    let mut seen = 0;
    while let Ok(next) = tokio::time::timeout(millis(10), consumer.recv()).await {
        seen += 1;
        next.unwrap().unwrap().ack().await;
    }
    assert_eq!((seen, control.in_flight(), rig.toy.counts()), (10, 0, (10, 0, 0)));
}
