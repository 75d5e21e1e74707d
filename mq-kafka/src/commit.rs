//! The committer: a thread beside the driver for the calls of a consumer that block: they must never run where partitions are
//! polled, nor on a runtime.

use crate::client::Ctx;
use crate::ffi::{self, Entry, TopicId};
use crate::topology::Cluster;
use crate::{fault, letters, start};
use mq_api::{Error, ErrorKind, Result};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::{Offset, TopicPartitionList};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// A look at the cluster is answered within this, or made again: a close waits for the one under way.
const REQUEST: Duration = Duration::from_secs(2);
/// librdkafka answers a commit within this: it gives up a request after 10 s and tries it a few times. Later than that its
/// answer does not come, and it may not be asked again: the old one could be written after the new.
const COMMIT: Duration = Duration::from_secs(60);

/// What is committed of one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: u64,
    pub(crate) metadata: String,
}

/// A partition that is coming.
pub(crate) struct Place {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// Its end is looked up too: something of it was seen before.
    pub(crate) seen: bool,
    /// The lowest offset that is not known to be settled, should the group know nothing.
    pub(crate) resume: Option<u64>,
}

pub(crate) enum Job {
    /// Offsets and metadata of these partitions.
    Load(Vec<Place>),
    Commit(Vec<Mark>),
    /// Whether a topic exists, and is the one of this id.
    Look(Arc<str>, Option<TopicId>),
    /// The first offset that a partition still has: there are some missing, `(expected, found)`.
    Low {
        topic: Arc<str>,
        partition: i32,
        missing: (u64, u64),
    },
}

pub(crate) enum Done {
    Loaded(Result<Vec<Loaded>>),
    /// `None`: it is not known what became of it.
    Committed(Option<Result<(), Code>>),
    Looked(Result<bool>),
    Low {
        partition: i32,
        missing: (u64, u64),
        low: Option<u64>,
    },
}

/// Where a partition starts.
pub(crate) struct Loaded {
    pub(crate) entry: Entry,
    /// Of a dead-letter topic: stretches of letters that were redriven or discarded.
    pub(crate) removed: Option<Vec<(u64, u64)>>,
    /// The group had nothing committed of it.
    pub(crate) fresh: bool,
    /// Where it ends, if that was asked for.
    pub(crate) high: Option<u64>,
}

/// The driver's end of the committer.
pub(crate) struct Committer {
    jobs: Option<mpsc::Sender<Job>>,
    done: mpsc::Receiver<Done>,
    thread: JoinHandle<()>,
    /// Commits that were asked for.
    asked: u64,
    /// So many of them nobody waits for any more.
    given_up: Arc<AtomicU64>,
}

impl Committer {
    /// Starts one; it unparks `driver` when something is done.
    pub(crate) fn start(
        consumer: Arc<BaseConsumer<Ctx>>,
        driver: Thread,
        letters: Option<Arc<Cluster>>,
    ) -> Result<Self> {
        let (jobs, todo) = mpsc::channel();
        let (tell, done) = mpsc::channel();
        let given_up = Arc::new(AtomicU64::new(0));
        let given = given_up.clone();
        let thread = std::thread::Builder::new().name("anymq-kafka-commit".to_owned()).spawn(move || {
            let mut number = 0;
            while let Ok(job) = todo.recv() {
                number += u64::from(matches!(job, Job::Commit(_)));
                let wanted = || given.load(Ordering::Acquire) < number;
                let told = tell.send(carry_out(&consumer, letters.as_deref(), job, wanted));
                driver.unpark();
                if told.is_err() {
                    return;
                }
            }
        });
        let thread = thread.map_err(|e| Error::new(ErrorKind::Other, "no thread for the committer").with_source(e))?;
        Ok(Self { jobs: Some(jobs), done, thread, asked: 0, given_up })
    }

    pub(crate) fn ask(&mut self, job: Job) {
        self.asked += u64::from(matches!(job, Job::Commit(_)));
        if let Some(jobs) = &self.jobs {
            // It ends only when this end does.
            let _ = jobs.send(job);
        }
    }

    /// Nobody waits any more for the commits that were asked for; those that are not under way are not made. What comes after
    /// them has its turn.
    pub(crate) fn give_up(&self) {
        self.given_up.store(self.asked, Ordering::Release);
    }

    pub(crate) fn next(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }

    pub(crate) fn next_within(&self, limit: Duration) -> Option<Done> {
        self.done.recv_timeout(limit).ok()
    }

    /// Asks it to end, and waits for that at most `limit`. Its thread, if it has not ended by then: it does when its call
    /// returns.
    pub(crate) fn end(mut self, limit: Duration) -> Option<JoinHandle<()>> {
        self.jobs = None;
        self.give_up();
        let until = Instant::now() + limit;
        while !self.thread.is_finished() {
            if Instant::now() >= until {
                return Some(self.thread);
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        // A panic of it was printed.
        let _ = self.thread.join();
        None
    }
}

fn carry_out(consumer: &BaseConsumer<Ctx>, letters: Option<&Cluster>, job: Job, wanted: impl Fn() -> bool) -> Done {
    match job {
        Job::Load(partitions) => Done::Loaded(load(consumer, letters, &partitions)),
        Job::Commit(marks) => {
            let until = Instant::now() + COMMIT;
            Done::Committed(commit(consumer, &marks, || wanted() && Instant::now() < until))
        }
        Job::Look(topic, id) => Done::Looked(look(consumer, &topic, id)),
        Job::Low { topic, partition, missing } => {
            let ends = start::told_ends(consumer, &topic, partition, REQUEST);
            Done::Low { partition, missing, low: ends.ok().map(|(low, _)| low) }
        }
    }
}

fn load(consumer: &BaseConsumer<Ctx>, letters: Option<&Cluster>, places: &[Place]) -> Result<Vec<Loaded>> {
    let mut list = TopicPartitionList::with_capacity(places.len().max(1));
    for place in places {
        list.add_partition(&place.topic, place.partition);
    }
    let doing = "reading where the group is";
    let found = consumer.committed_offsets(list, REQUEST).map_err(|e| fault::error(doing, e))?;
    let mut found = ffi::entries(&found);
    let fresh: Vec<bool> = found.iter().map(|e| e.offset < 0).collect();
    let place = |e: &Entry| places.iter().find(|p| p.partition == e.partition && p.topic == e.topic);
    for entry in &mut found {
        if let Some(code) = entry.error {
            return Err(fault::coded(doing, code));
        }
        if entry.offset < 0 {
            // Added to the topic later, or the group was lost: from what is not known to be settled, else from its first
            // message on.
            let (low, high) = start::ends(consumer, &entry.topic, entry.partition, REQUEST, doing)?;
            let resume = place(entry).and_then(|p| p.resume);
            entry.offset = i64::try_from(resume.unwrap_or(low).clamp(low, high)).unwrap_or_default();
        }
    }
    let mut loaded = Vec::with_capacity(found.len());
    for (entry, fresh) in found.into_iter().zip(fresh) {
        let removed = match letters {
            Some(cluster) if entry.topic.ends_with("..dlq") => {
                Some(letters::removed(cluster, &entry.topic, entry.partition)?)
            }
            _ => None,
        };
        let high = match place(&entry).is_some_and(|p| p.seen) {
            true => match start::told_ends(consumer, &entry.topic, entry.partition, REQUEST) {
                Ok((_, high)) => Some(high),
                // It may be without one for long, which is no reason to hold up the others. Should it end before what was seen
                // of it, its offsets go back.
                Err(Code::LeaderNotAvailable) => None,
                Err(code) => return Err(fault::coded(doing, code)),
            },
            false => None,
        };
        loaded.push(Loaded { entry, removed, fresh, high });
    }
    Ok(loaded)
}

/// Commits, and waits for the answer as long as it is wanted.
pub(crate) fn commit(
    consumer: &BaseConsumer<Ctx>,
    marks: &[Mark],
    wanted: impl Fn() -> bool,
) -> Option<Result<(), Code>> {
    let mut list = TopicPartitionList::with_capacity(marks.len().max(1));
    for mark in marks {
        let mut entry = list.add_partition(&mark.topic, mark.partition);
        let offset = i64::try_from(mark.offset).unwrap_or(i64::MAX);
        if entry.set_offset(Offset::Offset(offset)).is_err() {
            return Some(Err(Code::InvalidArgument));
        }
        if !mark.metadata.is_empty() {
            entry.set_metadata(&mark.metadata);
        }
    }
    if !wanted() {
        return None;
    }
    match ffi::commit(consumer.client(), &list, wanted) {
        Some(Err(Code::NoOffset)) => Some(Ok(())),
        answer => answer,
    }
}

/// The same for one that is no member, or not yet: within `limit`, or it failed.
pub(crate) fn commit_within(consumer: &BaseConsumer<Ctx>, marks: &[Mark], limit: Duration) -> Result<(), Code> {
    let until = Instant::now() + limit;
    commit(consumer, marks, || Instant::now() < until).unwrap_or(Err(Code::OperationTimedOut))
}

fn look(consumer: &BaseConsumer<Ctx>, topic: &str, id: Option<TopicId>) -> Result<bool> {
    let limit = Duration::from_secs(2);
    let doing = || format!("looking up topic '{topic}'");
    let found = consumer.fetch_metadata(Some(topic), limit).map_err(|e| fault::error(doing(), e))?;
    let there =
        found.topics().iter().any(|t| t.name() == topic && !t.error().map(Code::from).is_some_and(fault::is_gone));
    if !there || id.is_none() {
        return Ok(there);
    }
    Ok(ffi::topic_id(consumer.client(), topic, limit).map_err(|code| fault::coded(doing(), code))? == id)
}
