use crate::failure::cut;
use crate::{Headers, Message, Position};
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Why a message was dead-lettered.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It failed as often as the retry policy allows.
    MaxAttempts,
    /// The handler said that no other try can succeed.
    Permanent,
    /// It could not be decoded.
    Undecodable,
    /// It was held longer than `max_processing`, as often as the retry policy allows.
    Timeout,
    /// Its consumer died with it, alone, `crash_trials` times.
    Crash,
    /// What the program gave to [`Delivery::dead_letter`](crate::Delivery::dead_letter).
    Other(Arc<str>),
}

impl Reason {
    /// The text in the envelope.
    pub fn as_str(&self) -> &str {
        match self {
            Self::MaxAttempts => "max-attempts",
            Self::Permanent => "permanent",
            Self::Undecodable => "undecodable",
            Self::Timeout => "timeout",
            Self::Crash => "crash",
            Self::Other(text) => text,
        }
    }
}

impl From<&str> for Reason {
    fn from(text: &str) -> Self {
        match text {
            "max-attempts" => Self::MaxAttempts,
            "permanent" => Self::Permanent,
            "undecodable" => Self::Undecodable,
            "timeout" => Self::Timeout,
            "crash" => Self::Crash,
            other => Self::Other(other.into()),
        }
    }
}

impl From<String> for Reason {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a dead letter says of itself, in headers of fixed names that are the same on every backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Envelope {
    /// The topic it came from (`mq-source-topic`).
    pub topic: Arc<str>,
    /// The group that could not handle it (`mq-source-group`).
    pub group: Arc<str>,
    /// Its partition there (`mq-source-partition`).
    pub partition: Option<u32>,
    /// Its position there (`mq-source-position`).
    pub position: Option<Position>,
    /// When this group first saw it, where that is known (`mq-first-seen`).
    pub first_seen: Option<SystemTime>,
    /// When it was dead-lettered (`mq-failed-at`).
    pub failed_at: Option<SystemTime>,
    /// Hand-overs to a handler (`mq-attempts`).
    pub attempts: u32,
    /// Why (`mq-reason`).
    pub reason: Reason,
    /// The last error and its causes, cut to a bound (`mq-error`).
    pub error: Option<Arc<str>>,
    /// The member that had it last (`mq-consumer`).
    pub consumer: Option<Arc<str>>,
    /// How often it was redriven before (`mq-redrives`).
    pub redrives: u32,
}

const TOPIC: &str = "mq-source-topic";
const GROUP: &str = "mq-source-group";
const PARTITION: &str = "mq-source-partition";
const POSITION: &str = "mq-source-position";
const FIRST_SEEN: &str = "mq-first-seen";
const FAILED_AT: &str = "mq-failed-at";
const ATTEMPTS: &str = "mq-attempts";
const REASON: &str = "mq-reason";
const ERROR: &str = "mq-error";
const CONSUMER: &str = "mq-consumer";
const REDRIVES: &str = "mq-redrives";

impl Envelope {
    /// All header names of the envelope.
    pub const NAMES: [&'static str; 11] =
        [TOPIC, GROUP, PARTITION, POSITION, FIRST_SEEN, FAILED_AT, ATTEMPTS, REASON, ERROR, CONSUMER, REDRIVES];

    /// An envelope with only what every dead letter has.
    pub fn new(topic: impl Into<Arc<str>>, group: impl Into<Arc<str>>, reason: Reason, attempts: u32) -> Self {
        Self {
            topic: topic.into(),
            group: group.into(),
            partition: None,
            position: None,
            first_seen: None,
            failed_at: None,
            attempts,
            reason,
            error: None,
            consumer: None,
            redrives: 0,
        }
    }

    /// Writes the headers, replacing those of an earlier envelope. Reason and consumer are cut to 1,024 bytes, as errors are.
    pub fn write(&self, headers: &mut Headers) {
        Self::strip(headers);
        headers.push(TOPIC, text(&self.topic));
        headers.push(GROUP, text(&self.group));
        if let Some(partition) = self.partition {
            headers.push(PARTITION, partition.to_string());
        }
        if let Some(position) = self.position {
            headers.push(POSITION, position.to_string());
        }
        if let Some(at) = self.first_seen {
            headers.push(FIRST_SEEN, millis(at));
        }
        if let Some(at) = self.failed_at {
            headers.push(FAILED_AT, millis(at));
        }
        headers.push(ATTEMPTS, self.attempts.to_string());
        headers.push(REASON, text(&cut(self.reason.as_str())));
        if let Some(error) = &self.error {
            headers.push(ERROR, text(error));
        }
        if let Some(consumer) = &self.consumer {
            headers.push(CONSUMER, text(&cut(consumer)));
        }
        if self.redrives > 0 {
            headers.push(REDRIVES, self.redrives.to_string());
        }
    }

    /// The dead letter of `message`: same id, key, payload and headers, and this envelope.
    pub fn dead_letter(&self, message: &Message) -> Message {
        let mut copy = message.clone();
        self.write(&mut copy.headers);
        copy
    }

    /// Reads the envelope of a dead letter; `None` if the message has none.
    pub fn read(headers: &Headers) -> Option<Self> {
        let shared = |name| headers.get_str(name).map(Arc::<str>::from);
        Some(Self {
            topic: shared(TOPIC)?,
            group: shared(GROUP)?,
            partition: headers.get_str(PARTITION).and_then(|t| t.parse().ok()),
            position: headers.get_str(POSITION).and_then(|t| t.parse().ok()),
            first_seen: headers.get_str(FIRST_SEEN).and_then(from_millis),
            failed_at: headers.get_str(FAILED_AT).and_then(from_millis),
            attempts: headers.get_str(ATTEMPTS).and_then(|t| t.parse().ok()).unwrap_or(0),
            reason: headers.get_str(REASON).unwrap_or_default().into(),
            error: shared(ERROR),
            consumer: shared(CONSUMER),
            redrives: headers.get_str(REDRIVES).and_then(|t| t.parse().ok()).unwrap_or(0),
        })
    }

    /// Removes all headers of the envelope.
    pub fn strip(headers: &mut Headers) {
        for name in Self::NAMES {
            headers.remove(name);
        }
    }
}

fn text(s: &str) -> Bytes {
    Bytes::copy_from_slice(s.as_bytes())
}

fn millis(at: SystemTime) -> String {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis().to_string()
}

fn from_millis(text: &str) -> Option<SystemTime> {
    text.parse().ok().and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)))
}

#[cfg(test)]
mod tests {
    use super::{Envelope, Reason};
    use crate::{Message, Position};
    use std::time::{Duration, SystemTime};

    #[test]
    fn survives_the_wire() {
        let mut envelope = Envelope::new("orders", "billing", Reason::MaxAttempts, 5);
        envelope.partition = Some(3);
        envelope.position = Some(Position::stream_id(9, 1));
        envelope.failed_at = Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1234));
        envelope.error = Some("card refused".into());
        envelope.redrives = 2;
        let letter = envelope.dead_letter(&Message::new("x").header("user", "kept"));
        assert_eq!(Envelope::read(&letter.headers), Some(envelope.clone()));
        let again = envelope.dead_letter(&letter);
        assert_eq!(again.headers, letter.headers, "writing twice leaves one envelope");
        let mut headers = again.headers;
        Envelope::strip(&mut headers);
        assert_eq!(headers.iter().map(|(n, _)| n).collect::<Vec<_>>(), ["user"]);
    }
}
