//! A listener before a server that keeps requests back or answers them itself: for answers that no real server gives on demand.

use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What becomes of what a client sent in one go.
pub(crate) enum Fate {
    /// The server gets it.
    Pass,
    /// Nobody gets it, nor anything after it on this connection.
    Keep,
    /// The server does not get it; the client gets this.
    Answer(String),
}

/// Whether these bytes hold this word.
pub(crate) fn has(bytes: &[u8], word: &str) -> bool {
    bytes.windows(word.len()).any(|part| part == word.as_bytes())
}

/// Listens; gives the port.
pub(crate) async fn meddle(server: u16, fate: impl Fn(&[u8]) -> Fate + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let fate = Arc::new(fate);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(pass(client, server, fate.clone()));
        }
    });
    port
}

async fn pass(client: TcpStream, server: u16, fate: Arc<impl Fn(&[u8]) -> Fate>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", server)).await else { return };
    let ((mut from, mut to), (mut back, mut on)) = (client.into_split(), server.into_split());
    let (mut sent, mut answered) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut kept = false;
    loop {
        tokio::select! {
            n = from.read(&mut sent) => {
                let Ok(n @ 1..) = n else { return };
                if kept {
                    continue;
                }
                let done = match fate(&sent[..n]) {
                    Fate::Pass => on.write_all(&sent[..n]).await,
                    Fate::Answer(text) => to.write_all(text.as_bytes()).await,
                    Fate::Keep => { kept = true; Ok(()) }
                };
                if done.is_err() {
                    return;
                }
            }
            n = back.read(&mut answered) => {
                let Ok(n @ 1..) = n else { return };
                if to.write_all(&answered[..n]).await.is_err() {
                    return;
                }
            }
        }
    }
}
