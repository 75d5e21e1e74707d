//! The main job on real input: 10,000 orders, two groups of four members, and everything that goes wrong.
//!
//!     cargo run --example quickstart
//!     MQ_URL=redis://localhost cargo run --example quickstart --features redis -- --processes 4 --kill9 1
//!
//! Reads `examples/data/orders.ndjson`, sends each line, lets `billing` (retry, dead letters) and `analytics` work on them,
//! kills a member midway, and compares what came of it with `examples/data/orders.expected.json`, which a script of its own
//! works out from the input. The last line is JSON; the program ends with 0 only if it says `"balanced":true`.

#![allow(unreachable_pub, reason = "an example reads better with plain pub")]

mod crash;
mod fleet;
mod ledger;
mod member;
mod options;

use anymq::prelude::*;
use fleet::{Fleet, News};
use ledger::{Entry, Ledger, What, differences};
use options::{Options, Sabotage};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const GROUPS: [&str; 2] = ["billing", "analytics"];

#[tokio::main]
async fn main() -> ExitCode {
    let options = match Options::read() {
        Ok(options) => Arc::new(options),
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::from(2);
        }
    };
    // Long enough for a busy machine to renew, short enough for seven deaths within a minute.
    let lease = Duration::from_millis(if options.in_memory() { 1000 } else { 2000 });
    let result = match options.member.clone() {
        Some((group, name)) => fleet::member_process(&options, group, name, lease).await.map(|()| true),
        None => run(options, lease).await,
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Arc<Options>, lease: Duration) -> Result<bool, String> {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data");
    let read =
        |name: &str| std::fs::read_to_string(format!("{data}/{name}")).map_err(|e| format!("{data}/{name}: {e}"));
    let input = read("orders.ndjson")?;
    let expected: Value = serde_json::from_str(&read("orders.expected.json")?).map_err(|e| e.to_string())?;

    let broker = anymq::connect(&options.url).await.map_err(|e| e.to_string())?;
    // On a server each run has a topic of its own, so that what an earlier run left is not counted.
    let topic = if options.in_memory() { "orders".to_owned() } else { format!("orders-{}", std::process::id()) };
    println!("{} orders to {topic} on {}", input.lines().count(), broker.capabilities().backend);

    let (news, mut inbox) = mpsc::unbounded_channel();
    let mut fleet = Fleet::new(options.clone(), topic.clone(), lease, news.clone());
    let mut spec = ProducerSpec::new(topic.as_str());
    for group in GROUPS {
        // Groups that exist before the first send miss nothing, on every broker.
        spec = spec.group(group);
    }
    let producer = broker.producer(spec).await.map_err(|e| e.to_string())?;
    for group in GROUPS {
        for _ in 0..options.processes.unwrap_or(4) {
            fleet.start(group).await?;
        }
        tokio::spawn(read_dead_letters(broker.clone(), topic.clone(), group, news.clone()));
    }

    let started = Instant::now();
    let messages: Vec<Message> = input.lines().zip(1u32..).map(|(text, line)| message(text, line)).collect();
    let total = messages.len() as u64;
    let sending = tokio::spawn(async move {
        let mut confirmed = 0;
        for chunk in messages.chunks(500) {
            let results = producer.send_all(chunk.to_vec()).await;
            confirmed += results.iter().filter(|r| r.is_ok()).count() as u64;
            if let Some(error) = results.into_iter().find_map(Result::err) {
                eprintln!("a send failed: {error}");
            }
        }
        confirmed
    });

    let mut ledger = Ledger::new(options.sabotage != Some(Sabotage::Double));
    let limit = Duration::from_secs(if options.in_memory() { 55 } else { 170 });
    let (mut midway, mut changed, mut most_done) = (false, Instant::now(), None);
    let mut progress = tokio::time::interval(Duration::from_millis(500));
    loop {
        tokio::select! {
            biased;
            Some(item) = inbox.recv() => match item {
                News::Entry(entry) => {
                    ledger.enter(entry);
                    changed = Instant::now();
                    if most_done.is_none() && ledger.settled("billing").min(ledger.settled("analytics")) >= total * 95 / 100 {
                        most_done = Some(started.elapsed());
                    }
                    if !midway && ledger.settled("billing") > total / 2 {
                        midway = true;
                        fleet.kill(options.kill).await?;
                        if let Some(command) = &options.restart {
                            println!("restarting the broker: {command}");
                            let _ = tokio::process::Command::new("sh").args(["-c", command]).status().await;
                        }
                    }
                }
                News::Died(name) => {
                    println!("{name} died; another takes its place");
                    fleet.bury(&name).await?;
                }
            },
            _ = progress.tick() => {
                let (billing, analytics) = (ledger.settled("billing"), ledger.settled("analytics"));
                println!("{:5.1} s  billing {billing}, analytics {analytics} of {total}", started.elapsed().as_secs_f64());
                // Nothing for as long as any retry or takeover takes: what is missing now is lost.
                let quiet = changed.elapsed() > lease * 5;
                if (billing == total && analytics == total) || quiet || started.elapsed() > limit {
                    break;
                }
            }
        }
    }
    let took = started.elapsed();
    ledger.sent = sending.await.map_err(|e| e.to_string())?;
    fleet.stop().await;
    while let Ok(item) = inbox.try_recv() {
        if let News::Entry(entry) = item {
            ledger.enter(entry);
        }
    }
    for group in GROUPS {
        let (topic, group) = (Topic::new(topic.as_str()), group.into());
        if let Ok(backlog) = broker.admin().backlog(&topic, &group).await {
            println!("{group}: ready {}, in flight {}, delayed {}", backlog.ready, backlog.in_flight, backlog.delayed);
        }
    }
    if !options.in_memory() {
        let mut made = vec![Topic::new(topic.as_str())];
        made.extend(GROUPS.map(|group| Topic::dead_letters(topic.as_str(), group)));
        for topic in made {
            let _ = broker.admin().delete_topic(&topic).await;
        }
    }
    broker.close(Duration::from_secs(5)).await;
    Ok(report(&ledger, &expected, fleet.deaths, took, most_done.unwrap_or(took)))
}

fn message(text: &str, line: u32) -> Message {
    let order: Option<Value> = serde_json::from_str(text).ok();
    let field = |name: &str| order.as_ref()?.get(name)?.as_str().map(str::to_owned);
    let mut message = Message::new(text.to_owned())
        .id(MessageId::text(field("id").unwrap_or_else(|| format!("line-{line:05}"))))
        .header("line", line.to_string());
    if let Some(customer) = field("customer") {
        message = message.key(customer);
    }
    message
}

/// Dead letters are a topic like any other: a group of its own reads them.
async fn read_dead_letters(
    broker: Arc<dyn Broker>,
    topic: String,
    group: &'static str,
    news: mpsc::UnboundedSender<News>,
) -> Result<(), anymq::Error> {
    let letters = Subscription::group(Topic::dead_letters(topic.as_str(), group), "audit");
    let mut letters = broker.subscribe(letters).await?;
    while let Some(letter) = letters.recv().await? {
        let line = letter.headers.get_str("line").and_then(|line| line.parse().ok()).unwrap_or(0);
        let reason = letter.envelope().map_or_else(|| "no envelope".to_owned(), |e| e.reason.to_string());
        letter.ack().await;
        drop(news.send(News::Entry(Entry { group: group.to_owned(), line, what: What::DeadLettered { reason } })));
    }
    Ok(())
}

fn report(ledger: &Ledger, expected: &Value, deaths: usize, took: Duration, most_done: Duration) -> bool {
    let totals = ledger.totals();
    let differences = differences("", expected, &totals);
    // The last few wait for leases to run out, which says nothing about speed.
    let rate = 0.95 * ledger.sent as f64 * GROUPS.len() as f64 / most_done.as_secs_f64();
    println!("sent           {}", ledger.sent);
    println!("handled        billing {}, analytics {}", totals["billing"]["handled"], totals["analytics"]["handled"]);
    println!("failed tries   {}", ledger.failed());
    println!("dead-lettered  {:?}", ledger.dead_by_reason("billing"));
    println!("duplicates     {}", ledger.duplicates());
    println!("deaths         {deaths}");
    println!("rate           {rate:.0} messages/s for the first 95 %; {:.1} s in all", took.as_secs_f64());
    for difference in &differences {
        println!("DIFFERS        {difference}");
    }
    let balanced = differences.is_empty();
    let mut line = json!({
        "balanced": balanced,
        "failed_tries": ledger.failed(),
        "duplicates": ledger.duplicates(),
        "deaths": deaths,
        "rate": rate.round(),
        "seconds": took.as_secs_f64(),
        "differences": differences,
    });
    if let (Value::Object(line), Value::Object(totals)) = (&mut line, totals) {
        line.extend(totals);
    }
    println!("{line}");
    balanced
}
