//! How a workload's client program is called, whatever it is built on: `CLIENT ROLE --url U --topic T ...`.
//!
//! | role | does | ends |
//! |---|---|---|
//! | `prepare` | makes topic and group | by itself |
//! | `produce` | sends numbered messages at a rate, `--window` at a time, each until the broker confirmed it | when its input closes |
//! | `consume` | handles each message for `--work-ms`, `--hands` at a time, then acks it | when its input closes, giving back what it holds |
//! | `inspect` | writes what the group has left, and its dead letters, to the history | by itself |
//! | `destroy` | deletes or empties the topic in the broker | by itself |
//!
//! `produce` and `consume` outlive every fault: they reconnect and go on. Each writes its history as it goes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::history::Historian;
use crate::{Problem, Result};

/// What a client process is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Make topic and group.
    Prepare,
    /// Send.
    Produce,
    /// Receive and ack.
    Consume,
    /// Write what is left.
    Inspect,
    /// Delete or empty the topic.
    Destroy,
}

impl Role {
    const ALL: [Self; 5] = [Self::Prepare, Self::Produce, Self::Consume, Self::Inspect, Self::Destroy];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Produce => "produce",
            Self::Consume => "consume",
            Self::Inspect => "inspect",
            Self::Destroy => "destroy",
        }
    }
}

/// A client's command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// What to do.
    pub role: Role,
    /// The broker.
    pub url: String,
    /// The topic.
    pub topic: String,
    /// The group.
    pub group: String,
    /// The process's name in the history.
    pub name: String,
    /// The folder of the history.
    pub history: PathBuf,
    /// Messages a second, of one producer.
    pub rate: u32,
    /// Number of keys.
    pub keys: u64,
    /// How long a message is handled.
    pub work: Duration,
    /// Sends of one producer that are under way at a time.
    pub window: usize,
    /// Messages that one member handles at a time.
    pub hands: usize,
}

impl Order {
    /// Reads the arguments, those behind the program's own.
    ///
    /// # Errors
    /// Names what is missing or unknown.
    pub fn read(args: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut args = args.into_iter();
        let role = args.next().unwrap_or_default();
        let role = Role::ALL.into_iter().find(|known| known.name() == role);
        let mut order = Self {
            role: role.ok_or_else(|| Problem::new("the role is one of prepare, produce, consume, inspect, destroy"))?,
            url: String::new(),
            topic: "orders".into(),
            group: "billing".into(),
            name: "c".into(),
            history: PathBuf::from("."),
            rate: 100,
            keys: 16,
            work: Duration::ZERO,
            window: 1,
            hands: 1,
        };
        while let Some(flag) = args.next() {
            let value = args.next().ok_or_else(|| Problem::new(format!("{flag} needs a value")))?;
            let number = || value.parse::<u64>().map_err(Problem::during(format!("the value of {flag}")));
            match flag.as_str() {
                "--url" => order.url = value,
                "--topic" => order.topic = value,
                "--group" => order.group = value,
                "--name" => order.name = value,
                "--history" => order.history = value.into(),
                "--rate" => order.rate = u32::try_from(number()?).unwrap_or(u32::MAX).max(1),
                "--keys" => order.keys = number()?.max(1),
                "--work-ms" => order.work = Duration::from_millis(number()?),
                "--window" => order.window = usize::try_from(number()?.max(1)).unwrap_or(usize::MAX),
                "--hands" => order.hands = usize::try_from(number()?.max(1)).unwrap_or(usize::MAX),
                _ => return Err(Problem::new(format!("unknown argument {flag}"))),
            }
        }
        if order.url.is_empty() {
            return Err(Problem::new("--url is needed"));
        }
        Ok(order)
    }

    /// The arguments that [`read`](Self::read) reads.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let pairs = [
            ("--url", self.url.clone()),
            ("--topic", self.topic.clone()),
            ("--group", self.group.clone()),
            ("--name", self.name.clone()),
            ("--history", self.history.display().to_string()),
            ("--rate", self.rate.to_string()),
            ("--keys", self.keys.to_string()),
            ("--work-ms", self.work.as_millis().to_string()),
            ("--window", self.window.to_string()),
            ("--hands", self.hands.to_string()),
        ];
        let pairs = pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
        std::iter::once(self.role.name().to_owned()).chain(pairs).collect()
    }

    /// The process's history.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn historian(&self) -> Result<Historian> {
        Historian::new(&self.history, &self.name)
    }

    /// The message of that number: its id, and its key.
    #[must_use]
    pub fn message(&self, number: u64) -> (String, String) {
        (format!("{}-{number}", self.name), format!("k{}", number % self.keys))
    }

    /// When the next message is due, the last one having been due at `last`. What an outage held up is not made up
    /// for: a burst after each fault would measure how fast members work, and not when they are back.
    #[must_use]
    pub fn next_due(&self, last: Instant) -> Instant {
        // What a coarse timer held up is made up for: some wake a millisecond late, which is several messages of a
        // fast producer.
        const COARSE: Duration = Duration::from_millis(5);
        let now = Instant::now();
        (last + Duration::from_secs(1) / self.rate).max(now.checked_sub(COARSE).unwrap_or(now))
    }
}

/// The payload that carries an id, of a size at which a connection can be cut in its middle.
#[must_use]
pub fn payload(id: &str) -> Vec<u8> {
    format!("{id} {}", "x".repeat(200)).into_bytes()
}

/// The id in a payload.
#[must_use]
pub fn id_in(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload).split(' ').next().unwrap_or_default().to_owned()
}

/// Set when the program's input closes: its order to end, and also what it sees when its starter dies.
#[derive(Debug, Clone)]
pub struct Stop(Arc<(AtomicBool, Mutex<()>, Condvar)>);

impl Stop {
    /// Watches the input from now on.
    #[must_use]
    pub fn when_input_closes() -> Self {
        let stop = Self(Arc::new((AtomicBool::new(false), Mutex::new(()), Condvar::new())));
        let set = stop.clone();
        thread::spawn(move || {
            // What is written there does not matter, only its end.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            let _held = set.0.1.lock().unwrap_or_else(PoisonError::into_inner);
            set.0.0.store(true, Ordering::SeqCst);
            set.0.2.notify_all();
        });
        stop
    }

    /// Whether to end.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.0.load(Ordering::SeqCst)
    }

    /// Waits until that time, or until it is set, which it tells.
    pub fn wait_until(&self, time: Instant) -> bool {
        let held = self.0.1.lock().unwrap_or_else(PoisonError::into_inner);
        let left = time.saturating_duration_since(Instant::now());
        let _ = self.0.2.wait_timeout_while(held, left, |()| !self.is_set());
        self.is_set()
    }

    /// Waits for that long, or until it is set, which it tells.
    pub fn wait(&self, time: Duration) -> bool {
        self.wait_until(Instant::now() + time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_its_command_line() {
        let text = "produce --url redis://h --topic t --group g --name p1 --history /h --rate 7 --keys 3 --work-ms 9 \
                    --window 5 --hands 6";
        let order = Order::read(text.split(' ').map(str::to_owned)).unwrap();
        assert_eq!(order.arguments().join(" "), text);
        assert_eq!(order.message(4), ("p1-4".into(), "k1".into()));
        assert_eq!(id_in(&payload("p1-4")), "p1-4");
        assert!(Order::read(["dance".to_owned()]).is_err());
        assert!(Order::read(["consume".to_owned(), "--speed".to_owned(), "1".to_owned()]).is_err());
    }
}
