//! How a Redis is started.

use std::path::{Path, PathBuf};

use crate::server::Recipe;
use crate::{Kind, Launch, Result, Server, free_port, programs};

/// What a test may ask of its Redis.
#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    /// Append-only file, flushed at each write: entries survive `kill -9`.
    pub durable: bool,
    /// Further lines of the configuration file.
    pub lines: Vec<String>,
    /// Watches other servers instead of keeping data.
    pub sentinel: bool,
    /// A port that others were told already.
    pub port: Option<u16>,
}

impl RedisOptions {
    /// Listens with TLS on that port too, which [`free_port`](crate::free_port) gives, and asks clients for a
    /// certificate. The usual port stays open without, for the test's own looks.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, port: u16, certificates: &crate::Certificates, server: &crate::Pair) -> Self {
        self.lines.extend([
            format!("tls-port {port}"),
            format!("tls-cert-file {}", server.certificate.display()),
            format!("tls-key-file {}", server.key.display()),
            format!("tls-ca-cert-file {}", certificates.authority.display()),
            "tls-auth-clients yes".to_owned(),
        ]);
        self
    }

    /// Adds a user with ACL rules, as `~orders* +@all -@dangerous`. The default user, without a password, stays.
    #[must_use]
    pub fn user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.lines.push(format!("user {name} on >{password} {rules}"));
        self
    }

    /// Turns the default user off: who does not log in may do nothing.
    #[must_use]
    pub fn login_needed(mut self) -> Self {
        self.lines.push("user default off".to_owned());
        self
    }

    /// Starts a private Redis with these options.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start(self) -> Result<Server> {
        Server::in_own_folder(|_, path| recipe(path, self.clone()), Kind::Redis)
    }
}

pub(crate) fn recipe(path: &Path, options: RedisOptions) -> Result<Box<dyn Recipe>> {
    recipe_by(Launch::new(programs::redis()?, path), path, options)
}

/// With another program than the machine's own; the configuration file is added to its arguments.
pub(crate) fn recipe_by(program: Launch, path: &Path, options: RedisOptions) -> Result<Box<dyn Recipe>> {
    let port = options.port.map_or_else(free_port, Ok)?;
    Ok(Box::new(Redis { path: path.to_path_buf(), port, program, options }))
}

struct Redis {
    path: PathBuf,
    port: u16,
    program: Launch,
    options: RedisOptions,
}

impl Redis {
    fn conf(&self) -> PathBuf {
        self.path.join("redis.conf")
    }
}

impl Recipe for Redis {
    fn kind(&self) -> Kind {
        Kind::Redis
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn url_at(&self, port: u16) -> String {
        format!("redis://127.0.0.1:{port}/")
    }

    fn prepare(&self) -> Result<()> {
        let (append, flush) = if self.options.durable { ("yes", "always") } else { ("no", "everysec") };
        let mut lines =
            vec![format!("port {}", self.port), "bind 127.0.0.1".into(), format!("dir {}", self.path.display())];
        if self.options.sentinel {
            lines.extend(self.options.lines.iter().cloned());
            return programs::write(&self.conf(), &(lines.join("\n") + "\n"));
        }
        lines.extend([
            // No snapshots: a test asks for durability by name, with the append-only file.
            "save \"\"".to_owned(),
            format!("appendonly {append}"),
            format!("appendfsync {flush}"),
            // Else a replica waits 5 s for others to join it before the first copy.
            "repl-diskless-sync-delay 0".to_owned(),
        ]);
        lines.extend(self.options.lines.iter().cloned());
        programs::write(&self.conf(), &(lines.join("\n") + "\n"))
    }

    fn launch(&self) -> Launch {
        // A sentinel writes what it learns into its file, and so knows it again after a restart.
        self.program.clone().args([self.conf()]).args(self.options.sentinel.then_some("--sentinel"))
    }
}
