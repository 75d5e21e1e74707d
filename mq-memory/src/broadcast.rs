//! Broadcast subscriptions: a bounded queue per subscriber, oldest dropped and counted.

use crate::member::Member;
use crate::presence::Presence;
use mq_api::{
    Consumer, ConsumerControl, Deliveries, Delivery, Disposition, Event, Position, Result, Settle, SettleStart,
    Settled, Source, Stored, Ticket,
};
use mq_core::Gate;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

#[derive(Default)]
struct State {
    messages: VecDeque<(Arc<Stored>, u64)>,
    lagged: u64,
    waker: Option<Waker>,
}

/// What a partition pushes into. One per subscriber and partition.
pub(crate) struct Queue {
    state: Mutex<State>,
    max: usize,
    pub(crate) lane: Arc<Untracked>,
}

impl Queue {
    pub(crate) fn new(max: usize, lane: Arc<Untracked>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), max, lane })
    }

    pub(crate) fn push(&self, stored: &Arc<Stored>, position: u64) {
        let mut st = self.state.lock();
        if st.messages.len() >= self.max {
            st.messages.pop_front();
            st.lagged += 1;
        }
        st.messages.push_back((stored.clone(), position));
        let waker = st.waker.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The next message, and how many were dropped before it.
    fn pop(&self) -> (u64, Option<(Arc<Stored>, u64)>) {
        let mut st = self.state.lock();
        (std::mem::take(&mut st.lagged), st.messages.pop_front())
    }

    fn wait(&self, cx: &mut Context<'_>) -> bool {
        let mut st = self.state.lock();
        st.waker = Some(cx.waker().clone());
        !st.messages.is_empty()
    }
}

/// Deliveries with nothing to settle.
pub(crate) struct Untracked(pub(crate) Source);

impl Settle for Untracked {
    fn ack(&self, _: u64) -> SettleStart {
        SettleStart::Done(Settled::Untracked)
    }
    fn ack_run(&self, _: u64, _: u32) -> SettleStart {
        SettleStart::Done(Settled::Untracked)
    }
    fn settle(&self, _: u64, _: Disposition) -> SettleStart {
        SettleStart::Done(Settled::Untracked)
    }
    fn poll_settled(&self, _: u64, _: &mut Context<'_>) -> Poll<Settled> {
        Poll::Ready(Settled::Untracked)
    }
    fn poll_lost(&self, _: u64, _: &mut Context<'_>) -> Poll<()> {
        // Never owned, so never lost: the handler may finish.
        Poll::Pending
    }
    fn is_owned(&self, _: u64) -> bool {
        false
    }
    fn source(&self) -> &Source {
        &self.0
    }
}

/// A broadcast consumer.
pub(crate) struct BroadcastConsumer {
    pub(crate) member: Arc<Member>,
    pub(crate) queues: Vec<Arc<Queue>>,
    pub(crate) control: ConsumerControl,
    pub(crate) next: usize,
    pub(crate) _presence: Arc<Presence>,
}

impl BroadcastConsumer {
    fn one(&mut self) -> Option<Delivery> {
        for _ in 0..self.queues.len() {
            let queue = &self.queues[self.next];
            self.next = (self.next + 1) % self.queues.len();
            let (lagged, message) = queue.pop();
            if lagged > 0 {
                self.member.events.push(Event::Lagged(lagged));
            }
            if let Some((stored, position)) = message {
                self.member.trace_delivered(queue.lane.source(), position, &stored, 1);
                return Some(Delivery::new(
                    stored,
                    Position::offset(position),
                    1,
                    Ticket::new(queue.lane.clone(), position),
                ));
            }
        }
        None
    }
}

impl Consumer for BroadcastConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        if self.member.flow.is_shut(Gate::Stopping) {
            return Poll::Ready(Ok(None));
        }
        if self.member.flow.is_open() {
            if let Some(delivery) = self.one() {
                return Poll::Ready(Ok(Some(delivery)));
            }
            // Every queue must know the waker, so no short cut.
            let arrived = self.queues.iter().filter(|queue| queue.wait(cx)).count();
            if arrived > 0 {
                cx.waker().wake_by_ref();
            }
        }
        self.member.wait(cx);
        if self.member.flow.is_shut(Gate::Stopping) { Poll::Ready(Ok(None)) } else { Poll::Pending }
    }

    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        let mut n = 0;
        while n < max.max(1) {
            match self.poll_next(cx) {
                Poll::Ready(Ok(Some(delivery))) => out.push(delivery),
                Poll::Ready(Ok(None)) => return Poll::Ready(Ok(n)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending if n == 0 => return Poll::Pending,
                Poll::Pending => break,
            }
            n += 1;
        }
        Poll::Ready(Ok(n))
    }

    fn control(&self) -> ConsumerControl {
        self.control.clone()
    }
}

impl Drop for BroadcastConsumer {
    fn drop(&mut self) {
        self.member.close_now();
    }
}
