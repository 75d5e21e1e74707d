//! Messages as they come: ours, and those of other programs, whose headers may be of any type.

use crate::wire::{
    APP_ID, ARMED, ATTEMPT, CONTENT_ENCODING, CORRELATION_ID, DUE, EXPIRATION, ID, KEY, LIST, MILLIS, NUMBER, Notes,
    PRIORITY, REPLY_TO, ROUTING_KEY, TAKES, TOMBSTONE, TRIALS, TYPE, USER_ID, is_private,
};
use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ShortString};
use mq_api::{ContentType, Headers, Message, MessageId};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What came with a message.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) message: Message,
    pub(crate) notes: Notes,
    /// How often a quorum queue got it back; `None` on classic queues, and the first time.
    pub(crate) returned: Option<u32>,
    /// Its place in a stream.
    pub(crate) offset: Option<u64>,
}

/// Reads a message; nothing that can come fails, for messages of other programs are delivered raw.
pub(crate) fn decode(properties: BasicProperties, exchange: &str, routing_key: &str, body: Vec<u8>) -> Arrived {
    let mut message = Message::default();
    let mut notes = Notes::default();
    let (mut returned, mut offset) = (None, None);
    let mut list = None;
    let mut tombstone = false;
    let mut millis = properties.timestamp().map(|seconds| seconds.saturating_mul(1000));
    message.id = properties.message_id().as_ref().map_or(MessageId::NIL, |id| MessageId::text(id.as_str()));
    message.content_type = properties.content_type().as_ref().map(|kind| ContentType::from(kind.as_str()));
    let mut plain: Vec<(Arc<str>, Bytes)> = Vec::new();
    if let Some(table) = properties.headers() {
        for (name, value) in table {
            let name = name.as_str();
            if name.starts_with("x-") {
                match name {
                    KEY => message.key = Some(bytes(value)),
                    ID => message.id = MessageId::text(String::from_utf8_lossy(&bytes(value))),
                    MILLIS => millis = number(value).or(millis),
                    TOMBSTONE => tombstone = true,
                    LIST => list = unpack(&bytes(value)),
                    ATTEMPT => notes.attempt = small(value),
                    TAKES => notes.takes = small(value),
                    TRIALS => notes.trials = small(value),
                    ARMED => notes.armed = number(value),
                    DUE => notes.due = number(value),
                    "x-delivery-count" => returned = Some(small(value)),
                    "x-stream-offset" => offset = number(value),
                    _ if is_private(name) => {}
                    _ => plain.push((name.into(), bytes(value))),
                }
                continue;
            }
            plain.push((name.into(), bytes(value)));
        }
    }
    let mut headers = match list {
        Some(list) => list,
        None if plain.is_empty() => Headers::new(),
        None => plain.into_iter().collect(),
    };
    let mut show = |name: &str, value: &Option<ShortString>| {
        if let Some(value) = value
            && headers.get(name).is_none()
        {
            headers.push(name, value.as_str().to_owned());
        }
    };
    show(CORRELATION_ID, properties.correlation_id());
    show(REPLY_TO, properties.reply_to());
    show(TYPE, properties.kind());
    show(APP_ID, properties.app_id());
    show(USER_ID, properties.user_id());
    show(CONTENT_ENCODING, properties.content_encoding());
    if let Some(priority) = properties.priority().filter(|p| *p > 0) {
        show(PRIORITY, &ShortString::try_new(priority.to_string()).ok());
    }
    if !exchange.is_empty() && !routing_key.is_empty() {
        show(ROUTING_KEY, &ShortString::try_new(routing_key).ok());
    }
    // A limit of the time on the way must not shorten the life of a copy.
    headers.remove(EXPIRATION);
    message.headers = headers;
    message.timestamp = millis.and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    message.payload = (!(tombstone && body.is_empty())).then(|| Bytes::from(body));
    Arrived { message, notes, returned, offset }
}

/// The private number of a returned message.
pub(crate) fn private_number(properties: &BasicProperties) -> Option<u64> {
    properties.headers().as_ref().and_then(|t| t.inner().get(NUMBER)).and_then(number)
}

fn unpack(packed: &[u8]) -> Option<Headers> {
    let mut rest = packed;
    let mut next = || {
        let (length, tail) = rest.split_first_chunk::<4>()?;
        let length = u32::from_be_bytes(*length) as usize;
        let part = tail.get(..length)?;
        rest = &tail[length..];
        Some(part)
    };
    let mut headers = Headers::new();
    while let Some(name) = next() {
        let value = next()?;
        headers.push(std::str::from_utf8(name).ok()?, Bytes::copy_from_slice(value));
    }
    rest.is_empty().then_some(headers)
}

fn number(value: &AMQPValue) -> Option<u64> {
    match *value {
        AMQPValue::ShortShortInt(n) => u64::try_from(n).ok(),
        AMQPValue::ShortShortUInt(n) => Some(n.into()),
        AMQPValue::ShortInt(n) => u64::try_from(n).ok(),
        AMQPValue::ShortUInt(n) => Some(n.into()),
        AMQPValue::LongInt(n) => u64::try_from(n).ok(),
        AMQPValue::LongUInt(n) => Some(n.into()),
        AMQPValue::LongLongInt(n) => u64::try_from(n).ok(),
        AMQPValue::Timestamp(n) => Some(n),
        _ => None,
    }
}

fn small(value: &AMQPValue) -> u32 {
    number(value).map_or(0, |n| u32::try_from(n).unwrap_or(u32::MAX))
}

/// A value of any type as bytes: text and bytes as they are, numbers as text, tables and arrays as JSON.
fn bytes(value: &AMQPValue) -> Bytes {
    match value {
        AMQPValue::LongString(text) => Bytes::copy_from_slice(text.as_bytes()),
        AMQPValue::ByteArray(bytes) => Bytes::copy_from_slice(bytes.as_slice()),
        AMQPValue::ShortString(text) => Bytes::copy_from_slice(text.as_str().as_bytes()),
        other => Bytes::from(text(other)),
    }
}

fn text(value: &AMQPValue) -> String {
    match value {
        AMQPValue::Boolean(b) => b.to_string(),
        AMQPValue::ShortShortInt(n) => n.to_string(),
        AMQPValue::ShortInt(n) => n.to_string(),
        AMQPValue::LongInt(n) => n.to_string(),
        AMQPValue::LongLongInt(n) => n.to_string(),
        AMQPValue::Float(n) => n.to_string(),
        AMQPValue::Double(n) => n.to_string(),
        AMQPValue::DecimalValue(d) => format!("{}e-{}", d.value, d.scale),
        AMQPValue::Void => String::new(),
        AMQPValue::LongString(s) => format!("{:?}", s.to_string()),
        AMQPValue::ShortString(s) => format!("{:?}", s.as_str()),
        AMQPValue::ByteArray(b) => format!("{:?}", String::from_utf8_lossy(b.as_slice())),
        AMQPValue::FieldArray(items) => {
            format!("[{}]", items.as_slice().iter().map(text).collect::<Vec<_>>().join(","))
        }
        AMQPValue::FieldTable(table) => {
            let entries = table.inner().iter().map(|(k, v)| format!("{:?}:{}", k.as_str(), text(v)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
        }
        other => number(other).map_or_else(String::new, |n| n.to_string()),
    }
}
