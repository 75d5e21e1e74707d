//! What a handler's result, error or panic becomes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

mod scripted;

use anymq::prelude::*;
use anymq::worker::{FromDelivery, FromRef, Report, Request};
use anymq::{Error, ErrorKind, Position};
use scripted::{Script, ScriptedBroker};
use std::io;
use std::time::Duration;

fn orders() -> Subscription {
    Subscription::group("orders", "billing")
}

/// Runs a worker over these payloads and gives how each was settled.
macro_rules! settled {
    ($payloads:expr, |$worker:ident| $built:expr) => {{
        let script = Script::new();
        let payloads: Vec<String> = $payloads.into_iter().map(|p: &str| p.to_owned()).collect();
        payloads.iter().for_each(|p| script.send(p));
        let $worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]));
        let worker = $built;
        let done = script.clone();
        let count = payloads.len();
        let report: Report = worker.run_until(async move { drop(done.settle_count(count).await) }).await.unwrap();
        let mut settled = script.settled();
        settled.sort();
        (settled.into_iter().map(|(_, word)| word).collect::<Vec<_>>(), report)
    }};
}

async fn by_word(Payload(word): Payload) -> Result<Outcome, anymq::BoxError> {
    Ok(match &*word {
        b"ack" => Outcome::Ack,
        b"failed" => return Err(io::Error::other("disk full").into()),
        b"text" => return Err("just text".into()),
        b"permanent" => return Err(Failure::permanent("no such customer").into()),
        b"transient" => return Err(Failure::transient("the database is down").into()),
        b"broker" => return Err(Error::new(ErrorKind::Unavailable, "broker away").into()),
        b"later" => Outcome::retry_after(Duration::from_secs(9), "not yet"),
        b"dead" => Outcome::dead_letter("fraud"),
        b"release" => Outcome::Release,
        b"panic" => panic!("index out of luck"),
        b"late panic" => {
            tokio::task::yield_now().await;
            panic!("after a wait")
        }
        other => return Err(format!("{other:?}").into()),
    })
}

#[tokio::test(start_paused = true)]
async fn every_result_has_its_settlement() {
    let words = [
        "ack",
        "failed",
        "text",
        "permanent",
        "transient",
        "broker",
        "later",
        "dead",
        "release",
        "panic",
        "late panic",
    ];
    let (settled, report) = settled!(words, |worker| worker.route(orders(), by_word));
    assert_eq!(
        settled,
        [
            "ack",
            "nack Failed: disk full",
            "nack Failed: just text",
            "nack Permanent: no such customer",
            "nack Transient: the database is down",
            "nack Transient: broker away",
            "nack Failed after 9s: not yet",
            "dead letter: fraud",
            "release",
            "nack Failed: the handler panicked: index out of luck",
            "nack Failed: the handler panicked: after a wait",
        ]
    );
    assert_eq!((report.acked, report.failed, report.panicked), (1, 8, 2));
    assert_eq!((report.dead_lettered, report.released, report.lost), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn anyhow_and_io_and_text_are_errors() {
    async fn with_anyhow() -> anyhow::Result<()> {
        use anyhow::Context;
        Err(Failure::permanent("inner")).context("outer")
    }
    async fn with_io() -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
    async fn with_text() -> Result<(), String> {
        Err("text".to_owned())
    }
    async fn with_static_text() -> Result<(), &'static str> {
        Err("static text")
    }
    assert_eq!(settled!(["x"], |w| w.route(orders(), with_anyhow)).0, ["nack Permanent: outer: inner"]);
    assert_eq!(settled!(["x"], |w| w.route(orders(), with_io)).0, ["nack Failed: entity not found"]);
    assert_eq!(settled!(["x"], |w| w.route(orders(), with_text)).0, ["nack Failed: text"]);
    assert_eq!(settled!(["x"], |w| w.route(orders(), with_static_text)).0, ["nack Failed: static text"]);
}

#[tokio::test(start_paused = true)]
async fn arguments_come_from_the_message() {
    #[derive(Clone)]
    struct App {
        rate: u32,
    }
    #[derive(Clone)]
    struct Rate(u32);
    impl FromRef<App> for Rate {
        fn from_ref(app: &App) -> Self {
            Self(app.rate)
        }
    }
    struct Even(u64);
    impl<S> FromDelivery<S> for Even {
        fn from_delivery(request: &Request, state: &S) -> Result<Self, Outcome> {
            let Json(number) = Json::<u64>::from_delivery(request, state)?;
            if number % 2 == 0 { Ok(Self(number)) } else { Err(Outcome::dead_letter("odd")) }
        }
    }
    #[allow(clippy::too_many_arguments)]
    async fn handle(
        Even(number): Even,
        Key(key): Key,
        Attempt(attempt): Attempt,
        source: Source,
        position: Position,
        (id, message): (MessageId, Message),
        State(Rate(rate)): State<Rate>,
        State(app): State<App>,
    ) -> Result<(), String> {
        assert_eq!((key, attempt, position), (None, 1, Position::offset(0)));
        assert_eq!((source.topic.as_str(), source.group.unwrap().as_str()), ("orders", "billing"));
        assert_eq!((id, app.rate), (message.id, rate));
        Err(format!("{number} at {rate}"))
    }
    let (settled, _) = settled!(["4", "3", "x"], |w| w.state(App { rate: 7 }).route(orders(), handle));
    assert_eq!(settled, ["nack Failed: 4 at 7", "dead letter: odd", "dead letter: undecodable"]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_has_a_result_for_each_message() {
    async fn handle(numbers: Batch<Json<u64>>, State(limit): State<u64>) -> Vec<Result<(), String>> {
        numbers.into_iter().map(|Json(n)| if n < limit { Ok(()) } else { Err(format!("{n} is too much")) }).collect()
    }
    let (settled, report) = settled!(["1", "oops", "9", "2"], |w| w.state(5u64).batch(orders(), 10, handle));
    assert_eq!(settled, ["ack", "dead letter: undecodable", "nack Failed: 9 is too much", "ack"]);
    assert_eq!((report.acked, report.failed, report.dead_lettered), (2, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_batch_may_fail_as_a_whole_or_panic_or_miscount() {
    async fn fails(_: Batch<Payload>) -> Result<(), io::Error> {
        Err(io::Error::other("disk full"))
    }
    async fn panics(_: Batch<Payload>) {
        panic!("no");
    }
    async fn miscounts(_: Batch<Payload>) -> Vec<()> {
        vec![()]
    }
    assert_eq!(settled!(["a", "b"], |w| w.batch(orders(), 10, fails)).0, ["nack Failed: disk full"; 2]);
    assert_eq!(settled!(["a", "b"], |w| w.batch(orders(), 10, panics)).0, ["nack Failed: the handler panicked: no"; 2]);
    let text = "nack Failed: the batch handler returned 1 results for 2 messages; return one for each, in order";
    assert_eq!(settled!(["a", "b"], |w| w.batch(orders(), 10, miscounts)).0, [text; 2]);
}
