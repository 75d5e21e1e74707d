//! The client's errors as ours: which kind, what is known of a message, the broker's own words as source.

use lapin::ErrorKind as Client;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use mq_api::{Error, ErrorKind};

/// Maps an error of the client, met while `doing` something.
#[cold]
pub(crate) fn fault(doing: impl std::fmt::Display, error: lapin::Error) -> Error {
    let kind = kind_of(&error);
    let words = match error.kind() {
        Client::ProtocolError(said) => said.get_message().as_str().to_owned(),
        _ => error.to_string(),
    };
    let hint = match error.kind() {
        Client::ChannelsLimitReached => "",
        _ => hint(kind, &words),
    };
    Error::new(kind, format!("{doing}: {words}{hint}")).with_source(error)
}

/// What usually mends it.
fn hint(kind: ErrorKind, words: &str) -> &'static str {
    match kind {
        ErrorKind::Auth => "; check user and password of the URL",
        ErrorKind::Permission if words.contains("vhost") => {
            "; check the virtual host of the URL and the user's rights on it"
        }
        ErrorKind::Permission => "; grant the right with `rabbitmqctl set_permissions`, or use Provisioning::None",
        ErrorKind::Topology if words.contains("x-queue-type") => {
            "; the queue was made with another type: use ?queue_type=classic or quorum accordingly, or delete it"
        }
        ErrorKind::Topology => "; it was made with other arguments: use those, or delete it, or Provisioning::None",
        ErrorKind::Tls => "; check the host name, and the parameters ca, cert and key of the URL",
        ErrorKind::NotFound => "; make it first, or use Provisioning::Create",
        ErrorKind::Unavailable => "; is it running, and host and port right?",
        _ => "",
    }
}

fn kind_of(error: &lapin::Error) -> ErrorKind {
    match error.kind() {
        Client::ProtocolError(said) => protocol(said.kind(), said.get_message().as_str()),
        Client::IOError(io) if is_tls(io) => ErrorKind::Tls,
        Client::IOError(io) => match io.kind() {
            std::io::ErrorKind::ConnectionRefused
            | std::io::ErrorKind::TimedOut
            | std::io::ErrorKind::HostUnreachable
            | std::io::ErrorKind::NetworkUnreachable => ErrorKind::Unavailable,
            _ => ErrorKind::Disconnected,
        },
        Client::AuthProviderError(_) => ErrorKind::Auth,
        Client::ChannelsLimitReached => ErrorKind::Unavailable,
        Client::InvalidProtocolVersion(_) => ErrorKind::Unsupported,
        Client::NoDefaultRuntime => ErrorKind::Config,
        _ => ErrorKind::Disconnected,
    }
}

fn is_tls(io: &std::io::Error) -> bool {
    // The connector wraps rustls' errors; their type is not ours to name, their words are stable enough.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = io.get_ref().map(|e| e as _);
    let mut text = io.to_string();
    while let Some(e) = cause {
        text.push_str(&e.to_string());
        cause = e.source();
    }
    ["certificate", "Certificate", "alert", "tls", "TLS", "corrupt message", "handshake"]
        .iter()
        .any(|w| text.contains(w))
}

fn protocol(kind: &AMQPErrorKind, words: &str) -> ErrorKind {
    use AMQPHardError as Hard;
    use AMQPSoftError as Soft;
    match kind {
        AMQPErrorKind::Soft(Soft::ACCESSREFUSED) if words.contains("Login was refused") || words.contains("login") => {
            ErrorKind::Auth
        }
        AMQPErrorKind::Soft(Soft::ACCESSREFUSED) => ErrorKind::Permission,
        // A node that just started answers so for queues whose home is not up yet.
        AMQPErrorKind::Soft(Soft::NOTFOUND) if words.contains("is down") || words.contains("home node") => {
            ErrorKind::Unavailable
        }
        AMQPErrorKind::Soft(Soft::NOTFOUND) => ErrorKind::NotFound,
        AMQPErrorKind::Soft(Soft::RESOURCELOCKED) => ErrorKind::Unavailable,
        AMQPErrorKind::Soft(Soft::PRECONDITIONFAILED)
            if words.contains("inequivalent")
                || words.contains("invalid arg")
                || words.contains("invalid property") =>
        {
            ErrorKind::Topology
        }
        // A consumer time-out, an unknown delivery tag, a message too large for the server.
        AMQPErrorKind::Soft(Soft::PRECONDITIONFAILED) => ErrorKind::Disconnected,
        AMQPErrorKind::Soft(Soft::CONTENTTOOLARGE) => ErrorKind::TooLarge,
        AMQPErrorKind::Hard(Hard::NOTALLOWED) if words.contains("is down") => ErrorKind::Unavailable,
        AMQPErrorKind::Hard(Hard::NOTALLOWED | Hard::INVALIDPATH) => ErrorKind::Permission,
        AMQPErrorKind::Hard(Hard::NOTIMPLEMENTED) => ErrorKind::Unsupported,
        AMQPErrorKind::Hard(Hard::INTERNALERROR | Hard::RESOURCEERROR) => ErrorKind::Unavailable,
        _ => ErrorKind::Disconnected,
    }
}

/// Whether a passive look failed because the thing is not there.
pub(crate) fn is_missing(error: &lapin::Error) -> bool {
    kind_of(error) == ErrorKind::NotFound
}

/// Whether the user may not do it.
pub(crate) fn is_refused(error: &lapin::Error) -> bool {
    kind_of(error) == ErrorKind::Permission
}

/// The broker did not answer in time.
#[cold]
pub(crate) fn no_answer(doing: &str, limit: std::time::Duration) -> Error {
    Error::new(ErrorKind::Timeout, format!("{doing}: the broker did not answer within {limit:?}"))
}
