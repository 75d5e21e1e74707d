//! Time by criterion, ours beside the others': `cargo bench --manifest-path bench-peers/Cargo.toml`. The instruction counts of
//! `cargo xtask bench memory` are exact; this shows what they cannot: caches and branches.

use anymq::prelude::*;
use anymq::{Deliveries, SendBatch};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::sync::Arc;

static PAYLOAD: [u8; 256] = [7; 256];
const N: usize = 6400;

fn message() -> Message {
    Message::new(bytes::Bytes::from_static(&PAYLOAD))
}

async fn ours(broker: &Arc<dyn Broker>, batch_of: usize) {
    let producer = broker.producer("t").await.expect("a producer");
    let mut consumer = broker.subscribe(Subscription::group("t", "bench")).await.expect("a consumer");
    let (mut batch, mut deliveries) = (SendBatch::new(), Deliveries::new());
    for _ in 0..N / batch_of {
        if batch_of == 1 {
            producer.send(message()).await.expect("sent");
            consumer.recv().await.expect("received").expect("open").ack().await;
            continue;
        }
        batch.messages.extend((0..batch_of).map(|_| message()));
        batch = producer.send_batch(batch).await;
        let mut got = 0;
        while got < batch_of {
            got += consumer.recv_batch(batch_of - got, &mut deliveries).await.expect("received");
            deliveries.ack_all().await;
        }
    }
}

fn time(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut group = c.benchmark_group("memory");
    group.throughput(Throughput::Elements(N as u64));
    let broker = runtime.block_on(anymq::connect("memory://time")).expect("a broker");
    for batch_of in [1, 64] {
        group.bench_function(format!("anymq-{batch_of}"), |b| b.iter(|| runtime.block_on(ours(&broker, batch_of))));
    }
    for scenario in bench_peers::SCENARIOS {
        group.bench_function(*scenario, |b| b.iter(|| runtime.block_on(bench_peers::run(scenario, N))));
    }
    group.finish();
}

criterion_group!(benches, time);
criterion_main!(benches);
