//! An application in one loop: receives, checks what it is promised, settles as told, and is cancelled all the time.

use mq_api::{Consumer, ConsumerExt, Deliveries, Delivery, MessageId, Settled};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Polls the inner future, and gives up after `polls` polls that were not ready.
pub struct GiveUpAfter<F> {
    pub future: F,
    pub polls: u32,
}

impl<F: Future + Unpin> Future for GiveUpAfter<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.future).poll(cx) {
            Poll::Ready(out) => Poll::Ready(Some(out)),
            Poll::Pending if self.polls == 0 => Poll::Ready(None),
            Poll::Pending => {
                self.polls -= 1;
                Poll::Pending
            }
        }
    }
}

/// Receives one; every call is cancelled after its first poll that was not ready, and made again.
pub async fn recv_cancelled(consumer: &mut impl Consumer) -> Option<Delivery> {
    let mut turn = 0u32;
    loop {
        turn += 1;
        match (GiveUpAfter { future: consumer.recv(), polls: turn % 2 }).await {
            Some(got) => return got.expect("the consumer does not fail"),
            None => tokio::task::yield_now().await,
        }
        // Cancelled polls leave wakers of this very task, so that waiting is no busy loop.
        if turn.is_multiple_of(2) {
            wait_for_wake().await;
        }
    }
}

/// Pending once: whoever has this task's waker goes on.
async fn wait_for_wake() {
    let mut first = true;
    std::future::poll_fn(|_| if std::mem::take(&mut first) { Poll::Pending } else { Poll::Ready(()) }).await;
}

/// The attempts seen, by message.
#[derive(Debug, Default)]
pub struct Seen(pub BTreeMap<MessageId, Vec<u32>>);

impl Seen {
    pub fn note(&mut self, delivery: &Delivery) {
        self.0.entry(delivery.id.clone()).or_default().push(delivery.attempt());
    }

    pub fn hand_overs(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Attempts of every message rise strictly.
    pub fn assert_rising(&self) {
        for (id, attempts) in &self.0 {
            assert!(attempts.windows(2).all(|w| w[0] < w[1]), "{id}: {attempts:?}");
        }
    }
}

/// Receives `n` and settles each as `how` says; the answers, in order.
pub async fn settle_each<F, R>(consumer: &mut impl Consumer, n: usize, mut how: F) -> Vec<Settled>
where
    F: FnMut(Delivery) -> R,
    R: Future<Output = Settled>,
{
    let mut answers = Vec::new();
    for _ in 0..n {
        let delivery = consumer.recv().await.expect("no error").expect("open");
        answers.push(how(delivery).await);
    }
    answers
}

/// Takes `n` without settling.
pub async fn take(consumer: &mut impl Consumer, n: usize) -> Vec<Delivery> {
    let mut batch = Deliveries::new();
    while batch.len() < n {
        let left = n - batch.len();
        consumer.recv_batch(left, &mut batch).await.expect("no error");
    }
    batch.into_iter().collect()
}

/// Whether nothing comes although everything that can happen has happened (paused time).
pub async fn nothing_comes(consumer: &mut impl Consumer) -> bool {
    tokio::time::timeout(std::time::Duration::from_millis(1), consumer.recv()).await.is_err()
}
