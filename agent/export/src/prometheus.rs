//! Owns the formats of `/metrics`: `OpenMetrics` 1.0, Prometheus text 0.0.4, Prometheus protobuf, and which one to send.
//! Refuses native histograms (see `Distribution`).

mod protobuf;

use std::fmt::{self, Write as _};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::otlp::Exemplars;
use crate::{Kind, Row, Value};

/// A format of `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    OpenMetrics,
    /// Version 0.0.4, for whoever does not say.
    Text,
    /// Delimited `io.prometheus.client.MetricFamily` messages.
    Protobuf,
}

impl Format {
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => prometheus_text::CONTENT_TYPE,
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("rows could not be written as text; a family in the catalogue is not expressible")]
    Text(#[source] fmt::Error),
    #[error("rows could not be written as protobuf")]
    Protobuf(#[source] prost::EncodeError),
}

/// Writes rows as [`crate::rows()`] sorted them. Text 0.0.4 has no exemplars.
pub fn encode(rows: Arc<[Row]>, format: Format, exemplars: &Exemplars) -> Result<Vec<u8>, EncodeError> {
    match format {
        Format::OpenMetrics => {
            let mut page = String::new();
            text::encode(&mut page, &registry(Arc::clone(&rows))).map_err(EncodeError::Text)?;
            Ok(finish_buckets(&page, marks(&rows, exemplars)).into_bytes())
        }
        Format::Text => {
            let mut page = String::new();
            prometheus_text::encode(&mut page, &registry(rows)).map_err(EncodeError::Text)?;
            Ok(with_whole_bounds(&page).into_bytes())
        }
        Format::Protobuf => protobuf::encode(&rows, exemplars).map_err(EncodeError::Protobuf),
    }
}

fn registry(rows: Arc<[Row]>) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(rows)));
    registry
}

/// The format for an `Accept` header: the highest `q` that this agent can serve, the first of equals, else text 0.0.4.
pub fn negotiate(accept: Option<&str>) -> Format {
    let mut best = (Format::Text, 0.0);
    for range in accept.unwrap_or_default().split(',') {
        let mut parts = range.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default().to_ascii_lowercase();
        let parameters: Vec<(String, &str)> = parts
            .filter_map(|part| part.split_once('='))
            .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().trim_matches('"')))
            .collect();
        let parameter =
            |name: &str| parameters.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        let quality = parameter("q").map_or(Some(1.0), |q| q.parse::<f32>().ok()).unwrap_or(0.0);
        if let Some(format) = served(&media, &parameter)
            && quality > best.1
        {
            best = (format, quality);
        }
    }
    best.0
}

/// What this agent has for one media range; a version that it does not speak is nothing.
fn served<'a>(media: &str, parameter: &impl Fn(&str) -> Option<&'a str>) -> Option<Format> {
    let is = |name: &str, value: &str| parameter(name).is_none_or(|given| given.eq_ignore_ascii_case(value));
    match media {
        "application/openmetrics-text" if is("version", "1.0.0") => Some(Format::OpenMetrics),
        "application/vnd.google.protobuf"
            if is("proto", "io.prometheus.client.MetricFamily") && is("encoding", "delimited") =>
        {
            Some(Format::Protobuf)
        }
        "text/plain" if is("version", "0.0.4") => Some(Format::Text),
        "text/*" | "*/*" => Some(Format::Text),
        _ => None,
    }
}

/// One immutable page of rows.
#[derive(Debug)]
struct Page(Arc<[Row]>);

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in self.0.chunk_by(|one, two| one.metric.id == two.metric.id) {
            let Some(Row { metric, .. }) = family.first() else { continue };
            let unit = metric.unit.prometheus.map(|unit| Unit::Other(unit.to_owned()));
            let kind = match metric.kind {
                Kind::Gauge | Kind::UpDownCounter => MetricType::Gauge,
                Kind::Counter => MetricType::Counter,
                Kind::Histogram => MetricType::Histogram,
                Kind::Info => MetricType::Info,
            };
            let mut page = encoder.encode_descriptor(metric.stem(), metric.help, unit.as_ref(), kind)?;
            for row in family {
                encode_row(&mut page, row)?;
            }
        }
        Ok(())
    }
}

fn encode_row(page: &mut MetricEncoder<'_>, row: &Row) -> Result<(), fmt::Error> {
    let labels = row.labels.as_slice();
    if row.metric.kind == Kind::Info {
        return page.encode_info(&labels);
    }
    let mut sample = page.encode_family(&labels)?;
    match (&row.value, row.metric.kind) {
        (Value::Unsigned(value), Kind::Counter) => sample.encode_counter::<NoLabelSet, _, f64>(value, None),
        (Value::Float(value), Kind::Counter) => sample.encode_counter::<NoLabelSet, _, f64>(value, None),
        (Value::Unsigned(value), Kind::Gauge | Kind::UpDownCounter) => sample.encode_gauge(value),
        (Value::Signed(value), Kind::Gauge | Kind::UpDownCounter) => sample.encode_gauge(value),
        (Value::Float(value), Kind::Gauge | Kind::UpDownCounter) => sample.encode_gauge(value),
        (Value::Distribution(value), Kind::Histogram) => {
            sample.encode_histogram::<NoLabelSet>(value.sum_seconds, value.count(), &value.buckets, None)
        }
        _ => Err(fmt::Error),
    }
}

/// What follows each bucket, in the order of the page.
fn marks<'a>(rows: &'a [Row], exemplars: &'a Exemplars) -> impl Iterator<Item = Option<String>> + 'a {
    rows.iter().filter_map(|row| Some((row, row.value.distribution()?))).flat_map(|(row, distribution)| {
        let marked = exemplars.mark(row).map(|mark| {
            let [(trace, trace_id), (span, span_id)] = mark.ids();
            let (seconds, at) = (mark.seconds, mark.at_unix);
            let text = format!(" # {{{trace}=\"{trace_id}\",{span}=\"{span_id}\"}} {seconds} {at:.3}");
            (distribution.bucket_of(mark.seconds), text)
        });
        (0..distribution.buckets.len()).map(move |bucket| {
            marked.as_ref().filter(|(marked, _)| *marked == bucket).map(|(_, text)| text.clone())
        })
    })
}

/// `OpenMetrics` with exemplars, which prometheus-client cannot take from a collector, and with Go's bounds.
///
/// prometheus-client 0.26 writes `le="2.56e-7"` and `le="0.000001024"` here, but Go's `2.56e-07` and `1.024e-06` in
/// text 0.0.4, and Prometheus 2 takes `le` from protobuf in Go's way too. Unchanged, a series would change its name
/// with the format of the scrape. In this format `le` is the first label of a bucket.
fn finish_buckets(page: &str, mut marks: impl Iterator<Item = Option<String>>) -> String {
    const OPENING: &str = "_bucket{le=\"";
    let mut text = String::with_capacity(page.len());
    for line in page.split_inclusive('\n') {
        let Some((name, rest)) = line.split_once(OPENING).filter(|_| !line.starts_with('#')) else {
            text.push_str(line);
            continue;
        };
        let (bound, rest) = rest.split_once('"').unwrap_or((rest, ""));
        text.push_str(name);
        text.push_str(OPENING);
        match bound.parse::<f64>() {
            // Go changes to exponents below 1e-4, with two digits at least.
            Ok(number) if number > 0.0 && number < 1e-4 => {
                let short = format!("{number:e}");
                let (digits, exponent) = short.split_once("e-").unwrap_or((&short, "0"));
                let _ = write!(text, "{digits}e-{exponent:0>2}");
            }
            _ => text.push_str(bound),
        }
        text.push('"');
        text.push_str(rest.trim_end_matches('\n'));
        text.push_str(&marks.next().flatten().unwrap_or_default());
        text.push('\n');
    }
    text
}

/// Text 0.0.4 with `le="1.0"` as in the other two formats, where the format's custom is `1`: Prometheus 2 takes it as it is,
/// Prometheus 3 makes it `1.0` itself. In this format `le` is the last label of a bucket.
fn with_whole_bounds(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    for line in page.split_inclusive('\n') {
        let bound =
            line.rsplit_once("le=\"").filter(|(name, _)| !line.starts_with('#') && name.contains("_bucket{"));
        match bound.and_then(|(name, rest)| Some((name, rest.split_once('"')?))) {
            Some((name, (bound, rest))) if bound.bytes().all(|byte| byte.is_ascii_digit()) => {
                let _ = write!(text, "{name}le=\"{bound}.0\"{rest}");
            }
            _ => text.push_str(line),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_spelled_the_same_in_every_format() {
        let page = "# HELP a_bucket{le=\"1e-7\"} x\na_bucket{le=\"0.000001024\",t=\"_bucket{le=\\\"1e-7\\\"\"} 3\n\
                    a_bucket{le=\"2.56e-7\"} 1\na_bucket{le=\"0.25\"} 1\na_bucket{le=\"+Inf\"} 1\n";
        let wanted = "# HELP a_bucket{le=\"1e-7\"} x\na_bucket{le=\"1.024e-06\",t=\"_bucket{le=\\\"1e-7\\\"\"} 3\n\
                      a_bucket{le=\"2.56e-07\"} 1\na_bucket{le=\"0.25\"} 1\na_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(finish_buckets(page, std::iter::empty()), wanted);
        let page = "a_bucket{t=\"le=\",le=\"1\"} 1\na_bucket{le=\"16\"} 1\na_bucket{le=\"+Inf\"} 1\na{t=\"le=\\\"1\"} 1\n";
        let wanted = "a_bucket{t=\"le=\",le=\"1.0\"} 1\na_bucket{le=\"16.0\"} 1\na_bucket{le=\"+Inf\"} 1\na{t=\"le=\\\"1\"} 1\n";
        assert_eq!(with_whole_bounds(page), wanted);
    }

    #[test]
    fn a_mark_stands_behind_its_bucket() {
        let page = "a_bucket{le=\"2.56e-7\"} 1\na 1\na_bucket{le=\"0.25\"} 1\n";
        let marks = [None, Some(" # {} 1 2".to_owned())].into_iter();
        let marked = finish_buckets(page, marks);
        assert_eq!(
            marked.lines().filter(|line| line.ends_with(" # {} 1 2")).collect::<Vec<_>>(),
            ["a_bucket{le=\"0.25\"} 1 # {} 1 2"]
        );
    }

    #[test]
    fn accept_headers_of_real_scrapers() {
        let prometheus_2 = "application/openmetrics-text;version=1.0.0;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let prometheus_protobuf = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
             encoding=delimited;q=0.6,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             text/plain;version=1.0.0;q=0.4,*/*;q=0.1";
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        for (accept, format) in [
            (None, Format::Text),
            (Some(""), Format::Text),
            (Some("*/*"), Format::Text),
            (Some(prometheus_2), Format::OpenMetrics),
            (Some(prometheus_protobuf), Format::Protobuf),
            (Some(browser), Format::Text),
            (Some("application/json"), Format::Text),
            (Some("application/openmetrics-text"), Format::OpenMetrics),
            (Some("application/openmetrics-text;version=2.0.0"), Format::Text),
            (
                Some("Application/OpenMetrics-Text; Version=\"1.0.0\"; Q=0.9, text/plain; q=0.8"),
                Format::OpenMetrics,
            ),
            (Some("application/openmetrics-text;q=0.1, text/plain;q=0.2"), Format::Text),
            (
                Some("application/openmetrics-text;q=0, application/vnd.google.protobuf;q=0.001"),
                Format::Protobuf,
            ),
            (Some("application/openmetrics-text;q=high"), Format::Text),
            (Some("application/vnd.google.protobuf;encoding=text"), Format::Text),
            (Some(";;=,,q=1"), Format::Text),
        ] {
            assert_eq!(negotiate(accept), format, "{accept:?}");
        }
    }
}
