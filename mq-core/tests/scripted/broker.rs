//! The toy broker: one topic, one group, a delay place, dead letters. All state behind one lock; sessions own what they took.

use mq_api::{Envelope, Failure, Message, MessageId};
use mq_core::Token;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::Instant;

/// Positions of copies, which are in no log.
const COPY: u64 = 1 << 40;

/// A message as the group has it.
#[derive(Debug, Clone)]
pub struct Item {
    pub position: u64,
    pub message: Message,
    /// Number of the hand-over to come.
    pub attempt: u32,
    pub takes: u32,
    pub trials: u32,
}

/// A dead letter, with the envelope the engine made or the driver filled.
#[derive(Debug, Clone)]
pub struct Dead {
    pub id: MessageId,
    pub reason: String,
    pub attempts: u32,
    pub envelope: Option<Envelope>,
}

/// A message in the log of the toy.
#[derive(Debug, Clone)]
pub struct Logged {
    pub position: u64,
    pub message: Message,
    pub attempt: u32,
    pub settled: bool,
}

#[derive(Default)]
pub struct State {
    next: u64,
    copies: u64,
    next_tag: u64,
    ready: VecDeque<Item>,
    delayed: Vec<(Instant, Item)>,
    /// Taken and unsettled, by session and token.
    pending: BTreeMap<(u64, Token), Item>,
    pub dead: Vec<Dead>,
    /// Every message that left the group by an ack, in order.
    pub acked: Vec<MessageId>,
    /// Acks for something the session did not own.
    pub foreign: u64,
    pub releases: u64,
    pub retries: Vec<(MessageId, u32, Duration)>,
    pub trials: Vec<(MessageId, u32)>,
    /// The log, for readers by offset.
    log: Vec<Logged>,
    /// Everything below is settled.
    committed: u64,
    wakers: Vec<Waker>,
}

#[derive(Clone, Default)]
pub struct Toy(Arc<Mutex<State>>);

impl Toy {
    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let mut st = self.0.lock();
        let out = f(&mut st);
        let wakers = std::mem::take(&mut st.wakers);
        drop(st);
        wakers.into_iter().for_each(Waker::wake);
        out
    }

    /// Stores `n` messages `prefix-0..`; their payloads are `size` bytes.
    pub fn publish(&self, prefix: &str, n: usize, size: usize) {
        for i in 0..n {
            self.store(Message::new(vec![b'x'; size]).id(format!("{prefix}-{i}")), 1);
        }
    }

    pub fn store(&self, message: Message, attempt: u32) -> u64 {
        self.with(|st| st.store(message, attempt))
    }

    /// Acked, dead-lettered, and whatever is still somewhere.
    pub fn counts(&self) -> (usize, usize, usize) {
        let st = self.0.lock();
        (st.acked.len(), st.dead.len(), st.ready.len() + st.delayed.len() + st.pending.len())
    }

    pub fn pending(&self) -> usize {
        self.0.lock().pending.len()
    }

    pub fn ready(&self) -> usize {
        self.0.lock().ready.len()
    }

    /// Takes what is due for `session`, at most `n` and about `bytes`; waits if there is nothing. `by_tag`: tokens are new
    /// for every delivery, else they are positions.
    pub fn poll_fetch(
        &self,
        cx: &mut Context<'_>,
        session: u64,
        n: usize,
        bytes: usize,
        by_tag: bool,
    ) -> Poll<Vec<(Token, Item)>> {
        let mut st = self.0.lock();
        st.move_due();
        let (mut taken, mut size) = (Vec::new(), 0);
        while taken.len() < n {
            let Some(front) = st.ready.front() else { break };
            if !taken.is_empty() && size + front.message.size() > bytes {
                break;
            }
            size += front.message.size();
            let Some(mut item) = st.ready.pop_front() else { break };
            item.takes += 1;
            st.next_tag += 1;
            let token = if by_tag { Token(st.next_tag, session) } else { Token(item.position, 0) };
            st.pending.insert((session, token), item.clone());
            taken.push((token, item));
        }
        if !taken.is_empty() {
            return Poll::Ready(taken);
        }
        st.wakers.push(cx.waker().clone());
        Poll::Pending
    }

    /// When the next delayed one is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.0.lock().delayed.iter().map(|(at, _)| *at).min()
    }

    /// Calls `cx` when anything changes.
    pub fn watch(&self, cx: &mut Context<'_>) {
        self.0.lock().wakers.push(cx.waker().clone());
    }

    pub fn ack(&self, session: u64, token: Token) -> bool {
        self.with(|st| match st.pending.remove(&(session, token)) {
            Some(item) => {
                st.acked.push(item.message.id);
                true
            }
            None => {
                st.foreign += 1;
                false
            }
        })
    }

    pub fn retry(&self, session: u64, token: Token, after: Duration, attempt: u32) -> bool {
        self.with(|st| {
            let Some(mut item) = st.pending.remove(&(session, token)) else { return false };
            st.retries.push((item.message.id.clone(), attempt, after));
            (item.attempt, item.trials) = (attempt, 0);
            st.delayed.push((Instant::now() + after, item));
            true
        })
    }

    pub fn kill(&self, session: u64, token: Token, reason: &str, attempts: u32, _: Option<&Failure>) -> bool {
        self.with(|st| {
            let Some(item) = st.pending.remove(&(session, token)) else { return false };
            st.dead.push(Dead { id: item.message.id, reason: reason.to_owned(), attempts, envelope: None });
            true
        })
    }

    pub fn release(&self, session: u64, token: Token) -> bool {
        self.with(|st| {
            let Some(mut item) = st.pending.remove(&(session, token)) else { return false };
            st.releases += 1;
            item.takes -= 1;
            st.ready.push_front(item);
            true
        })
    }

    pub fn trial(&self, session: u64, token: Token, n: u32) {
        self.with(|st| {
            let Some(item) = st.pending.get_mut(&(session, token)) else { return };
            item.trials = n;
            let id = item.message.id.clone();
            st.trials.push((id, n));
        });
    }

    /// A copy arrives by publishing.
    pub fn delay(&self, message: Message, after: Duration, attempt: u32) {
        self.with(|st| {
            st.retries.push((message.id.clone(), attempt, after));
            st.copies += 1;
            let item = Item { position: COPY + st.copies, message, attempt, takes: 0, trials: 0 };
            st.delayed.push((Instant::now() + after, item));
        });
    }

    /// The log from `offset` on; delayed copies that are due are at its end.
    pub fn with_log(&self, offset: u64, n: usize, bytes: usize) -> Vec<Logged> {
        let mut st = self.0.lock();
        let now = Instant::now();
        let due: Vec<Item> = st.delayed.extract_if(.., |(at, _)| *at <= now).map(|(_, item)| item).collect();
        for item in due {
            st.store(item.message, item.attempt);
        }
        let mut size = 0;
        let from = st.log.iter().skip(offset as usize).take(n);
        from.take_while(|i| {
            size += i.message.size();
            size <= bytes || size == i.message.size()
        })
        .cloned()
        .collect()
    }

    pub fn committed(&self) -> u64 {
        self.0.lock().committed
    }

    pub fn settle_offset(&self, offset: u64) {
        self.with(|st| {
            let Some(entry) = st.log.get_mut(offset as usize) else { return };
            if std::mem::replace(&mut entry.settled, true) {
                st.foreign += 1;
                return;
            }
            let id = entry.message.id.clone();
            st.acked.push(id);
            while st.log.get(st.committed as usize).is_some_and(|i| i.settled) {
                st.committed += 1;
            }
        });
    }

    pub fn note_attempt(&self, offset: u64, attempt: u32) {
        self.with(|st| {
            if let Some(entry) = st.log.get_mut(offset as usize) {
                entry.attempt = attempt;
            }
        });
    }

    /// Messages of the log that are not settled, and delayed copies.
    pub fn unsettled_in_log(&self) -> usize {
        let st = self.0.lock();
        st.log.iter().filter(|i| !i.settled).count() + st.delayed.len()
    }

    /// The session is gone: what it had comes again, in order; `handed` tells what was in the application's hands.
    pub fn end_session(&self, session: u64, handed: &[Token]) {
        self.with(|st| {
            let tokens: Vec<Token> =
                st.pending.range((session, Token(0, 0))..(session + 1, Token(0, 0))).map(|((_, t), _)| *t).collect();
            for token in tokens.into_iter().rev() {
                let Some(mut item) = st.pending.remove(&(session, token)) else { continue };
                item.attempt += u32::from(handed.contains(&token));
                st.ready.push_front(item);
            }
        });
    }
}

impl State {
    fn store(&mut self, message: Message, attempt: u32) -> u64 {
        let position = self.next;
        self.next += 1;
        let item = Item { position, message, attempt, takes: 0, trials: 0 };
        self.log.push(Logged { position, message: item.message.clone(), attempt, settled: false });
        self.ready.push_back(item);
        position
    }

    fn move_due(&mut self) {
        let now = Instant::now();
        let mut due: Vec<_> = Vec::new();
        self.delayed.retain(|(at, item)| {
            if *at <= now {
                due.push((*at, item.clone()));
            }
            *at > now
        });
        due.sort_by_key(|(at, _)| *at);
        self.ready.extend(due.into_iter().map(|(_, item)| item));
    }
}

impl Toy {
    /// Makes these look as if they had been taken so often, and their consumers had died each time.
    pub fn suspect(&self, ids: &[&str], takes: u32) {
        self.with(|st| {
            for item in st.ready.iter_mut().filter(|i| ids.contains(&i.message.id.to_string().as_str())) {
                item.takes = takes;
            }
        });
    }
}
