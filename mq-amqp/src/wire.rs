//! Messages as AMQP has them, and back. Keys, exact timestamps, tombstones and lists of headers that a table cannot hold
//! travel in headers `x-mq-…`, which a receiver never sees; the other properties of AMQP are headers `amqp.…`.

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, FieldTable, LongString, ShortString};
use mq_api::{ContentType, Error, ErrorKind, Headers, Message, MessageId, Outcome, Result};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

const KEY: &str = "x-mq-key";
const ID: &str = "x-mq-id";
const MILLIS: &str = "x-mq-ms";
const TOMBSTONE: &str = "x-mq-tombstone";
const LIST: &str = "x-mq-list";
const NUMBER: &str = "x-mq-n";
const ATTEMPT: &str = "x-mq-attempt";
const DUE: &str = "x-mq-due";
const TAKES: &str = "x-mq-takes";
const TRIALS: &str = "x-mq-trials";
const ARMED: &str = "x-mq-armed";

/// Header that sets and shows the routing key.
pub(crate) const ROUTING_KEY: &str = "amqp.routing-key";
const CORRELATION_ID: &str = "amqp.correlation-id";
const REPLY_TO: &str = "amqp.reply-to";
const TYPE: &str = "amqp.type";
const APP_ID: &str = "amqp.app-id";
const USER_ID: &str = "amqp.user-id";
const CONTENT_ENCODING: &str = "amqp.content-encoding";
const PRIORITY: &str = "amqp.priority";
const EXPIRATION: &str = "amqp.expiration";

/// What the library notes on a message besides its contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Notes {
    /// The number of the hand-over to come; 0 = not noted, the first.
    pub(crate) attempt: u32,
    /// Not before this, in milliseconds since 1970.
    pub(crate) due: Option<u64>,
    /// How often it was taken before, where the broker does not count.
    pub(crate) takes: u32,
    /// How often it was handed over alone.
    pub(crate) trials: u32,
    /// The number of a copy that is to be handed over alone.
    pub(crate) armed: Option<u64>,
}

/// What came with a message.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) message: Message,
    pub(crate) notes: Notes,
    /// How often a quorum queue got it back; `None` on classic queues, and the first time.
    pub(crate) returned: Option<u32>,
}

/// A message ready to publish.
pub(crate) struct Outbound {
    pub(crate) properties: BasicProperties,
    pub(crate) routing_key: Option<ShortString>,
}

fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidName, what).with_outcome(Outcome::NotSent)
}

fn short(what: &str, text: &str) -> Result<ShortString> {
    ShortString::try_new(text).map_err(|_| refused(format!("{what} has {} bytes; AMQP allows 255", text.len())))
}

/// Writes a message; `number` is the private number by which a returned one is known. `frame_max` bounds the headers, which
/// AMQP cannot split.
pub(crate) fn encode(message: &Message, notes: &Notes, number: u64, frame_max: usize) -> Result<Outbound> {
    let mut table = FieldTable::default();
    let mut properties = BasicProperties::default().with_delivery_mode(2);
    let mut routing_key = None;
    let mut put = |name: &str, value: AMQPValue| {
        table.insert(name.into(), value);
    };
    put(NUMBER, AMQPValue::LongLongInt(number as i64));
    if let Some(key) = &message.key {
        put(KEY, AMQPValue::ByteArray(key.as_ref().into()));
    }
    if message.payload.is_none() {
        put(TOMBSTONE, AMQPValue::Boolean(true));
    }
    if !message.id.is_nil() {
        let id = message.id.to_string();
        match ShortString::try_new(id.as_str()) {
            Ok(id) => properties = properties.with_message_id(id),
            Err(_) => put(ID, AMQPValue::LongString(id.into())),
        }
    }
    if let Some(at) = message.timestamp {
        let millis = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        properties = properties.with_timestamp(millis / 1000);
        if !millis.is_multiple_of(1000) {
            put(MILLIS, AMQPValue::LongLongInt(millis as i64));
        }
    }
    if let Some(kind) = &message.content_type {
        properties = properties.with_content_type(short("the content type", kind.as_str())?);
    }
    for (name, value) in [(ATTEMPT, notes.attempt), (TAKES, notes.takes), (TRIALS, notes.trials)] {
        if value > 0 {
            put(name, AMQPValue::LongInt(value as i32));
        }
    }
    if let Some(number) = notes.armed {
        put(ARMED, AMQPValue::LongLongInt(number as i64));
    }
    if let Some(due) = notes.due {
        put(DUE, AMQPValue::LongLongInt(due as i64));
    }
    if !message.headers.is_empty() {
        let mut last: Option<&str> = None;
        let mut plain = true;
        for (name, value) in message.headers.iter() {
            plain &= last.is_none_or(|last| last < name) && name.len() <= 255 && !is_private(name);
            last = Some(name);
            if name.starts_with("amqp.") {
                let text = || {
                    let text =
                        std::str::from_utf8(value).map_err(|_| refused(format!("header '{name}' must be text")))?;
                    short(&format!("header '{name}'"), text)
                };
                match name {
                    ROUTING_KEY => routing_key = Some(text()?),
                    CORRELATION_ID => properties = properties.with_correlation_id(text()?),
                    REPLY_TO => properties = properties.with_reply_to(text()?),
                    TYPE => properties = properties.with_type(text()?),
                    APP_ID => properties = properties.with_app_id(text()?),
                    CONTENT_ENCODING => properties = properties.with_content_encoding(text()?),
                    EXPIRATION => properties = properties.with_expiration(text()?),
                    // RabbitMQ refuses any but the user that is logged in.
                    USER_ID => {}
                    PRIORITY => {
                        let priority = text()?.as_str().parse();
                        let priority = priority.map_err(|_| refused(format!("header '{name}' must be 0 to 255")))?;
                        properties = properties.with_priority(priority);
                    }
                    _ => {}
                }
            }
            if name.len() <= 255 && !is_private(name) && !table.contains_key(name) {
                table.insert(name.into(), AMQPValue::LongString(LongString::from(value.as_ref())));
            }
        }
        if !plain {
            table.insert(LIST.into(), AMQPValue::ByteArray(ByteArray::from(pack(&message.headers))));
        }
    }
    let size = message.headers.size() + message.key.as_ref().map_or(0, Bytes::len);
    // Headers that a table cannot hold are there twice.
    if frame_max > 0 && size * 2 > frame_max / 2 && table_size(&table) + 2048 > frame_max {
        let text = format!(
            "key and headers of {size} bytes do not fit into one AMQP frame of {frame_max} bytes; put the data into the payload"
        );
        return Err(Error::new(ErrorKind::TooLarge, text).with_outcome(Outcome::NotSent));
    }
    Ok(Outbound { properties: properties.with_headers(table), routing_key })
}

fn table_size(table: &FieldTable) -> usize {
    let value = |value: &AMQPValue| match value {
        AMQPValue::LongString(text) => text.len() + 5,
        AMQPValue::ByteArray(bytes) => bytes.as_slice().len() + 5,
        _ => 9,
    };
    table.inner().iter().map(|(name, v)| name.as_str().len() + 1 + value(v)).sum()
}

/// Names that are the library's or the broker's own.
fn is_private(name: &str) -> bool {
    name.starts_with("x-mq-") || is_broker(name)
}

fn is_broker(name: &str) -> bool {
    name.starts_with("x-")
        && (matches!(name, "x-death" | "x-delivery-count" | "x-acquired-count")
            || name.starts_with("x-first-death")
            || name.starts_with("x-last-death"))
}

/// The whole list, for names out of order, twice, too long or reserved.
fn pack(headers: &Headers) -> Vec<u8> {
    let mut out = Vec::with_capacity(headers.size() + 8 * headers.len());
    for (name, value) in headers.iter() {
        for part in [name.as_bytes(), value] {
            out.extend_from_slice(&(part.len() as u32).to_be_bytes());
            out.extend_from_slice(part);
        }
    }
    out
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

/// Reads a message; nothing that can come fails, for messages of other programs are delivered raw.
pub(crate) fn decode(properties: BasicProperties, exchange: &str, routing_key: &str, body: Vec<u8>) -> Arrived {
    let mut message = Message::default();
    let mut notes = Notes::default();
    let mut returned = None;
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
    Arrived { message, notes, returned }
}

/// The private number of a returned message.
pub(crate) fn private_number(properties: &BasicProperties) -> Option<u64> {
    properties.headers().as_ref().and_then(|t| t.inner().get(NUMBER)).and_then(number)
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

#[cfg(test)]
mod tests {
    use super::{Notes, decode, encode, private_number};
    use bytes::Bytes;
    use lapin::BasicProperties;
    use lapin::types::{AMQPValue, FieldTable};
    use mq_api::{ErrorKind, Message};
    use std::time::{Duration, SystemTime};

    fn round(message: &Message) -> Message {
        let out = encode(message, &Notes::default(), 7, 131_072).unwrap();
        assert_eq!(private_number(&out.properties), Some(7));
        decode(out.properties, "orders", "", message.payload_bytes().to_vec()).message
    }

    #[test]
    fn everything_survives() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        let mut message = Message::new("x").key("").timestamp(at).content_type("application/json");
        for (name, value) in [("b", "1"), ("a", "2"), ("b", "3"), ("x-death", "mine")] {
            message.headers.push(name, value);
        }
        let got = round(&message);
        assert_eq!((got.key.clone(), got.payload.clone(), got.id), (message.key, message.payload, message.id));
        assert_eq!((got.timestamp, got.content_type), (message.timestamp, message.content_type));
        assert_eq!(got.headers, message.headers, "order, duplicates and reserved names");
        let tombstone = round(&Message::tombstone("k"));
        assert!(tombstone.payload.is_none());
        assert_eq!(round(&Message::new("")).payload, Some(Bytes::new()));
        assert_eq!(round(&Message::new("").key("k")).key.as_deref(), Some(&b"k"[..]));
        assert!(round(&Message::new("")).key.is_none());
    }

    #[test]
    fn notes_are_not_shown() {
        let notes = Notes { attempt: 3, due: Some(9), takes: 4, trials: 1, armed: Some(5) };
        let out = encode(&Message::new("x"), &notes, 1, 0).unwrap();
        let got = decode(out.properties, "", "q", b"x".to_vec());
        assert_eq!(got.notes, notes);
        assert!(got.message.headers.is_empty());
    }

    #[test]
    fn foreign_messages_are_delivered() {
        let mut table = FieldTable::default();
        table.insert("n".into(), AMQPValue::LongInt(-3));
        table.insert("x-death".into(), AMQPValue::Boolean(true));
        table.insert("x-delivery-count".into(), AMQPValue::LongLongInt(2));
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_correlation_id("c".into())
            .with_expiration("1000".into());
        let got = decode(properties, "ex", "a.b", b"raw".to_vec());
        assert_eq!((got.returned, got.message.headers.get_str("n")), (Some(2), Some("-3")));
        assert_eq!(got.message.headers.get_str("amqp.correlation-id"), Some("c"));
        assert_eq!(got.message.headers.get_str("amqp.routing-key"), Some("a.b"));
        assert!(got.message.headers.get("x-death").is_none() && got.message.id.is_nil());
        let copy = encode(&got.message, &Notes::default(), 1, 0).unwrap();
        assert!(copy.properties.expiration().is_none(), "a copy lives as long as it must");
        assert_eq!(copy.properties.correlation_id().as_ref().map(|s| s.as_str()), Some("c"));
    }

    #[test]
    fn what_amqp_cannot_carry_is_refused_here() {
        let large = Message::new("x").header("h", vec![0; 140_000]);
        let error = encode(&large, &Notes::default(), 1, 131_072).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        let long = Message::new("x").header("amqp.reply-to", "y".repeat(300));
        assert_eq!(encode(&long, &Notes::default(), 1, 0).err().unwrap().kind(), ErrorKind::InvalidName);
        let name = Message::new("x").header("n".repeat(300), "v");
        assert_eq!(round(&name).headers, name.headers);
    }
}
