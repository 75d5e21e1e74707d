//! Where a group of Kafka's is, asked for by hand: what was committed when a member was killed is gone from every client's
//! memory a moment later.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::{Problem, Result};

/// OffsetFetch, in the last form but one that names no topics to ask for all.
const OFFSET_FETCH: [u8; 4] = [0, 9, 0, 2];

/// The offsets that a group committed, by topic and partition, of the only broker, on that port of 127.0.0.1.
///
/// # Errors
/// When the broker does not answer, or not as it should.
pub fn committed(port: u16, group: &str) -> Result<BTreeMap<(String, i32), i64>> {
    let said = |e| Problem::during("read where a group is")(e);
    let mut body = OFFSET_FETCH.to_vec();
    body.extend(7i32.to_be_bytes());
    text(&mut body, "anymq-tests");
    text(&mut body, group);
    // Of all topics.
    body.extend((-1i32).to_be_bytes());
    let mut line = TcpStream::connect(("127.0.0.1", port)).map_err(said)?;
    line.set_read_timeout(Some(Duration::from_secs(10))).map_err(said)?;
    line.write_all(&(body.len() as u32).to_be_bytes()).map_err(said)?;
    line.write_all(&body).map_err(said)?;
    let mut size = [0; 4];
    line.read_exact(&mut size).map_err(said)?;
    let mut answer = vec![0; u32::from_be_bytes(size) as usize];
    line.read_exact(&mut answer).map_err(said)?;
    read(&answer)
        .ok_or_else(|| Problem::new(format!("where group '{group}' is: an answer that makes no sense, or an error")))
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u16).to_be_bytes());
    out.extend(text.as_bytes());
}

/// `None` for an answer that ends early, or says that something failed.
fn read(answer: &[u8]) -> Option<BTreeMap<(String, i32), i64>> {
    // The number of the request.
    let mut rest = answer.get(4..)?;
    let mut found = BTreeMap::new();
    for _ in 0..int(&mut rest)? {
        let topic = String::from_utf8(string(&mut rest)?.to_vec()).ok()?;
        for _ in 0..int(&mut rest)? {
            let partition = int(&mut rest)?;
            let offset = i64::from_be_bytes(*take(&mut rest)?);
            let _metadata = string(&mut rest)?;
            if i16::from_be_bytes(*take(&mut rest)?) != 0 {
                return None;
            }
            found.insert((topic.clone(), partition), offset);
        }
    }
    (i16::from_be_bytes(*take(&mut rest)?) == 0 && rest.is_empty()).then_some(found)
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(head)
}

fn int(rest: &mut &[u8]) -> Option<i32> {
    take(rest).map(|bytes| i32::from_be_bytes(*bytes))
}

/// One of no length stands for none, too.
fn string<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let size = i16::from_be_bytes(*take(rest)?).max(0) as usize;
    let (head, tail) = rest.split_at_checked(size)?;
    *rest = tail;
    Some(head)
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn an_answer_is_read_to_its_end_or_not_at_all() {
        let mut answer = vec![0, 0, 0, 7, 0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 1, 0, 0, 0, 3];
        answer.extend(42i64.to_be_bytes());
        answer.extend([0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(read(&answer).unwrap(), [(("t".to_owned(), 3), 42)].into());
        assert!((0..answer.len()).all(|cut| read(&answer[..cut]).is_none()));
        *answer.last_mut().unwrap() = 15;
        assert!(read(&answer).is_none(), "no coordinator");
    }
}
