//! A consumer and its deliveries, with everything they do written into the record of the test.

use crate::ledger::Seen;
use crate::{Check, Connection, Doing, Test, TestFailure};
use mq_api::{
    BoxError, CloseReport, Consumer, ConsumerControl, ConsumerExt, Delivery, Disposition, Events, Feature, HealthState,
    Reason, Settled, Settling,
};
use std::ops::Deref;
use std::time::Duration;
use tokio::time::Instant;

/// One member of a group, or one broadcast receiver.
pub struct Member {
    test: Test,
    name: String,
    group: String,
    consumer: Box<dyn Consumer>,
}

impl Member {
    pub(crate) fn new(test: Test, name: &str, group: String, consumer: Box<dyn Consumer>) -> Self {
        Self { test, name: name.to_owned(), group, consumer }
    }

    /// The test's name for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Controls it.
    pub fn control(&self) -> ConsumerControl {
        self.consumer.control()
    }

    /// Its gaps and lags.
    pub fn events(&self) -> Events {
        self.consumer.control().events()
    }

    /// The consumer itself, for what this wrapper has no name for.
    pub fn consumer(&mut self) -> &mut Box<dyn Consumer> {
        &mut self.consumer
    }

    /// Writes a delivery that came otherwise into the record.
    pub fn record(&self, delivery: Delivery) -> Got {
        let label = String::from_utf8_lossy(delivery.payload_bytes()).into_owned();
        let seen = Seen {
            label: label.clone(),
            member: self.name.clone(),
            attempt: delivery.attempt(),
            key: delivery.key.as_ref().map(|k| String::from_utf8_lossy(k).into_owned()),
            partition: delivery.partition(),
            position: delivery.position(),
        };
        self.test.note(format_args!(
            "{} gets {label:.40} attempt {} at {}/{}",
            self.name,
            seen.attempt,
            seen.partition.map_or("-".to_owned(), |p| p.to_string()),
            seen.position
        ));
        self.test.ledger().saw(&self.group, seen);
        Got { test: self.test.clone(), group: self.group.clone(), member: self.name.clone(), label, delivery }
    }

    /// The next delivery, within `limit`.
    ///
    /// # Errors
    /// That the consumer failed or ended.
    pub async fn next_within(&mut self, limit: Duration) -> Check<Option<Got>> {
        match tokio::time::timeout(limit, self.consumer.recv()).await {
            Err(_) => Ok(None),
            Ok(Ok(Some(delivery))) => Ok(Some(self.record(delivery))),
            Ok(Ok(None)) => Err(TestFailure::new(format!("{} ended, though nobody closed it", self.name))),
            Ok(Err(e)) => Err(e).doing(format_args!("{} receives", self.name)),
        }
    }

    /// The next delivery, which has to come.
    ///
    /// # Errors
    /// That nothing came.
    pub async fn next(&mut self) -> Check<Got> {
        let limit = self.test.pace().patience;
        match self.next_within(limit).await? {
            Some(got) => Ok(got),
            None => Err(TestFailure::new(format!("{} waited {limit:?} for a message and got none", self.name))),
        }
    }

    /// The next `n` deliveries, held.
    ///
    /// # Errors
    /// That fewer came.
    pub async fn take(&mut self, n: usize) -> Check<Vec<Got>> {
        let mut all = Vec::with_capacity(n);
        for _ in 0..n {
            all.push(self.next().await?);
        }
        Ok(all)
    }

    /// Takes and acknowledges the next `n`.
    ///
    /// # Errors
    /// That fewer came, or that an acknowledgement was not confirmed.
    pub async fn ack_next(&mut self, n: usize) -> Check {
        for _ in 0..n {
            let got = self.next().await?;
            got.ack_ok().await?;
        }
        Ok(())
    }

    /// Takes and acknowledges what comes until nothing comes any more; says how many.
    ///
    /// # Errors
    /// That the consumer failed.
    pub async fn ack_until_quiet(&mut self) -> Check<usize> {
        let mut n = 0;
        while let Some(got) = self.next_within(self.test.pace().quiet).await? {
            got.ack().await;
            n += 1;
        }
        Ok(n)
    }

    /// Acknowledges what comes until nothing is left for the group. After cuts, what they left unknown comes again only when the
    /// member is back, and that may take longer than silence is waited for.
    ///
    /// # Errors
    /// When receiving fails, or something stays.
    pub async fn ack_until_settled(&mut self, on: &Connection, group: &str) -> Check<usize> {
        let watch = Stopwatch::start();
        let mut n = self.ack_until_quiet().await?;
        while watch.elapsed() < self.test.pace().patience && !self.test.is_settled(on, group).await? {
            n += self.ack_until_quiet().await?;
        }
        self.test.all_settled(on, group).await?;
        Ok(n)
    }

    /// Acknowledges what a dead member had in hand, and what follows until nothing more comes; the labels, in order. The first
    /// may take as long as a takeover may.
    ///
    /// # Errors
    /// When receiving fails.
    pub async fn ack_taken_over(&mut self) -> Check<Vec<String>> {
        let pace = self.test.pace();
        let mut limit = self.test.capabilities().await?.takeover_bound(pace.lease) + pace.quiet;
        let mut labels = Vec::new();
        while let Some(got) = self.next_within(limit).await? {
            labels.push(got.label.clone());
            got.ack().await;
            limit = pace.quiet;
        }
        Ok(labels)
    }

    /// Nothing comes.
    ///
    /// # Errors
    /// What came.
    pub async fn stays_quiet(&mut self) -> Check {
        self.stays_quiet_for(self.test.pace().quiet).await
    }

    /// Nothing comes for a while.
    ///
    /// # Errors
    /// What came.
    pub async fn stays_quiet_for(&mut self, time: Duration) -> Check {
        if time.is_zero() {
            // It has passed already. A timer of no time is not there yet when it is first looked at.
            return Ok(());
        }
        let came = tokio::select! { biased;
            // First: on a busy machine this may be polled only after the time, when what came then is as it should be.
            () = tokio::time::sleep(time) => return Ok(()),
            came = self.next_within(time) => came?,
        };
        match came {
            None => Ok(()),
            Some(got) => Err(TestFailure::new(format!(
                "{} got {} (attempt {}), where nothing had to come",
                self.name,
                got.label,
                got.attempt()
            ))),
        }
    }

    /// After a close: the stream ends.
    ///
    /// # Errors
    /// What came in its place.
    pub async fn has_ended(&mut self) -> Check {
        match tokio::time::timeout(self.test.pace().patience, self.consumer.recv()).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(d))) => Err(TestFailure::new(format!("{} got {d:?} after close", self.name))),
            Ok(Err(e)) => Err(e).doing(format_args!("{} receives after close", self.name)),
            Err(_) => Err(TestFailure::new(format!("{} neither ends nor receives after close", self.name))),
        }
    }

    /// Waits until its health is in a state.
    ///
    /// # Errors
    /// The health it stays in.
    pub async fn becomes(&self, wanted: HealthState) -> Check {
        let control = self.control();
        let found =
            self.test.until("health", async || Ok((control.health().current().state == wanted).then_some(()))).await;
        found.map_err(|_| {
            TestFailure::new(format!("{}: health stays {:?}, wanted {wanted:?}", self.name, control.health().current()))
        })
    }

    /// Closes it with the deadline of this environment.
    pub async fn close(&self) -> CloseReport {
        self.close_within(self.test.pace().drain).await
    }

    /// Closes it.
    pub async fn close_within(&self, deadline: Duration) -> CloseReport {
        self.test.note(format_args!("{} closes", self.name));
        let report = self.consumer.control().close(deadline).await;
        self.test.note(format_args!("{} closed: {report:?}", self.name));
        report
    }

    /// Handles deliveries in a task until it is closed.
    pub fn work<F, Fut>(self, mut handler: F) -> Crew
    where
        F: FnMut(Got) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send,
    {
        let (name, control, test) = (self.name.clone(), self.control(), self.test.clone());
        let mut member = self;
        let task = test.spawn(async move {
            loop {
                match member.consumer.recv().await {
                    Ok(Some(delivery)) => handler(member.record(delivery)).await,
                    Ok(None) => return None,
                    Err(e) => return Some(e.to_string()),
                }
            }
        });
        Crew { test, name, control, task }
    }
}

/// A member that handles deliveries in a task of its own.
pub struct Crew {
    test: Test,
    name: String,
    control: ConsumerControl,
    task: tokio::task::JoinHandle<Option<String>>,
}

impl Crew {
    /// Controls it.
    pub fn control(&self) -> &ConsumerControl {
        &self.control
    }

    /// Ends the task where it is and drops what it has, as a program does that is killed; for use right after a crash.
    pub fn abort(self) {
        self.task.abort();
    }

    /// Closes the member and waits until its task ended.
    ///
    /// # Errors
    /// The error that ended it before.
    pub async fn stop(self) -> Check<CloseReport> {
        let report = self.control.close(self.test.pace().drain).await;
        self.test.note(format_args!("{} stopped: {report:?}", self.name));
        let limit = self.test.pace().patience;
        match self.test.within("a closed member's stream ends", limit, self.task).await? {
            Ok(None) => Ok(report),
            Ok(Some(error)) => Err(TestFailure::new(format!("{} failed: {error}", self.name))),
            Err(e) => Err(TestFailure::new(format!("the handler of {} ended badly: {e}", self.name))),
        }
    }
}

/// A delivery, known to the test by its label.
#[must_use = "dropping it is a nack"]
pub struct Got {
    test: Test,
    group: String,
    member: String,
    /// The payload as text: the test's name for the message.
    pub label: String,
    delivery: Delivery,
}

impl Got {
    /// The delivery itself.
    pub fn into_delivery(self) -> Delivery {
        self.delivery
    }

    async fn settled(self, how: &str, act: impl FnOnce(Delivery) -> Settling) -> Settled {
        let Self { test, group, member, label, delivery } = self;
        let settling = act(delivery);
        test.note(format_args!("{member} {how} {label:.40}"));
        let settled = match tokio::time::timeout(test.pace().patience, settling).await {
            Ok(settled) => settled,
            // Not a value of its own: whoever wanted a confirmation fails on it, and the record says why.
            Err(_) => {
                test.note(format_args!("{how} of {label:.40} is never answered"));
                Settled::Unknown
            }
        };
        test.note(format_args!("{how} of {label:.40}: {settled:?}"));
        if how == "acks" {
            test.ledger().settled(&group, &label, settled);
        }
        settled
    }

    /// Acknowledges and waits for the answer.
    pub async fn ack(self) -> Settled {
        self.settled("acks", Delivery::ack).await
    }

    /// Acknowledges; the answer has to be a confirmation.
    ///
    /// # Errors
    /// The other answer.
    pub async fn ack_ok(self) -> Check {
        let label = self.label.clone();
        match self.ack().await {
            s if s.is_ok() => Ok(()),
            other => Err(TestFailure::new(format!("ack of {label} gave {other:?}, wanted a confirmation"))),
        }
    }

    /// Nacks with an error.
    pub async fn nack(self, error: impl Into<BoxError>) -> Settled {
        self.settled("nacks", |d| d.nack(error)).await
    }

    /// Nacks with a delay.
    pub async fn nack_after(self, after: Duration, error: impl Into<BoxError>) -> Settled {
        self.settled("delays", |d| d.nack_after(after, error)).await
    }

    /// Dead-letters.
    pub async fn dead_letter(self, reason: impl Into<Reason>) -> Settled {
        self.settled("dead-letters", |d| d.dead_letter(reason)).await
    }

    /// Gives back, not tried.
    pub async fn release(self) -> Settled {
        self.settled("releases", Delivery::release).await
    }

    /// Settles in any way.
    pub async fn settle(self, how: Disposition) -> Settled {
        self.settled("settles", |d| d.settle(how)).await
    }

    /// Drops it unsettled.
    pub fn forget(self) {
        self.test.note(format_args!("{} drops {:.40}", self.member, self.label));
    }
}

impl Deref for Got {
    type Target = Delivery;

    fn deref(&self) -> &Delivery {
        &self.delivery
    }
}

/// Time since something, for assertions on delays.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

impl Test {
    /// Whether a settlement of this connection is answered at all: where the broker never answers, the level is `Sent`.
    ///
    /// # Errors
    /// When no connection can be made.
    pub async fn answers_settlements(&self) -> Check<bool> {
        let found = self.capabilities().await?;
        Ok(found.has(Feature::Settlement) && found.settle_level > mq_api::Durability::Sent)
    }
}
