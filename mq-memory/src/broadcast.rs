//! Broadcast subscriptions: a bounded buffer per subscriber, oldest dropped and counted.

use crate::member::{Member, Trouble};
use crate::presence::Presence;
use crate::topic::Topic;
use crate::untracked::Untracked;
use mq_api::{
    Consumer, ConsumerControl, Deliveries, Delivery, Event, Gap, GapCause, Position, Result, Settle, Source, Stored,
    Ticket,
};
use mq_core::{Flow, Gate};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};

/// A message, its place, and the lane of its partition.
type Heard = (Arc<Untracked>, Arc<Stored>, u64);

#[derive(Default)]
struct State {
    messages: VecDeque<Heard>,
    bytes: usize,
    lagged: u64,
    waker: Option<Waker>,
}

/// What a subscriber has not looked at yet, of all partitions: bounded in messages and bytes.
pub(crate) struct Buffer {
    state: Mutex<State>,
    max: (usize, usize),
}

impl Buffer {
    fn new(max: (usize, usize)) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), max })
    }

    fn push(&self, lane: &Arc<Untracked>, stored: &Arc<Stored>, position: u64) {
        let mut st = self.state.lock();
        st.bytes += stored.size as usize;
        st.messages.push_back((lane.clone(), stored.clone(), position));
        // The last one stays, however large.
        while st.messages.len() > 1
            && (st.messages.len() > self.max.0 || st.bytes > self.max.1)
            && let Some((_, oldest, _)) = st.messages.pop_front()
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

    /// How many were dropped since the last call.
    fn lagged(&self) -> u64 {
        std::mem::take(&mut self.state.lock().lagged)
    }

    /// The next message, if it has room in the program's hands; it is charged before it leaves here, so that whoever counts finds
    /// it in one of the two. `Ready(None)`: there is none.
    fn poll_take(&self, flow: &Flow, cx: &mut Context<'_>) -> Poll<Option<Heard>> {
        let mark = flow.mark();
        let mut st = self.state.lock();
        let Some((_, next, _)) = st.messages.front() else { return Poll::Ready(None) };
        let size = next.size as usize;
        if !flow.fits(size) {
            drop(st);
            if flow.poll_given(mark, cx).is_ready() {
                cx.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        flow.take(1, size);
        st.bytes -= size;
        Poll::Ready(st.messages.pop_front())
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().messages.len()
    }

    /// Whether there is something; else who waits is woken by the next.
    fn wait(&self, cx: &mut Context<'_>) -> bool {
        let mut st = self.state.lock();
        if !st.waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            st.waker = Some(cx.waker().clone());
        }
        !st.messages.is_empty()
    }
}

/// What a partition pushes into. One per subscriber and partition.
pub(crate) struct Queue {
    buffer: Arc<Buffer>,
    pub(crate) lane: Arc<Untracked>,
}

impl Queue {
    pub(crate) fn push(&self, stored: &Arc<Stored>, position: u64) {
        self.buffer.push(&self.lane, stored, position);
    }
}

/// A broadcast consumer.
pub(crate) struct BroadcastConsumer {
    pub(crate) member: Arc<Member>,
    pub(crate) topic: Arc<Topic>,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) control: ConsumerControl,
    pub(crate) _presence: Arc<Presence>,
}

impl Member {
    /// Hears all partitions of a topic from now on.
    pub(crate) fn listen(&self, topic: &Topic) -> Arc<Buffer> {
        let buffer = Buffer::new((self.sub.max_in_flight, self.sub.max_in_flight_bytes));
        self.hear(topic, &buffer);
        *self.heard.lock() = Arc::downgrade(&buffer);
        buffer
    }

    /// What is sent to a topic from now on goes into this buffer.
    pub(crate) fn hear(&self, topic: &Topic, buffer: &Arc<Buffer>) {
        for (number, part) in topic.parts.iter().enumerate() {
            let source = Source::new(topic.name.clone(), None).at(Some(number as u32), u64::from(self.id));
            let lane = Arc::new(Untracked::new(source, self.handle()));
            part.lock().broadcast.push(Arc::new(Queue { buffer: buffer.clone(), lane }));
        }
    }

    /// Hears nothing of a topic any more.
    pub(crate) fn unlisten(&self, topic: &Topic) {
        for part in &topic.parts {
            part.lock().broadcast.retain(|queue| queue.lane.source.epoch != u64::from(self.id));
        }
    }

    /// A topic was made: if this one listened to one of its name, it listens to this from now on, or once it is back.
    pub(crate) fn listen_again(&self, topic: &Arc<Topic>) {
        let (old, group) = self.seat();
        if group.is_some() || old.name != topic.name || Arc::ptr_eq(&old, topic) || self.is_away() {
            return;
        }
        *self.remade.lock() = Some((topic.clone(), self.listen(topic)));
        self.take_seat(topic.clone(), None);
        // It may have left meanwhile, and then heard nothing that it could leave.
        if self.is_stopping() || self.is_crashed() {
            self.unlisten(topic);
        }
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
        if let Some((topic, buffer)) = remade {
            (self.topic, self.buffer) = (topic, buffer);
            self.member.events.push(Event::Gap(Gap::new(self.topic.name.clone(), GapCause::Deleted)));
        }
    }

    fn poll_one(&mut self, cx: &mut Context<'_>) -> Poll<Option<Delivery>> {
        let lagged = self.buffer.lagged();
        if lagged > 0 {
            self.member.events.push(Event::Lagged(lagged));
        }
        let Some((lane, stored, position)) = ready!(self.buffer.poll_take(&self.member.flow, cx)) else {
            return Poll::Ready(None);
        };
        lane.hand_out(&self.member, position, stored.size);
        self.member.trace_delivered(lane.source(), position, &stored, 1);
        let ticket = Ticket::new(lane, position);
        Poll::Ready(Some(Delivery::new(stored, Position::offset(position), 1, ticket)))
    }
}

impl Consumer for BroadcastConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        if self.member.flow.is_shut(Gate::Stopping) {
            return Poll::Ready(Ok(None));
        }
        // Before anything is looked at: what changes afterwards wakes.
        self.member.wait(cx);
        if self.member.flow.is_open() {
            match self.poll_one(cx) {
                Poll::Ready(Some(delivery)) => return Poll::Ready(Ok(Some(delivery))),
                // What leaves the program's hands makes room, and wakes.
                Poll::Pending => self.member.waits_for_room(),
                Poll::Ready(None) => {
                    if self.topic.deleted.load(Ordering::Acquire) {
                        self.follow();
                    }
                    if self.buffer.wait(cx) {
                        cx.waker().wake_by_ref();
                    }
                }
            }
        }
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
