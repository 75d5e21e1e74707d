//! What this broker can do, as data.

use crate::url::QueueType;
use mq_api::Capabilities;
use std::time::Duration;

/// The capabilities for a queue type; how soon a dead member is noticed derives from the heartbeat.
pub(crate) fn capabilities(kind: QueueType, heartbeat: Duration, server: Option<String>) -> Capabilities {
    let mut all = match kind {
        QueueType::Quorum => Capabilities::amqp(),
        QueueType::Classic => Capabilities::amqp_classic(),
    };
    all.server = server;
    all.takeover = Capabilities::amqp_takeover(heartbeat, kind == QueueType::Classic);
    all
}
