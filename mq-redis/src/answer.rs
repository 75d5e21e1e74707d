//! Answers of the server: reading values by hand, and what its errors mean.

use crate::wire::{META, PAYLOAD};
use bytes::Bytes;
use mq_api::{Error, ErrorKind, Outcome};
use mq_core::Token;
use redis::{RedisError, Value};

/// A stream id: milliseconds and sequence.
pub(crate) type Id = (u64, u64);

/// Reads `ms-seq`.
pub(crate) fn parse_id(text: &[u8]) -> Option<Id> {
    let (mut parts, mut at) = ([0u64; 2], 0);
    for b in text {
        match b {
            b'0'..=b'9' => parts[at] = parts[at].checked_mul(10)?.checked_add(u64::from(b - b'0'))?,
            b'-' if at == 0 => at = 1,
            _ => return None,
        }
    }
    (!text.is_empty()).then_some((parts[0], parts[1]))
}

/// Writes `ms-seq`.
pub(crate) fn id_text(id: Id) -> String {
    format!("{}-{}", id.0, id.1)
}

/// Writes the id that a token stands for into `out`, without an allocation.
pub(crate) fn write_id(token: Token, out: &mut Vec<u8>) {
    fn digits(mut n: u64, out: &mut Vec<u8>) {
        let mut buffer = [0u8; 20];
        let mut at = buffer.len();
        loop {
            at -= 1;
            buffer[at] = b'0' + (n % 10) as u8;
            n /= 10;
            if n == 0 {
                break;
            }
        }
        out.extend_from_slice(&buffer[at..]);
    }
    out.clear();
    digits(token.0, out);
    out.push(b'-');
    digits(token.1, out);
}

/// The id before this one.
pub(crate) fn before(id: Id) -> Id {
    match id {
        (0, 0) => (0, 0),
        (ms, 0) => (ms - 1, u64::MAX),
        (ms, seq) => (ms, seq - 1),
    }
}

/// Text or bytes.
pub(crate) fn as_bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        Value::VerbatimString { text, .. } => Some(text.as_bytes()),
        Value::Okay => Some(b"OK"),
        _ => None,
    }
}

pub(crate) fn as_text(value: &Value) -> Option<&str> {
    as_bytes(value).and_then(|b| std::str::from_utf8(b).ok())
}

pub(crate) fn as_id(value: &Value) -> Option<Id> {
    as_bytes(value).and_then(parse_id)
}

/// A number, also when it is written as text.
pub(crate) fn as_int(value: &Value) -> Option<i64> {
    match value {
        Value::Int(n) => Some(*n),
        Value::Double(n) => Some(*n as i64),
        other => as_text(other)?.parse().ok(),
    }
}

/// A list; nil is an empty one.
pub(crate) fn list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) | Value::Set(items) => items,
        Value::Map(pairs) => pairs.into_iter().flat_map(|(k, v)| [k, v]).collect(),
        _ => Vec::new(),
    }
}

/// The value of a field in a reply of names and values.
pub(crate) fn field<'v>(reply: &'v Value, name: &str) -> Option<&'v Value> {
    let is = |key: &Value| as_bytes(key) == Some(name.as_bytes());
    match reply {
        Value::Map(pairs) => pairs.iter().find(|(k, _)| is(k)).map(|(_, v)| v),
        Value::Array(items) => items.chunks_exact(2).find(|pair| is(&pair[0])).map(|pair| &pair[1]),
        _ => None,
    }
}

/// The fields of an entry.
#[derive(Debug)]
pub(crate) enum Fields {
    /// What this library writes: kept apart, so that the usual entry needs no list.
    Ours { meta: Bytes, payload: Option<Bytes> },
    /// Anything else.
    Other(Vec<(Bytes, Bytes)>),
}

/// An entry of a stream: its id and fields. `None` for a deleted entry (nil, or no fields).
pub(crate) fn entry(value: Value) -> Option<(Id, Fields)> {
    let Value::Array(mut parts) = value else { return None };
    if parts.len() < 2 {
        return None;
    }
    let fields = fields(parts.swap_remove(1))?;
    Some((as_id(&parts[0])?, fields))
}

/// The fields of an entry.
pub(crate) fn fields(value: Value) -> Option<Fields> {
    let items = list(value);
    let is = |at: usize, name: &str| matches!(&items[at], Value::BulkString(bytes) if bytes == name.as_bytes());
    match items.len() {
        2 if is(0, META) => {
            let [_, meta] = <[Value; 2]>::try_from(items).ok()?;
            return Some(Fields::Ours { meta: owned(meta), payload: None });
        }
        4 if is(0, META) && is(2, PAYLOAD) => {
            let [_, meta, _, payload] = <[Value; 4]>::try_from(items).ok()?;
            return Some(Fields::Ours { meta: owned(meta), payload: Some(owned(payload)) });
        }
        _ => {}
    }
    let mut fields = Vec::with_capacity(items.len() / 2);
    let mut items = items.into_iter();
    while let (Some(name), Some(value)) = (items.next(), items.next()) {
        fields.push((owned(name), owned(value)));
    }
    (!fields.is_empty()).then_some(Fields::Other(fields))
}

fn owned(value: Value) -> Bytes {
    match value {
        Value::BulkString(bytes) => bytes.into(),
        Value::SimpleString(text) => text.into(),
        Value::Int(n) => n.to_string().into(),
        _ => Bytes::new(),
    }
}

/// An error value inside a reply becomes the error of it.
pub(crate) fn checked(value: Value) -> Result<Value, RedisError> {
    match value {
        Value::ServerError(error) => Err(error.into()),
        other => Ok(other),
    }
}

/// Whether the connection, the server's role or its state is to blame, so that the session must be made anew.
pub(crate) fn ends_session(error: &RedisError) -> bool {
    match error.code() {
        Some(code) => matches!(
            code,
            "LOADING" | "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "MOVED" | "ASK" | "NOAUTH" | "BUSY"
        ),
        None => true,
    }
}

/// What an error of the server or the connection means, and what to do about it.
pub(crate) fn failure(error: RedisError, doing: &str) -> Error {
    use ErrorKind as K;
    let shown = error.to_string();
    let says = |kind, advice: &str| {
        let advice = if advice.is_empty() { String::new() } else { format!("; {advice}") };
        Error::new(kind, format!("{doing}: Redis says: {shown}{advice}"))
    };
    let result = match error.code() {
        Some("WRONGPASS" | "NOAUTH") => says(K::Auth, "check user and password of the URL"),
        Some("NOPERM") => says(K::Permission, "grant this user the command and the keys ({topic}* with its made keys)"),
        Some("WRONGTYPE") => says(K::Topology, "the key of this name is no stream; use another topic name"),
        Some("OOM") => says(K::Full, "raise maxmemory, or let groups handle what waits"),
        Some("NOGROUP" | "UNBLOCKED") => says(K::NotFound, "the group or stream was deleted, or evicted"),
        Some("LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY" | "MISCONF" | "NOREPLICAS") => {
            says(K::Unavailable, "")
        }
        Some("READONLY") => says(K::Unavailable, "this is a replica; its master is looked for again"),
        Some("MOVED" | "ASK") => says(K::Unavailable, "the topic moved to another node"),
        Some(_) => says(K::Other, ""),
        None if error.kind() == redis::ErrorKind::AuthenticationFailed => {
            says(K::Auth, "check user and password of the URL")
        }
        None if error.is_timeout() => Error::new(K::Timeout, format!("{doing}: no answer in time: {shown}")),
        None if is_tls(&error) => Error::new(
            K::Tls,
            format!("{doing}: TLS failed: {shown}; check ca, cert, key and the host name of the URL"),
        ),
        None if error.kind() == redis::ErrorKind::InvalidClientConfig => {
            Error::new(K::Config, format!("{doing}: {shown}"))
        }
        None if error.is_connection_refusal() => Error::new(
            K::Unavailable,
            format!("{doing}: the server cannot be reached: {shown}; is it running, and host and port right?"),
        ),
        None => Error::new(K::Disconnected, format!("{doing}: the connection was lost: {shown}")),
    };
    result.with_source(error)
}

fn is_tls(error: &RedisError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(e) = cause {
        let io = e.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if e.is::<rustls::Error>() || io.is_some_and(|inner| inner.is::<rustls::Error>()) {
            return true;
        }
        cause = e.source();
    }
    let text = error.to_string();
    ["certificate", "CertNotValid", "HandshakeFailure", "received fatal alert", "corrupt message"]
        .iter()
        .any(|word| text.contains(word))
}

/// The outcome of one send that the server answered with an error.
pub(crate) fn refused(error: RedisError) -> Error {
    let outcome = match error.code() {
        // The server would not look at it: nothing was stored, and another try may succeed.
        Some("LOADING" | "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "MOVED" | "ASK" | "BUSY")
        | Some("MISCONF" | "NOREPLICAS") => Outcome::NotSent,
        Some(_) => Outcome::Rejected,
        None => Outcome::Unknown,
    };
    failure(error, "sending").with_outcome(outcome)
}

#[cfg(test)]
mod tests {
    use super::{before, id_text, parse_id, write_id};
    use mq_core::Token;

    #[test]
    fn ids_are_read_and_written() {
        for id in [(0, 0), (1_700_000_000_000, 12), (u64::MAX, u64::MAX)] {
            let text = id_text(id);
            assert_eq!(parse_id(text.as_bytes()), Some(id));
            let mut out = Vec::new();
            write_id(Token(id.0, id.1), &mut out);
            assert_eq!(out, text.as_bytes());
        }
        assert_eq!((parse_id(b""), parse_id(b"a-1"), parse_id(b"1-2-3")), (None, None, None));
        assert_eq!((before((5, 0)), before((5, 3))), ((4, u64::MAX), (5, 2)));
    }
}
