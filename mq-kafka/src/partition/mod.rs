//! One partition in one ownership period: what was fetched, and what may be fetched. What a commit says of it is in `commits`.

mod commits;

use crate::answers::Written;
use crate::block::Block;
use crate::client::Ctx;
use crate::delay::Special;
use crate::ffi::{Queue, Raw};
use crate::record::{Record, SPAN};
use crate::topology::Watched;
use crate::wire;
pub(crate) use commits::Snapshot;
use mq_api::{Message, Position};
use mq_core::{Incoming, Lane, Token};
use rdkafka::error::KafkaError;
use rdkafka::message::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Fetched from one partition in one turn.
pub(crate) const TURN: usize = 256;
/// How far messages may be handed out beyond the last commit while members of this group die: few enough that suspects are
/// found soon, enough that a commit is not needed for each.
const CAREFUL: u64 = 32;

struct Fetched {
    offset: u64,
    message: Message,
    /// When the record was written.
    written: Option<SystemTime>,
    special: Special,
}

/// What a partition has to know of the group that reads it.
#[derive(Clone)]
pub(crate) struct Owner {
    pub(crate) group: Arc<str>,
    /// Keys are in order.
    pub(crate) keyed: bool,
    /// Not for at-most-once: everything is committed before it is handed out.
    pub(crate) tracked: bool,
}

/// See the module.
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) number: i32,
    pub(crate) owner: Owner,
    pub(crate) lane: Arc<Lane>,
    watched: Arc<Watched>,
    pub(crate) queue: Queue<Ctx>,
    block: Block,
    /// What earlier owners knew.
    known: Record,
    /// Where it began.
    start: u64,
    /// One beyond the last offset that was pushed or is known to be settled.
    pub(crate) next: u64,
    held: Option<Fetched>,
    /// Messages from here on are not handed out before a commit said that they might be: else a message that kills its
    /// process at once would never be counted.
    horizon: u64,
    tracked: bool,
    /// Commits are offsets only: the broker takes no metadata of our size.
    plain: bool,
    trials: BTreeMap<u64, (u32, u32)>,
    /// Attempts no longer fit into the metadata: nothing more is delivered until they do, or until nothing is left here that
    /// could make room. What does not fit is of messages that were not read yet then, and attempts are "at least".
    crowded: bool,
    /// Something is to be committed.
    pub(crate) dirty: bool,
    /// It has to be committed now: a trial waits, or delivery does.
    pub(crate) wanted: bool,
    committed: Option<(u64, String)>,
    pub(crate) draining: bool,
    /// What the last commit that succeeded says.
    written: Written,
    /// A commit of it failed, and may have been written all the same.
    unsure: bool,
    /// Offsets without messages that retention may have taken, the most of them: `(expected, found)`.
    pub(crate) missing: Option<(u64, u64)>,
}

/// What a turn of fetching came to.
#[derive(Default)]
pub(crate) struct Turn {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
    pub(crate) error: Option<KafkaError>,
    /// Offsets went back to this one: the topic is another, or lost its end.
    pub(crate) back: Option<u64>,
}

impl Partition {
    pub(crate) fn new(
        topic: Arc<str>,
        number: i32,
        watched: Arc<Watched>,
        queue: Queue<Ctx>,
        start: u64,
        known: Record,
        owner: Owner,
    ) -> Self {
        let tracked = owner.tracked;
        Self {
            topic,
            number,
            owner,
            lane: watched.lane.clone(),
            watched,
            queue,
            block: Block::default(),
            known,
            start,
            next: start,
            held: None,
            horizon: if tracked { 0 } else { u64::MAX },
            tracked,
            plain: false,
            trials: BTreeMap::new(),
            crowded: false,
            dirty: true,
            wanted: tracked,
            committed: None,
            draining: false,
            written: Written::default(),
            unsure: false,
            missing: None,
        }
    }

    /// Offsets are missing, and it is not known yet why.
    pub(crate) fn misses(&mut self, expected: u64, found: u64) {
        let width = |(expected, found): (u64, u64)| found - expected;
        if self.missing.is_none_or(|before| width(before) < width((expected, found))) {
            self.missing = Some((expected, found));
        }
    }

    fn read(record: Raw<'_>, block: &mut Block) -> Fetched {
        let mut special = Special::default();
        let mut message = wire::read(record, block, |name, value| special.take(name, value));
        // By the clock of its writer, which is also that of its due time; a broker's own says nothing of that.
        let written = message.timestamp.filter(|_| matches!(record.timestamp(), Timestamp::CreateTime(_)));
        if let Some(ms) = special.stamp {
            message.timestamp = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)).filter(|_| ms > 0);
        }
        Fetched { offset: u64::try_from(record.offset()).unwrap_or_default(), message, written, special }
    }

    /// Fetches at most `max` messages and about `max_bytes` bytes into the lane. `retries`: messages may not be due yet.
    pub(crate) fn fetch(&mut self, max: usize, max_bytes: usize, retries: bool, now: SystemTime) -> Turn {
        let mut turn = Turn::default();
        // Asked first: it costs least, and most of many partitions have nothing.
        if self.held.is_none() && !self.queue.may_have() {
            return turn;
        }
        if self.draining || !self.lane.has_room() {
            return turn;
        }
        let mut first = self.lane.first_unsettled().map(|token| token.0);
        if self.crowded && first.is_some() {
            return turn;
        }
        let mut batch: Vec<Incoming> = Vec::new();
        while turn.count < max.min(TURN) && turn.bytes < max_bytes {
            let fetched = match self.held.take() {
                Some(held) => held,
                None => match self.queue.next() {
                    None => break,
                    Some(Ok(record)) => Self::read(record.raw(), &mut self.block),
                    Some(Err(error)) => {
                        turn.error = Some(error);
                        break;
                    }
                },
            };
            let offset = fetched.offset;
            if offset < self.next {
                turn.back = Some(offset);
                self.held = Some(fetched);
                break;
            }
            if offset > self.next {
                // Compacted, of a transaction that was given up, or taken by retention: there is nothing in between.
                self.misses(self.next, offset);
                self.next = offset;
            }
            if offset >= self.horizon {
                self.wanted = true;
                self.dirty = true;
                self.held = Some(fetched);
                break;
            }
            if self.known.is_done(offset) {
                self.next = offset + 1;
                continue;
            }
            if fetched.special.only.as_deref().is_some_and(|group| *group != *self.owner.group) {
                // Redriven to another group. So rare that a commit for it costs nothing, and the backlog stays right.
                self.next = offset + 1;
                self.dirty = true;
                self.wanted = true;
                continue;
            }
            if first.is_some_and(|first| offset.saturating_sub(first) >= SPAN) {
                // A commit at the first could not say that this one is acknowledged.
                self.held = Some(fetched);
                break;
            }
            let rest = if retries { fetched.special.rest(fetched.written, now) } else { Duration::ZERO };
            if !rest.is_zero() && !self.lane.may_park() {
                self.held = Some(fetched);
                break;
            }
            first.get_or_insert(offset);
            self.next = offset + 1;
            turn.count += 1;
            turn.bytes += fetched.message.size();
            let incoming = self.incoming(fetched);
            if rest.is_zero() {
                batch.push(incoming);
            } else {
                self.lane.push(batch.drain(..));
                self.lane.push_due(incoming, tokio::time::Instant::now() + rest);
            }
        }
        if self.tracked && self.next.saturating_add(self.ahead() / 2) > self.horizon && turn.count > 0 {
            self.wanted = true;
            self.dirty = true;
        }
        self.lane.push(batch);
        turn
    }

    fn incoming(&self, fetched: Fetched) -> Incoming {
        let offset = fetched.offset;
        let mut incoming = Incoming::new(Token(offset, 0), Position::offset(offset), fetched.message);
        incoming.attempt = fetched.special.attempt.unwrap_or(1).max(1);
        incoming.takes = self.known.takes.of(offset) + 1;
        if let Some(tried) = self.known.tried.get(&offset) {
            incoming.attempt = incoming.attempt.max(tried.attempt);
            incoming.trials = tried.trials;
        }
        incoming
    }

    fn ahead(&self) -> u64 {
        if self.known.takes.of(self.next) > 0 { CAREFUL } else { SPAN }
    }

    /// The broker takes no metadata of this size: only offsets from now on.
    pub(crate) fn without_metadata(&mut self) {
        tracing::warn!(
            topic = %self.topic,
            partition = self.number,
            "the broker takes no metadata of commits (offset.metadata.max.bytes, by default 4096): only what is acknowledged \
             in order is confirmed, and attempts that end with a process are not counted"
        );
        self.horizon = u64::MAX;
        self.tracked = false;
        self.plain = true;
        self.crowded = false;
    }

    /// Takes over the held message and what is known anew, in a new lane: offsets went back.
    pub(crate) fn restart(&mut self, watched: Arc<Watched>, at: u64) {
        self.lane = watched.lane.clone();
        self.watched = watched;
        self.known = Record::default();
        self.start = at;
        self.next = at;
        self.horizon = if self.tracked { 0 } else { u64::MAX };
        self.trials.clear();
        self.missing = None;
        self.committed = None;
        self.dirty = true;
        self.wanted = self.tracked;
    }
}
