//! Starting a server so that it cannot outlive the process that started it.
//!
//! Each is started through `setpriv --pdeathsig KILL`: the kernel ends it when its parent ends, also when the parent
//! is killed. The kernel means the parent *thread*, and test threads end, so one thread that lives as long as the
//! process starts them all.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::{Problem, Result, eventually, table};

/// How to start one process.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables set in addition to ours.
    pub env: Vec<(&'static str, OsString)>,
    /// The user it runs as, where it refuses to run as root.
    pub user: Option<String>,
    /// The working folder: also the mark by which the process is found again, see [`crate::running`].
    pub folder: PathBuf,
    /// Where what it prints is appended.
    pub log: PathBuf,
    /// Whether its input is a pipe, open until [`Process::close_input`]; else it is empty.
    pub piped: bool,
}

impl Launch {
    /// A program in a folder, printing to `out.log` there.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>, folder: &Path) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            user: None,
            folder: folder.to_path_buf(),
            log: folder.join("out.log"),
            piped: false,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// Starts it; it ends with this process at the latest.
    ///
    /// # Errors
    /// When the program or `setpriv` (package util-linux) is missing, or the log cannot be written.
    pub fn spawn(&self) -> Result<Process> {
        let command = self.command(true)?;
        Ok(Process { child: spawn_from_lasting_thread(command)?, log: self.log.clone() })
    }

    /// Runs it to its end, however long that takes.
    ///
    /// # Errors
    /// When it cannot be started or fails; the words are the end of its log.
    pub fn run(&self) -> Result<()> {
        let status = self.command(true)?.status().map_err(Problem::during(format!("start {}", self.program.display())));
        match status? {
            status if status.success() => Ok(()),
            status => Err(Problem::new(format!("{} ended with {status}: {}", self.program.display(), tail(&self.log)))),
        }
    }

    fn command(&self, held: bool) -> Result<Command> {
        let log = self.open_log()?;
        let err = log.try_clone().map_err(Problem::during("duplicate the log's handle"))?;
        let mut command = Command::new("setpriv");
        if held {
            command.args(["--pdeathsig", "KILL"]);
        }
        if let Some(user) = &self.user {
            // In the same call as --pdeathsig: a later change of user would clear that.
            command.args(["--reuid", user, "--regid", user, "--clear-groups"]);
        }
        command.arg("--").arg(&self.program).args(&self.args);
        // What a developer has set for a server of their own must not reach ours.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["RABBITMQ_", "ERL_", "PG", "KAFKA_", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "NOTIFY_SOCKET"]
                .iter()
                .any(|prefix| text.starts_with(prefix))
            {
                command.env_remove(&name);
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value))).current_dir(&self.folder);
        // Its own group: Ctrl-C ends us, and we end it; a half-ended server that printed its own farewell does not
        // mix into our output.
        command.process_group(0).stdout(log).stderr(err);
        command.stdin(if self.piped { Stdio::piped() } else { Stdio::null() });
        Ok(command)
    }

    fn open_log(&self) -> Result<File> {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .map_err(Problem::during(format!("open {}", self.log.display())))
    }
}

fn spawn_from_lasting_thread(command: Command) -> Result<Child> {
    type Order = (Command, mpsc::Sender<std::io::Result<Child>>);
    static STARTER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        thread::spawn(move || {
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let name = format!("{:?}", command.get_args().find(|arg| arg.to_string_lossy().starts_with('/')));
    let (answer, answered) = mpsc::channel();
    let sent = starter.lock().unwrap_or_else(PoisonError::into_inner).send((command, answer));
    sent.map_err(Problem::during("the thread that starts servers is gone"))?;
    answered
        .recv()
        .map_err(Problem::during("the thread that starts servers is gone"))?
        .map_err(Problem::during(format!("start {name} through setpriv (package util-linux)")))
}

/// A started process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        // An error means that it was reaped already, which `Child` remembers, so it cannot happen here.
        self.child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    /// Sends a signal, unless it has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none()
            && let Some(pid) = Pid::from_raw(self.pid())
        {
            // Fails only when it ended just now.
            let _ = kill_process(pid, signal);
        }
    }

    /// Freezes it (SIGSTOP), and returns once all its threads stand still; false when they did not within 10 s.
    pub fn freeze(&mut self) -> bool {
        self.ended().is_some() || freeze(self.pid())
    }

    /// Its direct children: a PostgreSQL server is a family, and each child leads a process group of its own.
    #[must_use]
    pub fn children(&self) -> Vec<i32> {
        table::children(self.pid())
    }

    /// Closes its input, which tells a client program to end.
    pub fn close_input(&mut self) {
        self.child.stdin = None;
    }

    /// Waits for its end.
    pub fn await_end(&mut self, limit: Duration) -> bool {
        eventually(limit, || self.ended().is_some())
    }

    /// `kill -9`, together with its children, and the wait for all of them to be gone.
    pub fn kill(&mut self) {
        let children = self.children();
        self.signal(Signal::KILL);
        for child in children.iter().filter_map(|child| Pid::from_raw(*child)) {
            let _ = kill_process(child, Signal::KILL);
        }
        self.await_end(Duration::from_secs(10));
        eventually(Duration::from_secs(10), || !children.iter().any(|child| table::is_alive(*child)));
    }

    /// The last lines it printed.
    #[must_use]
    pub fn said(&self) -> String {
        tail(&self.log)
    }
}

/// As [`Process::freeze`], for a child of one.
pub(crate) fn freeze(pid: i32) -> bool {
    if let Some(pid) = Pid::from_raw(pid) {
        // Fails only when it ended just now.
        let _ = kill_process(pid, Signal::STOP);
    }
    eventually(Duration::from_secs(10), || table::stands_still(pid))
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What [`send`] sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Knock {
    /// Ctrl-C.
    Interrupt,
    /// `kill -9`.
    Kill,
}

impl Knock {
    fn signal(self) -> Signal {
        match self {
            Self::Interrupt => Signal::INT,
            Self::Kill => Signal::KILL,
        }
    }
}

/// Sends a signal to a process; one that is gone already needs none. Not by the program `kill`, which small systems
/// lack.
pub fn send(process: u32, knock: Knock) {
    if let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, knock.signal());
    }
}

/// As [`send`], to a process group.
pub fn send_to_group(leader: u32, knock: Knock) {
    if let Some(pid) = i32::try_from(leader).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(pid, knock.signal());
    }
}

/// The last lines of a log, for an error message.
pub(crate) fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().rev().take(15).collect();
    let lines: Vec<&str> = lines.into_iter().rev().collect();
    if lines.is_empty() { format!("nothing in {}", log.display()) } else { lines.join("\n") }
}
