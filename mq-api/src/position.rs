use std::fmt;

/// Where a message is in its topic or partition: a Kafka offset, a Redis stream id, a number in the in-memory log.
///
/// Positions of one partition are ordered. They print as the broker writes them (`17`, `1700000000000-3`), and
/// [`FromStr`](std::str::FromStr) reads that form.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The offset, or the milliseconds of a Redis stream id.
    pub major: u64,
    /// The sequence of a Redis stream id plus one; 0 where positions are plain numbers.
    pub minor: u64,
}

impl Position {
    /// A plain offset.
    #[inline]
    pub const fn offset(offset: u64) -> Self {
        Self { major: offset, minor: 0 }
    }

    /// A Redis stream id `ms-seq`.
    #[inline]
    pub const fn stream_id(ms: u64, seq: u64) -> Self {
        Self { major: ms, minor: seq.saturating_add(1) }
    }

    /// The two halves of a stream id, or the offset and 0.
    pub const fn as_stream_id(self) -> (u64, u64) {
        (self.major, self.minor.saturating_sub(1))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.minor {
            0 => write!(f, "{}", self.major),
            n => write!(f, "{}-{}", self.major, n - 1),
        }
    }
}

impl std::str::FromStr for Position {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |s: &str| {
            s.parse::<u64>().map_err(|e| {
                crate::Error::new(
                    crate::ErrorKind::Config,
                    format!("'{text}' is not a position; give `17` or `1700000000000-3`"),
                )
                .with_source(e)
            })
        };
        match text.split_once('-') {
            None => Ok(Self::offset(number(text)?)),
            Some((ms, seq)) => Ok(Self::stream_id(number(ms)?, number(seq)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Position;

    #[test]
    fn prints_and_reads_both_forms() -> crate::Result<()> {
        for text in ["0", "17", "1700000000000-0", "5-3"] {
            assert_eq!(text.parse::<Position>()?.to_string(), text);
        }
        assert!("x".parse::<Position>().is_err() && "1-".parse::<Position>().is_err());
        Ok(())
    }
}
