//! Which tests each backend may refuse: files in the repository, so that a new refusal is a change that somebody reads.

/// The list of tests that a backend's capabilities may refuse; empty for a backend that refuses nothing.
pub fn expected_refusals(backend: &str) -> &'static str {
    match backend {
        "amqp" => include_str!("../unsupported/amqp.txt"),
        "amqp-classic" => include_str!("../unsupported/amqp-classic.txt"),
        "kafka" => include_str!("../unsupported/kafka.txt"),
        "redis" => include_str!("../unsupported/redis.txt"),
        "redis-pubsub" => include_str!("../unsupported/redis-pubsub.txt"),
        _ => "",
    }
}
