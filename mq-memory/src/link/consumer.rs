//! Receiving over a link: the broker's own consumer, with settlements whose answers may be lost.

use super::Status;
use crate::core::Core;
use futures_core::future::BoxFuture;
use mq_api::{
    Consumer, ConsumerControl, Deliveries, Delivery, Disposition, Lost, Result, Settle, SettleStart, Settled, Source,
    Ticket,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::watch;

pub(super) struct LinkedConsumer {
    inner: Box<dyn Consumer>,
    core: Arc<Core>,
    status: watch::Receiver<Status>,
    one: Deliveries,
}

impl LinkedConsumer {
    pub(super) fn new(inner: Box<dyn Consumer>, core: Arc<Core>, status: watch::Receiver<Status>) -> Self {
        Self { inner, core, status, one: Deliveries::new() }
    }

    fn wrap(&self, delivery: Delivery) -> Delivery {
        let source = delivery.source().clone();
        let tracked = source.group.is_some();
        let (stored, position, attempt, ticket) = delivery.into_parts();
        if !tracked {
            return Delivery::new(stored, position, attempt, ticket);
        }
        let lane = Arc::new(LinkedLane {
            core: self.core.clone(),
            status: self.status.clone(),
            losses: self.status.borrow().losses,
            source,
            lost: Mutex::new(ticket.lost()),
            ticket: Mutex::new(Some(ticket)),
            answers: Mutex::default(),
        });
        Delivery::new(stored, position, attempt, Ticket::new(lane, 0))
    }
}

impl Consumer for LinkedConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        self.inner.poll_next(cx).map_ok(|next| next.map(|delivery| self.wrap(delivery)))
    }

    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        let mut one = std::mem::take(&mut self.one);
        let polled = self.inner.poll_batch(cx, max, &mut one);
        while let Some(delivery) = one.pop() {
            out.push(self.wrap(delivery));
        }
        self.one = one;
        polled
    }

    fn control(&self) -> ConsumerControl {
        self.inner.control()
    }
}

/// One delivery over a link.
struct LinkedLane {
    core: Arc<Core>,
    status: watch::Receiver<Status>,
    /// Of the connection that it came by.
    losses: u64,
    source: Source,
    ticket: Mutex<Option<Ticket>>,
    lost: Mutex<Option<Lost>>,
    answers: Mutex<HashMap<u64, BoxFuture<'static, Settled>>>,
}

impl LinkedLane {
    fn act(&self, how: Disposition) -> SettleStart {
        let Some(ticket) = self.ticket.lock().take() else { return SettleStart::Done(Settled::Stale) };
        let now = *self.status.borrow();
        if now.dead || !now.up || now.losses != self.losses {
            // The broker took it back when the connection was lost, so that this does nothing.
            drop(ticket.settle(Disposition::Release));
            return SettleStart::Done(Settled::Stale);
        }
        if now.frozen {
            let (mut status, losses) = (self.status.clone(), self.losses);
            let task = self.core.env.spawn(async move {
                let thawed = status.wait_for(|s| !s.frozen || s.dead).await.is_ok_and(|s| s.losses == losses);
                if thawed { ticket.settle(how).await } else { Settled::Unknown }
            });
            let answer: BoxFuture<'static, Settled> = Box::pin(async move { task.await.unwrap_or(Settled::Unknown) });
            self.answers.lock().insert(0, answer);
            return SettleStart::Queued(0);
        }
        let settling = ticket.settle(how);
        if !now.hold {
            self.answers.lock().insert(0, Box::pin(settling));
            return SettleStart::Queued(0);
        }
        let (mut status, losses) = (self.status.clone(), self.losses);
        let answer = async move {
            let now = status.wait_for(|s| !s.hold || s.dead || s.losses != losses).await;
            match now.is_ok_and(|s| !s.dead && s.losses == losses) {
                true => settling.await,
                false => Settled::Unknown,
            }
        };
        self.answers.lock().insert(0, Box::pin(answer));
        SettleStart::Queued(0)
    }
}

impl Settle for LinkedLane {
    fn ack(&self, _: u64) -> SettleStart {
        self.act(Disposition::Ack)
    }

    fn ack_run(&self, _: u64, _: u32) -> SettleStart {
        self.act(Disposition::Ack)
    }

    fn settle(&self, _: u64, how: Disposition) -> SettleStart {
        self.act(how)
    }

    fn poll_settled(&self, op: u64, cx: &mut Context<'_>) -> Poll<Settled> {
        let mut answers = self.answers.lock();
        let Some(answer) = answers.get_mut(&op) else { return Poll::Ready(Settled::Unknown) };
        let settled = std::task::ready!(answer.as_mut().poll(cx));
        answers.remove(&op);
        Poll::Ready(settled)
    }

    fn poll_lost(&self, _: u64, cx: &mut Context<'_>) -> Poll<()> {
        match self.lost.lock().as_mut() {
            Some(lost) => Pin::new(lost).poll(cx),
            None => Poll::Ready(()),
        }
    }

    fn is_owned(&self, _: u64) -> bool {
        let now = *self.status.borrow();
        !now.dead && now.up && now.losses == self.losses && self.ticket.lock().as_ref().is_some_and(Ticket::is_owned)
    }

    fn source(&self) -> &Source {
        &self.source
    }
}
