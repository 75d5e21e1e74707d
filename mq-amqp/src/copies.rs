//! Copies that a consumer's session writes by itself: a delayed message that is not due yet goes to its next delay queue, a
//! message of a classic queue that came again is written with its count, a crash suspect is recorded. The original is
//! acknowledged only when the copy is confirmed.

use crate::connect::{Connections, Role};
use crate::delay::{Ladder, Rung, millis};
use crate::send::{ConfirmChannel, Writer};
use crate::topology::{Declarer, short};
use crate::wire::{Notes, Origin};
use mq_api::{Message, Provisioning, Result};
use mq_core::{Session, Token};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

/// Where a copy goes.
#[derive(Debug, Clone)]
pub(crate) enum To {
    /// To the delay queue for what is left until it is due, by when it is written: a copy may have waited for that.
    Delay,
    /// To the shortest delay queue.
    Settle,
    /// To the group's queue.
    Back,
    /// To the queue of suspects.
    Alone,
}

/// A copy to write for this delivery.
#[derive(Debug, Clone)]
pub(crate) struct Copy {
    pub(crate) token: Token,
    pub(crate) to: To,
    pub(crate) message: Message,
    pub(crate) notes: Notes,
}

/// An acknowledgement has arrived after this time, if it arrives at all.
const SETTLED_BY: Duration = Duration::from_secs(1);
/// Pause after a failure: longer than a channel takes to come back.
const PAUSE: Duration = Duration::from_millis(500);

/// Writes copies until the session ends; `done` gets each that is confirmed.
pub(crate) async fn write(
    connections: Arc<Connections>,
    mut ladder: Ladder,
    mut jobs: UnboundedReceiver<Copy>,
    done: UnboundedSender<Copy>,
    session: Session,
) {
    let mut waiting: VecDeque<Copy> = VecDeque::new();
    loop {
        if waiting.is_empty() {
            match jobs.recv().await {
                Some(job) => waiting.push_back(job),
                None => return,
            }
        }
        if let Err(error) = serve(&connections, &mut ladder, &mut jobs, &done, &mut waiting, &session).await {
            session.trouble("copies", Some(format!("delayed messages cannot be written, so originals wait: {error}")));
            tokio::time::sleep(PAUSE).await;
        } else {
            return;
        }
    }
}

/// Serves on one channel; fails when it ends, with what is not confirmed in `waiting`. `Ok` when no more jobs will come.
async fn serve(
    connections: &Arc<Connections>,
    ladder: &mut Ladder,
    jobs: &mut UnboundedReceiver<Copy>,
    done: &UnboundedSender<Copy>,
    waiting: &mut VecDeque<Copy>,
    session: &Session,
) -> Result<()> {
    let channel = Arc::new(ConfirmChannel::open(connections).await?);
    let mut writer: Writer<(Copy, Option<Rung>)> = Writer::new(channel, connections.url().confirm_timeout);
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    let error = loop {
        while writer.room() > 0
            && let Some(job) = waiting.pop_front()
        {
            let now = session.env.now();
            let (queue, step) = match &job.to {
                To::Back => (ladder.queue().to_owned(), None),
                To::Alone => (crate::alone::queue(ladder.queue()), None),
                To::Delay | To::Settle => {
                    let rest = match job.to {
                        To::Settle => SETTLED_BY,
                        _ => job.notes.rest(millis(session.env.wall())),
                    };
                    let mut declarer = Declarer::new(connections, Role::Publish, Provisioning::Create);
                    match ladder.place(rest, &mut declarer).await {
                        Ok(place) => place,
                        Err(error) => {
                            // Not first again: what can be written must not wait behind what cannot.
                            waiting.push_back(job);
                            waiting.extend(writer.abandon().map(|(job, _)| job));
                            return Err(error);
                        }
                    }
                }
            };
            let (message, notes) = (job.message.clone(), job.notes);
            writer.publish((job, step), "".into(), Some(short(&queue)?), &message, Origin::Copy(notes), now);
        }
        tokio::select! { biased;
            () = poll_fn(|cx| writer.poll_done(cx)) => {
                for ((job, step), result) in writer.done.drain(..) {
                    match result {
                        // The session may be over: then nobody listens, and the original comes again.
                        Ok(()) => {
                            session.trouble("copies", None);
                            drop(done.send(job));
                        }
                        Err(_) => {
                            if let Some(step) = step {
                                ladder.forget(step);
                            }
                            waiting.push_back(job);
                        }
                    }
                }
                if let Some(error) = writer.dead.take() {
                    break error;
                }
                if !waiting.is_empty() {
                    // Refused: not at once again.
                    tokio::time::sleep(PAUSE).await;
                }
            }
            job = jobs.recv() => match job {
                Some(job) => waiting.push_back(job),
                None => return Ok(()),
            },
            now = tick.tick() => {
                if let Some(error) = writer.check(now) {
                    break error;
                }
            }
        }
    };
    waiting.extend(writer.abandon().map(|(job, _)| job));
    Err(error)
}
