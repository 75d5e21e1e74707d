//! The writing half of every shape: takes from the outbox, waits, stores, answers.

use crate::broker::{Dead, Toy};
use crate::script::{Script, Write};
use mq_api::{Durability, Error, ErrorKind, Outcome, Receipt, SendResult};
use mq_core::{End, Outgoing, Run, Target, TxSession};

pub fn run(toy: Toy, script: Script, tx: TxSession) -> Run {
    Box::pin(async move {
        let cut = script.tx_cut_token();
        let write = async {
            let mut batch = Vec::new();
            loop {
                tx.outbox.take(50, 1 << 20, &mut batch).await;
                let delay = script.write_delay();
                if !delay.is_zero() {
                    tokio::time::sleep(delay).await;
                }
                let done: Vec<_> = batch.drain(..).filter_map(|out| one(&toy, &script, out)).collect();
                tx.outbox.complete(done);
            }
        };
        tokio::select! { biased;
            () = tx.stop.cancelled() => End::Closed,
            () = cut.cancelled() => script.tx_end(),
            () = write => End::Closed,
        }
    })
}

fn one(toy: &Toy, script: &Script, out: Outgoing) -> Option<(u64, SendResult)> {
    let error = |kind, outcome| Err(Error::new(kind, "scripted").with_outcome(outcome));
    let verdict = script.decide(&out);
    let ticket = out.ticket;
    if let Write::Ok | Write::Unknown = verdict {
        store(toy, out);
    }
    Some((
        ticket,
        match verdict {
            Write::Ok => Ok(Receipt::new(Durability::Memory)),
            Write::Unknown | Write::LostUnknown => error(ErrorKind::Timeout, Outcome::Unknown),
            Write::Reject => error(ErrorKind::Rejected, Outcome::Rejected),
            Write::NotSent => error(ErrorKind::Unavailable, Outcome::NotSent),
            Write::Silent => return None,
        },
    ))
}

fn store(toy: &Toy, out: Outgoing) {
    match out.target {
        Target::Topic => drop(toy.store(out.message, 1)),
        Target::Retry { after, attempt, .. } => toy.delay(out.message, after, attempt),
        Target::DeadLetter(envelope) => toy.with(|st| {
            st.dead.push(Dead {
                id: out.message.id,
                reason: envelope.reason.to_string(),
                attempts: envelope.attempts,
                envelope: Some(*envelope),
            });
        }),
    }
}
