use crate::{
    DeadLetterPolicy, Durability, Error, Guarantee, Mode, Ordering, ProducerSpec, Result, Start, Subscription,
};
use std::fmt;
use std::time::Duration;

macro_rules! features {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Something a broker can or cannot do. The suite has a positive and a negative test for each, and the tables in the
        /// documentation are made from them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Feature { $( $(#[$doc])* $name, )* }

        impl Feature {
            /// All of them.
            pub const ALL: &'static [Feature] = &[$(Feature::$name),*];

            /// Its name in tables and errors.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}
features! {
    /// Members that divide a topic.
    Groups = "groups",
    /// Subscriptions without group.
    Broadcast = "broadcast",
    /// Ack, nack and release.
    Settlement = "settlement",
    /// Redelivery after a failure, counted.
    Retry = "retry",
    /// Redelivery after a delay.
    Delay = "delay",
    /// Dead letters with an envelope.
    DeadLetters = "dead letters",
    /// Dead letters back to their group.
    Redrive = "redrive",
    /// Looking at dead letters without taking them.
    Peek = "peek",
    /// Reading again what was handled.
    Replay = "replay",
    /// Topics of more than one partition.
    Partitions = "partitions",
    /// One at a time and in order for each key.
    PerKey = "per-key order",
    /// Numbers of waiting messages.
    Backlog = "backlog",
    /// Listing members and pending deliveries.
    Inspect = "inspect",
    /// Making and deleting topics and groups.
    Provision = "provision",
    /// Moving a group to another position.
    Reset = "reset",
}

/// How a backend does something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Support {
    /// The broker does it.
    Native,
    /// The library does it on top of the broker; the text says how.
    Emulated(&'static str),
    /// It cannot be done; the text says why, and what to use instead.
    Unsupported(&'static str),
}

impl fmt::Display for Support {
    /// For a table: `yes`, or how, or why not.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("yes"),
            Self::Emulated(how) => write!(f, "emulated: {how}"),
            Self::Unsupported(why) => write!(f, "no: {why}"),
        }
    }
}

/// Whether attempt numbers are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptCounts {
    /// Exact.
    Exact,
    /// At least this many: a crash at the wrong moment may not be counted.
    AtLeast,
}

/// What a broker can do, as data. Derived from how a backend works, its configuration and what the server said, so that
/// refusals, documentation and behaviour cannot drift apart.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The name that `cargo xtask conformance` takes: `memory`, `redis`, `redis-pubsub`, `amqp`, `amqp-classic`, `kafka`.
    pub backend: String,
    /// The server's version as it said itself, once connected.
    pub server: Option<String>,
    support: Vec<(Feature, Support)>,
    /// Level of a confirmed send.
    pub send_level: Durability,
    /// Level of a confirmed settlement.
    pub settle_level: Durability,
    /// Whether a send that no queue takes is an error (`Unroutable`); log brokers store it instead.
    pub detects_unroutable: bool,
    /// Whether messages sent before any group exists are kept.
    pub retains_without_group: bool,
    /// Whether receipts say how many received the message.
    pub counts_receivers: bool,
    /// Whether receipts carry a position.
    pub receipt_positions: bool,
    /// Attempt numbers.
    pub attempts: AttemptCounts,
    /// A dead member's deliveries reach another within this time, for a lease of the given length (`takeover_bound`).
    pub takeover: Takeover,
    /// Largest number of partitions.
    pub max_partitions: u32,
}

/// How long a takeover takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Takeover {
    /// Leases that must pass, in tenths.
    pub lease_tenths: u32,
    /// A fixed part: session time-outs, heartbeats, rebalances.
    pub fixed: Duration,
}

impl Capabilities {
    /// A backend that supports all features natively, except those changed afterwards.
    pub fn new(backend: impl Into<String>) -> Self {
        Self {
            backend: backend.into(),
            server: None,
            support: Feature::ALL.iter().map(|f| (*f, Support::Native)).collect(),
            send_level: Durability::Memory,
            settle_level: Durability::Memory,
            detects_unroutable: false,
            retains_without_group: true,
            counts_receivers: false,
            receipt_positions: true,
            attempts: AttemptCounts::Exact,
            takeover: Takeover { lease_tenths: 15, fixed: Duration::from_secs(1) },
            max_partitions: 1024,
        }
    }

    /// Changes one feature.
    pub fn with(mut self, feature: Feature, support: Support) -> Self {
        for entry in &mut self.support {
            if entry.0 == feature {
                entry.1 = support;
                break;
            }
        }
        self
    }

    /// How a feature is done.
    pub fn support(&self, feature: Feature) -> &Support {
        static MISSING: Support = Support::Unsupported("this version of the backend does not know the feature");
        self.support.iter().find(|(f, _)| *f == feature).map_or(&MISSING, |(_, s)| s)
    }

    /// Whether a feature is there.
    pub fn has(&self, feature: Feature) -> bool {
        !matches!(self.support(feature), Support::Unsupported(_))
    }

    /// `takeover_bound` for a subscription with this lease: a dead member's deliveries reach another within it.
    pub fn takeover_bound(&self, lease: Duration) -> Duration {
        (lease / 10).saturating_mul(self.takeover.lease_tenths).saturating_add(self.takeover.fixed)
    }

    /// Fails with the name of a feature that is missing, and why.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported).
    pub fn require(&self, feature: Feature) -> Result<()> {
        match self.support(feature) {
            Support::Unsupported(why) => Err(Error::unsupported(&self.backend, feature, why)),
            _ => Ok(()),
        }
    }

    fn require_level(&self, asked: Option<Durability>) -> Result<()> {
        match asked {
            Some(level) if level > self.send_level => Err(Error::unsupported(
                &self.backend,
                format_args!("durability {level}"),
                format_args!("as connected and configured it confirms at level {}", self.send_level),
            )),
            _ => Ok(()),
        }
    }

    fn require_partitions(&self, asked: Option<u32>) -> Result<()> {
        match asked {
            None | Some(1) => Ok(()),
            Some(n) if n > self.max_partitions && self.has(Feature::Partitions) => Err(Error::unsupported(
                &self.backend,
                format_args!("{n} partitions"),
                format_args!("at most {} are supported", self.max_partitions),
            )),
            Some(_) => self.require(Feature::Partitions),
        }
    }

    /// Checks everything that a subscription asks for, before the first message.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) names what is missing; [`ErrorKind::Config`](crate::ErrorKind::Config) and [`ErrorKind::InvalidName`](crate::ErrorKind::InvalidName) what is wrong.
    pub fn check(&self, sub: &Subscription) -> Result<()> {
        sub.validate()?;
        match sub.mode {
            Mode::Group(_) => {
                self.require(Feature::Groups)?;
                if sub.guarantee == Guarantee::AtLeastOnce {
                    self.require(Feature::Settlement)?;
                    self.require(Feature::Retry)?;
                    if sub.dead_letter == DeadLetterPolicy::On {
                        self.require(Feature::DeadLetters)?;
                    }
                    if sub.retry.delays.iter().any(|d| !d.is_zero()) {
                        self.require(Feature::Delay)?;
                    }
                }
            }
            Mode::Broadcast => {
                self.require(Feature::Broadcast)?;
                if sub.ordering == Ordering::PerKey {
                    return Err(Error::unsupported(
                        &self.backend,
                        "per-key order of a broadcast subscription",
                        "there is no ownership to order by; use a group",
                    ));
                }
                if sub.start != Start::Oldest && sub.start != Start::Latest {
                    return Err(Error::unsupported(
                        &self.backend,
                        "replay of a broadcast subscription",
                        "broadcast is what is sent from now on; use a group",
                    ));
                }
            }
        }
        if let Start::Replay(_) = sub.start {
            self.require(Feature::Replay)?;
        }
        if sub.ordering == Ordering::PerKey {
            self.require(Feature::PerKey)?;
        }
        self.require_partitions(sub.partitions)?;
        self.require_level(sub.require_durability)
    }

    /// Checks everything that a producer asks for.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_producer(&self, spec: &ProducerSpec) -> Result<()> {
        spec.validate()?;
        if !spec.groups.is_empty() {
            self.require(Feature::Groups)?;
        }
        self.require_partitions(spec.partitions)?;
        self.require_level(spec.require_durability)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
