//! librdkafka's error codes in the words of the library.

use mq_api::{Error, ErrorKind, Outcome};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

/// The kind of a code.
pub(crate) fn kind(code: Code) -> ErrorKind {
    use ErrorKind as K;
    match code {
        Code::Authentication
        | Code::SaslAuthenticationFailed
        | Code::UnsupportedSASLMechanism
        | Code::IllegalSASLState => K::Auth,
        Code::SSL => K::Tls,
        Code::TopicAuthorizationFailed
        | Code::GroupAuthorizationFailed
        | Code::ClusterAuthorizationFailed
        | Code::TransactionalIdAuthorizationFailed => K::Permission,
        Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition | Code::GroupIdNotFound => {
            K::NotFound
        }
        Code::MessageSizeTooLarge | Code::InvalidMessageSize | Code::MessageBatchTooLarge => K::TooLarge,
        Code::QueueFull => K::Full,
        Code::MessageTimedOut | Code::OperationTimedOut | Code::RequestTimedOut | Code::TimedOutQueue => K::Timeout,
        Code::BrokerTransportFailure | Code::NetworkException | Code::BrokerDestroy => K::Disconnected,
        Code::AllBrokersDown
        | Code::Resolve
        | Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::BrokerNotAvailable
        | Code::CoordinatorLoadInProgress
        | Code::CoordinatorNotAvailable
        | Code::WaitingForCoordinator
        | Code::NotCoordinator
        | Code::NotEnoughReplicas
        | Code::ISRInsufficient
        | Code::NotEnoughReplicasAfterAppend
        | Code::NotController
        | Code::KafkaStorageError
        | Code::RebalanceInProgress
        // Another record of its batch was refused, and this one with it.
        | Code::InvalidDifferentRecord
        // The producer that had it ended; the next one sends it.
        | Code::Fatal
        | Code::PurgeQueue
        | Code::PurgeInflight => K::Unavailable,
        Code::InvalidTopic => K::InvalidName,
        Code::InvalidConfig
        | Code::InvalidPartitions
        | Code::InvalidReplicationFactor
        | Code::InvalidReplicaAssignment
        | Code::PolicyViolation => K::Topology,
        Code::InvalidSessionTimeout | Code::InvalidGroupId | Code::InvalidArgument | Code::NotConfigured => K::Config,
        Code::UnsupportedVersion | Code::UnsupportedFeature | Code::UnsupportedCompressionType => K::Unsupported,
        Code::InvalidMessage | Code::InvalidRecord | Code::InvalidTimestamp | Code::UnsupportedForMessageFormat => {
            K::Rejected
        }
        _ => K::Other,
    }
}

/// Whether a topic, or the partition, is not there, or no more.
pub(crate) fn is_gone(code: Code) -> bool {
    matches!(code, Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition)
}

/// The likely cause and the fix, where there is one to name.
fn hint(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Auth => "; check user, password and sasl= of the URL",
        ErrorKind::Tls => "; check ca=, the host name in the broker's certificate and its dates",
        ErrorKind::Permission => "; this user needs an ACL for it",
        ErrorKind::Unavailable | ErrorKind::Disconnected => "; check that the broker runs and its advertised.listeners",
        _ => "",
    }
}

/// An error of librdkafka while `doing` something.
pub(crate) fn error(doing: impl std::fmt::Display, source: KafkaError) -> Error {
    let source = match source {
        // It repeats the value, which may be a secret: of a name that is misspelt, or not in this build.
        KafkaError::ClientConfig(found, text, name, _) => {
            KafkaError::ClientConfig(found, text, name, "(its value is not shown)".to_owned())
        }
        other => other,
    };
    let kind = match source.rdkafka_error_code() {
        Some(code) => kind(code),
        None => match &source {
            KafkaError::ClientConfig(..) | KafkaError::ClientCreation(_) => ErrorKind::Config,
            KafkaError::AdminOp(code) => self::kind(*code),
            // A name or value that holds a zero byte.
            KafkaError::Nul(_) => ErrorKind::Config,
            _ => ErrorKind::Other,
        },
    };
    Error::new(kind, format!("{doing}: {source}{}", hint(kind))).with_source(source)
}

/// A code that came without more.
pub(crate) fn coded(doing: impl std::fmt::Display, code: Code) -> Error {
    error(doing, KafkaError::Global(code))
}

/// The error of a failed send.
pub(crate) fn send_error(topic: &str, code: Code, outcome: Outcome) -> Error {
    let mut error = coded(format_args!("sending to '{topic}'"), code);
    if outcome == Outcome::Rejected && matches!(error.kind(), ErrorKind::Other | ErrorKind::Timeout) {
        error = error.of_kind(ErrorKind::Rejected);
    }
    error.with_outcome(outcome)
}

/// What a failed report says of the message.
pub(crate) fn outcome(code: Code, persisted: crate::ffi::Persisted) -> Outcome {
    use crate::ffi::Persisted;
    match (code, persisted) {
        (_, Persisted::Yes | Persisted::Perhaps) => Outcome::Unknown,
        // Written, and appended by the leader, though not by enough others.
        (Code::NotEnoughReplicasAfterAppend, _) => Outcome::Unknown,
        (
            Code::MessageTimedOut
            | Code::TimedOutQueue
            | Code::BrokerTransportFailure
            | Code::PurgeQueue
            | Code::QueueFull
            | Code::AllBrokersDown
            | Code::Fatal,
            Persisted::No,
        ) => Outcome::NotSent,
        (code, Persisted::No) if (code as i32) < 0 => Outcome::NotSent,
        (_, Persisted::No) => Outcome::Rejected,
    }
}

#[cfg(test)]
mod tests {
    use super::{Code, outcome, send_error};
    use crate::ffi::Persisted;
    use mq_api::{ErrorKind, Outcome};

    #[test]
    fn what_is_wrong_with_a_property_does_not_show_its_value() {
        let mut config = rdkafka::ClientConfig::new();
        config.set("ssl.key.pasword", "swordfish");
        let made: Result<rdkafka::consumer::BaseConsumer, _> = config.create();
        let error = super::error("making the consumer", made.err().expect("no such property"));
        let shown = format!("{error} {error:?} {:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert!(error.kind() == ErrorKind::Config && shown.contains("ssl.key.pasword"), "{shown}");
        assert!(!shown.contains("swordfish"), "{shown}");
    }

    #[test]
    fn outcomes_follow_what_is_known() {
        assert_eq!(outcome(Code::MessageTimedOut, Persisted::Perhaps), Outcome::Unknown);
        assert_eq!(outcome(Code::MessageTimedOut, Persisted::No), Outcome::NotSent);
        assert_eq!(outcome(Code::TopicAuthorizationFailed, Persisted::No), Outcome::Rejected);
        assert_eq!(outcome(Code::NotEnoughReplicasAfterAppend, Persisted::No), Outcome::Unknown);
        for ended in [Code::Fatal, Code::PurgeQueue] {
            let error = send_error("t", ended, outcome(ended, Persisted::No));
            assert_eq!((error.kind(), error.outcome()), (ErrorKind::Unavailable, Some(Outcome::NotSent)));
        }
        let error = send_error("t", Code::TopicAuthorizationFailed, Outcome::Rejected);
        assert_eq!((error.kind(), error.outcome()), (ErrorKind::Permission, Some(Outcome::Rejected)));
        assert_eq!(send_error("t", Code::InvalidRecord, Outcome::Rejected).kind(), ErrorKind::Rejected);
    }
}
