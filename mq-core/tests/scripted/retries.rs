//! Retries, dead letters, releases, time-outs, transient failures.

use crate::handler::{Seen, nothing_comes, settle_each, take};
use crate::rig::{Rig, millis, secs, sub, until};
use crate::script::Write;
use mq_api::{Consumer, ConsumerExt, DeadLetterPolicy, Failure, HealthState, RetryPolicy, Settled};
use mq_core::{EngineConsumer, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Fails every hand-over until the message is gone; says the attempts and the pauses between them.
async fn fail_always(consumer: &mut EngineConsumer) -> (Seen, Vec<Duration>) {
    let (mut seen, mut pauses, mut last) = (Seen::default(), Vec::new(), Instant::now());
    while let Ok(next) = tokio::time::timeout(secs(600), consumer.recv()).await {
        let delivery = next.unwrap().unwrap();
        seen.note(&delivery);
        pauses.push(last.elapsed());
        last = Instant::now();
        delivery.nack("refused").await;
    }
    (seen, pauses)
}

async fn five_attempts_then_dead(rig: &Rig, mut consumer: EngineConsumer) {
    let (seen, pauses) = fail_always(&mut consumer).await;
    assert_eq!(seen.0.values().collect::<Vec<_>>(), [&vec![1, 2, 3, 4, 5]]);
    for (pause, (low, high)) in pauses[1..].iter().zip([(1.0, 1.2), (5.0, 5.6), (30.0, 33.1), (120.0, 132.1)]) {
        assert!((low..high).contains(&pause.as_secs_f64()), "{pause:?}");
    }
    let dead = rig.toy.with(|st| st.dead.clone());
    assert_eq!((dead.len(), dead[0].attempts, dead[0].reason.as_str()), (1, 5, "max-attempts"));
    if let Some(envelope) = &dead[0].envelope {
        assert_eq!((&*envelope.topic, &*envelope.group), ("orders", "billing"));
        assert_eq!(envelope.error.as_deref(), Some("refused"));
    }
    assert_eq!(consumer.control().in_flight(), 0);
    assert!(consumer.close(secs(1)).await.is_clean());
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn by_the_driver() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let consumer = rig.reader(sub()).await;
    five_attempts_then_dead(&rig, consumer).await;
}

#[tokio::test(start_paused = true)]
async fn by_publishing() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let consumer = rig.pusher(sub(), 10).await;
    five_attempts_then_dead(&rig, consumer).await;
}

/// The thread is real, so its delays are short and real too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn by_parking_and_beyond_it_by_publishing() {
    let rig = Rig::new();
    rig.toy.publish("m", 20, 10);
    let retry = RetryPolicy::attempts(4).delays([5, 20, 60].map(millis)).jitter(0.0);
    let mut consumer = rig.threaded(sub().retry(retry), millis(30)).await;
    let mut seen = Seen::default();
    while rig.toy.with(|st| st.dead.len()) < 20 {
        let next = tokio::time::timeout(secs(5), consumer.recv()).await;
        if let Ok(next) = next {
            let delivery = next.unwrap().unwrap();
            seen.note(&delivery);
            delivery.nack("refused").await;
        }
        if seen.hand_overs() == 80 {
            tokio::time::timeout(secs(5), async {
                while rig.toy.with(|st| st.dead.len()) < 20 {
                    tokio::task::yield_now().await;
                }
            })
            .await
            .expect("dead letters are written");
        }
    }
    assert!(seen.0.values().all(|a| *a == [1, 2, 3, 4]), "{seen:?}");
    rig.toy.with(|st| assert_eq!(st.retries.len(), 20, "only the delay beyond the bound is published"));
    assert!(consumer.close(secs(5)).await.is_clean());
    assert_eq!(rig.toy.unsettled_in_log(), 0);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn classes_and_wishes_are_followed() {
    let rig = Rig::new();
    rig.toy.publish("m", 5, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 5).await;
    assert!(held.remove(0).nack(Failure::permanent("never")).await.is_ok());
    assert!(held.remove(0).nack_after(secs(77), "later").await.is_ok());
    assert!(held.remove(0).dead_letter("mine").await.is_ok());
    assert!(held.remove(0).release().await.is_ok());
    drop(held);
    tokio::time::sleep(millis(1)).await;
    rig.toy.with(|st| {
        let reasons: Vec<_> = st.dead.iter().map(|d| d.reason.as_str()).collect();
        assert_eq!(reasons, ["permanent", "mine"]);
        assert_eq!(st.retries[0].2, secs(77));
        assert_eq!((st.retries.len(), st.releases), (2, 1), "a drop is a nack");
    });
    let again = take(&mut consumer, 1).await.remove(0);
    assert_eq!((again.id.to_string().as_str(), again.attempt()), ("m-3", 1), "a release is not counted");
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_is_confirmed_before_the_original_is_acknowledged() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let toy = rig.toy.clone();
    rig.script.writes(move |out| {
        assert!(matches!(out.target, Target::DeadLetter(_)));
        assert_eq!(toy.counts(), (0, 0, 1), "the original is still there");
        Write::Ok
    });
    rig.script.set_write_delay(secs(1));
    let mut consumer = rig.pusher(sub(), 10).await;
    let settling = take(&mut consumer, 1).await.remove(0).dead_letter("no");
    tokio::time::sleep(millis(500)).await;
    assert_eq!(consumer.control().in_flight(), 1, "it is held while it moves");
    assert!(settling.await.is_ok());
    assert_eq!(rig.toy.counts(), (1, 1, 0));
    assert_eq!(consumer.control().in_flight(), 0);
}

async fn dead_letters_fail(rig: &Rig, refuse: fn() -> Write) {
    rig.toy.publish("m", 3, 10);
    let (broken, tries) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (b, t) = (broken.clone(), tries.clone());
    rig.script.writes(move |_| {
        t.fetch_add(1, Ordering::SeqCst);
        if b.load(Ordering::SeqCst) { refuse() } else { Write::Ok }
    });
    let mut consumer = rig.pusher(sub().max_in_flight(2), 2).await;
    let health = consumer.control().health();
    let settling = take(&mut consumer, 1).await.remove(0).dead_letter("no");
    let began = Instant::now();
    until(health.clone(), HealthState::Degraded).await;
    assert!(began.elapsed() <= secs(3), "degraded after {:?}", began.elapsed());
    assert!(health.current().reason.contains("dead letters"), "{:?}", health.current());
    tokio::time::sleep(secs(60)).await;
    assert!((5..40).contains(&tries.load(Ordering::SeqCst)), "tried again, with back-off: {tries:?}");
    assert_eq!((rig.toy.counts().0, consumer.control().in_flight()), (0, 2), "held, counted in flight");
    assert!(matches!(settle_each(&mut consumer, 1, |d| d.ack()).await[0], Settled::Confirmed(_)), "others go on");
    broken.store(false, Ordering::SeqCst);
    assert!(settling.await.is_ok());
    until(health, HealthState::Running).await;
    assert_eq!(rig.toy.with(|st| (st.acked.len(), st.dead.len())), (2, 1));
    consumer.close(secs(5)).await;
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_is_refused_leaves_the_original_and_degrades_health() {
    dead_letters_fail(&Rig::new(), || Write::Reject).await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_whose_fate_is_unknown_degrades_health_as_soon() {
    dead_letters_fail(&Rig::new(), || Write::LostUnknown).await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_is_never_answered_degrades_health_too() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    rig.script.writes(|_| Write::Silent);
    let mut consumer = rig.pusher(sub(), 10).await;
    let health = consumer.control().health();
    drop(take(&mut consumer, 1).await.remove(0).dead_letter("no"));
    let began = Instant::now();
    until(health, HealthState::Degraded).await;
    assert!(began.elapsed() <= secs(6), "degraded after {:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn retries_are_not_held_up_by_dead_letters_that_cannot_be_written() {
    let rig = Rig::new();
    rig.toy.publish("m", 301, 10);
    rig.script.writes(|out| if let Target::DeadLetter(_) = out.target { Write::Reject } else { Write::Ok });
    let mut consumer = rig.pusher(sub().max_in_flight(400), 400).await;
    let mut held = take(&mut consumer, 301).await;
    let last = held.pop().unwrap();
    held.into_iter().for_each(|d| drop(d.dead_letter("no")));
    let answer = tokio::time::timeout(secs(2), last.nack("failed")).await.expect("its copy is written at once");
    assert!(answer.is_ok());
}

#[tokio::test(start_paused = true)]
async fn off_is_forever_or_discard() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let retry = RetryPolicy::attempts(2).delays([secs(1)]);
    let mut consumer = rig.reader(sub().dead_letter(DeadLetterPolicy::Discard).retry(retry.clone())).await;
    let (seen, _) = fail_always(&mut consumer).await;
    assert_eq!((seen.hand_overs(), rig.toy.counts()), (2, (1, 0, 0)), "discarded: acknowledged, in no dead letters");

    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let mut consumer = rig.reader(sub().dead_letter(DeadLetterPolicy::Forever).retry(retry)).await;
    for attempt in 1..20 {
        let delivery = consumer.recv().await.unwrap().unwrap();
        assert_eq!(delivery.attempt(), attempt);
        delivery.nack(Failure::permanent("never")).await;
    }
    assert_eq!(rig.toy.counts(), (0, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn held_too_long_is_a_nack_by_timeout() {
    for shape in ["reader", "pusher"] {
        let rig = Rig::new();
        rig.toy.publish("m", 1, 10);
        let sub = sub().max_processing(secs(10)).retry(RetryPolicy::attempts(2).delays([secs(1)]));
        let mut consumer = match shape {
            "reader" => rig.reader(sub).await,
            _ => rig.pusher(sub, 10).await,
        };
        let first = take(&mut consumer, 1).await.remove(0);
        let began = Instant::now();
        first.lost().await;
        let (held, limit) = (began.elapsed(), secs(10));
        assert!(held >= limit && held <= limit + millis(11), "the token fires after {held:?}");
        assert!(!first.is_owned());
        let second = take(&mut consumer, 1).await.remove(0);
        assert_eq!(second.attempt(), 2);
        assert_eq!(first.ack().await, Settled::Stale);
        assert!(second.is_owned(), "a late ack of an earlier hand-over touches nothing");
        second.lost().await;
        tokio::time::sleep(millis(10)).await;
        rig.toy.with(|st| assert_eq!((st.dead.len(), st.dead[0].reason.as_str()), (1, "timeout"), "{shape}"));
        assert_eq!(second.ack().await, Settled::Stale);
        assert_eq!(consumer.control().in_flight(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_receiver_is_woken_when_what_filled_the_bound_is_taken_away_by_timeout() {
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    let mut consumer = rig.pusher(sub().max_in_flight(1).max_processing(secs(10)), 10).await;
    let _first = take(&mut consumer, 1).await;
    let next = tokio::time::timeout(millis(11_500), consumer.recv()).await.expect("woken").unwrap().unwrap();
    assert_eq!(next.id.to_string(), "m-1");
}

#[tokio::test(start_paused = true)]
async fn a_transient_failure_pauses_the_subscription_longer_each_time() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let mut consumer = rig.reader(sub()).await;
    let health = consumer.control().health();
    let mut last = None::<Instant>;
    for expected in [0u64, 1, 2, 4, 8, 16, 32, 60, 60] {
        let delivery = consumer.recv().await.unwrap().unwrap();
        assert_eq!(delivery.attempt(), 1, "not counted");
        if let Some(last) = last {
            let pause = last.elapsed().as_secs_f64();
            assert!((pause - expected as f64).abs() < 1.0, "{pause} instead of {expected}");
        }
        last = Some(Instant::now());
        delivery.nack(Failure::transient("down")).await;
        assert_eq!(health.current().state, HealthState::Paused);
    }
    rig.toy.publish("other", 1, 10);
    assert!(nothing_comes(&mut consumer).await, "nothing else is burnt meanwhile");
    settle_each(&mut consumer, 2, |d| d.ack()).await;
    assert_eq!(health.current().state, HealthState::Running);
    rig.toy.publish("later", 1, 10);
    consumer.recv().await.unwrap().unwrap().nack(Failure::transient("down")).await;
    let began = Instant::now();
    consumer.recv().await.unwrap().unwrap().ack().await;
    assert!(began.elapsed() < secs(2), "success ends the streak: {:?}", began.elapsed());
    assert_eq!(rig.toy.counts(), (3, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_failure_during_close_ends_as_fast_as_the_others() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let mut consumer = rig.pusher(sub(), 10).await;
    let delivery = take(&mut consumer, 1).await.remove(0);
    let closing = consumer.close(secs(30));
    delivery.nack("failed").await;
    let began = Instant::now();
    assert!(closing.await.is_clean());
    assert!(began.elapsed() < secs(1), "{:?}", began.elapsed());
    rig.assert_nothing_left().await;
}
