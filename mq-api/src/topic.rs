use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;

/// Longest topic name, in bytes: leaves room for `..group..dlq` within Kafka's limit of 249.
const MAX_TOPIC: usize = 100;
/// Longest group name, in bytes.
const MAX_GROUP: usize = 60;

/// The name of a topic.
///
/// Plain names match `[A-Za-z0-9._-]`, at most 100 bytes, without a leading or trailing dot and without `..`, which is kept
/// for made names: `Topic::dead_letters("orders", "billing")` is `orders..billing..dlq`, and no two pairs share one.
/// Streams, queues and topics that exist already are taken as they are by [`Topic::native`].
///
/// A name is checked when it is used (`producer`, `subscribe`) or by [`Topic::validate`].
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Topic {
    kind: Kind,
    name: Arc<str>,
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Plain,
    Native,
    DeadLetters(Arc<(Topic, Group)>),
}

impl Topic {
    /// A plain topic. The name is checked when it is used.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self { kind: Kind::Plain, name: name.into() }
    }

    /// A stream, queue or topic of some other program, by the name that the broker knows it by.
    pub fn native(name: impl Into<Arc<str>>) -> Self {
        Self { kind: Kind::Native, name: name.into() }
    }

    /// The dead letters of a group of a topic.
    pub fn dead_letters(topic: impl Into<Topic>, group: impl Into<Group>) -> Self {
        let (topic, group) = (topic.into(), group.into());
        let name = format!("{}..{}..dlq", topic.name, group.as_str()).into();
        Self { kind: Kind::DeadLetters(Arc::new((topic, group))), name }
    }

    /// The canonical name. A backend may spell it its own way.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// The canonical name, shared.
    pub fn shared_name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// Whether this is a name of some other program's.
    pub fn is_native(&self) -> bool {
        matches!(self.kind, Kind::Native)
    }

    /// The topic and group whose dead letters these are.
    pub fn dead_letters_of(&self) -> Option<(&Topic, &Group)> {
        match &self.kind {
            Kind::DeadLetters(of) => Some((&of.0, &of.1)),
            _ => None,
        }
    }

    /// Checks the name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] that says what is wrong with it.
    pub fn validate(&self) -> Result<()> {
        match &self.kind {
            Kind::Plain => check("topic", &self.name, MAX_TOPIC),
            Kind::Native if self.name.is_empty() => {
                Err(Error::new(ErrorKind::InvalidName, "a native topic name must not be empty"))
            }
            Kind::Native => Ok(()),
            Kind::DeadLetters(of) => of.0.validate().and_then(|()| of.1.validate()),
        }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Native => write!(f, "native({:?})", self.name),
            _ => write!(f, "{:?}", self.name),
        }
    }
}

/// The name of a group: its members divide a topic among themselves.
///
/// Same characters as a topic's name, at most 60 bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group(Arc<str>);

impl Group {
    /// The name is checked when it is used.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Checks the name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] that says what is wrong with it.
    pub fn validate(&self) -> Result<()> {
        check("group", &self.0, MAX_GROUP)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

macro_rules! from_text {
    ($($name:ident),*) => { $(
        impl From<&str> for $name { fn from(name: &str) -> Self { Self::new(name) } }
        impl From<String> for $name { fn from(name: String) -> Self { Self::new(name) } }
        impl From<&String> for $name { fn from(name: &String) -> Self { Self::new(name.as_str()) } }
        impl From<&$name> for $name { fn from(name: &$name) -> Self { name.clone() } }
    )* };
}
from_text!(Topic, Group);

fn check(what: &str, name: &str, max: usize) -> Result<()> {
    let wrong = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > max {
        format!("it has {} bytes, at most {max} are allowed", name.len())
    } else if let Some(c) = name.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
        format!("it holds {c:?}; allowed are letters, digits, '.', '_' and '-'")
    } else if name.starts_with('.') || name.ends_with('.') {
        "it starts or ends with a dot".to_owned()
    } else if name.contains("..") {
        "it holds '..', which is kept for names that the library makes (see Topic::dead_letters)".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidName, format!("{what} name {name:?} is not allowed: {wrong}")))
}

#[cfg(test)]
mod tests {
    use super::{Group, Topic};

    #[test]
    fn names_are_checked() {
        for good in ["orders", "a.b-c_9", "x"] {
            assert!(Topic::new(good).validate().is_ok(), "{good}");
        }
        let long = "x".repeat(101);
        for bad in ["", ".a", "a.", "a..b", "a b", "a/b", "ä", long.as_str()] {
            assert!(Topic::new(bad).validate().is_err(), "{bad}");
        }
        assert!(Group::new("x".repeat(60)).validate().is_ok() && Group::new("x".repeat(61)).validate().is_err());
        assert!(Topic::native("any thing/at all").validate().is_ok() && Topic::native("").validate().is_err());
    }

    #[test]
    fn made_names_never_meet() {
        let (a, b) = (Topic::dead_letters("a.b", "c"), Topic::dead_letters("a", "b.c"));
        assert_ne!(a.as_str(), b.as_str());
        assert_eq!(a.as_str(), "a.b..c..dlq");
    }
}
