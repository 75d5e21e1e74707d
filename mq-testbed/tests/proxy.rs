//! The proxy does to plain TCP traffic what each trouble says, while it flows.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use mq_testbed::proxy::{Direction, Proxy, Trouble};

/// A server that sends back what it gets; it ends with the process.
fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let (mut from, mut to) = (stream.try_clone().unwrap(), stream);
                std::io::copy(&mut from, &mut to)
            });
        }
    });
    port
}

fn client(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

fn echoes(stream: &mut TcpStream, words: &[u8]) -> std::io::Result<()> {
    stream.write_all(words)?;
    let mut back = vec![0; words.len()];
    stream.read_exact(&mut back)?;
    assert_eq!(back, words);
    Ok(())
}

#[test]
fn a_calm_proxy_passes_everything() {
    let proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    echoes(&mut stream, &vec![7; 300_000]).unwrap();
    assert_eq!(proxy.passed(), 600_000);
}

#[test]
fn a_cut_resets_what_is_open_and_lets_the_next_through() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    echoes(&mut stream, b"before").unwrap();
    proxy.begin(Trouble::Cut).unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    echoes(&mut client(&proxy), b"after").unwrap();
    assert_eq!(proxy.end(Trouble::Cut).unwrap().cut, 1);
}

#[test]
fn refused_until_the_end() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    echoes(&mut stream, b"before").unwrap();
    proxy.begin(Trouble::Refuse).unwrap();
    assert!(stream.read(&mut [0]).is_err());
    let error = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(proxy.end(Trouble::Refuse).unwrap().refused, 1);
    echoes(&mut client(&proxy), b"after").unwrap();
}

#[test]
fn what_was_swallowed_stays_lost_and_its_connection_dead() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    echoes(&mut stream, b"before").unwrap();
    let trouble = Trouble::Swallow(Direction::ToServer);
    proxy.begin(trouble).unwrap();
    stream.write_all(b"lost").unwrap();
    assert!(mq_testbed::eventually(Duration::from_secs(5), || proxy.bite().bytes == 4));
    assert_eq!(proxy.end(trouble).unwrap().bytes, 4);
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert_eq!(echoes(&mut stream, b"dead").unwrap_err().kind(), ErrorKind::WouldBlock);
    echoes(&mut client(&proxy), b"new").unwrap();
}

#[test]
fn what_was_stalled_arrives_after_the_end() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    let trouble = Trouble::Stall(Direction::ToClient);
    proxy.begin(trouble).unwrap();
    stream.write_all(b"later").unwrap();
    assert!(mq_testbed::eventually(Duration::from_secs(5), || proxy.bite().bytes == 5));
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(stream.read(&mut [0; 5]).unwrap_err().kind(), ErrorKind::WouldBlock);
    proxy.end(trouble).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"later");
}

#[test]
fn delayed_and_slowed_traffic_is_whole() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    for (trouble, least) in [
        (Trouble::Delay(Direction::Both, Duration::from_millis(40)), Duration::from_millis(80)),
        (Trouble::Slow(Direction::ToServer, 10_000), Duration::from_millis(400)),
    ] {
        proxy.begin(trouble).unwrap();
        let begun = Instant::now();
        echoes(&mut stream, &[9; 5_000]).unwrap();
        assert!(begun.elapsed() >= least, "{trouble} took only {:?}", begun.elapsed());
        assert!(proxy.end(trouble).unwrap().bytes >= 5_000);
    }
}

#[test]
fn cut_after_some_bytes_is_exact() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let mut stream = client(&proxy);
    let trouble = Trouble::CutAfter(Direction::ToClient, 10);
    proxy.begin(trouble).unwrap();
    stream.write_all(&[1; 1000]).unwrap();
    let mut back = Vec::new();
    let error = stream.read_to_end(&mut back).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(back.len() <= 10);
    let bite = proxy.end(trouble).unwrap();
    assert_eq!((bite.cut, bite.bytes), (1, 10));
}

#[test]
fn a_trouble_that_met_nothing_is_an_error() {
    let mut proxy = Proxy::before(echo(), 1).unwrap();
    let trouble = Trouble::Delay(Direction::Both, Duration::from_millis(10));
    proxy.begin(trouble).unwrap();
    assert!(proxy.end(trouble).unwrap_err().to_string().contains("did not bite"));
}
