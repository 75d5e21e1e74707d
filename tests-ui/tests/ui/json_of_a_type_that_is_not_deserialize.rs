// `#[derive(Deserialize)]` is missing.
use anymq::prelude::*;

struct Order;

async fn handle(Json(order): Json<Order>) {
    drop(order);
}

fn main() {
    anymq::worker::handler::check::<(Json<Order>,), (), _>(&handle);
}
