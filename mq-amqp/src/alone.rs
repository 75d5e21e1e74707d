//! Crash suspects.

use crate::connect::Connections;
use crate::read::Reader;
use crate::topology::Declarer;
use mq_api::{Result, Stored};
use mq_core::Token;
use std::sync::Arc;

/// The queue of suspects that are recorded.
pub(crate) fn queue(queue: &str) -> String {
    format!("{queue}..alone")
}

pub(crate) struct Alone {
    pending: Vec<(u32, Token)>,
}

pub(crate) enum Event {
    Recorded(u32, Token),
}

impl Alone {
    pub(crate) async fn open(_: &Arc<Connections>, _: &mut Declarer<'_>, _: &str) -> Result<Self> {
        Ok(Self { pending: Vec::new() })
    }

    pub(crate) fn ack(&mut self, _: u64) -> bool {
        false
    }

    pub(crate) fn requeue(&mut self, _: u64) {}

    pub(crate) fn trial(&mut self, lane: u32, token: Token, _: Option<Arc<Stored>>, _: u32) {
        self.pending.push((lane, token));
    }

    pub(crate) async fn next(alone: &mut Option<Self>, _: bool) -> Event {
        match alone.as_mut().and_then(|a| a.pending.pop()) {
            Some((lane, token)) => Event::Recorded(lane, token),
            None => std::future::pending().await,
        }
    }

    pub(crate) async fn close(self) {}
}

pub(crate) async fn handle(reader: &mut Reader, event: Event) -> Result<()> {
    let Event::Recorded(lane, token) = event;
    reader.session.settles.trial_recorded(lane, token);
    Ok(())
}
