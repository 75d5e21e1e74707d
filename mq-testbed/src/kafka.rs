//! How an Apache Kafka is started: one process that is broker and controller (KRaft).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::programs::KafkaProgram;
use crate::server::Recipe;
use crate::{Kind, Launch, Result, Server, free_port, programs};

/// What a test may ask of its Kafka.
#[derive(Debug, Clone, Default)]
pub struct KafkaOptions {
    /// The port of a proxy before it. Clients are told this port by a listener of its own, else they would learn the
    /// broker's real port from it and go past the proxy. [`Server::port`] stays the direct one.
    pub proxied_as: Option<u16>,
    /// Further listeners, for tests with a proxy for each of their clients: `(port it binds, port that clients are told)`.
    pub doors: Vec<(u16, u16)>,
    /// Further lines of the properties file.
    pub lines: Vec<String>,
}

impl KafkaOptions {
    /// Starts a private Kafka with these options.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start(self) -> Result<Server> {
        Server::in_own_folder(|_, path| recipe(path, self.clone()), Kind::Kafka)
    }
}

pub(crate) fn recipe(path: &Path, options: KafkaOptions) -> Result<Box<dyn Recipe>> {
    with_program(programs::kafka()?, path, options)
}

fn with_program(program: KafkaProgram, path: &Path, options: KafkaOptions) -> Result<Box<dyn Recipe>> {
    Ok(Box::new(Kafka {
        path: path.to_path_buf(),
        port: free_port()?,
        controller: free_port()?,
        behind_proxy: free_port()?,
        program,
        options,
    }))
}

/// Starts a Kafka of a certain version, or with a certain archive of classes, in a folder below `parent`.
pub(crate) fn start_program(program: KafkaProgram, parent: &Path, options: KafkaOptions) -> Result<Server> {
    let path = parent.join(Kind::Kafka.name());
    Server::with(|_| with_program(program.clone(), &path, options.clone()), &path)
}

struct Kafka {
    path: PathBuf,
    port: u16,
    controller: u16,
    behind_proxy: u16,
    program: KafkaProgram,
    options: KafkaOptions,
}

/// Settings of the Java machine: the smallest heap that holds, the collector and compiler that start fastest.
pub(crate) const JAVA: [&str; 6] = [
    "-Xms32m",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xlog:disable",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
];

/// The file with the settings of one broker.
pub(crate) fn properties(path: &Path, port: u16, controller: u16, proxied: Option<(u16, u16)>) -> Vec<String> {
    let mut listeners = format!("PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}");
    let mut advertised = format!("PLAINTEXT://127.0.0.1:{port}");
    let mut protocols = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT".to_owned();
    if let Some((behind, before)) = proxied {
        listeners += &format!(",PROXIED://127.0.0.1:{behind}");
        advertised += &format!(",PROXIED://127.0.0.1:{before}");
        protocols += ",PROXIED:PLAINTEXT";
    }
    let mut lines = vec![
        "process.roles=broker,controller".to_owned(),
        "node.id=1".into(),
        format!("listeners={listeners}"),
        format!("advertised.listeners={advertised}"),
        "controller.listener.names=CONTROLLER".into(),
        "inter.broker.listener.name=PLAINTEXT".into(),
        format!("listener.security.protocol.map={protocols}"),
        format!("controller.quorum.bootstrap.servers=127.0.0.1:{controller}"),
        format!("log.dirs={}/data", path.display()),
        // A group's first members need not wait for others.
        "group.initial.rebalance.delay.ms=0".into(),
        // Tests choose short sessions, which the default minimum of 6 s refuses.
        "group.min.session.timeout.ms=1000".into(),
        "auto.create.topics.enable=false".into(),
        // The default of 128 MB is taken from the heap at start.
        "log.cleaner.dedupe.buffer.size=2097152".into(),
        // With the default session of 9 s the controller refuses a broker that was killed and comes back at once.
        "broker.session.timeout.ms=1000".into(),
        "broker.heartbeat.interval.ms=100".into(),
    ];
    for topic in ["offsets.topic", "transaction.state.log", "share.coordinator.state.topic"] {
        lines.push(format!("{topic}.replication.factor=1"));
    }
    for topic in ["transaction.state.log", "share.coordinator.state.topic"] {
        lines.push(format!("{topic}.min.isr=1"));
    }
    for topic in ["offsets.topic", "transaction.state.log"] {
        // The defaults of 50 cost seconds at the first use.
        lines.push(format!("{topic}.num.partitions=1"));
    }
    lines
}

impl Kafka {
    fn file(&self) -> PathBuf {
        self.path.join("server.properties")
    }
}

impl Recipe for Kafka {
    fn kind(&self) -> Kind {
        Kind::Kafka
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn behind_proxy(&self) -> u16 {
        self.options.proxied_as.map_or(self.port, |_| self.behind_proxy)
    }

    fn url_at(&self, port: u16) -> String {
        format!("kafka://127.0.0.1:{port}")
    }

    fn prepare(&self) -> Result<()> {
        let proxied = self.options.proxied_as.map(|before| (self.behind_proxy, before));
        let mut lines = properties(&self.path, self.port, self.controller, proxied);
        for (number, (bound, told)) in self.options.doors.iter().enumerate() {
            for line in &mut lines {
                let more = match line.split_once('=').map_or("", |(key, _)| key) {
                    "listeners" => format!(",DOOR{number}://127.0.0.1:{bound}"),
                    "advertised.listeners" => format!(",DOOR{number}://127.0.0.1:{told}"),
                    "listener.security.protocol.map" => format!(",DOOR{number}:PLAINTEXT"),
                    _ => continue,
                };
                line.push_str(&more);
            }
        }
        if !self.options.doors.is_empty() {
            // Each listener has threads of its own.
            lines.push("num.network.threads=1".to_owned());
        }
        lines.extend(self.options.lines.iter().cloned());
        programs::write(&self.file(), &(lines.join("\n") + "\n"))?;
        format_storage(&self.program, &self.path, &self.file(), &["--standalone"])
    }

    fn launch(&self) -> Launch {
        self.program.java(&self.path).args(self.program.arguments("kafka.Kafka", [self.file().into_os_string()]))
    }
}

/// Writes the cluster's identity into the data folder, which a KRaft broker wants before its first start.
pub(crate) fn format_storage(program: &KafkaProgram, path: &Path, file: &Path, extra: &[&str]) -> Result<()> {
    let arguments = ["format", "-t", "abcdefghijklmnopqrstuv", "-c"].map(OsString::from);
    let arguments = arguments.into_iter().chain([file.into()]).chain(extra.iter().map(OsString::from));
    let mut launch = program.java(path).args(program.arguments("kafka.tools.StorageTool", arguments));
    launch.log = path.join("format.log");
    launch.run()
}
