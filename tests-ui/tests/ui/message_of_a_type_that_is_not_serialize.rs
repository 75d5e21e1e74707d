// `#[derive(Serialize)]` is missing.
use anymq::prelude::*;

struct Order;

fn main() {
    let _ = Message::json(&Order);
}
