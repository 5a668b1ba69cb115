//! Owns the form of metrics on the wire: points to OTLP messages, cut to a size that receivers take.
//! Refuses exponential histograms: the kernel's bounds are no powers of two of a second (see the journal).

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum, metric, number_data_point,
};

use super::exemplars::Exemplars;
use super::resource::{Resource, text};
use super::streams::{Point, Temporality};
use crate::{Distribution, Kind, Row, Value};

/// Receivers take 4 MiB by default; half of that leaves room for an estimate that is off.
const MAX_BYTES: usize = 2 << 20;

/// Cuts points into lists whose messages stay small enough.
pub(super) fn cut(mut points: &[Point]) -> Vec<&[Point]> {
    let mut lists = Vec::new();
    while !points.is_empty() {
        let mut bytes = 0;
        let mut fits = |point: &Point| {
            bytes += size(&point.row);
            bytes <= MAX_BYTES
        };
        let (list, rest) =
            points.split_at(points.iter().map(&mut fits).take_while(|fits| *fits).count().max(1));
        lists.push(list);
        points = rest;
    }
    lists
}

/// About what a point takes: keys of attributes are shorter than 40 bytes, a bucket is 16.
fn size(row: &Row) -> usize {
    let labels: usize = row.labels.iter().map(|(_, value)| value.len() + 48).sum();
    let value = match &row.value {
        Value::Distribution(distribution) => 32 + 16 * distribution.buckets.len(),
        _ => 16,
    };
    32 + labels + value
}

/// One message. Points come sorted by family.
pub(super) fn request(
    points: &[Point],
    temporality: Temporality,
    resource: &Resource,
    exemplars: &Exemplars,
) -> ExportMetricsServiceRequest {
    let families = points.chunk_by(|one, two| one.row.metric.id == two.row.metric.id);
    let scope = ScopeMetrics {
        scope: Some(resource.scope()),
        metrics: families.filter_map(|family| metric(family, temporality, exemplars)).collect(),
        ..ScopeMetrics::default()
    };
    let resource_metrics = vec![ResourceMetrics {
        resource: Some(resource.message()),
        scope_metrics: vec![scope],
        ..ResourceMetrics::default()
    }];
    ExportMetricsServiceRequest { resource_metrics }
}

fn metric(family: &[Point], temporality: Temporality, exemplars: &Exemplars) -> Option<Metric> {
    let declared = family.first()?.row.metric;
    let of_growth = match temporality {
        Temporality::Cumulative => AggregationTemporality::Cumulative,
        Temporality::Delta => AggregationTemporality::Delta,
    };
    let numbers = |starts| family.iter().filter_map(|point| number(point, starts)).collect();
    let data = match declared.kind {
        Kind::Gauge | Kind::Info => metric::Data::Gauge(Gauge { data_points: numbers(false) }),
        Kind::UpDownCounter => metric::Data::Sum(Sum {
            data_points: numbers(true),
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
            is_monotonic: false,
        }),
        Kind::Counter => metric::Data::Sum(Sum {
            data_points: numbers(true),
            aggregation_temporality: of_growth.into(),
            is_monotonic: true,
        }),
        Kind::Histogram => metric::Data::Histogram(Histogram {
            data_points: family.iter().filter_map(|point| distribution(point, exemplars)).collect(),
            aggregation_temporality: of_growth.into(),
        }),
    };
    Some(Metric {
        name: declared.otel.to_owned(),
        description: declared.help.to_owned(),
        unit: declared.unit.ucum.to_owned(),
        data: Some(data),
        ..Metric::default()
    })
}

/// Labels under their OpenTelemetry names.
fn attributes(row: &Row) -> Vec<KeyValue> {
    let name = |label: &str| {
        let known = row.metric.attributes.iter().find(|attribute| attribute.prometheus == label);
        known.map(|attribute| attribute.otel)
    };
    row.labels.iter().map(|(label, value)| text(name(label).unwrap_or(label), value)).collect()
}

fn number(point: &Point, starts: bool) -> Option<NumberDataPoint> {
    let double = number_data_point::Value::AsDouble;
    let value = match point.row.value {
        Value::Unsigned(value) => {
            i64::try_from(value).map_or(double(value as f64), number_data_point::Value::AsInt)
        }
        Value::Signed(value) => number_data_point::Value::AsInt(value),
        Value::Float(value) => double(value),
        Value::Distribution(_) => return None,
    };
    Some(NumberDataPoint {
        attributes: attributes(&point.row),
        // A gauge has no start: nothing was added up.
        start_time_unix_nano: if starts { point.start_ns } else { 0 },
        time_unix_nano: point.at_ns,
        value: Some(value),
        ..NumberDataPoint::default()
    })
}

/// Explicit bounds. The last one, infinity, is not written.
fn distribution(point: &Point, exemplars: &Exemplars) -> Option<HistogramDataPoint> {
    let Value::Distribution(Distribution { sum_seconds, buckets }) = &point.row.value else { return None };
    let bounds = buckets.iter().map(|(bound, _)| *bound).filter(|bound| bound.is_finite()).collect();
    Some(HistogramDataPoint {
        attributes: attributes(&point.row),
        start_time_unix_nano: point.start_ns,
        time_unix_nano: point.at_ns,
        count: buckets.iter().map(|(_, count)| count).sum(),
        sum: Some(*sum_seconds),
        bucket_counts: buckets.iter().map(|(_, count)| *count).collect(),
        explicit_bounds: bounds,
        exemplars: exemplars.of(point),
        ..HistogramDataPoint::default()
    })
}
