//! Time by criterion, ours beside the others': `cargo bench --manifest-path bench-peers/Cargo.toml`. The instruction counts of
//! `cargo xtask bench memory` are exact; this shows what they cannot: caches and branches.

use anymq::prelude::*;
use anymq::{Deliveries, SendBatch};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

static PAYLOAD: [u8; 256] = [7; 256];
const N: usize = 6400;

fn message() -> Message {
    Message::new(bytes::Bytes::from_static(&PAYLOAD))
}

/// What a program holds: made once, as the peers' channels outlive what goes through them.
struct Ours {
    producer: std::sync::Arc<dyn Producer>,
    consumer: Box<dyn Consumer>,
    batch: SendBatch,
    deliveries: Deliveries,
}

impl Ours {
    async fn new(url: &str) -> Self {
        let broker = anymq::connect(url).await.expect("a broker");
        Self {
            producer: broker.producer("t").await.expect("a producer"),
            consumer: broker.subscribe(Subscription::group("t", "bench")).await.expect("a consumer"),
            batch: SendBatch::new(),
            deliveries: Deliveries::new(),
        }
    }

    async fn run(&mut self, batch_of: usize) {
        for _ in 0..N / batch_of {
            if batch_of == 1 {
                self.producer.send(message()).await.expect("sent");
                self.consumer.recv().await.expect("received").expect("open").ack().await;
                continue;
            }
            self.batch.messages.extend((0..batch_of).map(|_| message()));
            self.batch = self.producer.send_batch(std::mem::take(&mut self.batch)).await;
            let mut got = 0;
            while got < batch_of {
                got += self.consumer.recv_batch(batch_of - got, &mut self.deliveries).await.expect("received");
                self.deliveries.ack_all().await;
            }
        }
    }
}

fn time(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut group = c.benchmark_group("memory");
    group.throughput(Throughput::Elements(N as u64));
    // As it comes, it keeps 100,000 handled messages for replays: whether memory that no cache holds costs time.
    for (name, url) in [("anymq", "memory://time"), ("anymq-history1000", "memory://short?history=1000")] {
        for batch_of in [1, 64] {
            let mut ours = runtime.block_on(Ours::new(url));
            group.bench_function(format!("{name}-{batch_of}"), |b| b.iter(|| runtime.block_on(ours.run(batch_of))));
        }
    }
    for scenario in bench_peers::SCENARIOS {
        group.bench_function(*scenario, |b| b.iter(|| runtime.block_on(bench_peers::run(scenario, N))));
    }
    group.finish();
}

criterion_group!(benches, time);
criterion_main!(benches);
