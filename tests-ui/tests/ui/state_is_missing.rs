// `State<Db>` without `.state(db)`.
use anymq::prelude::*;

#[derive(Clone)]
struct Db;

async fn handle(State(db): State<Db>) {
    drop(db);
}

fn main() {
    let worker = |broker| Worker::new(broker).route(Subscription::group("orders", "billing"), handle);
    drop(worker);
    anymq::worker::handler::check::<(State<Db>,), (), _>(&handle);
}
