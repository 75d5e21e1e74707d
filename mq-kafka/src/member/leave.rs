//! The end of a member: its last commit, and its leave of the group.

use super::Member;
use super::moves::Moving;
use crate::client::Change;
use crate::commit::{Done, Job};
use crate::partition::Snapshot;
use rdkafka::error::RDKafkaErrorCode as Code;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One that closes while it joins waits this long until it is a member: before that there is nothing to leave, and the group
/// would keep it for a session.
const JOINING: Duration = Duration::from_secs(1);

impl Member {
    /// Waits for the answer of the commit that is under way.
    pub(super) fn await_flight(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        while self.flight.is_some() {
            match self.committer.next_within(until.saturating_duration_since(Instant::now())) {
                Some(done) => self.on_done(done),
                None => return,
            }
        }
    }

    fn await_joined(&mut self) {
        let until = Instant::now() + JOINING;
        while !self.joined && self.moving.is_none() && Instant::now() < until {
            self.poll_main();
            match self.ctx.next_change() {
                Some(Change::Assign(list)) => {
                    self.take_on(&list);
                    self.joined = true;
                }
                Some(Change::Revoke { list, .. }) => self.unassign(&list),
                None => std::thread::park_timeout(Duration::from_millis(5)),
            }
        }
    }

    /// Commits what there is and leaves the group, within `limit`; whether the commit was confirmed. `clean`: nothing was lost.
    pub(crate) fn close(mut self, clean: bool, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let left = || until.saturating_duration_since(Instant::now());
        let mut confirmed = clean;
        self.partitions.iter().for_each(|p| self.remember(p));
        // Nobody would answer; the commit before this one counts.
        let away = self.ctx.down().is_some();
        if away && clean {
            confirmed = self.is_clean();
            self.partitions.clear();
        } else if clean {
            // One that is under way may be older: its answer first.
            self.await_flight(left());
            let mut partitions = std::mem::take(&mut self.partitions);
            let snapshots: Vec<Snapshot> = partitions.iter_mut().map(|p| p.snapshot(true)).collect();
            let marks: Vec<_> = snapshots.into_iter().map(|s| s.mark).collect();
            if !marks.is_empty() {
                confirmed = false;
                for _ in 0..20 {
                    self.committer.ask(Job::Commit(marks.clone()));
                    let answer = loop {
                        match self.committer.next_within(left()) {
                            // Of a flight that was given up.
                            Some(Done::Committed(_)) if self.ignored > 0 => self.ignored -= 1,
                            Some(Done::Committed(result)) => break Some(result),
                            Some(_) => {}
                            None => break None,
                        }
                    };
                    match answer {
                        Some(Some(Ok(()))) => confirmed = true,
                        Some(Some(Err(Code::RebalanceInProgress))) if !left().is_zero() => {
                            self.poll_main();
                            std::thread::park_timeout(Duration::from_millis(50));
                            continue;
                        }
                        _ => {}
                    }
                    break;
                }
            }
            // The queues hold on to the consumer.
            drop(partitions);
        } else {
            self.partitions.clear();
        }
        // No answer is waited for any more, and what is asked of one that left is not answered.
        self.committer.give_up();
        if !away {
            self.await_joined();
        }
        self.ctx.close();
        // A change that is not answered, each in its way, holds up the end of the consumer for good.
        match self.moving.take() {
            Some(Moving::Draining { list, .. } | Moving::Committing { list, .. }) => self.unassign(&list),
            Some(Moving::Loading { list } | Moving::Waiting { list, .. }) => self.take_on(&list),
            None => {}
        }
        while let Some(change) = self.ctx.next_change() {
            match change {
                Change::Assign(list) => self.take_on(&list),
                Change::Revoke { list, .. } => self.unassign(&list),
            }
        }
        // The last hold on it, beside the committer's: its drop waits until it is closed.
        let consumer = self.consumer;
        if consumer.close_queue().is_ok() {
            let closing = Instant::now() + if away { Duration::from_millis(100) } else { Duration::from_secs(3) };
            while !consumer.closed() && Instant::now() < closing {
                let _ = consumer.poll(Duration::from_millis(10));
            }
        }
        let late = self.committer.end(if away { Duration::from_millis(50) } else { Duration::from_secs(2) });
        let left = consumer.closed();
        tracing::debug!(topic = %self.topic, confirmed, late = late.is_some(), left, "closed");
        if !left || late.is_some() {
            // It waits for a request that is not answered, for as long as a session or a request may take. What was in hand is
            // settled or given back; nobody has to wait for the rest but the close of the connection, a while.
            let rest = move || {
                let _ = late.map(JoinHandle::join);
                drop(consumer);
            };
            if let Err(error) = self.cluster.threads.spawn("anymq-kafka-end", rest) {
                tracing::warn!(%error, "the end of a consumer is waited for");
            }
        }
        confirmed
    }
}
