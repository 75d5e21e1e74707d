//! How a PostgreSQL is started.

use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::server::Recipe;
use crate::{Kind, Launch, Problem, Result, Server, folders, free_port, programs};

/// What a test may ask of its PostgreSQL.
#[derive(Debug, Clone, Default)]
pub struct PostgresOptions {
    /// Further lines of `postgresql.conf`.
    pub lines: Vec<String>,
}

impl PostgresOptions {
    /// Starts a private PostgreSQL with these options.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start(self) -> Result<Server> {
        Server::in_own_folder(|_, path| recipe(path, self.clone()), Kind::Postgres)
    }
}

pub(crate) fn recipe(path: &Path, options: PostgresOptions) -> Result<Box<dyn Recipe>> {
    let user = rustix::process::geteuid().is_root().then(|| "postgres".to_owned());
    let path = if user.is_some() { folders::passable(path) } else { path.to_path_buf() };
    Ok(Box::new(Postgres { path, port: free_port()?, bin: programs::postgres()?, user, options }))
}

struct Postgres {
    path: PathBuf,
    port: u16,
    bin: PathBuf,
    /// PostgreSQL refuses to run as root.
    user: Option<String>,
    options: PostgresOptions,
}

impl Postgres {
    fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    fn program(&self, name: &str) -> Launch {
        let mut launch = Launch::new(self.bin.join(name), &self.path);
        launch.user.clone_from(&self.user);
        launch
    }
}

impl Recipe for Postgres {
    fn kind(&self) -> Kind {
        Kind::Postgres
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn url_at(&self, port: u16) -> String {
        format!("postgres://test@127.0.0.1:{port}/postgres")
    }

    fn prepare(&self) -> Result<()> {
        folders::make(&self.path)?;
        if let Some(user) = &self.user {
            let made = std::process::Command::new("chown").arg(user).arg(&self.path).status();
            if !made.is_ok_and(|status| status.success()) {
                return Err(Problem::new(format!(
                    "cannot give {} to user {user}; is the package postgresql installed?",
                    self.path.display()
                )));
            }
        }
        let data = self.data().into_os_string();
        // --no-sync: the cluster is thrown away, its making need not survive a power failure.
        let arguments = ["-U", "test", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8", "-D"];
        self.program("initdb").args(arguments).args([data]).run()?;
        let mut lines = vec![
            "listen_addresses = '127.0.0.1'".to_owned(),
            format!("port = {}", self.port),
            // No Unix socket: its path would be too long in deep folders, and nobody uses it.
            "unix_socket_directories = ''".into(),
            // The page cache outlives a killed process, so without these two only a power failure loses rows.
            "fsync = off".into(),
            "full_page_writes = off".into(),
            "shared_buffers = 16MB".into(),
            "max_connections = 50".into(),
            "autovacuum = off".into(),
        ];
        lines.extend(self.options.lines.iter().cloned());
        programs::append(&self.data().join("postgresql.conf"), &(lines.join("\n") + "\n"))
    }

    fn launch(&self) -> Launch {
        self.program("postgres").args(["-D".into(), self.data().into_os_string()])
    }

    fn stop_signal(&self) -> Signal {
        // "Fast": TERM would wait until the last client has gone.
        Signal::INT
    }

    fn is_family(&self) -> bool {
        true
    }
}
