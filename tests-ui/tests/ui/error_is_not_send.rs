// `Box<dyn Error>` cannot move between threads; `anymq::BoxError` can.
use anymq::prelude::*;
use std::error::Error;

async fn handle(Payload(_bytes): Payload) -> Result<(), Box<dyn Error>> {
    Ok(())
}

fn main() {
    anymq::worker::handler::check::<(Payload,), (), _>(&handle);
}
