//! Owns what must not be seen in a bundle, a log or on a page: values of secret keys, credentials and queries in URLs, keys in
//! PEM, and the lines of a file that a parser would show beside its complaint.
//! Refuses text that it cannot read: a configuration that is no TOML is left out whole.

use toml::Value;

pub(crate) const HIDDEN: &str = "REDACTED";
/// A key with one of these in its name has a secret value.
const SECRET: [&str; 9] =
    ["password", "passwd", "secret", "token", "authorization", "credential", "cookie", "api_key", "apikey"];
/// Every value of these tables is taken for a secret: header names are free.
const TABLES: [&str; 2] = ["headers", "users"];

/// The configuration with secrets replaced and without its comments; `None` if it is no TOML.
pub(crate) fn configuration(text: &str) -> Option<String> {
    let mut value = Value::Table(text.parse().ok()?);
    redact(&mut value, false);
    toml::to_string(&value).ok()
}

fn redact(value: &mut Value, secret: bool) {
    match value {
        Value::Table(table) => {
            for (key, value) in table.iter_mut() {
                let key = key.to_ascii_lowercase().replace('-', "_");
                let named = SECRET.iter().any(|word| key.contains(word));
                redact(value, secret || named || TABLES.contains(&key.as_str()));
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| redact(value, secret)),
        Value::String(text) if secret || text.contains("-----BEGIN") => HIDDEN.clone_into(text),
        Value::String(text) => *text = urls(text),
        other if secret => *other = Value::String(HIDDEN.to_owned()),
        _ => {}
    }
}

/// Text with the credentials and the query of every URL in it replaced.
pub(crate) fn urls(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out.push_str(before);
        let end = after.find(|c: char| c.is_whitespace() || "\"'<>\\`".contains(c)).unwrap_or(after.len());
        let (url, next) = after.split_at(end);
        out.push_str(&bare(url));
        rest = next;
    }
    out.push_str(rest);
    out
}

/// A parser's complaint about a file, without the value that it is about: that may be a password.
pub(crate) fn complaint(message: &str) -> String {
    let kinds = ["invalid type: ", "invalid value: "];
    let value = kinds.iter().find_map(|kind| Some(message.find(kind)? + kind.len()));
    let end = message.rfind(", expected ");
    match value.zip(end).filter(|(value, end)| value < end) {
        Some((value, end)) => {
            let kind = message[value..end].split(' ').next().unwrap_or_default();
            urls(&format!("{}{kind}{}", &message[..value], &message[end..]))
        }
        None => urls(message),
    }
}

/// What follows `scheme://`.
fn bare(url: &str) -> String {
    let authority = url.find(['/', '?', '#']).unwrap_or(url.len());
    let (authority, path) = url.split_at(authority);
    let authority = match authority.rsplit_once('@') {
        Some((_, host)) => format!("{HIDDEN}@{host}"),
        None => authority.to_owned(),
    };
    match path.find(['?', '#']) {
        Some(at) => format!("{authority}{}{}{HIDDEN}", &path[..at], &path[at..=at]),
        None => format!("{authority}{path}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRETS: [&str; 7] = ["hunter2", "abc123", "s3cret", "Bearer", "k3y", "PRIVATE", "in a comment"];

    #[test]
    fn no_secret_of_a_configuration_stays() {
        let text = "# password in a comment\n[otlp]\nenabled = true\n\
             endpoint = \"https://user:hunter2@collector.example:4317/v1?api=abc123\"\n\
             headers = { \"x-team\" = \"s3cret\", authorization = \"Bearer x\" }\n\
             client_key = \"-----BEGIN PRIVATE KEY-----\"\n\
             [server]\nlisten = \"127.0.0.1:9468\"\nX-API-Key = \"k3y\"\nlist = [\"http://u:hunter2@h\"]\npassword_number = 7\n";
        let redacted = configuration(text).expect("it is TOML");
        for secret in SECRETS {
            assert!(!redacted.contains(secret), "{secret} in {redacted}");
        }
        for kept in ["collector.example:4317", "127.0.0.1:9468", "enabled = true", "x-team", "/v1?REDACTED"] {
            assert!(redacted.contains(kept), "{kept} not in {redacted}");
        }
        assert!(!redacted.contains("number = 7"), "{redacted}");
        assert_eq!(configuration("password = "), None);
    }

    #[test]
    fn a_parsers_complaint_keeps_its_place_and_not_the_value() {
        for (message, kept) in [
            (
                "invalid type: string \"hunter2, expected x\", expected a map",
                "invalid type: string, expected a map",
            ),
            (
                "line 2 column 3: invalid value: string \"s3cret\", expected u32",
                "line 2 column 3: invalid value: string, expected u32",
            ),
            ("invalid type: integer `5`, expected a string", "invalid type: integer, expected a string"),
            ("unknown field `port`, expected `listen`", "unknown field `port`, expected `listen`"),
        ] {
            assert_eq!(complaint(message), kept);
        }
    }

    #[test]
    fn urls_in_any_text_lose_who_and_what_was_asked() {
        for (text, bare) in [
            ("at https://a:b@c.example/x now", "at https://REDACTED@c.example/x now"),
            ("{\"u\":\"http://h/p?token=1\"}", "{\"u\":\"http://h/p?REDACTED\"}"),
            ("http://h#frag and ftp://x@y", "http://h#REDACTED and ftp://REDACTED@y"),
            ("pod:a/b 5 :// x", "pod:a/b 5 :// x"),
            ("http://a@b@c/", "http://REDACTED@c/"),
        ] {
            assert_eq!(urls(text), bare);
        }
    }
}
