//! `cargo xtask brokers`: the real servers, started and ended on their own.
//!
//! `up` starts a keeper, a process that starts the servers and stays while they do. Every server ends with the keeper,
//! and the keeper ends with `up` until `up` has told it to stay; so neither a `kill -9` of `up` half way nor one of the
//! keeper leaves a server behind.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Subcommand;
use mq_testbed::{Entry, Fleet, Folder, Formation, Kind, Knock, Origin, Problem, Version, Want};
use serde_json::{Value, json};

use crate::{Outcome, containers};

/// Arguments of `cargo xtask brokers`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Install what is missing, start the servers, and write their URLs to `target/brokers/env`.
    Up(Which),
    /// End the servers of `up` and remove their state.
    Down,
    /// List servers, processes and ports, of `up` and of every test that runs in this checkout.
    Status,
    /// Print the end of the servers' logs.
    Logs {
        /// redis, rabbitmq, kafka or postgres; all of them by default.
        server: Option<String>,
    },
    /// The keeper that `up` starts.
    #[command(hide = true)]
    Keep(Which),
}

#[derive(clap::Args, Clone, Copy)]
struct Which {
    /// Also three nodes each: Redis with Sentinel, Redis Cluster, RabbitMQ, Kafka.
    #[arg(long)]
    cluster: bool,
    /// Also other versions: Redis 8.0, Valkey 8.1, RabbitMQ 4.0, Kafka 3.9 and 4.4.
    #[arg(long)]
    versions: bool,
}

impl Which {
    fn wants(self) -> Vec<Want> {
        let mut wants: Vec<Want> = Kind::ALL.into_iter().map(Want::Single).collect();
        if self.cluster {
            wants.extend(Formation::ALL.into_iter().map(Want::Cluster));
        }
        if self.versions {
            wants.extend(Version::ALL.into_iter().map(Want::Version));
        }
        wants
    }
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    match args.action {
        Action::Up(which) => up(which),
        Action::Down => down(),
        Action::Status => status(),
        Action::Logs { server } => logs(server.as_deref()),
        Action::Keep(which) => keep(which),
    }
}

fn env_file() -> PathBuf {
    mq_testbed::root().join("env")
}

fn up_folder() -> PathBuf {
    mq_testbed::root().join("up")
}

/// What the keeper told about its servers, as it lies in `up/state.json`.
fn state() -> Option<Value> {
    serde_json::from_str(&fs::read_to_string(up_folder().join("state.json")).ok()?).ok()
}

fn up(which: Which) -> Outcome {
    mq_testbed::sweep();
    if state().is_some() {
        println!("already up; `cargo xtask brokers down` ends them");
        return report(&state().unwrap_or_default());
    }
    let wants = which.wants();
    mq_testbed::provide(&wants, |line| println!("{line}"))?;
    let short = |kind: &Kind| Want::Single(*kind).given().is_none() && mq_testbed::shortage(*kind).is_some();
    let short: Vec<Kind> = Kind::ALL.into_iter().filter(short).collect();
    let contained = containers::up(&short)?;

    fs::create_dir_all(mq_testbed::root()).map_err(Problem::during("make target/brokers"))?;
    let log = fs::File::create(mq_testbed::root().join("keeper.log")).map_err(Problem::during("open keeper.log"))?;
    // A session of its own: closing the terminal must not end it.
    let mut keeper = Command::new("setsid")
        .arg(crate::this_program())
        .args(["brokers", "keep"])
        .args(which.cluster.then_some("--cluster"))
        .args(which.versions.then_some("--versions"))
        // For the keeper, those in containers are servers that somebody else runs.
        .envs(contained.iter().map(|(kind, url)| (kind.variable(), url)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(Problem::during("start the keeper through setsid (package util-linux)"))?;
    let mut told = String::new();
    if let Some(out) = keeper.stdout.take() {
        BufReader::new(out).read_line(&mut told).map_err(Problem::during("hear from the keeper"))?;
    }
    let state: Value = serde_json::from_str(&told).map_err(|_| {
        format!("the keeper ended before its servers ran; see {}/keeper.log", mq_testbed::root().display())
    })?;
    let mut env = String::new();
    for entry in entries(&state) {
        if let Some(url) = entry["url"].as_str() {
            // Quoted: an AMQP URL holds a percent sign, another's may hold an ampersand.
            env += &format!("{}='{url}'\n", entry["variable"].as_str().unwrap_or_default());
        }
    }
    fs::write(env_file(), env).map_err(Problem::during("write target/brokers/env"))?;
    if let Some(mut input) = keeper.stdin.take() {
        input.write_all(b"stay\n").map_err(Problem::during("tell the keeper to stay"))?;
    }
    report(&state)
}

fn entries(state: &Value) -> &[Value] {
    state["entries"].as_array().map_or(&[], Vec::as_slice)
}

fn report(state: &Value) -> Outcome {
    let (mut up, mut missing) = (0, 0);
    for entry in entries(state) {
        let name = entry["name"].as_str().unwrap_or_default();
        match entry["url"].as_str() {
            Some(url) => {
                up += 1;
                println!("{name:<16} {url}  {}", entry["how"].as_str().unwrap_or_default());
            }
            None => {
                missing += 1;
                println!("{name:<16} missing: {}", entry["how"].as_str().unwrap_or_default());
            }
        }
    }
    println!("URLs for a shell: set -a; . {}; set +a", env_file().display());
    println!("{up} up, {missing} missing");
    if missing > 0 { Err("some servers are missing; what to install stands above".into()) } else { Ok(()) }
}

/// Starts the servers, tells about them in one line, and stays if told so.
fn keep(which: Which) -> Outcome {
    let (told, orders) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        if line.trim() != "stay" {
            // `up` is gone. Ending at once ends the servers too; the folder goes with the next call's sweep.
            std::process::exit(1);
        }
        let _ = told.send(());
    });
    let folder = Folder::for_up()?;
    let place = folder.path().join("state.json");
    let fleet = Fleet::start(&which.wants(), folder);
    let state = json!({ "entries": fleet.entries().iter().map(entry).collect::<Vec<_>>() });
    println!("{state}");
    orders.recv().map_err(Problem::during("hear from `up`"))?;
    fs::write(place, state.to_string()).map_err(Problem::during("write the state"))?;
    loop {
        // Until `down` kills this process, and the kernel its servers.
        std::thread::park();
    }
}

fn entry(entry: &Entry) -> Value {
    let how = match &entry.origin {
        Origin::Given => "given".to_owned(),
        Origin::Started(took) => format!("ready after {:.1} s", took.as_secs_f64()),
        Origin::Missing(problem) => problem.to_string(),
    };
    json!({ "name": entry.want.name(), "variable": entry.want.variable(), "url": entry.url, "how": how })
}

fn down() -> Outcome {
    let owner = fs::read_to_string(up_folder().join("owner")).unwrap_or_default();
    if mq_testbed::is_same(&owner) {
        let pid = owner.split('@').next().unwrap_or_default();
        // Not a clean stop: the data is removed anyway, and this way it takes no time.
        mq_testbed::send(pid.parse().unwrap_or(0), Knock::Kill);
        if !mq_testbed::eventually(Duration::from_secs(10), || !mq_testbed::is_same(&owner)) {
            return Err(format!("the keeper, process {pid}, does not end; was it started by another user?"));
        }
    }
    mq_testbed::sweep();
    containers::down()?;
    let _ = fs::remove_file(env_file());
    println!("down");
    Ok(())
}

fn status() -> Outcome {
    mq_testbed::sweep();
    let mut up = 0;
    if let Some(state) = state() {
        for entry in entries(&state) {
            let Some((want, url)) = entry["name"].as_str().and_then(Want::named).zip(entry["url"].as_str()) else {
                continue;
            };
            let answers = mq_testbed::url_answers(want.kind(), url);
            up += i32::from(answers);
            println!("{:<16} {url}  {}", want.name(), if answers { "answers" } else { "does not answer" });
        }
    }
    let running = mq_testbed::running();
    for process in &running {
        let folder = process.folder.strip_prefix(mq_testbed::root()).unwrap_or(&process.folder);
        println!(
            "process {:<7} {:<15} ports {:?} in {}",
            process.pid,
            process.program,
            process.ports,
            folder.display()
        );
    }
    let ports: usize = running.iter().map(|process| process.ports.len()).sum();
    println!("{up} up, {} processes, {ports} ports", running.len());
    Ok(())
}

fn logs(server: Option<&str>) -> Outcome {
    let wants = match server {
        None => Which { cluster: true, versions: true }.wants(),
        Some(name) => vec![Want::named(name).ok_or_else(|| format!("no server is called {name}; see `status`"))?],
    };
    let mut found = false;
    for want in wants {
        for file in mq_testbed::logs_in(&up_folder().join(want.name())) {
            found = true;
            print_end(&file)?;
        }
    }
    if found { Ok(()) } else { Err("no logs; `cargo xtask brokers up` starts the servers".into()) }
}

fn print_end(file: &Path) -> Outcome {
    let text = fs::read(file).map_err(Problem::during(format!("read {}", file.display())))?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    println!("== {} ({} lines)", file.display(), lines.len());
    for line in &lines[lines.len().saturating_sub(40)..] {
        println!("{line}");
    }
    Ok(())
}
