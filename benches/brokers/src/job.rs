//! What one run of one contestant is asked for, and what it answers.

use std::time::Duration;

use crate::meter::Cost;

/// Why a run failed.
pub(crate) type Failed = Box<dyn std::error::Error + Send + Sync>;

/// One run: send `n` messages of `size` bytes to a new topic, each confirmed; then receive and acknowledge all of them.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) url: String,
    pub(crate) topic: String,
    pub(crate) n: usize,
    pub(crate) size: usize,
}

impl Job {
    /// Batches under way at a time.
    pub(crate) fn flying(&self) -> usize {
        if self.url.starts_with("kafka") { KAFKA_FLYING / BATCH } else { FLYING }
    }
}

/// The group of every run.
pub(crate) const GROUP: &str = "bench";

/// Messages of one batch, for everybody.
pub(crate) const BATCH: usize = 500;

/// Batches under way at a time, for everybody who sends in batches.
pub(crate) const FLYING: usize = 4;

/// Messages under way at a time on Kafka, for everybody: its clients gather by partition and are made for that many.
pub(crate) const KAFKA_FLYING: usize = 10_000;

/// A wait that takes longer than this has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The two stretches of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ran {
    pub(crate) send: Cost,
    pub(crate) receive: Cost,
}

impl Ran {
    /// As the parent process reads it.
    pub(crate) fn line(&self) -> String {
        let Self { send, receive } = self;
        format!("ran {} {} {} {}", send.seconds, send.cpu, receive.seconds, receive.cpu)
    }

    pub(crate) fn read(line: &str) -> Option<Self> {
        let numbers: Vec<f64> = line.strip_prefix("ran ")?.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [a, b, c, d] = numbers[..] else { return None };
        Some(Self { send: Cost { seconds: a, cpu: b }, receive: Cost { seconds: c, cpu: d } })
    }
}

/// The payload of every message: what a compressing broker could not make smaller.
pub(crate) fn payload(size: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    (0..size)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            u8::try_from(state >> 56).unwrap_or(0)
        })
        .collect()
}

/// A runtime on this thread alone: the cheapest there is.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failed> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_survives_its_line() {
        let ran = Ran { send: Cost { seconds: 1.5, cpu: 0.25 }, receive: Cost { seconds: 2.0, cpu: 1.0 } };
        assert_eq!(Ran::read(&ran.line()), Some(ran));
        assert_eq!(Ran::read("error"), None);
    }
}
