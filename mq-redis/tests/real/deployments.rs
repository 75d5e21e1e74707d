//! Ways to run a server: TLS with client certificates, users, unix sockets, several hosts, Sentinel, Cluster.

use crate::rig::{Counting, TOPIC, all, ask, close, load, next, open, raw, server, sub};
use mq_api::{BrokerExt, ErrorKind, Message, Settled};
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Folder, Launch, Process, SilentHosts, free_port, until};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

async fn round_trip(url: &str) {
    let broker = open(url).await;
    let counting = Counting::start(broker.subscribe(sub()).await.unwrap());
    let producer = broker.producer(TOPIC).await.unwrap();
    let sent = load(producer, "m", 50).await.unwrap();
    assert_eq!(sent.len(), 50);
    counting.has_all(&sent, Duration::from_secs(10)).await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unix_socket_and_a_user() {
    let folder = std::env::temp_dir().join(format!("mq-redis-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("s");
    let line = format!("unixsocket {}", socket.display());
    let Some(server) = server(false, &[&line]) else { return };
    let mut admin = raw(&server);
    let _: () = ask(&mut admin, &["ACL", "SETUSER", "app", "on", ">p@ss/word", "~*", "&*", "+@all"]);
    let _: () = ask(&mut admin, &["ACL", "SETUSER", "default", "off"]);
    round_trip(&format!("redis+unix://app:p%40ss%2Fword@{}", socket.display())).await;
    let denied = mq_redis::connect(&format!("redis+unix://{}", socket.display())).await.err().unwrap();
    assert_eq!(denied.kind(), ErrorKind::Auth, "{denied}");
    drop(std::fs::remove_dir_all(folder));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_master_of_several_hosts_is_taken() {
    let (Some(master), Some(replica)) = (server(false, &[]), server(false, &[])) else { return };
    let _: () = ask(&mut raw(&replica), &["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    let dead = free_port().unwrap();
    round_trip(&format!("redis://127.0.0.1:{dead},127.0.0.1:{},127.0.0.1:{}", replica.port(), master.port())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_say_nothing_do_not_hide_the_one_behind_them() {
    let Some(server) = server(false, &[]) else { return };
    let mut first = Proxy::before(server.port(), 1).unwrap();
    // More than an attempt has time for.
    let silent = SilentHosts::new(4).unwrap();
    let url = format!("redis://127.0.0.1:{},{},127.0.0.1:{}", first.port(), silent, server.port());
    let broker = open(&format!("{url}?response_timeout=2s")).await;
    broker.producer(TOPIC).await.unwrap().send(Message::new("x")).await.unwrap();
    // The one in use now says nothing either.
    first.begin(Trouble::Stall(Direction::Both)).unwrap();
    let producer = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            match broker.producer(TOPIC).await {
                Ok(producer) => break producer,
                Err(error) => println!("{error}"),
            }
        }
    });
    let producer = producer.await.expect("the last host is never tried");
    producer.send(Message::new("y")).await.unwrap();
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_connection_is_waited_for_as_long_as_was_said_and_not_longer_for_many_hosts() {
    let silent = SilentHosts::new(4).unwrap();
    let began = std::time::Instant::now();
    let error = mq_redis::connect(&format!("redis://{}?connect_timeout=2s", silent)).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains(silent.to_string().rsplit(',').next().unwrap()), "which hosts? {error}");
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_does_not_wait_for_hosts_that_say_nothing() {
    let Some(server) = server(false, &[]) else { return };
    let silent = SilentHosts::new(3).unwrap();
    let mut proxy = Proxy::before(server.port(), 1).unwrap();
    let broker = open(&format!("redis://127.0.0.1:{},{}", proxy.port(), silent)).await;
    broker.producer(TOPIC).await.unwrap().send(Message::new("x")).await.unwrap();
    proxy.begin(Trouble::Refuse).unwrap();
    // It makes a connection, and waits for one silent host after the other.
    let admin = broker.admin();
    let looking = tokio::spawn(async move { admin.backlog(&TOPIC.into(), &"g".into()).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    let began = std::time::Instant::now();
    broker.close(Duration::from_secs(1)).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert!(looking.await.unwrap().is_err());
}

fn openssl(folder: &Path, words: &str) {
    let done = Command::new("openssl").args(words.split(' ')).current_dir(folder).output().expect("openssl");
    assert!(done.status.success(), "openssl {words}: {}", String::from_utf8_lossy(&done.stderr));
}

/// An authority, a server's and a client's certificate, an expired one and one of another authority.
fn certificates(folder: &Path) {
    std::fs::write(folder.join("san"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n").unwrap();
    for ca in ["ca", "other"] {
        openssl(
            folder,
            &format!("req -x509 -newkey rsa:2048 -nodes -keyout {ca}.key -out {ca}.pem -days 2 -subj /CN={ca}"),
        );
    }
    for (name, days) in [("server", "2"), ("client", "2"), ("expired", "-1")] {
        openssl(folder, &format!("req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        if days == "-1" {
            // Not every openssl takes negative days; 0 days ends at once.
            openssl(
                folder,
                &format!(
                    "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days 0 -extfile san"
                ),
            );
        } else {
            openssl(
                folder,
                &format!(
                    "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days {days} -extfile san"
                ),
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_client_certificates() {
    let folder = std::env::temp_dir().join(format!("mq-redis-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    certificates(&folder);
    let file = |name: &str| folder.join(name).display().to_string();
    let tls = |cert: &str| {
        let port = free_port().unwrap();
        let lines = [
            // Also by an address that no certificate names.
            "bind 127.0.0.1 127.0.0.2".to_owned(),
            format!("tls-port {port}"),
            format!("tls-cert-file {}", file(&format!("{cert}.pem"))),
            format!("tls-key-file {}", file(&format!("{cert}.key"))),
            format!("tls-ca-cert-file {}", file("ca.pem")),
            "tls-auth-clients yes".to_owned(),
        ];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        server(false, &lines).map(|s| (s, port))
    };
    let Some((_server, port)) = tls("server") else { return };
    let own = format!("cert={}&key={}", file("client.pem"), file("client.key"));
    round_trip(&format!("rediss://localhost:{port}?ca={}&{own}", file("ca.pem"))).await;
    let refused = |url: String| async move {
        let error = mq_redis::connect(&url).await.err().unwrap_or_else(|| panic!("{url} connects"));
        assert_eq!(error.kind(), ErrorKind::Tls, "{url}: {error}");
    };
    refused(format!("rediss://localhost:{port}?ca={}&{own}", file("other.pem"))).await;
    refused(format!("rediss://127.0.0.2:{port}?ca={}&{own}", file("ca.pem"))).await;
    if let Some((_server, port)) = tls("expired") {
        tokio::time::sleep(Duration::from_secs(1)).await;
        refused(format!("rediss://localhost:{port}?ca={}&{own}", file("ca.pem"))).await;
    }
    drop(std::fs::remove_dir_all(folder));
}

struct Node {
    process: Process,
    port: u16,
}

fn node(folder: &Path, name: &str, lines: &[String], sentinel: bool) -> Node {
    let port = free_port().unwrap();
    let dir = folder.join(name);
    std::fs::create_dir_all(&dir).unwrap();
    let conf = dir.join("conf");
    let mut text = format!("port {port}\nbind 127.0.0.1\ndir {}\n", dir.display());
    if !sentinel {
        text.push_str("save \"\"\nrepl-diskless-sync-delay 0\n");
    }
    lines.iter().for_each(|l| text.push_str(&format!("{l}\n")));
    std::fs::write(&conf, text).unwrap();
    let mut words: Vec<PathBuf> = vec![conf];
    if sentinel {
        words.push("--sentinel".into());
    }
    let process = Launch::new(Path::new("/usr/bin/redis-server"), &dir).args(words).spawn().unwrap();
    until("a node", Duration::from_secs(20), || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).ok()?;
        let mut conn = client.get_connection().ok()?;
        redis::cmd("PING").query::<String>(&mut conn).ok()
    })
    .unwrap();
    Node { process, port }
}

fn has_server() -> bool {
    let there = Path::new("/usr/bin/redis-server").exists();
    if !there {
        mq_testbed::skip("there is no /usr/bin/redis-server");
    }
    there
}

fn conn(port: u16) -> redis::Connection {
    redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap().get_connection().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel_switches_the_master_under_load() {
    if !has_server() {
        return;
    }
    let folder = Folder::for_run().unwrap();
    let mut master = node(folder.path(), "master", &[], false);
    let lines = [format!("replicaof 127.0.0.1 {}", master.port)];
    // Two: after the switch the new master still has one that can confirm.
    let _replicas = [node(folder.path(), "replica", &lines, false), node(folder.path(), "second", &lines, false)];
    let sentinel_lines = [
        format!("sentinel monitor main 127.0.0.1 {} 2", master.port),
        "sentinel down-after-milliseconds main 1000".to_owned(),
        "sentinel failover-timeout main 3000".to_owned(),
    ];
    let sentinels: Vec<Node> =
        (0..3).map(|i| node(folder.path(), &format!("sentinel{i}"), &sentinel_lines, true)).collect();
    until("the quorum", Duration::from_secs(30), || {
        let mut c = conn(sentinels[0].port);
        let quorum = redis::cmd("SENTINEL").arg("CKQUORUM").arg("main").query::<String>(&mut c).ok()?;
        let replicas: Vec<redis::Value> = redis::cmd("SENTINEL").arg("REPLICAS").arg("main").query(&mut c).ok()?;
        (quorum.starts_with("OK 3") && replicas.len() == 2).then_some(())
    })
    .unwrap();
    let hosts: Vec<String> = sentinels.iter().map(|s| format!("127.0.0.1:{}", s.port)).collect();
    let broker = open(&format!("redis://{}?sentinel=main&response_timeout=2s", hosts.join(","))).await;
    assert_eq!(broker.capabilities().send_level, mq_api::Durability::Replicated);
    let counting = Counting::start(broker.subscribe(sub()).await.unwrap());
    let producer = broker.producer(TOPIC).await.unwrap();
    let sending = load(producer.clone(), "m", 3000);
    tokio::time::sleep(Duration::from_millis(300)).await;
    master.process.kill();
    let confirmed = sending.await.unwrap();
    counting.has_all(&confirmed, Duration::from_secs(30)).await;
    assert_eq!(confirmed.len(), 3000, "what was unknown was sent again");
    producer.send(Message::new("after")).await.unwrap();
    counting.has_all(&["after".to_owned()], Duration::from_secs(10)).await;
    let _ = broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_of_a_cluster_are_found_on_their_nodes() {
    if !has_server() {
        return;
    }
    let folder = Folder::for_run().unwrap();
    let nodes: Vec<Node> = (0..3)
        .map(|i| {
            let lines = [
                "cluster-enabled yes".to_owned(),
                "cluster-config-file nodes.conf".to_owned(),
                "cluster-node-timeout 2000".to_owned(),
                format!("cluster-port {}", free_port().unwrap()),
            ];
            node(folder.path(), &format!("node{i}"), &lines, false)
        })
        .collect();
    for (i, n) in nodes.iter().enumerate() {
        let mut c = conn(n.port);
        let (first, last) = [(0, 5460), (5461, 10922), (10923, 16383)][i];
        let _: () = ask(&mut c, &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        let _: () = ask(&mut c, &["CLUSTER", "SET-CONFIG-EPOCH", &(i + 1).to_string()]);
        for other in &nodes[..i] {
            let info: String = ask(&mut conn(other.port), &["CLUSTER", "NODES"]);
            let bus = info.lines().find(|l| l.contains("myself")).and_then(|l| l.split('@').nth(1)).unwrap();
            let bus = bus.split([' ', ',']).next().unwrap().to_owned();
            let _: () = ask(&mut c, &["CLUSTER", "MEET", "127.0.0.1", &other.port.to_string(), &bus]);
        }
    }
    until("the cluster", Duration::from_secs(30), || {
        nodes
            .iter()
            .all(|n| {
                let info: String = ask(&mut conn(n.port), &["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
            })
            .then_some(())
    })
    .unwrap();
    let broker = open(&format!("redis://127.0.0.1:{}", nodes[0].port)).await;
    let mut used = std::collections::BTreeSet::new();
    for i in 0..12 {
        let topic = format!("topic-{i}");
        let mut consumer = broker.subscribe(mq_api::Subscription::group(topic.as_str(), "g")).await.unwrap();
        let producer = broker.producer(topic.as_str()).await.unwrap();
        producer.send(Message::new("m")).await.unwrap();
        let delivery = crate::rig::next(&mut consumer).await;
        assert!(delivery.nack_after(Duration::ZERO, "x").await.is_ok());
        let delivery = crate::rig::next(&mut consumer).await;
        assert_eq!(delivery.attempt(), 2);
        assert!(delivery.dead_letter("bad").await.is_ok());
        assert_eq!(broker.admin().dead_letters(&topic.as_str().into(), &"g".into(), 5).await.unwrap().len(), 1);
        for n in &nodes {
            let keys: Vec<String> = ask(&mut conn(n.port), &["KEYS", &format!("*{topic}*")]);
            if keys.contains(&topic) {
                used.insert(n.port);
            }
        }
    }
    assert_eq!(used.len(), 3, "topics on every node");
    // Links that no session runs on are broken too, and are made again when they are needed.
    for n in &nodes {
        let _: i64 = ask(&mut conn(n.port), &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
    for i in 0..12 {
        broker.producer(format!("topic-{i}").as_str()).await.unwrap().send(Message::new("m")).await.unwrap();
    }
    close(broker).await;
    // Also by a close right then, which would else leave the names of members behind. None of these lives on the first node.
    let first: Vec<String> = ask(&mut conn(nodes[0].port), &["KEYS", "topic-*"]);
    let broker = open(&format!("redis://127.0.0.1:{}", nodes[0].port)).await;
    let mut members = Vec::new();
    for topic in (0..12).map(|i| format!("topic-{i}")).filter(|topic| !first.contains(topic)) {
        let group = mq_api::Subscription::group(topic.as_str(), "late").start(mq_api::Start::Latest);
        members.push(broker.subscribe(group).await.unwrap());
    }
    for n in &nodes {
        let _: i64 = ask(&mut conn(n.port), &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
    let _ = broker.close(Duration::from_secs(5)).await;
    assert!(!members.is_empty());
    for n in &nodes[1..] {
        let topics: Vec<String> = ask(&mut conn(n.port), &["KEYS", "topic-*"]);
        for topic in topics {
            let members: Vec<redis::Value> = ask(&mut conn(n.port), &["XINFO", "CONSUMERS", &topic, "late"]);
            assert!(members.is_empty(), "{topic}: {members:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_lacks_hello_is_served_all_the_same() {
    let Some(server) = server(false, &["rename-command HELLO \"\""]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    producer.send(Message::new("m")).await.unwrap();
    assert!(matches!(next(&mut consumer).await.release().await, Settled::Confirmed(_)));
    assert!(matches!(next(&mut consumer).await.ack().await, Settled::Confirmed(_)));
    close(broker).await;
}
