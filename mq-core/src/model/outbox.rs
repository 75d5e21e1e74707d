//! The outbox under random sends, drops, outcomes and time, before a broker that handles what it gets in order: bounds hold,
//! the confirmed sends of a key stand in the log in the order of the calls, every send has one honest result.

use crate::hooks::NoHooks;
use crate::keeper::Target;
use crate::outbox::Outbox;
use crate::tries::Outgoing;
use mq_api::{Durability, Error, ErrorKind, Message, Outcome, ProducerSpec, Receipt, SendResult, Sending};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

#[derive(Debug, Clone)]
enum Op {
    Send {
        key: Option<u8>,
        size: usize,
    },
    Take(usize),
    Complete {
        which: usize,
        how: u8,
    },
    Forget(usize),
    Poll(usize),
    Wait(u64),
    /// The connection breaks after the broker handled this many of those that fly.
    Lost(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (proptest::option::of(0u8..3), 1usize..60).prop_map(|(key, size)| Op::Send { key, size }),
        6 => (1usize..5).prop_map(Op::Take),
        8 => (any::<usize>(), 0u8..10).prop_map(|(which, how)| Op::Complete { which, how }),
        1 => any::<usize>().prop_map(Op::Forget),
        3 => any::<usize>().prop_map(Op::Poll),
        4 => (1u64..2000).prop_map(Op::Wait),
        1 => (0usize..9).prop_map(Op::Lost),
    ];
    proptest::collection::vec(op, 1..200)
}

fn result(how: u8) -> SendResult {
    let (kind, outcome) = match how {
        0..5 => return Ok(Receipt::new(Durability::Memory)),
        5..8 => (ErrorKind::Timeout, Outcome::Unknown),
        8 => (ErrorKind::Unavailable, Outcome::NotSent),
        _ => (ErrorKind::Rejected, Outcome::Rejected),
    };
    Err(Error::new(kind, "modelled").with_outcome(outcome))
}

struct Flight {
    out: Outgoing,
    number: u64,
    /// Place in the order of writing.
    at: u64,
    /// What the broker did, where that is settled by what it did to another of the key; `None` is still open.
    stored: Option<bool>,
}

/// What the driver has, and what happened to each message so far.
#[derive(Default)]
struct Driver {
    flying: Vec<Flight>,
    writes: u64,
    tries: HashMap<u64, u32>,
    doubtful: HashMap<u64, bool>,
    /// Number of the send by the id of its message.
    by_id: HashMap<String, u64>,
    keys: HashMap<u64, Option<u8>>,
    /// Where each message first stands in the log.
    log: HashMap<u64, u64>,
}

impl Driver {
    fn number(&self, out: &Outgoing) -> u64 {
        self.by_id[&out.message.id.to_string()]
    }

    fn fly(&mut self, out: Outgoing) -> Result<(), TestCaseError> {
        let number = self.number(&out);
        if let Some(key) = &out.message.key {
            let retry = self.tries.contains_key(&number);
            for other in self.flying.iter().filter(|f| f.out.message.key.as_ref() == Some(key)) {
                prop_assert!(!retry, "the retry of {} beside {}", number, other.number);
                prop_assert!(
                    !self.tries.contains_key(&other.number),
                    "{} beside the retry of {}",
                    number,
                    other.number
                );
                prop_assert!(other.number < number, "{} after {}", number, other.number);
            }
        }
        self.writes += 1;
        self.flying.push(Flight { out, number, at: self.writes, stored: None });
        Ok(())
    }

    /// Ends a flight; `stored` is what a broker that handles in order would do if nothing speaks against it. An answer tells
    /// the broker's own doing; without one, of two of a key the later is stored only if the earlier is.
    fn land(&mut self, flight: &Flight, stored: bool, answered: bool) -> bool {
        let stored = if answered { stored } else { flight.stored.unwrap_or(stored) };
        let key = &flight.out.message.key;
        if stored {
            let first = self.log.entry(flight.number).or_insert(flight.at);
            *first = (*first).min(flight.at);
        }
        if key.is_some() && !(stored && answered) {
            for other in self.flying.iter_mut().filter(|f| &f.out.message.key == key) {
                if (other.at < flight.at) == stored {
                    other.stored.get_or_insert(stored);
                }
            }
        }
        stored
    }

    fn failed(&mut self, number: u64, doubtful: bool) {
        *self.tries.entry(number).or_default() += 1;
        *self.doubtful.entry(number).or_default() |= doubtful;
    }
}

const MAX: usize = 8;
const MAX_BYTES: usize = 120;

fn run(ops: Vec<Op>) -> Result<(), TestCaseError> {
    let spec = ProducerSpec::new("t").max_in_flight(MAX, MAX_BYTES).retry_for(Duration::from_secs(5));
    let outbox = Outbox::new(&spec.send_timeout(Duration::from_secs(20)), Arc::new(NoHooks));
    let cx = &mut Context::from_waker(Waker::noop());
    let mut driver = Driver::default();
    let mut sends: BTreeMap<u64, Sending> = BTreeMap::new();
    let mut results: BTreeMap<u64, SendResult> = BTreeMap::new();
    let mut number = 0;
    let rt = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    rt.block_on(async {
        for op in ops {
            match op {
                Op::Send { key, size } => {
                    number += 1;
                    let mut message = Message::new(vec![0; size]);
                    message.key = key.map(|k| vec![k].into());
                    driver.by_id.insert(message.id.to_string(), number);
                    driver.keys.insert(number, key);
                    sends.insert(number, outbox.send(message, Target::Topic, None));
                }
                Op::Take(n) => {
                    let mut batch = Vec::new();
                    let _ = outbox.poll_take(cx, n, 1000, &mut batch);
                    for out in batch {
                        driver.fly(out)?;
                    }
                    let sizes: usize = driver.flying.iter().map(|f| f.out.size as usize).sum();
                    prop_assert!(driver.flying.len() <= MAX);
                    prop_assert!(sizes <= MAX_BYTES || driver.flying.len() == 1);
                }
                Op::Complete { which, how } if !driver.flying.is_empty() => {
                    let flight = driver.flying.remove(which % driver.flying.len());
                    // Nothing that was written behind it can be stored when a byte of it was not even written.
                    let how = if how == 8 && flight.stored == Some(true) { 6 } else { how };
                    let (known, stored) = (how < 5 || how == 9, how < 5 || how == 6);
                    driver.land(&flight, stored, known);
                    if how >= 5 {
                        driver.failed(flight.number, (5..8).contains(&how));
                    }
                    outbox.complete([(flight.out.ticket, result(how))]);
                }
                Op::Complete { .. } => {}
                Op::Forget(n) => {
                    if let Some(number) = sends.keys().nth(n % sends.len().max(1)).copied() {
                        sends.remove(&number);
                    }
                }
                Op::Poll(n) => {
                    let Some((number, send)) = sends.iter_mut().nth(n) else { continue };
                    if let Poll::Ready(got) = Pin::new(send).poll(cx) {
                        let number = *number;
                        sends.remove(&number);
                        prop_assert!(results.insert(number, got).is_none());
                    }
                }
                Op::Wait(ms) => {
                    tokio::time::advance(Duration::from_millis(ms)).await;
                    outbox.tick(tokio::time::Instant::now());
                    // A send whose time passed is no longer the driver's.
                    driver.flying.retain(|f| outbox.is_flying(f.out.ticket));
                }
                Op::Lost(handled) => {
                    let mut flying = std::mem::take(&mut driver.flying);
                    flying.sort_by_key(|f| f.at);
                    for n in 0..flying.len() {
                        driver.flying = flying.split_off(1);
                        let Some(flight) = flying.pop() else { break };
                        driver.land(&flight, n < handled, false);
                        driver.failed(flight.number, true);
                        flying = std::mem::take(&mut driver.flying);
                    }
                    outbox.session_lost("modelled");
                }
            }
        }
        // The broker is well again: everything that is still open ends.
        for _ in 0..200 {
            let mut batch = Vec::new();
            while outbox.poll_take(cx, 100, 100_000, &mut batch).is_ready() {}
            for out in batch {
                driver.fly(out)?;
            }
            for flight in std::mem::take(&mut driver.flying) {
                driver.land(&flight, true, true);
                outbox.complete([(flight.out.ticket, result(0))]);
            }
            if outbox.is_idle() {
                break;
            }
            tokio::time::advance(Duration::from_millis(200)).await;
        }
        prop_assert!(outbox.is_idle(), "{:?}", outbox);
        prop_assert!(outbox.poll_flushed(cx).is_ready());
        for (number, mut send) in sends {
            match Pin::new(&mut send).poll(cx) {
                Poll::Ready(got) => drop(results.insert(number, got)),
                Poll::Pending => prop_assert!(false, "send {} has no result", number),
            }
        }
        for (number, got) in &results {
            if let Err(error) = got {
                let doubtful = driver.doubtful.get(number).copied().unwrap_or_default();
                let outcome = error.outcome().expect("known");
                prop_assert!(!doubtful || outcome == Outcome::Unknown, "{} was told {:?}", number, outcome);
            }
        }
        let mut last = BTreeMap::new();
        for number in results.iter().filter(|(_, got)| got.is_ok()).map(|(number, _)| *number) {
            let Some(key) = driver.keys[&number] else { continue };
            let place = driver.log.get(&number).copied();
            prop_assert!(place.is_some(), "{} was confirmed and is not stored", number);
            let before = last.insert(key, (place, number));
            prop_assert!(before.is_none_or(|(p, _)| p < place), "{} stands before {:?}", number, before);
        }
        prop_assert_eq!(outbox.open_entries(), (0, 0), "nothing is left in the lists");
        Ok(())
    })
}

proptest! {
    #[test]
    fn bounds_order_and_one_honest_result_each(ops in ops()) {
        run(ops)?;
    }
}
