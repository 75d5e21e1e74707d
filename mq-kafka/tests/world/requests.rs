//! What an operator does and no client library offers, by the protocol: access rules, and removing a group that has members.
//! Brokers refuse to delete such a group, so each member is put out by a LeaveGroup of its name, and the group is deleted before
//! any of them can come back.
#![allow(dead_code)]

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const LEAVE_GROUP: i16 = 13;
const DELETE_GROUPS: i16 = 42;
const CREATE_ACLS: i16 = 30;
const DELETE_ACLS: i16 = 31;
/// Refused because it has members; not there; deleted.
const NON_EMPTY: i16 = 68;
const NOT_FOUND: i16 = 69;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as i16).to_be_bytes());
    out.extend(text.as_bytes());
}

/// A request of the old, inflexible form.
fn request(key: i16, version: i16, body: &[u8]) -> Vec<u8> {
    let mut head = Vec::new();
    head.extend(key.to_be_bytes());
    head.extend(version.to_be_bytes());
    head.extend(7i32.to_be_bytes());
    text(&mut head, "anymq-tests");
    let mut out = ((head.len() + body.len()) as i32).to_be_bytes().to_vec();
    out.extend(head);
    out.extend(body);
    out
}

fn answer(line: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut size = [0; 4];
    line.read_exact(&mut size)?;
    let mut body = vec![0; i32::from_be_bytes(size) as usize];
    line.read_exact(&mut body)?;
    Ok(body)
}

/// Removes a group; false if it was not there. A group of the broker's own coordinator only: there is one broker.
pub(crate) fn remove_group(broker: &str, group: &str) -> Result<bool, String> {
    let said = |e: std::io::Error| e.to_string();
    let looker: BaseConsumer =
        ClientConfig::new().set("bootstrap.servers", broker).create().map_err(|e| e.to_string())?;
    let mut line = TcpStream::connect(broker).map_err(said)?;
    line.set_read_timeout(Some(Duration::from_secs(10))).map_err(said)?;
    // A member that came back in between is put out again.
    for _ in 0..50 {
        let found = looker.fetch_group_list(Some(group), Duration::from_secs(10)).map_err(|e| e.to_string())?;
        let members: Vec<String> = found.groups().iter().flat_map(|g| g.members()).map(|m| m.id().to_owned()).collect();
        let mut leave = Vec::new();
        text(&mut leave, group);
        leave.extend((members.len() as i32).to_be_bytes());
        for member in &members {
            text(&mut leave, member);
            // No static membership.
            leave.extend((-1i16).to_be_bytes());
        }
        let mut delete = 1i32.to_be_bytes().to_vec();
        text(&mut delete, group);
        // In one write: the broker takes the requests of a connection one after the other.
        let mut both = request(LEAVE_GROUP, 3, &leave);
        both.extend(request(DELETE_GROUPS, 1, &delete));
        line.write_all(&both).map_err(said)?;
        answer(&mut line).map_err(said)?;
        let deleted = answer(&mut line).map_err(said)?;
        // The last two bytes are the error of the only group.
        match deleted.last_chunk::<2>().map(|code| i16::from_be_bytes(*code)) {
            Some(0) => return Ok(true),
            Some(NOT_FOUND) => return Ok(false),
            Some(NON_EMPTY) => {}
            code => return Err(format!("deleting group '{group}': {code:?}")),
        }
    }
    Err(format!("the members of '{group}' come back faster than it can be deleted"))
}

/// What an access rule is about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum On {
    Topics = 2,
    Groups = 3,
}

/// All operations on everything whose name begins with `prefix`: allowed to `user` from now on (`allowed`), or no more.
pub(crate) fn rule(broker: &str, user: &str, on: On, prefix: &str, allowed: bool) -> Result<(), String> {
    const PREFIXED: u8 = 4;
    const ANY: u8 = 1;
    const ALL: u8 = 2;
    const ALLOW: u8 = 3;
    let said = |e: std::io::Error| e.to_string();
    let mut line = TcpStream::connect(broker).map_err(said)?;
    line.set_read_timeout(Some(Duration::from_secs(10))).map_err(said)?;
    let mut body = Vec::new();
    if allowed {
        body.extend(1i32.to_be_bytes());
    }
    body.push(on as u8);
    text(&mut body, prefix);
    body.push(PREFIXED);
    text(&mut body, &format!("User:{user}"));
    text(&mut body, "*");
    body.extend(if allowed { [ALL, ALLOW] } else { [ANY, ANY] });
    let key = if allowed { CREATE_ACLS } else { DELETE_ACLS };
    let body = if allowed { body } else { [1i32.to_be_bytes().to_vec(), body].concat() };
    line.write_all(&request(key, 1, &body)).map_err(said)?;
    // Correlation, throttling, one result, its error.
    let answer = answer(&mut line).map_err(said)?;
    match answer.get(12..14) {
        Some([0, 0]) => Ok(()),
        code => Err(format!("the rule for {user} was refused: {code:?}")),
    }
}
