//! Redis Streams by the `redis` crate with the promise that anymq gives, written for this one purpose: every message has an
//! id of 16 bytes and a timestamp in the same field, reading has a connection of its own that may block, messages are owned
//! by what is read and decoded, and an ack is plain only while the lease that began with the reading is provably valid.
//! Each batch is awaited, and each of its messages has its own result, as `send_batch` gives them. What it leaves out happens only
//! when something fails: another try, another connection, the order of a key's retries.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use futures_util::stream::{FuturesOrdered, StreamExt};
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, Value};

use crate::job::{BATCH, FLYING, Failed, GROUP, Job, Ran, payload};
use crate::meter::Meter;
use crate::redis_bare::{ack, connect, entries, make_group};

/// The default of anymq.
const LEASE: Duration = Duration::from_secs(60);

/// What anymq writes beside the payload: version, flags, id, milliseconds.
fn header(number: u64, prefix: u64) -> [u8; 26] {
    let mut out = [0; 26];
    out[0] = 1;
    out[1] = 4;
    out[2..10].copy_from_slice(&prefix.to_be_bytes());
    out[10..18].copy_from_slice(&number.to_be_bytes());
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    out[18..].copy_from_slice(&u64::try_from(since.as_millis()).unwrap_or(0).to_be_bytes());
    out
}

/// A message as its receiver has it.
struct Got {
    entry: Vec<u8>,
    id: [u8; 16],
    payload: Vec<u8>,
}

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let mut connection = connect(job).await?;
    let mut reading = connect(job).await?;
    make_group(&mut connection, job).await?;
    let payload = payload(job.size);
    let prefix = u64::from(std::process::id()) | 1 << 63;

    let meter = Meter::start();
    let mut flying = FuturesOrdered::new();
    let mut sent = 0;
    while sent < job.n || !flying.is_empty() {
        while sent < job.n && flying.len() < FLYING {
            let some = (job.n - sent).min(BATCH);
            let mut batch = Pipeline::with_capacity(some);
            for number in sent..sent + some {
                let header = header(number as u64, prefix);
                batch.cmd("XADD").arg(&job.topic).arg("*").arg("mq").arg(&header[..]).arg("p").arg(&payload[..]);
            }
            sent += some;
            let mut connection = connection.clone();
            flying.push_back(async move { batch.query_async::<Vec<Value>>(&mut connection).await });
        }
        if let Some(answers) = flying.next().await {
            // Each entry's id is its message's receipt.
            for answer in answers? {
                let Value::BulkString(_) = answer else { return Err("an XADD was not confirmed".into()) };
            }
        }
    }
    let send = meter.stop();

    let meter = Meter::start();
    let mut taken = 0;
    let mut acking = VecDeque::new();
    while taken < job.n {
        let asked = Instant::now();
        let batch = read(&mut reading, job).await?;
        taken += batch.len();
        let owned = asked.elapsed() < LEASE && batch.iter().all(|got| got.id[0] != 0 && got.payload.len() == job.size);
        if !owned {
            return Err("the lease of a batch ran out before it was handled".into());
        }
        let ids: Vec<Vec<u8>> = batch.into_iter().map(|got| got.entry).collect();
        let (mut connection, topic) = (connection.clone(), job.topic.clone());
        // A task, so that the acks of one batch are on their way while the next is read.
        acking.push_back(tokio::spawn(async move { ack(&mut connection, &topic, &ids).await }));
        if acking.len() > FLYING
            && let Some(acked) = acking.pop_front()
        {
            acked.await??;
        }
    }
    for acked in acking {
        acked.await??;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}

async fn read(reading: &mut MultiplexedConnection, job: &Job) -> Result<Vec<Got>, Failed> {
    let count = BATCH.to_string();
    let command = ["GROUP", GROUP, "c", "COUNT", &count, "BLOCK", "1000", "STREAMS", &job.topic, ">"];
    let reply: Value = redis::cmd("XREADGROUP").arg(&command).query_async(reading).await?;
    entries(reply)
        .map(|(entry, fields)| match <[Value; 4]>::try_from(fields) {
            Ok([_, Value::BulkString(header), _, Value::BulkString(payload)]) if header.len() == 26 => {
                let mut id = [0; 16];
                id.copy_from_slice(&header[2..18]);
                Ok(Got { entry, id, payload })
            }
            _ => Err("an entry that is not ours".into()),
        })
        .collect()
}
