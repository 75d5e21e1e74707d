use std::fmt;

/// The result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. Match on [`Error::kind`]; the text is for people and names the likely cause and the fix.
///
/// One pointer in size. Holds the broker's own error as [`source`](std::error::Error::source).
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    class: Class,
    outcome: Option<Outcome>,
    context: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The kind of an [`Error`], the same on every backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A URL parameter, configuration key or value that makes no sense; the text names it.
    Config,
    /// A topic, group or header name that is not allowed.
    InvalidName,
    /// The broker cannot keep a promise that was asked for; the text names the missing feature.
    Unsupported,
    /// The crate was built without the feature of this broker; the text names it.
    NotBuilt,
    /// An existing queue, stream, topic or group differs from what was asked for, or is missing under `verify`.
    Topology,
    /// The broker refused the credentials.
    Auth,
    /// The broker refused this user the operation.
    Permission,
    /// TLS could not be agreed on: wrong certificate authority, name or expired certificate.
    Tls,
    /// The broker cannot be reached or answered that it is not ready.
    Unavailable,
    /// The time limit passed.
    Timeout,
    /// The message is larger than `max_message`.
    TooLarge,
    /// A bound of the broker or topic is reached, and it stored nothing.
    Full,
    /// No queue took the message.
    Unroutable,
    /// The broker refused the message.
    Rejected,
    /// The topic, group or entry does not exist.
    NotFound,
    /// The handle was closed, or its broker was.
    Closed,
    /// The connection was lost before the answer came.
    Disconnected,
    /// A value could not be written as a payload.
    Encode,
    /// A payload could not be read as the wanted type.
    Decode,
    /// Anything else; see the source.
    Other,
}

/// Whether trying again can help. Decides what a nack does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// This try failed; another may not. The default.
    Failed,
    /// Trying again cannot help.
    Permanent,
    /// Something this program depends on is down; it is not the message's fault.
    Transient,
}

/// What is known of a send that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// No byte was written, or the library refused it: the broker does not have it.
    NotSent,
    /// The broker refused this message and stored it nowhere.
    Rejected,
    /// It may or may not be stored: sending it again may duplicate it.
    Unknown,
}

impl ErrorKind {
    fn class(self) -> Class {
        match self {
            Self::Unavailable | Self::Timeout | Self::Disconnected | Self::Full => Class::Transient,
            Self::Other | Self::Closed => Class::Failed,
            _ => Class::Permanent,
        }
    }
}

impl Error {
    /// A new error. Its class follows from its kind.
    #[cold]
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, class: kind.class(), outcome: None, context: context.into(), source: None }))
    }

    /// The same error, of another kind; its class follows from that. For a backend that knows more than its client does.
    #[cold]
    pub fn of_kind(mut self, kind: ErrorKind) -> Self {
        (self.0.kind, self.0.class) = (kind, kind.class());
        self
    }

    /// Adds the underlying error.
    #[cold]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Sets what is known of the send.
    #[cold]
    pub fn with_outcome(mut self, outcome: Outcome) -> Self {
        self.0.outcome = Some(outcome);
        self
    }

    /// Sets the class.
    #[cold]
    pub fn with_class(mut self, class: Class) -> Self {
        self.0.class = class;
        self
    }

    /// Puts words in front of the context: what was being done.
    #[cold]
    pub fn doing(mut self, what: impl fmt::Display) -> Self {
        self.0.context = format!("{what}: {}", self.0.context);
        self
    }

    /// The kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether trying again can help.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// For a send: what is known of it.
    pub fn outcome(&self) -> Option<Outcome> {
        self.0.outcome
    }

    /// The text without the source.
    pub fn context(&self) -> &str {
        &self.0.context
    }

    /// The feature this program lacks, in the same words on every backend.
    #[cold]
    pub fn unsupported(backend: &str, feature: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Unsupported, format!("{backend} cannot do {feature}: {why}"))
    }

    /// The handle was closed.
    #[cold]
    pub fn closed(what: &str) -> Self {
        Self::new(ErrorKind::Closed, format!("{what} is closed")).with_outcome(Outcome::NotSent)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.context)?;
        if let Some(outcome) = self.0.outcome {
            f.write_str(match outcome {
                Outcome::NotSent => " (not sent)",
                Outcome::Rejected => " (rejected, stored nowhere)",
                Outcome::Unknown => " (outcome unknown)",
            })?;
        }
        Ok(())
    }
}

/// What `unwrap` and a `main` that returns an error print: kind, text and every cause below it that says something new, a line
/// each. `{:#?}` shows the fields.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return f
                .debug_struct("Error")
                .field("kind", &self.0.kind)
                .field("class", &self.0.class)
                .field("outcome", &self.0.outcome)
                .field("context", &self.0.context)
                .field("source", &self.0.source)
                .finish();
        }
        write!(f, "{:?}: {self}", self.0.kind)?;
        let mut above = self.0.context.clone();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let text = error.to_string();
            // The broker's own words are in the text already, as a rule.
            if !above.contains(&text) {
                write!(f, "\n    caused by: {text}")?;
                above = text;
            }
            cause = error.source();
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|s| s as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_main_prints_is_for_people() {
        let inner = Error::new(ErrorKind::Other, "connection refused");
        let outer = Error::new(ErrorKind::Unavailable, "redis at h:1 cannot be reached")
            .with_outcome(Outcome::NotSent)
            .with_source(inner);
        assert_eq!(
            format!("{outer:?}"),
            "Unavailable: redis at h:1 cannot be reached (not sent)\n    caused by: connection refused"
        );
        assert!(format!("{outer:#?}").contains("class: Transient"));
    }

    #[test]
    fn a_cause_whose_words_are_in_the_text_is_not_printed_again() {
        let refused = Error::new(ErrorKind::Other, "connection refused");
        let text = "redis at h:1: connection refused; is it running?";
        let error = Error::new(ErrorKind::Disconnected, text).with_source(refused).of_kind(ErrorKind::Unavailable);
        assert_eq!(format!("{error:?}"), format!("Unavailable: {text}"));
        assert_eq!(error.class(), Class::Transient);
    }
}
