//! Whatever makes no sense is an error that names it and says what to do.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use anymq::prelude::*;
use anymq::{Error, ErrorKind};

/// The error is of this kind, and its text holds all of these and none of those.
fn says(error: &Error, kind: ErrorKind, all: &[&str], none: &[&str]) {
    let text = format!("{error} {error:?}");
    assert_eq!(error.kind(), kind, "{text}");
    for part in all {
        assert!(text.contains(part), "'{part}' is missing in: {text}");
    }
    for part in none {
        assert!(!text.contains(part), "'{part}' shows in: {text}");
    }
}

#[tokio::test]
async fn urls_that_name_no_broker() {
    let error = connect("").await.err().unwrap();
    says(&error, ErrorKind::Config, &["empty", "redis://localhost"], &[]);
    let error = connect("hunter2").await.err().unwrap();
    says(&error, ErrorKind::Config, &["no scheme"], &["hunter2"]);
    let error = connect("http://u:hunter2@localhost").await.err().unwrap();
    says(&error, ErrorKind::Config, &["http://", "ompiled in"], &["hunter2"]);
}

#[tokio::test]
async fn a_missing_feature_is_named() {
    for (url, feature, built) in [
        ("redis://u:hunter2@h", "redis", cfg!(feature = "redis")),
        ("rediss://h", "redis", cfg!(feature = "redis")),
        ("redis+pubsub://h", "redis", cfg!(feature = "redis")),
        ("amqp://h", "amqp", cfg!(feature = "amqp")),
        ("AMQPS://h", "amqp", cfg!(feature = "amqp")),
        ("kafka://h", "kafka", cfg!(feature = "kafka")),
        ("kafkas://h", "kafka", cfg!(feature = "kafka")),
        ("memory://h", "memory", cfg!(feature = "memory")),
    ] {
        if built {
            continue;
        }
        let error = connect(url).await.err().unwrap();
        says(&error, ErrorKind::NotBuilt, &[&format!("features = [\"{feature}\"]")], &["hunter2"]);
    }
}

#[test]
fn configuration_mistakes_are_named() {
    let error = Config::from_json(r#"{"url": "memory://", "pasword": "hunter2"}"#).unwrap_err();
    says(&error, ErrorKind::Config, &["pasword", "password", "username", "params"], &["hunter2"]);
    let error = Config::from_json(r#"{"username": "me"}"#).unwrap_err();
    says(&error, ErrorKind::Config, &["url"], &[]);
    let error = Config::from_json(r#"{"url": 5}"#).unwrap_err();
    says(&error, ErrorKind::Config, &["integer", "string"], &[]);
    let error = Config::from_json(r#"{"url": "redis://h", "params": {"db": [1]}}"#).unwrap().to_url().unwrap_err();
    says(&error, ErrorKind::Config, &["params.db", "number"], &[]);
    let error = Config::new("memory:nowhere").password("hunter2").to_url().unwrap_err();
    says(&error, ErrorKind::Config, &["password"], &["hunter2"]);
}

#[cfg(feature = "toml")]
#[test]
fn toml_mistakes_are_named_without_showing_the_line() {
    let error = Config::from_toml("url = 'memory://'\npasword = 'hunter2'\n").unwrap_err();
    says(&error, ErrorKind::Config, &["pasword", "password"], &["hunter2"]);
    let error = Config::from_toml("url = 'memory://'\npassword = 'hunter2\n").unwrap_err();
    says(&error, ErrorKind::Config, &["line 2"], &["hunter2"]);
    let error = Config::from_toml("url = 7").unwrap_err();
    says(&error, ErrorKind::Config, &["integer", "string"], &[]);
}

#[test]
fn a_value_of_the_wrong_type_is_named_by_its_key_and_not_shown() {
    for (text, key) in [
        (r#"{"url": 4711}"#, "url"),
        (r#"{"url": "memory://", "username": 4711}"#, "username"),
        (r#"{"url": "memory://", "password": 4711}"#, "password"),
        (r#"{"url": "memory://", "password": ["4711"]}"#, "password"),
        (r#"{"url": "memory://", "params": "4711"}"#, "params"),
        (r#"{"url": "memory://", "params": ["4711"]}"#, "params"),
    ] {
        let error = Config::from_json(text).unwrap_err();
        says(&error, ErrorKind::Config, &[&format!("'{key}'")], &["4711"]);
    }
    #[cfg(feature = "toml")]
    for (text, key) in [
        ("url = 4711", "url"),
        ("url = 'memory://'\npassword = 4711", "password"),
        ("url = 'memory://'\nparams = '4711'", "params"),
    ] {
        let error = Config::from_toml(text).unwrap_err();
        says(&error, ErrorKind::Config, &[&format!("'{key}'")], &["4711"]);
    }
}

#[test]
fn a_number_is_passed_on_as_it_stands() {
    for n in ["9223372036854775809", "18446744073709551615", "-9223372036854775808", "0.5"] {
        let config = Config::from_json(&format!(r#"{{"url": "memory://", "params": {{"seed": {n}}}}}"#)).unwrap();
        assert_eq!(config.to_url().unwrap(), format!("memory://?seed={n}"));
    }
}

#[test]
fn a_parameter_that_is_given_twice_is_named() {
    let error = Config::from_json(r#"{"url": "memory://", "params": {"seed": 1, "seed": 2}}"#).unwrap_err();
    says(&error, ErrorKind::Config, &["seed", "twice"], &[]);
}

#[test]
fn configuration_files() {
    let folder = std::env::temp_dir().join(format!("anymq-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let good = folder.join("good.json");
    std::fs::write(&good, r#"{"url": "redis://h/1", "params": {"a": true, "b": 2}}"#).unwrap();
    assert_eq!(Config::from_file(&good).unwrap().to_url().unwrap(), "redis://h/1?a=true&b=2");
    let error = Config::from_file(folder.join("none.json")).unwrap_err();
    says(&error, ErrorKind::Config, &["none.json", "cannot be read"], &[]);
    let other = folder.join("other.yaml");
    std::fs::write(&other, "url: memory://").unwrap();
    says(&Config::from_file(&other).unwrap_err(), ErrorKind::Config, &["other.yaml", ".toml"], &[]);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn secrets_do_not_show() {
    let config = Config::new("redis://me:hunter2@h/0?password=hunter2").password("hunter2").param("token", "hunter2");
    let shown = format!("{config:?}");
    assert!(!shown.contains("hunter2") && shown.contains("token"), "{shown}");
    let built = Config::new("redis://h/0?password=x&db=1").password("p w").param("db", 2).to_url().unwrap();
    assert_eq!(built, "redis://:p%20w@h/0?password=x&db=2");
}

#[cfg(feature = "memory")]
mod with_a_broker {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn unknown_parameters_and_wrong_values() {
        let error = connect("memory://x?wat=1").await.err().unwrap();
        says(&error, ErrorKind::Config, &["wat", "profile"], &[]);
        let error = connect("memory://x?profile=rabbit").await.err().unwrap();
        says(&error, ErrorKind::Config, &["profile", "rabbit", "amqp"], &[]);
    }

    #[tokio::test(start_paused = true)]
    async fn names_that_are_not_allowed() {
        let broker = connect("memory://names").await.unwrap();
        for name in ["", "a b", ".a", "a..b"] {
            let error = broker.producer(name).await.err().unwrap();
            says(&error, ErrorKind::InvalidName, &["topic name"], &[]);
            let error = broker.subscribe(Subscription::group("orders", name)).await.err().unwrap();
            says(&error, ErrorKind::InvalidName, &["group name"], &[]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn messages_that_are_refused_and_the_producer_goes_on() {
        let broker = connect("memory://refused").await.unwrap();
        let orders = broker.producer("orders").await.unwrap();
        let error = orders.send(Message::new(vec![0; 1_000_001])).await.unwrap_err();
        says(&error, ErrorKind::TooLarge, &["1000000"], &[]);
        assert_eq!(error.outcome(), Some(anymq::SendOutcome::NotSent));
        let error = orders.send(Message::new("x").header("a\nb", "c")).await.unwrap_err();
        says(&error, ErrorKind::InvalidName, &["header"], &[]);
        orders.send(Message::new("fine")).await.unwrap();
        broker.close(std::time::Duration::from_secs(1)).await;
        let error = orders.send(Message::new("late")).await.unwrap_err();
        says(&error, ErrorKind::Closed, &["closed"], &[]);
    }

    #[tokio::test(start_paused = true)]
    async fn two_handlers_of_one_group() {
        let broker = connect("memory://twice").await.unwrap();
        let billing = || Subscription::group("orders", "billing");
        let members = [billing().member("a"), billing().member("b")];
        let error = Worker::new(broker.clone())
            .route(members.clone(), async || {})
            .route(billing(), async || {})
            .run()
            .await
            .unwrap_err();
        says(&error, ErrorKind::Config, &["two routes", "'orders'", "'billing'", "different groups"], &[]);
        // Several members that share a handler, and several groups, are fine.
        let worker = Worker::new(broker)
            .route(members, async || {})
            .route(Subscription::group("orders", "analytics"), async || {});
        let handle = worker.handle();
        let running = tokio::spawn(worker.run());
        assert!(handle.running().await);
        handle.shutdown();
        running.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_route_without_subscriptions() {
        let broker = connect("memory://nothing").await.unwrap();
        let (billing, none) = (|| Subscription::group("orders", "billing"), Vec::<Subscription>::new);
        let one = Worker::new(broker.clone()).route(none(), async || {}).route(billing(), async || {});
        // Were it not refused, the worker would run for ever.
        let stop = async || tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let error = one.run_until(stop()).await.unwrap_err();
        says(&error, ErrorKind::Config, &["no subscription"], &[]);
        let batch = async |_: Batch<Payload>| {};
        let many = Worker::new(broker).route(billing(), async || {}).batch(none(), 10, batch);
        let error = many.run_until(stop()).await.unwrap_err();
        says(&error, ErrorKind::Config, &["no subscription"], &[]);
    }

    #[tokio::test(start_paused = true)]
    async fn more_handlers_than_deliveries() {
        let broker = connect("memory://starved").await.unwrap();
        let error = broker.subscribe(Subscription::group("orders", "billing").concurrency(300)).await.err().unwrap();
        says(&error, ErrorKind::Config, &["concurrency is 300", "max_in_flight 256"], &[]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_capability_is_named_at_the_start_of_the_worker() {
        let broker = connect("memory://caps?profile=redis").await.unwrap();
        let ordered = Subscription::group("orders", "billing").ordering(Ordering::PerKey);
        let error = Worker::new(broker).route(ordered, async || {}).run().await.unwrap_err();
        says(&error, ErrorKind::Unsupported, &["per-key order"], &[]);
    }
}
