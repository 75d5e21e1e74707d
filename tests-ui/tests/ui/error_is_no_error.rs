// The error type implements neither `std::error::Error` nor is it text.
use anymq::prelude::*;

struct Refused;

async fn handle(Payload(_bytes): Payload) -> Result<(), Refused> {
    Err(Refused)
}

fn main() {
    anymq::worker::handler::check::<(Payload,), (), _>(&handle);
}
