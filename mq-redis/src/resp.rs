//! The protocol on what is hot: commands are written straight into the buffer that goes to the socket, and answers are read where
//! they lie. The `redis` crate's own reader takes some twenty times as long for an entry; it reads everything else.

use crate::answer::{Id, parse_id};
use crate::wire::{META, PAYLOAD};

/// Writes `*n` or `$n`.
pub(crate) fn put_head(mark: u8, mut n: usize, out: &mut Vec<u8>) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            break;
        }
    }
    out.push(mark);
    out.extend_from_slice(&digits[at..]);
    out.extend_from_slice(b"\r\n");
}

/// Writes an argument.
pub(crate) fn put_arg(arg: &[u8], out: &mut Vec<u8>) {
    put_head(b'$', arg.len(), out);
    out.extend_from_slice(arg);
    out.extend_from_slice(b"\r\n");
}

/// What does not follow the protocol.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// A look for the end of a reply, that goes on where it stopped when more of it has come.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    at: usize,
    /// Values to come.
    todo: Option<u64>,
}

impl Scan {
    /// The length of the reply at the beginning of `data`, once all of it is there.
    pub(crate) fn end(&mut self, data: &[u8]) -> Result<Option<usize>, Malformed> {
        let mut todo = self.todo.unwrap_or(1);
        while todo > 0 {
            self.todo = Some(todo);
            let mut cursor = Cursor { data, at: self.at };
            let Some((mark, line)) = cursor.line() else { return Ok(None) };
            todo -= 1;
            match mark {
                b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => {}
                b'$' | b'=' | b'!' => {
                    let n = number(line).ok_or(Malformed)?;
                    if let Ok(n) = usize::try_from(n) {
                        let end = cursor.at.checked_add(n).and_then(|at| at.checked_add(2)).ok_or(Malformed)?;
                        if data.len() < end {
                            return Ok(None);
                        }
                        cursor.at = end;
                    }
                }
                b'*' | b'~' | b'>' | b'%' | b'|' => {
                    let n = u64::try_from(number(line).ok_or(Malformed)?).unwrap_or(0);
                    let of_each = if matches!(mark, b'%' | b'|') { 2 } else { 1 };
                    let more = n.checked_mul(of_each).and_then(|n| n.checked_add(u64::from(mark == b'|')));
                    todo = more.and_then(|more| todo.checked_add(more)).ok_or(Malformed)?;
                }
                _ => return Err(Malformed),
            }
            self.at = cursor.at;
        }
        Ok(Some(self.at))
    }
}

/// The id in a reply that is one, and the length of the reply; `None` for any other reply, and while some of it is missing.
#[inline]
pub(crate) fn id_reply(data: &[u8]) -> Option<(Id, usize)> {
    let mut cursor = Cursor { data, at: 0 };
    let id = parse_id(cursor.bulk()?)?;
    Some((id, cursor.at))
}

/// What a group read, if all of it was written by this library: calls `each` with stream, id, `mq` and payload.
pub(crate) fn entries<'d>(
    data: &'d [u8],
    mut each: impl FnMut(&'d [u8], Id, &'d [u8], Option<&'d [u8]>) -> Option<()>,
) -> Option<()> {
    let mut cursor = Cursor { data, at: 0 };
    // A list of pairs, or a map.
    let (mark, streams) = cursor.head()?;
    for _ in 0..streams {
        if mark != b'%' && cursor.head()? != (b'*', 2) {
            return None;
        }
        let stream = cursor.bulk()?;
        let (b'*', entries) = cursor.head()? else { return None };
        for _ in 0..entries {
            let (b'*', 2) = cursor.head()? else { return None };
            let id = parse_id(cursor.bulk()?)?;
            let (b'*', fields @ (2 | 4)) = cursor.head()? else { return None };
            if cursor.bulk()? != META.as_bytes() {
                return None;
            }
            let meta = cursor.bulk()?;
            let payload = match fields {
                2 => None,
                _ if cursor.bulk()? == PAYLOAD.as_bytes() => Some(cursor.bulk()?),
                _ => return None,
            };
            each(stream, id, meta, payload)?;
        }
    }
    (cursor.at == data.len()).then_some(())
}

struct Cursor<'d> {
    data: &'d [u8],
    at: usize,
}

impl<'d> Cursor<'d> {
    /// The mark and the rest of a line.
    #[inline]
    fn line(&mut self) -> Option<(u8, &'d [u8])> {
        let rest = self.data.get(self.at..)?;
        let end = rest.iter().position(|b| *b == b'\n')?;
        let line = rest.get(1..end.checked_sub(1)?)?;
        self.at += end + 1;
        Some((rest[0], line))
    }

    #[inline]
    fn head(&mut self) -> Option<(u8, i64)> {
        let (mark, line) = self.line()?;
        Some((mark, number(line)?))
    }

    #[inline]
    fn bulk(&mut self) -> Option<&'d [u8]> {
        let (b'$', n) = self.head()? else { return None };
        let end = self.at.checked_add(usize::try_from(n).ok()?)?;
        let bytes = self.data.get(self.at..end)?;
        self.data.get(end..end.checked_add(2)?)?;
        self.at = end + 2;
        Some(bytes)
    }
}

#[inline]
fn number(line: &[u8]) -> Option<i64> {
    let (negative, digits) = match line {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    if digits.is_empty() {
        return None;
    }
    let mut n = 0i64;
    for b in digits {
        if !b.is_ascii_digit() {
            return None;
        }
        n = n.checked_mul(10)?.checked_add(i64::from(b - b'0'))?;
    }
    Some(if negative { -n } else { n })
}

#[cfg(test)]
mod tests {
    use super::{Malformed, Scan, entries, id_reply, put_arg, put_head};

    const REPLIES: &[&str] = &[
        "+OK\r\n",
        "-ERR no\r\n",
        ":-12\r\n",
        "$-1\r\n",
        "$0\r\n\r\n",
        "$5\r\na\r\nbc\r\n",
        "*-1\r\n",
        "*0\r\n",
        "_\r\n",
        "#t\r\n",
        ",1.5\r\n",
        "(123\r\n",
        "=7\r\ntxt:abc\r\n",
        "*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
        "%1\r\n$1\r\nk\r\n*2\r\n:1\r\n%1\r\n+a\r\n+b\r\n",
        "~1\r\n+x\r\n",
        ">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n",
        "|1\r\n+ttl\r\n:5\r\n*1\r\n:7\r\n",
    ];

    #[test]
    fn the_end_is_found_wherever_the_bytes_are_cut() {
        for reply in REPLIES {
            let all = format!("{reply}+NEXT\r\n");
            let mut at_once = Scan::default();
            assert_eq!(at_once.end(all.as_bytes()), Ok(Some(reply.len())), "{reply:?}");
            let mut scan = Scan::default();
            for cut in 0..reply.len() {
                assert_eq!(scan.end(&all.as_bytes()[..cut]), Ok(None), "{reply:?} up to {cut}");
            }
            assert_eq!(scan.end(reply.as_bytes()), Ok(Some(reply.len())), "{reply:?}");
        }
    }

    #[test]
    fn what_is_no_reply_is_refused() {
        for bytes in ["x\r\n", "$x\r\n", "*99999999999999999999\r\n", "%9223372036854775807\r\n+a\r\n", "$\r\n"] {
            let mut scan = Scan::default();
            let end = scan.end(bytes.as_bytes());
            assert!(matches!(end, Err(Malformed) | Ok(None)), "{bytes:?}: {end:?}");
        }
    }

    #[test]
    fn ids_are_read_where_they_lie() {
        assert_eq!(id_reply(b"$15\r\n1700000000000-7\r\n:1\r\n"), Some(((1_700_000_000_000, 7), 22)));
        for other in ["$15\r\n1700000000000-7\r", "$2\r\nab\r\n", "$-1\r\n", "-OOM no\r\n", ":1\r\n"] {
            assert_eq!(id_reply(other.as_bytes()), None, "{other:?}");
        }
    }

    #[test]
    fn entries_are_read_in_both_protocols() {
        let entry = "*2\r\n$3\r\n1-2\r\n*4\r\n$2\r\nmq\r\n$1\r\nM\r\n$1\r\np\r\n$2\r\nPP\r\n";
        let bare = "*2\r\n$3\r\n1-3\r\n*2\r\n$2\r\nmq\r\n$1\r\nN\r\n";
        for head in ["*1\r\n*2\r\n", "%1\r\n"] {
            let reply = format!("{head}$1\r\ns\r\n*2\r\n{entry}{bare}");
            let mut got = Vec::new();
            let read = entries(reply.as_bytes(), |stream, id, meta, payload| {
                got.push((stream.to_vec(), id, meta.to_vec(), payload.map(<[u8]>::to_vec)));
                Some(())
            });
            assert_eq!(read, Some(()));
            let one = (b"s".to_vec(), (1, 2), b"M".to_vec(), Some(b"PP".to_vec()));
            assert_eq!(got, vec![one, (b"s".to_vec(), (1, 3), b"N".to_vec(), None)]);
        }
        let foreign = "*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-2\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n";
        for other in [foreign, "*-1\r\n", "_\r\n", "-NOGROUP x\r\n"] {
            let mut n = 0;
            let read = entries(other.as_bytes(), |_, _, _, _| {
                n += 1;
                Some(())
            });
            assert!(n == 0 && (read.is_none() || other == "*-1\r\n"), "{other:?}");
        }
    }

    #[test]
    fn commands_are_written_as_the_client_library_writes_them() {
        let mut out = Vec::new();
        put_head(b'*', 3, &mut out);
        for arg in ["XADD", "", "a value of more than nine bytes"] {
            put_arg(arg.as_bytes(), &mut out);
        }
        let cmd = redis::cmd("XADD").arg("").arg("a value of more than nine bytes").get_packed_command();
        assert_eq!(out, cmd);
    }
}
