//! Servers with TLS, users and limits: they let in whom they should, and nobody else.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use mq_testbed::{
    Certificates, KafkaOptions, KafkaSecurity, Kind, Pair, RabbitOptions, RedisOptions, free_port, missing,
};

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn redis_cli(args: &[&str]) -> String {
    text(&Command::new("redis-cli").args(args).output().unwrap())
}

/// What OpenSSL says to a TLS port: it goes on after the handshake until the server hangs up or its input ends.
fn tls_handshake(port: u16, authority: &Path, client: Option<&Pair>) -> String {
    let mut command = Command::new("openssl");
    command.args(["s_client", "-verify_return_error", "-verify_hostname", "localhost", "-ign_eof", "-connect"]);
    command.arg(format!("localhost:{port}")).arg("-CAfile").arg(authority);
    if let Some(client) = client {
        command.arg("-cert").arg(&client.certificate).arg("-key").arg(&client.key);
    }
    // Nothing to say; `timeout` ends a conversation that the server would keep open.
    let mut limited = Command::new("timeout");
    limited.arg("2").arg(command.get_program()).args(command.get_args());
    text(&limited.stdin(Stdio::null()).output().unwrap())
}

fn demands_certificates(port: u16, world: &Certificates) {
    let good = tls_handshake(port, &world.authority, Some(&world.client));
    assert!(good.contains("Verify return code: 0 (ok)") && !good.contains("alert"), "{good}");
    let without = tls_handshake(port, &world.authority, None);
    assert!(without.contains("alert"), "{without}");
    let foreign = tls_handshake(port, &world.authority, Some(&world.foreign_client));
    assert!(foreign.contains("alert"), "{foreign}");
    let distrusting = tls_handshake(port, &world.other_authority, Some(&world.client));
    assert!(distrusting.contains("verify error"), "{distrusting}");
}

#[test]
fn redis_with_tls_and_users() {
    if missing(Kind::Redis) {
        return;
    }
    let (certificates, _folder) = &Certificates::for_run().unwrap();
    let port = free_port().unwrap();
    let server = RedisOptions::default()
        .tls(port, certificates, &certificates.server)
        .user("app", "secret", "~orders* &* +@all -@dangerous")
        .login_needed()
        .start()
        .unwrap();
    demands_certificates(port, certificates);
    let plain = server.port().to_string();
    assert!(redis_cli(&["-p", &plain, "PING"]).contains("NOAUTH"));
    let app = ["-p", &plain, "--user", "app", "--pass", "secret", "--no-auth-warning"];
    let says = |words: &[&str]| redis_cli(&[&app[..], words].concat());
    assert_eq!(says(&["SET", "orders1", "x"]), "OK\n");
    assert!(says(&["SET", "bills1", "x"]).contains("NOPERM"));
    assert!(says(&["FLUSHALL"]).contains("NOPERM"));
}

#[test]
fn a_server_can_have_a_bad_certificate() {
    if missing(Kind::Redis) {
        return;
    }
    let (certificates, _folder) = &Certificates::for_run().unwrap();
    for (server, complaint) in [
        (&certificates.expired_server, "certificate has expired"),
        (&certificates.misnamed_server, "hostname mismatch"),
    ] {
        let port = free_port().unwrap();
        let _running = RedisOptions::default().tls(port, certificates, server).start().unwrap();
        let words = tls_handshake(port, &certificates.authority, Some(&certificates.client));
        assert!(words.to_lowercase().contains(complaint), "{words}");
    }
}

#[test]
fn rabbitmq_with_tls_users_and_an_alarm() {
    if missing(Kind::RabbitMq) {
        return;
    }
    let (made, _folder) = Certificates::for_run().unwrap();
    let port = free_port().unwrap();
    let server = RabbitOptions::default()
        .tls(port, &made, &made.server)
        .user("app", "secret", "shop")
        .consumer_timeout(Duration::from_secs(3))
        .start()
        .unwrap();
    demands_certificates(port, &made);
    server.control(&["authenticate_user", "app", "secret"]).unwrap();
    assert!(server.control(&["authenticate_user", "app", "wrong"]).is_err());
    server.control(&["list_queues", "-p", "shop"]).unwrap();
    server.control(&["set_vm_memory_high_watermark", "absolute", "1MB"]).unwrap();
    let alarm = "[_ | _] = rabbit_alarm:get_alarms().";
    let rung = mq_testbed::eventually(Duration::from_secs(20), || server.control(&["eval", alarm]).is_ok());
    assert!(rung, "no alarm");
}

#[test]
fn kafka_with_tls_and_logins() {
    if missing(Kind::Kafka) {
        return;
    }
    let (certificates, _folder) = &Certificates::for_run().unwrap();
    let [sasl, sasl_tls, tls] = [(); 3].map(|()| free_port().unwrap());
    let security = KafkaSecurity {
        sasl,
        sasl_tls,
        tls,
        server: certificates.server.both.clone(),
        authority: certificates.authority.clone(),
        acls: true,
    };
    let _server = KafkaOptions { security: Some(security), ..KafkaOptions::default() }.start().unwrap();
    demands_certificates(tls, certificates);
    let asked_for_none = tls_handshake(sasl_tls, &certificates.authority, None);
    assert!(asked_for_none.contains("Verify return code: 0 (ok)"), "{asked_for_none}");
    // Whoever asks something else than to log in is hung up on.
    assert!(!mq_testbed::answers(Kind::Kafka, sasl));
}
