//! The wire format: how a message is written into a stream entry or a Pub/Sub payload, and read back. All of it is here.
//!
//! A stream entry of this library has two fields, always in this order, so that Redis stores their names once per block:
//!
//! | field | content |
//! |---|---|
//! | `mq` | version byte 1, flags, then id, timestamp, content type, key and headers as far as there are any |
//! | `p` | the payload; missing for a tombstone |
//!
//! Flags: bit 0 the id is text (else 16 bytes), bit 1 a key, bit 2 a timestamp (8 bytes, milliseconds), bits 3-5 the content type
//! (0 none, 1 JSON, 2 bytes, 3 text, 4 other as text), bit 6 headers up to the end. Texts and bytes have a length before them
//! (base 128, low part first). A Pub/Sub payload is `mq1`, the length of `mq`, `mq`, and the payload, if any, after a byte 1.
//!
//! The plain form (`fields=plain`) has one field per part, for programs that do not know this library: `mq` = `plain`, `id`,
//! `ts`, `type`, `key`, `h:` and name for each header, `payload`. Entries without a field `mq` are of other programs: their
//! payload is their fields as a JSON object, or the value of `payload` if that is their only field; their id is that of the
//! entry.

use crate::answer::Fields;
use crate::foreign::foreign;
use bytes::{BufMut, Bytes};
use mq_api::{ContentType, Headers, Message, MessageId};
use std::time::{Duration, SystemTime};

/// The field of everything but the payload.
pub(crate) const META: &str = "mq";
/// The field of the payload.
pub(crate) const PAYLOAD: &str = "p";
const VERSION: u8 = 1;
const PLAIN: &[u8] = b"plain";
const BLOB: &[u8] = b"mq1";

const TEXT_ID: u8 = 1;
const KEY: u8 = 2;
const TIME: u8 = 4;
const TYPE_SHIFT: u8 = 3;
const HEADERS: u8 = 64;

fn put_len(out: &mut Vec<u8>, mut n: usize) {
    while n >= 128 {
        out.push(n as u8 | 128);
        n >>= 7;
    }
    out.push(n as u8);
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

pub(crate) fn from_millis(ms: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}

/// Writes the field `mq`.
pub(crate) fn encode(message: &Message, out: &mut Vec<u8>) {
    out.clear();
    out.push(VERSION);
    let content = match &message.content_type {
        None => 0,
        Some(ContentType::Json) => 1,
        Some(ContentType::Bytes) => 2,
        Some(ContentType::Text) => 3,
        Some(_) => 4,
    };
    let mut flags = content << TYPE_SHIFT;
    let id = message.id.as_bytes();
    for (bit, set) in [
        (TEXT_ID, id.is_none()),
        (KEY, message.key.is_some()),
        (TIME, message.timestamp.is_some()),
        (HEADERS, !message.headers.is_empty()),
    ] {
        flags |= if set { bit } else { 0 };
    }
    out.push(flags);
    match id {
        Some(id) => out.extend_from_slice(id),
        None => put_bytes(out, message.id.to_string().as_bytes()),
    }
    if let Some(at) = message.timestamp {
        out.put_u64(millis(at));
    }
    if content == 4
        && let Some(other) = &message.content_type
    {
        put_bytes(out, other.as_str().as_bytes());
    }
    if let Some(key) = &message.key {
        put_bytes(out, key);
    }
    for (name, value) in message.headers.iter() {
        put_bytes(out, name.as_bytes());
        put_bytes(out, value);
    }
}

struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// The next bytes, on loan.
    fn look<const N: usize>(&mut self) -> Option<[u8; N]> {
        let end = self.at.checked_add(N)?;
        let part = self.all.get(self.at..end)?;
        self.at = end;
        part.try_into().ok()
    }

    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(n).filter(|end| *end <= self.all.len())?;
        let part = self.all.get(self.at..end)?;
        self.at = end;
        Some(part)
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = *self.all.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn len(&mut self) -> Option<usize> {
        let mut n = 0usize;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            n |= usize::from(byte & 127) << shift;
            if byte < 128 {
                return Some(n);
            }
        }
        None
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = self.len()?;
        self.take(n)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }
}

/// Reads the field `mq`: all of a message but its payload; `None` if it is not of this format.
pub(crate) fn decode(meta: &[u8]) -> Option<Message> {
    let mut from = Reader { all: meta, at: 0 };
    if from.byte()? != VERSION {
        return None;
    }
    let flags = from.byte()?;
    let mut message = Message::default();
    message.id = if flags & TEXT_ID == 0 { MessageId::from_bytes(from.look()?) } else { MessageId::text(from.text()?) };
    if flags & TIME != 0 {
        let ms = u64::from_be_bytes(from.look()?);
        message.timestamp = from_millis(ms);
    }
    message.content_type = match flags >> TYPE_SHIFT & 7 {
        0 => None,
        1 => Some(ContentType::Json),
        2 => Some(ContentType::Bytes),
        3 => Some(ContentType::Text),
        4 => Some(from.text()?.into()),
        _ => return None,
    };
    if flags & KEY != 0 {
        message.key = Some(Bytes::copy_from_slice(from.bytes()?));
    }
    if flags & HEADERS != 0 {
        let mut headers = Headers::new();
        while from.at < meta.len() {
            let name = from.text()?;
            headers.push(name, Bytes::copy_from_slice(from.bytes()?));
        }
        message.headers = headers;
    }
    (from.at == meta.len()).then_some(message)
}

/// The message of an entry, from its fields and, for entries of other programs, its id.
pub(crate) fn from_fields(fields: Fields, id: (u64, u64)) -> Message {
    let mut fields = match fields {
        Fields::Ours { meta, payload } => {
            let plain = payload.is_none() && meta.as_ref() == PLAIN;
            let read = if plain { from_plain(&[]) } else { decode(&meta) };
            if let Some(mut message) = read {
                message.payload = payload;
                return message;
            }
            let name = |name: &'static str| Bytes::from_static(name.as_bytes());
            let mut fields = vec![(name(META), meta)];
            fields.extend(payload.map(|payload| (name(PAYLOAD), payload)));
            fields
        }
        Fields::Other(fields) => fields,
    };
    match fields.first() {
        Some((name, meta)) if name.as_ref() == META.as_bytes() => {
            if meta.as_ref() == PLAIN
                && let Some(message) = from_plain(&fields[1..])
            {
                return message;
            }
        }
        // The name that the plain form gives to the payload, alone: as it is.
        Some((name, _)) if fields.len() == 1 && name.as_ref() == b"payload" => {
            let mut message = Message::new(std::mem::take(&mut fields[0].1));
            message.id = MessageId::text(format!("{}-{}", id.0, id.1));
            message.timestamp = from_millis(id.0);
            return message;
        }
        _ => {}
    }
    foreign(&fields, id)
}

/// The plain form: fields and values.
pub(crate) fn to_plain(message: &Message) -> Vec<(Bytes, Bytes)> {
    let field = |name: &'static str, value: Bytes| (Bytes::from_static(name.as_bytes()), value);
    let mut fields = vec![field(META, Bytes::from_static(PLAIN)), field("id", message.id.to_string().into())];
    if let Some(at) = message.timestamp {
        fields.push(field("ts", millis(at).to_string().into()));
    }
    if let Some(content) = &message.content_type {
        fields.push(field("type", Bytes::copy_from_slice(content.as_str().as_bytes())));
    }
    if let Some(key) = &message.key {
        fields.push(field("key", key.clone()));
    }
    for (name, value) in message.headers.iter() {
        fields.push((format!("h:{name}").into(), value.clone()));
    }
    if let Some(payload) = &message.payload {
        fields.push(field("payload", payload.clone()));
    }
    fields
}

fn from_plain(fields: &[(Bytes, Bytes)]) -> Option<Message> {
    let mut message = Message::default();
    for (name, value) in fields {
        match name.as_ref() {
            b"id" => message.id = MessageId::text(std::str::from_utf8(value).ok()?),
            b"ts" => message.timestamp = from_millis(std::str::from_utf8(value).ok()?.parse().ok()?),
            b"type" => message.content_type = Some(std::str::from_utf8(value).ok()?.into()),
            b"key" => message.key = Some(value.clone()),
            b"payload" => message.payload = Some(value.clone()),
            other => {
                let name = std::str::from_utf8(other).ok()?.strip_prefix("h:")?;
                message.headers.push(name, value.clone());
            }
        }
    }
    Some(message)
}

/// A Pub/Sub payload.
pub(crate) fn to_blob(message: &Message) -> Vec<u8> {
    let mut meta = Vec::new();
    encode(message, &mut meta);
    let payload = message.payload_bytes();
    let mut out = Vec::with_capacity(BLOB.len() + meta.len() + payload.len() + 8);
    out.extend_from_slice(BLOB);
    put_bytes(&mut out, &meta);
    if message.payload.is_some() {
        out.push(1);
        out.extend_from_slice(payload);
    }
    out
}

/// The message of a Pub/Sub payload; what other programs published is the payload as it is.
pub(crate) fn from_blob(blob: Bytes) -> Message {
    let read = || {
        let mut from = Reader { all: &blob, at: 0 };
        if from.take(BLOB.len())? != BLOB {
            return None;
        }
        let meta = from.bytes()?;
        let payload = match from.byte() {
            None => None,
            Some(1) => Some(blob.slice(from.at..)),
            Some(_) => return None,
        };
        let mut message = decode(meta)?;
        message.payload = payload;
        Some(message)
    };
    read().unwrap_or_else(|| Message::new(blob.clone()))
}

#[cfg(test)]
mod tests {
    use super::{decode, encode, from_blob, from_fields, to_blob, to_plain};
    use crate::answer::{Fields, fields};
    use bytes::Bytes;
    use mq_api::{ContentType, Message, MessageId};
    use redis::Value;
    use std::time::{Duration, SystemTime};

    fn samples() -> Vec<Message> {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        vec![
            Message::new("x"),
            Message::new(""),
            Message::tombstone("k"),
            Message::new(vec![0u8, 255, 10]).key("").header("a", "1").header("b", "").header("a", vec![1u8, 200]),
            Message::new("y").id("order-7").timestamp(at).content_type(ContentType::Json),
            Message::new("z").content_type("image/png").key(vec![7u8; 300]).header("ü", vec![9u8; 1000]),
        ]
    }

    fn assert_same(a: &Message, b: &Message) {
        assert_eq!((&a.id, &a.key, &a.payload, &a.headers), (&b.id, &b.key, &b.payload, &b.headers));
        assert_eq!((&a.timestamp, &a.content_type), (&b.timestamp, &b.content_type));
    }

    #[test]
    fn every_part_survives_in_all_three_forms() {
        for message in samples() {
            let mut meta = Vec::new();
            encode(&message, &mut meta);
            let ours = Fields::Ours { meta: meta.into(), payload: message.payload.clone() };
            assert_same(&message, &from_fields(ours, (1, 2)));
            assert_same(&message, &from_fields(Fields::Other(to_plain(&message)), (1, 2)));
            assert_same(&message, &from_blob(to_blob(&message).into()));
        }
    }

    #[test]
    fn fields_may_come_as_a_list_or_as_a_map() {
        let mut meta = Vec::new();
        let message = Message::new("x").key("k");
        encode(&message, &mut meta);
        let text = |bytes: &[u8]| Value::BulkString(bytes.to_vec());
        let (meta, payload) = ((text(b"mq"), text(&meta)), (text(b"p"), text(b"x")));
        let list = [&meta.0, &meta.1, &payload.0, &payload.1].map(Clone::clone).to_vec();
        for reply in [Value::Array(list), Value::Map(vec![meta, payload])] {
            assert_same(&message, &from_fields(fields(reply).unwrap(), (1, 2)));
        }
    }

    #[test]
    fn cut_and_damaged_fields_are_of_another_program() {
        for message in samples() {
            let mut meta = Vec::new();
            encode(&message, &mut meta);
            for end in 0..meta.len() {
                let cut = Bytes::copy_from_slice(&meta[..end]);
                // Cut between two headers it is a valid field with fewer headers; anywhere else it is refused.
                if let Some(read) = decode(&cut) {
                    assert!(read.headers.len() < message.headers.len());
                }
            }
        }
        let blob = Bytes::from_static(b"mq1\x05ab");
        assert_eq!(from_blob(blob.clone()).payload, Some(blob), "as it is");
    }

    #[test]
    fn fields_of_other_programs_are_a_json_object() {
        let field = |n: &'static str, v: &'static [u8]| (Bytes::from_static(n.as_bytes()), Bytes::from_static(v));
        let fields = vec![field("a", b"1"), field("b", b"x"), field("a", b"2"), field("c", b"\xff\x00")];
        let message = from_fields(Fields::Other(fields), (1700, 3));
        assert_eq!(message.payload_bytes(), br#"{"a":["1","2"],"b":"x","c":{"$base64":"/wA="}}"#);
        assert_eq!(message.id, MessageId::text("1700-3"));
    }
}
