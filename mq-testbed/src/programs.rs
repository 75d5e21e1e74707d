//! Where the servers' programs are on this machine.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::{Launch, Problem, Result, folders, rabbitmq};

/// The Kafka that tests use unless they name another.
pub(crate) const KAFKA: &str = "4.1.1";

/// A program on the PATH, or where administrators' programs lie, which a plain user's PATH leaves out.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/bin", "/usr/sbin", "/usr/local/bin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

fn absent(what: &str, packages: &str) -> Problem {
    Problem::new(format!(
        "{what} is not on this machine; run `cargo xtask brokers up` as root, or install the package {packages}"
    ))
}

pub(crate) fn redis() -> Result<PathBuf> {
    on_path("redis-server").ok_or_else(|| absent("redis-server", "redis-server"))
}

/// The home of RabbitMQ (not the wrappers on the PATH, which change to another user and are no longer our child).
pub(crate) fn rabbitmq() -> Result<PathBuf> {
    let installed = newest("/usr/lib/rabbitmq/lib", |home| home.join("sbin/rabbitmq-server").is_file());
    match (installed, on_path("epmd")) {
        (Some(home), Some(_)) => rabbitmq::trimmed_home(&home),
        _ => Err(absent("RabbitMQ", "rabbitmq-server")),
    }
}

/// The folder with `initdb` and `postgres`, which Debian keeps off the PATH.
pub(crate) fn postgres() -> Result<PathBuf> {
    let complete = |bin: &Path| bin.join("initdb").is_file() && bin.join("postgres").is_file();
    newest("/usr/lib/postgresql", |version| complete(&version.join("bin")))
        .map(|version| version.join("bin"))
        .or_else(|| {
            let bin = fs::canonicalize(on_path("postgres")?).ok()?.parent()?.to_path_buf();
            complete(&bin).then_some(bin)
        })
        .ok_or_else(|| absent("PostgreSQL", "postgresql"))
}

fn newest(folder: &str, fits: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter(|path| fits(path)).collect();
    found.sort();
    found.pop()
}

/// A downloaded Kafka and the Java that runs it.
#[derive(Debug, Clone)]
pub(crate) struct KafkaProgram {
    java: PathBuf,
    classpath: OsString,
    /// Makes or uses the archive of loaded classes, which halves the start time.
    pub(crate) archive: Option<String>,
}

/// The folder of one Kafka version.
pub(crate) fn kafka_folder(version: &str) -> PathBuf {
    folders::cache().join(format!("kafka-{version}"))
}

pub(crate) fn kafka() -> Result<KafkaProgram> {
    kafka_version(&std::env::var("MQ_TEST_KAFKA_VERSION").unwrap_or_else(|_| KAFKA.into()))
}

pub(crate) fn kafka_version(version: &str) -> Result<KafkaProgram> {
    let java = on_path("java").ok_or_else(|| absent("Java 17", "openjdk-17-jre-headless"))?;
    let folder = kafka_folder(version);
    let mut jars: Vec<PathBuf> = fs::read_dir(folder.join("libs"))
        .map_err(|_| absent(&format!("Kafka {version}"), "maven, with which it is downloaded"))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    // Sorted, since the archive of classes is silently left aside when the path of classes is spelled otherwise.
    jars.sort();
    let classpath = std::env::join_paths(jars).map_err(Problem::during("a colon in the path of the checkout"))?;
    let archive = folder.join("classes.jsa");
    let archive = archive.exists().then(|| format!("-XX:SharedArchiveFile={}", archive.display()));
    Ok(KafkaProgram { java, classpath, archive })
}

impl KafkaProgram {
    /// Java with these settings of its machine.
    pub(crate) fn java(&self, folder: &Path, settings: &[&str]) -> Launch {
        Launch::new(&self.java, folder).args(self.archive.clone()).args(settings)
    }

    pub(crate) fn arguments(&self, class: &str, rest: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
        let mut arguments = vec!["-cp".into(), self.classpath.clone(), class.into()];
        arguments.extend(rest);
        arguments
    }
}

/// Writes a configuration file.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Problem::during(format!("write {}", path.display())))
}

/// Adds to a configuration file.
pub(crate) fn append(path: &Path, text: &str) -> Result<()> {
    fs::OpenOptions::new()
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(Problem::during(format!("write {}", path.display())))
}
