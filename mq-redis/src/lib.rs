//! The Redis backend of the anymq messaging library.

mod admin;
mod answer;
mod broadcast;
mod broker;
mod connect;
mod driver;
mod keys;
mod member;
mod probe;
mod pubsub;
mod read;
mod scripts;
mod send;
mod settle;
mod tend;
mod topology;
mod url;
mod wire;

use std::sync::Arc;

/// Connects.
///
/// # Errors
/// `Config` names a URL parameter that is wrong; `Auth` and `Tls` fail at once with the server's words; a server that is down is
/// waited for, up to `connect_timeout`.
pub async fn connect(url: &str) -> mq_api::Result<Arc<dyn mq_api::Broker>> {
    connect_with_hooks(url, Arc::new(mq_core::NoHooks)).await
}

/// Connects; `hooks` are told what happens, for metrics and traces.
///
/// # Errors
/// As [`connect`].
pub async fn connect_with_hooks(url: &str, hooks: Arc<dyn mq_core::Hooks>) -> mq_api::Result<Arc<dyn mq_api::Broker>> {
    Ok(broker::Redis::connect(url, hooks).await?)
}
