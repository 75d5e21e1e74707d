//! TLS, logins and access rules on real servers of the tests' own: what has to work works, the rest is refused at once and by
//! name.
#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "world/requests.rs"]
mod requests;
mod world;

use mq_api::{Broker, BrokerExt, ConsumerExt, ErrorKind, HealthState, Message, ProducerSpec, Subscription};
use mq_testbed::{Certificates, Folder, KafkaOptions, KafkaSecurity, Pair, Server, free_port};
use requests::{On, rule};
use std::sync::Arc;
use std::time::{Duration, Instant};
use world::within;

struct Bed {
    server: Server,
    made: Certificates,
    sasl: u16,
    sasl_tls: u16,
    tls: u16,
    _folder: Folder,
}

impl Bed {
    /// A server whose certificate is one of those that were made.
    fn start(shows: impl Fn(&Certificates) -> Pair, acls: bool) -> Self {
        let (made, folder) = Certificates::for_run().unwrap();
        let [sasl, sasl_tls, tls] = [(); 3].map(|()| free_port().unwrap());
        let security =
            KafkaSecurity { sasl, sasl_tls, tls, server: shows(&made).both, authority: made.authority.clone(), acls };
        let server = KafkaOptions { security: Some(security), ..KafkaOptions::default() }.start().unwrap();
        Self { server, made, sasl, sasl_tls, tls, _folder: folder }
    }

    fn ca(&self) -> String {
        format!("ca={}", self.made.authority.display())
    }

    fn client(&self, pair: &Pair) -> String {
        format!("{}&cert={}&key={}", self.ca(), pair.certificate.display(), pair.key.display())
    }
}

async fn connect(url: &str) -> mq_api::Result<Arc<dyn Broker>> {
    let more = if url.contains('?') { '&' } else { '?' };
    within(mq_kafka::connect(&format!("{url}{more}min_session=1s&address_family=v4"))).await
}

/// Sends, receives and acknowledges.
async fn works(url: &str, topic: &str) {
    let broker = connect(url).await.unwrap_or_else(|e| panic!("{url}: {e}"));
    let producer = within(broker.producer(ProducerSpec::new(topic).group("g"))).await.unwrap();
    let sub = Subscription::group(topic, "g").lease(Duration::from_secs(3));
    let mut consumer = within(broker.subscribe(sub)).await.unwrap();
    within(producer.send(Message::new("x"))).await.unwrap();
    let delivery = within(consumer.recv()).await.unwrap().unwrap();
    assert!(within(delivery.ack()).await.is_ok());
    let report = within(broker.close(Duration::from_secs(5))).await;
    assert!(report.is_clean(), "{report:?}");
}

/// Refused as that, and at once: well before the time that a broker which is down is waited for.
async fn refused(url: &str, kind: ErrorKind, why: &str) {
    let began = Instant::now();
    let error = connect(url).await.err().unwrap_or_else(|| panic!("{why} was accepted"));
    assert_eq!(error.kind(), kind, "{why}: {error}");
    assert!(began.elapsed() < Duration::from_secs(10), "{why}: {:?}", began.elapsed());
    assert!(!error.to_string().contains("-pw"), "a password shows: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_in_clear_and_over_tls() {
    let bed = tokio::task::block_in_place(|| Bed::start(|made| made.server.clone(), false));
    let (sasl, tls, ca) = (bed.sasl, bed.sasl_tls, bed.ca());
    works(&format!("kafka://alice:alice-pw@127.0.0.1:{sasl}"), "plain").await;
    refused(&format!("kafka://alice:wrong-pw@127.0.0.1:{sasl}"), ErrorKind::Auth, "a wrong password").await;
    refused(&format!("kafka://nobody:alice-pw@127.0.0.1:{sasl}"), ErrorKind::Auth, "a user nobody knows").await;
    for scram in ["scram-sha-256", "scram-sha-512"] {
        let url = |password: &str| format!("kafkas://dave:{password}@localhost:{tls}?{ca}&sasl={scram}");
        works(&url("dave-pw"), scram).await;
        refused(&url("wrong-pw"), ErrorKind::Auth, "a wrong password by SCRAM").await;
    }
    let other = bed.made.other_authority.display();
    let url = format!("kafkas://dave:dave-pw@localhost:{tls}?ca={other}&sasl=scram-sha-256");
    refused(&url, ErrorKind::Tls, "an authority that signed nothing here").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_certificates() {
    let bed = tokio::task::block_in_place(|| Bed::start(|made| made.server.clone(), false));
    let url = format!("kafkas://localhost:{}", bed.tls);
    works(&format!("{url}?{}", bed.client(&bed.made.client)), "mutual").await;
    refused(&format!("{url}?{}", bed.client(&bed.made.foreign_client)), ErrorKind::Tls, "a foreign client").await;
    refused(&format!("{url}?{}", bed.ca()), ErrorKind::Tls, "a client without certificate").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_of_another_name_or_time_are_refused() {
    for (shows, why) in [
        ((|made| made.misnamed_server.clone()) as fn(&Certificates) -> Pair, "a server of another name"),
        (|made| made.expired_server.clone(), "an expired server"),
    ] {
        let bed = tokio::task::block_in_place(|| Bed::start(shows, false));
        let url = format!("kafkas://dave:dave-pw@localhost:{}?{}&sasl=scram-sha-256", bed.sasl_tls, bed.ca());
        refused(&url, ErrorKind::Tls, why).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn access_rules_are_refusals_by_name_and_then_a_state() {
    let bed = tokio::task::block_in_place(|| Bed::start(|made| made.server.clone(), true));
    let admin = format!("127.0.0.1:{}", bed.server.port());
    let set = |on, allowed| {
        tokio::task::block_in_place(|| rule(&admin, "alice", on, "work", allowed)).unwrap();
    };
    let url = format!("kafka://alice:alice-pw@127.0.0.1:{}", bed.sasl);
    let broker = connect(&url).await.unwrap();
    let sub = || Subscription::group("work", "crew").lease(Duration::from_secs(3));
    let error = within(broker.producer("work")).await.err().expect("a topic without rule");
    assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
    assert!(error.to_string().contains("work") && error.to_string().contains("ACL"), "{error}");
    set(On::Topics, true);
    let producer = allowed(async || broker.producer("work").await).await;
    let error = within(broker.subscribe(sub())).await.err().expect("a group without rule");
    assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
    set(On::Groups, true);
    let mut consumer = allowed(async || broker.subscribe(sub()).await).await;
    within(producer.send(Message::new("1"))).await.unwrap();
    assert!(within(within(consumer.recv()).await.unwrap().unwrap().ack()).await.is_ok());
    // Taken away under way it is a state, and over when the rule is back.
    set(On::Topics, false);
    let health = consumer.control().health();
    let state = within(health.clone().wait_for(|h| h.state != HealthState::Running)).await;
    assert!(state.reason.contains("refused") || state.reason.contains("authoriz"), "{state:?}");
    let error = within(producer.send(Message::new("2"))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
    set(On::Topics, true);
    within(health.clone().wait_for(|h| h.state == HealthState::Running)).await;
    allowed(async || producer.send(Message::new("3")).await).await;
    let got = within(consumer.recv()).await.unwrap().unwrap();
    assert_eq!(got.payload_bytes(), b"3");
    assert!(within(got.ack()).await.is_ok());
    within(broker.close(Duration::from_secs(5))).await;
}

/// A server that shows a wrong certificate for a while is a state of the connection, which says so, and is over with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_expires_under_way_is_a_state() {
    let mut bed = tokio::task::block_in_place(|| Bed::start(|made| made.server.clone(), false));
    let url = format!("kafkas://dave:dave-pw@localhost:{}?{}&sasl=scram-sha-256", bed.sasl_tls, bed.ca());
    let broker = connect(&url).await.unwrap();
    let health = broker.health();
    let shown = bed.made.server.both.clone();
    let right = std::fs::read(&shown).unwrap();
    let mut shows = |certificate: &[u8]| {
        tokio::task::block_in_place(|| {
            bed.server.kill().unwrap();
            std::fs::write(&shown, certificate).unwrap();
            bed.server.restart().unwrap();
        });
    };
    shows(&std::fs::read(&bed.made.expired_server.both).unwrap());
    let state = within(health.clone().wait_for(|h| h.reason.contains("refused"))).await;
    assert_eq!(state.state, HealthState::Reconnecting, "{state:?}");
    shows(&right);
    within(health.clone().wait_for(|h| h.state == HealthState::Running)).await;
    within(broker.close(Duration::from_secs(5))).await;
}

/// A rule is in force some 150 ms after it is made.
async fn allowed<T>(mut attempt: impl AsyncFnMut() -> mq_api::Result<T>) -> T {
    within(async {
        loop {
            match attempt().await {
                Ok(done) => return done,
                Err(e) if e.kind() == ErrorKind::Permission => tokio::task::yield_now().await,
                Err(e) => panic!("{e}"),
            }
        }
    })
    .await
}
