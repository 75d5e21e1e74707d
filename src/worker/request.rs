use mq_api::{Lost, Message, Position, Source, Stored, Topic};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// What a handler and the layers around it get: one message and where it came from.
///
/// Reads as its [`Message`]. The right to settle it stays with the worker, so a panic or a dropped handler is a nack and
/// nothing can be settled twice. Cloning shares the message.
#[derive(Clone)]
pub struct Request {
    message: Arc<Stored>,
    lost: Option<Lost>,
    position: Position,
    attempt: u32,
}

impl Request {
    #[inline]
    pub(crate) fn new(message: Arc<Stored>, position: Position, attempt: u32, lost: Option<Lost>) -> Self {
        Self { message, lost, position, attempt }
    }

    /// The message.
    #[inline]
    pub fn message(&self) -> &Message {
        &self.message.message
    }

    /// Which hand-over this is, 1 for the first.
    #[inline]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Where the message is in its partition or topic.
    #[inline]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Topic, group, partition and ownership epoch.
    pub fn source(&self) -> &Source {
        static NOWHERE: std::sync::OnceLock<Source> = std::sync::OnceLock::new();
        match &self.lost {
            Some(lost) => lost.source(),
            None => NOWHERE.get_or_init(|| Source::new(Topic::new(""), None)),
        }
    }

    /// Resolves when the message is no longer ours. The worker drops the handler then; take this only to stop something
    /// that would outlive the handler. `None` where nothing can be lost.
    pub fn lost(&self) -> Option<Lost> {
        self.lost.clone()
    }
}

impl Deref for Request {
    type Target = Message;

    #[inline]
    fn deref(&self) -> &Message {
        &self.message.message
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("topic", &self.source().topic)
            .field("position", &format_args!("{}", self.position))
            .field("attempt", &self.attempt)
            .field("message", self.message())
            .finish()
    }
}
