//! Entries of other programs: their fields as a JSON object.

use crate::wire::from_millis;
use bytes::Bytes;
use mq_api::{ContentType, Message, MessageId};

/// The message of an entry of another program.
pub(crate) fn foreign(fields: &[(Bytes, Bytes)], (ms, seq): (u64, u64)) -> Message {
    let mut object = serde_json::Map::new();
    for (name, value) in fields {
        let value = match std::str::from_utf8(value) {
            Ok(text) => serde_json::Value::from(text),
            Err(_) => serde_json::json!({ "$base64": base64(value) }),
        };
        let name = String::from_utf8_lossy(name).into_owned();
        match object.get_mut(&name) {
            None => {
                object.insert(name, value);
            }
            // A field that occurs twice becomes a list.
            Some(serde_json::Value::Array(list)) => list.push(value),
            Some(first) => *first = serde_json::Value::Array(vec![first.take(), value]),
        }
    }
    let mut message = Message::new(serde_json::Value::Object(object).to_string());
    message.content_type = Some(ContentType::Json);
    message.id = MessageId::text(format!("{ms}-{seq}"));
    message.timestamp = from_millis(ms);
    message
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |w, b| w << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = (word >> (18 - 6 * i)) & 63;
            out.push(if i <= chunk.len() { char::from(DIGITS[digit as usize]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_has_its_padding() {
        assert_eq!([base64(b""), base64(b"f"), base64(b"fo"), base64(b"foo")], ["", "Zg==", "Zm8=", "Zm9v"]);
    }
}
