//! Addresses on which nobody answers.

use std::fmt;
use std::net::TcpListener;

use crate::{Problem, Result};

/// Some hosts that take connections and never say a byte, as frozen machines do. Written as `127.0.0.1:port`, separated by commas.
#[derive(Debug)]
pub struct SilentHosts(Vec<TcpListener>);

impl SilentHosts {
    /// So many of them, for as long as this is kept: the kernel accepts, and nobody reads.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn new(n: usize) -> Result<Self> {
        let hosts = (0..n).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<_>>();
        hosts.map(Self).map_err(Problem::during("listen without answering"))
    }
}

impl fmt::Display for SilentHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, host) in self.0.iter().enumerate() {
            let address = host.local_addr().map_err(|_| fmt::Error)?;
            write!(f, "{}{address}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}
