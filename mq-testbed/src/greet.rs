//! The first words of each protocol, spoken by hand: whether a server answers as what it should be, without a client
//! library.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::Kind;

/// Longer than any first answer of a healthy server, short enough that a frozen one is found out.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether a server of that kind answers on that port of 127.0.0.1.
#[must_use]
pub fn answers(kind: Kind, port: u16) -> bool {
    match kind {
        Kind::Redis => redis(port),
        Kind::RabbitMq => amqp(port),
        Kind::Kafka => kafka_brokers(port).is_some_and(|brokers| brokers > 0),
        Kind::Postgres => postgres(port),
    }
}

fn connect(port: u16) -> Option<TcpStream> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    Some(stream)
}

fn ask<const N: usize>(stream: &mut TcpStream, question: &[u8]) -> Option<[u8; N]> {
    let mut answer = [0; N];
    stream.write_all(question).ok()?;
    stream.read_exact(&mut answer).ok()?;
    Some(answer)
}

/// `+PONG`, or `-NOAUTH` from a server that wants a login first; not `-LOADING`.
fn redis(port: u16) -> bool {
    let answer = connect(port).and_then(|mut stream| ask::<5>(&mut stream, b"PING\r\n"));
    matches!(answer.as_ref(), Some(b"+PONG" | b"-NOAU"))
}

/// The beginning of what a Redis answers to a command.
pub(crate) fn redis_says(port: u16, command: &str) -> String {
    let mut answer = vec![0; 64 * 1024];
    let read = connect(port).and_then(|mut stream| {
        stream.write_all(format!("{command}\r\n").as_bytes()).ok()?;
        stream.read(&mut answer).ok()
    });
    String::from_utf8_lossy(&answer[..read.unwrap_or(0)]).into_owned()
}

/// A method frame (`Connection.Start`) in answer to the header of AMQP 0-9-1.
fn amqp(port: u16) -> bool {
    connect(port).and_then(|mut stream| ask::<1>(&mut stream, b"AMQP\0\0\x09\x01")) == Some([1])
}

/// How many brokers the answer to a Metadata request names. A broker names itself only once the controller let it in,
/// which is later than its port's opening.
pub(crate) fn kafka_brokers(port: u16) -> Option<i32> {
    let mut stream = connect(port)?;
    // Key 3 (Metadata), version 5, correlation 7, no client id, an empty list of topics, no creation.
    let request = [&[0, 3, 0, 5, 0, 0, 0, 7, 0xff, 0xff][..], &[0, 0, 0, 0, 0]].concat();
    let length = u32::try_from(request.len()).ok()?.to_be_bytes();
    // Length, correlation, throttle time, number of brokers.
    let answer = ask::<16>(&mut stream, &[&length[..], &request].concat())?;
    Some(i32::from_be_bytes([answer[12], answer[13], answer[14], answer[15]]))
}

/// An authentication request (`R`); `E` is what a server that is still starting says.
fn postgres(port: u16) -> bool {
    let words = b"\0\x03\0\0user\0test\0database\0postgres\0\0";
    let length = u32::try_from(words.len() + 4).unwrap_or(0).to_be_bytes();
    connect(port).and_then(|mut stream| ask::<1>(&mut stream, &[&length[..], words].concat())) == Some(*b"R")
}
