//! A member of a group: one consumer of librdkafka, its partitions, and the changes of its assignment. Only the driver thread
//! touches it.

use crate::client::{Change, Ctx, MOVE_LIMIT};
use crate::commit::{Committer, Done, Job, Loaded, Place};
use crate::ffi;
use crate::partition::{Partition, Snapshot};
use crate::record::Record;
use crate::topology::Cluster;
use mq_api::{Error, ErrorKind, Event, Gap, GapCause, Ordering, Position};
use mq_core::Session;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::{Offset, TopicPartitionList};
use std::collections::HashSet;
use std::sync::Arc;
use std::task::Context;
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A commit before a partition is given up is waited for this long: then the broker is away, and the new owner starts from
/// the commit before.
const LAST_COMMIT: Duration = Duration::from_secs(3);
/// Pause after a failed commit or a failed look at offsets.
const AGAIN: Duration = Duration::from_millis(200);
/// How long what is in hand may hold back a partition that moves. Without order it is a courtesy: less is done twice.
const GRACE: Duration = Duration::from_secs(10);
/// Under `PerKey` ownership moves only when all that was taken has been handled; bounded by what the group waits.
const KEYED_GRACE: Duration = Duration::from_secs(MOVE_LIMIT.as_secs() * 2 / 3);

/// Which topics it reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The topic.
    Main,
    /// The retry topics of the group.
    Retries,
}

enum Moving {
    /// The offsets of new partitions are being read.
    Loading { list: TopicPartitionList },
    /// Reading them failed; again at this time.
    Waiting { list: TopicPartitionList, until: Instant },
    /// What is in hand is finished, at most until then.
    Draining { list: TopicPartitionList, until: Instant },
    /// The last commit is under way.
    Committing { list: TopicPartitionList, until: Instant },
}

struct Flight {
    snapshots: Vec<Snapshot>,
    last: bool,
}

/// What the driver has to know of what a member did.
pub(crate) enum News {
    /// The first assignment is there.
    Joined,
    /// Nothing of this lane was committed any more.
    Lost(u32),
    /// This lane ended in good order: its acknowledgements are in a commit that is under way or done.
    Ended(u32),
    /// That commit failed.
    Unsure(Vec<u32>),
    /// It cannot go on.
    Gone(Error),
}

/// See the module.
pub(crate) struct Member {
    pub(crate) role: Role,
    cluster: Arc<Cluster>,
    topic: Arc<str>,
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
    looking: bool,
    next_look: Instant,
    joined: bool,
    /// Partitions whose loss was told.
    told: HashSet<i32>,
    unreachable: bool,
    pub(crate) news: Vec<News>,
    turn: usize,
}

impl Member {
    pub(crate) fn new(
        role: Role,
        cluster: Arc<Cluster>,
        topic: Arc<str>,
        consumer: Arc<BaseConsumer<Ctx>>,
        session: Session,
    ) -> mq_api::Result<Self> {
        let driver = std::thread::current();
        let ctx = (**consumer.client().context()).clone();
        let letters = session.subscription.topic.dead_letters_of().is_some();
        let committer = Committer::start(consumer.clone(), driver.clone(), letters.then(|| cluster.clone()))?;
        Ok(Self {
            role,
            cluster,
            topic,
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
            looking: false,
            next_look: Instant::now(),
            joined: false,
            told: HashSet::new(),
            unreachable: false,
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
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition) => {
                if self.role == Role::Main {
                    self.next_look = Instant::now();
                    self.look();
                }
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
        let troubled = self.ctx.down().is_some() || self.ctx.refused().is_some();
        if troubled && Instant::now() >= self.next_look {
            self.look();
        }
    }

    fn look(&mut self) {
        if !self.looking && self.flight.is_none() {
            self.looking = true;
            self.next_look = Instant::now() + Duration::from_millis(500);
            self.committer.ask(Job::Look(self.topic.clone()));
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
                        let text = format!("topic '{}' is gone", self.topic);
                        self.news.push(News::Gone(Error::new(ErrorKind::NotFound, text)));
                    }
                    Ok(false) => self.is_up(),
                    Err(error) => tracing::debug!(%error, "looking whether the broker is back"),
                }
            }
            Done::Low { partition, expected, low } => {
                if let Some(low) = low.filter(|low| *low > expected) {
                    self.gap(partition, expected, low, GapCause::Retention, Some(low - expected));
                }
            }
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

    fn gap(&self, partition: i32, from: u64, to: u64, cause: GapCause, count: Option<u64>) {
        self.session.events.push(Event::Gap(Gap {
            topic: self.session.subscription.topic.clone(),
            partition: u32::try_from(partition).ok(),
            from: from.checked_sub(1).map(Position::offset),
            to: Some(Position::offset(to)),
            count,
            cause,
        }));
    }

    // Changes of the assignment.

    fn advance(&mut self, cx: &mut Context<'_>) -> bool {
        match self.moving.take() {
            None => match self.ctx.next_change() {
                None => false,
                Some(Change::Assign(list)) => {
                    self.assign(list);
                    true
                }
                Some(Change::Revoke { list, lost }) => {
                    self.revoke(list, lost);
                    true
                }
            },
            Some(Moving::Waiting { list, until }) if Instant::now() >= until => {
                self.assign(list);
                true
            }
            Some(Moving::Draining { list, until }) => {
                let drained = self.partitions.iter().filter(|p| p.draining).all(|p| p.lane.poll_drained(cx).is_ready());
                if (drained || Instant::now() >= until) && self.flight.is_none() {
                    self.give_up(list);
                    return true;
                }
                self.moving = Some(Moving::Draining { list, until });
                false
            }
            Some(Moving::Committing { list, until }) => {
                let over = self.flight.is_none();
                if over || Instant::now() >= until {
                    if let Some(flight) = self.drop_flight() {
                        let lanes = flight.snapshots.iter().map(|s| s.lane).collect();
                        self.news.push(News::Unsure(lanes));
                    }
                    self.unassign(&list);
                    return true;
                }
                self.moving = Some(Moving::Committing { list, until });
                false
            }
            same => {
                self.moving = same;
                false
            }
        }
    }

    fn assign(&mut self, list: TopicPartitionList) {
        let wanted: Vec<Place> = ffi::entries(&list)
            .into_iter()
            .map(|e| Place { seen: self.seen(e.partition).is_some(), topic: e.topic, partition: e.partition })
            .collect();
        if wanted.is_empty() {
            self.assigned(&list);
            return;
        }
        self.moving = Some(Moving::Loading { list });
        self.committer.ask(Job::Load(wanted));
    }

    /// The last offset that was seen of a partition in an earlier period, unless its loss was told.
    fn seen(&self, partition: i32) -> Option<Position> {
        let main = self.role == Role::Main && !self.told.contains(&partition);
        main.then(|| self.session.resume(u32::try_from(partition).ok()).and_then(|r| r.seen)).flatten()
    }

    /// A partition that ends before what was seen of it is another, or lost its end. One gap says so.
    fn tell_loss(&mut self, entries: &[Loaded]) {
        let mut lost: Option<Gap> = None;
        for Loaded { entry, high, .. } in entries {
            let (Some(high), Some(seen)) = (*high, self.seen(entry.partition)) else { continue };
            if high > seen.major {
                continue;
            }
            self.told.insert(entry.partition);
            let partition = u32::try_from(entry.partition).ok();
            let gap = lost.get_or_insert(Gap {
                topic: self.session.subscription.topic.clone(),
                partition,
                from: Some(seen),
                to: Some(Position::offset(high)),
                count: None,
                cause: GapCause::Deleted,
            });
            if gap.partition != partition {
                // Several: the topic as a whole.
                (gap.partition, gap.from, gap.to) = (None, None, None);
            }
        }
        lost.into_iter().for_each(|gap| self.session.events.push(Event::Gap(gap)));
    }

    fn on_loaded(&mut self, result: mq_api::Result<Vec<Loaded>>) {
        let Some(Moving::Loading { list }) = self.moving.take() else { return };
        let entries = match result {
            Ok(entries) => entries,
            Err(error) => {
                // The group waits: its partitions are ours, and start when it is known where.
                self.session.trouble("offsets", Some(error.to_string()));
                self.moving = Some(Moving::Waiting { list, until: Instant::now() + AGAIN });
                return;
            }
        };
        self.session.trouble("offsets", None);
        self.tell_loss(&entries);
        let epoch = ffi::group_generation(self.consumer.client());
        let mut places = TopicPartitionList::with_capacity(entries.len().max(1));
        for Loaded { entry, removed, .. } in entries {
            let start = u64::try_from(entry.offset).unwrap_or_default();
            // Split before it is assigned: else its first messages come to the main queue.
            let Some(mut queue) = self.consumer.split_partition_queue(&entry.topic, entry.partition) else { continue };
            let driver = self.driver.clone();
            queue.set_nonempty_callback(move || driver.unpark());
            if let Err(error) = places.add_partition_offset(&entry.topic, entry.partition, Offset::Offset(entry.offset))
            {
                tracing::warn!(%error, topic = %entry.topic, "a partition that cannot be named");
                continue;
            }
            let shown = if self.role == Role::Main { u32::try_from(entry.partition).ok() } else { None };
            let lane = self.session.open_lane(shown, epoch);
            let tracked = !self.session.at_most_once();
            let watched = self.cluster.watch(&lane, &self.session.member);
            let topic = entry.topic.clone();
            let mut known = Record::decode(start, &entry.metadata).unwrap_or_default();
            if let Some(removed) = removed {
                known.take_out(&removed);
            }
            self.partitions.push(Partition::new(topic, entry.partition, watched, queue, start, known, tracked));
        }
        self.assigned(&places);
    }

    fn assigned(&mut self, list: &TopicPartitionList) {
        if let Err(error) = self.consumer.incremental_assign(list) {
            // The assignment was taken away meanwhile; a revocation follows.
            tracing::debug!(%error, topic = %self.topic, "assigning");
        }
        if !std::mem::replace(&mut self.joined, true) {
            self.news.push(News::Joined);
        }
    }

    fn revoke(&mut self, list: TopicPartitionList, lost: bool) {
        let leaving = ffi::entries(&list);
        for partition in &mut self.partitions {
            let leaves = leaving.iter().any(|e| e.partition == partition.number && e.topic == partition.topic);
            partition.draining |= leaves;
            if leaves && !lost {
                partition.lane.begin_drain();
            }
        }
        if !lost {
            let keyed = self.session.subscription.ordering == Ordering::PerKey;
            let until = Instant::now() + if keyed { KEYED_GRACE } else { GRACE };
            self.moving = Some(Moving::Draining { list, until });
            return;
        }
        // Somebody else may own them already: nothing is written any more.
        // What was on its way may have been written.
        let flying: Vec<u32> =
            self.drop_flight().map(|f| f.snapshots.iter().map(|s| s.lane).collect()).unwrap_or_default();
        self.news.push(News::Unsure(flying));
        for partition in self.partitions.extract_if(.., |p| p.draining) {
            self.session.close_lane(&partition.lane);
            let lane = partition.lane.id();
            self.news.push(if partition.unsure { News::Unsure(vec![lane]) } else { News::Lost(lane) });
        }
        self.unassign(&list);
    }

    /// Fences the leaving partitions, then commits what they came to: what was accepted before the fence is in the commit.
    fn give_up(&mut self, list: TopicPartitionList) {
        let mut snapshots = Vec::new();
        for mut partition in self.partitions.extract_if(.., |p| p.draining) {
            self.session.close_lane(&partition.lane);
            self.news.push(News::Ended(partition.lane.id()));
            let snapshot = partition.snapshot(true);
            if !partition.is_committed(&snapshot) {
                snapshots.push(snapshot);
            }
        }
        if snapshots.is_empty() {
            self.unassign(&list);
            return;
        }
        self.committer.ask(Job::Commit(snapshots.iter().map(|s| s.mark.clone()).collect()));
        self.flight = Some(Flight { snapshots, last: true });
        self.moving = Some(Moving::Committing { list, until: Instant::now() + LAST_COMMIT });
    }

    fn unassign(&mut self, list: &TopicPartitionList) {
        if let Err(error) = self.consumer.incremental_unassign(list) {
            tracing::debug!(%error, topic = %self.topic, "giving partitions back");
        }
    }

    // Commits.

    /// Whether a commit should be made now.
    pub(crate) fn wants_commit(&self) -> bool {
        self.partitions.iter().any(|p| p.wanted && !p.draining)
    }

    /// Its answer comes later, and means nothing then.
    fn drop_flight(&mut self) -> Option<Flight> {
        let flight = self.flight.take();
        self.ignored += usize::from(flight.is_some());
        flight
    }

    /// Whether everything that was settled is committed.
    fn is_clean(&self) -> bool {
        self.flight.is_none() && self.partitions.iter().all(|p| !p.dirty)
    }

    /// Whether a commit is under way.
    pub(crate) fn is_committing(&self) -> bool {
        self.flight.is_some()
    }

    /// Whether everything that was settled before the round began is committed.
    pub(crate) fn round_is_done(&self) -> bool {
        !self.owed
    }

    /// Begins a round: what was settled until now is to be committed.
    pub(crate) fn begin_round(&mut self) {
        self.owed = true;
        self.commit_round();
    }

    /// Commits everything that changed, unless a commit is under way or the last one failed just now.
    pub(crate) fn commit_round(&mut self) {
        let early = self.not_before.is_some_and(|t| Instant::now() < t);
        if !self.owed || self.flight.is_some() || early {
            return;
        }
        self.not_before = None;
        let mut snapshots = Vec::new();
        for partition in self.partitions.iter_mut().filter(|p| p.dirty) {
            let snapshot = partition.snapshot(false);
            let lane = snapshot.lane;
            match partition.is_committed(&snapshot) {
                true => {
                    for token in partition.committed(snapshot) {
                        self.session.settles.trial_recorded(lane, token);
                    }
                }
                false => snapshots.push(snapshot),
            }
        }
        if snapshots.is_empty() {
            self.owed = false;
            return;
        }
        self.committer.ask(Job::Commit(snapshots.iter().map(|s| s.mark.clone()).collect()));
        self.flight = Some(Flight { snapshots, last: false });
    }

    fn on_committed(&mut self, result: Result<(), Code>) {
        // A flight that was given up was of partitions that are gone.
        if self.ignored > 0 {
            self.ignored -= 1;
            return;
        }
        let Some(flight) = self.flight.take() else { return };
        match result {
            Ok(()) => {
                for snapshot in flight.snapshots {
                    let lane = snapshot.lane;
                    if let Some(partition) = self.partitions.iter_mut().find(|p| p.lane.id() == lane) {
                        for token in partition.committed(snapshot) {
                            self.session.settles.trial_recorded(lane, token);
                        }
                    }
                }
                self.owed &= flight.last;
                self.session.trouble("commits", None);
            }
            Err(code) => {
                let lanes = flight.snapshots.iter().map(|s| s.lane).collect();
                for snapshot in &flight.snapshots {
                    if let Some(partition) = self.by_lane(snapshot.lane) {
                        partition.not_committed(snapshot);
                        if code == Code::OffsetMetadataTooLarge {
                            partition.without_metadata();
                        }
                    }
                }
                self.not_before = Some(Instant::now() + AGAIN);
                if flight.last {
                    self.news.push(News::Unsure(lanes));
                }
                // Ownership that was lost shows itself by a revocation; everything else is tried again.
                let error = crate::fault::coded("committing", code);
                self.session.trouble("commits", Some(error.to_string()));
            }
        }
    }

    // Fetching.

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
            let topic = partition.topic.clone();
            if let Some(at) = turn.back {
                let (lane, lost_from) = (partition.lane.clone(), partition.next);
                self.session.close_lane(&lane);
                self.news.push(News::Lost(lane.id()));
                let epoch = lane.source().epoch;
                let fresh = self.session.open_lane(lane.source().partition, epoch);
                let watched = self.cluster.watch(&fresh, &self.session.member);
                self.partitions[(self.turn + i) % n].restart(watched, at);
                self.gap(number, lost_from, at, GapCause::BrokerLoss, None);
            }
            if let Some((expected, _)) = turn.gap
                && !retries
            {
                self.committer.ask(Job::Low { topic, partition: number, expected });
            }
            if let Some(error) = turn.error {
                self.on_error(error);
            }
        }
        (count, bytes)
    }

    // The end.

    /// Commits what there is and leaves the group, within `limit`; whether the commit was confirmed. `clean`: nothing was lost.
    pub(crate) fn close(mut self, clean: bool, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let left = || until.saturating_duration_since(Instant::now());
        let mut confirmed = clean;
        // Nobody would answer; the commit before this one counts.
        let away = self.ctx.down().is_some();
        if away && clean {
            confirmed = self.is_clean();
            self.partitions.clear();
        } else if clean {
            // One that is under way may be older: its answer first.
            while self.flight.is_some() {
                match self.committer.next_within(left()) {
                    Some(done) => self.on_done(done),
                    None => break,
                }
            }
            let mut partitions = std::mem::take(&mut self.partitions);
            let snapshots: Vec<Snapshot> = partitions.iter_mut().map(|p| p.snapshot(true)).collect();
            let marks: Vec<_> = snapshots.into_iter().map(|s| s.mark).collect();
            if !marks.is_empty() {
                confirmed = false;
                for _ in 0..20 {
                    self.committer.ask(Job::Commit(marks.clone()));
                    let answer = loop {
                        match self.committer.next_within(left()) {
                            Some(Done::Committed(result)) => break Some(result),
                            Some(_) => {}
                            None => break None,
                        }
                    };
                    match answer {
                        Some(Ok(())) => confirmed = true,
                        Some(Err(Code::RebalanceInProgress)) if !left().is_zero() => {
                            self.poll_main();
                            std::thread::park_timeout(Duration::from_millis(50));
                            continue;
                        }
                        _ => {}
                    }
                    break;
                }
            }
            // The queues hold on to the consumer.
            drop(partitions);
        } else {
            self.partitions.clear();
        }
        self.ctx.close();
        while let Some(change) = self.ctx.next_change() {
            let (Change::Assign(list) | Change::Revoke { list, .. }) = change;
            self.unassign(&list);
        }
        match self.moving.take() {
            Some(Moving::Draining { list, .. } | Moving::Committing { list, .. }) => self.unassign(&list),
            Some(Moving::Loading { list } | Moving::Waiting { list, .. }) => {
                drop(self.consumer.incremental_assign(&list))
            }
            None => {}
        }
        let consumer = self.consumer.clone();
        if consumer.close_queue().is_ok() {
            let closing = Instant::now() + if away { Duration::from_millis(100) } else { Duration::from_secs(3) };
            while !consumer.closed() && Instant::now() < closing {
                let _ = consumer.poll(Duration::from_millis(10));
            }
        }
        let ended = self.committer.end(if away { Duration::from_millis(50) } else { Duration::from_secs(1) });
        tracing::debug!(topic = %self.topic, confirmed, ended, "left the group");
        drop(consumer);
        confirmed
    }
}
