//! A connection: who asks writes into its buffer, one task moves the bytes and tells the answers in order. Connecting, the
//! greeting and all answers that are not hot are the `redis` crate's.
//!
//! What is asked in one turn of the runtime goes out in one write, whoever asked: many topics on one client share it.

mod line;

use crate::answer::checked;
use crate::dial::Io;
use bytes::Bytes;
use line::Line;
use mq_core::Env;
use parking_lot::Mutex;
use redis::{Cmd, Pipeline, PushInfo, RedisError, Value, parse_redis_value};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

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
    /// An answer did not come in time.
    late: bool,
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
        env.spawn(Line::new(io, shared.clone(), pushes).run());
        Self { guard: Arc::new(Guard(shared)), timeout }
    }

    /// Whether it ended, or owes an answer that did not come in time: then it is for nobody new.
    pub(crate) fn is_lost(&self) -> bool {
        let state = self.guard.0.lock();
        state.ended.is_some() || state.late
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
                Err(_) => {
                    self.conn.guard.0.lock().late = true;
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
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
