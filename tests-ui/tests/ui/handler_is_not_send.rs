// An `Rc` across an `.await`: the handler cannot move between threads.
use anymq::prelude::*;
use std::rc::Rc;

async fn handle(Payload(bytes): Payload) {
    let shared = Rc::new(bytes);
    std::future::ready(()).await;
    drop(shared);
}

fn main() {
    anymq::worker::handler::check::<(Payload,), (), _>(&handle);
}
