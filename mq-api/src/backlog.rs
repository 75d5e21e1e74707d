use std::fmt;

/// A number that is never wrong: exact, bounded on one side, or unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Count {
    /// This many.
    Exact(u64),
    /// This many or fewer.
    AtMost(u64),
    /// This many or more.
    AtLeast(u64),
    /// The broker does not say.
    #[default]
    Unknown,
}

impl Count {
    /// The number, if it is exact.
    pub fn exact(self) -> Option<u64> {
        match self {
            Self::Exact(n) => Some(n),
            _ => None,
        }
    }

    /// Whether `n` is possible. `admits(0)` is not "is zero": a bound like "at most 300" admits it too; see [`exact`](Self::exact).
    pub fn admits(self, n: u64) -> bool {
        match self {
            Self::Exact(x) => n == x,
            Self::AtMost(x) => n <= x,
            Self::AtLeast(x) => n >= x,
            Self::Unknown => true,
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(n) => write!(f, "{n}"),
            Self::AtMost(n) => write!(f, "≤{n}"),
            Self::AtLeast(n) => write!(f, "≥{n}"),
            Self::Unknown => f.write_str("?"),
        }
    }
}

/// What a group still has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Backlog {
    /// Due and in nobody's hands: the one portable number.
    pub ready: Count,
    /// Handed out and unsettled.
    pub in_flight: Count,
    /// Waiting for their time.
    pub delayed: Count,
    /// In the group's dead letters.
    pub dead: Count,
}
