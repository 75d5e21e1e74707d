//! The socket's side of a connection: one task that writes what was asked and gives each answer to whom it is for.

use super::{Reply, Request, Shared, Want, closed};
use crate::dial::Io;
use crate::resp::{Malformed, Scan, id_reply};
use bytes::{Buf, BytesMut};
use redis::{PushInfo, RedisError, Value, parse_redis_value};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::sync::mpsc::UnboundedSender;

/// Room for one read of the socket.
const READ: usize = 64 * 1024;
/// A buffer that grew beyond this is let go when it was written.
const KEEP: usize = 1 << 20;

/// See the module.
pub(super) struct Line {
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
    pub(super) fn new(io: Box<dyn Io>, shared: Shared, pushes: Option<UnboundedSender<PushInfo>>) -> Self {
        Self {
            io,
            shared,
            out: Vec::new(),
            written: 0,
            unflushed: false,
            flying: VecDeque::new(),
            buf: BytesMut::new(),
            scan: Scan::default(),
            pushes,
        }
    }

    /// Moves bytes until the connection ends, and tells all who wait.
    pub(super) async fn run(mut self) {
        let error = poll_fn(|cx| self.poll(cx)).await;
        self.end(&error);
    }

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
