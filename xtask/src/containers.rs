//! Servers from a container engine, for what can neither be found nor installed on this machine.
//!
//! Untried where this was written: no engine answered there.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use mq_testbed::{Kind, Problem};

/// Engines with a `compose` command, in the order they are tried.
const ENGINES: [&str; 2] = ["docker", "podman"];

/// Where it is noted that containers were started, and by which engine.
fn note() -> PathBuf {
    mq_testbed::root().join("containers")
}

/// The engine that answers, if one does: a client without its daemon does not count.
fn engine() -> Option<&'static str> {
    ENGINES.into_iter().find(|engine| {
        let mut ask = Command::new(engine);
        ask.arg("info").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        ask.status().is_ok_and(|status| status.success())
    })
}

/// Starts these kinds by `compose.yaml`, and tells their URLs. Nothing, when no engine answers.
pub(crate) fn up(kinds: &[Kind]) -> Result<Vec<(Kind, String)>, Problem> {
    let Some(engine) = (if kinds.is_empty() { None } else { engine() }) else { return Ok(Vec::new()) };
    let mut started = Vec::new();
    let mut command = Command::new(engine);
    command.args(["compose", "--file", "compose.yaml", "up", "--detach", "--wait"]);
    for kind in kinds {
        let port = mq_testbed::free_port()?;
        let (variable, url) = match kind {
            Kind::Redis => ("ANYMQ_REDIS_PORT", format!("redis://127.0.0.1:{port}/")),
            Kind::RabbitMq => ("ANYMQ_AMQP_PORT", format!("amqp://guest:guest@127.0.0.1:{port}/%2f")),
            Kind::Kafka => ("ANYMQ_KAFKA_PORT", format!("kafka://127.0.0.1:{port}")),
            Kind::Postgres => ("ANYMQ_POSTGRES_PORT", format!("postgres://test@127.0.0.1:{port}/postgres")),
        };
        command.env(variable, port.to_string()).arg(kind.name());
        started.push((*kind, url));
    }
    // Before they start: a start that fails half way has to be taken down, too.
    std::fs::write(note(), engine).map_err(Problem::during("note that containers are used"))?;
    let status = command.status().map_err(Problem::during(format!("start {engine}")))?;
    if status.success() {
        Ok(started)
    } else {
        Err(Problem::new(format!("{engine} compose could not start them; what it said stands above")))
    }
}

/// Ends what [`up`] started.
pub(crate) fn down() -> Result<(), Problem> {
    let Ok(engine) = std::fs::read_to_string(note()) else { return Ok(()) };
    let arguments = ["compose", "--file", "compose.yaml", "down", "--volumes"];
    let status = Command::new(&engine).args(arguments).status().map_err(Problem::during(format!("start {engine}")))?;
    if !status.success() {
        return Err(Problem::new(format!("{engine} compose down failed; what it said stands above")));
    }
    std::fs::remove_file(note()).map_err(Problem::during("remove the note on containers"))
}
