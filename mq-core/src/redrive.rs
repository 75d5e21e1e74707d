//! Dead letters back to the group they came from: counted, rate-limited, guarded against loops, losing nothing when stopped
//! midway. A backend gives the three steps; the order of them is here, once.

use mq_api::{DeadLetter, Envelope, Group, Headers, Message, Position, RedriveOptions, RedriveReport, Result, Topic};
use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

/// Header that counts redrives on the way back to the group.
pub const REDRIVES: &str = "mq-redrives";

/// How often a message was redriven before.
pub fn redrives(headers: &Headers) -> u32 {
    headers.get_str(REDRIVES).and_then(|t| t.parse().ok()).unwrap_or(0)
}

/// The message that goes back: without envelope, its redrive counted.
pub fn back(letter: &DeadLetter) -> Message {
    let mut message = letter.message.clone();
    let count = letter.envelope.as_ref().map_or(0, |e| e.redrives) + 1;
    Envelope::strip(&mut message.headers);
    message.headers.set(REDRIVES, count.to_string());
    message
}

/// What a backend does for a redrive.
pub trait DeadLetterStore: Send + Sync {
    /// Dead letters after `after` (from the first if `None`), oldest first, at most `n`, without taking them.
    fn page(&self, after: Option<Position>, n: usize) -> impl Future<Output = Result<Vec<DeadLetter>>> + Send;

    /// Sends one back to its group only; returns when the broker confirmed.
    fn give_back(&self, letter: &DeadLetter) -> impl Future<Output = Result<()>> + Send;

    /// Removes one for good; false if it was gone already.
    fn remove(&self, letter: &DeadLetter) -> impl Future<Output = Result<bool>> + Send;
}

/// Letters looked at in one step.
const PAGE: usize = 100;

fn is_of(letter: &DeadLetter, topic: &Topic, group: &Group) -> bool {
    letter.envelope.as_ref().is_some_and(|e| &*e.topic == topic.as_str() && &*e.group == group.as_str())
}

/// What one run sent back, so that it ends: a letter that was dead-lettered again meanwhile stays for the next run. Eight bytes
/// for each letter; where the numbers of two fall together, one stays for the next run.
#[derive(Debug, Default)]
pub struct SentBack(HashSet<u64>);

impl SentBack {
    /// By its id, and by how often it had been redriven so many redrives ago.
    fn mark(letter: &DeadLetter, ago: u32) -> Option<u64> {
        let redrives = letter.envelope.as_ref()?.redrives.checked_sub(ago)?;
        Some(crate::key_hash(format!("{redrives} {}", letter.message.id).as_bytes()))
    }

    /// Whether this run sent it back before.
    pub fn has(&self, letter: &DeadLetter) -> bool {
        Self::mark(letter, 1).is_some_and(|before| self.0.contains(&before))
    }

    /// It is sent back.
    pub fn add(&mut self, letter: &DeadLetter) {
        self.0.extend(Self::mark(letter, 0));
    }
}

/// Redrives. A letter that this run sent back, and that was dead-lettered again meanwhile, stays for the next, so that it ends.
///
/// # Errors
/// The first failure of the store; what was redriven until then stays redriven.
pub async fn redrive(
    store: &impl DeadLetterStore,
    topic: &Topic,
    group: &Group,
    options: &RedriveOptions,
) -> Result<RedriveReport> {
    let mut report = RedriveReport::default();
    let pause = options.rate.filter(|r| *r > 0).map(|rate| Duration::from_secs(1) / rate);
    let mut sent = SentBack::default();
    let mut after = None;
    loop {
        let page = store.page(after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(report) };
        let mut before = after;
        after = last.position;
        for letter in &page {
            let previous = std::mem::replace(&mut before, letter.position);
            if options.limit.is_some_and(|limit| report.redriven >= limit) {
                return Ok(report);
            }
            if !is_of(letter, topic, group) {
                report.foreign += 1;
                continue;
            }
            if sent.has(letter) {
                continue;
            }
            if letter.envelope.as_ref().is_some_and(|e| e.redrives >= options.max_redrives) {
                report.guarded += 1;
                continue;
            }
            if !options.admits(&letter.message, letter.envelope.as_ref()) {
                report.filtered += 1;
                continue;
            }
            // The page may be old by now: what somebody discarded meanwhile does not come back.
            if pause.is_some() && letter.position.is_some() {
                let there = store.page(previous, 1).await?;
                if there.first().is_none_or(|there| there.position != letter.position) {
                    continue;
                }
            }
            report.redriven += 1;
            if options.dry_run {
                continue;
            }
            // Confirmed there before it leaves here: a stop between the two gives a duplicate, never a loss.
            store.give_back(letter).await?;
            store.remove(letter).await?;
            sent.add(letter);
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
        }
        if after.is_none() {
            return Ok(report);
        }
    }
}

/// Discards; says how many.
///
/// # Errors
/// The first failure of the store.
pub async fn discard(store: &impl DeadLetterStore, options: &RedriveOptions) -> Result<u64> {
    let (mut n, mut after) = (0, None);
    loop {
        let page = store.page(after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(n) };
        after = last.position;
        for letter in &page {
            if options.limit.is_some_and(|limit| n >= limit) {
                return Ok(n);
            }
            let meant = options.filter.as_ref().is_none_or(|f| f(&letter.message, letter.envelope.as_ref()));
            if meant && (options.dry_run || store.remove(letter).await?) {
                n += 1;
            }
        }
        if after.is_none() {
            return Ok(n);
        }
    }
}
