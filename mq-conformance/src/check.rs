//! How a test fails: by returning what it found, never by a panic.

use std::fmt;
use std::panic::Location;

/// What a test found to be broken.
#[derive(Debug, Clone)]
pub struct TestFailure {
    text: String,
    at: &'static Location<'static>,
}

/// The result of a test and of its steps.
pub type Check<T = ()> = Result<T, TestFailure>;

impl TestFailure {
    /// A failure found at the caller's line.
    #[track_caller]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), at: Location::caller() }
    }

    /// What was found.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for TestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at {}:{})", self.text, self.at.file(), self.at.line())
    }
}

impl std::error::Error for TestFailure {}

impl From<mq_api::Error> for TestFailure {
    #[track_caller]
    fn from(error: mq_api::Error) -> Self {
        Self::new(format!("a call that has to succeed failed: {error} [{:?}]", error.kind()))
    }
}

/// Adds what was being done to an error of the library.
pub trait Doing<T> {
    /// Turns an error into a failure that says what was being done.
    ///
    /// # Errors
    /// The error, as a failure.
    fn doing(self, what: impl fmt::Display) -> Check<T>;
}

impl<T, E: fmt::Debug> Doing<T> for Result<T, E> {
    #[track_caller]
    fn doing(self, what: impl fmt::Display) -> Check<T> {
        // A closure would hide the caller's line.
        match self {
            Ok(value) => Ok(value),
            Err(error) => Err(TestFailure::new(format!("{what}: {error:?}"))),
        }
    }
}

/// Fails the test unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::TestFailure::new(format!($($text)+)));
        }
    };
}

/// Fails the test unless both are equal; prints both.
#[macro_export]
macro_rules! ensure_eq {
    ($found:expr, $wanted:expr, $($text:tt)+) => {
        // A `match` keeps what the expressions borrow from alive.
        match (&$found, &$wanted) {
            (found, wanted) => {
                if found != wanted {
                    return Err($crate::TestFailure::new(format!(
                        "{}: found {found:?}, wanted {wanted:?}", format_args!($($text)+)
                    )));
                }
            }
        }
    };
}
