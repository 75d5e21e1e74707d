//! A lane under random deliveries and settlements: credit equals what is held, one of a key at a time, nothing is left over.

use super::{Bench, incoming, mechanics};
use crate::slots::SlotState;
use mq_api::{Deliveries, Delivery, Disposition, Failure, Ordering, Reason, Subscription};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::task::{Context, Waker};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug, Clone)]
enum Op {
    Push(Vec<(Option<u8>, usize, bool)>),
    HandOut(usize),
    Settle { which: usize, how: u8 },
    Lose(Vec<u64>),
    Due,
    Moved,
    Expire,
    Drain,
    Fence,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let message = (proptest::option::of(0u8..3), 1usize..40, proptest::bool::weighted(0.1));
    let op = prop_oneof![
        5 => proptest::collection::vec(message, 1..6).prop_map(Op::Push),
        8 => (1usize..5).prop_map(Op::HandOut),
        12 => (any::<usize>(), 0u8..8).prop_map(|(which, how)| Op::Settle { which, how }),
        1 => proptest::collection::vec(0u64..60, 1..4).prop_map(Op::Lose),
        3 => Just(Op::Due),
        3 => Just(Op::Moved),
        1 => Just(Op::Expire),
        1 => proptest::bool::weighted(0.1).prop_map(|b| if b { Op::Drain } else { Op::Due }),
        1 => proptest::bool::weighted(0.1).prop_map(|b| if b { Op::Fence } else { Op::Due }),
    ];
    proptest::collection::vec(op, 1..120)
}

fn disposition(how: u8) -> Disposition {
    let failure = Some(Box::new(Failure::failed("x")));
    match how {
        0..3 => Disposition::Ack,
        3 => Disposition::Nack { failure, after: None },
        4 => Disposition::Nack { failure, after: Some(Duration::from_secs(3600)) },
        5 => Disposition::Release,
        6 => Disposition::DeadLetter { reason: Reason::Permanent, error: failure },
        _ => Disposition::Dropped,
    }
}

/// Credit is what is held, and nothing else.
fn check(bench: &Bench, hands: &[Delivery]) -> Result<(), TestCaseError> {
    let ring = bench.lane.ring.lock();
    let (mut charged, mut bytes, mut handed) = (ring.strays.len(), 0usize, ring.strays.len());
    bytes += ring.strays.values().map(|s| s.bytes as usize).sum::<usize>();
    let mut out = BTreeSet::new();
    for (_, slot) in ring.slots.iter() {
        let counts = match slot.state {
            SlotState::Buffered | SlotState::Moving => true,
            SlotState::Handed => {
                handed += 1;
                true
            }
            SlotState::Parked => !slot.uncharged,
            SlotState::Blocked | SlotState::Left | SlotState::Done => false,
        };
        charged += usize::from(counts);
        bytes += if counts { slot.bytes as usize } else { 0 };
        if let Some(key) = slot.key.filter(|_| slot.is_held() && slot.state != SlotState::Blocked) {
            prop_assert!(out.insert(key), "two of a key are out");
        }
    }
    drop(ring);
    let shared = &bench.shared;
    prop_assert_eq!((shared.flow.in_flight(), shared.flow.in_flight_bytes()), (charged, bytes));
    prop_assert_eq!(shared.hands.in_flight(), handed);
    prop_assert!(handed <= 4);
    prop_assert!(hands.iter().filter(|d| d.is_owned()).count() <= handed);
    Ok(())
}

fn run(ops: Vec<Op>, mechanics_of: u8, keyed: bool) -> Result<(), TestCaseError> {
    let rt = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _in = rt.enter();
    let order = if keyed { Ordering::PerKey } else { Ordering::None };
    let sub = Subscription::group("t", "g").ordering(order).max_in_flight(4).max_in_flight_bytes(100).max_parked(3);
    let bench = Bench::new(sub, mechanics(mechanics_of));
    let cx = &mut Context::from_waker(Waker::noop());
    let far = Instant::now() + Duration::from_secs(1_000_000);
    let (mut hands, mut next, mut fenced): (Vec<Delivery>, u64, bool) = (Vec::new(), 0, false);
    let hand_out = |hands: &mut Vec<Delivery>, max: usize, cx: &mut Context<'_>| {
        let mut batch = Deliveries::new();
        let _ = bench.shared.inbox.poll_hand_out(cx, max, &mut batch, Instant::now());
        // Suspects wait for their trial, and others until the settlement of a suspect is confirmed.
        let mut plan = crate::Plan::default();
        if bench.settles.poll_take(cx, &mut plan).is_ready() {
            bench.settles.confirm(plan.upto, []);
        }
        for other in plan.others {
            if let crate::Carry::Trial(_) = other.how {
                bench.settles.trial_recorded(other.lane, other.token);
            }
        }
        hands.extend(batch);
    };
    for op in ops {
        match op {
            Op::Push(items) => {
                let items: Vec<_> = items
                    .into_iter()
                    .map(|(key, size, suspect)| {
                        next += 1;
                        let mut item = incoming(next, key, size);
                        item.takes = if suspect { 9 } else { 1 };
                        item
                    })
                    .collect();
                bench.lane.push(items);
            }
            Op::HandOut(max) => hand_out(&mut hands, max, cx),
            Op::Settle { which, how } if !hands.is_empty() => {
                let delivery = hands.remove(which % hands.len());
                drop(delivery.settle(disposition(how)));
            }
            Op::Settle { .. } => {}
            Op::Lose(tokens) => {
                let tokens: Vec<_> = tokens.into_iter().map(|t| crate::Token(t, 0)).collect();
                bench.lane.lose(&tokens);
            }
            Op::Due => drop(bench.shared.keeper.due(far)),
            Op::Moved => {
                let moving = bench.lane.ring.lock().slots.which(|s| s.state == SlotState::Moving);
                moving.into_iter().for_each(|slot| {
                    let _ = bench.lane.moved(slot);
                });
            }
            Op::Expire => {
                bench.lane.expire(far);
            }
            Op::Drain => bench.lane.begin_drain(),
            Op::Fence => {
                bench.lane.close();
                fenced = true;
            }
        }
        check(&bench, &hands)?;
    }
    // Everything is acknowledged as it comes: nothing is stuck, nothing is left.
    for _ in 0..100_000 {
        hands.drain(..).for_each(|d| drop(d.ack()));
        bench.shared.keeper.due(far);
        let moving = bench.lane.ring.lock().slots.which(|s| s.state == SlotState::Moving);
        moving.into_iter().for_each(|slot| {
            let _ = bench.lane.moved(slot);
        });
        if bench.lane.span().0 == 0 || fenced {
            break;
        }
        let before = bench.lane.span();
        // After a suspect the first one only confirms its settlement.
        hand_out(&mut hands, 10, cx);
        hand_out(&mut hands, 10, cx);
        if bench.lane.ring.lock().draining && hands.is_empty() && before == bench.lane.span() {
            break;
        }
    }
    check(&bench, &hands)?;
    let (open, _) = bench.lane.span();
    let draining = bench.lane.ring.lock().draining;
    prop_assert!(open == 0 || fenced || draining, "{} are stuck", open);
    prop_assert_eq!(bench.shared.flow.in_flight(), 0);
    prop_assert_eq!(bench.lane.ring.lock().gate.waiting(), 0);
    Ok(())
}

proptest! {
    #[test]
    fn credit_keys_and_slots_come_out_even(ops in ops(), mechanics in 0u8..3, keyed in any::<bool>()) {
        run(ops, mechanics, keyed)?;
    }
}
