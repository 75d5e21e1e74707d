//! Rounds of commits: what was settled until a round began is committed, again until it is, one request at a time.

use super::{AGAIN, Member, News, Role};
use crate::commit::Job;
use crate::partition::Snapshot;
use mq_api::{Error, ErrorKind};
use rdkafka::error::RDKafkaErrorCode as Code;
use std::time::{Duration, Instant};

/// A commit that is under way.
pub(super) struct Flight {
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) last: bool,
    asked: Instant,
}

impl Flight {
    /// One that is asked for now.
    pub(super) fn new(snapshots: Vec<Snapshot>, last: bool) -> Self {
        Self { snapshots, last, asked: Instant::now() }
    }

    /// Whether the coordinator says by this code that nothing was written: the member is not, or no longer, the owner.
    fn is_refused(&self, code: Code) -> bool {
        let refusal = matches!(
            code,
            Code::UnknownMemberId | Code::IllegalGeneration | Code::FencedInstanceId | Code::RebalanceInProgress
        );
        refusal && self.asked.elapsed() < ONE_REQUEST
    }
}

/// An answer that comes within this is that of the only request. librdkafka makes one again 80 ms after its connection broke, at
/// the earliest, and then a refusal says nothing of the first.
pub(super) const ONE_REQUEST: Duration = Duration::from_millis(70);

impl Member {
    /// Whether a commit should be made now.
    pub(crate) fn wants_commit(&self) -> bool {
        self.partitions.iter().any(|p| p.wanted && !p.draining)
    }

    /// Its answer comes later, and means nothing then.
    pub(super) fn drop_flight(&mut self) -> Option<Flight> {
        let flight = self.flight.take();
        if flight.is_some() {
            self.ignored += 1;
            self.committer.give_up();
        }
        flight
    }

    /// Whether everything that was settled is committed.
    pub(super) fn is_clean(&self) -> bool {
        self.flight.is_none() && self.partitions.iter().all(|p| !p.dirty)
    }

    /// Whether a commit is under way.
    pub(crate) fn is_committing(&self) -> bool {
        self.flight.is_some()
    }

    /// Whether everything that was settled before the round began is committed.
    pub(crate) fn round_is_done(&self) -> bool {
        !self.owed
    }

    /// Begins a round: what was settled until now is to be committed.
    pub(crate) fn begin_round(&mut self) {
        self.owed = true;
        self.commit_round();
    }

    /// Commits everything that changed, unless a commit is under way or the last one failed just now.
    pub(crate) fn commit_round(&mut self) {
        let early = self.not_before.is_some_and(|t| Instant::now() < t);
        if !self.owed || self.flight.is_some() || early {
            return;
        }
        self.not_before = None;
        let mut snapshots = Vec::new();
        for partition in self.partitions.iter_mut().filter(|p| p.dirty) {
            let snapshot = partition.snapshot(false);
            let lane = snapshot.lane;
            match partition.is_committed(&snapshot) {
                true => {
                    for token in partition.committed(snapshot) {
                        self.session.settles.trial_recorded(lane, token);
                    }
                }
                false => snapshots.push(snapshot),
            }
        }
        if snapshots.is_empty() {
            self.owed = false;
            return;
        }
        self.committer.ask(Job::Commit(snapshots.iter().map(|s| s.mark.clone()).collect()));
        self.flight = Some(Flight::new(snapshots, false));
    }

    pub(super) fn on_committed(&mut self, result: Option<Result<(), Code>>) {
        // A flight that was given up was of partitions that are gone.
        if self.ignored > 0 {
            self.ignored -= 1;
            return;
        }
        let Some(flight) = self.flight.take() else { return };
        let Some(result) = result else {
            // It may be written yet, but not by a member that is gone.
            self.news.push(News::Unsure(flight.snapshots.iter().map(|s| s.lane).collect()));
            let text = "a commit was not answered; the member joins its group anew";
            self.news.push(News::Gone(Error::new(ErrorKind::Timeout, text)));
            return;
        };
        match result {
            Ok(()) => {
                for snapshot in flight.snapshots {
                    let lane = snapshot.lane;
                    if let Some(partition) = self.partitions.iter_mut().find(|p| p.lane.id() == lane) {
                        for token in partition.committed(snapshot) {
                            self.session.settles.trial_recorded(lane, token);
                        }
                    }
                }
                self.owed &= flight.last;
                self.session.trouble("commits", None);
            }
            Err(code) => {
                let lanes = flight.snapshots.iter().map(|s| s.lane).collect();
                let refused = flight.is_refused(code);
                for snapshot in &flight.snapshots {
                    if let Some(partition) = self.by_lane(snapshot.lane) {
                        partition.not_committed(snapshot, !refused);
                        if code == Code::OffsetMetadataTooLarge {
                            partition.without_metadata();
                        }
                    }
                }
                self.not_before = Some(Instant::now() + AGAIN);
                self.wants_look |= self.role == Role::Main && code == Code::UnknownTopicOrPartition;
                if flight.last {
                    self.news.push(News::Unsure(lanes));
                }
                // Ownership that was lost shows itself by a revocation; everything else is tried again.
                let error = crate::fault::coded("committing", code);
                self.session.trouble("commits", Some(error.to_string()));
            }
        }
    }
}
