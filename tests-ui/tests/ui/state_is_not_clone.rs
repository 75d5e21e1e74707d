// The state is cloned for each message: wrap it in `Arc`.
use anymq::prelude::*;

struct Pool;

fn main() {
    let worker = |broker| Worker::new(broker).state(Pool);
    drop(worker);
}
