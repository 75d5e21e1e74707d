//! A member of a group: one consumer of librdkafka and its partitions. Only the driver thread touches it. Its changes of
//! assignment are in `moves`, its commits in `rounds`, what the broker lost in `losses`, its end in `leave`.

mod leave;
mod losses;
mod moves;
mod rounds;

use crate::answers::Ending;
use crate::client::Ctx;
use crate::commit::{Committer, Done, Job};
use crate::partition::Partition;
use crate::topology::{Cluster, Reading};
use moves::Moving;
use mq_api::{Error, ErrorKind, GapCause};
use mq_core::Session;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rounds::Flight;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::task::Context;
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Pause after a failed commit or a failed look at offsets.
const AGAIN: Duration = Duration::from_millis(200);

/// Which topics it reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The topic.
    Main,
    /// The retry topics of the group.
    Retries,
}

/// What the driver has to know of what a member did.
pub(crate) enum News {
    /// The first assignment is there.
    Joined,
    /// A lane ended.
    Over(u32, Ending),
    /// The commit with which these lanes ended failed.
    Unsure(Vec<u32>),
    /// It cannot go on.
    Gone(Error),
}

/// See the module.
pub(crate) struct Member {
    pub(crate) role: Role,
    cluster: Arc<Cluster>,
    topic: Arc<str>,
    reading: Reading,
    consumer: Arc<BaseConsumer<Ctx>>,
    ctx: Ctx,
    committer: Committer,
    driver: Thread,
    session: Session,
    pub(crate) partitions: Vec<Partition>,
    moving: Option<Moving>,
    flight: Option<Flight>,
    /// Answers that are still to come for flights that were given up.
    ignored: usize,
    /// The present round of commits is not done yet.
    owed: bool,
    not_before: Option<Instant>,
    /// The topic may be gone.
    pub(super) wants_look: bool,
    looking: bool,
    next_look: Instant,
    joined: bool,
    /// Partitions in which the group had begun when it joined.
    pub(crate) begun: BTreeSet<i32>,
    /// Partitions whose loss was told.
    told: HashSet<i32>,
    unreachable: bool,
    /// It is being asked why offsets are missing.
    asking_why: bool,
    next_why: Instant,
    pub(crate) news: Vec<News>,
    turn: usize,
}
impl Member {
    pub(crate) fn new(
        role: Role,
        cluster: Arc<Cluster>,
        topic: Arc<str>,
        reading: Reading,
        consumer: Arc<BaseConsumer<Ctx>>,
        session: Session,
    ) -> mq_api::Result<Self> {
        let driver = std::thread::current();
        let ctx = (**consumer.client().context()).clone();
        ctx.drive();
        let letters = session.subscription.topic.dead_letters_of().is_some();
        let committer = Committer::start(consumer.clone(), driver.clone(), letters.then(|| cluster.clone()))?;
        Ok(Self {
            role,
            cluster,
            topic,
            reading,
            consumer,
            ctx,
            committer,
            driver,
            session,
            partitions: Vec::new(),
            moving: None,
            flight: None,
            ignored: 0,
            owed: false,
            not_before: None,
            wants_look: false,
            looking: false,
            next_look: Instant::now(),
            joined: false,
            begun: BTreeSet::new(),
            told: HashSet::new(),
            unreachable: false,
            asking_why: false,
            next_why: Instant::now(),
            news: Vec::new(),
            turn: 0,
        })
    }

    pub(crate) fn by_lane(&mut self, lane: u32) -> Option<&mut Partition> {
        self.partitions.iter_mut().find(|p| p.lane.id() == lane)
    }

    /// One turn of everything but fetching; true if anything happened.
    pub(crate) fn serve(&mut self, cx: &mut Context<'_>) -> bool {
        let mut busy = self.poll_main();
        while let Some(done) = self.committer.next() {
            self.on_done(done);
            busy = true;
        }
        busy |= self.advance(cx);
        self.look_if_down();
        busy
    }

    /// Serves call-backs; with partition queues split off, messages come here only by exception.
    fn poll_main(&mut self) -> bool {
        let consumer = self.consumer.clone();
        for n in 0..64 {
            match consumer.poll(Duration::ZERO) {
                None => return n > 0,
                // A message of a partition that is being taken away or set up: it is not committed, and comes again.
                Some(Ok(_)) => tracing::debug!(topic = %self.topic, "a message outside its partition's queue"),
                Some(Err(error)) => self.on_error(error),
            }
        }
        true
    }

    fn on_error(&mut self, error: KafkaError) {
        let fatal =
            matches!(error, KafkaError::MessageConsumptionFatal(_)) || self.consumer.client().fatal_error().is_some();
        if fatal {
            let why = self.consumer.client().fatal_error().map_or_else(|| error.to_string(), |(_, text)| text);
            let text = format!("the member of the group has to join anew: {why}");
            self.news.push(News::Gone(Error::new(ErrorKind::Disconnected, text).with_source(error)));
            return;
        }
        match error.rdkafka_error_code() {
            Some(code) if crate::fault::is_gone(code) => {
                self.wants_look |= self.role == Role::Main;
            }
            Some(
                code @ (Code::TopicAuthorizationFailed
                | Code::GroupAuthorizationFailed
                | Code::Authentication
                | Code::SaslAuthenticationFailed
                | Code::SSL
                | Code::InvalidSessionTimeout),
            ) => {
                if self.role == Role::Main || code != Code::TopicAuthorizationFailed {
                    let refusal = self.ctx.refused().unwrap_or_else(|| crate::fault::coded("fetching", code));
                    self.session.trouble("refused by the broker", Some(refusal.to_string()));
                    self.next_look = Instant::now() + Duration::from_secs(1);
                }
            }
            Some(Code::AllBrokersDown) => {
                let why = self.ctx.down().unwrap_or_default();
                self.unreachable = true;
                self.session.unreachable(Some(format!("no broker can be reached: {why}")));
            }
            _ => tracing::debug!(topic = %self.topic, %error, "from the consumer"),
        }
    }

    /// While no broker can be reached, or something is refused, asks now and then whether that is over.
    fn look_if_down(&mut self) {
        let troubled = self.wants_look || self.ctx.down().is_some() || self.ctx.refused().is_some();
        if troubled && Instant::now() >= self.next_look {
            self.look();
        }
    }

    fn look(&mut self) {
        if !self.looking && self.flight.is_none() {
            self.looking = true;
            self.wants_look = false;
            self.next_look = Instant::now() + Duration::from_millis(500);
            self.committer.ask(Job::Look(self.topic.clone(), self.reading.id));
        }
    }

    fn on_done(&mut self, done: Done) {
        match done {
            Done::Loaded(result) => self.on_loaded(result),
            Done::Committed(result) => self.on_committed(result),
            Done::Looked(found) => {
                self.looking = false;
                match found {
                    Ok(true) => self.is_up(),
                    Ok(false) if self.role == Role::Main => {
                        let text = format!("topic '{}' is gone, or another has its name", self.topic);
                        self.news.push(News::Gone(Error::new(ErrorKind::NotFound, text)));
                    }
                    Ok(false) => self.is_up(),
                    Err(error) => {
                        tracing::debug!(%error, "looking whether the broker is back");
                        self.ctx.remind(self.consumer.client(), &self.cluster.settings.brokers);
                    }
                }
            }
            Done::Low { partition, missing, low } => self.on_low(partition, missing, low),
        }
    }

    fn is_up(&mut self) {
        self.ctx.is_up();
        self.ctx.forget_refusal();
        if std::mem::take(&mut self.unreachable) {
            self.session.unreachable(None);
        }
        self.session.trouble("refused by the broker", None);
    }

    /// Fetches at most `max` messages and about `max_bytes`; says how many and how much.
    pub(crate) fn fetch(&mut self, max: usize, max_bytes: usize) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        let n = self.partitions.len();
        let retries = self.role == Role::Retries;
        let now = self.session.env.wall();
        self.turn = self.turn.wrapping_add(1);
        for i in 0..n {
            if count >= max || bytes >= max_bytes {
                break;
            }
            let partition = &mut self.partitions[(self.turn + i) % n];
            let turn = partition.fetch(max - count, max_bytes - bytes, retries, now);
            count += turn.count;
            bytes += turn.bytes;
            let number = partition.number;
            if let Some(at) = turn.back {
                let (lane, lost_from) = (partition.lane.clone(), partition.next);
                self.session.close_lane(&lane);
                let flying = self.flight.as_ref().and_then(|f| f.snapshots.iter().find(|s| s.lane == lane.id()));
                let ending = partition.lost(flying);
                self.news.push(News::Over(lane.id(), ending));
                let epoch = lane.source().epoch;
                let fresh = self.session.open_lane(lane.source().partition, epoch);
                let watched = self.cluster.watch(&fresh, &self.session.member);
                self.partitions[(self.turn + i) % n].restart(watched, at);
                self.gap(number, lost_from, at, GapCause::BrokerLoss, None);
            }
            if let Some(error) = turn.error {
                self.on_error(error);
            }
        }
        if !retries {
            self.ask_why();
        }
        (count, bytes)
    }
}
