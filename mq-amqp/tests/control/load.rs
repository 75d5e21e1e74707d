//! Messages in flight while something happens: every confirmed one has to arrive.

use super::text;
use mq_api::{Broker, BrokerExt, Consumer, ConsumerExt, Message, Outcome, ProducerSpec, Subscription};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many are sent: enough that the fault finds some in flight. `MQ_FAULT_MESSAGES=100000` for the full size.
pub(crate) fn size() -> usize {
    std::env::var("MQ_FAULT_MESSAGES").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000)
}

/// What became of them.
pub(crate) struct Through {
    pub(crate) confirmed: BTreeSet<usize>,
    /// Sends whose outcome is not known; nothing else is allowed to go wrong.
    pub(crate) unknown: usize,
    /// How often each arrived.
    pub(crate) seen: BTreeMap<usize, usize>,
    /// From the end of the fault until the next delivery.
    pub(crate) first: Option<Duration>,
    /// From the end of the fault until the last send had its outcome.
    pub(crate) sent: Duration,
    pub(crate) consumer: Box<dyn Consumer>,
}

/// Sends `n` to topic `t` while `fault` happens (after a third was received), receives and acknowledges all.
pub(crate) async fn through(broker: &Arc<dyn Broker>, n: usize, fault: impl FnOnce()) -> Through {
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    super::Rabbit::lasting().await;
    let sending = tokio::spawn(async move {
        let (mut confirmed, mut unknown) = (BTreeSet::new(), 0);
        let mut flying = Vec::new();
        for at in 0..n {
            flying.push((at, producer.send(Message::new(at.to_string()))));
            if flying.len() == 500 || at + 1 == n {
                for (at, send) in flying.drain(..) {
                    match send.await {
                        Ok(_) => drop(confirmed.insert(at)),
                        Err(e) => {
                            assert_eq!(e.outcome(), Some(Outcome::Unknown), "{e}");
                            unknown += 1;
                        }
                    }
                }
            }
        }
        (confirmed, unknown, Instant::now())
    });
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    for _ in 0..n / 3 {
        let delivery = super::next(&mut consumer).await;
        *seen.entry(text(&delivery).parse().unwrap()).or_default() += 1;
        drop(delivery.ack());
    }
    let began = Instant::now();
    tokio::task::block_in_place(fault);
    let back = Instant::now();
    let (mut first, mut all) = (None, None);
    // Until every confirmed one was seen, and then as long as duplicates may come; or nothing came for long.
    let mut sending = Some(sending);
    let mut patience = Duration::from_secs(30);
    while let Ok(got) = tokio::time::timeout(patience, consumer.recv()).await {
        let delivery = got.unwrap().expect("not closed");
        first.get_or_insert_with(|| back.elapsed());
        *seen.entry(text(&delivery).parse().unwrap()).or_default() += 1;
        drop(delivery.ack());
        if sending.as_ref().is_some_and(tokio::task::JoinHandle::is_finished)
            && let Some(ended) = sending.take()
        {
            all = Some(ended.await.unwrap());
        }
        // Counted first: looking through all of them for each would take longer than the fault.
        let arrived = |confirmed: &BTreeSet<usize>| {
            seen.len() >= confirmed.len() && confirmed.iter().all(|at| seen.contains_key(at))
        };
        if all.as_ref().is_some_and(|(confirmed, _, _)| arrived(confirmed)) {
            patience = Duration::from_secs(2);
        }
    }
    let (confirmed, unknown, at) = match (all, sending) {
        (Some(all), _) => all,
        (None, Some(sending)) => sending.await.unwrap(),
        (None, None) => unreachable!("it was one of them"),
    };
    let twice = seen.values().filter(|n| **n > 1).count();
    println!(
        "{} confirmed, {unknown} unknown, {twice} more than once, the fault took {:?}, first {first:?} after it",
        confirmed.len(),
        back - began,
    );
    assert_eq!(confirmed.len() + unknown, n);
    Through { confirmed, unknown, seen, first, sent: at.saturating_duration_since(back), consumer }
}

impl Through {
    /// None that was confirmed is missing, and fetching began again within `limit`.
    pub(crate) fn judge(&self, limit: Duration) {
        let lost: Vec<_> = self.confirmed.iter().filter(|at| !self.seen.contains_key(at)).collect();
        assert!(lost.is_empty(), "lost {lost:?}");
        assert!(self.first.is_some_and(|first| first < limit), "fetching again after {:?}", self.first);
    }
}
