//! What a commit says of a partition, and what holds once it is answered.

use super::Partition;
use crate::answers::{Ending, Perhaps, Written};
use crate::commit::Mark;
use crate::record::{Record, Tried};
use mq_core::Token;

/// A commit of a partition, and what holds once it succeeded.
pub(crate) struct Snapshot {
    pub(crate) lane: u32,
    pub(crate) mark: Mark,
    written: Written,
    horizon: u64,
    trials: Vec<Token>,
}

impl Partition {
    /// The engine is about to hand this suspect out alone for the n-th time, once that is committed.
    pub(crate) fn trial(&mut self, token: Token, n: u32) {
        let mut attempt = 1;
        self.lane.visit(|slot| {
            if slot.token == token {
                attempt = slot.attempt;
            }
        });
        self.trials.insert(token.0, (n, attempt));
        self.dirty = true;
        self.wanted = true;
    }

    /// What to commit now. `last`: this ownership ends in good order, so that it does not count as taken.
    pub(crate) fn snapshot(&mut self, last: bool) -> Snapshot {
        let mut base = None;
        let mut record = Record { keyed: self.owner.keyed, ..Record::default() };
        let mut done: Vec<(u64, u64)> = Vec::new();
        self.lane.visit(|slot| {
            let offset = slot.token.0;
            if slot.settled {
                if base.is_some() {
                    match done.last_mut() {
                        Some((_, end)) if *end == offset => *end += 1,
                        _ => done.push((offset, offset + 1)),
                    }
                }
                return;
            }
            base.get_or_insert(offset);
            let (mut attempt, mut trials) = (slot.attempt, slot.trials);
            // A death with it in hand counts as an attempt; a trial is recorded before it is handed over.
            let mut counts = slot.in_hand && !last;
            if let Some((n, _)) = self.trials.get(&offset).filter(|(_, at)| *at == attempt) {
                trials = trials.max(*n);
                counts = !last;
            }
            attempt = attempt.saturating_add(u32::from(counts));
            if attempt > 1 || trials > 0 {
                record.tried.insert(offset, Tried { attempt, trials });
            }
        });
        let base = base.unwrap_or_else(|| self.known.skip_done(self.next));
        self.trials.retain(|offset, _| *offset >= base);
        done.extend(self.known.done.iter().filter(|(_, end)| *end > base));
        done.sort_unstable();
        for (first, end) in done {
            match record.done.last_mut() {
                Some((_, last)) if *last >= first => *last = end.max(*last),
                _ => record.done.push((first, end)),
            }
        }
        let unread = self.known.tried.range(self.next..).map(|(offset, tried)| (*offset, *tried));
        record.tried.extend(unread);
        let horizon = if self.tracked { self.next.saturating_add(self.ahead()) } else { u64::MAX };
        record.takes = match last || !self.tracked {
            true => self.known.takes.clone(),
            false => self.known.takes.once_more(horizon),
        };
        let (metadata, fitted) = if self.plain { (String::new(), true) } else { record.encode(base) };
        let done = if self.plain { Vec::new() } else { record.done };
        self.crowded = !fitted;
        self.dirty = false;
        self.wanted = false;
        let trials = self.trials.keys().map(|offset| Token(*offset, 0)).collect();
        let mark = Mark { topic: self.topic.clone(), partition: self.number, offset: base, metadata };
        Snapshot { lane: self.lane.id(), mark, written: Written { base, done }, horizon, trials }
    }

    /// Everything below was settled, and confirmed.
    pub(crate) fn confirmed(&self) -> u64 {
        self.committed.as_ref().map_or(self.start, |(offset, _)| *offset)
    }

    /// Where a commit says nothing but how far all is settled: its lane, and that offset.
    pub(crate) fn unsaid(&self) -> Option<(u32, u64)> {
        self.plain.then(|| (self.lane.id(), self.confirmed()))
    }

    /// The same of the commit that is to come, once everything that goes on here has ended.
    pub(crate) fn to_be_unsaid(&self) -> Option<(u32, u64)> {
        let base = || self.lane.first_unsettled().map_or(u64::MAX, |token| token.0);
        self.plain.then(|| (self.lane.id(), base()))
    }

    /// Whether the broker has exactly this already.
    pub(crate) fn is_committed(&self, snapshot: &Snapshot) -> bool {
        self.committed
            .as_ref()
            .is_some_and(|(offset, metadata)| *offset == snapshot.mark.offset && *metadata == snapshot.mark.metadata)
    }

    /// A commit succeeded; the trials that are now recorded.
    pub(crate) fn committed(&mut self, snapshot: Snapshot) -> Vec<Token> {
        self.unsure = false;
        self.horizon = self.horizon.max(snapshot.horizon);
        self.committed = Some((snapshot.mark.offset, snapshot.mark.metadata));
        self.written = snapshot.written;
        snapshot.trials
    }

    /// A commit failed: what it was to say has still to be said. `perhaps`: it may have been written all the same.
    pub(crate) fn not_committed(&mut self, snapshot: &Snapshot, perhaps: bool) {
        self.dirty = true;
        self.unsure |= perhaps;
        self.wanted |= self.tracked && snapshot.horizon > self.horizon || !snapshot.trials.is_empty();
    }

    /// What is known of its acknowledgements when it is taken away; `flying`: its commit that was not answered.
    pub(crate) fn lost(&mut self, flying: Option<&Snapshot>) -> Ending {
        let perhaps = match flying {
            _ if self.unsure => Perhaps::Anything,
            Some(snapshot) => Perhaps::This(snapshot.written.clone()),
            None => Perhaps::Nothing,
        };
        Ending::Lost { written: std::mem::take(&mut self.written), perhaps }
    }

    /// What is known of its acknowledgements when it is given up with this commit.
    pub(crate) fn given_up(&self, snapshot: &Snapshot) -> Ending {
        match self.plain {
            true => Ending::Lost { written: snapshot.written.clone(), perhaps: Perhaps::Nothing },
            false => Ending::Good,
        }
    }
}
