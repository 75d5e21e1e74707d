//! The cluster: what it is, and topics looked up, made and verified.

use crate::client::{self, Ctx};
use crate::fault;
use crate::ffi::{self, TopicId};
use crate::threads::Threads;
use crate::url::{Settings, check_partitions};
use mq_api::{Durability, Error, ErrorKind, Group, Provisioning, Result, Retention, Topic};
use mq_core::{Env, Lane};
use parking_lot::{Mutex, RwLock};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A single request to the cluster is answered within this, or it failed.
pub(crate) const REQUEST: Duration = Duration::from_secs(8);
/// Dead letters are kept this long: two weeks, a holiday.
const KEPT: &str = "1209600000";
/// Largest record batch of a topic we make: the largest message of the contract, its envelope and room. The brokers' default
/// is 1,048,588.
const MAX_BATCH: usize = 1_200_000;

/// Retries and dead letters are as large as what their topic takes, whatever that is; just below what a client takes in one
/// answer (`receive.message.max.bytes`), and a broker in one request (`socket.request.max.bytes`).
pub(crate) const LARGEST: usize = 99_000_000;

/// A topic that must exist.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    /// This count and no other.
    pub(crate) asked: Option<u32>,
    /// This many if it has to be made and none was asked for.
    pub(crate) otherwise: u32,
    pub(crate) config: Vec<(&'static str, String)>,
}

impl Wanted {
    /// A topic of the program's.
    pub(crate) fn topic(
        settings: &Settings,
        name: &str,
        asked: Option<u32>,
        retention: Option<Retention>,
        max_message: usize,
    ) -> Result<Self> {
        asked.map_or(Ok(()), check_partitions)?;
        let largest = max_message.saturating_add(client::ENVELOPE).max(MAX_BATCH);
        let mut config = vec![("max.message.bytes", largest.to_string())];
        let refuse = |what: &str, instead: &str| Err(Error::unsupported("kafka", what, instead));
        match retention {
            None => {}
            Some(Retention::Log { max: None, age: Some(age) }) => {
                config.push(("retention.ms", age.as_millis().to_string()));
            }
            Some(Retention::Log { max: None, age: None }) => config.push(("retention.ms", "-1".to_owned())),
            Some(Retention::Log { max: Some(_), .. }) => {
                return refuse(
                    "retention by number of messages",
                    "a Kafka topic keeps by age; use Retention::Log { age }",
                );
            }
            Some(_) => {
                return refuse(
                    "retention of what is unhandled only",
                    "a Kafka topic is a log; use Retention::Log { age }",
                );
            }
        }
        Ok(Self { name: name.to_owned(), asked, otherwise: settings.partitions, config })
    }

    /// Dead letters: one partition, so that they list in order.
    pub(crate) fn letters(name: String) -> Self {
        let config = vec![
            ("cleanup.policy", "delete".to_owned()),
            ("retention.ms", KEPT.to_owned()),
            // Whatever its topic took, which is its own affair.
            ("max.message.bytes", LARGEST.to_string()),
        ];
        Self { name, asked: None, otherwise: 1, config }
    }

    /// Retries: a few partitions, so that members share them. `for_good`: whatever it takes is kept.
    pub(crate) fn retries(name: String, for_good: bool) -> Self {
        let mut wanted = Self { otherwise: 4, ..Self::letters(name) };
        if for_good {
            wanted.config.retain(|(name, _)| *name != "retention.ms");
            wanted.config.push(("retention.ms", "-1".to_owned()));
        }
        wanted
    }
}

/// Who reads what: the number of a consumer (a name may be used again, for another), group and topic.
type Reader = (u64, String, String);

/// The cluster, for everything that is not fetching or sending.
pub(crate) struct Cluster {
    pub(crate) settings: Arc<Settings>,
    pub(crate) env: Env,
    pub(crate) threads: Threads,
    looker: RwLock<Option<Arc<BaseConsumer<Ctx>>>>,
    ctx: Ctx,
    watched: Mutex<Vec<Weak<Watched>>>,
    /// What each consumer read last.
    read: Mutex<HashMap<Reader, Past>>,
    /// Whether brokers tell the ids of topics, once that is known.
    tells_ids: Mutex<Option<bool>>,
}

/// The topic that a consumer reads, among those that have had its name.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reading {
    pub(crate) id: Option<TopicId>,
    /// It is not the first: positions that are remembered may be of one before.
    pub(crate) remade: bool,
}

/// What a consumer remembers of a topic, should the group be lost.
#[derive(Debug, Default)]
struct Past {
    reading: Reading,
    /// By partition: everything below was settled, and confirmed.
    left: HashMap<i32, u64>,
}

/// A lane of a member of this connection, for those who ask what is in hand.
pub(crate) struct Watched {
    pub(crate) lane: Arc<Lane>,
    pub(crate) member: Arc<str>,
}

impl Cluster {
    /// Remembers a lane as long as its partition is owned.
    pub(crate) fn watch(&self, lane: &Arc<Lane>, member: &Arc<str>) -> Arc<Watched> {
        let watched = Arc::new(Watched { lane: lane.clone(), member: member.clone() });
        let mut all = self.watched.lock();
        all.retain(|w| w.strong_count() > 0);
        all.push(Arc::downgrade(&watched));
        watched
    }

    /// The lanes of a group in this connection.
    pub(crate) fn watched(&self, topic: &Topic, group: &Group) -> Vec<Arc<Watched>> {
        let all = self.watched.lock();
        let ours = |w: &Arc<Watched>| w.lane.source().topic == *topic && w.lane.source().group.as_ref() == Some(group);
        all.iter().filter_map(Weak::upgrade).filter(ours).collect()
    }

    /// Which topic of this name is there now, and whether it is another than this consumer read before. Blocks.
    pub(crate) fn reads(&self, consumer: u64, group: &str, topic: &str) -> Result<(Reading, bool)> {
        let id = self.topic_id(topic)?;
        let mut all = self.read.lock();
        let past = all.entry((consumer, group.to_owned(), topic.to_owned())).or_default();
        let other = past.reading.id.is_some() && id.is_some() && past.reading.id != id;
        if other {
            past.left.clear();
        }
        past.reading = Reading { id: id.or(past.reading.id), remade: past.reading.remade || other };
        Ok((past.reading, other))
    }

    /// A consumer gives a partition up; everything below `offset` was settled, and confirmed.
    pub(crate) fn leave_at(&self, consumer: u64, group: &str, topic: &str, partition: i32, offset: u64) {
        let mut all = self.read.lock();
        let past = all.entry((consumer, group.to_owned(), topic.to_owned())).or_default();
        past.left.insert(partition, offset);
    }

    /// Nobody asks any more where this consumer was.
    pub(crate) fn forget(&self, consumer: u64) {
        self.read.lock().retain(|(of, ..), _| *of != consumer);
    }

    /// Where this consumer left a partition.
    pub(crate) fn left_at(&self, consumer: u64, group: &str, topic: &str, partition: i32) -> Option<u64> {
        let all = self.read.lock();
        let past = all.get(&(consumer, group.to_owned(), topic.to_owned()))?;
        past.left.get(&partition).copied()
    }

    /// The id of a topic. Brokers before 2.8 have none, and there are some (librdkafka's mock) that leave the question
    /// unanswered: they are asked once. Offsets that went back tell as much, in most cases.
    fn topic_id(&self, topic: &str) -> Result<Option<TopicId>> {
        let answers = *self.tells_ids.lock();
        let limit = match answers {
            Some(true) => REQUEST,
            Some(false) => return Ok(None),
            None => Duration::from_secs(2),
        };
        match ffi::topic_id(self.looker()?.client(), topic, limit) {
            Ok(id) => {
                *self.tells_ids.lock() = Some(true);
                Ok(id)
            }
            Err(Code::UnsupportedFeature | Code::UnsupportedVersion) => Ok(None),
            Err(Code::OperationTimedOut) if answers.is_none() => {
                // It is no outage: other questions are answered.
                self.describe(topic)?;
                *self.tells_ids.lock() = Some(false);
                Ok(None)
            }
            Err(code) => Err(fault::coded(format_args!("looking up the id of topic '{topic}'"), code)),
        }
    }

    pub(crate) fn new(settings: Arc<Settings>, env: Env) -> Result<Self> {
        let ctx = Ctx::default();
        let looker: BaseConsumer<Ctx> =
            client::base(&settings).create_with_context(ctx.clone()).map_err(|e| fault::error("kafka", e))?;
        Ok(Self {
            settings,
            env,
            threads: Threads::default(),
            looker: RwLock::new(Some(Arc::new(looker))),
            ctx,
            watched: Mutex::default(),
            read: Mutex::default(),
            tells_ids: Mutex::default(),
        })
    }

    /// Runs what blocks on a thread for it, counted as a task.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (cluster, handle) = (self.clone(), self.env.handle().clone());
        let job = self.env.spawn(async move { handle.spawn_blocking(move || job(&cluster)).await });
        match job.await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) | Err(error) => {
                Err(Error::new(ErrorKind::Other, "a request to the cluster was cut off").with_source(error))
            }
        }
    }

    /// Waits until a broker answers, or refuses, or `limit` has passed; the cluster's id. Blocks.
    pub(crate) fn wait_up(&self, limit: Duration) -> Result<Option<String>> {
        let until = Instant::now() + limit;
        loop {
            self.serve();
            if let Some(refusal) = self.ctx.refused() {
                return Err(refusal);
            }
            let step = Duration::from_millis(250).min(until.saturating_duration_since(Instant::now()));
            let looker = self.looker()?;
            let found = looker.client().fetch_metadata(Some(PROBE), step.max(Duration::from_millis(50)));
            // A broker that just started may name none at all, and then the client knows of none any more.
            let found = found.and_then(|found| match found.brokers().is_empty() {
                true => Err(KafkaError::MetadataFetch(Code::AllBrokersDown)),
                false => Ok(()),
            });
            match self.answered(&looker, found) {
                Ok(()) => {
                    return Ok(looker.client().fetch_cluster_id(Duration::from_millis(500)));
                }
                Err(error) if Instant::now() >= until => {
                    self.serve();
                    if let Some(refusal) = self.ctx.refused() {
                        return Err(refusal);
                    }
                    let why = self.ctx.away().map(|d| format!(" ({d})")).unwrap_or_default();
                    let text = format!(
                        "no broker of {} answered within {limit:?}{why}; is it running, and host and port right?",
                        self.settings.brokers
                    );
                    return Err(Error::new(ErrorKind::Unavailable, text).with_source(error));
                }
                // It fails at once while no broker is known.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Whether a broker answers now, whatever was refused before. Blocks.
    pub(crate) fn look_again(&self, limit: Duration) -> Result<()> {
        self.serve();
        self.ctx.forget_refusal();
        self.wait_up(limit).map(drop)
    }

    /// Takes what the client has to tell.
    pub(crate) fn serve(&self) {
        let Ok(looker) = self.looker() else { return };
        for _ in 0..64 {
            if looker.poll(Duration::ZERO).is_none() {
                return;
            }
        }
    }

    /// Why no broker can be reached, if so.
    pub(crate) fn down(&self) -> Option<String> {
        self.ctx.down()
    }

    /// The client that looks.
    pub(crate) fn looker(&self) -> Result<Arc<BaseConsumer<Ctx>>> {
        self.looker.read().clone().ok_or_else(|| Error::closed("the connection"))
    }

    /// Lets go of the client. Blocks.
    pub(crate) fn close(&self) -> Result<()> {
        let looker = self.looker.write().take();
        drop(looker);
        Ok(())
    }

    /// Passes an answer of the cluster on. Where none came the brokers are named to the client again, now and then: it may have
    /// forgotten all of them.
    pub(crate) fn answered<T, E>(
        &self,
        looker: &BaseConsumer<Ctx>,
        answer: std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        match &answer {
            Ok(_) => self.ctx.is_up(),
            Err(_) => self.ctx.remind(looker.client(), &self.settings.brokers),
        }
        answer
    }

    /// How many partitions a topic has; `None` if there is none. Blocks.
    pub(crate) fn partitions(&self, topic: &str) -> Result<Option<u32>> {
        Ok(self.describe(topic)?.map(|(n, _, _)| n))
    }

    /// Partitions, whether all have a leader, and the smallest number of copies. Blocks.
    fn describe(&self, topic: &str) -> Result<Option<(u32, bool, usize)>> {
        let doing = || format!("looking up topic '{topic}'");
        let looker = self.looker()?;
        let found = self.answered(&looker, looker.client().fetch_metadata(Some(topic), REQUEST));
        let found = found.map_err(|e| fault::error(doing(), e))?;
        let Some(found) = found.topics().iter().find(|t| t.name() == topic) else { return Ok(None) };
        match found.error().map(Code::from) {
            None => {}
            Some(code) if fault::is_gone(code) => return Ok(None),
            Some(Code::LeaderNotAvailable) => return Ok(Some((found.partitions().len() as u32, false, 1))),
            Some(code) => return Err(fault::coded(doing(), code)),
        }
        let led = found.partitions().iter().all(|p| p.leader() >= 0 && p.error().is_none());
        let copies = found.partitions().iter().map(|p| p.replicas().len()).min().unwrap_or(1);
        Ok(match found.partitions().len() {
            0 => None,
            n => Some((n as u32, led, copies)),
        })
    }

    /// Makes or verifies topics; their partition counts, in order (0 where nothing was looked at). Blocks.
    pub(crate) fn provision(&self, wanted: &[Wanted], how: Provisioning) -> Result<Vec<u32>> {
        if how == Provisioning::None {
            return Ok(vec![0; wanted.len()]);
        }
        let mut counts = Vec::with_capacity(wanted.len());
        let mut missing = Vec::new();
        for topic in wanted {
            match self.partitions(&topic.name)? {
                Some(n) => {
                    check_count(topic, n)?;
                    counts.push(n);
                }
                None if how == Provisioning::Verify => {
                    let text = format!("topic '{}' does not exist; create it, or use Provisioning::Create", topic.name);
                    return Err(Error::new(ErrorKind::Topology, text));
                }
                None => {
                    counts.push(topic.asked.unwrap_or(topic.otherwise));
                    missing.push(topic);
                }
            }
        }
        if !missing.is_empty() {
            patient(|| self.create(&missing))?;
            for topic in missing {
                self.await_topic(topic)?;
            }
        }
        Ok(counts)
    }

    fn create(&self, missing: &[&Wanted]) -> Result<()> {
        let replication = self.settings.replication;
        let topics: Vec<NewTopic<'_>> = missing
            .iter()
            .map(|t| {
                let count = t.asked.unwrap_or(t.otherwise) as i32;
                let new = NewTopic::new(&t.name, count, TopicReplication::Fixed(replication));
                t.config.iter().fold(new, |new, (key, value)| new.set(key, value))
            })
            .collect();
        let admin = self.admin()?;
        let made = self.env.handle().block_on(admin.create_topics(&topics, &options()));
        for (result, topic) in made.map_err(|e| fault::error("creating topics", e))?.into_iter().zip(missing) {
            match result {
                Ok(name) => {
                    tracing::warn!(topic = name, partitions = topic.asked.unwrap_or(topic.otherwise), "topic created");
                }
                Err((_, Code::TopicAlreadyExists)) => {}
                // With the cluster's own default it means that brokers are missing just now.
                Err((name, code @ Code::InvalidReplicationFactor)) if replication < 0 => {
                    let error = fault::coded(format_args!("creating topic '{name}'"), code);
                    return Err(error.of_kind(ErrorKind::Unavailable));
                }
                Err((name, code)) => return Err(fault::coded(format_args!("creating topic '{name}'"), code)),
            }
        }
        Ok(())
    }

    /// Made, but not yet known everywhere.
    fn await_topic(&self, topic: &Wanted) -> Result<()> {
        let until = Instant::now() + REQUEST;
        loop {
            match self.describe(&topic.name)? {
                Some((n, true, _)) => return check_count(topic, n),
                _ if Instant::now() >= until => {
                    let text = format!("topic '{}' was created, and has no leader after {REQUEST:?}", topic.name);
                    return Err(Error::new(ErrorKind::Unavailable, text));
                }
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// A client for administration. Blocks when it is dropped.
    pub(crate) fn admin(&self) -> Result<AdminClient<Ctx>> {
        client::base(&self.settings).create_with_context(Ctx::default()).map_err(|e| fault::error("kafka", e))
    }

    /// Runs an administrative request; blocks.
    pub(crate) fn wait<T>(&self, request: impl Future<Output = T>) -> T {
        self.env.handle().block_on(request)
    }

    /// The level of what is confirmed, as far as the cluster's defaults tell; and notes how short sessions may be. Blocks.
    pub(crate) fn level(&self) -> Durability {
        let Ok(looker) = self.looker() else { return Durability::Disk };
        let brokers = match looker.client().fetch_metadata(Some(PROBE), REQUEST) {
            Ok(found) => found.brokers().iter().map(|b| b.id()).collect::<Vec<_>>(),
            Err(_) => Vec::new(),
        };
        let Some(first) = brokers.first() else { return Durability::Disk };
        let alone = brokers.len() == 1;
        if alone && self.settings.min_session.is_some() {
            // Nothing to ask for. Written to one log, which outlives the process.
            return Durability::Disk;
        }
        let Ok(admin) = self.admin() else { return Durability::Disk };
        let asked = [ResourceSpecifier::Broker(*first)];
        let told = self.wait(admin.describe_configs(&asked, &options()));
        let number = |name: &str| -> Option<i64> {
            let config = told.as_ref().ok()?.first()?.as_ref().ok()?;
            config.get(name)?.value.as_ref()?.parse().ok()
        };
        if let Some(ms) = number("group.min.session.timeout.ms").and_then(|ms| u64::try_from(ms).ok()) {
            // Leases shorter than the brokers' default of 6 s are kept where they are allowed.
            let _ = self.settings.told_session.set(Duration::from_millis(ms));
        }
        let copies = match self.settings.replication {
            _ if alone => 1,
            -1 => number("default.replication.factor").unwrap_or(1),
            n => i64::from(n),
        };
        let in_sync = number("min.insync.replicas").unwrap_or(1);
        if copies > 1 && in_sync < 2 {
            tracing::warn!(
                "min.insync.replicas is {in_sync}: with one copy in sync, a confirmed message is on one disk only"
            );
        }
        if copies > 1 && in_sync > 1 { Durability::Replicated } else { Durability::Disk }
    }
}

/// Tries again what failed because the cluster is changing (a coordinator being elected, a leader away), at most for
/// [`REQUEST`]. Blocks.
pub(crate) fn patient<T>(mut what: impl FnMut() -> Result<T>) -> Result<T> {
    let until = Instant::now() + REQUEST;
    loop {
        match what() {
            Err(error)
                if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Disconnected)
                    && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// No topic has this name; asking for it lists the brokers and nothing else.
const PROBE: &str = "anymq..probe";

fn check_count(topic: &Wanted, n: u32) -> Result<()> {
    match topic.asked {
        Some(asked) if asked != n => Err(Error::new(
            ErrorKind::Topology,
            format!("topic '{}' has {n} partitions, and {asked} were asked for; keys would move", topic.name),
        )),
        _ => Ok(()),
    }
}

pub(crate) fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST)).operation_timeout(Some(REQUEST))
}
