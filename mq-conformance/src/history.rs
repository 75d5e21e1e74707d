//! The recorded timeline of one test, printed when it fails.

use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use tokio::time::Instant;

/// Lines that are kept; more would hide what matters.
const KEPT: usize = 4_000;

/// What happened in a test, in order, with the time since its start on the test's own clock.
#[derive(Clone)]
pub struct History(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    start: Option<Instant>,
    lines: Vec<String>,
    dropped: usize,
}

impl History {
    /// An empty timeline. Its clock starts with the first line.
    pub fn new() -> Self {
        Self(Arc::default())
    }

    /// Adds a line.
    pub fn note(&self, text: impl fmt::Display) {
        let now = Instant::now();
        let mut all = self.0.lock();
        let since = now.duration_since(*all.start.get_or_insert(now));
        if all.lines.len() < KEPT {
            all.lines.push(format!("{:>12.3} s  {text}", since.as_secs_f64()));
        } else {
            all.dropped += 1;
        }
    }

    /// The lines; long timelines are cut in the middle.
    pub fn render(&self, most: usize) -> String {
        let all = self.0.lock();
        let n = all.lines.len();
        let mut text = String::new();
        let head = if n > most { most / 2 } else { n };
        let tail = if n > most { n - most / 2 } else { n };
        for line in &all.lines[..head] {
            text.push_str(line);
            text.push('\n');
        }
        if tail > head {
            text.push_str(&format!("               ... {} lines ...\n", tail - head));
        }
        for line in &all.lines[tail..] {
            text.push_str(line);
            text.push('\n');
        }
        if all.dropped > 0 {
            text.push_str(&format!("               ... {} more were not recorded\n", all.dropped));
        }
        text
    }
}

impl Default for History {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "History({} lines)", self.0.lock().lines.len())
    }
}
