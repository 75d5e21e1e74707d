//! One session of one member of a group: what its parts (reading, settling, tending) share.

use crate::answer::{Fields, Id, as_bytes, as_int, failure, fields, list, parse_id};
use crate::connect::{Hub, Link};
use crate::keys::GroupKeys;
use crate::topology::Keep;
use crate::wake::Wake;
use crate::wire;
use mq_api::{Error, Event, Gap, GapCause, Message, Position};
use mq_core::{Incoming, Lane, Session, Token};
use parking_lot::Mutex;
use redis::{RedisError, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// What outlives a session: known by the member's name.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// The group was there once, so that its absence is a loss.
    pub(crate) seen: bool,
    /// The last session ended because the group was gone.
    pub(crate) group_lost: bool,
    /// The lowest id that the group had not settled when it was last looked at.
    pub(crate) low: Option<String>,
    /// Number of the next hand-over of what was in the application's hands, or whose settlement is unknown, when a session was
    /// lost.
    attempts: BTreeMap<(usize, Token), u32>,
    /// The last suspects that were recorded as handed over alone, with the number of the trial. While this process lives, it did
    /// not die of them.
    tried: VecDeque<(usize, Token, u32)>,
    /// The server's run, to tell a restart that lost everything from a deletion.
    pub(crate) run: Option<String>,
    /// The last position seen.
    pub(crate) last: Option<Position>,
}

/// A member has one suspect in hand; others may still come back that it settled without hearing the answer.
const TRIED: usize = 256;
/// Twice as many as a member has in hand when it is asked for many; what others took over stays until newer ones push it out.
const ATTEMPTS: usize = 65_536;

impl Memory {
    /// Another consumer begins under the name.
    pub(crate) fn begin(&mut self) {
        (self.seen, self.group_lost, self.low, self.last) = (false, false, None, None);
    }

    /// The next hand-over of an entry, if it comes again, has this number.
    pub(crate) fn comes_as(&mut self, side: usize, token: Token, attempt: u32) {
        let next = self.attempts.entry((side, token)).or_insert(attempt);
        *next = attempt.max(*next);
        if self.attempts.len() > ATTEMPTS {
            self.attempts.pop_first();
        }
    }

    /// The number of the next hand-over, as far as this process knows.
    pub(crate) fn next_attempt(&mut self, side: usize, token: Token) -> u32 {
        self.attempts.remove(&(side, token)).unwrap_or(1)
    }

    /// A suspect is recorded as handed over alone for the n-th time.
    pub(crate) fn tried(&mut self, side: usize, token: Token, n: u32) {
        self.tried.retain(|(at, known, _)| (*at, *known) != (side, token));
        self.tried.push_back((side, token, n));
        if self.tried.len() > TRIED {
            self.tried.pop_front();
        }
    }

    /// How many consumers died with an entry alone, of which so many trials are noted.
    pub(crate) fn deaths(&self, side: usize, token: Token, noted: u32) -> u32 {
        match self.tried.contains(&(side, token, noted)) {
            true => noted.saturating_sub(1),
            false => noted,
        }
    }
}

/// What is known of an entry that is no first delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    /// The server's count of takes: with the owner it fences settlements.
    pub(crate) count: u32,
    pub(crate) attempt: u32,
    pub(crate) trials: u32,
}

impl Known {
    pub(crate) const FIRST: Self = Self { count: 1, attempt: 1, trials: 0 };
}

/// A stream that the group reads: the topic's, or the one that redrive writes to.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) keys: GroupKeys,
    pub(crate) lane: Arc<Lane>,
    /// Entries that differ from [`Known::FIRST`].
    pub(crate) known: Mutex<HashMap<Token, Known>>,
}

impl Side {
    pub(crate) fn known(&self, token: Token) -> Known {
        self.known.lock().get(&token).copied().unwrap_or(Known::FIRST)
    }

    pub(crate) fn forget(&self, token: Token) {
        self.known.lock().remove(&token);
    }
}

/// See the module.
pub(crate) struct Member {
    pub(crate) hub: Arc<Hub>,
    pub(crate) link: Link,
    pub(crate) session: Session,
    pub(crate) group: String,
    pub(crate) me: String,
    pub(crate) sides: [Side; 2],
    /// The stream of redrive exists: it is read too.
    pub(crate) again: AtomicBool,
    pub(crate) keep: Keep,
    pub(crate) memory: Arc<Mutex<Memory>>,
    /// Everything held was renewed, or read, not before this.
    pub(crate) fresh_since: Mutex<Instant>,
    /// When the read in flight was sent.
    pub(crate) reading_since: Mutex<Option<Instant>>,
    /// When the next entry is due, as far as it is known.
    pub(crate) wake: Arc<Wake>,
    /// The server's time in milliseconds, and when it was told.
    pub(crate) clock: Mutex<Option<(u64, Instant)>>,
    /// Nothing could be taken for want of credit.
    pub(crate) starved: AtomicBool,
    /// The group was made again: attempts of what is read are noted beside it.
    pub(crate) revived: AtomicBool,
    /// Mean size of an entry, to keep reads within the byte bound.
    pub(crate) mean: AtomicU64,
    pub(crate) acked: AtomicBool,
    /// Dead letters that could not be written, and are tried again.
    pub(crate) stuck: Mutex<Vec<mq_core::Other>>,
}

impl Member {
    pub(crate) fn lease(&self) -> Duration {
        self.session.subscription.lease
    }

    /// The streams that are read now.
    pub(crate) fn live_sides(&self) -> &[Side] {
        if self.again.load(Ordering::Relaxed) { &self.sides } else { &self.sides[..1] }
    }

    pub(crate) fn side_of(&self, lane: u32) -> Option<&Side> {
        self.sides.iter().find(|side| side.lane.id() == lane)
    }

    /// An error of a command: the session goes on with it, or not.
    pub(crate) fn error(&self, error: RedisError, doing: &str) -> Error {
        failure(error, doing).doing(self.place())
    }

    /// The topic and group, for errors.
    pub(crate) fn place(&self) -> String {
        format!("topic '{}', group '{}'", self.session.subscription.topic, self.group)
    }

    /// Whether everything held is certainly still owned: nobody takes it before its lease ran out, which is counted from the
    /// moment before it was read or renewed. A quarter of the lease is left for the command's way.
    pub(crate) fn is_certain(&self) -> bool {
        self.fresh_since.lock().elapsed() < self.lease().mul_f32(0.75)
    }

    /// Makes a delivery of an entry.
    fn incoming(&self, side: usize, id: Id, message: Message, known: Known) -> Incoming {
        let token = Token(id.0, id.1);
        let position = Position::stream_id(id.0, id.1);
        if known != Known::FIRST {
            self.sides[side].known.lock().insert(token, known);
        }
        Incoming { token, position, message, attempt: known.attempt, takes: known.count, trials: known.trials }
    }

    /// Hands entries that were read for the first time to the engine, or gives them back if it is closing.
    pub(crate) fn push_new(&self, side: usize, entries: Vec<(Id, Message)>, notes: &HashMap<Id, Known>) {
        if entries.is_empty() {
            return;
        }
        let bytes: usize = entries.iter().map(|(_, message)| message.size()).sum();
        let mean = (bytes / entries.len()) as u64;
        // At once upward: what is read next may be as large.
        let mean = self.mean.load(Ordering::Relaxed).midpoint(mean).max(mean).max(1);
        self.mean.store(mean, Ordering::Relaxed);
        let incoming = entries.into_iter().map(|(id, message)| {
            let known = if notes.is_empty() { Known::FIRST } else { notes.get(&id).copied().unwrap_or(Known::FIRST) };
            self.incoming(side, id, message, known)
        });
        self.push(side, incoming);
    }

    /// Hands entries that a script took (id, count, tries, fields) to the engine.
    pub(crate) fn push_taken(&self, side: usize, taken: Vec<Value>) {
        let mut again = Vec::with_capacity(taken.len());
        for item in taken {
            let mut parts = list(item);
            if parts.len() < 4 {
                continue;
            }
            let entry = fields(parts.swap_remove(3)).unwrap_or(Fields::Other(Vec::new()));
            let Some(id) = as_bytes(&parts[0]).and_then(parse_id) else { continue };
            let token = Token(id.0, id.1);
            let count = as_int(&parts[1]).and_then(|n| n.try_into().ok()).unwrap_or(1);
            let (attempt, trials) = notes(as_bytes(&parts[2]).unwrap_or_default());
            let (attempt, trials) = {
                let mut memory = self.memory.lock();
                let next = memory.next_attempt(side, token);
                (next.max(attempt), memory.deaths(side, token, trials))
            };
            // The same process had it before: the former handle must be stale before there is another.
            self.sides[side].lane.lose(&[token]);
            again.push(self.incoming(side, id, wire::from_fields(entry, id), Known { count, attempt, trials }));
        }
        if !again.is_empty() {
            self.push(side, again);
        }
    }

    fn push(&self, side: usize, incoming: impl IntoIterator<Item = Incoming>) {
        let lane = &self.sides[side].lane;
        lane.push(incoming);
        if self.is_stopping() {
            // It came while the close began: nothing may stay buffered.
            lane.begin_drain();
        }
    }

    /// Where a side stands among the sides.
    pub(crate) fn number_of(&self, side: &Side) -> usize {
        self.sides.iter().position(|known| known.lane.id() == side.lane.id()).unwrap_or(0)
    }

    /// A suspect is recorded as handed over alone for the n-th time.
    pub(crate) fn tried(&self, side: &Side, token: Token, n: u32) {
        self.memory.lock().tried(self.number_of(side), token, n);
    }

    /// How many consumers died with an entry alone, as far as this one knows.
    pub(crate) fn deaths(&self, side: &Side, token: Token) -> u32 {
        self.memory.lock().deaths(self.number_of(side), token, side.known(token).trials)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.session.flow.is_shut(mq_core::Gate::Stopping)
    }

    /// Entries left the stream while they were pending.
    pub(crate) fn gone(&self, count: u64) {
        if count > 0 {
            tracing::warn!(topic = %self.session.subscription.topic, group = self.group, count, "pending entries were removed from the stream");
            self.gap(GapCause::Retention, Some(count));
        }
    }

    pub(crate) fn gap(&self, cause: GapCause, count: Option<u64>) {
        let from = self.memory.lock().last;
        let topic = self.session.subscription.topic.clone();
        self.session.events.push(Event::Gap(Gap { from, count, ..Gap::new(topic, cause) }));
    }

    /// What the session leaves for the next one of the same member.
    pub(crate) fn remember(&self) {
        let mut memory = self.memory.lock();
        for (at, side) in self.sides.iter().enumerate() {
            side.lane.visit(|slot| {
                if slot.handed && !slot.settled {
                    memory.comes_as(at, slot.token, slot.attempt + 1);
                }
            });
        }
    }
}

/// `attempt:trials`, as the scripts note it.
pub(crate) fn notes(text: &[u8]) -> (u32, u32) {
    let text = std::str::from_utf8(text).unwrap_or_default();
    let (attempt, trials) = text.split_once(':').unwrap_or((text, ""));
    (attempt.parse().unwrap_or(1), trials.parse().unwrap_or(0))
}
