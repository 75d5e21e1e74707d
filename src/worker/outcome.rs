use mq_api::{BoxError, Disposition, Failure, Reason};
use std::time::Duration;

/// What a handler decided about its message.
///
/// Most handlers return `()` or `Result<(), E>` and never name this; return it to say more than "done" and "failed".
///
/// ```
/// # use anymq::worker::Outcome;
/// # use std::time::Duration;
/// async fn handle(anymq::worker::Attempt(attempt): anymq::worker::Attempt) -> Outcome {
///     match attempt {
///         1 => Outcome::retry_after(Duration::from_secs(30), "not ready yet"),
///         2 => Outcome::Release,
///         _ => Outcome::dead_letter("gave up"),
///     }
/// }
/// # anymq::worker::handler::check::<(anymq::worker::Attempt,), (), _>(&handle);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// Done.
    Ack,
    /// It failed. The class of the failure decides: tried again after the back-off (default), dead-lettered now
    /// (permanent), tried again uncounted while the subscription pauses (transient).
    Nack {
        /// Why.
        failure: Box<Failure>,
        /// When to try again at the earliest, instead of the back-off of the retry policy.
        after: Option<Duration>,
    },
    /// To the dead letters now.
    DeadLetter {
        /// Why.
        reason: Reason,
        /// The error, for the envelope.
        error: Option<Box<Failure>>,
    },
    /// Not tried: back at once, not counted.
    Release,
}

impl Outcome {
    /// It failed; the class is taken from the error (see [`Failure`]).
    #[cold]
    pub fn failed(error: impl Into<BoxError>) -> Self {
        Self::Nack { failure: Box::new(Failure::from_error(error.into())), after: None }
    }

    /// It failed; try again after this time. Never early while this worker runs.
    #[cold]
    pub fn retry_after(after: Duration, error: impl Into<BoxError>) -> Self {
        Self::Nack { failure: Box::new(Failure::from_error(error.into())), after: Some(after) }
    }

    /// To the dead letters now, with this reason.
    #[cold]
    pub fn dead_letter(reason: impl Into<Reason>) -> Self {
        Self::DeadLetter { reason: reason.into(), error: None }
    }

    /// To the dead letters now: the payload cannot be read.
    #[cold]
    pub fn undecodable(error: impl Into<BoxError>) -> Self {
        Self::DeadLetter { reason: Reason::Undecodable, error: Some(Box::new(Failure::permanent(error))) }
    }

    /// Whether it is [`Ack`](Self::Ack).
    #[inline]
    pub fn is_ack(&self) -> bool {
        matches!(self, Self::Ack)
    }
}

impl From<Outcome> for Disposition {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Ack => Self::Ack,
            Outcome::Nack { failure, after } => Self::Nack { failure: Some(failure), after },
            Outcome::DeadLetter { reason, error } => Self::DeadLetter { reason, error },
            Outcome::Release => Self::Release,
        }
    }
}

/// What a handler may return.
///
/// | returned | settled as |
/// |---|---|
/// | `()`, `Ok(())` | ack |
/// | `Err(e)` of anything that converts to [`BoxError`]: errors, `anyhow::Error`, text | nack, class from [`Failure`] |
/// | [`Outcome`], `Ok(Outcome)` | as it says |
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot decide what happens to a message",
    label = "a handler returns an outcome, this is none",
    note = "return `()` (done), `Result<(), E>` (an error is a nack) or `anymq::Outcome`",
    note = "`E` is any `std::error::Error + Send + Sync + 'static`, `anyhow::Error`, `String` or `&str`",
    note = "a handler that computes something else ends with `;` or `.map(drop)`"
)]
pub trait IntoOutcome {
    /// The outcome.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for () {
    #[inline]
    fn into_outcome(self) -> Outcome {
        Outcome::Ack
    }
}

impl IntoOutcome for Outcome {
    #[inline]
    fn into_outcome(self) -> Outcome {
        self
    }
}

impl IntoOutcome for std::convert::Infallible {
    fn into_outcome(self) -> Outcome {
        match self {}
    }
}

impl<T: IntoOutcome, E: Into<BoxError>> IntoOutcome for Result<T, E> {
    #[inline]
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(value) => value.into_outcome(),
            Err(error) => Outcome::failed(error),
        }
    }
}
