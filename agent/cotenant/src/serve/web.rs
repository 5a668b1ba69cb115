//! Owns the web configuration: TLS, users, headers and rate, in the format of Prometheus's exporter-toolkit.
//! Refuses unknown keys with their line, and known ones that cannot be honoured here with the reason.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use axum::http::{HeaderName, HeaderValue};
use serde::Deserialize;

use crate::redact;

const LONGEST: u64 = 1 << 20;
/// A check at cost 16 takes about four seconds of a core.
const MAX_COST: u32 = 16;
const HEADERS: [&str; 5] = [
    "Content-Security-Policy",
    "X-Frame-Options",
    "X-Content-Type-Options",
    "X-XSS-Protection",
    "Strict-Transport-Security",
];

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct WebConfig {
    pub(super) tls_server_config: Option<TlsServer>,
    http_server_config: Option<HttpServer>,
    pub(super) basic_auth_users: BTreeMap<String, String>,
    rate_limit: Option<RateLimit>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TlsServer {
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
    pub(super) client_ca: Option<String>,
    pub(super) cert_file: Option<PathBuf>,
    pub(super) key_file: Option<PathBuf>,
    pub(super) client_ca_file: Option<PathBuf>,
    pub(super) client_auth_type: Option<String>,
    pub(super) client_allowed_sans: Vec<String>,
    pub(super) min_version: Option<Version>,
    pub(super) max_version: Option<Version>,
    pub(super) cipher_suites: Vec<String>,
    /// The server's order always counts.
    prefer_server_cipher_suites: Option<bool>,
    pub(super) curve_preferences: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Version {
    #[serde(rename = "TLS10")]
    Tls10,
    #[serde(rename = "TLS11")]
    Tls11,
    #[serde(rename = "TLS12")]
    Tls12,
    #[serde(rename = "TLS13")]
    Tls13,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct HttpServer {
    /// Read and not used: HTTP/1.1 is all that a scraper needs.
    #[serde(rename = "http2")]
    _http2: Option<bool>,
    headers: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RateLimit {
    #[serde(with = "humantime_serde")]
    pub(super) interval: Duration,
    pub(super) burst: u32,
}

impl WebConfig {
    pub(super) fn read(file: &Path) -> Result<Self> {
        let text = text(file)?;
        Self::parse(&text).with_context(|| format!("{} is not a valid web configuration", file.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        // A file with comments only is no document.
        let blank = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        let config: Self = if blank { Self::default() } else { read(text)? };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        for (user, hash) in &self.basic_auth_users {
            let parts: bcrypt::HashParts = hash.parse().ok().with_context(|| {
                format!("basic_auth_users: the password of {user:?} is no bcrypt hash; make one with `htpasswd -nB USER`")
            })?;
            if parts.get_cost() > MAX_COST {
                bail!(
                    "basic_auth_users: the hash of {user:?} has cost {}: every check would take a core for seconds; \
                     at most {MAX_COST}",
                    parts.get_cost()
                );
            }
            if user.contains(':') {
                bail!("basic_auth_users: {user:?} has a colon, which ends a user's name in HTTP");
            }
        }
        self.headers()?;
        self.tls_server_config.as_ref().map_or(Ok(()), TlsServer::check)
    }

    pub(super) fn headers(&self) -> Result<Vec<(HeaderName, HeaderValue)>> {
        let Some(http) = &self.http_server_config else { return Ok(Vec::new()) };
        http.headers
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| {
                if !HEADERS.contains(&name.as_str()) {
                    bail!(
                        "http_server_config: the header {name:?} cannot be set; these can: {}",
                        HEADERS.join(", ")
                    );
                }
                let value = HeaderValue::from_str(value)
                    .with_context(|| format!("http_server_config: the header {name} has no valid value"))?;
                Ok((HeaderName::from_bytes(name.as_bytes())?, value))
            })
            .collect()
    }

    pub(super) fn rate(&self) -> Option<RateLimit> {
        self.rate_limit.filter(|rate| !rate.interval.is_zero())
    }
}

impl TlsServer {
    fn check(&self) -> Result<()> {
        let one = |inline: &Option<String>, file: &Option<PathBuf>, name: &str| match (inline, file) {
            (Some(_), Some(_)) => {
                bail!("tls_server_config: {name} and {name}_file are both there: one is wanted")
            }
            (None, None) => Ok(false),
            _ => Ok(true),
        };
        for (name, there) in [
            ("cert", one(&self.cert, &self.cert_file, "cert")?),
            ("key", one(&self.key, &self.key_file, "key")?),
        ] {
            if !there {
                bail!("tls_server_config: neither {name} nor {name}_file is there");
            }
        }
        let authority = one(&self.client_ca, &self.client_ca_file, "client_ca")?;
        match (self.client_auth(), authority) {
            (Ok(ClientAuth::None), true) => {
                bail!(
                    "tls_server_config: client_ca is there, but no client_auth_type: set RequireAndVerifyClientCert"
                )
            }
            (Ok(ClientAuth::Required | ClientAuth::Optional), false) => {
                bail!(
                    "tls_server_config: client_auth_type needs client_ca_file: who may have signed a client's certificate"
                )
            }
            (other, _) => drop(other?),
        }
        if !self.client_allowed_sans.is_empty() && self.client_auth()? != ClientAuth::Required {
            bail!("tls_server_config: client_allowed_sans needs client_auth_type RequireAndVerifyClientCert");
        }
        if let Some(name) =
            self.client_allowed_sans.iter().find(|name| name.contains("://") || name.contains('@'))
        {
            bail!(
                "tls_server_config: client_allowed_sans: {name:?} is neither a DNS name nor an IP address; only those are compared"
            );
        }
        let (min, max) =
            (self.min_version.unwrap_or(Version::Tls12), self.max_version.unwrap_or(Version::Tls13));
        if max < Version::Tls12 || min > max {
            bail!(
                "tls_server_config: TLS12 and TLS13 are spoken; min_version and max_version leave none of them"
            );
        }
        Ok(())
    }

    pub(super) fn client_auth(&self) -> Result<ClientAuth> {
        Ok(match self.client_auth_type.as_deref().unwrap_or("") {
            "" | "NoClientCert" => ClientAuth::None,
            "VerifyClientCertIfGiven" => ClientAuth::Optional,
            "RequireAndVerifyClientCert" => ClientAuth::Required,
            other @ ("RequestClientCert" | "RequireAnyClientCert" | "RequireClientCert") => bail!(
                "tls_server_config: client_auth_type {other} takes any certificate unverified, which proves nothing: use \
                 RequireAndVerifyClientCert"
            ),
            other => bail!(
                "tls_server_config: client_auth_type {other:?} is none of NoClientCert, VerifyClientCertIfGiven, \
                 RequireAndVerifyClientCert"
            ),
        })
    }

    /// Every file that this names, from the configuration's directory on.
    pub(super) fn files(&self, directory: &Path) -> Vec<PathBuf> {
        [&self.cert_file, &self.key_file, &self.client_ca_file]
            .into_iter()
            .flatten()
            .map(|file| directory.join(file))
            .collect()
    }
}

/// Where, and what is wrong with it. The lines around, which the parser would show, have keys and hashes in them.
fn read(text: &str) -> Result<WebConfig> {
    serde_saphyr::from_str(text)
        .map_err(|error| anyhow!("{}", redact::complaint(&error.without_snippet().to_string())))
}

/// Whether a client must say who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientAuth {
    None,
    Optional,
    Required,
}

pub(super) fn text(file: &Path) -> Result<String> {
    use std::io::Read;
    let mut text = String::new();
    let length = std::fs::File::open(file)
        .and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text))
        .with_context(|| format!("cannot read {}", file.display()))?;
    if length as u64 > LONGEST {
        bail!("{} has more than {LONGEST} bytes", file.display());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG";

    fn refused(text: &str) -> String {
        format!("{:#}", WebConfig::parse(text).expect_err(text))
    }

    #[test]
    fn no_line_of_the_file_is_in_what_is_said_of_it() {
        for (text, line) in [
            (
                "tls_server_config:\n  key: |\n    hunter2\n  key_fil: x\nbasic_auth_users:\n  a: hunter2\n",
                "line 4",
            ),
            ("basic_auth_users:\n  a: [hunter2]\n", "line 2"),
            ("basic_auth_users: hunter2\n", "line 1"),
            ("rate_limit:\n  interval: hunter2\n", "line 2"),
            ("basic_auth_users: {\n  a: hunter2\n", "line"),
            ("basic_auth_users:\n  a: hunter2\n", "\"a\""),
        ] {
            let said = refused(text);
            assert!(said.contains(line) && !said.contains("hunter2"), "{said}");
        }
    }

    #[test]
    fn the_toolkits_own_keys_are_read() {
        let text = format!(
            "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n  client_auth_type: \
             RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n  client_allowed_sans: [prometheus]\n  min_version: \
             TLS13\n  max_version: TLS13\n  prefer_server_cipher_suites: true\n  curve_preferences: \
             [X25519]\nhttp_server_config:\n  http2: true\n  headers:\n    X-Frame-Options: deny\nbasic_auth_users:\n  \
             alice: {HASH}\nrate_limit:\n  interval: 1s\n  burst: 20\n"
        );
        let config = WebConfig::parse(&text).expect("valid");
        assert_eq!(config.headers().expect("valid").len(), 1);
        assert_eq!(config.rate().map(|rate| (rate.interval, rate.burst)), Some((Duration::from_secs(1), 20)));
        let tls = config.tls_server_config.expect("there");
        assert_eq!(tls.files(Path::new("/etc/web"))[0], Path::new("/etc/web/server.crt"));
        for empty in ["", "# nothing\n"] {
            assert!(WebConfig::parse(empty).is_ok());
        }
    }

    #[test]
    fn the_shipped_example_is_valid_with_every_key_that_it_names() {
        let shipped = include_str!("../../../../deploy/web.yml");
        assert!(WebConfig::parse(shipped).expect("valid").tls_server_config.is_some());
        let all = [
            "client_",
            "basic_",
            "  prom",
            "http_",
            "  head",
            "    Strict",
            "rate_",
            "  interval",
            "  burst",
            "min_",
            "max_",
        ];
        let uncommented: String = shipped
            .lines()
            .map(|line| {
                let (indent, rest) = line.split_at(line.len() - line.trim_start().len());
                match rest.strip_prefix("# ").filter(|key| all.iter().any(|start| key.starts_with(start))) {
                    Some(key) => format!("{indent}{key}\n"),
                    None => format!("{line}\n"),
                }
            })
            .collect();
        let config = WebConfig::parse(&uncommented.replace("$2y$10$...", HASH)).expect("valid");
        assert!(config.rate().is_some() && config.basic_auth_users.len() == 1);
        assert_eq!(config.headers().expect("valid").len(), 1);
        let tls = config.tls_server_config.expect("there");
        assert_eq!(tls.client_auth().expect("valid"), ClientAuth::Required);
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        for (text, line, key) in [
            ("basic_auth_users: {}\nbasic_auth_user: {}\n", "2", "basic_auth_user"),
            ("tls_server_config:\n  cert_file: a\n  key_flie: b\n", "3", "key_flie"),
        ] {
            let said = refused(text);
            assert!(said.contains(key) && said.contains(&format!("line {line}")), "{said}");
        }
    }

    #[test]
    fn what_cannot_be_honoured_says_why() {
        let tls = |rest: &str| format!("tls_server_config:\n  cert_file: a\n  key_file: b\n{rest}");
        for (text, word) in [
            ("basic_auth_users:\n  bob: secret\n".to_owned(), "htpasswd"),
            (format!("basic_auth_users:\n  bob: {}\n", HASH.replace("$10$", "$20$")), "cost 20"),
            ("tls_server_config:\n  cert_file: a\n".to_owned(), "neither key nor key_file"),
            (tls("  key: b\n"), "both"),
            (tls("  client_auth_type: RequireAnyClientCert\n"), "proves nothing"),
            (tls("  client_auth_type: RequireAndVerifyClientCert\n"), "client_ca_file"),
            (tls("  client_ca_file: c\n"), "client_auth_type"),
            (tls("  max_version: TLS11\n"), "TLS12"),
            (tls("  client_allowed_sans: [a]\n"), "RequireAndVerifyClientCert"),
            ("http_server_config:\n  headers:\n    Set-Cookie: a\n".to_owned(), "Set-Cookie"),
        ] {
            let said = refused(&text);
            assert!(said.contains(word), "{said}");
        }
    }
}
