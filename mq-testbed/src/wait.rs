//! Waiting for a condition with a deadline; nothing in this crate waits for a time to pass.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Problem, Result};

/// Between two looks at a condition. Short against every start time measured, long enough to leave the processor to
/// the server that is starting.
const GRAIN: Duration = Duration::from_millis(10);

/// Looks until `look` answers `Some`, at most for `limit`.
///
/// # Errors
/// Names `what` when the limit passed.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if Instant::now() >= end {
            return Err(Problem::new(format!("{what}: not within {limit:?}")));
        }
        thread::park_timeout(GRAIN);
    }
}

/// Whether `look` became true within `limit`.
pub fn eventually(limit: Duration, mut look: impl FnMut() -> bool) -> bool {
    until("condition", limit, || look().then_some(())).is_ok()
}
