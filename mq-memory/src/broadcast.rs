//! Broadcast subscriptions: a bounded queue per subscriber, oldest dropped and counted.

use crate::member::{Member, Trouble};
use crate::presence::Presence;
use crate::topic::Topic;
use mq_api::{
    Consumer, ConsumerControl, Deliveries, Delivery, Disposition, Event, Gap, GapCause, Position, Result, Settle,
    SettleStart, Settled, Source, Stored, Ticket,
};
use mq_core::Gate;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

#[derive(Default)]
struct State {
    messages: VecDeque<(Arc<Stored>, u64)>,
    bytes: usize,
    lagged: u64,
    waker: Option<Waker>,
}

/// What a partition pushes into. One per subscriber and partition.
pub(crate) struct Queue {
    state: Mutex<State>,
    /// Messages and bytes of this partition.
    max: (usize, usize),
    pub(crate) lane: Arc<Untracked>,
}

impl Queue {
    pub(crate) fn new(max: (usize, usize), lane: Arc<Untracked>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), max, lane })
    }

    pub(crate) fn push(&self, stored: &Arc<Stored>, position: u64) {
        let mut st = self.state.lock();
        st.bytes += stored.size as usize;
        st.messages.push_back((stored.clone(), position));
        // The last one stays, however large.
        while st.messages.len() > 1
            && (st.messages.len() > self.max.0 || st.bytes > self.max.1)
            && let Some((oldest, _)) = st.messages.pop_front()
        {
            st.bytes -= oldest.size as usize;
            st.lagged += 1;
        }
        let waker = st.waker.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The next message, and how many were dropped before it.
    fn pop(&self) -> (u64, Option<(Arc<Stored>, u64)>) {
        let mut st = self.state.lock();
        let next = st.messages.pop_front();
        st.bytes -= next.as_ref().map_or(0, |(stored, _)| stored.size as usize);
        (std::mem::take(&mut st.lagged), next)
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().messages.len()
    }

    fn wait(&self, cx: &mut Context<'_>) -> bool {
        let mut st = self.state.lock();
        st.waker = Some(cx.waker().clone());
        !st.messages.is_empty()
    }
}

/// Deliveries with nothing to settle: what is said of them only tells that they left the program's hands.
pub(crate) struct Untracked {
    pub(crate) source: Source,
    member: Weak<Member>,
}

impl Untracked {
    fn done(&self, n: u32) -> SettleStart {
        if let Some(member) = self.member.upgrade() {
            member.flow.give(n as usize, 0);
            member.has_room();
        }
        SettleStart::Done(Settled::Untracked)
    }
}

impl Settle for Untracked {
    fn ack(&self, _: u64) -> SettleStart {
        self.done(1)
    }
    fn ack_run(&self, _: u64, n: u32) -> SettleStart {
        self.done(n)
    }
    fn settle(&self, _: u64, _: Disposition) -> SettleStart {
        self.done(1)
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
        &self.source
    }
}

/// A broadcast consumer.
pub(crate) struct BroadcastConsumer {
    pub(crate) member: Arc<Member>,
    pub(crate) topic: Arc<Topic>,
    pub(crate) queues: Vec<Arc<Queue>>,
    pub(crate) control: ConsumerControl,
    pub(crate) next: usize,
    pub(crate) _presence: Arc<Presence>,
}

impl Member {
    /// Queues in all partitions of a topic.
    pub(crate) fn listen(&self, topic: &Topic) -> Vec<Arc<Queue>> {
        let max = (self.sub.max_in_flight, self.sub.max_in_flight_bytes);
        let mut queues = Vec::new();
        for (number, part) in topic.parts.iter().enumerate() {
            let source = Source::new(topic.name.clone(), None).at(Some(number as u32), u64::from(self.id));
            let queue = Queue::new(max, Arc::new(Untracked { source, member: self.handle() }));
            part.lock().broadcast.push(queue.clone());
            queues.push(queue);
        }
        *self.heard.lock() = queues.iter().map(Arc::downgrade).collect();
        queues
    }

    /// A topic was made: if this one listened to one of its name, it listens to this from now on.
    pub(crate) fn listen_again(&self, topic: &Arc<Topic>) {
        let (old, group) = self.seat();
        if group.is_some() || old.name != topic.name || self.is_stopping() || self.is_crashed() {
            return;
        }
        *self.remade.lock() = Some((topic.clone(), self.listen(topic)));
        self.take_seat(topic.clone(), None);
        self.wake();
    }
}

impl BroadcastConsumer {
    /// Its topic was deleted: goes on with the one that was made in its place, or makes it. If that is not its to make, health
    /// says so, and whoever makes it wakes this one.
    #[cold]
    fn follow(&mut self) {
        let sub = &self.member.sub;
        let made = self.member.core.topic(&sub.topic, sub.partitions, sub.retention, sub.provisioning);
        self.member.trouble(Trouble::Group, made.err().map(|error| error.to_string()));
        let remade = self.member.remade.lock().take();
        if let Some((topic, queues)) = remade {
            (self.topic, self.queues, self.next) = (topic, queues, 0);
            self.member.events.push(Event::Gap(Gap::new(self.topic.name.clone(), GapCause::Deleted)));
        }
    }

    fn one(&mut self) -> Option<Delivery> {
        // Charged before it leaves its queue: whoever counts finds it in one of the two.
        self.member.flow.take(1, 0);
        let one = self.take_one();
        if one.is_none() {
            self.member.flow.give(1, 0);
        }
        one
    }

    fn take_one(&mut self) -> Option<Delivery> {
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
        if self.member.flow.is_open() && self.member.flow.poll_credit(cx).is_pending() {
            // What leaves the program's hands makes room, and wakes.
            self.member.waits_for_room();
        } else if self.member.flow.is_open() {
            if let Some(delivery) = self.one() {
                return Poll::Ready(Ok(Some(delivery)));
            }
            if self.topic.deleted.load(Ordering::Acquire) {
                self.follow();
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
