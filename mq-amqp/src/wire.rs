//! Messages as AMQP has them ([`decode`](crate::decode) is the way back). Keys, exact timestamps, tombstones and lists of headers that a table cannot hold
//! travel in headers `x-mq-…`, which a receiver never sees; the other properties of AMQP are headers `amqp.…`.

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, FieldTable, LongString, ShortString};
use mq_api::{Error, ErrorKind, Headers, Message, Outcome, Result};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

pub(crate) const KEY: &str = "x-mq-key";
pub(crate) const ID: &str = "x-mq-id";
pub(crate) const MILLIS: &str = "x-mq-ms";
pub(crate) const TOMBSTONE: &str = "x-mq-tombstone";
pub(crate) const LIST: &str = "x-mq-list";
pub(crate) const NUMBER: &str = "x-mq-n";
pub(crate) const ATTEMPT: &str = "x-mq-attempt";
pub(crate) const DUE: &str = "x-mq-due";
pub(crate) const TAKES: &str = "x-mq-takes";
pub(crate) const TRIALS: &str = "x-mq-trials";
pub(crate) const ARMED: &str = "x-mq-armed";

/// Header that sets and shows the routing key.
pub(crate) const ROUTING_KEY: &str = "amqp.routing-key";
pub(crate) const CORRELATION_ID: &str = "amqp.correlation-id";
pub(crate) const REPLY_TO: &str = "amqp.reply-to";
pub(crate) const TYPE: &str = "amqp.type";
pub(crate) const APP_ID: &str = "amqp.app-id";
pub(crate) const USER_ID: &str = "amqp.user-id";
pub(crate) const CONTENT_ENCODING: &str = "amqp.content-encoding";
pub(crate) const PRIORITY: &str = "amqp.priority";
pub(crate) const EXPIRATION: &str = "amqp.expiration";

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

impl Notes {
    /// What is left at that time, in milliseconds since 1970, until it is due.
    pub(crate) fn rest(&self, now: u64) -> Duration {
        Duration::from_millis(self.due.unwrap_or(0).saturating_sub(now))
    }

    /// The trial that is recorded, if one is, was none.
    pub(crate) fn untried(&mut self) {
        if self.armed.take().is_some() {
            self.trials = self.trials.saturating_sub(1);
        }
    }
}

/// Whose a message is that is written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin {
    /// The program's own: what cannot be carried is refused, with room left for the envelope of a dead letter.
    Program,
    /// A copy of one that is in a queue, whoever wrote it: it has to be possible, or the original could never leave. A property
    /// that cannot be set stays the header that it came as.
    Copy(Notes),
}

/// Kept free for the properties of a message, which may be of 255 bytes each.
const PROPERTIES: usize = 2048;
/// Kept free of what a program sends for the envelope of a dead letter: names, reason and errors are cut to bounds.
const ENVELOPE: usize = 4096;
/// The pseudo-address of direct replies, for which the server closes the channel of who does not wait for any.
const DIRECT_REPLY: &str = "amq.rabbitmq.reply-to";

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

/// Sets the property that a header stands for; most stand for none.
fn set_property(properties: &mut BasicProperties, name: &str, value: &[u8]) -> Result<()> {
    // `USER_ID` is none of these: RabbitMQ refuses any but the user that is logged in.
    if !matches!(name, CORRELATION_ID | REPLY_TO | TYPE | APP_ID | CONTENT_ENCODING | EXPIRATION | PRIORITY) {
        return Ok(());
    }
    let text = header_text(name, value)?;
    let must = |what: &str| refused(format!("header '{name}' must be {what}"));
    let mut priority = 0;
    match name {
        REPLY_TO if text.as_str() == DIRECT_REPLY => {
            return Err(must("the name of a queue; nobody here waits for a direct reply"));
        }
        // The server closes the channel over any other, neighbours included.
        EXPIRATION if text.as_str().parse::<u32>().is_err() => {
            return Err(must("milliseconds, at most 4294967295"));
        }
        PRIORITY => priority = text.as_str().parse().map_err(|_| must("0 to 255"))?,
        _ => {}
    }
    let old = std::mem::take(properties);
    *properties = match name {
        CORRELATION_ID => old.with_correlation_id(text),
        REPLY_TO => old.with_reply_to(text),
        TYPE => old.with_type(text),
        APP_ID => old.with_app_id(text),
        CONTENT_ENCODING => old.with_content_encoding(text),
        EXPIRATION => old.with_expiration(text),
        _ => old.with_priority(priority),
    };
    Ok(())
}

fn header_text(name: &str, value: &[u8]) -> Result<ShortString> {
    let text = std::str::from_utf8(value).map_err(|_| refused(format!("header '{name}' must be text")))?;
    short(&format!("header '{name}'"), text)
}

/// Writes a message; `number` is the private number by which a returned one is known. `frame_max` bounds the headers, which
/// AMQP cannot split.
pub(crate) fn encode(message: &Message, origin: Origin, number: u64, frame_max: usize) -> Result<Outbound> {
    let (notes, own) = match origin {
        Origin::Program => (Notes::default(), true),
        Origin::Copy(notes) => (notes, false),
    };
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
            put(name, i32::try_from(value).map_or(AMQPValue::LongLongInt(value.into()), AMQPValue::LongInt));
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
            plain &= last.is_none_or(|last| last < name) && name.len() <= 255 && !is_reserved(name);
            last = Some(name);
            if name == ROUTING_KEY {
                match header_text(name, value) {
                    Ok(key) => routing_key = Some(key),
                    Err(error) if own => return Err(error),
                    Err(_) => {}
                }
            } else if name.starts_with("amqp.")
                && let Err(error) = set_property(&mut properties, name, value)
                && own
            {
                return Err(error);
            }
            if name.len() <= 255 && !is_reserved(name) && !table.contains_key(name) {
                table.insert(name.into(), AMQPValue::LongString(LongString::from(value.as_ref())));
            }
        }
        if !plain {
            table.insert(LIST.into(), AMQPValue::ByteArray(ByteArray::from(pack(&message.headers))));
        }
    }
    let size = message.headers.size() + message.key.as_ref().map_or(0, Bytes::len);
    // Names and lengths count too, and what a table cannot hold is there twice.
    if frame_max > 0 && (size + 16 * message.headers.len()) * 2 > frame_max / 2 {
        let room = frame_max.saturating_sub(PROPERTIES + if own { ENVELOPE } else { 0 });
        if table_size(&table) > room && !message.headers.is_empty() {
            // Once is enough: the list has everything. Other programs do not see these headers.
            let ours = table.inner().iter().filter(|(name, _)| name.as_str().starts_with("x-mq-"));
            table = ours.map(|(name, value)| (name.clone(), value.clone())).collect::<BTreeMap<_, _>>().into();
            table.insert(LIST.into(), AMQPValue::ByteArray(ByteArray::from(pack(&message.headers))));
        }
        if table_size(&table) > room {
            let text = format!(
                "key and headers of {size} bytes do not fit into one AMQP frame of {frame_max} bytes; put the data into the payload"
            );
            return Err(Error::new(ErrorKind::TooLarge, text).with_outcome(Outcome::NotSent));
        }
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

/// Names that no table may have: the library's, the broker's, and those that it reads itself on the way in (`CC` and `BCC` are more
/// routing keys, and it closes the channel over what is no list of them).
fn is_reserved(name: &str) -> bool {
    is_private(name) || matches!(name, "CC" | "BCC")
}

/// Names that are the library's or the broker's own.
pub(crate) fn is_private(name: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::{Notes, Origin, encode};
    use crate::decode::{decode, private_number};
    use bytes::Bytes;
    use lapin::BasicProperties;
    use lapin::types::{AMQPValue, FieldTable};
    use mq_api::{ErrorKind, Message};
    use std::time::{Duration, SystemTime};

    fn round(message: &Message) -> Message {
        let out = encode(message, Origin::Program, 7, 131_072).unwrap();
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
        let out = encode(&Message::new("x"), Origin::Copy(notes), 1, 0).unwrap();
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
        let copy = encode(&got.message, Origin::Copy(Notes::default()), 1, 0).unwrap();
        assert!(copy.properties.expiration().is_none(), "a copy lives as long as it must");
        assert_eq!(copy.properties.correlation_id().as_ref().map(|s| s.as_str()), Some("c"));
    }

    #[test]
    fn what_amqp_cannot_carry_is_refused_here() {
        let large = Message::new("x").header("h", vec![0; 140_000]);
        let error = encode(&large, Origin::Program, 1, 131_072).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        let long = Message::new("x").header("amqp.reply-to", "y".repeat(300));
        assert_eq!(encode(&long, Origin::Program, 1, 0).err().unwrap().kind(), ErrorKind::InvalidName);
        let name = Message::new("x").header("n".repeat(300), "v");
        assert_eq!(round(&name).headers, name.headers);
    }
}
