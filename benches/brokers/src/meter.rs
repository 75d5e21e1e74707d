//! Time and processor time of a stretch of a run, of this process alone.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Begun at one point.
pub(crate) struct Meter {
    at: Instant,
    cpu: Duration,
}

/// What a stretch cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    /// Seconds by the clock.
    pub(crate) seconds: f64,
    /// Seconds of the processor: all threads, in this program and in the kernel for it, as `getrusage` counts them and finer.
    pub(crate) cpu: f64,
}

fn cpu() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(spent.tv_sec).unwrap_or(0), u32::try_from(spent.tv_nsec).unwrap_or(0))
}

impl Meter {
    pub(crate) fn start() -> Self {
        Self { at: Instant::now(), cpu: cpu() }
    }

    pub(crate) fn stop(self) -> Cost {
        Cost { seconds: self.at.elapsed().as_secs_f64(), cpu: (cpu() - self.cpu).as_secs_f64() }
    }
}
