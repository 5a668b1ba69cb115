//! Owns the form of metrics on the wire: points to OTLP messages, cut to a size that receivers take.
//! Refuses exponential histograms unless they are asked for: they move every bound (see the journal).

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, ExponentialHistogram, ExponentialHistogramDataPoint, Gauge, Histogram,
    HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum,
    exponential_histogram_data_point::Buckets, metric, number_data_point,
};

use super::exemplars::Exemplars;
use super::resource::{Resource, text};
use super::streams::{Point, Temporality};
use crate::{Distribution, Kind, Row, Value};

/// Receivers take 4 MiB by default; half of that leaves room for an estimate that is off.
const MAX_BYTES: usize = 2 << 20;

/// How histograms are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Histograms {
    /// With the bounds of `/metrics`.
    #[default]
    Explicit,
    /// In base 2 where bounds double; explicit where they do not.
    Exponential,
}

/// What a receiver wants of everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) temporality: Temporality,
    pub(super) histograms: Histograms,
}

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
    form: Form,
    resource: &Resource,
    exemplars: &Exemplars,
) -> ExportMetricsServiceRequest {
    let families = points.chunk_by(|one, two| one.row.metric.id == two.row.metric.id);
    let scope = ScopeMetrics {
        scope: Some(resource.scope()),
        metrics: families.filter_map(|family| metric(family, form, exemplars)).collect(),
        ..ScopeMetrics::default()
    };
    let resource_metrics = vec![ResourceMetrics {
        resource: Some(resource.message()),
        scope_metrics: vec![scope],
        ..ResourceMetrics::default()
    }];
    ExportMetricsServiceRequest { resource_metrics }
}

fn metric(family: &[Point], form: Form, exemplars: &Exemplars) -> Option<Metric> {
    let declared = family.first()?.row.metric;
    let of_growth = match form.temporality {
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
        Kind::Histogram => match exponentials(family, form, exemplars) {
            Some(data_points) => metric::Data::ExponentialHistogram(ExponentialHistogram {
                data_points,
                aggregation_temporality: of_growth.into(),
            }),
            None => metric::Data::Histogram(Histogram {
                data_points: family.iter().filter_map(|point| distribution(point, exemplars)).collect(),
                aggregation_temporality: of_growth.into(),
            }),
        },
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

/// One family has one form: `None` when a point of it cannot be written so, or nobody asked for it.
fn exponentials(
    family: &[Point],
    form: Form,
    exemplars: &Exemplars,
) -> Option<Vec<ExponentialHistogramDataPoint>> {
    if form.histograms == Histograms::Explicit {
        return None;
    }
    family.iter().map(|point| exponential(point, exemplars)).collect()
}

/// Buckets between powers of two of a second, each bound at the nearest one: the kernel's 2^k ns become 2^(k - 30) s, which is
/// 6.9 % less. The first bucket goes down to zero and is the one for zero; the last one, which has no end, is the next power's.
fn exponential(point: &Point, exemplars: &Exemplars) -> Option<ExponentialHistogramDataPoint> {
    let Value::Distribution(Distribution { sum_seconds, buckets }) = &point.row.value else { return None };
    let [(first, zero_count), positive @ ..] = buckets.as_slice() else { return None };
    let doubles = |pair: &[(f64, u64)]| (pair[1].0 / pair[0].0 - 2.0).abs() < 1e-9 || pair[1].0.is_infinite();
    if !first.is_normal() || !buckets.windows(2).all(doubles) {
        return None;
    }
    let power = first.log2().round();
    let empty = positive.iter().take_while(|(_, count)| *count == 0).count();
    let filled = positive.iter().rposition(|(_, count)| *count > 0).map_or(empty, |last| last + 1);
    #[allow(clippy::cast_possible_truncation, reason = "the exponent of a time in seconds")]
    let offset = (power as i32).checked_add(i32::try_from(empty).ok()?)?;
    Some(ExponentialHistogramDataPoint {
        attributes: attributes(&point.row),
        start_time_unix_nano: point.start_ns,
        time_unix_nano: point.at_ns,
        count: buckets.iter().map(|(_, count)| count).sum(),
        sum: Some(*sum_seconds),
        scale: 0,
        zero_count: *zero_count,
        zero_threshold: power.exp2(),
        positive: Some(Buckets {
            offset,
            bucket_counts: positive[empty..filled].iter().map(|(_, count)| *count).collect(),
        }),
        exemplars: exemplars.of(point),
        ..ExponentialHistogramDataPoint::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Id;

    fn point(buckets: Vec<(f64, u64)>) -> Point {
        let value = Value::Distribution(Distribution { sum_seconds: 1.5, buckets });
        let row = Row { metric: Id::OperationDuration.metric(), labels: Vec::new(), value };
        Point { row, start_ns: 1, at_ns: 2 }
    }

    #[test]
    fn bounds_that_double_become_powers_of_two_of_a_second() {
        let kernel = |k: i32| f64::from(k).exp2() / 1e9;
        let counts = [3, 0, 4, 0, 5, 0, 7];
        let mut buckets: Vec<_> = (28..).zip(counts).map(|(k, count)| (kernel(k), count)).collect();
        buckets.last_mut().unwrap().0 = f64::INFINITY;
        let written = exponential(&point(buckets), &Exemplars::default()).unwrap();
        assert_eq!((written.scale, written.count, written.sum), (0, 19, Some(1.5)));
        // 2^28 ns is 0.268 s, which is written as 0.25 s.
        assert_eq!((written.zero_count, written.zero_threshold), (3, 0.25));
        let positive = written.positive.unwrap();
        // The bucket to 2^30 ns is the one from 2^-1 to 2^0 s.
        assert_eq!((positive.offset, positive.bucket_counts), (-1, vec![4, 0, 5, 0, 7]));
    }

    #[test]
    fn an_empty_histogram_has_no_buckets_and_other_bounds_stay_as_they_are() {
        let empty = exponential(&point(vec![(0.5, 0), (1.0, 0), (f64::INFINITY, 0)]), &Exemplars::default());
        assert_eq!(empty.unwrap().positive.unwrap().bucket_counts, [0; 0]);
        let tenfold = point(vec![(1e-5, 1), (1e-4, 2), (f64::INFINITY, 0)]);
        let form = Form { temporality: Temporality::Cumulative, histograms: Histograms::Exponential };
        let metric = metric(&[tenfold], form, &Exemplars::default()).unwrap();
        assert!(matches!(metric.data, Some(metric::Data::Histogram(_))), "{metric:?}");
    }
}
