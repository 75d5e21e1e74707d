//! Free ports on 127.0.0.1.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::{Problem, Result};

/// Below the range that Linux gives to outgoing connections (32768 upwards): a port taken from that range can be lost
/// to any client between our look and the server's bind, and again while a killed server is down.
const RANGE: Range<u16> = 12_000..32_000;

/// Ports handed out by this process: a server that is down must find its port free when it comes back.
static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// A port nobody listens on, never handed out twice by one process.
///
/// Chosen at random, so that several builds on one machine rarely meet; a server that loses the race is started again
/// on another port.
///
/// # Errors
/// When no port of the range is free.
pub fn free_port() -> Result<u16> {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let given = given.get_or_insert_default();
    let width = u64::from(RANGE.end - RANGE.start);
    for attempt in 0..2_000_u64 {
        // Each RandomState has keys of its own: enough of a dice for this, without a dependency.
        let dice = RandomState::new().hash_one(attempt) % width;
        let port = RANGE.start + u16::try_from(dice).unwrap_or(0);
        if !given.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            given.insert(port);
            return Ok(port);
        }
    }
    Err(Problem::new("no free port between 12000 and 32000 on 127.0.0.1; is something listening on all of them?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_free_and_given_once() {
        let ports: HashSet<u16> = (0..50).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 50);
        for port in ports {
            TcpListener::bind(("127.0.0.1", port)).unwrap();
        }
    }
}
