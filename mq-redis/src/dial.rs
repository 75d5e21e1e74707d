//! Reaching a server: TCP, TLS or a unix socket, and the greeting.

use crate::answer::failure;
use crate::url::Tls;
use futures_util::stream::{FuturesUnordered, StreamExt};
use mq_api::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ClientTlsConfig, ConnectionAddr, RedisConnectionInfo, RedisError, TlsCertificates};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};

/// After this the next address of a host is tried too (RFC 8305 recommends it).
const SILENT: Duration = Duration::from_millis(250);

/// A connection of any kind.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Half-open sockets would stay for the system's two hours: asked after 10 s without a byte, three times.
pub(crate) fn keepalive() -> socket2::TcpKeepalive {
    socket2::TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(3))
}

/// Connects and greets: what comes back is ready for commands.
pub(crate) async fn dial(
    node: &ConnectionAddr,
    settings: &RedisConnectionInfo,
    tls: Option<&Tls>,
    patience: Duration,
) -> Result<Box<dyn Io>> {
    let doing = "connecting";
    let io: Box<dyn Io> = match node {
        ConnectionAddr::Unix(path) => Box::new(UnixStream::connect(path).await.map_err(|e| failure(e.into(), doing))?),
        ConnectionAddr::Tcp(host, port) => {
            Box::new(tcp(host, *port, patience).await.map_err(|e| failure(e.into(), doing))?)
        }
        ConnectionAddr::TcpTls { host, port, .. } => {
            let config = client_config(tls)?;
            let name = ServerName::try_from(host.clone())
                .map_err(|e| Error::new(ErrorKind::Config, format!("'{host}' is no name for TLS")).with_source(e))?;
            let plain = tcp(host, *port, patience).await.map_err(|e| failure(e.into(), doing))?;
            let connected = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, plain).await;
            Box::new(connected.map_err(|e| failure(e.into(), doing))?)
        }
        other => return Err(Error::new(ErrorKind::Config, format!("{other} is no address that can be reached"))),
    };
    greet(io, settings).await.map_err(|e| failure(e, doing))
}

async fn tcp(host: &str, port: u16, patience: Duration) -> io::Result<TcpStream> {
    let at: Vec<SocketAddr> = lookup_host((host, port)).await?.collect();
    let stream = first_of(&at).await?;
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive())?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(patience))?;
    #[cfg(not(target_os = "linux"))]
    let _ = patience;
    Ok(stream)
}

/// Connects to the first of these addresses that answers: each is tried when the one before failed or has been silent for a
/// while, so that a route that leads nowhere does not hide another.
async fn first_of(at: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut next = at.iter();
    let mut trying = FuturesUnordered::new();
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    loop {
        let more = next.next();
        trying.extend(more.map(|at| TcpStream::connect(*at)));
        let silent = tokio::time::sleep(SILENT);
        tokio::select! { biased;
            tried = trying.next() => match tried {
                Some(Ok(stream)) => return Ok(stream),
                Some(Err(error)) => failed = error,
                None => return Err(failed),
            },
            () = silent, if next.len() > 0 => {}
        }
    }
}

/// Lets the client library greet: protocol, login, database, its name.
async fn greet(io: Box<dyn Io>, settings: &RedisConnectionInfo) -> std::result::Result<Box<dyn Io>, RedisError> {
    let lent = Lent(Arc::new(Mutex::new(Some(io))));
    let config = AsyncConnectionConfig::new();
    let greeted = MultiplexedConnection::new_with_config(settings, lent.clone(), config).await?;
    // It has read every answer to what it asked, and a server says nothing unasked yet.
    drop(greeted);
    let io = lent.0.lock().take();
    io.ok_or_else(|| gone().into())
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the connection was taken back")
}

/// A connection that is taken back after the greeting.
#[derive(Clone)]
struct Lent(Arc<Mutex<Option<Box<dyn Io>>>>);

impl Lent {
    fn with<T>(&self, act: impl FnOnce(Pin<&mut dyn Io>) -> Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match &mut *self.0.lock() {
            Some(io) => act(Pin::new(&mut **io)),
            None => Poll::Ready(Err(gone())),
        }
    }
}

impl AsyncRead for Lent {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.with(|io| io.poll_read(cx, buf))
    }
}

impl AsyncWrite for Lent {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.with(|io| io.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|io| io.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|io| io.poll_shutdown(cx))
    }
}

fn client_config(tls: Option<&Tls>) -> Result<rustls::ClientConfig> {
    let bad = |what: &str, e: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::Config, format!("{what} is not what PEM files hold: {e}"))
    };
    let default = Tls::default();
    let files = certificates(tls.unwrap_or(&default))?;
    let mut roots = rustls::RootCertStore::empty();
    if let Some(pem) = &files.root_cert {
        for cert in CertificateDer::pem_slice_iter(pem) {
            let cert = cert.map_err(|e| bad("ca", e.into()))?;
            roots.add(cert).map_err(|e| bad("ca", e.into()))?;
        }
    } else {
        // What of the system's store cannot be read is not trusted: then the server's certificate is refused, by name.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    let config = rustls::ClientConfig::builder().with_root_certificates(roots);
    let Some(own) = &files.client_tls else { return Ok(config.with_no_client_auth()) };
    let chain: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&own.client_cert).collect();
    let chain = chain.map_err(|e| bad("cert", e.into()))?;
    let key = PrivateKeyDer::from_pem_slice(&own.client_key).map_err(|e| bad("key", e.into()))?;
    config.with_client_auth_cert(chain, key).map_err(|e| {
        let text = format!("cert and key of the URL do not fit: {e}");
        Error::new(ErrorKind::Config, text).with_source(e)
    })
}

/// Reads the files.
pub(crate) fn certificates(tls: &Tls) -> Result<TlsCertificates> {
    let read = |path: &std::path::Path, what: &str| {
        std::fs::read(path).map_err(|e| {
            let text = format!("{what}={}: the file cannot be read", path.display());
            Error::new(ErrorKind::Config, text).with_source(e)
        })
    };
    let root_cert = tls.ca.as_deref().map(|path| read(path, "ca")).transpose()?;
    let client_tls = match &tls.cert {
        Some((cert, key)) => Some(ClientTlsConfig { client_cert: read(cert, "cert")?, client_key: read(key, "key")? }),
        None => None,
    };
    Ok(TlsCertificates { client_tls, root_cert })
}

#[cfg(test)]
mod tests {
    use super::first_of;
    use std::net::SocketAddr;
    use std::time::Duration;
    use tokio::net::{TcpListener, TcpSocket, TcpStream};

    /// An address that answers to nothing: the system's queue of those who want to connect is full.
    async fn silent() -> (TcpListener, Vec<TcpStream>) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let at = listener.local_addr().unwrap();
        let mut waiting = Vec::new();
        while let Ok(Ok(stream)) = tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(at)).await {
            waiting.push(stream);
        }
        (listener, waiting)
    }

    #[tokio::test]
    async fn an_address_that_is_silent_does_not_hide_the_next() {
        let (silent, _waiting) = silent().await;
        let living = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let at = [silent.local_addr().unwrap(), refusing, living.local_addr().unwrap()];
        let found = tokio::time::timeout(Duration::from_secs(3), first_of(&at)).await.expect("in time").unwrap();
        assert_eq!(found.peer_addr().unwrap(), at[2]);
        let none: [SocketAddr; 1] = [refusing];
        assert_eq!(first_of(&none).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
        assert!(first_of(&[]).await.is_err());
    }
}
