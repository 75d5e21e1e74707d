use mq_api::{Broker, Error, ErrorKind, Result};
use std::sync::Arc;

/// A scheme of broker URLs.
struct Scheme {
    name: &'static str,
    feature: &'static str,
    built: bool,
}

macro_rules! schemes {
    ($($name:literal: $feature:literal,)*) => {
        const SCHEMES: &[Scheme] = &[$(Scheme { name: $name, feature: $feature, built: cfg!(feature = $feature) },)*];
    };
}
schemes! {
    "memory": "memory",
    "redis": "redis",
    "rediss": "redis",
    "redis+unix": "redis",
    "redis+pubsub": "redis",
    "rediss+pubsub": "redis",
    "redis+pubsub+unix": "redis",
    "amqp": "amqp",
    "amqps": "amqp",
    "kafka": "kafka",
    "kafkas": "kafka",
}

/// Connects to the broker that the URL names.
///
/// | URL | broker | feature |
/// |---|---|---|
/// | `memory://name` | in this process; handles of one name share it | `memory` (on by default) |
/// | `redis://`, `rediss://` (TLS), `redis+unix://` | Redis Streams | `redis` |
/// | `redis+pubsub://`, `rediss+pubsub://` | Redis Pub/Sub | `redis` |
/// | `amqp://`, `amqps://` (TLS) | RabbitMQ | `amqp` |
/// | `kafka://`, `kafkas://` (TLS) | Kafka | `kafka` |
///
/// Parameters after `?` are those of the backend's documentation; an unknown one is an error that names it and those that
/// exist. A broker that is down is waited for, up to the backend's limit.
///
/// # Errors
/// [`ErrorKind::Config`] for an unknown scheme or parameter, [`ErrorKind::NotBuilt`] when this build lacks the backend's
/// feature, and what connecting ended with. Passwords never show.
///
/// # Cancel safety
/// Dropping the future gives up connecting and leaves nothing.
pub async fn connect(url: impl AsRef<str>) -> Result<Arc<dyn Broker>> {
    let url = url.as_ref().trim();
    let scheme = scheme(url)?;
    match scheme.feature {
        #[cfg(feature = "memory")]
        "memory" => mq_memory::connect(url).await,
        #[cfg(feature = "redis")]
        "redis" => mq_redis::connect(url).await,
        #[cfg(feature = "amqp")]
        "amqp" => mq_amqp::connect(url).await,
        #[cfg(feature = "kafka")]
        "kafka" => mq_kafka::connect(url).await,
        _ => Err(not_built(scheme)),
    }
}

fn scheme(url: &str) -> Result<&'static Scheme> {
    let Some((name, _)) = url.split_once("://") else {
        let text = match url.is_empty() {
            true => "the broker URL is empty".to_owned(),
            // Not the text itself: it may be a password that ended up in the wrong variable.
            false => "the broker URL has no scheme".to_owned(),
        };
        return Err(Error::new(ErrorKind::Config, format!("{text}; give one like 'redis://localhost'. {}", built())));
    };
    let lower = name.to_ascii_lowercase();
    SCHEMES.iter().find(|scheme| scheme.name == lower).ok_or_else(|| {
        Error::new(ErrorKind::Config, format!("no broker has URLs that begin with '{name}://'. {}", built()))
    })
}

fn not_built(scheme: &Scheme) -> Error {
    let Scheme { name, feature, .. } = scheme;
    Error::new(
        ErrorKind::NotBuilt,
        format!(
            "'{name}://' needs the feature `{feature}` of the crate anymq, which this program was built without; \
             give the line of anymq in Cargo.toml features = [\"{feature}\"]. {}",
            built()
        ),
    )
}

/// What this build can connect to, and what it could with more features.
fn built() -> String {
    let names = |built: bool| -> Vec<String> {
        let some = SCHEMES.iter().filter(|scheme| scheme.built == built);
        some.map(|s| if built { format!("{}://", s.name) } else { format!("{}:// (feature `{}`)", s.name, s.feature) })
            .collect()
    };
    let (have, lack) = (names(true), names(false));
    let mut text = match have.is_empty() {
        true => "No backend is compiled in".to_owned(),
        false => format!("Compiled in: {}", have.join(", ")),
    };
    if !lack.is_empty() {
        text.push_str("; not compiled in: ");
        text.push_str(&lack.join(", "));
    }
    text
}
