//! Sending: the window, the waiting room, honest outcomes, retries that keep the order of a key, forgotten sends, close.

use crate::rig::{Rig, millis, secs};
use crate::script::Write;
use mq_api::{Batch, ErrorKind, Message, Outcome, Producer, ProducerExt, ProducerSpec, SendOptions, SendResult};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::time::Instant;

fn message(id: impl Into<String>) -> Message {
    Message::new(vec![0; 10]).id(id.into())
}

fn keyed(key: &str, n: usize) -> Message {
    message(format!("{key}-{n}")).key(key.to_owned())
}

fn outcome(result: SendResult) -> Outcome {
    result.expect_err("failed").outcome().expect("every failed send says what is known")
}

/// Ids in the log, first occurrences.
fn stored(rig: &Rig) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    let log = rig.toy.with_log(0, usize::MAX, usize::MAX);
    log.iter().map(|i| i.message.id.to_string()).filter(|id| seen.insert(id.clone())).collect()
}

#[tokio::test(start_paused = true)]
async fn the_window_bounds_and_the_waiting_room_is_first_in_first_out() {
    let rig = Rig::new();
    rig.script.set_write_delay(secs(1));
    let largest = Arc::new(Mutex::new(0));
    let seen = largest.clone();
    let producer = rig.producer(ProducerSpec::new("orders").max_in_flight(4, 1000)).await;
    rig.script.writes(move |_| {
        *seen.lock() += 1;
        Write::Ok
    });
    let sends: Vec<_> = (0..10).map(|i| producer.send(message(format!("m-{i}")))).collect();
    tokio::time::sleep(millis(1500)).await;
    assert_eq!(*largest.lock(), 4, "no more than the window");
    for send in sends {
        send.await.unwrap();
    }
    assert_eq!(stored(&rig), (0..10).map(|i| format!("m-{i}")).collect::<Vec<_>>());
    // By bytes: 600 and 600 do not fit together; a small one behind does not overtake.
    let sizes = [600, 600, 10, 5000, 10];
    let began = Instant::now();
    let sends: Vec<_> = sizes.iter().map(|n| producer.send(Message::new(vec![0; *n]))).collect();
    let mut times = Vec::new();
    for send in sends {
        send.await.unwrap();
        times.push(began.elapsed().as_secs());
    }
    assert_eq!(times, [1, 2, 2, 3, 4], "one larger than the bound goes alone");
}

#[tokio::test(start_paused = true)]
async fn a_time_limit_says_what_is_known() {
    let rig = Rig::new();
    rig.script.writes(|_| Write::Silent);
    let producer = rig.producer(ProducerSpec::new("orders").max_in_flight(1, 1000).retry_for(secs(0))).await;
    let limit = SendOptions::timeout(millis(100));
    let (written, waits) = (producer.send_with(message("a"), limit), producer.send_with(message("b"), limit));
    let began = Instant::now();
    let (written, waits) = tokio::join!(written, waits);
    assert!(began.elapsed() < millis(150), "{:?}", began.elapsed());
    let text = |result: &SendResult| result.as_ref().expect_err("failed").to_string();
    assert!(text(&written).contains("100ms, passed before the broker confirmed"), "{}", text(&written));
    assert!(text(&waits).contains("100ms, passed while it waited for room"), "{}", text(&waits));
    assert_eq!((outcome(written), outcome(waits)), (Outcome::Unknown, Outcome::NotSent));

    // Queued, and the broker away: no byte was written.
    let rig = Rig::new();
    let producer = rig.producer("orders").await;
    rig.script.fail_open_tx(ErrorKind::Unavailable, 1000);
    rig.script.cut_tx();
    tokio::time::sleep(millis(10)).await;
    let away = producer.send_timeout(message("a"), secs(1)).await.expect_err("failed");
    assert_eq!((away.kind(), away.outcome()), (ErrorKind::Timeout, Some(Outcome::NotSent)));
    assert!(
        away.to_string().contains("1s, passed before the broker could be reached; there is no connection: "),
        "{away}"
    );

    // Tried again and again in a session that lives: what the tries failed of is the source.
    let rig = Rig::new();
    rig.script.writes(|_| Write::LostUnknown);
    let producer = rig.producer("orders").await;
    let tried = producer.send_timeout(message("a"), secs(1)).await.expect_err("failed");
    assert_eq!((tried.kind(), tried.outcome()), (ErrorKind::Timeout, Some(Outcome::Unknown)));
    let source = std::error::Error::source(&tried).expect("why the tries failed").to_string();
    assert!(source.contains("scripted") && !tried.to_string().contains("no connection"), "{tried}: {source}");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_stays_unknown_whatever_later_tries_say() {
    for last in [|| Write::Reject, || Write::NotSent, || Write::Silent] {
        let rig = Rig::new();
        let mut first = true;
        rig.script.writes(move |_| if std::mem::take(&mut first) { Write::Unknown } else { last() });
        let producer = rig.producer(ProducerSpec::new("orders").retry_for(secs(1)).send_timeout(secs(3))).await;
        assert_eq!(outcome(producer.send(message("a")).await), Outcome::Unknown);
        assert_eq!(stored(&rig), ["a"], "it is there");
    }
    // Never written: that is known.
    let rig = Rig::new();
    rig.script.writes(|_| Write::NotSent);
    let producer = rig.producer(ProducerSpec::new("orders").retry_for(secs(1)).send_timeout(secs(3))).await;
    assert_eq!(outcome(producer.send(message("a")).await), Outcome::NotSent);
}

#[tokio::test(start_paused = true)]
async fn refusals_are_final_and_hurt_no_neighbour() {
    let rig = Rig::new();
    rig.script.writes(|out| if out.message.id.to_string().ends_with('3') { Write::Reject } else { Write::Ok });
    let producer = rig.producer(ProducerSpec::new("orders").max_message(100)).await;
    let mut batch: Vec<Message> = (0..20).map(|i| message(format!("m-{i}"))).collect();
    batch.push(Message::new(vec![0; 101]));
    batch.push(message("bad").header("a\nb", "x"));
    let results = producer.send_batch(Batch::from(batch)).await.take_results();
    let failed: Vec<(usize, ErrorKind, Option<Outcome>)> =
        results.iter().enumerate().filter_map(|(i, r)| r.as_ref().err().map(|e| (i, e.kind(), e.outcome()))).collect();
    assert_eq!(
        failed,
        [
            (3, ErrorKind::Rejected, Some(Outcome::Rejected)),
            (13, ErrorKind::Rejected, Some(Outcome::Rejected)),
            (20, ErrorKind::TooLarge, Some(Outcome::NotSent)),
            (21, ErrorKind::InvalidName, Some(Outcome::NotSent)),
        ]
    );
    assert_eq!(stored(&rig).len(), 18);
}

#[tokio::test(start_paused = true)]
async fn retries_keep_the_order_of_a_key_and_do_not_hold_up_others() {
    for seed in 0..30u64 {
        let rig = Rig::new();
        rig.script.set_write_delay(millis(3));
        // One batch is one connection's answer: all of a key fail from the first failed one on, as a driver must do it.
        let mut random = fastrand::Rng::with_seed(seed);
        let failed_at = Mutex::new(HashMap::<Vec<u8>, Instant>::new());
        rig.script.writes(move |out| {
            let Some(key) = out.message.key.as_ref().map(|k| k.to_vec()) else { return Write::Ok };
            let mut failed = failed_at.lock();
            if failed.get(&key) == Some(&Instant::now()) || random.u8(..) < 40 {
                failed.insert(key, Instant::now());
                return if random.bool() { Write::LostUnknown } else { Write::NotSent };
            }
            Write::Ok
        });
        let producer = rig.producer(ProducerSpec::new("orders").max_in_flight(60, 100_000)).await;
        let mut sends = Vec::new();
        for i in 0..60 {
            for key in ["a", "b", "c"] {
                sends.push(producer.send(keyed(key, i)));
            }
            sends.push(producer.send(message(format!("none-{i}"))));
            if i % 10 == 0 {
                tokio::time::sleep(millis(seed % 7)).await;
            }
            if i == 30 {
                rig.script.cut_tx();
            }
        }
        for send in sends {
            send.await.unwrap();
        }
        let stored = stored(&rig);
        assert_eq!(stored.len(), 240);
        for key in ["a", "b", "c"] {
            let of_key: Vec<_> = stored.iter().filter(|id| id.starts_with(key)).cloned().collect();
            assert_eq!(of_key, (0..60).map(|i| format!("{key}-{i}")).collect::<Vec<_>>(), "seed {seed}");
        }
        assert!(producer.close(secs(1)).await.is_clean());
        rig.assert_nothing_left().await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_is_tried_again_for_long_does_not_stop_the_rest() {
    let rig = Rig::new();
    rig.script.writes(|out| if out.message.id.to_string() == "bad-0" { Write::LostUnknown } else { Write::Ok });
    let producer = rig.producer("orders").await;
    let bad = producer.send(keyed("bad", 0));
    tokio::time::sleep(secs(5)).await;
    let behind = producer.send(keyed("bad", 1));
    let began = Instant::now();
    for i in 0..100 {
        producer.send(keyed("good", i)).await.unwrap();
        producer.send(message(format!("none-{i}"))).await.unwrap();
    }
    assert!(began.elapsed() < millis(100), "{:?}", began.elapsed());
    let began = Instant::now();
    assert_eq!(outcome(bad.await), Outcome::Unknown);
    assert!((20..30).contains(&began.elapsed().as_secs()), "retried within the limit: {:?}", began.elapsed());
    behind.await.unwrap();
    assert_eq!(stored(&rig).last().unwrap(), "bad-1", "after the first came back, order is the caller's");
}

#[tokio::test(start_paused = true)]
async fn a_send_that_flies_when_the_session_ends_is_tried_again() {
    let rig = Rig::new();
    rig.script.set_write_delay(secs(5));
    let producer = rig.producer("orders").await;
    let sends: Vec<_> = (0..5).map(|i| producer.send(keyed("k", i))).collect();
    tokio::time::sleep(secs(1)).await;
    rig.script.set_write_delay(secs(0));
    rig.script.cut_tx();
    for send in sends {
        send.await.unwrap();
    }
    assert_eq!(stored(&rig), ["k-0", "k-1", "k-2", "k-3", "k-4"]);

    let rig = Rig::new();
    rig.script.set_write_delay(secs(5));
    let producer = rig.producer(ProducerSpec::new("orders").retry_for(secs(0))).await;
    let send = producer.send(message("a"));
    tokio::time::sleep(secs(1)).await;
    rig.script.cut_tx();
    assert_eq!(outcome(send.await), Outcome::Unknown, "no retries asked for");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_send_is_not_sent_or_counted() {
    let rig = Rig::new();
    rig.script.set_write_delay(secs(1));
    rig.script.writes(|out| if out.message.id.to_string() == "m-0" { Write::Reject } else { Write::Ok });
    let producer = rig.producer(ProducerSpec::new("orders").max_in_flight(2, 1000)).await;
    let mut sends: Vec<_> = (0..5).map(|i| producer.send(message(format!("m-{i}")))).collect();
    // 0 and 1 are in the window, 2 to 4 wait for room.
    drop(sends.remove(3));
    drop(sends.remove(2));
    drop(sends.remove(0));
    for send in sends {
        send.await.unwrap();
    }
    assert_eq!(stored(&rig), ["m-1", "m-4"]);
    assert_eq!(producer.unobserved_failures(), 1);
    let batch = producer.send_batch(Batch::from(vec![message("x"), message("y"), message("z")]));
    drop(batch);
    tokio::time::sleep(secs(3)).await;
    assert_eq!(stored(&rig), ["m-1", "m-4", "x", "y"]);
    assert_eq!(producer.unobserved_failures(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_giant_lets_those_behind_it_in() {
    let rig = Rig::new();
    rig.script.set_write_delay(secs(10));
    let producer = rig.producer(ProducerSpec::new("orders").max_in_flight(10, 1000)).await;
    let first = producer.send(Message::new(vec![0; 100]));
    tokio::time::sleep(secs(1)).await;
    let giant = producer.send(Message::new(vec![0; 2000]));
    let small = producer.send(Message::new(vec![0; 100]));
    drop(giant);
    let began = Instant::now();
    first.await.unwrap();
    small.await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 19, "written when the driver came back, not a round later");
}

#[tokio::test(start_paused = true)]
async fn many_dropped_or_late_sends_in_the_waiting_room_cost_little() {
    let rig = Rig::new();
    rig.script.writes(|_| Write::Silent);
    let producer = rig.producer(ProducerSpec::new("orders").max_in_flight(1, 1000)).await;
    let began = std::time::Instant::now();
    let sends: Vec<_> = (0..50_000).map(|i| producer.send(message(format!("m-{i}")))).collect();
    drop(sends);
    let limit = SendOptions::timeout(millis(50));
    let sends: Vec<_> = (0..50_000).map(|i| producer.send_with(message(format!("n-{i}")), limit)).collect();
    for send in sends {
        assert_eq!(outcome(send.await), Outcome::NotSent);
    }
    assert!(began.elapsed() < secs(20), "not quadratic: {:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn flush_waits_for_what_was_accepted_and_not_for_what_comes_after() {
    let rig = Rig::new();
    rig.script.set_write_delay(millis(10));
    let producer = rig.producer("orders").await;
    let sender = producer.clone();
    let endless = tokio::spawn(async move {
        loop {
            drop(sender.send(message("m")));
            tokio::time::sleep(millis(1)).await;
        }
    });
    tokio::time::sleep(millis(50)).await;
    let began = Instant::now();
    assert!(producer.flush(secs(5)).await);
    assert!(began.elapsed() < millis(50), "{:?}", began.elapsed());
    endless.abort();
    rig.script.writes(|_| Write::Silent);
    let stuck = producer.send(message("stuck"));
    assert!(!producer.flush(secs(1)).await);
    drop(stuck);
}

#[tokio::test(start_paused = true)]
async fn close_flushes_then_says_what_is_unknown_once() {
    let rig = Rig::new();
    rig.script.set_write_delay(millis(100));
    rig.script.writes(|out| if out.message.id.to_string() == "m-7" { Write::Silent } else { Write::Ok });
    let producer = rig.producer("orders").await;
    let sends: Vec<_> = (0..10).map(|i| producer.send(message(format!("m-{i}")))).collect();
    // Takes effect at the call, goes on when its future is dropped, and is one close however often it is asked for.
    drop(producer.close(secs(2)));
    assert_eq!(outcome(producer.send(message("late")).await), Outcome::NotSent);
    let (first, second) = tokio::join!(producer.close(secs(60)), producer.close(secs(5)));
    assert_eq!((first.unknown, second), (1, first));
    for (i, send) in sends.into_iter().enumerate() {
        match i {
            7 => assert_eq!(outcome(send.await), Outcome::Unknown),
            _ => drop(send.await.unwrap()),
        }
    }
    assert_eq!(producer.close(secs(1)).await, first);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_producer_leaves_nothing_and_nobody_waiting() {
    let rig = Rig::new();
    rig.script.writes(|_| Write::Silent);
    let producer = rig.producer("orders").await;
    let send = producer.send(message("a"));
    tokio::time::sleep(millis(1)).await;
    drop(producer);
    assert_eq!(outcome(send.await), Outcome::Unknown);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn same_ids_get_their_own_results() {
    let rig = Rig::new();
    let mut n = 0;
    rig.script.writes(move |_| {
        n += 1;
        if n % 2 == 0 { Write::Reject } else { Write::Ok }
    });
    let producer = rig.producer("orders").await;
    let sends: Vec<_> = (0..1000).map(|_| producer.send(message("same"))).collect();
    for (i, send) in sends.into_iter().enumerate() {
        assert_eq!(send.await.is_ok(), i % 2 == 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_ends_for_good_keeps_no_send_waiting() {
    let rig = Rig::new();
    let producer = rig.producer(ProducerSpec::new("orders")).await;
    rig.script.writes(|_| Write::Silent);
    let open = producer.send(message("open"));
    tokio::time::sleep(millis(10)).await;
    rig.script.end_tx_by(crate::script::Way::Fatal);
    rig.script.cut_tx();
    let began = Instant::now();
    assert_eq!(outcome(open.await), Outcome::Unknown);
    assert_eq!(outcome(producer.send(message("late")).await), Outcome::NotSent);
    assert!(began.elapsed() < secs(1), "after {:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn for_ever_is_a_time_like_any_other() {
    let rig = Rig::new();
    let for_ever =
        ProducerSpec::new("orders").retry_for(std::time::Duration::MAX).send_timeout(std::time::Duration::MAX);
    let producer = rig.producer(for_ever).await;
    let mut fails = 3;
    rig.script.writes(move |_| {
        fails -= 1;
        if fails >= 0 { Write::LostUnknown } else { Write::Ok }
    });
    producer.send(message("m")).await.unwrap();
    assert_eq!(stored(&rig), ["m"], "tried until it was stored");
    assert_eq!(producer.close(std::time::Duration::MAX).await.unknown, 0);
}

#[tokio::test(start_paused = true)]
async fn a_send_that_failed_behind_a_confirmed_one_of_its_key_is_given_up() {
    let rig = Rig::new();
    rig.script.set_write_delay(secs(1));
    let producer = rig.producer(ProducerSpec::new("orders")).await;
    rig.script.writes(|out| if &*out.message.id.to_string() == "k-1" { Write::LostUnknown } else { Write::Ok });
    let sends: Vec<_> = (1..=3).map(|n| producer.send(keyed("k", n))).collect();
    let other = producer.send(keyed("other", 1));
    let mut results = Vec::new();
    for send in sends {
        results.push(send.await);
    }
    // Another try of the first would put it behind the second.
    assert_eq!(outcome(results.remove(0)), Outcome::Unknown);
    assert!(results.iter().all(Result::is_ok) && other.await.is_ok());
    assert_eq!(stored(&rig), ["k-2", "k-3", "other-1"]);
}
