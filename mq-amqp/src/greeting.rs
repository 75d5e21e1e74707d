//! What the server says of itself. It does so in the first frame of every connection, which the client library reads and
//! throws away; so that frame is read once, on a socket of its own that goes no further.

use futures_util::io::{AsyncReadExt, AsyncWriteExt};
use lapin::tcp::{AMQPUriTcpExt, OwnedTLSConfig};
use lapin::uri::AMQPUri;
use std::io;

/// The header by which AMQP 0-9-1 is asked for.
const HEADER: &[u8] = b"AMQP\0\0\x09\x01";
/// A frame of this size is no greeting.
const LARGEST: usize = 1 << 17;

/// `RabbitMQ 3.10.8`, as the server at this address says; `None` if it does not say it.
pub(crate) async fn server(uri: &AMQPUri, tls: &OwnedTLSConfig) -> io::Result<Option<String>> {
    let runtime = lapin::runtime::default_runtime().map_err(io::Error::other)?;
    let mut stream = uri.connect_with_config_async(tls.as_ref(), &runtime).await?;
    stream.write_all(HEADER).await?;
    stream.flush().await?;
    // Type, channel, size of the frame.
    let mut head = [0; 7];
    stream.read_exact(&mut head).await?;
    let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
    if head[0] != 1 || size > LARGEST {
        return Ok(None);
    }
    let mut frame = vec![0; size];
    stream.read_exact(&mut frame).await?;
    Ok(read(&frame))
}

/// Product and version of a `connection.start`.
fn read(frame: &[u8]) -> Option<String> {
    let mut rest = Bytes(frame);
    // Class 10, method 10; then two bytes for the version of the protocol.
    if rest.take(6)?.first_chunk::<4>()? != &[0, 10, 0, 10] {
        return None;
    }
    let length = rest.length()?;
    let mut table = Bytes(rest.take(length)?);
    let (mut product, mut version) = (None, None);
    while !table.0.is_empty() {
        let length = usize::from(*table.take(1)?.first()?);
        let name = table.take(length)?;
        let value = table.value()?;
        match name {
            b"product" => product = value,
            b"version" => version = value,
            _ => {}
        }
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some(format!("{} {}", product.map_or_else(|| "AMQP".to_owned(), text), text(version?)))
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn length(&mut self) -> Option<usize> {
        let four = self.take(4)?.first_chunk::<4>()?;
        usize::try_from(u32::from_be_bytes(*four)).ok()
    }

    /// Skips a value; its bytes if it is text.
    fn value(&mut self) -> Option<Option<&'a [u8]>> {
        let size = match self.take(1)?.first()? {
            b'S' => {
                let length = self.length()?;
                return self.take(length).map(Some);
            }
            b'x' | b'F' | b'A' => self.length()?,
            b'V' => 0,
            b't' | b'b' | b'B' => 1,
            b's' | b'u' | b'U' => 2,
            b'I' | b'i' | b'f' => 4,
            b'D' => 5,
            b'l' | b'L' | b'd' | b'T' => 8,
            _ => return None,
        };
        self.take(size).map(|_| None)
    }
}

#[cfg(test)]
mod tests {
    use super::read;

    fn text(name: &str, value: &str) -> Vec<u8> {
        let mut out = vec![name.len() as u8];
        out.extend(name.bytes());
        out.push(b'S');
        out.extend((value.len() as u32).to_be_bytes());
        out.extend(value.bytes());
        out
    }

    fn frame(table: &[u8]) -> Vec<u8> {
        let mut out = vec![0, 10, 0, 10, 0, 9];
        out.extend((table.len() as u32).to_be_bytes());
        out.extend(table);
        out.extend(b"\0\0\0\x05PLAIN\0\0\0\x05en_US");
        out
    }

    #[test]
    fn product_and_version_are_found_among_other_values() {
        let mut table = text("platform", "Erlang");
        // A table in the table, whose entries are not ours.
        let inner = [text("version", "of something else"), vec![1, b'a', b't', 1]].concat();
        table.extend(b"\x0ccapabilitiesF");
        table.extend((inner.len() as u32).to_be_bytes());
        table.extend(inner);
        table.extend(text("product", "RabbitMQ"));
        table.extend(text("version", "3.10.8"));
        assert_eq!(read(&frame(&table)).as_deref(), Some("RabbitMQ 3.10.8"));
    }

    #[test]
    fn what_is_cut_short_or_something_else_says_nothing() {
        let whole = frame(&text("version", "4.0"));
        assert_eq!(read(&whole).as_deref(), Some("AMQP 4.0"));
        for length in 0..24 {
            assert_eq!(read(&whole[..length]), None, "{length} bytes");
        }
        assert_eq!(read(&frame(&text("product", "RabbitMQ"))), None, "no version");
        assert_eq!(read(b"\0\x0a\0\x0b"), None, "another method");
    }
}
