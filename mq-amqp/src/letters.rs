//! The dead letters of one group: looked at by taking and giving back, sent back to their group or dropped one by one. What is
//! kept is held until the end of the pass, which is bounded by what was there when it began, and then goes back in order.

use crate::admin::no_group;
use crate::connect::{ANSWER, Connections, Role, within};
use crate::decode::decode;
use crate::driver::Amqp;
use crate::send::{ConfirmChannel, Writer};
use crate::topology::{Declarer, Place, short};
use crate::wire::{Notes, Origin};
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicGetOptions};
use mq_api::{DeadLetter, Error, Group, Provisioning, RedriveOptions, RedriveReport, Result, Topic};
use mq_core::redrive::SentBack;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

/// See the module.
pub(crate) struct Letters {
    amqp: Arc<Amqp>,
    topic: Topic,
    group: Group,
    queue: String,
    back: String,
}

impl Letters {
    pub(crate) fn of(amqp: Arc<Amqp>, topic: &Topic, group: &Group) -> Result<Self> {
        topic.validate()?;
        group.validate()?;
        let place = Place::of(topic);
        let (queue, back) = (place.dead_letters(group), place.queue(group));
        Ok(Self { amqp, topic: topic.clone(), group: group.clone(), queue, back })
    }

    fn connections(&self) -> &Arc<Connections> {
        &self.amqp.connections
    }

    /// How many are looked at, at most: what is there, and what the number may have missed; 0 without a queue. Fails when there
    /// is neither such a group nor a queue of its letters.
    async fn bound(&self) -> Result<u64> {
        let mut declarer = Declarer::new(self.connections(), Role::Consume, Provisioning::None);
        let bound = match declarer.depth(&self.queue).await? {
            Some((n, _)) => n + 100,
            None if declarer.depth(&self.back).await?.is_some() => 0,
            None => return Err(no_group(&self.back)),
        };
        declarer.done().await;
        Ok(bound)
    }

    /// The next letter and its tag. A quorum queue's number of messages is a little old, and so is the end of what another
    /// channel gave back: the first is waited for a moment.
    async fn next(&self, channel: &Channel, first: bool) -> Result<Option<(u64, DeadLetter)>> {
        for _ in 0..3 {
            match self.take(channel).await? {
                None if first => tokio::time::sleep(Duration::from_millis(50)).await,
                other => return Ok(other),
            }
        }
        Ok(None)
    }

    async fn take(&self, channel: &Channel) -> Result<Option<(u64, DeadLetter)>> {
        let get = channel.basic_get(short(&self.queue)?, BasicGetOptions { no_ack: false });
        let got = within(ANSWER, "take a dead letter", get).await?;
        Ok(got.map(|got| {
            let d = got.delivery;
            let arrived = decode(d.properties, d.exchange.as_str(), d.routing_key.as_str(), d.data);
            (d.delivery_tag, DeadLetter::new(arrived.message, None))
        }))
    }

    /// Closing the channel gives back what is held.
    async fn give_back(&self, channel: &Channel) -> Result<()> {
        within(ANSWER, "give dead letters back", channel.close(200, "OK".into())).await
    }

    pub(crate) async fn peek(&self, limit: usize) -> Result<Vec<DeadLetter>> {
        let bound = self.bound().await?.min(limit as u64);
        if bound == 0 {
            return Ok(Vec::new());
        }
        let channel = self.connections().channel(Role::Consume).await?;
        let mut letters = Vec::new();
        for at in 0..bound {
            let Some((_, letter)) = self.next(&channel, at == 0).await? else { break };
            letters.push(letter);
        }
        self.give_back(&channel).await?;
        Ok(letters)
    }

    fn is_of(&self, letter: &DeadLetter) -> bool {
        letter.envelope.as_ref().is_some_and(|e| &*e.topic == self.topic.as_str() && &*e.group == self.group.as_str())
    }

    pub(crate) async fn redrive(&self, options: &RedriveOptions) -> Result<RedriveReport> {
        let (mut report, mut sent) = (RedriveReport::default(), SentBack::default());
        let bound = self.bound().await?;
        if bound == 0 {
            return Ok(report);
        }
        let pause = options.rate.filter(|r| *r > 0).map(|rate| Duration::from_secs(1) / rate);
        let channel = self.connections().channel(Role::Consume).await?;
        let confirmed = Arc::new(ConfirmChannel::open(self.connections()).await?);
        let mut writer = Writer::new(confirmed, self.connections().url().confirm_timeout);
        for at in 0..bound {
            if options.limit.is_some_and(|limit| report.redriven >= limit) {
                break;
            }
            let Some((tag, letter)) = self.next(&channel, at == 0).await? else { break };
            if sent.has(&letter) {
                continue;
            }
            if !self.is_of(&letter) {
                report.foreign += 1;
            } else if letter.envelope.as_ref().is_some_and(|e| e.redrives >= options.max_redrives) {
                report.guarded += 1;
            } else if !options.admits(&letter.message, letter.envelope.as_ref()) {
                report.filtered += 1;
            } else if options.dry_run {
                report.redriven += 1;
            } else {
                // Confirmed there before it leaves here: a stop between the two gives a duplicate, never a loss.
                self.send_back(&mut writer, &letter).await?;
                sent.add(&letter);
                self.ack(&channel, tag).await?;
                report.redriven += 1;
                if let Some(pause) = pause {
                    tokio::time::sleep(pause).await;
                }
            }
        }
        self.give_back(&channel).await?;
        Ok(report)
    }

    async fn ack(&self, channel: &Channel, tag: u64) -> Result<()> {
        within(ANSWER, "acknowledge a dead letter", channel.basic_ack(tag, BasicAckOptions { multiple: false })).await
    }

    async fn send_back(&self, writer: &mut Writer<()>, letter: &DeadLetter) -> Result<()> {
        let message = mq_core::redrive::back(letter);
        let now = tokio::time::Instant::now();
        writer.publish((), "".into(), Some(short(&self.back)?), &message, Origin::Copy(Notes::default()), now);
        let limit = self.connections().url().confirm_timeout;
        let sent = tokio::time::timeout(limit, poll_fn(|cx| writer.poll_done(cx))).await;
        sent.map_err(|_| crate::fault::no_answer("send a dead letter back", limit))?;
        match writer.done.pop() {
            Some(((), result)) => result,
            None => Err(writer.dead.take().unwrap_or_else(|| Error::closed("the channel"))),
        }
    }

    pub(crate) async fn discard(&self, options: &RedriveOptions) -> Result<u64> {
        let bound = self.bound().await?;
        let mut n = 0;
        if bound == 0 {
            return Ok(n);
        }
        let channel = self.connections().channel(Role::Consume).await?;
        for at in 0..bound {
            if options.limit.is_some_and(|limit| n >= limit) {
                break;
            }
            let Some((tag, letter)) = self.next(&channel, at == 0).await? else { break };
            if options.filter.as_ref().is_none_or(|f| f(&letter.message, letter.envelope.as_ref())) {
                n += 1;
                if !options.dry_run {
                    self.ack(&channel, tag).await?;
                }
            }
        }
        self.give_back(&channel).await?;
        Ok(n)
    }
}
