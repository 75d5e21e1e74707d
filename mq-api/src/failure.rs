use crate::{Class, Error};
use std::fmt;

/// Any error, or text.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// Bytes of an error chain that are kept: what fits a dead-letter header on every backend.
const MAX_CHAIN: usize = 1024;

/// Text of a program as a dead-letter header has it: at most [`MAX_CHAIN`] bytes, and a mark if it was longer.
pub(crate) fn cut(text: &str) -> std::borrow::Cow<'_, str> {
    if text.len() <= MAX_CHAIN {
        return text.into();
    }
    let mut end = MAX_CHAIN;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end]).into()
}

/// Why handling a message failed, with a class that decides what happens next.
///
/// Any error becomes one of class [`Class::Failed`]: redelivered after a back-off. Two wrappers say more, and may be
/// returned from a handler like any error:
///
/// ```
/// # use mq_api::{Class, Failure};
/// let never = Failure::permanent("no such customer");       // dead-lettered now
/// let later = Failure::transient("the database is down");   // not counted; the subscription pauses
/// assert_eq!((never.class(), later.class()), (Class::Permanent, Class::Transient));
/// ```
///
/// # Which error type a handler returns
/// With [`BoxError`] (or `anyhow::Error`) `?` takes every error, this one too, and the class is found again:
///
/// ```
/// # use mq_api::{BoxError, Failure};
/// async fn handle(path: &str) -> Result<(), BoxError> {
///     let total: u64 = std::fs::read_to_string(path)?.trim().parse()?;
///     if total == 0 {
///         return Err(Failure::permanent("an order of nothing").into());
///     }
///     Ok(())
/// }
/// # let _ = handle;
/// ```
///
/// With `Failure` itself `?` takes this library's [`Error`], [`BoxError`], text, and the errors of the standard library and
/// `serde_json` that are listed below; any other by `map_err(Failure::failed)`. It cannot take all of them: this is an error
/// itself, so that `anyhow` and `BoxError` take it, and Rust allows a conversion from every error only to a type that is none.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure {
    class: Class,
    chain: Box<str>,
}

impl Failure {
    /// Another try may succeed.
    pub fn failed(error: impl Into<BoxError>) -> Self {
        Self::with_class(Class::Failed, error.into())
    }

    /// No other try can succeed: dead-letter it now.
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Self::with_class(Class::Permanent, error.into())
    }

    /// Something that this program depends on is down: do not count this try.
    pub fn transient(error: impl Into<BoxError>) -> Self {
        Self::with_class(Class::Transient, error.into())
    }

    /// Takes the class from a [`Failure`] anywhere in the chain, else [`Class::Failed`]. An [`Error`] of this library
    /// whose class is `Transient` (a send inside a handler while the broker is away) stays transient.
    pub fn from_error(error: BoxError) -> Self {
        let error = match error.downcast::<Failure>() {
            Ok(failure) => return *failure,
            Err(error) => error,
        };
        let mut class = Class::Failed;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&*error);
        while let Some(e) = cause {
            if let Some(failure) = e.downcast_ref::<Failure>() {
                class = failure.class;
                break;
            }
            if let Some(own) = e.downcast_ref::<Error>()
                && own.class() == Class::Transient
            {
                class = Class::Transient;
                break;
            }
            // The error that was made into one of `std::io` is not its source, but that error itself.
            let inner = e.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
            cause = inner.map(|inner| inner as _).or_else(|| e.source());
        }
        Self::with_class(class, error)
    }

    fn with_class(class: Class, error: BoxError) -> Self {
        let mut chain = error.to_string();
        let mut cause = error.source();
        while let Some(e) = cause
            && chain.len() < MAX_CHAIN
        {
            let text = e.to_string();
            // Many errors print their source themselves.
            if !chain.contains(&text) {
                chain.push_str(": ");
                chain.push_str(&text);
            }
            cause = e.source();
        }
        if chain.len() > MAX_CHAIN {
            chain = cut(&chain).into_owned();
        }
        Self { class, chain: chain.into() }
    }

    /// What happens next.
    pub fn class(&self) -> Class {
        self.class
    }

    /// The error and its causes, cut to a bound.
    pub fn chain(&self) -> &str {
        &self.chain
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.chain)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({:?})", self.class, self.chain)
    }
}

impl std::error::Error for Failure {}

macro_rules! from_errors {
    ($($error:ty,)*) => { $(
        /// As [`Failure::from_error`]: the class is found in the chain.
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::from_error(error.into())
            }
        }
    )* };
}
from_errors! {
    Error,
    BoxError,
    String,
    &str,
    std::io::Error,
    fmt::Error,
    std::str::Utf8Error,
    std::string::FromUtf8Error,
    std::str::ParseBoolError,
    std::num::ParseIntError,
    std::num::ParseFloatError,
    std::num::TryFromIntError,
    std::time::SystemTimeError,
    serde_json::Error,
}

#[cfg(test)]
mod tests {
    use super::Failure;
    use crate::{Class, Error, ErrorKind};

    #[test]
    fn the_class_is_found_in_the_chain() {
        let inner = Failure::permanent("no such card");
        let outer = Error::new(ErrorKind::Other, "charging").with_source(inner);
        assert_eq!(Failure::from_error(outer.into()).class(), Class::Permanent);
        assert_eq!(Failure::from_error("text".into()).class(), Class::Failed);
        let away = Error::new(ErrorKind::Unavailable, "broker away");
        assert_eq!(Failure::from_error(away.into()).class(), Class::Transient);
        let large = Error::new(ErrorKind::TooLarge, "too large");
        assert_eq!(Failure::from_error(large.into()).class(), Class::Failed);
    }

    #[test]
    fn a_question_mark_keeps_the_class() {
        fn handle(how: u32) -> Result<(), Failure> {
            match how {
                0 => Err(Error::new(ErrorKind::Unavailable, "broker away"))?,
                1 => Err(crate::BoxError::from(Failure::permanent("no such card")))?,
                2 => drop("x".parse::<u64>()?),
                3 => Err(std::io::Error::other(Failure::transient("disk")))?,
                _ => Err("text")?,
            }
            Ok(())
        }
        let classes: Vec<Class> = (0..5).map(|how| handle(how).unwrap_err().class()).collect();
        assert_eq!(classes, [Class::Transient, Class::Permanent, Class::Failed, Class::Transient, Class::Failed]);
    }

    #[test]
    fn the_chain_is_bounded_on_a_character() {
        let failure = Failure::failed("ä".repeat(5000));
        assert!(failure.chain().len() <= super::MAX_CHAIN + 4 && failure.chain().ends_with('…'));
    }
}
