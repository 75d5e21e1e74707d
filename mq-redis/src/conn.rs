//! A connection: who asks writes into its buffer, one task moves the bytes and tells the answers in order. Connecting, the
//! greeting and all answers that are not hot are the `redis` crate's.
//!
//! What is asked in one turn of the runtime goes out in one write, whoever asked: many topics on one client share it.

use crate::answer::checked;
use crate::dial::Io;
use crate::resp::{Malformed, Scan, id_reply};
use bytes::{Buf, Bytes, BytesMut};
use mq_core::Env;
use parking_lot::Mutex;
use redis::{Cmd, Pipeline, PushInfo, RedisError, Value, parse_redis_value};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// Room for one read of the socket.
const READ: usize = 64 * 1024;
/// A buffer that grew beyond this is let go when it was written.
const KEEP: usize = 1 << 20;

/// One answer.
#[derive(Debug)]
pub(crate) enum Reply {
    /// The id of an entry, where ids were expected.
    Id(crate::answer::Id),
    Value(Value),
    /// As it came.
    Frame(Bytes),
}

impl Reply {
    pub(crate) fn value(self) -> Result<Value, RedisError> {
        match self {
            Self::Value(value) => Ok(value),
            Self::Frame(frame) => parse_redis_value(&frame),
            Self::Id(id) => Ok(Value::BulkString(crate::answer::id_text(id).into_bytes())),
        }
    }
}

/// How answers are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    Values,
    Ids,
    Frame,
}

/// The answers to what was asked, in order.
pub(crate) type Answers = Result<Vec<Reply>, RedisError>;

struct Request {
    want: Want,
    count: usize,
    got: Vec<Reply>,
    to: oneshot::Sender<Answers>,
}

#[derive(Default)]
struct State {
    out: Vec<u8>,
    asked: VecDeque<Request>,
    task: Option<Waker>,
    /// No handle is left.
    closed: bool,
    /// Why the connection ended.
    ended: Option<RedisError>,
}

type Shared = Arc<Mutex<State>>;

/// Ends the connection with its last handle.
struct Guard(Shared);

impl Drop for Guard {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.lock();
            state.closed = true;
            state.task.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A handle of a connection. The connection ends, with all that is under way, when the last one is dropped.
#[derive(Clone)]
pub(crate) struct Conn {
    guard: Arc<Guard>,
    timeout: Option<Duration>,
}

impl Conn {
    /// Takes a connection that was greeted into use. Answers that take longer than `timeout` are errors; what the server says
    /// unasked goes to `pushes`.
    pub(crate) fn start(
        env: &Env,
        io: Box<dyn Io>,
        timeout: Option<Duration>,
        pushes: Option<UnboundedSender<PushInfo>>,
    ) -> Self {
        let shared = Shared::default();
        let mut line = Line {
            io,
            shared: shared.clone(),
            out: Vec::new(),
            written: 0,
            unflushed: false,
            flying: VecDeque::new(),
            buf: BytesMut::new(),
            scan: Scan::default(),
            pushes,
        };
        env.spawn(async move {
            let error = poll_fn(|cx| line.poll(cx)).await;
            line.end(&error);
        });
        Self { guard: Arc::new(Guard(shared)), timeout }
    }

    /// On its way when this returns.
    fn ask(&self, want: Want, count: usize, write: impl FnOnce(&mut Vec<u8>)) -> Asked {
        let (to, answers) = oneshot::channel();
        let waker = {
            let mut state = self.guard.0.lock();
            match &state.ended {
                Some(error) => {
                    let _ = to.send(Err(error.clone()));
                    None
                }
                None => {
                    write(&mut state.out);
                    state.asked.push_back(Request { want, count, got: Vec::with_capacity(count), to });
                    state.task.take()
                }
            }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Asked { answers, conn: self.clone() }
    }

    /// Sends one command.
    pub(crate) async fn send_packed_command(&self, cmd: &Cmd) -> Result<Value, RedisError> {
        self.one(cmd, Want::Values).await?.value()
    }

    /// Sends one command, and gives the answer as it came.
    pub(crate) async fn send_for_frame(&self, cmd: &Cmd) -> Result<Reply, RedisError> {
        self.one(cmd, Want::Frame).await
    }

    async fn one(&self, cmd: &Cmd, want: Want) -> Result<Reply, RedisError> {
        let answers = self.ask(want, 1, |out| cmd.write_packed_command(out)).answers().await?;
        answers.into_iter().next().ok_or_else(closed)
    }

    /// Sends commands together; one answer each, errors among them.
    pub(crate) async fn send_packed_commands(&self, pipe: &Pipeline) -> Result<Vec<Value>, RedisError> {
        let answers = self.ask(Want::Values, pipe.len(), |out| out.extend_from_slice(&pipe.get_packed_pipeline()));
        answers.answers().await?.into_iter().map(Reply::value).collect()
    }

    /// Sends commands that the server carries out together; the list of their answers, or the error of the first that was refused.
    pub(crate) async fn send_together(&self, pipe: &Pipeline) -> Result<Value, RedisError> {
        let answers = self.ask(Want::Values, pipe.len() + 2, |out| {
            redis::cmd("MULTI").write_packed_command(out);
            out.extend_from_slice(&pipe.get_packed_pipeline());
            redis::cmd("EXEC").write_packed_command(out);
        });
        let mut last = Value::Nil;
        for answer in answers.answers().await? {
            last = checked(answer.value()?)?;
        }
        Ok(last)
    }

    /// `write` writes `count` commands that are answered with ids, as a rule. They are on their way when this returns.
    pub(crate) fn send_for_ids(&self, count: usize, write: impl FnOnce(&mut Vec<u8>)) -> Asked {
        self.ask(Want::Ids, count, write)
    }
}

/// What was asked. Dropped, it stays under way, and nobody is told.
pub(crate) struct Asked {
    answers: oneshot::Receiver<Answers>,
    /// An answer that is awaited keeps the connection.
    conn: Conn,
}

impl Asked {
    /// Waits for all answers, each with its own error, for as long as the connection allows.
    pub(crate) async fn answers(self) -> Answers {
        let answers = match self.conn.timeout {
            Some(timeout) => match tokio::time::timeout(timeout, self.answers).await {
                Ok(answers) => answers,
                Err(_) => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
            },
            None => self.answers.await,
        };
        answers.unwrap_or_else(|_| Err(closed()))
    }
}

impl std::fmt::Debug for Conn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Conn({} asked)", self.guard.0.lock().asked.len())
    }
}

fn closed() -> RedisError {
    io::Error::new(io::ErrorKind::BrokenPipe, "the connection is closed").into()
}

/// The socket's side.
struct Line {
    io: Box<dyn Io>,
    shared: Shared,
    out: Vec<u8>,
    written: usize,
    unflushed: bool,
    /// Written, or being written; in order.
    flying: VecDeque<Request>,
    buf: BytesMut,
    scan: Scan,
    pushes: Option<UnboundedSender<PushInfo>>,
}

impl Line {
    /// Reads and writes by turns, so that a server that reads only while it is read from does not stand still. Ready when the
    /// connection ended.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<RedisError> {
        loop {
            if !self.fetch(cx) {
                return Poll::Ready(closed());
            }
            let wrote = self.write(cx);
            let read = self.read(cx);
            match (wrote, read) {
                (Err(error), _) | (_, Err(error)) => return Poll::Ready(error),
                (Ok(false), Ok(false)) => return Poll::Pending,
                _ => {}
            }
        }
    }

    /// Takes what was asked; `false` when nobody is left who would ask.
    fn fetch(&mut self, cx: &Context<'_>) -> bool {
        let mut state = self.shared.lock();
        if state.closed {
            return false;
        }
        if self.written == self.out.len() {
            self.written = 0;
            self.out.clear();
            if self.out.capacity() > KEEP {
                self.out = Vec::new();
            }
            std::mem::swap(&mut self.out, &mut state.out);
            self.flying.append(&mut state.asked);
        }
        if !state.task.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            state.task = Some(cx.waker().clone());
        }
        true
    }

    /// Whether anything was written.
    fn write(&mut self, cx: &mut Context<'_>) -> Result<bool, RedisError> {
        let mut wrote = false;
        while self.written < self.out.len() {
            match Pin::new(&mut self.io).poll_write(cx, &self.out[self.written..]) {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => return Err(closed()),
                Poll::Ready(Ok(n)) => {
                    self.written += n;
                    (wrote, self.unflushed) = (true, true);
                }
                Poll::Ready(Err(error)) => return Err(error.into()),
            }
        }
        if self.unflushed
            && let Poll::Ready(flushed) = Pin::new(&mut self.io).poll_flush(cx)
        {
            flushed?;
            self.unflushed = false;
        }
        Ok(wrote)
    }

    /// Whether anything was read.
    fn read(&mut self, cx: &mut Context<'_>) -> Result<bool, RedisError> {
        self.buf.reserve(READ);
        match pin!(self.io.read_buf(&mut self.buf)).poll(cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => {
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection");
                Err(error.into())
            }
            Poll::Ready(Ok(_)) => self.sort().map(|()| true),
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }

    /// Gives every whole reply to whom it is for.
    fn sort(&mut self) -> Result<(), RedisError> {
        let mut start = 0;
        while let Some(mark) = self.buf.get(start).copied() {
            let asked = self.flying.front_mut().filter(|_| mark != b'>');
            if let Some(request) = asked
                && request.want == Want::Ids
                && let Some((id, len)) = id_reply(&self.buf[start..])
            {
                start += len;
                request.got.push(Reply::Id(id));
                self.tell();
                continue;
            }
            let Some(len) = self.scan.end(&self.buf[start..]).map_err(|Malformed| malformed())? else { break };
            self.scan = Scan::default();
            if mark == b'>' {
                if let (Value::Push { kind, data }, Some(pushes)) =
                    (parse_redis_value(&self.buf[start..start + len])?, &self.pushes)
                {
                    let _ = pushes.send(PushInfo { kind, data });
                }
                start += len;
                continue;
            }
            let Some(request) = self.flying.front_mut() else { return Err(malformed()) };
            if request.want == Want::Frame {
                self.buf.advance(start);
                start = 0;
                request.got.push(Reply::Frame(self.buf.split_to(len).freeze()));
            } else {
                request.got.push(Reply::Value(parse_redis_value(&self.buf[start..start + len])?));
                start += len;
            }
            self.tell();
        }
        self.buf.advance(start);
        Ok(())
    }

    /// Tells the first request, if it has all its answers.
    fn tell(&mut self) {
        if self.flying.front().is_some_and(|request| request.got.len() >= request.count)
            && let Some(request) = self.flying.pop_front()
        {
            let _ = request.to.send(Ok(request.got));
        }
    }

    fn end(&mut self, error: &RedisError) {
        let asked = {
            let mut state = self.shared.lock();
            state.ended = Some(error.clone());
            state.out = Vec::new();
            std::mem::take(&mut state.asked)
        };
        for request in self.flying.drain(..).chain(asked) {
            let _ = request.to.send(Err(error.clone()));
        }
    }
}

fn malformed() -> RedisError {
    io::Error::new(io::ErrorKind::InvalidData, "what the server answered is not the protocol of Redis").into()
}

#[cfg(test)]
mod tests {
    use super::{Conn, Reply};
    use crate::resp::put_arg;
    use mq_core::Env;
    use redis::{PushInfo, PushKind, Value};
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    /// A connection, the server's end of it, and what the server says unasked.
    fn line(timeout: Option<Duration>) -> (Env, Conn, DuplexStream, UnboundedReceiver<PushInfo>) {
        let env = Env::current(Some(1)).unwrap();
        let (near, far) = tokio::io::duplex(64);
        let (pushes, pushed) = unbounded_channel();
        let conn = Conn::start(&env, Box::new(near), timeout, Some(pushes));
        (env, conn, far, pushed)
    }

    fn ping() -> redis::Cmd {
        redis::cmd("PING")
    }

    #[tokio::test(start_paused = true)]
    async fn answers_come_to_who_asked_wherever_the_bytes_are_cut() {
        let (_env, conn, mut server, mut pushed) = line(None);
        let one = conn.clone();
        let first = tokio::spawn(async move { one.send_packed_command(&ping()).await });
        tokio::task::yield_now().await;
        let ids = conn.send_for_ids(3, |out| (0..3).for_each(|_| put_arg(b"XADD", out)));
        let two = conn.clone();
        let frame = tokio::spawn(async move { two.send_for_frame(&ping()).await });
        let script = "+PONG\r\n$3\r\n1-2\r\n>2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n-OOM no room\r\n$4\r\n1-30\r\n*1\r\n$2\r\nab\r\n";
        for byte in script.as_bytes() {
            server.write_all(&[*byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        assert_eq!(first.await.unwrap().unwrap(), Value::SimpleString("PONG".into()));
        let ids = ids.answers().await.unwrap();
        assert!(
            matches!(&ids[..], [Reply::Id((1, 2)), Reply::Value(Value::ServerError(e)), Reply::Id((1, 30))] if e.code() == "OOM"),
            "{ids:?}"
        );
        let Reply::Frame(frame) = frame.await.unwrap().unwrap() else { panic!("no frame") };
        assert_eq!(&frame[..], b"*1\r\n$2\r\nab\r\n");
        assert_eq!(pushed.recv().await.unwrap().kind, PushKind::Invalidate);
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_wait_hear_of_the_end() {
        let (env, conn, mut server, mut pushed) = line(None);
        let (one, two) = (conn.clone(), conn.clone());
        let first = tokio::spawn(async move { one.send_packed_command(&ping()).await });
        let second = tokio::spawn(async move { two.send_packed_command(&ping()).await });
        let mut asked = [0; 14];
        server.read_exact(&mut asked).await.unwrap();
        server.write_all(b"+PONG\r\n+PO").await.unwrap();
        drop(server);
        assert!(first.await.unwrap().is_ok());
        assert!(second.await.unwrap().is_err());
        assert!(conn.send_packed_command(&ping()).await.is_err(), "later ones hear it at once");
        assert!(pushed.recv().await.is_none());
        assert_eq!(env.tasks(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_with_its_last_handle_also_while_the_server_reads_nothing() {
        let (env, conn, mut server, _pushed) = line(None);
        // More than the socket takes, and nobody reads.
        drop(conn.send_for_ids(1, |out| put_arg(&[7; 500], out)));
        tokio::task::yield_now().await;
        assert_eq!(env.tasks(), 1);
        drop(conn);
        let mut all = Vec::new();
        server.read_to_end(&mut all).await.unwrap();
        assert!(all.len() < 500);
        assert_eq!(env.tasks(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_comes_too_late_is_nobodys() {
        let (_env, conn, mut server, _pushed) = line(Some(Duration::from_secs(1)));
        let late = conn.send_packed_command(&ping()).await.unwrap_err();
        assert!(late.is_timeout(), "{late}");
        server.write_all(b"+LATE\r\n").await.unwrap();
        let one = conn.clone();
        let next = tokio::spawn(async move { one.send_packed_command(&ping()).await });
        tokio::task::yield_now().await;
        server.write_all(b"+NEXT\r\n").await.unwrap();
        assert_eq!(next.await.unwrap().unwrap(), Value::SimpleString("NEXT".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_asked_for_ends_it() {
        let (_env, conn, mut server, _pushed) = line(None);
        server.write_all(b"+WHO\r\n").await.unwrap();
        tokio::task::yield_now().await;
        assert!(conn.send_packed_command(&ping()).await.is_err());
    }
}
