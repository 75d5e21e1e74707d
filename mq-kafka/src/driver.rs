//! How Kafka does what the engine asks for.

use crate::client::{self, Ctx};
use crate::delay::{PARK, RetryTopics, retry_group};
use crate::group::{self, group_id};
use crate::member::{Member, Role};
use crate::thread::Driver as Thread;
use crate::threads::Threads;
use crate::topology::{Cluster, Reading, Wanted};
use crate::url::{Settings, native_options};
use crate::{broadcast, fault, send, start};
use mq_api::{Capabilities, Durability, Error, ErrorKind, Event, Gap, GapCause, Mode, Ordering, Result, Start};
use mq_core::{Driver, End, Mechanics, MoveBy, ReleaseBy, RetryBy, Run, Session, TxSession};
use parking_lot::Mutex;
use rdkafka::consumer::{BaseConsumer, Consumer};
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::oneshot;

/// A new member waits this long for its first assignment; one that others have still something in hand of comes in its own time.
const JOIN: Duration = Duration::from_secs(2);
/// Messages of consumers' topics are at most this large unless the producer says otherwise.
const MAX_MESSAGE: usize = 1_000_000;

/// See the module.
pub(crate) struct Kafka {
    pub(crate) cluster: Arc<Cluster>,
    capabilities: Mutex<Arc<Capabilities>>,
}

/// What Kafka can do, at this level.
pub(crate) fn capabilities(settings: &Settings, level: Durability) -> Capabilities {
    let mut all = Capabilities::kafka();
    (all.send_level, all.settle_level) = (level, level);
    all.takeover = Capabilities::kafka_takeover(settings.shortest_session());
    all
}

impl Kafka {
    pub(crate) fn new(cluster: Arc<Cluster>, capabilities: Capabilities) -> Self {
        Self { cluster, capabilities: Mutex::new(Arc::new(capabilities)) }
    }
}

impl Driver for Kafka {
    fn mechanics(&self) -> Mechanics {
        Mechanics {
            retry: RetryBy::ParkThenPublish { park: PARK },
            dead_letter: MoveBy::Publish,
            release: ReleaseBy::Engine,
        }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        self.capabilities.lock().clone()
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        if session.subscription.mode == Mode::Broadcast {
            return broadcast::attach(self.cluster.clone(), session).await;
        }
        let asked = session.clone();
        let (main, retries) = self.cluster.blocking(move |cluster| join(cluster, &asked)).await?;
        let (joined, has_joined) = oneshot::channel();
        let stop = session.stop.clone();
        let cluster = self.cluster.clone();
        let (closing, number) = (session.draining.clone(), session.consumer);
        let (mut ended, driver) = spawn(&self.cluster.threads, "anymq-kafka", move || {
            main.wake.set(std::thread::current()).ok();
            let topic = session.subscription.topic.shared_name();
            let mut first =
                Member::new(Role::Main, cluster.clone(), topic, main.reading, main.consumer, session.clone())?;
            first.begun = main.begun;
            let mut members = vec![first];
            if let Some(retries) = retries {
                retries.wake.set(std::thread::current()).ok();
                let topic = retries.topic.into();
                members.push(Member::new(
                    Role::Retries,
                    cluster.clone(),
                    topic,
                    retries.reading,
                    retries.consumer,
                    session.clone(),
                )?);
            }
            let end = Thread::new(session, members, joined).run();
            if closing.is_cancelled() {
                cluster.forget(number);
            }
            Ok(end)
        })?;
        tokio::select! { biased;
            end = &mut ended => return Err(ended_early(end.ok())),
            _ = has_joined => {}
            () = tokio::time::sleep(JOIN) => {}
        }
        Ok(Box::pin(async move {
            let end = tokio::select! { biased;
                end = &mut ended => Some(end),
                () = stop.cancelled() => None,
            };
            let end = match end {
                Some(end) => end,
                None => {
                    driver.unpark();
                    ended.await
                }
            };
            or_panicked("driver", end)
        }))
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        let level = self.capabilities().send_level;
        send::open(self.cluster.clone(), level, tx).await
    }
}

fn ended_early(end: Option<End>) -> Error {
    match end {
        Some(End::Lost(error) | End::Fatal(error)) => error,
        _ => Error::closed("the session"),
    }
}

/// Runs a loop on a thread of its own; its end, and the thread to wake.
pub(crate) fn spawn(
    threads: &Threads,
    name: &str,
    work: impl FnOnce() -> Result<End> + Send + 'static,
) -> Result<(oneshot::Receiver<End>, std::thread::Thread)> {
    let (tell, ended) = oneshot::channel();
    let thread = threads.spawn(name, move || {
        let end = work().unwrap_or_else(End::Lost);
        // The session was given up.
        let _ = tell.send(end);
    })?;
    Ok((ended, thread))
}

/// The end of such a loop.
pub(crate) fn or_panicked(what: &str, end: std::result::Result<End, oneshot::error::RecvError>) -> End {
    end.unwrap_or_else(|_| End::Lost(Error::new(ErrorKind::Other, format!("the {what} thread panicked"))))
}

/// A consumer that is joining its group.
struct Joining {
    topic: String,
    consumer: Arc<BaseConsumer<Ctx>>,
    reading: Reading,
    /// Partitions in which the group had begun.
    begun: BTreeSet<i32>,
    wake: Arc<OnceLock<std::thread::Thread>>,
}

/// Makes or verifies the topics, settles where the group starts, and joins. Blocks.
fn join(cluster: &Cluster, session: &Session) -> Result<(Joining, Option<Joining>)> {
    let sub = &session.subscription;
    let Some(group) = sub.group_name() else { return Err(Error::new(ErrorKind::Other, "no group")) };
    let native = native_options(&sub.native)?;
    let topic = sub.topic.as_str();
    let retries = RetryTopics::new(&sub.topic, group);
    let with_retries = !session.at_most_once();
    let mut wanted = vec![match sub.topic.dead_letters_of() {
        Some(_) => Wanted::letters(topic.to_owned()),
        None => Wanted::topic(&cluster.settings, topic, sub.partitions, sub.retention, MAX_MESSAGE)?,
    }];
    wanted.extend(sub.dead_letter_topic().map(|t| Wanted::letters(t.as_str().to_owned())));
    if with_retries {
        wanted.push(retries.wanted(Duration::ZERO));
    }
    let counts = cluster.provision(&wanted, sub.provisioning)?;
    let partitions = match counts.first() {
        Some(n) if *n > 0 => *n,
        _ => group::existing(cluster, topic)?,
    };
    let id = group_id(&sub.topic, group);
    let (reading, other) = cluster.reads(session.consumer, &id, topic)?;
    if other {
        session.events.push(Event::Gap(Gap::new(sub.topic.clone(), GapCause::Deleted)));
    }
    let main = consumer(cluster, session, &id, &native)?;
    // A member that has read of the group knows better than its subscription where it was: it was lost meanwhile.
    let known = session.again;
    let first = if known { Start::Oldest } else { sub.start };
    let left = |partition| cluster.left_at(session.consumer, &id, topic, partition);
    let begun = start::begin(&main.consumer, topic, partitions, first, sub.provisioning, left)?;
    subscribe(&main, &[topic])?;
    let main = Joining { topic: topic.to_owned(), reading, begun, ..main };
    if !with_retries {
        return Ok((main, None));
    }
    let second = consumer(cluster, session, &retry_group(&sub.topic, group), &native)?;
    let names: Vec<&str> = retries.all().iter().map(String::as_str).collect();
    subscribe(&second, &names)?;
    Ok((main, Some(Joining { topic: retries.first().to_owned(), ..second })))
}

fn consumer(cluster: &Cluster, session: &Session, group: &str, native: &[(String, String)]) -> Result<Joining> {
    let sub = &session.subscription;
    let keyed = sub.ordering == Ordering::PerKey;
    let mut config = client::consumer(&cluster.settings, group, sub.lease, keyed, native);
    // Listings of members show it.
    let of_program = config.get("client.id").unwrap_or_default().to_owned();
    config.set("client.id", format!("{of_program}-{}", session.member));
    let made = config.create_with_context(Ctx::default());
    let mut made: BaseConsumer<Ctx> = made.map_err(|e| fault::error("making the consumer", e))?;
    let wake = Arc::new(OnceLock::<std::thread::Thread>::new());
    let waker = wake.clone();
    made.set_nonempty_callback(move || {
        if let Some(thread) = waker.get() {
            thread.unpark();
        }
    });
    let (topic, reading, begun) = (String::new(), Reading::default(), BTreeSet::new());
    Ok(Joining { topic, reading, begun, consumer: Arc::new(made), wake })
}

fn subscribe(joining: &Joining, topics: &[&str]) -> Result<()> {
    joining.consumer.subscribe(topics).map_err(|e| fault::error("joining the group", e))
}

#[cfg(test)]
mod tests {
    use super::capabilities;
    use crate::url::Settings;
    use mq_api::{Durability, Feature};
    use std::fmt::Write as _;

    /// The table of the crate's documentation.
    fn table() -> String {
        let all = capabilities(&Settings::parse("kafka://h").unwrap(), Durability::Disk);
        let mut text = "| feature | Kafka |\n|---|---|\n".to_owned();
        for feature in Feature::ALL.iter().copied() {
            writeln!(text, "| {feature} | {} |", all.support(feature)).unwrap();
        }
        text
    }

    /// `WRITE=1 cargo test -p mq-kafka --lib` makes it again.
    #[test]
    fn the_documented_capabilities_are_the_stated_ones() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/capabilities.md");
        if std::env::var_os("WRITE").is_some() {
            std::fs::write(path, table()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap_or_default(), table());
    }
}
