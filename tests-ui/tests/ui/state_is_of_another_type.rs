// The state is a `Pool`, the handler wants an `Arc<Pool>`.
use anymq::prelude::*;
use std::sync::Arc;

#[derive(Clone)]
struct Pool;

async fn handle(State(pool): State<Arc<Pool>>) {
    drop(pool);
}

fn main() {
    anymq::worker::handler::check::<(State<Arc<Pool>>,), Pool, _>(&handle);
}
