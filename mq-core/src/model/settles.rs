//! The settlement queue against a list of operations and what is known of each.

use crate::plan::{Carry, Plan, Token};
use crate::settles::SettleQueue;
use futures_util::task::{ArcWake, waker};
use mq_api::{Durability, Position, Settled};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

#[derive(Default)]
struct Woken(AtomicBool);

impl ArcWake for Woken {
    fn wake_by_ref(me: &Arc<Self>) {
        me.0.store(true, Ordering::SeqCst);
    }
}

#[derive(Debug, Clone)]
enum Op {
    Ack(u8),
    Carry,
    Note,
    Take,
    Confirm { stale: u8 },
    Answer(u8),
    Poll(u8),
    End,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1u8..5).prop_map(Op::Ack),
        2 => Just(Op::Carry),
        1 => Just(Op::Note),
        4 => Just(Op::Take),
        4 => (0u8..8).prop_map(|stale| Op::Confirm { stale }),
        1 => any::<u8>().prop_map(Op::Answer),
        8 => any::<u8>().prop_map(Op::Poll),
        1 => Just(Op::End),
    ];
    proptest::collection::vec(op, 1..120)
}

/// What an operation was told, or will be.
fn expected(op: u64, confirmed: u64, told: &BTreeMap<u64, Settled>, ended: bool) -> Poll<Settled> {
    match told.get(&op) {
        Some(settled) => Poll::Ready(*settled),
        None if op <= confirmed => Poll::Ready(Settled::Confirmed(Durability::Disk)),
        None if ended => Poll::Ready(Settled::Unknown),
        None => Poll::Pending,
    }
}

proptest! {
    #[test]
    fn answers_are_as_told_and_whoever_waits_is_woken(ops in ops()) {
        let queue = SettleQueue::new(Durability::Disk);
        let noop = &mut Context::from_waker(std::task::Waker::noop());
        let (mut all, mut confirmed, mut told, mut ended) = (0u64, 0u64, BTreeMap::new(), false);
        let (mut next_token, mut taken_tokens, mut plans) = (0u64, Vec::new(), Vec::new());
        let mut waiting: BTreeMap<u64, Arc<Woken>> = BTreeMap::new();
        let mut flush: Option<Arc<Woken>> = None;
        for op in ops {
            match op {
                // A fenced lane queues nothing.
                Op::Ack(_) | Op::Carry | Op::Note if ended => continue,
                Op::Ack(n) => {
                    let tokens: Vec<Token> = (0..u64::from(n)).map(|i| Token(next_token + i, 0)).collect();
                    next_token += u64::from(n);
                    all += 1;
                    prop_assert_eq!(queue.ack(1, tokens), all);
                }
                Op::Carry => {
                    all += 1;
                    let how = Carry::Settle(crate::Settlement::Release);
                    prop_assert_eq!(queue.carry(1, Token(0, 1), Position::default(), None, how), all);
                }
                Op::Note => {
                    all += 1;
                    prop_assert_eq!(queue.note(1), all);
                }
                Op::Take => {
                    let mut plan = Plan::default();
                    if queue.poll_take(noop, &mut plan).is_ready() {
                        taken_tokens.extend(plan.acks.iter().map(|a| a.token.0));
                        plans.push(plan.upto);
                    }
                }
                Op::Confirm { stale } => {
                    let Some(upto) = plans.first().copied() else { continue };
                    plans.remove(0);
                    let except: Vec<_> =
                        (confirmed + 1..=upto).filter(|op| op % 8 < u64::from(stale) / 2).map(|op| (op, Settled::Stale)).collect();
                    queue.confirm(upto, except.clone());
                    for (op, settled) in except {
                        told.entry(op).or_insert(settled);
                    }
                    confirmed = confirmed.max(upto);
                }
                Op::Answer(n) => {
                    let op = u64::from(n) % (all + 1);
                    if op > confirmed && !told.contains_key(&op) && !ended {
                        queue.answer(op, Settled::Unknown);
                        told.insert(op, Settled::Unknown);
                    }
                }
                Op::Poll(n) if all > 0 => {
                    let op = u64::from(n) % all + 1;
                    let woken = Arc::new(Woken::default());
                    let polled = queue.poll_settled(op, &mut Context::from_waker(&waker(woken.clone())));
                    prop_assert_eq!(polled, expected(op, confirmed, &told, ended));
                    if polled.is_pending() {
                        waiting.insert(op, woken);
                        let woken = Arc::new(Woken::default());
                        prop_assert!(queue.poll_flushed(&mut Context::from_waker(&waker(woken.clone()))).is_pending());
                        flush = Some(woken);
                    }
                }
                Op::Poll(_) => {}
                Op::End => {
                    queue.end();
                    ended = true;
                }
            }
            for (op, woken) in &waiting {
                if expected(*op, confirmed, &told, ended).is_ready() {
                    prop_assert!(woken.0.load(Ordering::SeqCst), "operation {} was not woken", op);
                }
            }
            if let Some(woken) = &flush && (ended || confirmed == all) {
                prop_assert!(woken.0.load(Ordering::SeqCst), "the flush was not woken");
                flush = None;
            }
        }
        prop_assert!(taken_tokens.windows(2).all(|w| w[0] < w[1]), "taken once, in order of the calls");
        queue.end();
        for op in 1..=all {
            prop_assert_eq!(queue.poll_settled(op, noop), expected(op, confirmed, &told, true));
        }
    }
}

#[test]
fn forgotten_exceptions_are_never_called_confirmed() {
    let queue = SettleQueue::new(Durability::Disk);
    let noop = &mut Context::from_waker(std::task::Waker::noop());
    let n = 70_000;
    for op in 1..=n {
        queue.ack(1, [Token(op, 0)]);
    }
    queue.confirm(n, []);
    queue.confirm(n, (1..=n).map(|op| (op, Settled::Stale)));
    assert_eq!(queue.poll_settled(1, noop), Poll::Ready(Settled::Unknown));
    assert_eq!(queue.poll_settled(n, noop), Poll::Ready(Settled::Stale));
}
