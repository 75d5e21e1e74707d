use super::{Config, Param, Secret};
use mq_api::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};

impl Config {
    /// Reads the variables that begin with `prefix`: with `SHOP_MQ_` these are `SHOP_MQ_URL`, `SHOP_MQ_USERNAME`,
    /// `SHOP_MQ_PASSWORD` and `SHOP_MQ_PARAM_<NAME>`, whose name is read in lower case.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when the URL is missing, and for a variable with the prefix that is none of these: a misspelt
    /// one must not be ignored.
    pub fn from_env(prefix: &str) -> Result<Self> {
        Self::from_vars(prefix, std::env::vars_os().map(|(n, v)| (n.into_string(), v.into_string())))
    }

    /// This configuration, with what the environment sets instead; see [`from_env`](Self::from_env).
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env), except that nothing need be set.
    pub fn with_env(self, prefix: &str) -> Result<Self> {
        let vars = std::env::vars_os().map(|(n, v)| (n.into_string(), v.into_string()));
        self.with_vars(prefix, vars)
    }

    pub(super) fn from_vars<E>(prefix: &str, vars: impl IntoIterator<Item = Var<E>>) -> Result<Self> {
        let config = Self::new("").with_vars(prefix, vars)?;
        if config.url.expose().is_empty() {
            return Err(Error::new(
                ErrorKind::Config,
                format!("the environment variable {prefix}URL is not set; give a broker URL like 'redis://localhost'"),
            ));
        }
        Ok(config)
    }

    fn with_vars<E>(mut self, prefix: &str, vars: impl IntoIterator<Item = Var<E>>) -> Result<Self> {
        if prefix.is_empty() {
            return Err(Error::new(
                ErrorKind::Config,
                "the prefix of environment variables is empty, so every variable would be read; give one like 'MQ_'",
            ));
        }
        // Sorted, so that of several mistakes always the same is named.
        let mut ours = BTreeMap::new();
        for (name, value) in vars {
            let Ok(name) = name else { continue };
            let Some(key) = name.strip_prefix(prefix).map(str::to_owned) else { continue };
            let value = value
                .map_err(|_| Error::new(ErrorKind::Config, format!("the environment variable {name} is not UTF-8")))?;
            ours.insert(key, value);
        }
        let mut names = BTreeSet::new();
        for (key, value) in ours {
            match key.as_str() {
                "URL" => self.url = Secret::new(value),
                "USERNAME" => self.username = Some(value),
                "PASSWORD" => self.password = Some(Secret::new(value)),
                other => match other.strip_prefix("PARAM_") {
                    Some(name) if !name.is_empty() => {
                        let name = name.to_ascii_lowercase();
                        if !names.insert(name.clone()) {
                            let twice = format!(
                                "two environment variables set the parameter '{name}'; keep {prefix}PARAM_{}",
                                name.to_ascii_uppercase()
                            );
                            return Err(Error::new(ErrorKind::Config, twice));
                        }
                        self.params.insert(name, Param::Text(value));
                    }
                    _ => {
                        return Err(Error::new(
                            ErrorKind::Config,
                            format!(
                                "the environment variable {prefix}{other} means nothing; allowed are {prefix}URL, \
                                 {prefix}USERNAME, {prefix}PASSWORD and {prefix}PARAM_<NAME>"
                            ),
                        ));
                    }
                },
            }
        }
        Ok(self)
    }
}

/// Name and value, or what is no UTF-8.
type Var<E> = (std::result::Result<String, E>, std::result::Result<String, E>);

#[cfg(test)]
mod tests {
    use crate::Config;

    fn read(vars: &[(&str, &str)]) -> mq_api::Result<Config> {
        let owned = vars.iter().map(|(n, v)| (Ok::<_, ()>((*n).to_owned()), Ok((*v).to_owned())));
        Config::from_vars("MQ_", owned.collect::<Vec<_>>())
    }

    #[test]
    fn variables_make_a_url() {
        let config = read(&[
            ("MQ_URL", "redis://h:1/2?a=1&b=2"),
            ("MQ_USERNAME", "u"),
            ("MQ_PASSWORD", "p@/"),
            ("MQ_PARAM_A", "x y"),
            ("PATH", "/bin"),
        ])
        .unwrap();
        assert_eq!(config.to_url().unwrap(), "redis://u:p%40%2F@h:1/2?b=2&a=x+y");
        assert!(!format!("{config:?}").contains("p@/"));
    }

    #[test]
    fn several_hosts_stay() {
        for (url, whole) in [
            ("kafka://a:9092,b:9093?client_id=x", "kafka://u:p@a:9092,b:9093?client_id=x"),
            ("amqps://old:login@a:5671,[::1]:5672,c/shop", "amqps://u:p@a:5671,[::1]:5672,c/shop"),
            ("redis://a,b:1", "redis://u:p@a,b:1"),
            ("redis://a/2?name=x,y", "redis://u:p@a/2?name=x%2Cy"),
        ] {
            let config = read(&[("MQ_URL", url), ("MQ_USERNAME", "u"), ("MQ_PASSWORD", "p")]).unwrap();
            assert_eq!(config.to_url().unwrap(), whole);
        }
        let config = read(&[("MQ_URL", "redis://a:1,b:2/3"), ("MQ_PARAM_WAIT", "1")]).unwrap();
        assert_eq!(config.to_url().unwrap(), "redis://a:1,b:2/3?wait=1");
    }

    #[test]
    fn mistakes_are_named() {
        let text = read(&[("MQ_URL", "memory://"), ("MQ_PASSWROD", "secret")]).unwrap_err().to_string();
        assert!(text.contains("MQ_PASSWROD") && text.contains("MQ_PASSWORD") && !text.contains("secret"), "{text}");
        let text = read(&[("MQ_URL", "memory://"), ("MQ_PARAM_a", "1"), ("MQ_PARAM_A", "2")]).unwrap_err().to_string();
        assert!(text.contains("MQ_PARAM_A"), "{text}");
        let text = read(&[("MQ_USERNAME", "u")]).unwrap_err().to_string();
        assert!(text.contains("MQ_URL is not set"), "{text}");
    }
}
