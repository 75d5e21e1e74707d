// The message may be on its way, but nobody looks whether it arrived.
#![deny(unused_must_use)]
use anymq::prelude::*;

fn send(producer: &dyn Producer) {
    producer.send(Message::new("hello"));
}

fn main() {
    let _ = send;
}
