//! What can be done to a private server: kill, restart on the same data and port, freeze, thaw, stop.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Kind, RedisOptions, Server, answers, missing, running};

/// The server, or a noted skip on a machine that lacks its programs.
fn server(kind: Kind) -> Option<Server> {
    (!missing(kind)).then(|| Server::start(kind).unwrap())
}

/// On a busy machine even a healthy server misses the patience of one try now and then.
fn is_well(server: &Server) -> bool {
    mq_testbed::eventually(Duration::from_secs(30), || server.answers())
}

fn hurt(mut server: Server) {
    let kind = server.kind();
    let first = server.pid().unwrap();
    assert!(is_well(&server));

    assert_eq!(server.kill().unwrap().pid, first);
    assert!(!server.answers(), "{kind} answers after kill -9");
    assert!(server.kill().is_err(), "killing twice is a mistake of the test");
    let again = server.restart().unwrap();
    assert_ne!(again.pid, first);
    assert!(is_well(&server));

    server.freeze().unwrap();
    assert!(!server.answers(), "{kind} answers while frozen");
    server.thaw().unwrap();
    assert!(
        mq_testbed::eventually(Duration::from_secs(20), || server.answers()),
        "{kind} is not back from the freezer"
    );

    assert_eq!(server.stop().unwrap().pid, again.pid);
    server.restart().unwrap();
    assert!(is_well(&server));

    let (port, folder) = (server.port(), server.folder().to_path_buf());
    drop(server);
    assert!(!answers(kind, port));
    assert!(!folder.exists(), "the folder stays");
    assert!(!running().iter().any(|process| process.folder.starts_with(&folder)), "a process stays");
}

#[test]
fn redis_can_be_hurt() {
    let _ = server(Kind::Redis).map(hurt);
}

#[test]
fn rabbitmq_can_be_hurt() {
    let _ = server(Kind::RabbitMq).map(hurt);
}

#[test]
fn kafka_can_be_hurt() {
    let _ = server(Kind::Kafka).map(hurt);
}

#[test]
fn postgres_can_be_hurt() {
    let _ = server(Kind::Postgres).map(hurt);
}

fn redis_says(port: u16, command: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    write!(stream, "{command}\r\n").unwrap();
    let mut answer = [0; 100];
    let length = stream.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

#[test]
fn a_durable_redis_keeps_its_data_over_a_kill() {
    if missing(Kind::Redis) {
        return;
    }
    let mut server = RedisOptions { durable: true, ..RedisOptions::default() }.start().unwrap();
    assert_eq!(redis_says(server.port(), "SET key value"), "+OK\r\n");
    server.kill().unwrap();
    server.restart().unwrap();
    assert_eq!(redis_says(server.port(), "GET key"), "$5\r\nvalue\r\n");
}

#[test]
fn a_server_behind_a_proxy_can_be_cut_off() {
    if missing(Kind::Redis) {
        return;
    }
    let (server, mut proxy) = Proxy::with_server(Kind::Redis, 7).unwrap();
    assert!(server.url_at(proxy.port()).contains(&proxy.port().to_string()));
    let answers_soon = |port| mq_testbed::eventually(Duration::from_secs(30), || answers(Kind::Redis, port));
    assert!(answers_soon(proxy.port()));
    let trouble = Trouble::Swallow(Direction::ToClient);
    proxy.begin(trouble).unwrap();
    assert!(!answers(Kind::Redis, proxy.port()));
    assert!(proxy.end(trouble).unwrap().bytes > 0);
    assert!(answers_soon(proxy.port()));
}

#[test]
fn kafka_names_the_proxy_to_those_who_come_through_it() {
    if missing(Kind::Kafka) {
        return;
    }
    let (server, proxy) = Proxy::with_server(Kind::Kafka, 7).unwrap();
    for port in [proxy.port(), server.port()] {
        assert!(mq_testbed::eventually(Duration::from_secs(30), || answers(Kind::Kafka, port)));
    }
    // A Metadata answer spells the port of the first broker after its host, "127.0.0.1".
    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.write_all(&[0, 0, 0, 15, 0, 3, 0, 5, 0, 0, 0, 7, 0xff, 0xff, 0, 0, 0, 0, 0]).unwrap();
    let mut answer = [0; 35];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer[22..31], b"127.0.0.1");
    assert_eq!(i32::from_be_bytes(answer[31..35].try_into().unwrap()), i32::from(proxy.port()));
}

#[test]
fn a_port_that_another_took_is_not_taken_for_ours() {
    if missing(Kind::Redis) {
        return;
    }
    let port = mq_testbed::free_port().unwrap();
    let _another = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let refused = RedisOptions { port: Some(port), ..RedisOptions::default() }.start().err().unwrap().to_string();
    assert!(refused.contains(&format!("something else listens on port {port}")), "{refused}");
}
