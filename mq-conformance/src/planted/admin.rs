//! Looking and tidying with one mistake.

use super::{Bug, State, rewrite};
use mq_api::{
    Admin, Backlog, Broker, Count, DeadLetter, ErrorKind, Group, GroupInfo, PendingDelivery, ProducerSpec,
    RedriveOptions, RedriveReport, Result, Start, Topic, TopicInfo, TopicSpec, async_trait,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(super) struct FaultyAdmin {
    broker: Arc<dyn Broker>,
    inner: Arc<dyn Admin>,
    state: Arc<State>,
}

impl FaultyAdmin {
    pub(super) fn new(broker: Arc<dyn Broker>, state: Arc<State>) -> Self {
        Self { inner: broker.admin(), broker, state }
    }

    fn is(&self, bug: Bug) -> bool {
        self.state.bug == bug
    }

    /// What is unsupported is answered all the same.
    fn granted<T>(&self, answer: Result<T>, empty: T) -> Result<T> {
        match answer {
            Err(e) if self.is(Bug::RefusesNothing) && e.kind() == ErrorKind::Unsupported => Ok(empty),
            other => other,
        }
    }

    /// Sends every dead letter to the topic, where all groups get it.
    async fn redrive_to_all(&self, topic: &Topic, group: &Group) -> Result<RedriveReport> {
        let letters = self.inner.dead_letters(topic, group, 1_000).await?;
        let producer = self.broker.open_producer(ProducerSpec::new(topic.clone())).await?;
        let mut report = RedriveReport::default();
        for letter in letters {
            producer.send(letter.message).await?;
            report.redriven += 1;
        }
        self.inner.discard_dead_letters(topic, group, RedriveOptions::default()).await?;
        Ok(report)
    }
}

fn one_more(count: Count) -> Count {
    match count {
        Count::Exact(n) => Count::Exact(n + 1),
        Count::AtMost(n) => Count::AtMost(n.saturating_sub(1)),
        Count::AtLeast(n) => Count::AtLeast(n + 1),
        Count::Unknown => Count::Unknown,
    }
}

#[async_trait]
impl Admin for FaultyAdmin {
    async fn backlog(&self, topic: &Topic, group: &Group) -> Result<Backlog> {
        let group = rewrite::group(&self.state, group);
        let mut found = self.granted(self.inner.backlog(topic, &group).await, Backlog::default())?;
        if self.is(Bug::BacklogOff) {
            found.ready = one_more(found.ready);
        }
        Ok(found)
    }

    async fn create_topic(&self, spec: TopicSpec) -> Result<()> {
        if self.is(Bug::ProvisionsNothing) {
            return Ok(());
        }
        self.granted(self.inner.create_topic(spec).await, ())
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        self.inner.topic(topic).await
    }

    async fn delete_topic(&self, topic: &Topic) -> Result<bool> {
        self.state.forget.store(true, Ordering::Relaxed);
        if self.is(Bug::DeletesNothing) {
            return Ok(true);
        }
        self.inner.delete_topic(topic).await
    }

    async fn create_group(&self, topic: &Topic, group: &Group, start: Start) -> Result<()> {
        self.inner.create_group(topic, &rewrite::group(&self.state, group), start).await
    }

    async fn delete_group(&self, topic: &Topic, group: &Group) -> Result<bool> {
        self.state.forget.store(true, Ordering::Relaxed);
        if self.is(Bug::DeletesNothing) {
            return Ok(true);
        }
        self.inner.delete_group(topic, &rewrite::group(&self.state, group)).await
    }

    async fn reset_group(&self, topic: &Topic, group: &Group, to: Start) -> Result<()> {
        if self.is(Bug::ResetsNothing) {
            return Ok(());
        }
        self.granted(self.inner.reset_group(topic, group, to).await, ())
    }

    async fn groups(&self, topic: &Topic) -> Result<Vec<GroupInfo>> {
        let found = self.inner.groups(topic).await;
        if self.is(Bug::ListsNothing) {
            return Ok(Vec::new());
        }
        found
    }

    async fn pending(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<PendingDelivery>> {
        if self.is(Bug::ListsNothing) {
            return Ok(Vec::new());
        }
        self.granted(self.inner.pending(topic, group, limit).await, Vec::new())
    }

    async fn dead_letters(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<DeadLetter>> {
        let found = self.granted(self.inner.dead_letters(topic, group, limit).await, Vec::new())?;
        match self.state.bug {
            Bug::PeekEmpty => return Ok(Vec::new()),
            Bug::PeekTakes => {
                let taken = RedriveOptions::default().limit(limit as u64);
                self.inner.discard_dead_letters(topic, group, taken).await?;
            }
            _ => {}
        }
        Ok(found)
    }

    async fn redrive(&self, topic: &Topic, group: &Group, mut options: RedriveOptions) -> Result<RedriveReport> {
        match self.state.bug {
            Bug::DryRunActs => options.dry_run = false,
            Bug::FilterIgnored => options.filter = None,
            Bug::LoopGuardOff => options.max_redrives = u32::MAX,
            Bug::RedriveLimitIgnored => options.limit = None,
            Bug::RedriveRateIgnored => options.rate = None,
            Bug::RedriveTwice => return self.redrive_to_all(topic, group).await,
            Bug::RedriveDiscards => {
                let mut report = RedriveReport::default();
                report.redriven = self.inner.discard_dead_letters(topic, group, options).await?;
                return Ok(report);
            }
            _ => {}
        }
        let mut report = self.granted(self.inner.redrive(topic, group, options).await, RedriveReport::default())?;
        if self.is(Bug::ForeignRedriven) {
            report.redriven += std::mem::take(&mut report.foreign);
        }
        Ok(report)
    }

    async fn discard_dead_letters(&self, topic: &Topic, group: &Group, filter: RedriveOptions) -> Result<u64> {
        if self.is(Bug::DiscardKeeps) {
            return Ok(filter.limit.unwrap_or(1));
        }
        self.inner.discard_dead_letters(topic, group, filter).await
    }
}
