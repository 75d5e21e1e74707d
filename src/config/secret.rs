use std::fmt;

/// Text that never shows in `Debug`.
#[derive(Clone)]
pub(super) struct Secret(String);

impl Secret {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }

    pub(super) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A URL without user, password and the values of parameters. Works on text that is no URL, too.
pub(super) fn without_secrets(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return "***".to_owned() };
    let (place, params) = match rest.split_once('?') {
        Some((place, _)) => (place, "?***"),
        None => (rest, ""),
    };
    // A password may hold a slash or an `@`: everything up to the last `@` is hidden.
    match place.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://***@{host}{params}"),
        None => format!("{scheme}://{place}{params}"),
    }
}

#[cfg(test)]
mod tests {
    use super::without_secrets;

    #[test]
    fn nothing_secret_is_left() {
        for (url, shown) in [
            ("redis://u:p@h:1/0?password=x", "redis://***@h:1/0?***"),
            ("redis://:p/a@b@h", "redis://***@h"),
            ("memory://shop", "memory://shop"),
            ("hunter2", "***"),
        ] {
            assert_eq!(without_secrets(url), shown);
        }
    }
}
