//! The mistakes that can be planted.

use std::fmt;

macro_rules! bugs {
    ($($name:ident $doc:literal;)*) => {
        /// A mistake that a backend might make. [`Faulty`](super::Faulty) makes it on purpose, so that the suite is seen to notice.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Bug { $(#[doc = $doc] $name,)* }

        impl Bug {
            /// All of them.
            pub const ALL: &'static [Bug] = &[$(Bug::$name),*];

            /// What it does.
            pub fn says(self) -> &'static str {
                match self { $(Bug::$name => $doc,)* }
            }
        }
    };
}
bugs! {
    AckIsCumulative "An ack also acks everything handed over before it.";
    AckLost "An ack is reported as confirmed and never sent.";
    AckTicks "An awaited ack waits for the next tick of a second.";
    AtMostOnceIgnored "At most once is handled as at least once.";
    AttemptStuck "The attempt number never rises.";
    AttemptTooHigh "The attempt number is one too high.";
    BacklogOff "The backlog counts one too many.";
    BatchAckLosesLast "Acking a batch forgets its last message.";
    BatchResultsReversed "The results of a batch come in reverse order.";
    BlocksRuntime "Receiving blocks the thread.";
    BroadcastLoses "A broadcast receiver misses every other message.";
    BytesIgnored "The bound on bytes in hand is not kept.";
    CancelLoses "A delivery that a dropped recv had taken is lost.";
    CloseForgetsSends "Closing a producer drops what it had accepted.";
    CloseHangs "Closing a consumer takes three times its deadline.";
    CloseHidesUnknown "A close reports no send of unknown fate.";
    CloseLeaks "Closing a consumer does nothing.";
    ClosedAccepts "A closed producer confirms sends.";
    ConfirmUnsent "Every third send is confirmed without being sent.";
    CrashIsNone "A dead member keeps its leases.";
    CrashTrialsIgnored "A message that kills its consumer is tried for ever.";
    DeadLetterIsAck "Dead-lettering drops the message.";
    DelayDoubled "Delays are three times as long.";
    DelayIgnored "Delays are ignored.";
    DeletesNothing "Deleting reports success and does nothing.";
    DeliverTwice "Every message is handed over twice.";
    DiscardKeeps "Discarding dead letters keeps them.";
    DroppedHandleCloses "What a connection made ends when its handle is dropped.";
    DrainHurries "A close does not wait for deliveries in hand.";
    DropIsAck "Dropping a delivery acks it.";
    DropIsRelease "Dropping a delivery gives it back uncounted and at once.";
    DoneTooEarly "Waiting until all is done ends at once.";
    DryRunActs "A dry run redrives.";
    DurabilityIgnored "A required level is not checked.";
    EmptyKeyIsNone "An empty key arrives as no key.";
    EnvelopeLacks "Dead letters lack attempts and error.";
    FilterIgnored "Redrive ignores its filter.";
    FirstMissed "The first message after subscribe is missed.";
    ForeignLost "A message that does not read as UTF-8 is dropped.";
    ForeignRedriven "Redrive counts letters of others as its own.";
    FullHidden "A send to a full topic is confirmed.";
    GapHidden "Gaps are not reported.";
    GoneForGood "After its group or topic was deleted a consumer receives nothing.";
    GroupsMixed "All groups are one.";
    GroupsNotMade "A producer does not make its groups.";
    HeaderLost "The last header is lost.";
    HeadersReversed "Headers come in reverse order.";
    HealthAlwaysRunning "Health is always running.";
    HooksSilent "Hooks do not fire.";
    IdReplaced "The broker makes an id of its own.";
    ImpatientConnect "A broker that is down at start is an error at once.";
    InFlightIgnored "The bound on deliveries in hand is not kept.";
    LagHidden "Lags are not reported.";
    LateDropCounts "A delivery dropped after close is nacked and waits out its back-off.";
    LatestIsOldest "Latest starts at the oldest message.";
    LeaseNotRenewed "A lease is not renewed.";
    LevelInflated "Receipts and settlements claim replication.";
    ListsNothing "Listings are empty.";
    LoopGuardOff "Redrive has no loop guard.";
    LoseMessage "Every third message is acked and not handed over.";
    LostSilent "Lost ownership is not told.";
    MadeNamesMeet "Made names join with one dot.";
    MaxAttemptsIgnored "A failing message is tried for ever.";
    MaxMessageIgnored "The limit on message size is not kept.";
    MaxProcessingIgnored "The limit on processing time is not kept.";
    NackIsAck "A nack is an ack.";
    NamesUnchecked "Names are not checked.";
    NamesShared "A second member of one name is let in.";
    NativeIgnored "Unknown native options are ignored.";
    NeighboursBlamed "What was in hand beside a crash is dead-lettered.";
    NoSendRetry "Unknown sends are never tried again.";
    NotSentAsUnknown "A send that was not written is called unknown.";
    OneInFlight "One delivery at a time.";
    OutcomeMissing "Errors of sends do not say what is known.";
    ParametersIgnored "Connection parameters are ignored.";
    ParkKeyIgnored "A parked key goes on.";
    ParkedBlocks "While a message is delayed nothing else is handed over.";
    PartitionsUnchecked "Another partition count is accepted.";
    PartitionsUnmade "Topics are made with one partition.";
    PatientConnect "A broker that is down at start is waited for without limit.";
    PauseIgnored "Pausing does nothing.";
    PayloadCut "Payloads are cut at 64 KiB.";
    PeekEmpty "Looking at dead letters shows none.";
    PeekTakes "Looking at dead letters takes them.";
    PerKeyIgnored "Order by key is not kept.";
    PermanentRetried "A permanent failure is tried again.";
    PolicyIgnored "Dead letters cannot be turned off.";
    PositionLost "Positions are not told.";
    ProvisioningIgnored "Verify and none make what is missing.";
    ProvisionsNothing "Making a topic reports success and does nothing.";
    RedriveDiscards "Redrive drops the dead letters.";
    RedriveLimitIgnored "Redrive ignores its limit.";
    RedriveRateIgnored "Redrive ignores its rate.";
    RedriveTwice "Redrive sends to every group.";
    RefusesNothing "What is missing is not refused.";
    ReleaseCounts "A release is counted as an attempt.";
    ReplayIgnored "Replay starts at the latest message.";
    ResetsNothing "Resetting a group reports success and does nothing.";
    ResultsById "Results of sends are matched by the message's id.";
    SameIdOnce "The second message of an id is dropped.";
    SecondIdle "The second member gets nothing.";
    SecretsShown "Errors show values.";
    SeedIgnored "A seed is not used.";
    SendBoundIgnored "A producer is not bounded.";
    SendRetryForced "Unknown sends are always tried again.";
    SendTwice "Every message is sent twice.";
    SendsReordered "Neighbouring sends change places.";
    SettlesWhenPolled "A settlement takes effect when its answer is awaited.";
    SourceLost "A delivery does not say which topic it is of.";
    StaleConfirmed "A stale settlement is reported as confirmed.";
    StartIgnored "Every group starts at the latest message.";
    StaysDown "After a cut a consumer receives nothing.";
    TaskLeaks "A task per consumer stays behind.";
    TimelineForgets "Retries are not in the record.";
    TimestampLost "Timestamps are lost.";
    TombstoneIsEmpty "A tombstone arrives as an empty payload.";
    TransientCounts "A transient failure counts and does not pause.";
    TuningIsTopology "A changed setting is refused as a changed topology.";
    UnknownAsNotSent "A send of unknown fate is called not sent.";
    UnknownConfirmed "A settlement whose answer was lost is called confirmed.";
    UnroutableHidden "A send that nobody takes is confirmed and dropped.";
    UnsettledForgotten "What a deleted group had not settled is forgotten.";
    ValuesUnchecked "Senseless values are replaced silently.";
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `AckLost` reads as `ack-lost`.
        for (i, c) in format!("{self:?}").char_indices() {
            if c.is_ascii_uppercase() && i > 0 {
                f.write_str("-")?;
            }
            write!(f, "{}", c.to_ascii_lowercase())?;
        }
        Ok(())
    }
}
