//! Owns where to and how: the configuration file over `OTEL_EXPORTER_OTLP_*` over the defaults, each signal by itself.
//! Refuses to guess: a value of the file that cannot be is an error; one of the environment is said and left out, as
//! OpenTelemetry asks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};

use super::points::Histograms;
use super::streams::Temporality;

mod values;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    Metrics,
    Traces,
    Logs,
}

impl Signal {
    pub const ALL: [Self; 3] = [Self::Metrics, Self::Traces, Self::Logs];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Traces => "traces",
            Self::Logs => "logs",
        }
    }

    /// The part of a variable's name.
    const fn in_variables(self) -> &'static str {
        match self {
            Self::Metrics => "METRICS",
            Self::Traces => "TRACES",
            Self::Logs => "LOGS",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Grpc,
    Http,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

/// What the configuration file says; what it does not say is left to the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    pub endpoint: Option<String>,
    pub protocol: Option<String>,
    pub compression: Option<String>,
    pub headers: BTreeMap<String, String>,
    pub timeout: Option<Duration>,
    pub certificate: Option<PathBuf>,
    pub client_certificate: Option<PathBuf>,
    pub client_key: Option<PathBuf>,
    pub interval: Option<Duration>,
    pub temporality: Option<String>,
    pub histograms: Option<String>,
    /// Signals that are not sent.
    pub without: Vec<Signal>,
}

/// Where one signal goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub protocol: Protocol,
    /// With the path for HTTP, without for gRPC.
    pub endpoint: Uri,
    pub headers: HeaderMap,
    pub compression: Compression,
    /// Of one attempt.
    pub timeout: Duration,
    pub tls: Tls,
}

impl Target {
    /// The address without what it may hold of a user and a password.
    pub fn place(&self) -> String {
        let uri = &self.endpoint;
        let port = uri.port_u16().map(|port| format!(":{port}")).unwrap_or_default();
        let (scheme, host) = (uri.scheme_str().unwrap_or_default(), uri.host().unwrap_or_default());
        format!("{scheme}://{host}{port}{}", uri.path())
    }
}

/// Files, read again after a failure: certificates are replaced while the agent runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Who may have signed the receiver's certificate; the host's list when it is not set.
    pub certificate: Option<PathBuf>,
    pub client_certificate: Option<PathBuf>,
    pub client_key: Option<PathBuf>,
}

/// How much may wait, for each signal by itself. The request under way is on top. One collection of metrics must fit:
/// 512 tenants on two GPUs make 7 MB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub items: usize,
    pub bytes: usize,
}

/// How long to leave a receiver alone that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    pub first: Duration,
    pub most: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Signals that are not in it are not sent.
    pub targets: BTreeMap<Signal, Target>,
    pub interval: Duration,
    pub temporality: Temporality,
    pub histograms: Histograms,
    pub bounds: Bounds,
    pub pauses: Pauses,
    /// How long the first span or log record waits for others.
    pub linger: Duration,
    /// What of the environment was left out, and why.
    pub remarks: Vec<String>,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { items: 2048, bytes: 8 << 20 }
    }
}

impl Default for Pauses {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), most: Duration::from_secs(30) }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("otlp.{key} is {value:?}: {wanted}")]
    Value { key: &'static str, value: String, wanted: &'static str },
    #[error(
        "otlp.headers: {name:?} is no header: names are letters, digits and dashes, values printable ASCII"
    )]
    Header { name: String },
    #[error("otlp: {present} is set and {missing} is not: both are needed to show who the agent is")]
    HalfIdentity { present: &'static str, missing: &'static str },
}

impl Settings {
    /// Resolves the file's wishes against the environment.
    pub fn resolve(
        wishes: &Wishes,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, SettingsError> {
        let mut sources = Sources { variable, remarks: Vec::new() };
        let mut targets = BTreeMap::new();
        let disabled = sources.parsed(&["OTEL_SDK_DISABLED"], values::truth).unwrap_or(false);
        for signal in Signal::ALL {
            let exporter = format!("OTEL_{}_EXPORTER", signal.in_variables());
            let on = sources.parsed(&[exporter], values::exporters).unwrap_or(true);
            if !disabled && on && !wishes.without.contains(&signal) {
                targets.insert(signal, sources.target(wishes, signal)?);
            }
        }
        let interval = match wishes.interval {
            Some(interval) => Some(interval),
            None => sources.parsed(&["OTEL_METRIC_EXPORT_INTERVAL"], values::interval),
        };
        let preference = ["OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"];
        let temporality =
            sources.chosen("temporality", wishes.temporality.as_deref(), &preference, values::temporality)?;
        let aggregation = ["OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"];
        let histograms =
            sources.chosen("histograms", wishes.histograms.as_deref(), &aggregation, values::histograms)?;
        // A variable for all signals is read once for each.
        sources.remarks.sort();
        sources.remarks.dedup();
        Ok(Self {
            targets,
            interval: interval.unwrap_or(Duration::from_mins(1)),
            temporality: temporality.unwrap_or_default(),
            histograms: histograms.unwrap_or_default(),
            bounds: Bounds::default(),
            pauses: Pauses::default(),
            linger: Duration::from_secs(1),
            remarks: sources.remarks,
        })
    }
}

/// The environment, and what was wrong in it.
struct Sources<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    remarks: Vec<String>,
}

impl Sources<'_> {
    /// An empty variable is one that is not set.
    fn read(&self, name: &str) -> Option<(String, String)> {
        let value = (self.variable)(name)?.trim().to_owned();
        (!value.is_empty()).then(|| (name.to_owned(), value))
    }

    /// The first variable that is set and makes sense.
    fn parsed<T>(
        &mut self,
        names: &[impl AsRef<str>],
        parse: impl Fn(&str) -> Result<T, &'static str>,
    ) -> Option<T> {
        for (name, value) in names.iter().filter_map(|name| self.read(name.as_ref())).collect::<Vec<_>>() {
            match parse(&value) {
                Ok(parsed) => return Some(parsed),
                Err(wanted) => self.remarks.push(format!("{name} is {value:?} and is left out: {wanted}")),
            }
        }
        None
    }

    /// The file's value, else the environment's.
    fn chosen<T>(
        &mut self,
        key: &'static str,
        wish: Option<&str>,
        names: &[impl AsRef<str>],
        parse: impl Fn(&str) -> Result<T, &'static str>,
    ) -> Result<Option<T>, SettingsError> {
        match wish {
            Some(value) => parse(value).map(Some).map_err(|wanted| SettingsError::Value {
                key,
                value: value.to_owned(),
                wanted,
            }),
            None => Ok(self.parsed(names, parse)),
        }
    }

    fn target(&mut self, wishes: &Wishes, signal: Signal) -> Result<Target, SettingsError> {
        let names = |what: &str| {
            [
                format!("OTEL_EXPORTER_OTLP_{}_{what}", signal.in_variables()),
                format!("OTEL_EXPORTER_OTLP_{what}"),
            ]
        };
        let protocol = self
            .chosen("protocol", wishes.protocol.as_deref(), &names("PROTOCOL"), values::protocol)?
            .unwrap_or(Protocol::Http);
        let endpoint = self.endpoint(wishes, signal, protocol, &names("ENDPOINT"))?;
        let compression = self
            .chosen("compression", wishes.compression.as_deref(), &names("COMPRESSION"), values::compression)?
            .unwrap_or(Compression::None);
        let timeout = wishes.timeout.or_else(|| self.parsed(&names("TIMEOUT"), values::milliseconds));
        let file = |wish: &Option<PathBuf>, what: &str| {
            let set =
                names(what).iter().find_map(|name| self.read(name)).map(|(_, path)| PathBuf::from(path));
            wish.clone().or(set)
        };
        let tls = Tls {
            certificate: file(&wishes.certificate, "CERTIFICATE"),
            client_certificate: file(&wishes.client_certificate, "CLIENT_CERTIFICATE"),
            client_key: file(&wishes.client_key, "CLIENT_KEY"),
        };
        match (&tls.client_certificate, &tls.client_key) {
            (Some(_), None) => {
                return Err(SettingsError::HalfIdentity {
                    present: "client_certificate",
                    missing: "client_key",
                });
            }
            (None, Some(_)) => {
                return Err(SettingsError::HalfIdentity {
                    present: "client_key",
                    missing: "client_certificate",
                });
            }
            _ => {}
        }
        Ok(Target {
            protocol,
            endpoint,
            headers: self.headers(wishes, &names("HEADERS"))?,
            compression,
            timeout: timeout.unwrap_or(Duration::from_secs(10)),
            tls,
        })
    }

    /// A signal's own variable is the whole address; everything else is where the receiver is, and the signal's
    /// path is added for HTTP.
    fn endpoint(
        &mut self,
        wishes: &Wishes,
        signal: Signal,
        protocol: Protocol,
        names: &[String; 2],
    ) -> Result<Uri, SettingsError> {
        let insecure = [
            format!("OTEL_EXPORTER_OTLP_{}_INSECURE", signal.in_variables()),
            "OTEL_EXPORTER_OTLP_INSECURE".to_owned(),
        ];
        let insecure = self.parsed(&insecure, values::truth).unwrap_or(false);
        let path = format!("v1/{}", signal.as_str());
        let base = |value: &str| values::endpoint(value, protocol, insecure, Some(&path));
        let whole = |value: &str| values::endpoint(value, protocol, insecure, None);
        if let Some(endpoint) = self.chosen("endpoint", wishes.endpoint.as_deref(), &[""; 0], base)? {
            return Ok(endpoint);
        }
        if let Some(endpoint) = self.parsed(&names[..1], whole) {
            return Ok(endpoint);
        }
        if let Some(endpoint) = self.parsed(&names[1..], base) {
            return Ok(endpoint);
        }
        let default = match protocol {
            Protocol::Grpc => "http://localhost:4317",
            Protocol::Http => "http://localhost:4318",
        };
        base(default).map_err(|wanted| SettingsError::Value {
            key: "endpoint",
            value: default.to_owned(),
            wanted,
        })
    }

    /// All of them together: the file's over the signal's over the general ones.
    fn headers(&mut self, wishes: &Wishes, names: &[String; 2]) -> Result<HeaderMap, SettingsError> {
        let mut headers = HeaderMap::new();
        for (name, list) in names.iter().rev().filter_map(|name| self.read(name)).collect::<Vec<_>>() {
            match values::pairs(&list).and_then(|pairs| {
                pairs
                    .into_iter()
                    .map(|(key, value)| header(&key, &value).ok_or("a header's name or value"))
                    .collect::<Result<Vec<_>, _>>()
            }) {
                Ok(pairs) => headers.extend(pairs.into_iter().map(|(key, value)| (Some(key), value))),
                // The value may be a secret.
                Err(wanted) => {
                    self.remarks.push(format!("{name} is left out: it has something that is not {wanted}"));
                }
            }
        }
        for (key, value) in &wishes.headers {
            let (key, value) =
                header(key, value).ok_or_else(|| SettingsError::Header { name: key.clone() })?;
            headers.insert(key, value);
        }
        Ok(headers)
    }
}

fn header(key: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let mut value = HeaderValue::from_str(value).ok()?;
    value.set_sensitive(true);
    Some((HeaderName::from_bytes(key.as_bytes()).ok()?, value))
}

/// `OTEL_RESOURCE_ATTRIBUTES` with `OTEL_SERVICE_NAME` over it, and what was wrong with the former: it is then left out whole.
pub fn resource_attributes(
    variable: &dyn Fn(&str) -> Option<String>,
) -> (BTreeMap<String, String>, Option<String>) {
    const LIST: &str = "OTEL_RESOURCE_ATTRIBUTES";
    let listed = variable(LIST).unwrap_or_default();
    let (mut attributes, remark) = match values::pairs(&listed) {
        Ok(pairs) => (pairs.into_iter().collect(), None),
        Err(wanted) => {
            let remark = format!("{LIST} is left out: it has something that is not {wanted}");
            (BTreeMap::new(), Some(remark))
        }
    };
    if let Some(name) = variable("OTEL_SERVICE_NAME").filter(|name| !name.is_empty()) {
        attributes.insert("service.name".to_owned(), name);
    }
    (attributes, remark)
}

#[cfg(test)]
mod tests;
