use super::{Outcome, Request};
use bytes::Bytes;
use mq_api::{Headers, Lost, Message, MessageId, Position, Source};
use serde::de::DeserializeOwned;

/// What an argument of a handler can be.
///
/// Implement it to take something of your own from a message; a message that does not have it is settled by the
/// [`Outcome`] returned, without the handler being called.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be taken from a delivery with a worker state of `{S}`",
    label = "not an extractor",
    note = "extractors: `Json<T>` (T: Deserialize), `Payload`, `Key`, `Headers`, `Attempt`, `Source`, `MessageId`, `Message`, `State<T>`",
    note = "`State<T>` needs `.state(value)` before `.route(..)`, where `T` is the type of `value` or implements `FromRef` of it",
    note = "or implement `anymq::worker::FromDelivery<S>` for your own type"
)]
pub trait FromDelivery<S>: Sized {
    /// Takes it, or says what becomes of the message.
    ///
    /// # Errors
    /// The outcome the message gets instead of being handled.
    fn from_delivery(request: &Request, state: &S) -> Result<Self, Outcome>;
}

/// The payload, read as JSON. What cannot be read is dead-lettered as `undecodable`; a tombstone reads as `null`, so
/// `Json<Option<T>>` takes tombstones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<S, T: DeserializeOwned> FromDelivery<S> for Json<T> {
    #[inline]
    fn from_delivery(request: &Request, _: &S) -> Result<Self, Outcome> {
        match serde_json::from_slice(request.payload.as_deref().unwrap_or(b"null")) {
            Ok(value) => Ok(Self(value)),
            Err(error) => Err(not_json(&error, request.payload.is_none(), std::any::type_name::<T>())),
        }
    }
}

#[cold]
fn not_json(error: &serde_json::Error, tombstone: bool, wanted: &str) -> Outcome {
    Outcome::undecodable(match tombstone {
        true => format!("a tombstone (no payload) cannot be read as {wanted}; take Json<Option<T>>"),
        false => format!("the payload is not the JSON of {wanted}: {error}"),
    })
}

/// The bytes of the payload, shared, not copied. A tombstone has none and is dead-lettered; take `Option<Payload>` to
/// handle tombstones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payload(pub Bytes);

impl<S> FromDelivery<S> for Payload {
    #[inline]
    fn from_delivery(request: &Request, _: &S) -> Result<Self, Outcome> {
        match &request.payload {
            Some(payload) => Ok(Self(payload.clone())),
            None => Err(Outcome::undecodable("a tombstone has no payload; take Option<Payload>")),
        }
    }
}

impl<S> FromDelivery<S> for Option<Payload> {
    #[inline]
    fn from_delivery(request: &Request, _: &S) -> Result<Self, Outcome> {
        Ok(request.payload.clone().map(Payload))
    }
}

/// The key, if there is one; an empty key is `Some`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key(pub Option<Bytes>);

impl<S> FromDelivery<S> for Key {
    #[inline]
    fn from_delivery(request: &Request, _: &S) -> Result<Self, Outcome> {
        Ok(Self(request.key.clone()))
    }
}

/// Which hand-over this is, 1 for the first. Exact or at least, as the capabilities of the broker say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt(pub u32);

impl<S> FromDelivery<S> for Attempt {
    #[inline]
    fn from_delivery(request: &Request, _: &S) -> Result<Self, Outcome> {
        Ok(Self(request.attempt()))
    }
}

macro_rules! parts {
    ($($type:ty => |$request:ident| $take:expr;)*) => { $(
        impl<S> FromDelivery<S> for $type {
            #[inline]
            fn from_delivery($request: &Request, _: &S) -> Result<Self, Outcome> { Ok($take) }
        }
    )* };
}
parts! {
    Headers => |request| request.headers.clone();
    MessageId => |request| request.id.clone();
    Message => |request| request.message().clone();
    Source => |request| request.source().clone();
    Position => |request| request.position();
    Request => |request| request.clone();
    Option<Lost> => |request| request.lost();
    () => |_request| ();
}

/// Something of the worker's state: the state itself, or any part of it by [`FromRef`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State<T>(pub T);

impl<S, T: FromRef<S>> FromDelivery<S> for State<T> {
    #[inline]
    fn from_delivery(_: &Request, state: &S) -> Result<Self, Outcome> {
        Ok(Self(T::from_ref(state)))
    }
}

/// A part of a worker's state. Every `Clone` type is a part of itself.
///
/// ```
/// # use anymq::worker::FromRef;
/// # #[derive(Clone)] struct Db; #[derive(Clone)] struct Mail;
/// #[derive(Clone)]
/// struct App { db: Db, mail: Mail }
///
/// impl FromRef<App> for Db {
///     fn from_ref(app: &App) -> Db { app.db.clone() }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`State<{Self}>`: `{Self}` is not part of the worker's state, which is `{S}`",
    note = "give it with `.state(value)` before `.route(..)`; the state must be `Clone` (wrap it in `Arc` if it is not)",
    note = "for a part of a larger state: `impl FromRef<{S}> for {Self}`"
)]
pub trait FromRef<S> {
    /// The part.
    fn from_ref(state: &S) -> Self;
}

impl<T: Clone> FromRef<T> for T {
    #[inline]
    fn from_ref(state: &T) -> T {
        state.clone()
    }
}

macro_rules! tuples {
    ($(($($name:ident),+);)*) => { $(
        impl<State, $($name: FromDelivery<State>),+> FromDelivery<State> for ($($name,)+) {
            #[inline]
            fn from_delivery(request: &Request, state: &State) -> Result<Self, Outcome> {
                Ok(($($name::from_delivery(request, state)?,)+))
            }
        }
    )* };
}
tuples! { (A); (A, B); (A, B, C); (A, B, C, D); }
