//! The threads of a proxy: one accepts, two per connection carry bytes, one each way.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Direction, Shared, State, Trouble};

/// How long a pump waits for bytes before it looks at its orders again: the longest a change takes.
const GRAIN: Duration = Duration::from_millis(5);

/// A frozen server's backlog can be full; its port on this machine answers at once otherwise.
const CONNECT: Duration = Duration::from_secs(5);

/// Accepts until told otherwise; the port closes when this returns.
pub(super) fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if !shared.listening.load(Ordering::SeqCst) || shared.closing.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
        shared.live().insert(number);
        let shared = Arc::clone(shared);
        // Connecting can take long when the server is frozen with a full backlog; others must not wait for that.
        thread::spawn(move || {
            carry(&client, number, &shared);
            // Closed before it counts as gone.
            drop(client);
            shared.live().remove(&number);
        });
    }
}

fn carry(client: &TcpStream, number: u64, shared: &Shared) {
    let target = shared.state().target.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let server = target.and_then(|address| TcpStream::connect_timeout(&address, CONNECT).ok());
    let Some(server) = server else {
        reset_on_close(client);
        return;
    };
    for stream in [client, &server] {
        // Errors here mean that the other side is gone already, which the first read tells too.
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(GRAIN));
        let _ = stream.set_write_timeout(Some(GRAIN));
    }
    let broken = AtomicBool::new(false);
    let pump = |from, to, way| Pump { from, to, way, number, shared, broken: &broken, queue: VecDeque::new() };
    thread::scope(|scope| {
        scope.spawn(|| pump(client, &server, Direction::ToServer).run());
        pump(&server, client, Direction::ToClient).run();
    });
    if broken.load(Ordering::SeqCst) {
        reset_on_close(client);
        reset_on_close(&server);
    }
}

/// Makes the close a reset: what a client sees of a crash or a cut cable's end, and not a polite goodbye.
fn reset_on_close(stream: &TcpStream) {
    // Fails only on a socket that is closed already.
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

struct Pump<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    way: Direction,
    number: u64,
    shared: &'a Shared,
    /// Set by either direction; ends both with a reset.
    broken: &'a AtomicBool,
    /// Read, and due at that time.
    queue: VecDeque<(Instant, Vec<u8>)>,
}

/// What a pump knows about the trouble it is in.
struct Turn {
    turn: u64,
    /// Bytes left until the cut.
    left: u64,
    /// When the next byte of a slow line may go.
    free_at: Instant,
}

impl Pump<'_> {
    fn run(mut self) {
        let mut dice = Dice(self.shared.state().seed ^ self.number.rotate_left(17) ^ u64::from(self.is_to_server()));
        let mut turn = Turn { turn: u64::MAX, left: 0, free_at: Instant::now() };
        let mut dead = false;
        let mut ended = false;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let state = self.shared.state().clone();
            if self.must_break(&state) {
                return self.break_off();
            }
            let trouble = self.concerning(&state);
            if state.turn != turn.turn {
                let left = if let Some(Trouble::CutAfter(_, bytes)) = trouble { bytes } else { 0 };
                turn = Turn { turn: state.turn, left, free_at: Instant::now() };
            }
            if !self.deliver(trouble, &mut turn, dead) {
                return self.break_off();
            }
            if ended {
                if self.queue.is_empty() {
                    // The rest was delivered; say goodbye as the other side did.
                    let _ = self.to.shutdown(Shutdown::Write);
                    return;
                }
                thread::park_timeout(GRAIN);
                continue;
            }
            match self.from.read(&mut buffer) {
                Ok(0) => ended = true,
                Ok(count) => {
                    let mut due = Instant::now();
                    // Looked up anew: a trouble that began while we waited here counts for what came after it.
                    let state = self.shared.state().clone();
                    match self.concerning(&state) {
                        Some(Trouble::Swallow(_)) => dead = true,
                        Some(Trouble::Delay(_, time)) => {
                            due += time + time.mul_f64(dice.unit() / 2.0);
                            self.bite(count);
                        }
                        Some(Trouble::Stall(_) | Trouble::Slow(..)) => self.bite(count),
                        _ => {}
                    }
                    if dead {
                        self.bite(count);
                    } else {
                        // Never before what was read earlier.
                        let due = self.queue.back().map_or(due, |(last, _)| due.max(*last));
                        self.queue.push_back((due, buffer[..count].to_vec()));
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.break_off(),
            }
        }
    }

    /// Writes what is due; false when the connection is to be reset.
    fn deliver(&mut self, trouble: Option<Trouble>, turn: &mut Turn, dead: bool) -> bool {
        if dead || matches!(trouble, Some(Trouble::Stall(_))) {
            return true;
        }
        while self.queue.front().is_some_and(|(due, _)| *due <= Instant::now()) {
            let Some((due, mut bytes)) = self.queue.pop_front() else { return true };
            if let Some(Trouble::Slow(_, rate)) = trouble {
                if turn.free_at > Instant::now() {
                    self.queue.push_front((due, bytes));
                    return true;
                }
                // A fiftieth of a second's worth at a time.
                let piece = usize::try_from(rate / 50).unwrap_or(usize::MAX).clamp(1, bytes.len());
                let rest = bytes.split_off(piece);
                turn.free_at = Instant::now() + Duration::from_millis(20);
                if !rest.is_empty() {
                    self.queue.push_front((due, rest));
                }
            }
            if let Some(Trouble::CutAfter(..)) = trouble {
                // What lies behind the cut is never sent.
                bytes.truncate(usize::try_from(turn.left).unwrap_or(usize::MAX));
            }
            let mut to = self.to;
            let written = match to.write(&bytes) {
                Ok(written) => written,
                // The receiver takes nothing at the moment.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => 0,
                Err(error) if error.kind() == ErrorKind::Interrupted => 0,
                Err(_) => return false,
            };
            self.shared.passed.fetch_add(written as u64, Ordering::SeqCst);
            if let Some(Trouble::CutAfter(..)) = trouble {
                turn.left -= written as u64;
                self.bite(written);
                if turn.left == 0 {
                    return false;
                }
            }
            if written < bytes.len() {
                self.queue.push_front((due, bytes.split_off(written)));
                return true;
            }
        }
        true
    }

    fn must_break(&self, state: &State) -> bool {
        self.broken.load(Ordering::SeqCst)
            || self.number < state.cut_below
            || self.shared.closing.load(Ordering::SeqCst)
    }

    /// Ends the connection with a reset; counted once for both directions.
    fn break_off(&self) {
        if !self.broken.swap(true, Ordering::SeqCst) {
            self.shared.cut.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn bite(&self, bytes: usize) {
        self.shared.bitten.fetch_add(bytes as u64, Ordering::SeqCst);
    }

    fn is_to_server(&self) -> bool {
        self.way == Direction::ToServer
    }

    /// The present trouble, if it concerns this direction.
    fn concerning(&self, state: &State) -> Option<Trouble> {
        state.trouble.filter(|trouble| match trouble {
            Trouble::Cut | Trouble::Refuse => true,
            Trouble::Swallow(direction)
            | Trouble::Stall(direction)
            | Trouble::Delay(direction, _)
            | Trouble::Slow(direction, _)
            | Trouble::CutAfter(direction, _) => *direction == Direction::Both || *direction == self.way,
        })
    }
}

/// A small generator (splitmix64): the same seed gives the same delays.
struct Dice(u64);

impl Dice {
    /// From 0 to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) as f64 / u64::MAX as f64
    }
}
