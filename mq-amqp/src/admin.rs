//! Looking and tidying. What AMQP cannot say (bindings, others' unacknowledged deliveries) is refused or bounded, never guessed.

use crate::connect::{Role, answer, within};
use crate::delay::Ladder;
use crate::driver::{Amqp, Missed};
use crate::fault::fault;
use crate::letters::Letters;
use crate::options::GroupOptions;
use crate::topology::{Declarer, Found, Place, short};
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use mq_api::{
    Admin, Backlog, Count, DeadLetter, Error, ErrorKind, Feature, Group, GroupInfo, PendingDelivery, Provisioning,
    RedriveOptions, RedriveReport, Result, Start, Topic, TopicInfo, TopicSpec, async_trait,
};
use mq_core::{Driver, Env};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// Longest single look.
const LOOK: Duration = Duration::from_secs(15);

/// See [`Admin`].
pub(crate) struct AmqpAdmin {
    amqp: Arc<Amqp>,
    env: Env,
}

impl AmqpAdmin {
    pub(crate) fn new(amqp: Arc<Amqp>, env: Env) -> Self {
        Self { amqp, env }
    }

    /// Runs on the library's own thread, where connections belong.
    async fn run<T: Send + 'static>(
        &self,
        limit: Option<Duration>,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // Who does not wait any more, or no longer than the limit, stops it: what it holds goes back with its channels.
        let task = AbortOnDropHandle::new(self.env.spawn(work));
        let ended = match limit {
            Some(limit) => tokio::time::timeout(limit, task)
                .await
                .map_err(|_| Error::new(ErrorKind::Timeout, format!("the broker did not answer within {limit:?}")))?,
            None => task.await,
        };
        ended.unwrap_or_else(|_| Err(Error::closed("the connection")))
    }

    fn unsupported<T>(&self, feature: Feature) -> Result<T> {
        self.amqp.capabilities().require(feature)?;
        Err(Error::new(ErrorKind::Unsupported, format!("amqp cannot do {feature}")))
    }
}

pub(crate) fn no_group(queue: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no queue '{queue}', so no such group"))
}

/// A group to look for.
fn group_of(topic: &Topic, group: &Group) -> Result<(Place, String)> {
    topic.validate()?;
    group.validate()?;
    let place = Place::of(topic);
    let queue = place.queue(group);
    Ok((place, queue))
}

#[async_trait]
impl Admin for AmqpAdmin {
    async fn backlog(&self, topic: &Topic, group: &Group) -> Result<Backlog> {
        let (place, queue) = group_of(topic, group)?;
        let letters = place.dead_letters(group);
        let amqp = self.amqp.clone();
        self.run(Some(LOOK), async move {
            let mut declarer = Declarer::new(&amqp.connections, Role::Consume, Provisioning::None);
            let Some(held) = Held::ask(&mut declarer, &queue, &amqp.missed).await? else {
                return Err(no_group(&queue));
            };
            let dead = declarer.depth(&letters).await?;
            declarer.done().await;
            Ok(Backlog {
                ready: held.ready(),
                in_flight: Count::AtLeast(0),
                delayed: held.delayed(),
                // Whoever lists them or sends them back holds them meanwhile, and is no consumer that could be seen.
                dead: dead.map_or(Count::Exact(0), |(n, _)| Count::AtLeast(n)),
            })
        })
        .await
    }

    async fn create_topic(&self, spec: TopicSpec) -> Result<()> {
        spec.topic.validate()?;
        spec.groups.iter().try_for_each(Group::validate)?;
        if spec.partitions.is_some_and(|n| n != 1) {
            return self.unsupported(Feature::Partitions);
        }
        let options = GroupOptions::default().retain(spec.retention)?;
        let amqp = self.amqp.clone();
        self.run(Some(LOOK), async move {
            let place = Place::of(&spec.topic);
            let mut declarer = Declarer::new(&amqp.connections, Role::Consume, Provisioning::Create);
            declarer.exchange(&place).await?;
            for group in &spec.groups {
                declarer.group(&place, group, amqp.queue_type(), &options, false).await?;
                amqp.remember(&place, group);
            }
            declarer.done().await;
            Ok(())
        })
        .await
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        topic.validate()?;
        let (amqp, topic) = (self.amqp.clone(), topic.clone());
        self.run(Some(LOOK), async move {
            let place = Place::of(&topic);
            let mut declarer = Declarer::new(&amqp.connections, Role::Consume, Provisioning::Verify);
            let messages = match &place {
                Place::Queue(name) | Place::DeadLetters(name) => match declarer.depth(name).await? {
                    Some((n, _)) => Some(n),
                    None => return Ok(None),
                },
                _ => match declarer.exchange(&place).await {
                    Ok(_) => None,
                    Err(e) if e.kind() == ErrorKind::Topology => return Ok(None),
                    Err(e) => return Err(e),
                },
            };
            declarer.done().await;
            Ok(Some(TopicInfo::new(topic, 1, messages)))
        })
        .await
    }

    async fn delete_topic(&self, topic: &Topic) -> Result<bool> {
        topic.validate()?;
        let (amqp, topic) = (self.amqp.clone(), topic.clone());
        self.run(Some(LOOK), async move {
            let place = Place::of(&topic);
            let mut declarer = Declarer::new(&amqp.connections, Role::Consume, Provisioning::Verify);
            let there = match &place {
                Place::Queue(name) | Place::DeadLetters(name) => return delete_queue(&mut declarer, name).await,
                _ => match declarer.exchange(&place).await {
                    Ok(_) => true,
                    Err(e) if e.kind() == ErrorKind::Topology => false,
                    Err(e) => return Err(e),
                },
            };
            for group in amqp.forget(&place) {
                delete_group(&mut declarer, &place, &group).await?;
            }
            delete_queue(&mut declarer, &place.stream()).await?;
            if there && let Place::Topic(name) | Place::Exchange(name) = &place {
                let channel = declarer.channel().await?;
                let gone = channel.exchange_delete(short(name)?, ExchangeDeleteOptions::default());
                answer("delete", gone).await?.map_err(|e| fault(format!("delete exchange '{name}'"), e))?;
            }
            declarer.done().await;
            Ok(there)
        })
        .await
    }

    async fn create_group(&self, topic: &Topic, group: &Group, start: Start) -> Result<()> {
        let (place, _) = group_of(topic, group)?;
        if let Start::Replay(_) = start {
            return self.unsupported(Feature::Replay);
        }
        let (amqp, group) = (self.amqp.clone(), group.clone());
        self.run(Some(LOOK), async move {
            let mut declarer = Declarer::new(&amqp.connections, Role::Consume, Provisioning::Create);
            let options = GroupOptions::default();
            let _: Found = declarer.group(&place, &group, amqp.queue_type(), &options, false).await?;
            amqp.remember(&place, &group);
            declarer.done().await;
            Ok(())
        })
        .await
    }

    async fn delete_group(&self, topic: &Topic, group: &Group) -> Result<bool> {
        let (place, _) = group_of(topic, group)?;
        let (amqp, group) = (self.amqp.clone(), group.clone());
        self.run(Some(LOOK), async move {
            let mut declarer = Declarer::new(&amqp.connections, Role::Consume, Provisioning::None);
            let there = delete_group(&mut declarer, &place, &group).await?;
            declarer.done().await;
            Ok(there)
        })
        .await
    }

    async fn reset_group(&self, _: &Topic, _: &Group, _: Start) -> Result<()> {
        self.unsupported(Feature::Reset)
    }

    async fn groups(&self, _: &Topic) -> Result<Vec<GroupInfo>> {
        self.unsupported(Feature::Inspect)
    }

    async fn pending(&self, _: &Topic, _: &Group, _: usize) -> Result<Vec<PendingDelivery>> {
        self.unsupported(Feature::Inspect)
    }

    async fn dead_letters(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<DeadLetter>> {
        let letters = Letters::of(self.amqp.clone(), topic, group)?;
        self.run(Some(LOOK), async move { letters.peek(limit).await }).await
    }

    async fn redrive(&self, topic: &Topic, group: &Group, options: RedriveOptions) -> Result<RedriveReport> {
        let letters = Letters::of(self.amqp.clone(), topic, group)?;
        self.run(None, async move { letters.redrive(&options).await }).await
    }

    async fn discard_dead_letters(&self, topic: &Topic, group: &Group, filter: RedriveOptions) -> Result<u64> {
        let letters = Letters::of(self.amqp.clone(), topic, group)?;
        self.run(None, async move { letters.discard(&filter).await }).await
    }
}

/// What the queues of a group hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    waiting: u64,
    members: u64,
    /// Those whose consumer died wait in a queue of their own for their next trial.
    suspects: u64,
    /// Between two steps of a long delay.
    between: u64,
    /// In delay queues; `None` when the group has none, since nothing was ever delayed for longer than its holder waits.
    delayed: Option<u64>,
}

impl Held {
    /// Asks one queue after the other. What is between two steps goes to the group's queue or to a delay queue, so it is asked for
    /// first, and counted at most too often where all are wanted. Delay queues come last: what comes back meanwhile is in neither
    /// number, never in both. With members a delay queue that was missed lately is not asked for: what is delayed is a bound then.
    async fn ask(declarer: &mut Declarer<'_>, queue: &str, missed: &Missed) -> Result<Option<Self>> {
        let between = declarer.depth(&crate::steps::queue(queue)).await?.map_or(0, |(n, _)| n);
        let Some((waiting, members)) = declarer.depth(queue).await? else { return Ok(None) };
        let suspects = declarer.depth(&crate::alone::queue(queue)).await?.map_or(0, |(n, _)| n);
        let mut delayed = None;
        for name in Ladder::names(queue) {
            if members > 0 && missed.lately(&name) {
                continue;
            }
            match declarer.depth(&name).await? {
                Some((n, _)) => *delayed.get_or_insert(0) += n,
                None => missed.note(name),
            }
        }
        Ok(Some(Self { waiting, members, suspects, between, delayed }))
    }

    /// What members hold unacknowledged is in no number that AMQP tells, and some of it is only buffered there. What is in the
    /// group's queue is due, but for the last second of a delay, so there is at least that. Without members it is all there is,
    /// with what became due between two steps, which nobody passes on; but some of that may not be due yet.
    fn ready(&self) -> Count {
        let seen = self.waiting + self.suspects;
        match (self.members, self.delayed) {
            (0, None) if self.between == 0 => Count::Exact(seen),
            (0, _) => Count::AtMost(seen + self.between),
            _ => Count::AtLeast(seen),
        }
    }

    /// A message on its way from one queue to the next is in no queue's number, however long that takes a busy broker; nor is one
    /// that a member, or one that is leaving, holds for its last second. What is between two steps is not counted: without members
    /// it may lie there until it is due, and with members it may have gone on to a delay queue when that is asked.
    fn delayed(&self) -> Count {
        match (self.members, self.delayed) {
            (0, None) if self.between == 0 => Count::Exact(0),
            (_, n) => Count::AtLeast(n.unwrap_or(0)),
        }
    }
}

/// The queue of a group and its delay queues; the dead letters stay.
async fn delete_group(declarer: &mut Declarer<'_>, place: &Place, group: &Group) -> Result<bool> {
    let queue = place.queue(group);
    for name in Ladder::names(&queue).chain([crate::steps::queue(&queue), crate::alone::queue(&queue)]) {
        delete_queue(declarer, &name).await?;
    }
    match place {
        // Not ours.
        Place::Queue(_) | Place::DeadLetters(_) => Ok(declarer.depth(&queue).await?.is_some()),
        _ => delete_queue(declarer, &queue).await,
    }
}

async fn delete_queue(declarer: &mut Declarer<'_>, name: &str) -> Result<bool> {
    if declarer.depth(name).await?.is_none() {
        return Ok(false);
    }
    let channel = declarer.channel().await?;
    let gone = channel.queue_delete(short(name)?, QueueDeleteOptions::default());
    within(LOOK, &format!("delete queue '{name}'"), gone).await?;
    Ok(true)
}
