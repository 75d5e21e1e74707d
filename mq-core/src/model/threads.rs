//! What is shared between threads, under many interleavings. A lost wake-up shows as a deadlock of the model.

use super::{Bench, incoming, mechanics};
use crate::flow::{Flow, Gate};
use crate::hooks::NoHooks;
use crate::keeper::Target;
use crate::outbox::Outbox;
use crate::plan::{Plan, Token};
use crate::settles::SettleQueue;
use mq_api::{Deliveries, Durability, Message, ProducerSpec, Receipt, Settled, Subscription};
use shuttle::future::block_on;
use shuttle::thread;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Interleavings of each model: all of them within half a minute, and a planted lost wake-up shows within the first hundred.
const RUNS: usize = 1_000;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let _in = runtime.enter();
    shuttle::check_random(model, RUNS);
}

#[test]
fn credit_that_is_given_wakes_whoever_waits_for_it() {
    check(|| {
        let flow = Arc::new(Flow::new(1, 100));
        flow.take(1, 10);
        let (giver, gates) = (flow.clone(), flow.clone());
        let giver = thread::spawn(move || giver.give(1, 10));
        let gates = thread::spawn(move || {
            gates.shut(Gate::Paused);
            gates.open(Gate::Paused);
        });
        block_on(poll_fn(|cx| flow.poll_credit(cx)));
        giver.join().unwrap();
        gates.join().unwrap();
        assert_eq!(flow.in_flight(), 0);
    });
}

#[test]
fn several_givers_and_one_taker_that_takes_again_and_again() {
    check(|| {
        let flow = Arc::new(Flow::new(2, 100));
        let mut givers = Vec::new();
        for _ in 0..4 {
            block_on(poll_fn(|cx| flow.poll_credit(cx)));
            flow.take(1, 40);
            assert!(flow.in_flight() <= 2);
            let flow = flow.clone();
            givers.push(thread::spawn(move || flow.give(1, 40)));
        }
        let drained = flow.clone();
        let drained = thread::spawn(move || block_on(poll_fn(|cx| drained.poll_drained(cx))));
        givers.into_iter().for_each(|g| g.join().unwrap());
        drained.join().unwrap();
    });
}

#[test]
fn an_awaited_settlement_is_answered_whether_confirmed_or_ended() {
    check(|| {
        let queue = SettleQueue::new(Durability::Disk);
        let driver = queue.clone();
        let driver = thread::spawn(move || {
            let mut plan = Plan::default();
            block_on(driver.take(&mut plan));
            driver.confirm(plan.upto, []);
            driver.end();
        });
        let flusher = queue.clone();
        let settlers: Vec<_> = (0..2)
            .map(|i| {
                let queue = queue.clone();
                thread::spawn(move || {
                    let op = queue.ack(1, [Token(i, 0)]);
                    block_on(poll_fn(|cx| queue.poll_settled(op, cx)))
                })
            })
            .collect();
        let flusher = thread::spawn(move || block_on(flusher.flushed()));
        let answers: Vec<_> = settlers.into_iter().map(|s| s.join().unwrap()).collect();
        driver.join().unwrap();
        flusher.join().unwrap();
        assert!(answers.contains(&Settled::Confirmed(Durability::Disk)), "{answers:?}");
    });
}

/// Receives and hands to another thread that acknowledges, within a bound of one.
fn deliver(n: u64, bound: usize, disturb: impl Fn(&Bench) + Send + Sync + 'static) {
    check(move || {
        let bench = Arc::new(Bench::new(Subscription::group("t", "g").max_in_flight(bound), mechanics(0)));
        let pusher = bench.clone();
        let pusher = thread::spawn(move || (0..n).for_each(|i| pusher.lane.push([incoming(i, None, 10)])));
        let mut settlers = Vec::new();
        for _ in 0..n {
            let mut batch = Deliveries::new();
            let got = block_on(poll_fn(|cx| bench.shared.inbox.poll_hand_out(cx, 1, &mut batch, Instant::now())));
            assert_eq!(got.unwrap(), 1);
            assert!(bench.shared.hands.in_flight() <= bound);
            settlers.push(thread::spawn(move || drop(batch.ack_all())));
            disturb(&bench);
        }
        pusher.join().unwrap();
        settlers.into_iter().for_each(|s| s.join().unwrap());
        assert_eq!((bench.shared.flow.in_flight(), bench.lane.span()), (0, (0, 0)));
    });
}

#[test]
fn a_receiver_that_waits_for_room_is_woken_by_a_settlement() {
    deliver(3, 1, |_| {});
}

#[test]
fn pausing_and_resuming_loses_nobody() {
    deliver(3, 2, |bench| {
        bench.shared.pause(true);
        bench.shared.pause(false);
    });
}

#[test]
fn a_fence_between_settlements_leaves_no_credit_behind() {
    check(|| {
        let bench = Arc::new(Bench::new(Subscription::group("t", "g").max_in_flight(4), mechanics(0)));
        bench.lane.push((0..3).map(|i| incoming(i, None, 10)));
        let mut batch = Deliveries::new();
        let got = block_on(poll_fn(|cx| bench.shared.inbox.poll_hand_out(cx, 2, &mut batch, Instant::now())));
        assert_eq!(got.unwrap(), 2);
        let mut held: Vec<_> = batch.into_iter().collect();
        let (first, second) = (held.remove(0), held.remove(0));
        let closing = bench.clone();
        let closing = thread::spawn(move || {
            closing.lane.close();
            closing.settles.end();
        });
        let settler = thread::spawn(move || block_on(second.nack("failed")));
        let answer = block_on(first.ack());
        assert!(matches!(answer, Settled::Stale | Settled::Unknown), "{answer:?}");
        let other = settler.join().unwrap();
        assert!(matches!(other, Settled::Stale | Settled::Unknown), "{other:?}");
        closing.join().unwrap();
        assert_eq!((bench.shared.flow.in_flight(), bench.shared.hands.in_flight()), (0, 0));
    });
}

#[test]
fn close_ends_a_receiver_that_waits() {
    check(|| {
        let bench = Arc::new(Bench::new(Subscription::group("t", "g"), mechanics(0)));
        let closing = bench.clone();
        let closing = thread::spawn(move || {
            closing.shared.flow.shut(Gate::Stopping);
            closing.shared.inbox.nudge();
            closing.lane.begin_drain();
        });
        let pushing = bench.clone();
        let pushing = thread::spawn(move || pushing.lane.push([incoming(1, None, 10)]));
        loop {
            let mut batch = Deliveries::new();
            let got = block_on(poll_fn(|cx| bench.shared.inbox.poll_hand_out(cx, 1, &mut batch, Instant::now())));
            if got.unwrap() == 0 {
                break;
            }
            drop(batch.ack_all());
        }
        closing.join().unwrap();
        pushing.join().unwrap();
        assert_eq!((bench.shared.flow.in_flight(), bench.lane.span()), (0, (0, 0)));
    });
}

#[test]
fn a_suspect_is_alone_while_others_settle() {
    check(|| {
        let bench = Arc::new(Bench::new(Subscription::group("t", "g").max_in_flight(4), mechanics(0)));
        let mut suspect = incoming(1, None, 10);
        suspect.takes = 9;
        bench.lane.push([incoming(0, None, 10)]);
        let mut batch = Deliveries::new();
        let got = block_on(poll_fn(|cx| bench.shared.inbox.poll_hand_out(cx, 1, &mut batch, Instant::now())));
        assert_eq!(got.unwrap(), 1);
        bench.lane.push([suspect, incoming(2, None, 10)]);
        let settler = thread::spawn(move || drop(batch.ack_all()));
        let driver = bench.settles.clone();
        let driver = thread::spawn(move || {
            let mut plan = Plan::default();
            // Until it has confirmed the suspect's settlement: nothing else goes out before.
            loop {
                block_on(driver.take(&mut plan));
                let over = plan.acks.drain(..).any(|ack| ack.token == Token(1, 0));
                driver.confirm(plan.upto, []);
                if let Some(other) = plan.others.pop() {
                    driver.trial_recorded(other.lane, other.token);
                }
                if over {
                    return;
                }
            }
        });
        for expected in [1, 2] {
            let mut batch = Deliveries::new();
            let got = block_on(poll_fn(|cx| bench.shared.inbox.poll_hand_out(cx, 2, &mut batch, Instant::now())));
            assert_eq!((got.unwrap(), bench.shared.hands.in_flight()), (1, 1));
            let delivery = batch.pop().unwrap();
            assert_eq!(delivery.position().major, expected);
            drop(delivery.ack());
        }
        settler.join().unwrap();
        driver.join().unwrap();
    });
}

#[test]
fn every_send_is_answered_and_makes_room_for_the_next() {
    check(|| {
        let outbox = Outbox::new(&ProducerSpec::new("t").max_in_flight(1, 1000), Arc::new(NoHooks));
        let driver = outbox.clone();
        let driver = thread::spawn(move || {
            let mut done = 0;
            while done < 3 {
                let mut batch = Vec::new();
                block_on(driver.take(10, 1000, &mut batch));
                assert_eq!(batch.len(), 1, "the window");
                done += batch.len();
                driver.complete(batch.into_iter().map(|out| (out.ticket, Ok(Receipt::new(Durability::Memory)))));
            }
        });
        let senders: Vec<_> = (0..3)
            .map(|_| {
                let outbox = outbox.clone();
                thread::spawn(move || block_on(outbox.send(Message::new("m"), Target::Topic, None)))
            })
            .collect();
        let flushed = outbox.clone();
        let flusher = thread::spawn(move || block_on(poll_fn(|cx| flushed.poll_flushed(cx))));
        senders.into_iter().for_each(|s| assert!(s.join().unwrap().is_ok()));
        flusher.join().unwrap();
        driver.join().unwrap();
        assert!(outbox.is_idle());
    });
}

#[test]
fn a_producer_that_ends_leaves_no_sender_waiting() {
    check(|| {
        let outbox = Outbox::new(&ProducerSpec::new("t").max_in_flight(1, 1000), Arc::new(NoHooks));
        let senders: Vec<_> = (0..2)
            .map(|_| {
                let outbox = outbox.clone();
                thread::spawn(move || block_on(outbox.send(Message::new("m"), Target::Topic, None)))
            })
            .collect();
        let forgetful = outbox.clone();
        let forgetful = thread::spawn(move || drop(forgetful.send(Message::new("m"), Target::Topic, None)));
        let ending = outbox.clone();
        let ending = thread::spawn(move || ending.end());
        senders.into_iter().for_each(|s| assert!(s.join().unwrap().is_err()));
        forgetful.join().unwrap();
        assert_eq!(ending.join().unwrap(), 0, "nothing was written");
        assert!(outbox.is_idle());
    });
}

#[test]
fn what_the_keeper_parks_comes_back_or_goes_with_its_lane() {
    check(|| {
        // Retries are parked in the engine.
        let bench = Arc::new(Bench::new(Subscription::group("t", "g").max_in_flight(4), mechanics(2)));
        bench.lane.push((0..2).map(|i| incoming(i, None, 10)));
        let mut batch = Deliveries::new();
        let got = block_on(poll_fn(|cx| bench.shared.inbox.poll_hand_out(cx, 2, &mut batch, Instant::now())));
        assert_eq!(got.unwrap(), 2);
        let settlers: Vec<_> = batch.into_iter().map(|d| thread::spawn(move || drop(d.nack("failed")))).collect();
        let (keeping, closing) = (bench.clone(), bench.clone());
        let keeping = thread::spawn(move || {
            for _ in 0..3 {
                keeping.shared.keeper.due(Instant::now() + Duration::from_secs(60));
                thread::yield_now();
            }
        });
        let closing = thread::spawn(move || {
            closing.lane.close();
            closing.settles.end();
        });
        settlers.into_iter().for_each(|s| s.join().unwrap());
        keeping.join().unwrap();
        closing.join().unwrap();
        bench.shared.keeper.due(Instant::now() + Duration::from_secs(60));
        assert_eq!((bench.shared.flow.in_flight(), bench.shared.hands.in_flight()), (0, 0));
    });
}
