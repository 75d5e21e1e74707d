//! Redis Streams by the `redis` crate used as well as it can be, with nothing around: one multiplexed connection, pipelines
//! of 500 `XADD` with four in flight, `XREADGROUP COUNT 500`, one `XACK` a batch. And one by one, each step awaited: what the
//! batches have to be ten times faster than.

use futures_util::stream::{FuturesOrdered, StreamExt};
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisResult, Value};

use crate::job::{BATCH, FLYING, Failed, GROUP, Job, Ran, payload};
use crate::meter::Meter;

pub(crate) async fn connect(job: &Job) -> Result<MultiplexedConnection, Failed> {
    Ok(redis::Client::open(job.url.as_str())?.get_multiplexed_async_connection().await?)
}

pub(crate) async fn make_group(connection: &mut MultiplexedConnection, job: &Job) -> RedisResult<()> {
    redis::cmd("XGROUP").arg(&["CREATE", &job.topic, GROUP, "0", "MKSTREAM"]).exec_async(connection).await
}

/// In batches.
pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let mut connection = connect(job).await?;
    make_group(&mut connection, job).await?;
    let payload = payload(job.size);

    let meter = Meter::start();
    let mut flying = FuturesOrdered::new();
    let mut left = job.n;
    while left > 0 || !flying.is_empty() {
        while left > 0 && flying.len() < FLYING {
            let some = left.min(BATCH);
            left -= some;
            let mut batch = Pipeline::with_capacity(some);
            for _ in 0..some {
                batch.cmd("XADD").arg(&job.topic).arg("*").arg("p").arg(&payload[..]);
            }
            let mut connection = connection.clone();
            flying.push_back(async move { batch.query_async::<Vec<Value>>(&mut connection).await });
        }
        if let Some(answers) = flying.next().await {
            answers?;
        }
    }
    let send = meter.stop();

    let meter = Meter::start();
    let mut got = 0;
    let mut acks: Vec<Vec<u8>> = Vec::new();
    while got < job.n {
        let reply = read(&mut connection, job, BATCH, &std::mem::take(&mut acks)).await?;
        acks = entries(reply).map(|(id, _)| id).collect();
        got += acks.len();
    }
    ack(&mut connection, &job.topic, &acks).await?;
    let receive = meter.stop();
    Ok(Ran { send, receive })
}

/// One by one.
pub(crate) async fn one_by_one(job: &Job) -> Result<Ran, Failed> {
    let mut connection = connect(job).await?;
    make_group(&mut connection, job).await?;
    let payload = payload(job.size);
    let meter = Meter::start();
    for _ in 0..job.n {
        let add =
            redis::cmd("XADD").arg(&job.topic).arg("*").arg("p").arg(&payload[..]).exec_async(&mut connection).await;
        add?;
    }
    let send = meter.stop();
    let meter = Meter::start();
    for _ in 0..job.n {
        let reply = read(&mut connection, job, 1, &[]).await?;
        let ids: Vec<Vec<u8>> = entries(reply).map(|(id, _)| id).collect();
        ack(&mut connection, &job.topic, &ids).await?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}

/// Acknowledges the last batch and reads the next one in one round trip.
async fn read(
    connection: &mut MultiplexedConnection,
    job: &Job,
    count: usize,
    acks: &[Vec<u8>],
) -> Result<Value, Failed> {
    let mut both = Pipeline::with_capacity(2);
    if !acks.is_empty() {
        both.cmd("XACK").arg(&job.topic).arg(GROUP).arg(acks).ignore();
    }
    both.cmd("XREADGROUP").arg(&["GROUP", GROUP, "c", "COUNT", &count.to_string(), "STREAMS", &job.topic, ">"]);
    let (reply,): (Value,) = both.query_async(connection).await?;
    Ok(reply)
}

pub(crate) async fn ack(connection: &mut MultiplexedConnection, topic: &str, ids: &[Vec<u8>]) -> Result<(), Failed> {
    let acked: usize = redis::cmd("XACK").arg(topic).arg(GROUP).arg(ids).query_async(connection).await?;
    if acked == ids.len() { Ok(()) } else { Err(format!("{acked} of {} were acknowledged", ids.len()).into()) }
}

/// The ids and fields of the entries of one stream, in either protocol.
pub(crate) fn entries(reply: Value) -> impl Iterator<Item = (Vec<u8>, Vec<Value>)> {
    let stream = match reply {
        Value::Array(streams) => match streams.into_iter().next() {
            Some(Value::Array(stream)) => stream.into_iter().nth(1),
            _ => None,
        },
        Value::Map(streams) => streams.into_iter().next().map(|(_, entries)| entries),
        _ => None,
    };
    let list = if let Some(Value::Array(list)) = stream { list } else { Vec::new() };
    list.into_iter().filter_map(|entry| {
        let Value::Array(entry) = entry else { return None };
        let mut parts = entry.into_iter();
        match (parts.next(), parts.next()) {
            (Some(Value::BulkString(id)), Some(Value::Array(fields))) => Some((id, fields)),
            _ => None,
        }
    })
}
