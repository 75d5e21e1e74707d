//! A small TCP proxy on 127.0.0.1 that stands before a server and misbehaves on demand, while traffic flows.
//!
//! Every trouble counts what it did, and [`Proxy::end`] refuses to call a trouble that touched nothing a success: a
//! fault that did not bite proves nothing.

mod pump;

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{KafkaOptions, Kind, Problem, Result, Server, eventually, free_port};

/// Which way bytes flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
    /// Both ways.
    Both,
}

/// What the proxy does to the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// All connections are reset now. New ones are let through.
    Cut,
    /// All connections are reset now, and new ones refused until the end.
    Refuse,
    /// Connections stay open, but what is sent on them is thrown away: half-open. A connection that lost bytes stays
    /// dead after the end, as one does whose peer is gone without a word; new ones live.
    Swallow(Direction),
    /// Bytes are held back and arrive after the end, as behind a network that is away for a while.
    Stall(Direction),
    /// Bytes arrive later by this much, plus up to half of it, drawn from the seed.
    Delay(Direction, Duration),
    /// At most this many bytes a second.
    Slow(Direction, u64),
    /// Each connection is reset after this many more bytes, in the middle of whatever they mean. Also new ones.
    CutAfter(Direction, u64),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |direction: &Direction| match direction {
            Direction::ToServer => " to the server",
            Direction::ToClient => " to the client",
            Direction::Both => "",
        };
        match self {
            Self::Cut => write!(f, "cut"),
            Self::Refuse => write!(f, "refuse"),
            Self::Swallow(direction) => write!(f, "swallow{}", way(direction)),
            Self::Stall(direction) => write!(f, "stall{}", way(direction)),
            Self::Delay(direction, time) => write!(f, "delay {} ms{}", time.as_millis(), way(direction)),
            Self::Slow(direction, rate) => write!(f, "slow {rate} B/s{}", way(direction)),
            Self::CutAfter(direction, bytes) => write!(f, "cut after {bytes} B{}", way(direction)),
        }
    }
}

/// What a trouble did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bite {
    /// Connections that were reset.
    pub cut: u64,
    /// New connections that were refused, as seen by a try of the proxy's own.
    pub refused: u64,
    /// Bytes that were thrown away, held, delayed or slowed, or that passed before the cut.
    pub bytes: u64,
}

/// A proxy; its connections end when it is dropped.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    closing: AtomicBool,
    accepted: AtomicU64,
    /// The numbers of the connections that are open.
    live: Mutex<BTreeSet<u64>>,
    cut: AtomicU64,
    bitten: AtomicU64,
    passed: AtomicU64,
    listening: AtomicBool,
}

#[derive(Clone)]
struct State {
    trouble: Option<Trouble>,
    /// Counts the changes of trouble, so that each pump sees where a new one begins.
    turn: u64,
    /// Connections with a lower number are to be reset.
    cut_below: u64,
    target: Option<u16>,
    seed: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Proxy {
    /// A proxy that leads to that port of 127.0.0.1. The seed decides every random choice.
    ///
    /// # Errors
    /// When no port is free.
    pub fn before(target: u16, seed: u64) -> Result<Self> {
        let proxy = Self::leading_nowhere(seed)?;
        proxy.lead_to(target);
        Ok(proxy)
    }

    /// A proxy whose server comes later: connections are reset until [`lead_to`](Self::lead_to).
    ///
    /// # Errors
    /// When no port is free.
    pub fn leading_nowhere(seed: u64) -> Result<Self> {
        let port = free_port()?;
        let state = State { trouble: None, turn: 0, cut_below: 0, target: None, seed };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            closing: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            live: Mutex::new(BTreeSet::new()),
            cut: AtomicU64::new(0),
            bitten: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            listening: AtomicBool::new(false),
        });
        let mut proxy = Self { port, shared, acceptor: None };
        proxy.listen()?;
        Ok(proxy)
    }

    /// A server with a proxy before it; give clients `server.url_at(proxy.port())`.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn with_server(kind: Kind, seed: u64) -> Result<(Server, Self)> {
        let proxy = Self::leading_nowhere(seed)?;
        let server = match kind {
            // Told of the proxy, since a Kafka client connects to the address the broker names.
            Kind::Kafka => KafkaOptions { proxied_as: Some(proxy.port), ..KafkaOptions::default() }.start()?,
            _ => Server::start(kind)?,
        };
        proxy.lead_to(server.behind_proxy());
        Ok((server, proxy))
    }

    /// The port that clients connect to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Leads new connections to that port of 127.0.0.1.
    pub fn lead_to(&self, target: u16) {
        self.shared.state().target = Some(target);
    }

    /// Connections open now.
    #[must_use]
    pub fn live(&self) -> usize {
        self.shared.live().len()
    }

    /// Bytes passed on since the start, both ways.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// What the present trouble has done so far.
    #[must_use]
    pub fn bite(&self) -> Bite {
        Bite {
            cut: self.shared.cut.load(Ordering::SeqCst),
            refused: 0,
            bytes: self.shared.bitten.load(Ordering::SeqCst),
        }
    }

    /// Begins a trouble, ending the one before. For [`Trouble::Cut`] that is all; returns once it is in force.
    ///
    /// # Errors
    /// When connections could not be reset within 10 s, or a refused port still answers.
    pub fn begin(&mut self, trouble: Trouble) -> Result<()> {
        self.shared.cut.store(0, Ordering::SeqCst);
        self.shared.bitten.store(0, Ordering::SeqCst);
        if trouble == Trouble::Refuse {
            self.stop_listening()?;
        }
        let resets = matches!(trouble, Trouble::Cut | Trouble::Refuse);
        {
            let mut state = self.shared.state();
            state.turn += 1;
            state.trouble = (trouble != Trouble::Cut).then_some(trouble);
            if resets {
                state.cut_below = self.shared.accepted.load(Ordering::SeqCst);
            }
        }
        if !resets {
            return Ok(());
        }
        let below = self.shared.state().cut_below;
        let gone = || self.shared.live().first().is_none_or(|oldest| *oldest >= below);
        if eventually(Duration::from_secs(10), gone) {
            Ok(())
        } else {
            Err(Problem::new("connections through the proxy were not reset within 10 s"))
        }
    }

    /// Ends the present trouble, and proves that it did something.
    ///
    /// # Errors
    /// When it touched nothing: no connection was there, or no byte flowed.
    pub fn end(&mut self, trouble: Trouble) -> Result<Bite> {
        let mut bite = self.bite();
        if trouble == Trouble::Refuse {
            let refused = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err();
            bite.refused = u64::from(refused);
        }
        {
            let mut state = self.shared.state();
            state.turn += 1;
            state.trouble = None;
        }
        if trouble == Trouble::Refuse {
            self.listen()?;
        }
        let bit = match trouble {
            Trouble::Cut | Trouble::CutAfter(..) => bite.cut > 0,
            Trouble::Refuse => bite.refused > 0,
            Trouble::Swallow(_) | Trouble::Stall(_) | Trouble::Delay(..) | Trouble::Slow(..) => bite.bytes > 0,
        };
        if bit {
            Ok(bite)
        } else {
            Err(Problem::new(format!("\"{trouble}\" did not bite: no traffic met it ({bite:?})")))
        }
    }

    fn listen(&mut self) -> Result<()> {
        let listener = crate::until("the proxy's port", Duration::from_secs(10), || {
            TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).ok()
        })?;
        let shared = Arc::clone(&self.shared);
        self.shared.listening.store(true, Ordering::SeqCst);
        self.acceptor = Some(thread::spawn(move || pump::accept(&listener, &shared)));
        Ok(())
    }

    fn stop_listening(&mut self) -> Result<()> {
        self.shared.listening.store(false, Ordering::SeqCst);
        // Wakes the acceptor, which then closes the port.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        match self.acceptor.take() {
            Some(acceptor) => acceptor.join().map_err(|_| Problem::new("the proxy's acceptor panicked")),
            None => Ok(()),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        let _ = self.stop_listening();
        eventually(Duration::from_secs(2), || self.live() == 0);
    }
}
