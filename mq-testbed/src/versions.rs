//! Newer servers beside the machine's own: unpacked into a private root from the next Debian release, and further
//! versions of Kafka. The system's packages are not touched.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use crate::server::Recipe;
use crate::{KafkaOptions, Kind, Launch, Problem, RedisOptions, Result, Server, folders, install, programs};

/// A version that the default ones are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// Redis 8.0.
    Redis8,
    /// Valkey 8.1, the fork of Redis.
    Valkey8,
    /// RabbitMQ 4.0.
    RabbitMq4,
    /// Kafka 3.9, the last that old installations came from.
    Kafka39,
    /// Kafka 4.4.
    Kafka44,
}

/// Debian's next release as seen from 12, by name.
const RELEASE: &str = "trixie";

/// What is taken from it: the servers, and what their start scripts need inside a root of their own.
const PACKAGES: [&str; 10] = [
    "redis-server",
    "valkey-server",
    "rabbitmq-server",
    "dash",
    "coreutils",
    "sed",
    "grep",
    "base-files",
    "debianutils",
    "hostname",
];

impl Version {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Redis8, Self::Valkey8, Self::RabbitMq4, Self::Kafka39, Self::Kafka44];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Redis8 => "redis-8.0",
            Self::Valkey8 => "valkey-8.1",
            Self::RabbitMq4 => "rabbitmq-4.0",
            Self::Kafka39 => "kafka-3.9",
            Self::Kafka44 => "kafka-4.4",
        }
    }

    /// The variable under which its URL is made known.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Redis8 => "MQ_TEST_REDIS_8_0_URL",
            Self::Valkey8 => "MQ_TEST_VALKEY_8_1_URL",
            Self::RabbitMq4 => "MQ_TEST_AMQP_4_0_URL",
            Self::Kafka39 => "MQ_TEST_KAFKA_3_9_URL",
            Self::Kafka44 => "MQ_TEST_KAFKA_4_4_URL",
        }
    }

    /// What it is a version of.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Self::Redis8 | Self::Valkey8 => Kind::Redis,
            Self::RabbitMq4 => Kind::RabbitMq,
            Self::Kafka39 | Self::Kafka44 => Kind::Kafka,
        }
    }

    /// The number of the Kafka that it is, as `MQ_TEST_KAFKA_VERSION` takes it.
    #[must_use]
    pub const fn kafka(self) -> Option<&'static str> {
        match self {
            Self::Kafka39 => Some("3.9.1"),
            Self::Kafka44 => Some("4.4.0"),
            _ => None,
        }
    }

    /// Starts it in a folder below the one given; [`provide`](Version::provide) has to have been there before.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_in(self, parent: &Path) -> Result<Server> {
        let path = parent.join(self.name());
        if let Some(version) = self.kafka() {
            return crate::kafka::start_program(programs::kafka_version(version)?, &path, KafkaOptions::default());
        }
        let root = private_root();
        if !root.join("complete").exists() {
            return Err(Problem::new(format!(
                "{} is not unpacked; `cargo xtask brokers up --versions` does it",
                self.name()
            )));
        }
        match self {
            Self::RabbitMq4 => Server::with(|_| crate::rabbitmq::recipe_in_root(&path, &root), &path),
            _ => Server::with(|_| self.redis(&path, &root), &path),
        }
    }

    fn redis(self, path: &Path, root: &Path) -> Result<Box<dyn Recipe>> {
        let program = if self == Self::Valkey8 { "valkey-server" } else { "redis-server" };
        let mut launch = Launch::new(root.join("lib64/ld-linux-x86-64.so.2"), path);
        // By its own loader, so that it finds its own newer C library.
        launch = launch.args([OsString::from("--library-path"), root.join("usr/lib/x86_64-linux-gnu").into()]);
        launch = launch.args([root.join("usr/bin").join(program)]);
        crate::redis::recipe_by(launch, path, RedisOptions::default())
    }

    /// Gets these versions onto the machine.
    ///
    /// # Errors
    /// When the cache cannot be locked. What cannot be had is told to `say`.
    pub fn provide(versions: &[Self], mut say: impl FnMut(&str)) -> Result<()> {
        folders::make(&folders::cache())?;
        let lock = File::create(folders::cache().join("lock")).map_err(Problem::during("open the cache's lock"))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(Problem::during("lock the cache"))?;
        for version in versions.iter().filter_map(|version| version.kafka()) {
            if let Err(problem) = install::kafka(version, &mut say) {
                say(&problem.to_string());
            }
        }
        let from_debian = versions.iter().any(|version| version.kafka().is_none());
        if from_debian
            && !private_root().join("complete").exists()
            && let Err(problem) = unpack(&mut say)
        {
            say(&problem.to_string());
        }
        Ok(())
    }
}

fn private_root() -> PathBuf {
    folders::cache().join(RELEASE)
}

/// Downloads and unpacks the packages, with an apt state of its own whose empty list of installed packages makes apt
/// fetch everything down to the C library.
fn unpack(say: &mut impl FnMut(&str)) -> Result<()> {
    if !rustix::process::geteuid().is_root() || programs::on_path("apt-get").is_none() {
        return Err(Problem::new(format!("the servers of Debian {RELEASE} are unpacked by apt, as root on Debian")));
    }
    say(&format!("unpacking Redis 8, Valkey 8 and RabbitMQ 4 of Debian {RELEASE} into a private root"));
    let sources = fs::read_to_string("/etc/apt/sources.list.d/debian.sources").unwrap_or_default();
    let mirror = sources.lines().find_map(|line| line.strip_prefix("URIs:")).map(str::trim);
    let mirror = mirror.and_then(|uris| uris.split(' ').next()).unwrap_or("http://deb.debian.org/debian");
    let apt = folders::cache().join("apt");
    for folder in ["sources", "parts", "state/lists/partial", "cache/archives/partial"] {
        folders::make(&apt.join(folder))?;
    }
    programs::write(&apt.join("state/status"), "")?;
    programs::write(
        &apt.join("sources.list"),
        &format!("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {RELEASE} main\n"),
    )?;
    let at = |below: &str| apt.join(below).display().to_string();
    programs::write(
        &apt.join("apt.conf"),
        &format!(
            "Dir::State \"{}\"; Dir::State::status \"{}\"; Dir::Cache \"{}\";\n\
             Dir::Etc::sourcelist \"{}\"; Dir::Etc::sourceparts \"{}\"; Dir::Etc::preferencesparts \"{}\";\n\
             Dir::Etc::parts \"{}\"; APT::Install-Recommends \"false\"; APT::Sandbox::User \"root\";\n\
             Acquire::Languages \"none\"; Acquire::Check-Valid-Until \"false\"; Acquire::Check-Date \"false\";\n",
            at("state"),
            at("state/status"),
            at("cache"),
            at("sources.list"),
            at("sources"),
            at("parts"),
            at("parts"),
        ),
    )?;
    let conf = apt.join("apt.conf");
    run(Command::new("apt-get").env("APT_CONFIG", &conf).args(["-q", "update"]))?;
    run(Command::new("apt-get")
        .env("APT_CONFIG", &conf)
        .args(["-q", "-y", "--download-only", "install"])
        .args(PACKAGES))?;

    let root = private_root();
    let _ = fs::remove_dir_all(&root);
    for name in ["bin", "sbin", "lib", "lib64"] {
        folders::make(&root.join("usr").join(name))?;
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name))
            .map_err(Problem::during("link in the root"))?;
    }
    let archives = fs::read_dir(apt.join("cache/archives")).map_err(Problem::during("read the downloads"))?;
    for archive in archives.flatten().map(|entry| entry.path()) {
        if archive.extension().is_some_and(|end| end == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&root))?;
        }
    }
    for folder in ["etc", "proc", "dev"] {
        folders::make(&root.join(folder))?;
    }
    programs::write(&root.join("etc/hosts"), "127.0.0.1 localhost\n")?;
    programs::write(&root.join("complete"), "")
}

fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null()).output();
    let output = output.map_err(Problem::during(format!("start {name}")))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Problem::new(format!("{name} failed: {}", words.lines().last().unwrap_or("it said nothing"))))
}
