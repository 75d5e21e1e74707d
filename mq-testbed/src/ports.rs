//! Free ports on 127.0.0.1.

use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, PoisonError};

use crate::{Problem, Result};

/// Below the range that Linux gives to outgoing connections (32768 upwards): a port taken from that range can be lost
/// to any client between our look and the server's bind, and again while a killed server is down.
const RANGE: Range<u16> = 12_000..32_000;

/// Claims of the ports that this process handed out: a server that is down must find its port free when it comes back.
static GIVEN: Mutex<Vec<Claim>> = Mutex::new(Vec::new());

/// A name that only one process of this machine can have at a time, and that the kernel frees when the process ends: between our
/// look and the server's bind, seconds later for a Java machine, the port looks free to every other run.
struct Claim {
    _name: UnixListener,
}

impl Claim {
    fn of(port: u16) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("anymq-testbed-port-{port}")).ok()?;
        UnixListener::bind_addr(&name).ok().map(|name| Self { _name: name })
    }
}

/// A port that nobody listens on, handed out once by all processes of this machine that use this function, until the process
/// that was given it ends.
///
/// Chosen at random, so that programs that do not ask here rarely meet it either; a server that loses such a race is started
/// again on another port.
///
/// # Errors
/// When no port of the range is free.
pub fn free_port() -> Result<u16> {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let width = u64::from(RANGE.end - RANGE.start);
    for attempt in 0..2_000_u64 {
        // Each RandomState has keys of its own: enough of a dice for this, without a dependency.
        let dice = RandomState::new().hash_one(attempt) % width;
        let port = RANGE.start + u16::try_from(dice).unwrap_or(0);
        if let Some(claim) = Claim::of(port)
            && is_free(port)
        {
            given.push(claim);
            return Ok(port);
        }
    }
    Err(Problem::new("no free port between 12000 and 32000 on 127.0.0.1; is something listening on all of them?"))
}

/// Whether nobody listens there.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ports_are_free_and_given_once() {
        let ports: HashSet<u16> = (0..50).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 50);
        for port in ports {
            assert!(is_free(port));
            // What another process would be told that drew the same one.
            assert!(Claim::of(port).is_none());
        }
    }
}
