//! The keeper of one consumer: parked retries that come due, deliveries held too long, copies that must be confirmed before
//! their original is acknowledged, and the end of transient pauses. One task, woken by what it is given and by its clock.

use crate::lane::Lane;
use crate::outbox::Outbox;
use crate::settles::SettleQueue;
use crate::shared::Shared;
use crate::sync::Mutex;
use backon::BackoffBuilder;
use futures_util::stream::{FuturesUnordered, StreamExt};
use mq_api::{Envelope, Failure, Settled, Stored};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Marks the number of an operation that the keeper answers.
pub(crate) const MOVE: u64 = 1 << 63;
/// A copy that is not confirmed by then is named in health, though it may still be.
const SLOW: Duration = Duration::from_secs(2);
/// The shortest time from one look at what is in hand to the next.
const BUSIEST: Duration = Duration::from_millis(10);
/// Answers kept for settlements that nobody asked for yet.
const ANSWERS: usize = 65_536;

/// Where a copy goes.
#[derive(Debug, Clone)]
pub enum Target {
    /// To the topic: an ordinary send.
    Topic,
    /// Back to the same group, not before `after` has passed.
    Retry {
        /// Delay.
        after: Duration,
        /// The attempt number of its next hand-over.
        attempt: u32,
        /// Why.
        cause: Option<Box<Failure>>,
    },
    /// To the dead letters of the group. The message does not carry the envelope yet.
    DeadLetter(Box<Envelope>),
}

pub(crate) struct Move {
    pub(crate) lane: Weak<Lane>,
    pub(crate) slot: u64,
    pub(crate) message: Arc<Stored>,
    pub(crate) target: Target,
}

enum Answer {
    Waiting(Vec<Waker>),
    /// The copy is confirmed; the acknowledgement of the original is this operation.
    Acked(Arc<SettleQueue>, u64),
    Done(Settled),
}

#[derive(Default)]
struct State {
    parked: BinaryHeap<Reverse<(Instant, u64)>>,
    slots: BTreeMap<u64, (Weak<Lane>, u64)>,
    moves: VecDeque<(u64, Move)>,
    answers: BTreeMap<u64, Answer>,
    /// Answers that somebody may still ask for, oldest first.
    answered: VecDeque<u64>,
    next: u64,
    ended: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Keeper {
    state: Mutex<State>,
    changed: Notify,
}

impl Keeper {
    pub(crate) fn wake(&self) {
        self.changed.notify_one();
    }

    pub(crate) fn park(&self, due: Instant, lane: &Lane, slot: u64) {
        let mut st = self.state.lock();
        st.next += 1;
        let number = st.next;
        st.parked.push(Reverse((due, number)));
        st.slots.insert(number, (lane.weak(), slot));
        drop(st);
        self.wake();
    }

    pub(crate) fn start_move(&self, job: Move) -> u64 {
        let mut st = self.state.lock();
        st.next += 1;
        let id = st.next | MOVE;
        if st.ended {
            // Without an entry the answer is that it is unknown.
            return id;
        }
        st.moves.push_back((id, job));
        st.answers.insert(id, Answer::Waiting(Vec::new()));
        drop(st);
        self.wake();
        id
    }

    pub(crate) fn poll_moved(&self, id: u64, cx: &mut Context<'_>) -> Poll<Settled> {
        let mut st = self.state.lock();
        let (queue, op) = match st.answers.get_mut(&id) {
            None => return Poll::Ready(Settled::Unknown),
            Some(Answer::Done(settled)) => return Poll::Ready(*settled),
            Some(Answer::Waiting(wakers)) => {
                if !wakers.iter().any(|w| w.will_wake(cx.waker())) {
                    wakers.push(cx.waker().clone());
                }
                return Poll::Pending;
            }
            Some(Answer::Acked(queue, op)) => (queue.clone(), *op),
        };
        drop(st);
        queue.poll_settled(op, cx)
    }

    fn answer(&self, id: u64, answer: Answer) {
        let mut st = self.state.lock();
        let before = st.answers.insert(id, answer);
        st.answered.push_back(id);
        if st.answered.len() > ANSWERS
            && let Some(oldest) = st.answered.pop_front()
        {
            st.answers.remove(&oldest);
        }
        drop(st);
        if let Some(Answer::Waiting(wakers)) = before {
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Nothing is moved any more: what is not answered is unknown.
    pub(crate) fn end(&self) {
        let mut st = self.state.lock();
        st.ended = true;
        let moves = std::mem::take(&mut st.moves);
        let mut wakers = Vec::new();
        st.answers.retain(|_, answer| match answer {
            Answer::Waiting(waiting) => {
                wakers.append(waiting);
                false
            }
            _ => true,
        });
        drop(st);
        drop(moves);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Hands due ones back to the inbox; says when the next is due.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        loop {
            let (lane, slot) = {
                let mut st = self.state.lock();
                let Reverse((due, number)) = *st.parked.peek()?;
                if due > now {
                    return Some(due);
                }
                st.parked.pop();
                match st.slots.remove(&number) {
                    Some(found) => found,
                    None => continue,
                }
            };
            if let Some(lane) = lane.upgrade() {
                lane.unpark(slot);
            }
        }
    }

    /// Moves that are waiting or in flight.
    pub(crate) fn moving(&self) -> usize {
        self.state.lock().answers.values().filter(|a| matches!(a, Answer::Waiting(_))).count()
    }
}

/// Runs until `stop`. `lanes` are those of the present session; `relay` publishes copies.
pub(crate) async fn keep(
    shared: Arc<Shared>,
    lanes: crate::seam::Lanes,
    relay: Option<Arc<Outbox>>,
    stop: CancellationToken,
) {
    let mut moves = FuturesUnordered::new();
    let max_processing = shared.sub.max_processing;
    // What comes to hand after a look is due when the next is. Not busier than 100 times a second, so that something is ended
    // 10 ms late at most; health is looked at each second.
    let longest = max_processing.clamp(BUSIEST, Duration::from_secs(1));
    let mut next_look = shared.env.now() + longest;
    loop {
        let now = shared.env.now();
        let mut wake_at = next_look;
        if now >= next_look {
            next_look = now + longest;
            if let Some(limit) = now.checked_sub(max_processing) {
                lanes.each(|lane| {
                    if let Some(oldest) = lane.expire(limit) {
                        next_look = next_look.min(oldest + max_processing);
                    }
                });
                lanes.drop_strays(Some(limit));
            }
            next_look = next_look.max(now + BUSIEST);
            wake_at = next_look;
            shared.refresh();
        }
        if let Some(at) = shared.transient_due() {
            wake_at = wake_at.min(at);
        }
        if let Some(at) = shared.keeper.due(now) {
            wake_at = wake_at.min(at);
        }
        // All at once: their number is bounded by what may be in flight, and those that fail must not hold up the others.
        let jobs = std::mem::take(&mut shared.keeper.state.lock().moves);
        for (id, job) in jobs {
            moves.push(carry_out(shared.clone(), relay.clone(), id, job));
        }
        tokio::select! { biased;
            () = stop.cancelled() => return,
            Some(()) = moves.next(), if !moves.is_empty() => {}
            () = shared.keeper.changed.notified() => {}
            () = tokio::time::sleep_until(wake_at) => {}
        }
    }
}

/// Publishes one copy until it is confirmed, then acknowledges the original. If the write fails the original stays, is tried
/// again, and health is degraded.
async fn carry_out(shared: Arc<Shared>, relay: Option<Arc<Outbox>>, id: u64, job: Move) {
    let what = match &job.target {
        Target::DeadLetter(_) => "dead letters",
        _ => "retries",
    };
    let mut backoff = None;
    loop {
        let Some(lane) = job.lane.upgrade().filter(|lane| lane.is_moving(job.slot)) else {
            // The session ended first: the broker still has the original.
            shared.keeper.answer(id, Answer::Done(Settled::Unknown));
            return;
        };
        let result = match &relay {
            Some(relay) => {
                let mut sending = relay.send(job.message.message.clone(), job.target.clone(), None);
                match tokio::time::timeout(SLOW, &mut sending).await {
                    Ok(result) => result,
                    Err(_) => {
                        shared.trouble(what, Some(format!("{what} are not confirmed, so originals wait")));
                        sending.await
                    }
                }
            }
            None => Err(mq_api::Error::new(mq_api::ErrorKind::Unsupported, "this backend has no relay")),
        };
        match result {
            Ok(_) => {
                shared.trouble(what, None);
                match lane.moved(job.slot) {
                    Some(op) => shared.keeper.answer(id, Answer::Acked(lane.settles.clone(), op)),
                    None => shared.keeper.answer(id, Answer::Done(Settled::Unknown)),
                }
                return;
            }
            Err(error) => {
                shared.trouble(what, Some(format!("{what} cannot be written, so originals wait: {error}")));
                let backoff = backoff.get_or_insert_with(|| {
                    backon::ExponentialBuilder::default()
                        .with_min_delay(Duration::from_millis(100))
                        .with_max_delay(Duration::from_secs(10))
                        .without_max_times()
                        .build()
                });
                drop(lane);
                tokio::time::sleep(backoff.next().unwrap_or(Duration::from_secs(10))).await;
            }
        }
    }
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keeper({} moving)", self.moving())
    }
}
