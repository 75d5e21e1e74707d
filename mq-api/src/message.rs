use crate::{Error, ErrorKind, Headers, MessageId, Result};
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// A message: id, optional key, headers, payload, timestamp, content type.
///
/// ```
/// # use mq_api::Message;
/// let message = Message::new("hello").key("customer-7").header("source", "shop");
/// assert_eq!(message.payload.as_deref(), Some(&b"hello"[..]));
/// ```
///
/// "No key" and "empty key" differ, and so do "no payload" (a tombstone) and "empty payload"; both survive on every
/// backend. Build with the methods, read the fields. `Debug` shows sizes and the id, never contents.
///
/// 128 bytes, so that a move is eight instructions and no call of `memcpy`: the size is asserted below.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct Message {
    /// Messages of one key keep their order under [`Ordering::PerKey`](crate::Ordering::PerKey).
    pub key: Option<Bytes>,
    /// The content; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// The identity, made when the message is built.
    pub id: MessageId,
    /// User and library headers.
    pub headers: Headers,
    /// When it was made; the producer stamps it unless given. Kept to the millisecond.
    pub timestamp: Option<SystemTime>,
    /// What the payload is.
    pub content_type: Option<ContentType>,
}

impl Message {
    /// A message with this payload and a new id.
    #[inline]
    pub fn new(payload: impl Into<Bytes>) -> Self {
        Self { payload: Some(payload.into()), id: MessageId::make(), ..Self::default() }
    }

    /// A message without payload: by convention of log brokers, "the value of this key is gone".
    pub fn tombstone(key: impl Into<Bytes>) -> Self {
        Self { key: Some(key.into()), id: MessageId::make(), ..Self::default() }
    }

    /// A message whose payload is the JSON of `value`.
    ///
    /// # Errors
    /// [`ErrorKind::Encode`] when `value` cannot be written as JSON (a map with keys that are no strings, say).
    pub fn json<T: serde::Serialize + ?Sized>(value: &T) -> Result<Self> {
        let payload = serde_json::to_vec(value)
            .map_err(|e| Error::new(ErrorKind::Encode, "the value cannot be written as JSON").with_source(e))?;
        Ok(Self { content_type: Some(ContentType::Json), ..Self::new(payload) })
    }

    /// Sets the key.
    #[inline]
    pub fn key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header.
    pub fn header(mut self, name: impl Into<Arc<str>>, value: impl Into<Bytes>) -> Self {
        self.headers.push(name, value);
        self
    }

    /// Sets the id.
    pub fn id(mut self, id: impl Into<MessageId>) -> Self {
        self.id = id.into();
        self
    }

    /// Sets the timestamp.
    pub fn timestamp(mut self, at: SystemTime) -> Self {
        self.timestamp = Some(at);
        self
    }

    /// Sets the content type.
    pub fn content_type(mut self, content_type: impl Into<ContentType>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    /// The payload, empty for a tombstone.
    pub fn payload_bytes(&self) -> &[u8] {
        self.payload.as_deref().unwrap_or_default()
    }

    /// Bytes of payload, key and headers: what `max_message` and the in-flight bounds count.
    #[inline]
    pub fn size(&self) -> usize {
        self.payload.as_ref().map_or(0, Bytes::len) + self.key.as_ref().map_or(0, Bytes::len) + self.headers.size()
    }

    /// Lets go of everything on the heap, so that forgetting or overwriting it leaks nothing. Id and timestamp stay where they
    /// take no heap.
    #[doc(hidden)]
    #[inline(always)]
    pub fn clear(&mut self) {
        self.payload = None;
        // Most messages have none of these; one look at each is cheaper than dropping the whole.
        if self.key.is_some() {
            self.key = None;
        }
        if !self.headers.is_empty() {
            self.headers = Headers::new();
        }
        self.id.clear();
        if let Some(ContentType::Other(_)) = self.content_type {
            self.content_type = None;
        }
    }
}

const _: () = assert!(size_of::<Message>() <= 128, "a message that is larger is moved by calls of memcpy");

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("key_bytes", &self.key.as_ref().map(Bytes::len))
            .field("payload_bytes", &self.payload.as_ref().map(Bytes::len))
            .field("headers", &self.headers)
            .field("content_type", &self.content_type)
            .finish_non_exhaustive()
    }
}

/// What a payload is, as an IANA media type.
#[derive(Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ContentType {
    /// `application/json`
    Json,
    /// `application/octet-stream`
    Bytes,
    /// `text/plain`
    Text,
    /// Anything else. A thin pointer, so that a [`Message`] stays small.
    Other(Arc<Box<str>>),
}

impl ContentType {
    /// The media type.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Json => "application/json",
            Self::Bytes => "application/octet-stream",
            Self::Text => "text/plain",
            Self::Other(other) => other,
        }
    }
}

impl From<&str> for ContentType {
    fn from(text: &str) -> Self {
        match text {
            "application/json" => Self::Json,
            "application/octet-stream" => Self::Bytes,
            "text/plain" => Self::Text,
            other => Self::Other(Arc::new(other.into())),
        }
    }
}

impl fmt::Debug for ContentType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
