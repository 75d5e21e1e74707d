//! How a message is written to a record, and read from one.

use crate::block::Block;
use crate::ffi::Raw;
use mq_api::{Message, MessageId};
use rdkafka::message::{Header, OwnedHeaders, Timestamp};
use std::time::{Duration, SystemTime};

/// The 16 bytes of an id made by the library.
const UID: &str = "mq-uid";
/// An id of the program's own, as text.
const ID: &str = "mq-id";
const CONTENT_TYPE: &str = "mq-content-type";

/// The headers of a record.
pub(crate) fn headers(message: &Message, extra: &[(&str, &[u8])]) -> OwnedHeaders {
    let mut out = OwnedHeaders::new_with_capacity(message.headers.len() + 2 + extra.len());
    let mut add = |key: &str, value: &[u8]| {
        let headers = std::mem::replace(&mut out, OwnedHeaders::new_with_capacity(0));
        out = headers.insert(Header { key, value: Some(value) });
    };
    match message.id.as_bytes() {
        Some(bytes) => add(UID, bytes),
        None => add(ID, message.id.to_string().as_bytes()),
    }
    if let Some(content_type) = &message.content_type {
        add(CONTENT_TYPE, content_type.as_str().as_bytes());
    }
    for (name, value) in extra {
        add(name, value);
    }
    for (name, value) in message.headers.iter() {
        add(name, value);
    }
    out
}

/// Milliseconds since 1970.
pub(crate) fn millis(at: SystemTime) -> i64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Reads a record, with copies in the block; `special` gets the headers that belong to the retry topics, and says whether it took them.
pub(crate) fn read(record: Raw<'_>, block: &mut Block, mut special: impl FnMut(&str, &[u8]) -> bool) -> Message {
    let mut message = Message::default();
    message.key = record.key().map(|key| block.copy(key));
    message.payload = record.payload().map(|payload| block.copy(payload));
    if let Timestamp::CreateTime(ms) | Timestamp::LogAppendTime(ms) = record.timestamp()
        && let Ok(ms) = u64::try_from(ms)
    {
        message.timestamp = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    }
    record.headers(|name, value| {
        // A null value reads as an empty one: headers of this library always have a value.
        let value = value.unwrap_or_default();
        match name {
            UID if <[u8; 16]>::try_from(value).is_ok() => {
                let mut id = [0; 16];
                id.copy_from_slice(value);
                message.id = MessageId::from_bytes(id);
            }
            ID => message.id = MessageId::text(String::from_utf8_lossy(value)),
            CONTENT_TYPE => message.content_type = std::str::from_utf8(value).ok().map(Into::into),
            name if special(name, value) => {}
            name => message.headers.push(name, block.copy(value)),
        }
    });
    if message.id.is_nil() {
        // Of some other program. Its place is its identity: the same at each redelivery.
        message.id = MessageId::text(format!("{}-{}-{}", record.topic(), record.partition(), record.offset()));
    }
    message
}
