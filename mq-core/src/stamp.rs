//! What every producer does to a message before it leaves: checks and stamps.

use bytes::Bytes;
use mq_api::{Error, ErrorKind, Message, MessageId, Outcome, ProducerSpec};
use std::sync::Arc;
use std::time::SystemTime;

/// Checks size and headers, gives it an id and a timestamp if it has none; says its size.
///
/// # Errors
/// [`ErrorKind::TooLarge`] or [`ErrorKind::InvalidName`], not sent.
//
// Nothing that is called here gets the address of the message, only what it points to: the compiler then knows that the
// message stands still while it is moved to its place, and moves it once.
#[inline(always)]
pub fn stamp(message: &mut Message, spec: &ProducerSpec, now: impl FnOnce() -> SystemTime) -> Result<u32, Error> {
    let size = message.size();
    // Headers are rare; their check is out of the way.
    if size > spec.max_message || !message.headers.is_empty() {
        check(message.headers.as_slice(), size, spec)?;
    }
    if message.id.is_nil() {
        message.id = identify();
    }
    if message.timestamp.is_none() {
        message.timestamp = Some(now());
    }
    Ok(size as u32)
}

/// Rare: messages have an id from the moment they are made.
#[cold]
#[inline(never)]
fn identify() -> MessageId {
    MessageId::make()
}

#[cold]
#[inline(never)]
fn check(headers: &[(Arc<str>, Bytes)], size: usize, spec: &ProducerSpec) -> Result<(), Error> {
    if size > spec.max_message {
        return Err(too_large(size, spec));
    }
    check_headers(headers)
}

fn too_large(size: usize, spec: &ProducerSpec) -> Error {
    let text = format!(
        "a message of {size} bytes to '{}' is larger than max_message, {} bytes; raise it, or send a reference to the data",
        spec.topic, spec.max_message
    );
    Error::new(ErrorKind::TooLarge, text).with_outcome(Outcome::NotSent)
}

fn check_headers(headers: &[(Arc<str>, Bytes)]) -> Result<(), Error> {
    for (name, _) in headers {
        if name.is_empty() || name.chars().any(char::is_control) {
            let text = format!("header name {name:?} is not allowed: it is empty or holds a control character");
            return Err(Error::new(ErrorKind::InvalidName, text).with_outcome(Outcome::NotSent));
        }
    }
    Ok(())
}
