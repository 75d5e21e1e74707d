//! The command that one message becomes: its form, and what the commands of a pipeline begin with.

use crate::resp::{put_arg, put_head};
use crate::room::Room;
use crate::topology::Keep;
use crate::wire;
use mq_api::{Error, ErrorKind, Message, ProducerSpec, Result};

/// What a producer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Two fields.
    Packed,
    /// One field per part, for other programs.
    Plain,
    /// A Pub/Sub payload.
    Blob,
    /// A Pub/Sub payload without this library's parts.
    Raw,
}

impl Form {
    /// As the producer's native options ask.
    pub(crate) fn of(spec: &ProducerSpec, pubsub: bool) -> Result<Self> {
        let mut form = if pubsub { Self::Blob } else { Self::Packed };
        for (name, value) in &spec.native {
            form = match (name.as_str(), value.as_str(), pubsub) {
                ("fields", "packed", _) => form,
                ("fields", "plain", false) => Self::Plain,
                ("fields", "plain", true) => Self::Raw,
                ("fields", other, _) => {
                    let text = format!("fields={other}: a producer on redis takes packed or plain");
                    return Err(Error::new(ErrorKind::Config, text));
                }
                (other, ..) => {
                    let text = format!("option '{other}' is not known to a producer on redis; it takes fields");
                    return Err(Error::new(ErrorKind::Config, text));
                }
            };
        }
        Ok(form)
    }

    /// Whether it is published on a channel.
    pub(crate) const fn is_published(self) -> bool {
        matches!(self, Self::Blob | Self::Raw)
    }
}

/// What every command of a pipeline begins with.
pub(crate) struct Beginning {
    form: Form,
    arguments: usize,
    bytes: Vec<u8>,
}

impl Beginning {
    /// Of commands on `key`; `make` if a stream that is not there is made.
    pub(crate) fn new(form: Form, key: &str, make: bool, room: &Room) -> Self {
        let mut bytes = Vec::with_capacity(key.len() + 64);
        let mut arguments = 0;
        let mut arg = |arg: &str| {
            put_arg(arg.as_bytes(), &mut bytes);
            arguments += 1;
        };
        if form.is_published() {
            arg("PUBLISH");
            arg(key);
            return Self { form, arguments, bytes };
        }
        arg("XADD");
        arg(key);
        if !make {
            arg("NOMKSTREAM");
        }
        match room.keep {
            Keep::Log { max: Some(max), .. } => {
                // Whole blocks are cheap to remove; a small bound is meant exactly.
                let how = if max < 1000 { "=" } else { "~" };
                ["MAXLEN", how, &max.to_string()].iter().for_each(|part| arg(part));
            }
            _ => {
                if let Some(oldest) = room.oldest() {
                    ["MINID", "~", &oldest.to_string()].iter().for_each(|part| arg(part));
                }
            }
        }
        arg("*");
        Self { form, arguments, bytes }
    }

    /// Writes the command of `message`; `meta` is scratch space.
    pub(crate) fn write(&self, message: &Message, meta: &mut Vec<u8>, out: &mut Vec<u8>) {
        let begin = |more: usize, out: &mut Vec<u8>| {
            put_head(b'*', self.arguments + more, out);
            out.extend_from_slice(&self.bytes);
        };
        match self.form {
            Form::Blob => {
                begin(1, out);
                put_arg(&wire::to_blob(message), out);
            }
            Form::Raw => {
                begin(1, out);
                put_arg(message.payload_bytes(), out);
            }
            Form::Plain => {
                let fields = wire::to_plain(message);
                begin(2 * fields.len(), out);
                for (name, value) in fields {
                    put_arg(&name, out);
                    put_arg(&value, out);
                }
            }
            Form::Packed => {
                begin(if message.payload.is_some() { 4 } else { 2 }, out);
                put_arg(wire::META.as_bytes(), out);
                wire::encode(message, meta);
                put_arg(meta, out);
                if let Some(payload) = &message.payload {
                    put_arg(wire::PAYLOAD.as_bytes(), out);
                    put_arg(payload, out);
                }
            }
        }
    }
}
