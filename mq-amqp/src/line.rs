//! The line of a connection: its socket, held so that it can be ended from outside. The client gives each connection a thread,
//! which ends when the server closes or the socket breaks. A peer that accepts and says nothing (a frozen server, a wrong port, a
//! network that swallows) does neither: every login that is given up, and every goodbye without answer, would leave thread and
//! socket behind for as long as it stays so.

use lapin::tcp::{AMQPUriTcpExt, AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Connection, ConnectionProperties};
use parking_lot::Mutex;
use socket2::{SockRef, Socket};
use std::net::Shutdown;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

#[derive(Clone, Default)]
struct Line {
    cut: CancellationToken,
    socket: Arc<Mutex<Option<Socket>>>,
}

impl Line {
    /// Another handle of this socket.
    fn hold(&self, stream: &tokio::net::TcpStream) -> std::io::Result<()> {
        let mut socket = self.socket.lock();
        if self.cut.is_cancelled() {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        *socket = Some(SockRef::from(stream).try_clone()?);
        Ok(())
    }

    /// The client finds the socket closed, or never gets one.
    fn cut(&self) {
        let mut socket = self.socket.lock();
        self.cut.cancel();
        if let Some(socket) = socket.take() {
            // One that is closed already cannot be told.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Cuts the line of a login that is given up.
struct Attempt(Option<Line>);

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(line) = &self.0 {
            line.cut();
        }
    }
}

/// A connection, and its line.
pub(crate) struct Live {
    connection: Connection,
    line: Line,
}

impl Live {
    /// Connects and logs in; a future that is dropped midway leaves nothing behind.
    pub(crate) async fn open(
        uri: AMQPUri,
        properties: ConnectionProperties,
        tls: OwnedTLSConfig,
    ) -> lapin::Result<Self> {
        let line = Line::default();
        let mut attempt = Attempt(Some(line.clone()));
        let made = line.clone();
        let runtime = lapin::runtime::default_runtime()?;
        let on = runtime.clone();
        let connect = async move |mut uri: AMQPUri, _| {
            // Plain first: the socket within TLS is out of reach.
            let scheme = std::mem::replace(&mut uri.scheme, AMQPScheme::AMQP);
            let stream = tokio::select! { biased;
                () = made.cut.cancelled() => Err(std::io::ErrorKind::ConnectionAborted.into()),
                stream = uri.connect_async(&on) => stream,
            }?;
            if let AsyncTcpStream::Plain(plain) = &stream {
                made.hold(plain.get_ref())?;
            }
            match scheme {
                AMQPScheme::AMQP => Ok(stream),
                AMQPScheme::AMQPS => Ok(stream.into_tls(&uri.authority.host, tls.as_ref()).await?),
            }
        };
        let connection = Connection::connector(uri, runtime, connect, properties).await?;
        attempt.0 = None;
        Ok(Self { connection, line })
    }

    /// Says goodbye; who does not answer it within `limit` is not waited for.
    pub(crate) async fn close(&self, limit: Duration) {
        // Also a connection that broke meanwhile is an answer.
        if tokio::time::timeout(limit, self.connection.close(200, "OK".into())).await.is_err() {
            self.line.cut();
        }
    }
}

impl Deref for Live {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // One that lives is closed by the client when its last channel is gone.
        if !self.connection.status().connected() {
            self.line.cut();
        }
    }
}
