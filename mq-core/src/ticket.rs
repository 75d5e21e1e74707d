//! What a program holds of a send: it asks for the outcome by its ticket, or forgets it, and the send goes on without it.

use crate::outbox::Outbox;
use crate::tries::State;
use mq_api::{Error, SendResult, SendTable};
use std::task::{Context, Poll, Waker};

impl SendTable for Outbox {
    fn poll_sent(&self, ticket: u64, cx: &mut Context<'_>) -> Poll<SendResult> {
        let mut table = self.table.lock();
        let gone = || Poll::Ready(Err(Error::closed("this send")));
        let Some(slot) = table.slot(ticket) else { return gone() };
        if slot.is_open() {
            if !slot.waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                slot.waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        let State::Done(result) = std::mem::take(&mut slot.state) else { return gone() };
        slot.release();
        table.free.push(ticket as u32);
        Poll::Ready(result)
    }

    fn forget(&self, ticket: u64) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let index = ticket as u32;
        let Some(slot) = table.slot(ticket) else { return };
        slot.waker = None;
        match &slot.state {
            State::Free => return,
            State::Queued | State::Flying => {
                slot.forgotten = true;
                return;
            }
            State::Waiting => {
                table.close_slot(index);
                table.slots[index as usize].release();
            }
            State::Done(result) => {
                let failed = result.is_err();
                slot.release();
                table.unobserved += u64::from(failed);
            }
        }
        table.free.push(index);
        // It may have been what those behind it waited for.
        self.admit(table);
        let mut wakers = Vec::new();
        if table.driver.is_some() && table.has_work() {
            wakers.extend(table.driver.take());
        }
        table.flushed(&mut wakers);
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
    }
}
