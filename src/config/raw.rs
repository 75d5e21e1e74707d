//! A configuration as a file gives it, before it is known that every value has its type. What is wrong is named by its key, and
//! never shown: it may be a password that lacks its quotes.

use super::{Config, Param, Secret};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Raw {
    url: Param,
    username: Option<Param>,
    password: Option<Param>,
    params: Option<Params>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Params {
    Table(Pairs),
    Other(IgnoredAny),
}

/// A table with whatever is in it twice.
struct Pairs(Vec<(String, Param)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Pairs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Read)
    }
}

fn text(key: &str, value: Param) -> Result<String, String> {
    let what = match value {
        Param::Text(text) => return Ok(text),
        Param::Bool(_) => "true or false",
        Param::Integer(_) | Param::Unsigned(_) => "an integer",
        Param::Float(_) => "a number",
        Param::Other(_) => "a list or a table",
    };
    Err(format!("'{key}' is {what}; give a string (text in quotes)"))
}

impl TryFrom<Raw> for Config {
    type Error = String;

    fn try_from(raw: Raw) -> Result<Self, String> {
        let mut params = BTreeMap::new();
        match raw.params {
            None => {}
            Some(Params::Table(Pairs(pairs))) => {
                for (name, value) in pairs {
                    if params.contains_key(&name) {
                        return Err(format!("params.{name} is given twice"));
                    }
                    params.insert(name, value);
                }
            }
            Some(Params::Other(_)) => return Err("'params' is no table; give names and their values".to_owned()),
        }
        Ok(Self {
            url: Secret::new(text("url", raw.url)?),
            username: raw.username.map(|value| text("username", value)).transpose()?,
            password: raw.password.map(|value| text("password", value).map(Secret::new)).transpose()?,
            params,
        })
    }
}
