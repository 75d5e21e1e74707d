use super::Config;
use mq_api::{Error, ErrorKind, Result};
use std::path::Path;

impl Config {
    /// Reads a JSON object.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] that names the key that is unknown, missing or of the wrong type.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|e| Error::new(ErrorKind::Config, format!("the configuration (JSON): {e}")))
    }

    /// Reads TOML.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json).
    #[cfg(feature = "toml")]
    pub fn from_toml(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|e| {
            // `message` alone: the whole error prints the line it is in, which may hold a password.
            let line = e.span().map(|span| 1 + text.bytes().take(span.start).filter(|b| *b == b'\n').count());
            let place = line.map(|line| format!(" near line {line}")).unwrap_or_default();
            Error::new(ErrorKind::Config, format!("the configuration (TOML){place}: {}", e.message()))
        })
    }

    /// Reads a file that ends with `.json` or `.toml`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] that names the file and what is wrong in it.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let config =
            |text: String| Error::new(ErrorKind::Config, format!("configuration file '{}' {text}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| config(format!("cannot be read: {e}")).with_source(e))?;
        let read = match path.extension().and_then(|ending| ending.to_str()) {
            Some("json") => Self::from_json(&text),
            #[cfg(feature = "toml")]
            Some("toml") => Self::from_toml(&text),
            #[cfg(not(feature = "toml"))]
            Some("toml") => Err(Error::new(
                ErrorKind::NotBuilt,
                "TOML needs the feature `toml` of the crate anymq, which this program was built without",
            )),
            _ => return Err(config("must end with .json or .toml, which says how it is read".to_owned())),
        };
        read.map_err(|e| e.doing(format_args!("'{}'", path.display())))
    }
}
