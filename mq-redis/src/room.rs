//! What a topic keeps, as its producers see to it: what is too old goes, and what is beyond the bound is refused.

use crate::answer::{as_int, as_text, failure, list};
use crate::connect::Link;
use crate::keys::meta;
use crate::scripts::{SWEEP, TRIM};
use crate::topology::Keep;
use mq_api::{Error, ErrorKind, Outcome, Result};
use std::time::Duration;
use tokio::time::Instant;

/// How often the length of the topic is asked for, with a bound far away.
const LOOK: Duration = Duration::from_secs(1);
/// How often the server's time is asked for: clocks of servers are set, too.
const CLOCK: Duration = Duration::from_secs(60);
/// Entries that one call of a sweep looks at, and calls before a send is told that the topic is full: enough for a pipeline at a
/// time, also where only one entry of forty can go.
const SWEPT: usize = 1000;
const SWEEPS: usize = 20;

/// The room in a topic, as one producer knows it.
pub(crate) struct Room {
    pub(crate) keep: Keep,
    /// The length when it was asked for, and what was written since.
    length: u64,
    asked: Instant,
    /// Where the next sweep of a full topic goes on.
    swept: String,
    /// When a sweep last found nothing.
    vain: Option<Instant>,
    /// The server's time in milliseconds, and when it was told: ids are made of it, and a program's own clock may be ahead.
    clock: Option<(u64, Instant)>,
}

impl Room {
    pub(crate) fn new(keep: Keep) -> Self {
        Self { keep, length: 0, asked: Instant::now(), swept: "-".to_owned(), vain: None, clock: None }
    }

    /// Whether a pipeline begins with a command that removes what is too old: `XADD` removes by count or by age, not by both.
    pub(crate) fn trims(&self) -> bool {
        matches!(self.keep, Keep::Log { max: Some(_), age: Some(_) })
    }

    /// The oldest time that is kept, in milliseconds, if the topic is kept by age.
    pub(crate) fn oldest(&self) -> Option<u64> {
        let Keep::Log { age: Some(age), .. } = self.keep else { return None };
        let (told, at) = self.clock?;
        let now = u128::from(told) + at.elapsed().as_millis();
        Some(now.saturating_sub(age.as_millis()).try_into().unwrap_or(0))
    }

    /// How many of `n` messages the topic `key` may still hold. The length is counted along, and asked for again each second and
    /// when the bound is near. `idle` if nothing is in flight.
    pub(crate) async fn admit(&mut self, link: &Link, key: &str, n: usize, idle: bool) -> Result<usize> {
        self.ask_time(link).await?;
        let Keep::Handled { max } = self.keep else { return Ok(n) };
        let more = n as u64;
        if self.length + more > max || self.asked.elapsed() > LOOK {
            // What is in flight would be counted or not: with pipelines in flight the count along is kept, which is upward.
            let before = self.length;
            self.ask_length(link, key).await?;
            if !idle {
                self.length = self.length.max(before);
            }
            if self.length + more > max {
                let call = TRIM.on(&[key, &meta(key)]).arg("").arg("1");
                call.run(link).await.map_err(|e| failure(e, "removing what was handled"))?;
                self.ask_length(link, key).await?;
                self.sweep(link, key, more, max).await?;
            }
        }
        let room = usize::try_from(max.saturating_sub(self.length)).unwrap_or(usize::MAX).min(n);
        self.length += room as u64;
        Ok(room)
    }

    /// Asks for the server's time, for a topic that is kept by age.
    async fn ask_time(&mut self, link: &Link) -> Result<()> {
        let recent = self.clock.is_some_and(|(_, at)| at.elapsed() < CLOCK);
        if recent || !matches!(self.keep, Keep::Log { age: Some(_), .. }) {
            return Ok(());
        }
        let asked = Instant::now();
        let told = link.query(&redis::cmd("TIME")).await.map_err(|e| failure(e, "asking for the time"))?;
        let told: Vec<u64> = list(told).iter().filter_map(as_int).filter_map(|n| n.try_into().ok()).collect();
        if let [seconds, micros] = told[..] {
            self.clock = Some((seconds * 1000 + micros / 1000, asked));
        }
        Ok(())
    }

    /// Asks for the length, for a topic that has a bound.
    pub(crate) async fn ask_length(&mut self, link: &Link, key: &str) -> Result<()> {
        if !matches!(self.keep, Keep::Handled { .. }) {
            return Ok(());
        }
        let answer = link.query(redis::cmd("XLEN").arg(key)).await.map_err(|e| failure(e, "asking for the length"))?;
        self.length = as_int(&answer).and_then(|n| n.try_into().ok()).unwrap_or(0);
        self.asked = Instant::now();
        Ok(())
    }

    /// Makes room for `n` messages behind an entry that is not handled yet.
    async fn sweep(&mut self, link: &Link, key: &str, n: u64, max: u64) -> Result<()> {
        let mut all = 0;
        let most = if self.vain.is_some_and(|at| at.elapsed() < LOOK / 10) { 1 } else { SWEEPS };
        for _ in 0..most {
            if self.length + n <= max {
                return Ok(());
            }
            let call = SWEEP.on(&[key, &meta(key)]).arg(&self.swept).arg(SWEPT.to_string());
            let answer = call.run(link).await.map_err(|e| failure(e, "removing what was handled"))?;
            let parts = list(answer);
            let removed = parts.first().and_then(as_int).and_then(|n| n.try_into().ok()).unwrap_or(0);
            self.length = self.length.saturating_sub(removed);
            all += removed;
            match parts.get(1).and_then(as_text).filter(|next| !next.is_empty()) {
                Some(next) => next.clone_into(&mut self.swept),
                None => {
                    self.swept.replace_range(.., "-");
                    break;
                }
            }
        }
        self.vain = (all == 0).then(Instant::now);
        Ok(())
    }

    /// Why a message was refused.
    pub(crate) fn full(&self, topic: &str) -> Error {
        let max = if let Keep::Handled { max } = self.keep { max } else { u64::MAX };
        let text = format!(
            "topic '{topic}' holds {} messages that not every group handled, {max} are allowed; let its groups catch up, \
             delete a group that nobody uses, or make the topic with a larger Retention::Handled",
            self.length
        );
        Error::new(ErrorKind::Full, text).with_outcome(Outcome::Rejected)
    }
}
