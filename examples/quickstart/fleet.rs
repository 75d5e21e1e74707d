//! The members of both groups: started, killed, and started again when one dies.

use crate::ledger::Entry;
use crate::member::Member;
use crate::options::Options;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// What members report.
pub enum News {
    Entry(Entry),
    /// The member of this name is dead; if not of its own doing, it is killed now.
    Died(String),
}

enum Body {
    Task { task: JoinHandle<()>, stop: Arc<tokio::sync::Notify> },
    Process(Child),
}

pub struct Fleet {
    options: Arc<Options>,
    topic: String,
    lease: Duration,
    news: mpsc::UnboundedSender<News>,
    members: BTreeMap<String, (String, Body)>,
    born: usize,
    pub deaths: usize,
}

impl Fleet {
    pub fn new(options: Arc<Options>, topic: String, lease: Duration, news: mpsc::UnboundedSender<News>) -> Self {
        Self { options, topic, lease, news, members: BTreeMap::new(), born: 0, deaths: 0 }
    }

    /// Starts a member. Each has a name of its own: one that comes back is a new member.
    pub async fn start(&mut self, group: &str) -> Result<(), String> {
        self.born += 1;
        let name = format!("{group}-{}", self.born);
        let body = match self.options.processes {
            None => self.start_task(group, &name).await?,
            Some(_) => self.start_process(group, &name)?,
        };
        self.members.insert(name, (group.to_owned(), body));
        Ok(())
    }

    async fn start_task(&self, group: &str, name: &str) -> Result<Body, String> {
        // A connection of its own, as a process would have: handles of one name reach the same broker.
        let broker = anymq::connect(&self.options.url).await.map_err(|e| e.to_string())?;
        let (entries, deaths, own_name) = (self.news.clone(), self.news.clone(), name.to_owned());
        let member = Member {
            group: group.to_owned(),
            name: name.to_owned(),
            topic: self.topic.clone(),
            lease: self.lease,
            sabotage: self.options.sabotage,
            log: Arc::new(move |entry| drop(entries.send(News::Entry(entry)))),
            die: Arc::new(move || drop(deaths.send(News::Died(own_name.clone())))),
        };
        let stop = Arc::new(tokio::sync::Notify::new());
        let until = stop.clone();
        let task = tokio::spawn(async move {
            let name = member.name.clone();
            if let Err(error) = member.run(broker, async move { until.notified().await }).await {
                eprintln!("{name} ended: {error}");
            }
        });
        Ok(Body::Task { task, stop })
    }

    fn start_process(&self, group: &str, name: &str) -> Result<Body, String> {
        let program = std::env::current_exe().map_err(|e| format!("where is this program? {e}"))?;
        let mut child = Command::new(program)
            .args(self.options.for_member(group, name, &self.topic))
            // The parent's end of this pipe is the member's life line: it drains when the pipe closes.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("a member process does not start: {e}"))?;
        let (news, name) = (self.news.clone(), name.to_owned());
        if let Some(stdout) = child.stdout.take() {
            tokio::spawn(async move {
                let mut lines = BufReader::new(stdout).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    match serde_json::from_str(&line) {
                        Ok(entry) => drop(news.send(News::Entry(entry))),
                        Err(_) => println!("{name}: {line}"),
                    }
                }
                drop(news.send(News::Died(name)));
            });
        }
        Ok(Body::Process(child))
    }

    /// Kills `count` members of billing without warning.
    pub async fn kill(&mut self, count: usize) -> Result<(), String> {
        let names: Vec<String> = self
            .members
            .iter()
            .filter(|(_, (group, _))| group == "billing")
            .map(|(n, _)| n.clone())
            .take(count)
            .collect();
        for name in names {
            match self.members.get_mut(&name) {
                Some((_, Body::Process(child))) => {
                    child.start_kill().map_err(|e| format!("{name} cannot be killed: {e}"))?
                }
                _ => self.bury(&name).await?,
            }
            println!("killed {name}");
        }
        Ok(())
    }

    /// A member is dead: another takes its place.
    pub async fn bury(&mut self, name: &str) -> Result<(), String> {
        let Some((group, body)) = self.members.remove(name) else { return Ok(()) };
        self.deaths += 1;
        match body {
            Body::Task { task, .. } => {
                // As a kill would: nothing is settled or given back, and its leases run out.
                crate::crash::crash(&self.options.url, name)?;
                task.abort();
            }
            Body::Process(mut child) => drop(child.wait().await),
        }
        self.start(&group).await
    }

    /// Lets all members finish what they have.
    pub async fn stop(&mut self) {
        for (_, body) in self.members.values_mut() {
            match body {
                Body::Task { stop, .. } => stop.notify_one(),
                Body::Process(child) => drop(child.stdin.take()),
            }
        }
        for (name, (_, body)) in std::mem::take(&mut self.members) {
            let ended = match body {
                Body::Task { task, .. } => tokio::time::timeout(Duration::from_secs(10), task).await.is_ok(),
                Body::Process(mut child) => tokio::time::timeout(Duration::from_secs(10), child.wait()).await.is_ok(),
            };
            if !ended {
                eprintln!("{name} did not end within 10 s");
            }
        }
    }
}

/// The whole program of a member process: tells its parent what it does, a line each, before it acknowledges.
pub async fn member_process(options: &Options, group: String, name: String, lease: Duration) -> Result<(), String> {
    let broker = anymq::connect(&options.url).await.map_err(|e| e.to_string())?;
    let member = Member {
        group,
        name,
        topic: options.topic.clone().unwrap_or_else(|| "orders".to_owned()),
        lease,
        sabotage: options.sabotage,
        log: Arc::new(|entry| {
            if let Ok(line) = serde_json::to_string(&entry) {
                let mut out = std::io::stdout().lock();
                let _ = writeln!(out, "{line}").and_then(|()| out.flush());
            }
        }),
        // No destructor, no goodbye.
        die: Arc::new(|| std::process::abort()),
    };
    let parent_gone = async {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(_)) = lines.next_line().await {}
    };
    member.run(broker.clone(), parent_gone).await.map_err(|e| e.to_string())?;
    broker.close(Duration::from_secs(5)).await;
    Ok(())
}
