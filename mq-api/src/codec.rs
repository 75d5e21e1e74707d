use crate::{ContentType, Error, ErrorKind, Result};
use bytes::Bytes;

/// Writes values as payloads.
pub trait Encode<T: ?Sized> {
    /// The payload; `None` is a tombstone.
    ///
    /// # Errors
    /// [`ErrorKind::Encode`].
    fn encode(&self, value: &T) -> Result<Option<Bytes>>;

    /// What the payload is.
    fn content_type(&self) -> Option<ContentType> {
        None
    }
}

/// Reads payloads as values.
pub trait Decode<T> {
    /// The value. `payload` is `None` for a tombstone.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`]; the typed layer then dead-letters the message as undecodable.
    fn decode(&self, payload: Option<&Bytes>) -> Result<T>;
}

/// JSON by `serde_json`. A tombstone reads as `null`, so `Option<T>` gives `None`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Json;

impl<T: serde::Serialize + ?Sized> Encode<T> for Json {
    fn encode(&self, value: &T) -> Result<Option<Bytes>> {
        match serde_json::to_vec(value) {
            Ok(payload) => Ok(Some(payload.into())),
            Err(e) => Err(Error::new(ErrorKind::Encode, "the value cannot be written as JSON").with_source(e)),
        }
    }

    fn content_type(&self) -> Option<ContentType> {
        Some(ContentType::Json)
    }
}

impl<T: serde::de::DeserializeOwned> Decode<T> for Json {
    #[inline]
    fn decode(&self, payload: Option<&Bytes>) -> Result<T> {
        serde_json::from_slice(payload.map_or(&b"null"[..], |p| p)).map_err(|e| not_json(e, payload.is_none()))
    }
}

#[cold]
fn not_json(e: serde_json::Error, tombstone: bool) -> Error {
    let text = match tombstone {
        true => "a tombstone (no payload) cannot be read as this type; ask for Option<T>".to_owned(),
        false => format!("the payload is not the JSON of this type: {e}"),
    };
    Error::new(ErrorKind::Decode, text).with_source(e)
}

/// The bytes themselves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Raw;

impl Encode<Bytes> for Raw {
    fn encode(&self, value: &Bytes) -> Result<Option<Bytes>> {
        Ok(Some(value.clone()))
    }
}

impl Decode<Bytes> for Raw {
    fn decode(&self, payload: Option<&Bytes>) -> Result<Bytes> {
        Ok(payload.cloned().unwrap_or_default())
    }
}

impl Decode<Option<Bytes>> for Raw {
    fn decode(&self, payload: Option<&Bytes>) -> Result<Option<Bytes>> {
        Ok(payload.cloned())
    }
}
