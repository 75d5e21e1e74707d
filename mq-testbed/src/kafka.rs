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
    /// Listeners with login and TLS, beside the usual one.
    pub security: Option<KafkaSecurity>,
    /// Its place among several.
    pub member: Option<KafkaMember>,
    /// With the memory, collector and compiler that Kafka's own start script gives it, for who measures: slower to start, and
    /// a gigabyte.
    pub in_full: bool,
}

/// One of several brokers that are also the controllers.
#[derive(Debug, Clone)]
pub struct KafkaMember {
    /// Its number.
    pub id: u16,
    /// For clients.
    pub port: u16,
    /// For the controllers among each other.
    pub controller: u16,
    /// `1@127.0.0.1:PORT,2@...`
    pub voters: String,
}

/// Listeners with login and TLS, on ports that [`free_port`](crate::free_port) gives.
///
/// Users: `alice` with the password `alice-pw` by PLAIN, `dave` with `dave-pw` by SCRAM-SHA-256 and SCRAM-SHA-512. A
/// client with a certificate is the user of that name. The usual port stays open for all.
#[derive(Debug, Clone)]
pub struct KafkaSecurity {
    /// SASL without TLS.
    pub sasl: u16,
    /// SASL over TLS.
    pub sasl_tls: u16,
    /// TLS with client certificates.
    pub tls: u16,
    /// PEM file with the server's key and certificate.
    pub server: PathBuf,
    /// PEM file of the authority that signed the clients.
    pub authority: PathBuf,
    /// Whether users may do only what an ACL allows them; the usual port may do everything.
    pub acls: bool,
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
    let member = options.member.as_ref();
    Ok(Box::new(Kafka {
        path: path.to_path_buf(),
        port: member.map_or_else(free_port, |member| Ok(member.port))?,
        controller: member.map_or_else(free_port, |member| Ok(member.controller))?,
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
const JAVA: [&str; 6] = [
    "-Xms32m",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xlog:disable",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
];

/// The same as `kafka-server-start.sh` of Kafka 4.1 has them.
const IN_FULL: [&str; 5] =
    ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35"];

/// A listener beside the usual one.
pub(crate) struct Listener {
    name: &'static str,
    protocol: &'static str,
    port: u16,
    advertised_port: u16,
}

/// The file with the settings of one broker.
pub(crate) fn properties(path: &Path, port: u16, controller: u16, further: &[Listener]) -> Vec<String> {
    let mut listeners = format!("PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}");
    let mut advertised = format!("PLAINTEXT://127.0.0.1:{port}");
    let mut protocols = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT".to_owned();
    for Listener { name, protocol, port, advertised_port } in further {
        listeners += &format!(",{name}://127.0.0.1:{port}");
        // By name for TLS: certificates name hosts.
        let host = if protocol.ends_with("SSL") { "localhost" } else { "127.0.0.1" };
        advertised += &format!(",{name}://{host}:{advertised_port}");
        protocols += &format!(",{name}:{protocol}");
    }
    let mut lines = vec![
        "process.roles=broker,controller".to_owned(),
        format!("listeners={listeners}"),
        format!("advertised.listeners={advertised}"),
        "controller.listener.names=CONTROLLER".into(),
        "inter.broker.listener.name=PLAINTEXT".into(),
        format!("listener.security.protocol.map={protocols}"),
        format!("log.dirs={}/data", path.display()),
        // A group's first members need not wait for others.
        "group.initial.rebalance.delay.ms=0".into(),
        // Tests choose short sessions, which the default minimum of 6 s refuses.
        "group.min.session.timeout.ms=1000".into(),
        "auto.create.topics.enable=false".into(),
        // The default of 128 MB is taken from the heap at start.
        "log.cleaner.dedupe.buffer.size=2097152".into(),
        // With the default session of 9 s the controller refuses a broker that was killed and comes back at once. No shorter than
        // a start takes anyway: a broker that a busy machine holds up for its session is put out by its own controller, and
        // every group is without coordinator for seconds.
        "broker.session.timeout.ms=3000".into(),
        "broker.heartbeat.interval.ms=200".into(),
        // A broker that was not let in within this time ends itself; by default after a minute, which is too short on a
        // machine where a dozen servers start at once. As long as we wait.
        "initial.broker.registration.timeout.ms=600000".into(),
    ];
    for topic in ["offsets.topic", "transaction.state.log"] {
        // The defaults of 50 cost seconds at the first use.
        lines.push(format!("{topic}.num.partitions=1"));
    }
    lines
}

/// The topics that Kafka makes for itself: copies, and how many of them must have a write.
fn copies(copies: u16, needed: u16) -> Vec<String> {
    let replicated = ["offsets.topic", "transaction.state.log", "share.coordinator.state.topic"];
    let mut lines: Vec<String> =
        replicated.iter().map(|topic| format!("{topic}.replication.factor={copies}")).collect();
    lines.extend(replicated[1..].iter().map(|topic| format!("{topic}.min.isr={needed}")));
    lines
}

fn single_lines(controller: u16) -> Vec<String> {
    let mut lines = vec!["node.id=1".to_owned(), format!("controller.quorum.bootstrap.servers=127.0.0.1:{controller}")];
    lines.extend(copies(1, 1));
    lines
}

fn member_lines(member: &KafkaMember) -> Vec<String> {
    let mut lines = vec![
        format!("node.id={}", member.id),
        format!("controller.quorum.voters={}", member.voters),
        "default.replication.factor=3".to_owned(),
        "min.insync.replicas=2".into(),
        // With these a new leader is there two seconds after the old one was killed, instead of nine. Shorter ones made
        // three brokers that start on a busy machine elect a dozen leaders before one could stay.
        "controller.quorum.election.timeout.ms=500".into(),
        "controller.quorum.election.backoff.max.ms=300".into(),
        "controller.quorum.fetch.timeout.ms=1500".into(),
        "controller.quorum.request.timeout.ms=1000".into(),
        // Over a network of threads that wait for a processor, a second is too short: brokers that live would be put out.
        "broker.session.timeout.ms=3000".into(),
        "broker.heartbeat.interval.ms=500".into(),
        "replica.lag.time.max.ms=2000".into(),
        "replica.fetch.wait.max.ms=100".into(),
    ];
    lines.extend(copies(3, 2));
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
        let mut further = Vec::new();
        if let Some(before) = self.options.proxied_as {
            let port = self.behind_proxy;
            further.push(Listener { name: "PROXIED", protocol: "PLAINTEXT", port, advertised_port: before });
        }
        let mut format = if self.options.member.is_some() { Vec::new() } else { vec!["--standalone"] };
        if let Some(KafkaSecurity { sasl, sasl_tls, tls, .. }) = self.options.security {
            for (name, protocol, port) in
                [("SASL", "SASL_PLAINTEXT", sasl), ("SASLTLS", "SASL_SSL", sasl_tls), ("TLS", "SSL", tls)]
            {
                further.push(Listener { name, protocol, port, advertised_port: port });
            }
            for user in SCRAM_USERS {
                format.extend(["--add-scram", user]);
            }
        }
        let mut lines = properties(&self.path, self.port, self.controller, &further);
        match &self.options.member {
            Some(member) => lines.extend(member_lines(member)),
            None => lines.extend(single_lines(self.controller)),
        }
        lines.extend(self.options.security.iter().flat_map(security_lines));
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
        format_storage(&self.program, &self.path, &self.file(), &format)
    }

    fn launch(&self) -> Launch {
        let java: &[&str] = if self.options.in_full { &IN_FULL } else { &JAVA };
        self.program.java(&self.path, java).args(self.program.arguments("kafka.Kafka", [self.file().into_os_string()]))
    }
}

/// SCRAM users are kept in the cluster's metadata, so they are made when it is formatted.
const SCRAM_USERS: [&str; 2] =
    ["SCRAM-SHA-256=[name=dave,password=dave-pw]", "SCRAM-SHA-512=[name=dave,password=dave-pw]"];

fn security_lines(security: &KafkaSecurity) -> Vec<String> {
    let mut lines = vec![
        "sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512".to_owned(),
        // A refused login is answered at once and not after the usual 300 ms.
        "connection.failed.authentication.delay.ms=0".into(),
        "ssl.keystore.type=PEM".into(),
        format!("ssl.keystore.location={}", security.server.display()),
        "ssl.truststore.type=PEM".into(),
        format!("ssl.truststore.location={}", security.authority.display()),
        "listener.name.tls.ssl.client.auth=required".into(),
        // A certificate for CN=client is the user called client.
        "ssl.principal.mapping.rules=RULE:^CN=([^,]+).*$/$1/,DEFAULT".into(),
    ];
    let module = "org.apache.kafka.common.security";
    for listener in ["sasl", "sasltls"] {
        // Each mechanism that is enabled needs its line, or the broker does not start.
        lines.push(format!(
            "listener.name.{listener}.plain.sasl.jaas.config={module}.plain.PlainLoginModule required \
             user_alice=\"alice-pw\";"
        ));
        for scram in ["scram-sha-256", "scram-sha-512"] {
            lines.push(format!(
                "listener.name.{listener}.{scram}.sasl.jaas.config={module}.scram.ScramLoginModule required;"
            ));
        }
    }
    if security.acls {
        lines.push("authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer".into());
        // The usual port, by which also the controller works, stays the administrator's door.
        lines.push("super.users=User:ANONYMOUS;User:admin".into());
    }
    lines
}

/// Writes the cluster's identity into the data folder, which a KRaft broker wants before its first start.
pub(crate) fn format_storage(program: &KafkaProgram, path: &Path, file: &Path, extra: &[&str]) -> Result<()> {
    let arguments = ["format", "-t", "abcdefghijklmnopqrstuv", "-c"].map(OsString::from);
    let arguments = arguments.into_iter().chain([file.into()]).chain(extra.iter().map(OsString::from));
    let mut launch = program.java(path, &JAVA).args(program.arguments("kafka.tools.StorageTool", arguments));
    launch.log = path.join("format.log");
    launch.run()
}
