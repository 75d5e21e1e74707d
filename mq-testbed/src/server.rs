//! One private server, and what can be done to it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::process::tail;
use crate::watch::Watched;
use crate::{Folder, Kind, Launch, Problem, Process, Result, eventually, folders, ports, process, until};

/// Long, and it costs nothing: a server that ends is noticed at once. RabbitMQ needs 5 s on a quiet machine, and needed 180 s on
/// two cores that forty programs wanted.
pub(crate) const START: Duration = Duration::from_secs(600);
const STOP: Duration = Duration::from_secs(30);
/// The kernel needs a moment to close what a killed process listened on.
const FREED: Duration = Duration::from_secs(5);

/// What one kind of server needs, for one instance with its folder and ports.
pub(crate) trait Recipe: Send + Sync {
    fn kind(&self) -> Kind;
    /// The port that clients use.
    fn port(&self) -> u16;
    /// The URL for clients that come by that port: its own, or a proxy's.
    fn url_at(&self, port: u16) -> String;
    /// The port that a proxy before it leads to.
    fn behind_proxy(&self) -> u16 {
        self.port()
    }
    /// Writes configuration and makes the data folder; once.
    fn prepare(&self) -> Result<()>;
    /// Processes that have to be there first and stay over restarts.
    fn companions(&self) -> Vec<Launch> {
        Vec::new()
    }
    fn launch(&self) -> Launch;
    /// The server's own command line tool, where it has one.
    fn control(&self, _arguments: &[&str]) -> Option<Launch> {
        None
    }
    /// One try.
    fn ready(&self) -> bool {
        crate::answers(self.kind(), self.port())
    }
    /// The signal of a clean stop that does not wait for clients.
    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }
    /// Whether the server is a family of processes that must be frozen together.
    fn is_family(&self) -> bool {
        false
    }
}

/// A server of this process's own: on a free port of 127.0.0.1, with its state in a folder of its own, gone when
/// dropped and also when this process is killed.
pub struct Server {
    recipe: Box<dyn Recipe>,
    main: Option<Process>,
    watched: Option<Watched>,
    companions: Vec<Process>,
    path: PathBuf,
    /// It ran for the whole time and did not answer, which another port would not change.
    gave_up: bool,
    // Declared last: the folder goes after the processes in it.
    _folder: Option<Folder>,
}

/// Proof that a server was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Killed {
    /// The process that was ended.
    pub pid: i32,
}

/// Proof that a server is another process than before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restarted {
    /// The process now.
    pub pid: i32,
    /// From the start to the first good answer.
    pub ready_after: Duration,
}

impl Server {
    /// Starts one with the usual settings, in a folder of its own under `target/brokers/runs`.
    ///
    /// # Errors
    /// When its programs are missing (run `cargo xtask brokers up` once to get them), or it does not start.
    pub fn start(kind: Kind) -> Result<Self> {
        let folder = Folder::for_run()?;
        let mut server = Self::start_in(kind, folder.path())?;
        server._folder = Some(folder);
        Ok(server)
    }

    /// Starts one with the usual settings, in a folder below the one given, which has to be under `target/brokers`.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_in(kind: Kind, parent: &Path) -> Result<Self> {
        let path = parent.join(kind.name());
        match kind {
            Kind::Redis => Self::with(|_| crate::redis::recipe(&path, crate::RedisOptions::default()), &path),
            Kind::RabbitMq => Self::with(|_| crate::rabbitmq::recipe(&path, crate::RabbitOptions::default()), &path),
            Kind::Kafka => Self::with(|_| crate::kafka::recipe(&path, crate::KafkaOptions::default()), &path),
            Kind::Postgres => Self::with(|_| crate::postgres::recipe(&path, crate::PostgresOptions::default()), &path),
        }
    }

    /// Starts what `make` describes. It is asked again, for other ports, when the process ended at once: another
    /// program may have taken a port between our look and the server's bind.
    pub(crate) fn with(make: impl Fn(u32) -> Result<Box<dyn Recipe>>, path: &Path) -> Result<Self> {
        let mut last = None;
        for attempt in 0..3 {
            folders::remove(path);
            folders::make(path)?;
            let recipe = make(attempt)?;
            recipe.prepare()?;
            let path = path.to_path_buf();
            let mut server =
                Self { recipe, main: None, watched: None, companions: Vec::new(), path, gave_up: false, _folder: None };
            match server.launch(Duration::ZERO) {
                Ok(_) => return Ok(server),
                Err(problem) if server.gave_up => return Err(problem),
                Err(problem) => last = Some(problem),
            }
        }
        Err(last.unwrap_or_else(|| Problem::new("no attempt was made")))
    }

    pub(crate) fn in_own_folder(make: impl Fn(u32, &Path) -> Result<Box<dyn Recipe>>, kind: Kind) -> Result<Self> {
        let folder = Folder::for_run()?;
        let path = folder.path().join(kind.name());
        let mut server = Self::with(|attempt| make(attempt, &path), &path)?;
        server._folder = Some(folder);
        Ok(server)
    }

    /// Starts it once its port is free, which it must be within that time.
    fn launch(&mut self, freed: Duration) -> Result<Duration> {
        if self.companions.is_empty() {
            for companion in self.recipe.companions() {
                self.companions.push(companion.spawn()?);
            }
        }
        // Another's server there would answer for ours, which ends for want of the port.
        let port = self.recipe.port();
        if !eventually(freed, || ports::is_free(port)) {
            return Err(Problem::new(format!("something else listens on port {port}, which was free before")));
        }
        let begun = Instant::now();
        let launch = self.recipe.launch();
        let main = self.main.insert(launch.spawn()?);
        let kind = self.recipe.kind();
        let outcome = until(&format!("{kind} ready on port {}", self.recipe.port()), START, || {
            if let Some(status) = main.ended() {
                return Some(Err(status));
            }
            self.recipe.ready().then_some(Ok(()))
        });
        let failed = match outcome {
            Ok(Ok(())) => {
                self.watched = Some(Watched::new(kind, main.pid(), launch.log));
                return Ok(begun.elapsed());
            }
            Ok(Err(status)) => format!("{kind} ended with {status} while starting"),
            Err(problem) => {
                self.gave_up = true;
                problem.to_string()
            }
        };
        self.main = None;
        Err(Problem::new(format!("{failed}; the end of {}:\n{}", launch.log.display(), tail(&launch.log))))
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.recipe.kind()
    }

    /// The port that clients use.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.recipe.port()
    }

    /// The port that a proxy before it has to lead to; another than [`port`](Self::port) only for Kafka.
    #[must_use]
    pub fn behind_proxy(&self) -> u16 {
        self.recipe.behind_proxy()
    }

    /// The URL that the library connects to.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.port())
    }

    /// The URL of the same server behind another port, a proxy's.
    #[must_use]
    pub fn url_at(&self, port: u16) -> String {
        self.recipe.url_at(port)
    }

    /// Its folder, with its logs.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.path
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.main.as_ref().map(Process::pid)
    }

    /// Whether it answers.
    #[must_use]
    pub fn answers(&self) -> bool {
        self.recipe.ready()
    }

    /// Runs the server's command line tool (`rabbitmqctl`), as `["set_vm_memory_high_watermark", "absolute", "1MB"]` for
    /// a memory alarm and `["set_vm_memory_high_watermark", "0.4"]` for its end.
    ///
    /// # Errors
    /// When this kind of server has none, or the tool failed.
    pub fn control(&self, arguments: &[&str]) -> Result<()> {
        match self.recipe.control(arguments) {
            Some(launch) => launch.run(),
            None => Err(Problem::new(format!("{} has no command line tool here", self.kind()))),
        }
    }

    /// A clean stop, which keeps the data.
    ///
    /// # Errors
    /// When it is not running, or has to be killed after 30 s.
    pub fn stop(&mut self) -> Result<Killed> {
        let mut main = self.let_go("stop")?;
        let pid = main.pid();
        main.signal(self.recipe.stop_signal());
        // A frozen process takes the signal only once it is thawed.
        main.signal(Signal::CONT);
        if main.await_end(STOP) {
            return Ok(Killed { pid });
        }
        Err(Problem::new(format!("{} (process {pid}) did not stop within {STOP:?} and was killed", self.kind())))
    }

    /// `kill -9`: no farewell to clients, nothing flushed by the server.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill(&mut self) -> Result<Killed> {
        let mut main = self.let_go("kill")?;
        let pid = main.pid();
        main.kill();
        Ok(Killed { pid })
    }

    /// Starts it again after [`stop`](Self::stop) or [`kill`](Self::kill), on the same data and port.
    ///
    /// # Errors
    /// When it runs, or does not start.
    pub fn restart(&mut self) -> Result<Restarted> {
        if self.main.is_some() {
            return Err(Problem::new(format!("{} runs; stop or kill it before restarting", self.kind())));
        }
        let ready_after = self.launch(FREED)?;
        let pid = self.pid().ok_or_else(|| self.not_running("restart"))?;
        Ok(Restarted { pid, ready_after })
    }

    /// Freezes it (SIGSTOP): connections stay open and new ones are accepted by the kernel, but nobody answers from
    /// when this returns.
    ///
    /// # Errors
    /// When it is not running, or goes on for 10 s.
    pub fn freeze(&mut self) -> Result<()> {
        let family = self.recipe.is_family();
        let Some(main) = self.main.as_mut() else { return Err(self.not_running("freeze")) };
        // First the one that makes the others, so that no child is born after they were counted.
        let mut frozen = main.freeze();
        if family {
            frozen &= main.children().into_iter().all(process::freeze);
        }
        if frozen { Ok(()) } else { Err(Problem::new(format!("{} goes on after SIGSTOP", self.kind()))) }
    }

    /// Lets a frozen one go on.
    ///
    /// # Errors
    /// When it is not running.
    pub fn thaw(&mut self) -> Result<()> {
        let family = self.recipe.is_family();
        let Some(main) = self.main.as_mut() else { return Err(self.not_running("thaw")) };
        main.signal(Signal::CONT);
        if family {
            for child in main.children().into_iter().filter_map(Pid::from_raw) {
                // One that ended meanwhile needs no signal.
                let _ = kill_process(child, Signal::CONT);
            }
        }
        Ok(())
    }

    /// Its process, whose end is expected from now on.
    fn let_go(&mut self, what: &str) -> Result<Process> {
        self.watched = None;
        self.main.take().ok_or_else(|| self.not_running(what))
    }

    fn not_running(&self, what: &str) -> Problem {
        Problem::new(format!("cannot {what} {}: it is not running", self.recipe.kind()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Killed, not stopped: the data goes too. The main process before its companions, which it would miss.
        self.watched = None;
        self.main = None;
        self.companions.clear();
    }
}
