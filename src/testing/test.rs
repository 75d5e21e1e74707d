use super::assertions::{On, not_covered};
use super::tally::Kind;
use crate::worker::{Report, Routes, Worker, WorkerHandle};
use mq_api::{Broker, BrokerExt, Group, Message, MessageId, Result, Topic};
use mq_memory::{Happened, MemoryBroker, MemoryConfig};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Longest time that a test's clock may pass in [`Test::all_done`]: a day, more than any sane back-off takes.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// Longest time that really passes: a test that does not pause the clock must not hang for a day.
const LONGEST_REAL: Duration = Duration::from_secs(30);

/// Starts a worker on an in-memory broker of its own.
///
/// # Panics
/// When the worker cannot subscribe; the text says why.
pub async fn start<S, R>(build: impl FnOnce(Arc<dyn Broker>) -> Worker<S, R>) -> Test
where
    S: Send + 'static,
    R: Routes + Send + 'static,
{
    Start::default().worker(async |broker| Ok(build(broker))).await
}

/// How to start a test that needs more than [`start`] gives.
///
/// ```
/// # async fn run() {
/// use anymq::prelude::*;
/// let test = anymq::testing::Start::default()
///     .url("memory://?profile=redis") // refuses what Redis would refuse
///     .worker(async |broker| {
///         let receipts = broker.producer("receipts").await?;
///         Ok(Worker::new(broker).state(receipts).route(Subscription::group("orders", "billing"), async || {}))
///     })
///     .await;
/// # drop(test); }
/// ```
#[derive(Debug)]
pub struct Start {
    url: String,
}

impl Default for Start {
    fn default() -> Self {
        Self { url: "memory://".to_owned() }
    }
}

impl Start {
    /// Options of the broker, as a `memory://` URL. The name in it does not matter: each test has a broker of its own.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = url.into();
        self
    }

    /// Starts the worker that `build` makes.
    ///
    /// # Panics
    /// For a URL that the in-memory broker does not understand, and when the worker cannot be built or subscribe; the text
    /// says why.
    #[allow(clippy::panic, reason = "a test fails by a panic")]
    pub async fn worker<S, R>(self, build: impl AsyncFnOnce(Arc<dyn Broker>) -> Result<Worker<S, R>>) -> Test
    where
        S: Send + 'static,
        R: Routes + Send + 'static,
    {
        let recorded = MemoryConfig::from_url(&self.url).and_then(|mut config| {
            config.record = true;
            MemoryBroker::new(config)
        });
        let memory = match recorded {
            Ok(memory) => memory,
            Err(error) => panic!("the in-memory broker does not start: {error}"),
        };
        let broker = memory.connect();
        let worker = match build(broker.clone()).await {
            Ok(worker) => worker,
            Err(error) => panic!("the worker cannot be built: {error}"),
        };
        let (handle, task) = running(worker).await;
        let running = Mutex::new(vec![Running { handle: handle.clone(), task: Some(task) }]);
        Test { memory, broker, handle, running, books: Mutex::default() }
    }
}

/// A worker that receives.
#[allow(clippy::panic, reason = "a test fails by a panic")]
async fn running<S, R>(worker: Worker<S, R>) -> (WorkerHandle, JoinHandle<Result<Report>>)
where
    S: Send + 'static,
    R: Routes + Send + 'static,
{
    let handle = worker.handle();
    let task = tokio::spawn(worker.run());
    if !handle.running().await {
        match task.await {
            Ok(Err(error)) => panic!("the worker does not start: {error}"),
            other => panic!("the worker ended before it started: {other:?}"),
        }
    }
    (handle, task)
}

struct Running {
    handle: WorkerHandle,
    /// Until it is shut down.
    task: Option<JoinHandle<Result<Report>>>,
}

#[derive(Default)]
struct Books {
    sent: HashMap<Topic, u64>,
    covered: HashSet<(Topic, Group, Kind)>,
    topics: HashSet<Topic>,
    refusals: HashSet<Topic>,
}

/// A worker under test, or several. Dropping it ends them.
pub struct Test {
    memory: MemoryBroker,
    broker: Arc<dyn Broker>,
    handle: WorkerHandle,
    running: Mutex<Vec<Running>>,
    books: Mutex<Books>,
}

impl Test {
    /// Sends a value as JSON.
    ///
    /// # Panics
    /// When it cannot be written or sent.
    #[allow(clippy::panic, reason = "a test fails by a panic")]
    pub async fn send<T: Serialize + ?Sized>(&self, topic: impl Into<Topic>, value: &T) -> MessageId {
        match Message::json(value) {
            Ok(message) => self.send_message(topic, message).await,
            Err(error) => panic!("{error}"),
        }
    }

    /// Sends a message.
    ///
    /// # Panics
    /// When it cannot be sent.
    #[allow(clippy::panic, reason = "a test fails by a panic")]
    pub async fn send_message(&self, topic: impl Into<Topic>, message: Message) -> MessageId {
        let (topic, id) = (topic.into(), message.id.clone());
        let sent = match self.broker().producer(topic.clone()).await {
            Ok(producer) => producer.send(message).await,
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            self.fail(format_args!("a message to {topic} was not sent: {error}"));
        }
        *self.books().sent.entry(topic).or_default() += 1;
        id
    }

    /// Waits until everything that was caused is done: nothing ready, in hand or delayed in any group, and no handler at work,
    /// those of broadcast and at-most-once subscriptions among them. Under paused time the delays pass at once. What another
    /// consumer of the test holds of a broadcast does not count.
    ///
    /// # Panics
    /// When it is not done after a day of the test's clock or 30 s of the real one, or when no member is left that could do it;
    /// with the timeline.
    pub async fn all_done(&self) {
        let (start, real) = (tokio::time::Instant::now(), std::time::Instant::now());
        loop {
            tokio::select! {
                biased;
                () = self.nothing_to_do() => return,
                () = tokio::time::sleep(Duration::from_secs(10)) => {}
                () = self.forsaken() => self.fail(format_args!("the worker ended before everything was done")),
            }
            if start.elapsed() > LONGEST || real.elapsed() >= LONGEST_REAL {
                self.fail(format_args!(
                    "not done after {:?} of the test's clock: is a handler waiting for something that never comes?",
                    start.elapsed()
                ));
            }
        }
    }

    async fn nothing_to_do(&self) {
        loop {
            let workers = self.workers();
            let idle: Vec<_> = workers.iter().map(WorkerHandle::idle).collect();
            // The broker of a test records, so this cannot be an error.
            let _ = self.memory.all_done().await;
            // In this order: what the broker counts as done before it is handed over is in hand by then.
            if self.memory.open_work() == 0 && workers.iter().all(|worker| worker.in_hand() == 0) {
                return;
            }
            futures_util::future::select_all(idle).await;
        }
    }

    /// Every worker has ended, and no other consumer is there that could go on.
    async fn forsaken(&self) {
        for worker in self.workers() {
            worker.ended().await;
        }
        if !self.memory.members().is_empty() {
            std::future::pending().await
        }
    }

    /// Assertions about a group.
    ///
    /// # Panics
    /// When no group of that name ever received from that topic, so that a name with a slip in it does not pass by having done
    /// nothing.
    #[must_use = "say what must have happened: `.handled(1)`"]
    #[track_caller]
    pub fn on(&self, topic: impl Into<Topic>, group: impl Into<Group>) -> On<'_> {
        let (topic, group) = (topic.into(), group.into());
        let groups = self.memory.groups(&topic);
        let of_this = |event: &Happened| event.topic == topic && event.group.as_ref() == Some(&group);
        if !groups.contains(&group) && !self.events().iter().any(of_this) {
            let names: Vec<String> = groups.iter().map(ToString::to_string).collect();
            self.fail(format_args!("{topic} has no group '{group}'; its groups are [{}]", names.join(", ")));
        }
        On::new(self, topic, group)
    }

    /// Asserts how many messages were sent to a topic, by the test and by handlers.
    ///
    /// # Panics
    /// When it is another number; with the timeline.
    #[track_caller]
    pub fn sent(&self, topic: impl Into<Topic>, n: u64) -> &Self {
        let topic = topic.into();
        let actual = super::tally::Totals::of(&self.events()).sent.get(&topic).copied().unwrap_or(0);
        self.books().topics.insert(topic.clone());
        if actual != n {
            self.fail(format_args!("{topic}: sent is {actual}, expected {n}"));
        }
        self
    }

    /// Asserts how many sends to a topic were refused: it was full, the message too large, nobody would have got it.
    ///
    /// # Panics
    /// When it is another number; with the timeline.
    #[track_caller]
    pub fn refused(&self, topic: impl Into<Topic>, n: u64) -> &Self {
        let topic = topic.into();
        let actual = super::tally::Totals::of(&self.events()).refused.get(&topic).copied().unwrap_or(0);
        self.books().refusals.insert(topic.clone());
        if actual != n {
            self.fail(format_args!("{topic}: refused is {actual}, expected {n}"));
        }
        self
    }

    /// Asserts that nothing happened beside what was asserted before, and that nothing is left to do.
    ///
    /// # Panics
    /// When something else happened; with the timeline.
    #[track_caller]
    pub fn nothing_else(&self) {
        let text = not_covered(self);
        if !text.is_empty() {
            self.fail(format_args!("this happened too:\n{}", text.trim_end()));
        }
        if self.memory.open_work() > 0 {
            self.fail(format_args!("something is left to do; call `all_done().await` before"));
        }
    }

    /// Everything that happened, in order.
    pub fn events(&self) -> Vec<Happened> {
        self.memory.trace().map(|trace| trace.events()).unwrap_or_default()
    }

    /// The broker, to send, receive or look at with.
    pub fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    /// Starts another worker on the same broker, in a connection of its own, as another process would: to take over what
    /// a dead member held, or to be one of several services. Returns its handle; [`worker`](Self::worker) stays the first one's.
    ///
    /// # Panics
    /// When it cannot subscribe; the text says why.
    pub async fn another<S, R>(&self, build: impl FnOnce(Arc<dyn Broker>) -> Worker<S, R>) -> WorkerHandle
    where
        S: Send + 'static,
        R: Routes + Send + 'static,
    {
        let (handle, task) = running(build(self.memory.connect())).await;
        self.running().push(Running { handle: handle.clone(), task: Some(task) });
        handle
    }

    /// The first worker's handle.
    pub fn worker(&self) -> &WorkerHandle {
        &self.handle
    }

    /// A member's process dies: nothing of it is settled or given back, and its leases run out. Name members by
    /// [`Subscription::member`](mq_api::Subscription::member).
    pub fn crash(&self, member: &str) -> bool {
        self.memory.crash(member)
    }

    /// Ends the worker as SIGTERM would, and says what it did; several at once, and all of them together. The broker stays, to
    /// assert on and to look at.
    ///
    /// # Errors
    /// As [`Worker::run`].
    ///
    /// # Panics
    /// When it was shut down before.
    #[allow(clippy::panic, reason = "a test fails by a panic")]
    pub async fn shut_down(&self) -> Result<Report> {
        let tasks: Vec<_> = self.running().iter_mut().filter_map(|running| running.task.take()).collect();
        if tasks.is_empty() {
            self.fail(format_args!("the worker was shut down before"));
        }
        self.workers().iter().for_each(WorkerHandle::shutdown);
        let (mut sum, mut failed) = (Report::default(), None);
        for task in tasks {
            match task.await {
                Ok(Ok(report)) => sum += report,
                Ok(Err(error)) => failed = failed.or(Some(error)),
                Err(error) => panic!("the worker's task ended: {error}"),
            }
        }
        failed.map_or(Ok(sum), Err)
    }

    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn workers(&self) -> Vec<WorkerHandle> {
        self.running().iter().map(|running| running.handle.clone()).collect()
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn cover(&self, topic: &Topic, group: &Group, kind: Kind) {
        self.books().covered.insert((topic.clone(), group.clone(), kind));
    }

    pub(super) fn covers(&self, topic: &Topic, group: &Group, kind: Kind) -> bool {
        self.books().covered.contains(&(topic.clone(), group.clone(), kind))
    }

    pub(super) fn covers_topic(&self, topic: &Topic) -> bool {
        self.books().topics.contains(topic)
    }

    pub(super) fn covers_refusals(&self, topic: &Topic) -> bool {
        self.books().refusals.contains(topic)
    }

    pub(super) fn sent_by_test(&self, topic: &Topic) -> u64 {
        self.books().sent.get(topic).copied().unwrap_or(0)
    }

    #[track_caller]
    #[allow(clippy::panic, reason = "a test fails by a panic")]
    pub(super) fn fail(&self, what: fmt::Arguments<'_>) -> ! {
        let mut timeline = String::new();
        for event in self.events() {
            timeline.push_str(&format!("{event}\n"));
        }
        if timeline.is_empty() {
            timeline.push_str("  (nothing happened)\n");
        }
        panic!("{what}\n\nwhat happened:\n{timeline}");
    }
}

impl Drop for Test {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner);
        running.iter().filter_map(|running| running.task.as_ref()).for_each(JoinHandle::abort);
    }
}

impl fmt::Debug for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Test({} events, {:?})", self.events().len(), self.handle)
    }
}
