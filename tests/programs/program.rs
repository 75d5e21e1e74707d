//! An example program that runs.

use mq_testbed::Knock;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) struct Program {
    child: Mutex<Child>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Mutex<Option<JoinHandle<()>>>,
}

impl Program {
    pub(crate) fn start(example: &str, args: &[&str], url: &str) -> Self {
        let folder = std::env::current_exe().unwrap();
        let path: PathBuf = folder.parent().unwrap().parent().unwrap().join("examples").join(example);
        assert!(path.exists(), "{} is not built; run `cargo test -p anymq --features redis`", path.display());
        let mut child = Command::new(path)
            .args(args)
            .env("MQ_URL", url)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (stdout, all) = (child.stdout.take().unwrap(), lines.clone());
        let reader = std::thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).for_each(|line| all.lock().unwrap().push(line));
        });
        Self { child: Mutex::new(child), lines, reader: Mutex::new(Some(reader)) }
    }

    /// What it printed so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    /// Waits until it prints a line.
    pub(crate) fn has(&self, line: &str, limit: Duration) {
        wait(limit, line, || self.lines.lock().unwrap().iter().any(|l| l == line));
    }

    pub(crate) fn knock(&self, knock: Knock) {
        mq_testbed::send(self.child.lock().unwrap().id(), knock);
    }

    /// Waits until it ends, and until all that it printed was read.
    pub(crate) fn ends(&self, limit: Duration) -> ExitStatus {
        let until = Instant::now() + limit;
        let status = loop {
            if let Some(status) = self.child.lock().unwrap().try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < until, "it did not end within {limit:?}: {:#?}", self.lines());
            std::thread::sleep(Duration::from_millis(5));
        };
        if let Some(reader) = self.reader.lock().unwrap().take() {
            reader.join().unwrap();
        }
        status
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap();
        // It may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
}

pub(crate) fn wait(limit: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < until, "waited {limit:?} for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
