//! The lists of an outbox stay as short as what is open, however many sends come and end while the driver takes nothing.

use crate::hooks::NoHooks;
use crate::keeper::Target;
use crate::outbox::Outbox;
use mq_api::{Error, ErrorKind, Message, Outcome, ProducerSpec};
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;
use tokio::time::Instant;

const MAX: usize = 10;
/// Entries of the four lists, each of which may have some that are over.
const FEW: usize = 4 * (64 + 5 * MAX);

fn outbox() -> Arc<Outbox> {
    Outbox::new(&ProducerSpec::new("t").max_in_flight(MAX, 1 << 20), Arc::new(NoHooks))
}

/// Sends 10,000 messages that end by their time limit.
async fn late(outbox: &Outbox, message: impl Fn() -> Message) {
    let limit = Duration::from_millis(1);
    for _ in 0..1_000 {
        let sends: Vec<_> = (0..10).map(|_| outbox.send(message(), Target::Topic, Some(limit))).collect();
        tokio::time::advance(limit).await;
        outbox.tick(Instant::now());
        for send in sends {
            assert_eq!(send.await.unwrap_err().outcome(), Some(Outcome::NotSent));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn sends_that_run_out_of_time_while_the_broker_is_away() {
    let outbox = outbox();
    late(&outbox, || Message::new("x")).await;
    assert!(outbox.noted() <= FEW, "{} entries for nothing open", outbox.noted());
}

#[tokio::test(start_paused = true)]
async fn sends_that_are_dropped_while_they_wait_for_room() {
    let outbox = outbox();
    let full: Vec<_> = (0..MAX).map(|_| outbox.send(Message::new("x"), Target::Topic, None)).collect();
    for _ in 0..10_000 {
        drop(outbox.send(Message::new("x"), Target::Topic, None));
    }
    assert!(outbox.noted() <= FEW, "{} entries for {} open", outbox.noted(), full.len());
}

#[tokio::test(start_paused = true)]
async fn sends_that_run_out_of_time_behind_a_retry_of_their_key() {
    let outbox = outbox();
    let cx = &mut Context::from_waker(Waker::noop());
    let mut taken = Vec::new();
    let _first = outbox.send(Message::new("x").key("k"), Target::Topic, None);
    assert!(outbox.poll_take(cx, 10, 1 << 20, &mut taken).is_ready());
    let lost = Error::new(ErrorKind::Timeout, "no answer").with_outcome(Outcome::Unknown);
    outbox.complete([(taken[0].ticket, Err(lost))]);
    for _ in 0..1_000 {
        let limit = Duration::from_nanos(1);
        let sends: Vec<_> =
            (0..5).map(|_| outbox.send(Message::new("y").key("k"), Target::Topic, Some(limit))).collect();
        // The driver looks, and is given none of them.
        assert!(outbox.poll_take(cx, 10, 1 << 20, &mut taken).is_pending());
        tokio::time::advance(limit).await;
        outbox.tick(Instant::now());
        for send in sends {
            assert_eq!(send.await.unwrap_err().outcome(), Some(Outcome::NotSent));
        }
    }
    assert!(outbox.noted() <= FEW, "{} entries for one open", outbox.noted());
}
