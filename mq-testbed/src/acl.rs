//! Rights of Kafka's users, given by one request that is spoken by hand: no Rust client has it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::{Problem, Result};

/// What a user may do with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KafkaResource<'a> {
    /// A topic.
    Topic(&'a str),
    /// A consumer group.
    Group(&'a str),
}

/// Lets a user do everything with a topic or a group, by the port that is open for all.
///
/// # Errors
/// When the broker has no authorizer (see [`KafkaSecurity`](crate::KafkaSecurity)), or does not answer.
pub fn kafka_allow(port: u16, user: &str, resource: KafkaResource<'_>) -> Result<()> {
    let (kind, name) = match resource {
        KafkaResource::Topic(name) => (2, name),
        KafkaResource::Group(name) => (3, name),
    };
    // Key 30 (CreateAcls), version 1, correlation 7, no client id; one entry.
    let mut request = vec![0, 30, 0, 1, 0, 0, 0, 7, 0xff, 0xff, 0, 0, 0, 1];
    request.push(kind);
    text(&mut request, name)?;
    // The name as it stands, not as a prefix.
    request.push(3);
    text(&mut request, &format!("User:{user}"))?;
    text(&mut request, "*")?;
    // Every operation; allowed.
    request.extend([2, 3]);

    let answer = ask(port, &request).map_err(Problem::during("ask Kafka for a right"))?;
    // Correlation, throttle time, number of results, and of the first one its error.
    match answer.get(12..14) {
        Some([0, 0]) => Ok(()),
        Some(&[high, low]) => {
            let code = i16::from_be_bytes([high, low]);
            Err(Problem::new(format!("Kafka refused to give {user} a right: error {code}; has it an authorizer?")))
        }
        _ => Err(Problem::new("Kafka's answer to a request for a right is too short")),
    }
}

fn text(request: &mut Vec<u8>, text: &str) -> Result<()> {
    let length = i16::try_from(text.len()).map_err(Problem::during("a name for Kafka"))?;
    request.extend(length.to_be_bytes());
    request.extend(text.as_bytes());
    Ok(())
}

fn ask(port: u16, request: &[u8]) -> std::io::Result<Vec<u8>> {
    let limit = Duration::from_secs(10);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), limit)?;
    stream.set_read_timeout(Some(limit))?;
    let length = u32::try_from(request.len()).unwrap_or_default().to_be_bytes();
    stream.write_all(&[&length[..], request].concat())?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    // The answer to one entry is short.
    let mut answer = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap_or_default().min(64 * 1024)];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}
