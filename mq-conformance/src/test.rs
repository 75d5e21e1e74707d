//! What a test holds: its world, its names, its record.

use crate::{Check, Clock, Connection, Doing, Environment, History, Ledger, Member, Pace, Sender, TestFailure};
use mq_api::{
    Admin, Backlog, BrokerExt, Capabilities, Feature, Group, Message, ProducerSpec, RetryPolicy, Subscription, Topic,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// The group that most tests use.
pub const GROUP: &str = "workers";
/// The group by which tests read dead letters.
pub const READERS: &str = "readers";

/// The handle of one running test. Cheap to clone.
#[derive(Clone)]
pub struct Test(Arc<Shared>);

pub(crate) struct Shared {
    pub(crate) environment: Arc<dyn Environment>,
    pub(crate) history: History,
    pub(crate) ledger: Ledger,
    pub(crate) clock: Clock,
    pub(crate) run: String,
    pub(crate) partitions: u32,
    pub(crate) connections: Mutex<Vec<(Connection, bool)>>,
    pub(crate) counts: Mutex<BTreeMap<String, u64>>,
    /// Whether the broker has groups: without them what tests receive by is a broadcast subscription.
    pub(crate) grouped: AtomicBool,
    pub(crate) tasks: Mutex<Vec<tokio::task::AbortHandle>>,
}

impl Test {
    pub(crate) fn new(
        environment: Arc<dyn Environment>,
        history: History,
        clock: Clock,
        run: String,
        partitions: u32,
    ) -> Self {
        Self(Arc::new(Shared {
            environment,
            history,
            ledger: Ledger::default(),
            clock,
            run,
            partitions,
            connections: Mutex::default(),
            counts: Mutex::default(),
            grouped: AtomicBool::new(true),
            tasks: Mutex::default(),
        }))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// The times of this environment.
    pub fn pace(&self) -> Pace {
        self.0.environment.pace()
    }

    /// Whether settlements are written again until the broker answers.
    pub fn settles_until_answered(&self) -> bool {
        self.0.environment.settles_until_answered()
    }

    /// Which clock the test runs on.
    pub fn clock(&self) -> Clock {
        self.0.clock
    }

    /// The environment, for its hooks.
    pub fn env(&self) -> &dyn Environment {
        &*self.0.environment
    }

    /// The record of hand-overs.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// Adds a line to the timeline.
    pub fn note(&self, text: impl std::fmt::Display) {
        self.0.history.note(text);
    }

    /// A number that this test comes to on every backend of the same capabilities; compared by `--compare-profile`.
    pub fn count(&self, name: &str, n: impl TryInto<u64>) {
        self.0.counts.lock().insert(name.to_owned(), n.try_into().unwrap_or(u64::MAX));
    }

    /// How many partitions this run of the test is to use.
    pub fn partitions(&self) -> u32 {
        self.0.partitions
    }

    /// The topic of this test.
    pub fn topic(&self) -> Topic {
        self.topic_named("t")
    }

    /// Another topic of this test.
    pub fn topic_named(&self, name: &str) -> Topic {
        Topic::new(format!("{}-{name}", self.0.run))
    }

    /// A new connection.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn connect(&self) -> Check<Connection> {
        let connection = self.0.environment.connect().await.doing("connecting")?;
        Ok(self.adopt(connection))
    }

    /// A new connection whose handle the test alone has: nobody closes it.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn connect_and_own(&self) -> Check<Connection> {
        self.0.environment.connect().await.doing("connecting")
    }

    /// Takes care of a connection that was made otherwise: it is closed at the end of the test.
    pub fn adopt(&self, connection: Connection) -> Connection {
        self.note(format_args!("{connection:?} made"));
        self.0.connections.lock().push((connection.clone(), true));
        connection
    }

    /// What the broker can do.
    ///
    /// # Errors
    /// When no connection can be made.
    pub async fn capabilities(&self) -> Check<Arc<Capabilities>> {
        let first = self.0.connections.lock().first().map(|(c, _)| c.broker.capabilities());
        match first {
            Some(found) => Ok(found),
            None => Ok(self.connect().await?.broker.capabilities()),
        }
    }

    /// Whether the broker has a feature.
    ///
    /// # Errors
    /// When no connection can be made.
    pub async fn has(&self, feature: Feature) -> Check<bool> {
        Ok(self.capabilities().await?.has(feature))
    }

    /// Whether the broker has groups.
    pub fn grouped(&self) -> bool {
        self.0.grouped.load(Ordering::Relaxed)
    }

    /// A subscription of [`GROUP`] to the test's topic, with the times of this environment. On a broker without groups, for
    /// tests that need none, a broadcast subscription with room for all they send.
    pub fn sub(&self) -> Subscription {
        match self.grouped() {
            true => self.sub_to(self.topic(), GROUP),
            false => self.paced(Subscription::broadcast(self.topic())).max_in_flight(100_000),
        }
    }

    /// A subscription with the times of this environment.
    pub fn sub_to(&self, topic: Topic, group: &str) -> Subscription {
        let sub = self.paced(Subscription::group(topic, group));
        // The partition count of dead letters is the backend's business.
        match sub.topic.dead_letters_of() {
            Some(_) => sub,
            None => sub.partitions(self.0.partitions),
        }
    }

    /// A subscription of any kind, with the times of this environment.
    pub fn paced(&self, sub: Subscription) -> Subscription {
        let pace = self.pace();
        sub.lease(pace.lease)
            .retry(RetryPolicy::attempts(3).delays([pace.retry]).jitter(0.0).transient(pace.retry, pace.retry * 4))
    }

    /// What to make a producer of the test's topic with: [`GROUP`] exists before the first send, where there are groups.
    pub fn spec(&self) -> ProducerSpec {
        match self.grouped() {
            true => self.spec_to(self.topic()).group(GROUP),
            false => self.spec_to(self.topic()),
        }
    }

    /// What to make a producer with.
    pub fn spec_to(&self, topic: Topic) -> ProducerSpec {
        let spec = ProducerSpec::new(topic);
        match spec.topic.dead_letters_of() {
            Some(_) => spec,
            None => spec.partitions(self.0.partitions),
        }
    }

    /// A producer of the test's topic.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn sender(&self, on: &Connection) -> Check<Sender> {
        self.sender_with(on, self.spec()).await
    }

    /// A producer.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn sender_with(&self, on: &Connection, spec: ProducerSpec) -> Check<Sender> {
        let topic = spec.topic.clone();
        let producer = on.broker.producer(spec).await.doing(format_args!("making a producer of {topic}"))?;
        Ok(Sender::new(producer, self.0.history.clone()))
    }

    /// A member of the test's group.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn member(&self, on: &Connection, name: &str) -> Check<Member> {
        self.member_with(on, name, self.sub()).await
    }

    /// A member of any subscription.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn member_with(&self, on: &Connection, name: &str, sub: Subscription) -> Check<Member> {
        let sub = if sub.member.is_none() && sub.group_name().is_some() { sub.member(name) } else { sub };
        let what = format!("{name} subscribes to {} on {on:?}", sub.topic);
        let group = sub.group_name().map_or(if self.grouped() { "" } else { GROUP }, Group::as_str).to_owned();
        let consumer = on.broker.subscribe(sub).await.doing(&what)?;
        self.note(what);
        Ok(Member::new(self.clone(), name, group, consumer))
    }

    /// Looking and tidying.
    pub fn admin(&self, on: &Connection) -> Arc<dyn Admin> {
        on.broker.admin()
    }

    /// Runs a task that ends with the test.
    pub fn spawn<F>(&self, task: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        let handle = tokio::spawn(task);
        self.0.tasks.lock().push(handle.abort_handle());
        handle
    }

    /// Lets time pass: only for a duration that the contract states, never to wait for something.
    pub async fn elapse(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }

    /// Waits until `probe` finds something.
    ///
    /// # Errors
    /// What was waited for, when it does not come; the probe's own failure.
    pub async fn until<T>(&self, what: &str, mut probe: impl AsyncFnMut() -> Check<Option<T>>) -> Check<T> {
        let pace = self.pace();
        let end = Instant::now() + pace.patience;
        let mut pause = pace.retry / 20;
        loop {
            if let Some(found) = probe().await? {
                return Ok(found);
            }
            if Instant::now() >= end {
                return Err(TestFailure::new(format!("waited {:?} in vain: {what}", pace.patience)));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(pace.retry / 2);
        }
    }

    /// Waits for a future, at most as long as this environment's patience.
    ///
    /// # Errors
    /// What was waited for, when it does not come.
    pub async fn within<T>(&self, what: &str, limit: Duration, work: impl Future<Output = T>) -> Check<T> {
        match tokio::time::timeout(limit, work).await {
            Ok(value) => Ok(value),
            Err(_) => Err(TestFailure::new(format!("not within {limit:?}: {what}"))),
        }
    }

    /// Waits until the backlog of a group is as wanted.
    ///
    /// # Errors
    /// The last backlog, when it stays different.
    pub async fn backlog_becomes(
        &self,
        on: &Connection,
        group: &str,
        what: &str,
        wanted: impl Fn(&Backlog) -> bool,
    ) -> Check<Backlog> {
        let admin = self.admin(on);
        let (topic, group) = (self.topic(), Group::new(group));
        let last = Mutex::new(Backlog::default());
        let found = self
            .until(what, async || {
                let now = admin.backlog(&topic, &group).await.doing("backlog")?;
                *last.lock() = now;
                Ok(wanted(&now).then_some(now))
            })
            .await;
        let last = *last.lock();
        found.map_err(|e| TestFailure::new(format!("{}; the backlog is {last:?}", e.text())))
    }

    /// Whether nothing is left of the test's topic for a group now, as far as the broker says.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn is_settled(&self, on: &Connection, group: &str) -> Check<bool> {
        if !on.broker.capabilities().has(Feature::Backlog) {
            return Ok(true);
        }
        let now = self.admin(on).backlog(&self.topic(), &Group::new(group)).await.doing("backlog")?;
        Ok(now.ready.admits(0) && now.in_flight.admits(0) && now.delayed.admits(0))
    }

    /// Waits until nothing is left of the test's topic for a group. A broker without numbers is not asked.
    ///
    /// # Errors
    /// The last backlog, when it stays different.
    pub async fn all_settled(&self, on: &Connection, group: &str) -> Check {
        if !on.broker.capabilities().has(Feature::Backlog) {
            return Ok(());
        }
        let what = format!("nothing left for {group}");
        self.backlog_becomes(on, group, &what, |b| b.ready.admits(0) && b.in_flight.admits(0) && b.delayed.admits(0))
            .await?;
        Ok(())
    }

    /// Takes all dead letters of a group of the test's topic, `wanted` of them, and fails when there are more or fewer.
    ///
    /// # Errors
    /// How many there were.
    pub async fn dead_letters(&self, on: &Connection, group: &str, wanted: usize) -> Check<Vec<Message>> {
        let topic = Topic::dead_letters(self.topic(), group);
        let mut reader = self.member_with(on, "reader", self.sub_to(topic, READERS)).await?;
        let mut letters = Vec::new();
        for _ in 0..wanted {
            let letter = reader.next().await?;
            letters.push(letter.message());
            letter.ack().await;
        }
        reader.stays_quiet().await?;
        reader.close().await;
        self.count(&format!("dead letters of {group}"), wanted);
        Ok(letters)
    }

    /// Deletes the group while it has members. A broker that keeps a group as long as it has members (Kafka) has to say so;
    /// then the environment puts them out first.
    pub(crate) async fn delete_group_in_use(&self, on: &Connection) -> Check {
        match on.broker.admin().delete_group(&self.topic(), &mq_api::Group::new(GROUP)).await {
            Ok(gone) => {
                crate::ensure!(gone, "a group with a member was not there to delete");
                Ok(())
            }
            Err(e) if e.kind() == mq_api::ErrorKind::Topology && e.to_string().contains("members") => {
                self.hook(self.env().remove_group(&self.topic(), GROUP).await)
            }
            Err(e) => Err(TestFailure::new(format!("deleting a group with members: {e}"))),
        }
    }
}
