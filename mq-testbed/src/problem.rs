//! The one error of this crate: a sentence that names the likely cause and what to do.

use std::fmt;

/// Why something could not be done, in words for the person who ran it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem(String);

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Problem>;

impl Problem {
    /// A problem with the words given.
    pub fn new(words: impl Into<String>) -> Self {
        Self(words.into())
    }

    /// For `map_err`: what was being done, then what the system said.
    pub fn during<E: fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |said| Self(format!("{what}: {said}"))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Problem {}

impl From<Problem> for String {
    fn from(problem: Problem) -> Self {
        problem.0
    }
}
