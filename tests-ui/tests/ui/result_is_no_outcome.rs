// A number does not say what becomes of the message.
use anymq::prelude::*;

async fn handle(Payload(bytes): Payload) -> usize {
    bytes.len()
}

fn main() {
    anymq::worker::handler::check::<(Payload,), (), _>(&handle);
}
