//! Configuration from a file or the environment, strict: whatever is not understood is an error that names it.

mod environment;
mod file;
mod raw;
mod secret;

use mq_api::{Broker, Error, ErrorKind, Result};
use secret::Secret;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use url::{Position, Url};

/// Which broker to connect to, from a file, the environment, or built by hand.
///
/// ```
/// # use anymq::Config;
/// # fn main() -> anymq::Result<()> {
/// # #[cfg(feature = "toml")] {
/// let config = Config::from_toml(r#"
///     url = "redis://cache.internal:6379/2"
///     username = "shop"
///     password = "not in the URL, so that it is in no log"
///
///     [params]            # what could stand after `?` in the URL
///     wait_replicas = 1
/// "#)?;
/// assert!(!format!("{config:?}").contains("not in the URL"));
/// # } Ok(()) }
/// ```
///
/// A configuration is the URL in parts: [`Config::connect`] puts them together, and the backend reads the whole as strictly
/// as a URL given to [`connect`](crate::connect()).
#[derive(Clone, Deserialize)]
#[serde(try_from = "raw::Raw")]
#[non_exhaustive]
pub struct Config {
    url: Secret,
    username: Option<String>,
    password: Option<Secret>,
    params: BTreeMap<String, Param>,
}

/// The value of a parameter as files write it.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Param {
    Bool(bool),
    Integer(i64),
    /// Above the largest `i64`: as a float it would become another number.
    Unsigned(u64),
    Float(f64),
    Text(String),
    #[allow(dead_code, reason = "only there to be named in an error")]
    Other(serde::de::IgnoredAny),
}

impl Param {
    fn text(&self, name: &str) -> Result<String> {
        match self {
            Self::Bool(value) => Ok(value.to_string()),
            Self::Integer(value) => Ok(value.to_string()),
            Self::Unsigned(value) => Ok(value.to_string()),
            Self::Float(value) => Ok(value.to_string()),
            Self::Text(value) => Ok(value.clone()),
            Self::Other(_) => Err(Error::new(
                ErrorKind::Config,
                format!("params.{name} is a list or a table; give text, a number, true or false"),
            )),
        }
    }
}

impl Config {
    /// With this URL and nothing else.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: Secret::new(url.into()), username: None, password: None, params: BTreeMap::new() }
    }

    /// Sets the user, instead of the URL's.
    pub fn username(mut self, name: impl Into<String>) -> Self {
        self.username = Some(name.into());
        self
    }

    /// Sets the password, instead of the URL's. It never shows in `Debug`, logs or errors.
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(Secret::new(password.into()));
        self
    }

    /// Sets a parameter of the backend, instead of the URL's.
    pub fn param(mut self, name: impl Into<String>, value: impl fmt::Display) -> Self {
        self.params.insert(name.into(), Param::Text(value.to_string()));
        self
    }

    /// Connects; see [`connect`](crate::connect()).
    ///
    /// # Errors
    /// As [`connect`](crate::connect()).
    pub async fn connect(&self) -> Result<Arc<dyn Broker>> {
        crate::connect(self.to_url()?).await
    }

    /// The whole as one URL. It holds the password: do not log it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a URL that cannot be read.
    pub fn to_url(&self) -> Result<String> {
        let text = self.url.expose().trim();
        if self.username.is_none() && self.password.is_none() && self.params.is_empty() {
            return Ok(text.to_owned());
        }
        let bad = |what: &str| Error::new(ErrorKind::Config, format!("the configuration's url {what}"));
        let (text, others) = one_host(text);
        let mut url = Url::parse(&text).map_err(|e| bad(&format!("cannot be read: {e}")))?;
        if let Some(name) = &self.username {
            url.set_username(name).map_err(|()| bad("has no host that a username could be for"))?;
        }
        if let Some(password) = &self.password {
            url.set_password(Some(password.expose())).map_err(|()| bad("has no host that a password could be for"))?;
        }
        let mut params: Vec<(String, String)> = url
            .query_pairs()
            .filter(|(name, _)| !self.params.contains_key(&**name))
            .map(|(n, v)| (n.into_owned(), v.into_owned()))
            .collect();
        for (name, value) in &self.params {
            params.push((name.clone(), value.text(name)?));
        }
        if !params.is_empty() {
            url.query_pairs_mut().clear().extend_pairs(params);
        }
        Ok(format!("{}{others}{}", &url[..Position::AfterPort], &url[Position::AfterPort..]))
    }
}

/// The URL with the first of its hosts, and the others with the comma before them: general URLs have one.
fn one_host(url: &str) -> (String, &str) {
    let begin = url.find("://").map_or(0, |at| at + 3);
    let end = url[begin..].find(['/', '?', '#']).map_or(url.len(), |at| begin + at);
    let hosts = url[begin..end].rfind('@').map_or(begin, |at| begin + at + 1);
    let comma = url[hosts..end].find(',').map_or(end, |at| hosts + at);
    (format!("{}{}", &url[..comma], &url[end..]), &url[comma..end])
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("url", &secret::without_secrets(self.url.expose()))
            .field("username", &self.username)
            .field("password", &self.password)
            // Values may be secrets too (a key's password, a token): names are enough to find a mistake.
            .field("params", &self.params.keys().collect::<Vec<_>>())
            .finish()
    }
}
