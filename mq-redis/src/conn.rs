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
