//! Owns how single values are written: addresses, lists of pairs, durations, names of things.
//! Refuses to know where a value came from.

use std::time::Duration;

use http::Uri;

use super::{Compression, Protocol};
use crate::otlp::{Histograms, Temporality};

type Parsed<T> = Result<T, &'static str>;

pub(super) fn protocol(value: &str) -> Parsed<Protocol> {
    match value {
        "grpc" => Ok(Protocol::Grpc),
        "http/protobuf" => Ok(Protocol::Http),
        _ => Err("allowed are \"grpc\" and \"http/protobuf\""),
    }
}

pub(super) fn compression(value: &str) -> Parsed<Compression> {
    match value {
        "none" => Ok(Compression::None),
        "gzip" => Ok(Compression::Gzip),
        "zstd" => Ok(Compression::Zstd),
        _ => Err("allowed are \"none\", \"gzip\" and \"zstd\""),
    }
}

/// `lowmemory` asks for delta only where that saves an SDK memory; here it saves none.
pub(super) fn temporality(value: &str) -> Parsed<Temporality> {
    match value.to_ascii_lowercase().as_str() {
        "cumulative" | "lowmemory" => Ok(Temporality::Cumulative),
        "delta" => Ok(Temporality::Delta),
        _ => Err("allowed are \"cumulative\" and \"delta\""),
    }
}

/// What OpenTelemetry calls the default aggregation of histograms.
pub(super) fn histograms(value: &str) -> Parsed<Histograms> {
    match value.to_ascii_lowercase().as_str() {
        "explicit" | "explicit_bucket_histogram" => Ok(Histograms::Explicit),
        "exponential" | "base2_exponential_bucket_histogram" => Ok(Histograms::Exponential),
        _ => Err("allowed are \"explicit\" and \"exponential\""),
    }
}

/// Whether a signal is sent, by the list of its exporters.
pub(super) fn exporters(value: &str) -> Parsed<bool> {
    let mut names = value.split(',').map(str::trim);
    match value {
        "none" => Ok(false),
        _ if names.any(|name| name == "otlp") => Ok(true),
        _ => Err("allowed are \"otlp\" and \"none\""),
    }
}

/// Figures change once a second.
pub(super) fn interval(value: &str) -> Parsed<Duration> {
    let interval = milliseconds(value).ok().filter(|interval| *interval >= Duration::from_secs(1));
    interval.ok_or("a number of milliseconds from 1000 on is wanted")
}

pub(super) fn truth(value: &str) -> Parsed<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err("allowed are \"true\" and \"false\""),
    }
}

pub(super) fn milliseconds(value: &str) -> Parsed<Duration> {
    let number = value.parse().ok().filter(|number| *number > 0);
    number.map(Duration::from_millis).ok_or("a number of milliseconds above 0 is wanted")
}

/// The address of a receiver. `path` is added for HTTP when it is given.
pub(super) fn endpoint(value: &str, protocol: Protocol, insecure: bool, path: Option<&str>) -> Parsed<Uri> {
    const WANTED: &str = "an address such as http://collector:4318 or https://collector:4317 is wanted";
    let address = match (value.contains("://"), protocol) {
        (true, _) => value.to_owned(),
        (false, Protocol::Grpc) => format!("{}://{value}", if insecure { "http" } else { "https" }),
        (false, Protocol::Http) => return Err(WANTED),
    };
    let address = match (protocol, path) {
        (Protocol::Http, Some(path)) => format!("{}/{path}", address.trim_end_matches('/')),
        _ => address,
    };
    let uri: Uri = address.parse().map_err(|_| WANTED)?;
    let known = matches!(uri.scheme_str(), Some("http" | "https"));
    if known && uri.host().is_some_and(|host| !host.is_empty()) { Ok(uri) } else { Err(WANTED) }
}

/// `key=value,key=value` with percent-encoding, as OpenTelemetry writes headers and attributes.
pub(super) fn pairs(list: &str) -> Parsed<Vec<(String, String)>> {
    let entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries
        .map(|entry| {
            let (key, value) = entry.split_once('=').ok_or("key=value")?;
            let decoded = |text: &str| decoded(text.trim()).ok_or("percent-encoded UTF-8");
            Ok((decoded(key)?, decoded(value)?))
        })
        .collect()
}

fn decoded(value: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let pair = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&pair).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}
