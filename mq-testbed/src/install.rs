//! Getting the servers' programs onto a machine that lacks them, without starting any service.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use crate::programs::{self, KAFKA};
use crate::{Folder, KafkaOptions, Kind, Problem, Result, folders};

/// What is missing to run that kind of server; `None` when it can run.
#[must_use]
pub fn shortage(kind: Kind) -> Option<Problem> {
    match kind {
        Kind::Redis => programs::redis().err(),
        Kind::RabbitMq => programs::rabbitmq().err(),
        Kind::Kafka => programs::kafka().err(),
        Kind::Postgres => programs::postgres().err(),
    }
}

/// Installs what is missing, as far as this machine allows; ask [`shortage`] for the outcome.
///
/// `say` hears what is being done, for it takes a minute on a fresh machine.
///
/// # Errors
/// When the cache cannot be locked. A failed installation is told to `say`, and the kind stays missing.
pub(crate) fn provide(kinds: &[Kind], mut say: impl FnMut(&str)) -> Result<()> {
    folders::make(&folders::cache())?;
    // One installation at a time per checkout; apt has a lock of its own against others.
    let lock = File::create(folders::cache().join("lock")).map_err(Problem::during("open the cache's lock"))?;
    flock(&lock, FlockOperation::LockExclusive).map_err(Problem::during("lock the cache"))?;
    if let Err(problem) = packages(kinds, &mut say) {
        say(&problem.to_string());
    }
    if kinds.contains(&Kind::Kafka)
        && let Err(problem) = kafka(KAFKA, &mut say)
    {
        say(&problem.to_string());
    }
    Ok(())
}

/// Installs what building the whole workspace needs beside a C toolchain, as far as it is missing and this machine
/// allows: OpenSSL for librdkafka's TLS, and its command line tool for tests of TLS.
///
/// # Errors
/// What to install by hand.
pub fn provide_for_build(mut say: impl FnMut(&str)) -> Result<()> {
    let mut wanted = Vec::new();
    if programs::on_path("pkg-config").is_none() {
        wanted.push("pkg-config");
    }
    let found = Command::new("pkg-config").args(["--exists", "openssl"]).status();
    if !found.is_ok_and(|status| status.success()) {
        wanted.push("libssl-dev");
    }
    for program in ["openssl", "make"] {
        if programs::on_path(program).is_none() {
            wanted.push(program);
        }
    }
    install_packages(&wanted, &mut say)
}

fn packages(kinds: &[Kind], say: &mut impl FnMut(&str)) -> Result<()> {
    let mut wanted: Vec<&str> = Vec::new();
    for kind in kinds {
        match kind {
            Kind::Redis if programs::redis().is_err() => wanted.push("redis-server"),
            Kind::RabbitMq if programs::rabbitmq().is_err() => wanted.push("rabbitmq-server"),
            Kind::Postgres if programs::postgres().is_err() => wanted.push("postgresql"),
            Kind::Kafka if programs::kafka().is_err() => {
                if programs::on_path("java").is_none() {
                    wanted.push(java_package());
                }
                if programs::on_path("mvn").is_none() {
                    wanted.push("maven");
                }
            }
            _ => {}
        }
    }
    install_packages(&wanted, say)
}

fn install_packages(wanted: &[&str], say: &mut impl FnMut(&str)) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let list = wanted.join(" ");
    if programs::on_path("apt-get").is_none() || !rustix::process::geteuid().is_root() {
        return Err(Problem::new(format!("packages to install by hand, or as root on Debian and Ubuntu: {list}")));
    }
    say(&format!("installing {list} (no service of theirs is started)"));
    let _guard = NoStart::set()?;
    apt(&["update"])?;
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(wanted);
    apt(&arguments)
}

/// Debian 12 has Java 17, its successor 21; Kafka runs on both.
fn java_package() -> &'static str {
    let known = Command::new("apt-cache").args(["show", "openjdk-17-jre-headless"]).output();
    if known.is_ok_and(|output| output.status.success()) {
        "openjdk-17-jre-headless"
    } else {
        "openjdk-21-jre-headless"
    }
}

fn apt(arguments: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .args(["-q", "-o", "DPkg::Lock::Timeout=300"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .map_err(Problem::during("start apt-get"))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = words.lines().filter(|line| line.starts_with("E:") || line.starts_with("Err:")).collect();
    Err(Problem::new(format!("apt-get {} failed: {}", arguments.join(" "), words.join("; "))))
}

/// While it lives, packages do not start the services they install: Debian's `policy-rc.d` says no for all of them.
/// One that is already there (as in containers) is left alone.
struct NoStart {
    ours: bool,
}

const POLICY: &str = "/usr/sbin/policy-rc.d";
const POLICY_TEXT: &str = "#!/bin/sh\n# anymq: no service is started while its test servers are installed\nexit 101\n";

impl NoStart {
    fn set() -> Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        // One with our words was left by a run that was killed: take it over, so that it goes this time.
        let ours = match fs::read_to_string(POLICY) {
            Ok(text) => text == POLICY_TEXT,
            Err(_) => {
                programs::write(Path::new(POLICY), POLICY_TEXT)?;
                fs::set_permissions(POLICY, fs::Permissions::from_mode(0o755))
                    .map_err(Problem::during(format!("make {POLICY} executable")))?;
                true
            }
        };
        Ok(Self { ours })
    }
}

impl Drop for NoStart {
    fn drop(&mut self) {
        if self.ours {
            let _ = fs::remove_file(POLICY);
        }
    }
}

/// Downloads a version of Kafka from Maven Central and makes its archive of loaded classes.
pub(crate) fn kafka(version: &str, say: &mut impl FnMut(&str)) -> Result<()> {
    let folder = programs::kafka_folder(version);
    if !folder.join("libs").exists() {
        if programs::on_path("mvn").is_none() {
            return Err(Problem::new("Kafka is downloaded with mvn; install the package maven"));
        }
        say(&format!("downloading Kafka {version} from Maven Central"));
        folders::make(&folder)?;
        programs::write(&folder.join("pom.xml"), &POM.replace("VERSION", version))?;
        let aside = folder.join("libs.part");
        let _ = fs::remove_dir_all(&aside);
        let output = Command::new("mvn")
            .args(["-q", "-B", "-f"])
            .arg(folder.join("pom.xml"))
            .arg("dependency:copy-dependencies")
            .arg("-DincludeScope=runtime")
            .arg(format!("-DoutputDirectory={}", aside.display()))
            .stdin(Stdio::null())
            .output()
            .map_err(Problem::during("start mvn"))?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stdout);
            let first = words.lines().find(|line| line.contains("ERROR")).unwrap_or("it said nothing");
            return Err(Problem::new(format!("mvn could not download Kafka {version}: {first}")));
        }
        fs::rename(&aside, folder.join("libs")).map_err(Problem::during("move Kafka's jars into place"))?;
    }
    if folder.join("classes.jsa").exists() {
        return Ok(());
    }
    say(&format!("making Kafka {version} start faster (archive of its classes)"));
    // Without the archive all works, slower: a failure here is only told.
    if let Err(problem) = archive_classes(version, &folder) {
        say(&format!("no archive of classes, so Kafka starts slower: {problem}"));
    }
    Ok(())
}

/// Runs a broker once; the Java machine writes what it loaded when it is asked to stop.
fn archive_classes(version: &str, folder: &Path) -> Result<()> {
    let aside = folder.join("classes.part");
    let mut program = programs::kafka_version(version)?;
    program.archive = Some(format!("-XX:ArchiveClassesAtExit={}", aside.display()));
    let run = Folder::for_run()?;
    let mut server = crate::kafka::start_program(program, run.path(), KafkaOptions::default())?;
    server.stop()?;
    fs::rename(&aside, folder.join("classes.jsa")).map_err(Problem::during("move the archive into place"))
}

/// SLF4J's own small logger goes with it: without one, Kafka's reasons for not starting are lost.
const POM: &str = r#"<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>anymq</groupId>
  <artifactId>test-kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>VERSION</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-api</artifactId><version>2.0.17</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>2.0.17</version></dependency>
  </dependencies>
</project>
"#;
