//! The servers of `mq-testbed` with TLS, certificates, users and rights, seen through the client libraries: each login
//! works, and each wrong one is refused for the right reason.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use mq_testbed::{
    Certificates, KafkaOptions, KafkaResource, KafkaSecurity, Kind, Pair, RabbitOptions, RedisOptions, eventually,
    free_port, kafka_allow, missing,
};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::types::RDKafkaErrorCode;

/// An answer that takes longer than this does not come, on the busiest machine.
const LIMIT: Duration = Duration::from_secs(30);

/// How a Kafka client comes in.
#[derive(Clone)]
struct Door {
    port: u16,
    settings: Vec<(&'static str, String)>,
}

impl Door {
    fn sasl(port: u16, mechanism: &str, user: &str, password: &str) -> Self {
        let settings = vec![
            ("security.protocol", "SASL_PLAINTEXT".to_owned()),
            ("sasl.mechanism", mechanism.into()),
            ("sasl.username", user.into()),
            ("sasl.password", password.into()),
        ];
        Self { port, settings }
    }

    fn over_tls(mut self, authority: &std::path::Path) -> Self {
        self.settings[0].1 = "SASL_SSL".into();
        self.settings.push(("ssl.ca.location", authority.display().to_string()));
        self
    }

    fn certificate(port: u16, authority: &std::path::Path, client: Option<&Pair>) -> Self {
        let mut settings =
            vec![("security.protocol", "SSL".into()), ("ssl.ca.location", authority.display().to_string())];
        if let Some(client) = client {
            settings.push(("ssl.certificate.location", client.certificate.display().to_string()));
            settings.push(("ssl.key.location", client.key.display().to_string()));
        }
        Self { port, settings }
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", format!("localhost:{}", self.port));
        config.set("broker.address.family", "v4");
        for (name, value) in &self.settings {
            config.set(*name, value);
        }
        config
    }

    /// Sends to the topic, and reads it back as a member of the group.
    async fn works(&self, topic: &str, group: &str, what: &str) {
        self.send(topic, what).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let consumer: BaseConsumer =
            self.client().set("group.id", group).set("auto.offset.reset", "earliest").create().unwrap();
        consumer.subscribe(&[topic]).unwrap();
        let came = eventually(LIMIT, || match consumer.poll(Duration::from_millis(200)) {
            Some(message) => message.unwrap().payload() == Some(what.as_bytes()),
            None => false,
        });
        assert!(came, "{what}: sent and not received");
    }

    async fn send(&self, topic: &str, payload: &str) -> Result<(), KafkaError> {
        let producer: FutureProducer = self.client().create()?;
        let record = FutureRecord::<(), str>::to(topic).payload(payload);
        producer.send(record, LIMIT).await.map(|_| ()).map_err(|(error, _)| error)
    }

    /// What the client says first of a broker that does not let it in, leaving out some.
    fn refusal(&self, but: &[RDKafkaErrorCode]) -> Option<RDKafkaErrorCode> {
        let consumer: BaseConsumer = self.client().set("group.id", "none").create().unwrap();
        consumer.subscribe(&["none"]).unwrap();
        let mut found = None;
        eventually(LIMIT, || {
            let polled = consumer.poll(Duration::from_millis(200));
            found = polled.and_then(Result::err).and_then(|error| error.rdkafka_error_code());
            found.is_some_and(|code| !but.contains(&code))
        });
        found
    }
}

/// What librdkafka calls a line that was lost.
const LINE: [RDKafkaErrorCode; 2] = [RDKafkaErrorCode::AllBrokersDown, RDKafkaErrorCode::BrokerTransportFailure];

#[tokio::test]
async fn kafka_by_password_and_by_certificate() {
    if missing(Kind::Kafka) {
        return;
    }
    let (made, _folder) = &Certificates::for_run().unwrap();
    let [sasl, sasl_tls, tls] = [(); 3].map(|()| free_port().unwrap());
    let security = KafkaSecurity {
        sasl,
        sasl_tls,
        tls,
        server: made.server.both.clone(),
        authority: made.authority.clone(),
        acls: true,
    };
    let server = KafkaOptions { security: Some(security), ..KafkaOptions::default() }.start().unwrap();
    let mut admin = ClientConfig::new();
    admin.set("bootstrap.servers", format!("127.0.0.1:{}", server.port()));
    let admin: AdminClient<DefaultClientContext> = admin.create().unwrap();
    let topic = NewTopic::new("orders", 1, TopicReplication::Fixed(1));
    admin.create_topics([&topic], &AdminOptions::new()).await.unwrap()[0].clone().unwrap();

    let doors = [
        ("alice", "by PLAIN", Door::sasl(sasl, "PLAIN", "alice", "alice-pw")),
        ("alice", "by PLAIN over TLS", Door::sasl(sasl_tls, "PLAIN", "alice", "alice-pw").over_tls(&made.authority)),
        ("dave", "by SCRAM-SHA-256", Door::sasl(sasl, "SCRAM-SHA-256", "dave", "dave-pw")),
        (
            "dave",
            "by SCRAM-SHA-256 over TLS",
            Door::sasl(sasl_tls, "SCRAM-SHA-256", "dave", "dave-pw").over_tls(&made.authority),
        ),
        (
            "dave",
            "by SCRAM-SHA-512 over TLS",
            Door::sasl(sasl_tls, "SCRAM-SHA-512", "dave", "dave-pw").over_tls(&made.authority),
        ),
        ("client", "by certificate", Door::certificate(tls, &made.authority, Some(&made.client))),
    ];
    // Let in, and without rights: logged in as somebody who may do nothing.
    for (user, how, door) in &doors {
        let code = door.send("orders", "x").await.unwrap_err().rdkafka_error_code();
        assert_eq!(code, Some(RDKafkaErrorCode::TopicAuthorizationFailed), "{user} {how}");
    }
    for user in ["alice", "dave", "client"] {
        kafka_allow(server.port(), user, KafkaResource::Topic("orders")).unwrap();
    }
    for (number, (user, how, door)) in doors.iter().enumerate() {
        let group = format!("g{number}");
        kafka_allow(server.port(), user, KafkaResource::Group(&group)).unwrap();
        door.works("orders", &group, &format!("{user} {how}")).await;
    }

    let wrong = [
        ("a wrong password by PLAIN", Door::sasl(sasl_tls, "PLAIN", "alice", "wrong").over_tls(&made.authority)),
        ("a wrong password by SCRAM", Door::sasl(sasl, "SCRAM-SHA-256", "dave", "wrong")),
        ("an unknown user", Door::sasl(sasl, "PLAIN", "mallory", "alice-pw")),
    ];
    for (what, door) in wrong {
        assert_eq!(door.refusal(&LINE), Some(RDKafkaErrorCode::Authentication), "{what}");
    }
    let wrong = [
        ("no certificate", Door::certificate(tls, &made.authority, None)),
        ("a foreign certificate", Door::certificate(tls, &made.authority, Some(&made.foreign_client))),
        ("another authority", Door::certificate(tls, &made.other_authority, Some(&made.client))),
    ];
    for (what, door) in wrong {
        // By TLS 1.3 the broker refuses a client after the handshake, which then looks like a lost connection.
        let code = door.refusal(&[]);
        assert!(code.is_some_and(|code| code == RDKafkaErrorCode::SSL || LINE.contains(&code)), "{what}: {code:?}");
    }
}

/// A connection to a RabbitMQ with TLS.
async fn amqps(
    port: u16,
    login: &str,
    authority: &std::path::Path,
    client: Option<&Pair>,
) -> lapin::Result<Connection> {
    let read = |path: &PathBuf| std::fs::read(path).unwrap();
    let tls = OwnedTLSConfig {
        identity: client.map(|pair| OwnedIdentity::PKCS8 { pem: read(&pair.certificate), key: read(&pair.key) }),
        cert_chain: Some(std::fs::read_to_string(authority).unwrap()),
    };
    let url = format!("amqps://{login}@localhost:{port}/shop");
    let runtime = lapin::runtime::default_runtime()?;
    let connect = Connection::connect_with_config(&url, ConnectionProperties::default(), tls, runtime);
    match tokio::time::timeout(LIMIT, connect).await {
        Ok(connected) => connected,
        Err(_) => panic!("no answer from RabbitMQ within {LIMIT:?}"),
    }
}

#[tokio::test]
async fn rabbitmq_by_password_over_tls() {
    if missing(Kind::RabbitMq) {
        return;
    }
    let (made, _folder) = &Certificates::for_run().unwrap();
    let port = free_port().unwrap();
    let mut options = RabbitOptions::default().tls(port, made, &made.server).user("app", "secret", "shop");
    options = options.user("reader", "secret", "shop");
    let reader = options.users.last_mut().unwrap();
    reader.permissions = ["^$", "^$", ".*"].map(str::to_owned);
    let _server = options.start().unwrap();

    let connection = amqps(port, "app:secret", &made.authority, Some(&made.client)).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("orders".into(), durable, FieldTable::default()).await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
    let confirm = channel.basic_publish("".into(), "orders".into(), options, b"by password", properties).await.unwrap();
    assert!(confirm.await.unwrap().is_ack());
    let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let mut consumer =
        channel.basic_consume("orders".into(), "c".into(), options, FieldTable::default()).await.unwrap();
    let delivery = tokio::time::timeout(LIMIT, consumer.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(delivery.data, b"by password");

    let connection = amqps(port, "reader:secret", &made.authority, Some(&made.client)).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let refused = channel.queue_declare("mine".into(), durable, FieldTable::default()).await.unwrap_err();
    assert!(refused.to_string().contains("ACCESS_REFUSED"), "{refused}");

    let refused = amqps(port, "app:wrong", &made.authority, Some(&made.client)).await.unwrap_err();
    assert!(refused.to_string().contains("ACCESS_REFUSED"), "{refused}");
    for (what, authority, client) in [
        ("no certificate", &made.authority, None),
        ("a foreign certificate", &made.authority, Some(&made.foreign_client)),
        ("another authority", &made.other_authority, Some(&made.client)),
    ] {
        assert!(amqps(port, "app:secret", authority, client).await.is_err(), "let in with {what}");
    }
}

/// One command by a login, over TLS.
fn over_tls(port: u16, login: &str, authority: &std::path::Path, client: Option<&Pair>) -> redis::RedisResult<()> {
    let read = |path: &PathBuf| std::fs::read(path).unwrap();
    let certificates = redis::TlsCertificates {
        client_tls: client
            .map(|pair| redis::ClientTlsConfig { client_cert: read(&pair.certificate), client_key: read(&pair.key) }),
        root_cert: Some(std::fs::read(authority).unwrap()),
    };
    let client = redis::Client::build_with_tls(format!("rediss://{login}@localhost:{port}/"), certificates)?;
    let mut connection = client.get_connection_with_timeout(LIMIT)?;
    redis::cmd("XADD").arg(&["orders", "*", "p", "x"]).exec(&mut connection)
}

#[test]
fn redis_by_acl_over_tls() {
    if missing(Kind::Redis) {
        return;
    }
    // An error means that another test was first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (made, _folder) = &Certificates::for_run().unwrap();
    let port = free_port().unwrap();
    let _server = RedisOptions::default()
        .tls(port, made, &made.server)
        .user("app", "secret", "~orders* &* +@all -@dangerous")
        .user("reader", "secret", "~orders* +@read +@connection")
        .login_needed()
        .start()
        .unwrap();
    over_tls(port, "app:secret", &made.authority, Some(&made.client)).unwrap();
    let refused = over_tls(port, "reader:secret", &made.authority, Some(&made.client)).unwrap_err();
    assert_eq!(refused.code(), Some("NOPERM"), "{refused}");
    let refused = over_tls(port, "app:wrong", &made.authority, Some(&made.client)).unwrap_err();
    assert_eq!(refused.kind(), redis::ErrorKind::AuthenticationFailed, "{refused}");
    for (what, authority, client) in [
        ("no certificate", &made.authority, None),
        ("a foreign certificate", &made.authority, Some(&made.foreign_client)),
        ("another authority", &made.other_authority, Some(&made.client)),
    ] {
        assert!(over_tls(port, "app:secret", authority, client).is_err(), "let in with {what}");
    }
}
