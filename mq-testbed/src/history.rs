//! What happened, as the programs under test saw it: one JSON object a line, one file per process.
//!
//! A client writes what it does before it does it and what came of it after; nothing here depends on how the client
//! is built. [`check`](crate::checker::check) judges the files.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{Problem, Result};

/// How a send ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sent {
    /// The broker has it.
    Confirmed,
    /// The broker refused it and stored it nowhere.
    Rejected,
    /// No byte was written.
    NotSent,
    /// Written, but no answer came.
    Unknown,
}

/// How a delivery was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// Done.
    Ack,
    /// To be tried again later.
    Nack,
    /// Given up; has to appear as [`Event::Dead`] in the end.
    DeadLetter,
    /// Not tried, to be given to somebody else.
    Release,
}

/// What came of settling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Settled {
    /// The broker confirmed it.
    Confirmed,
    /// Written, and this broker never answers.
    Sent,
    /// Not the owner any more; nothing was written.
    Stale,
    /// Written, no answer came.
    Unknown,
}

/// One thing that happened. `id` names the message: producer, a dash, and its number there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Event {
    /// The process is at work: a producer connected, a member subscribed.
    Ready,
    /// About to be sent, or sent again.
    Sending {
        /// The message.
        id: String,
        /// Its key; order is promised per producer and key.
        key: String,
    },
    /// The send came back.
    Sent {
        /// The message.
        id: String,
        /// How.
        outcome: Sent,
    },
    /// Handed to the application.
    Delivered {
        /// The message.
        id: String,
        /// Where the broker has it (partition and offset, entry id), if it says: two copies of one message differ.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        place: Option<String>,
    },
    /// About to be settled: a process that is killed next may have settled it.
    Settling {
        /// The message.
        id: String,
        /// What is asked for.
        how: How,
        /// As in the delivery.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        place: Option<String>,
    },
    /// The settle call came back.
    Settled {
        /// The message.
        id: String,
        /// What was asked for.
        how: How,
        /// What came of it.
        outcome: Settled,
        /// As in the delivery.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        place: Option<String>,
    },
    /// The member was told that it owns this delivery no longer.
    Disowned {
        /// The message.
        id: String,
    },
    /// The member was told that the broker lost messages.
    Gap,
    /// Found in the broker at the end, for this group.
    Remaining {
        /// The message.
        id: String,
    },
    /// Found in the dead letters at the end.
    Dead {
        /// The message.
        id: String,
    },
    /// Written by whoever breaks things: a fault begins.
    FaultBegins {
        /// What it is called.
        name: String,
        /// Whether it destroys messages in the broker, as the deletion of a queue does.
        destroys: bool,
    },
    /// The fault is over.
    FaultEnds {
        /// What it did.
        bite: String,
    },
    /// Something worth reading when a run is looked into; the checker ignores it.
    Note {
        /// In words.
        text: String,
    },
}

/// An event with its time and its process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Microseconds since 1970. All processes run on one machine and so by one clock.
    pub at: u64,
    /// The process: `p0` a producer, `m1` a member.
    pub who: String,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// Writes one process's history; each event is in the file before the call returns, so that `kill -9` loses none.
#[derive(Debug)]
pub struct Historian {
    who: String,
    file: Mutex<File>,
}

impl Historian {
    /// Appends to `who.jsonl` in the folder.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn new(folder: &Path, who: &str) -> Result<Self> {
        let path = folder.join(format!("{who}.jsonl"));
        let file = File::options().create(true).append(true).open(&path);
        let file = file.map_err(Problem::during(format!("open {}", path.display())))?;
        Ok(Self { who: who.into(), file: Mutex::new(file) })
    }

    /// Writes the event with the time of now. A history with holes proves nothing, so a failure ends the process.
    pub fn write(&self, event: Event) {
        let record = Record { at: now(), who: self.who.clone(), event };
        // One lock around both: the order in the file is the order of the times.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = serde_json::to_vec(&record).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            file.write_all(&line)
        });
        if let Err(error) = written {
            eprintln!("the history of {} cannot be written: {error}", self.who);
            std::process::exit(3);
        }
    }
}

/// Microseconds since 1970.
#[must_use]
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Reads a folder of histories while they are being written.
#[derive(Debug)]
pub struct Reader {
    folder: PathBuf,
    read: std::collections::BTreeMap<PathBuf, u64>,
    records: Vec<Record>,
}

impl Reader {
    /// Of that folder, from the start.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf(), read: std::collections::BTreeMap::new(), records: Vec::new() }
    }

    /// Everything written until now, in the order of time within each file's new part.
    ///
    /// # Errors
    /// When a file cannot be read or a line is no event.
    pub fn look(&mut self) -> Result<&[Record]> {
        let entries = fs::read_dir(&self.folder);
        let entries = entries.map_err(Problem::during(format!("read {}", self.folder.display())))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|end| end == "jsonl") {
                self.more_of(path)?;
            }
        }
        Ok(&self.records)
    }

    fn more_of(&mut self, path: PathBuf) -> Result<()> {
        let failed = |what: &str| format!("{what} {}", path.display());
        let offset = self.read.get(&path).copied().unwrap_or(0);
        let mut text = Vec::new();
        let mut file = File::open(&path).map_err(Problem::during(failed("open")))?;
        file.seek(SeekFrom::Start(offset)).map_err(Problem::during(failed("seek in")))?;
        file.read_to_end(&mut text).map_err(Problem::during(failed("read")))?;
        // What is behind the last line end is a line being written.
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            self.records.push(serde_json::from_slice(line).map_err(Problem::during(failed("a line of")))?);
        }
        self.read.insert(path, offset + whole as u64);
        Ok(())
    }

    /// All of it, sorted by time.
    ///
    /// # Errors
    /// As [`Reader::look`].
    pub fn all(mut self) -> Result<Vec<Record>> {
        self.look()?;
        self.records.sort_by_key(|record| record.at);
        Ok(self.records)
    }
}
