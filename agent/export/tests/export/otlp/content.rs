//! Owns what arrives of the metrics: every row of the catalogue, with its names, times and numbers.

use std::collections::{BTreeMap, BTreeSet};

use cotenant_export::otlp::Wishes;
use cotenant_export::{Kind, METRICS, Value, rows};
use opentelemetry_proto::tonic::metrics::v1::{AggregationTemporality, metric, number_data_point};

use super::sink::{Sink, attribute};
use super::{Node, exported, settings, stop, until};
use crate::fixture;

async fn sent(protocol: &str, compression: &str) -> Sink {
    let sink = Sink::default();
    let address = if protocol == "grpc" { sink.grpc().await } else { sink.http().await };
    let wishes = Wishes {
        compression: Some(compression.to_owned()),
        headers: [("x-scope-orgid".to_owned(), "gpu-team".to_owned())].into(),
        ..Wishes::default()
    };
    let sender = Node::new().start(&settings(protocol, address, wishes));
    let account = sender.account();
    until("the metrics", || exported(&account, "metrics") > 0).await;
    stop(sender).await;
    sink
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_arrives_by_each_way_and_compression() {
    for protocol in ["grpc", "http/protobuf"] {
        for compression in ["none", "gzip", "zstd"] {
            let sink = sent(protocol, compression).await;
            let way = format!("{protocol} {compression}");
            let names: BTreeSet<String> = sink.metrics().into_iter().map(|metric| metric.name).collect();
            for metric in METRICS {
                assert!(names.contains(metric.otel), "{way}: {}", metric.otel);
            }
            assert_eq!(sink.header("x-scope-orgid").as_deref(), Some("gpu-team"), "{way}");
            let header = if protocol == "grpc" { "grpc-encoding" } else { "content-encoding" };
            let said = sink.header(header);
            assert_eq!(said.as_deref().unwrap_or("none"), compression, "{way}");
            if protocol == "grpc" {
                // What a receiver of Go answers in, and an answer that cannot be read would count as a refusal.
                let accepted = sink.header("grpc-accept-encoding").unwrap_or_default();
                assert!(accepted.contains("gzip") && accepted.contains("zstd"), "{way}: {accepted}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c113_what_arrives_is_what_the_rows_say() {
    let sink = sent("grpc", "gzip").await;
    let metrics = sink.metrics();
    let mut wanted: BTreeMap<&str, usize> = BTreeMap::new();
    for row in rows(&fixture::view()) {
        *wanted.entry(row.metric.otel).or_default() += 1;
    }
    for metric in &metrics {
        let declared = METRICS.iter().find(|known| known.otel == metric.name).unwrap();
        assert_eq!(metric.unit, declared.unit.ucum, "{}", metric.name);
        let keys: BTreeSet<&str> = declared.attributes.iter().map(|attribute| attribute.otel).collect();
        let (count, attributes, times) = match metric.data.as_ref().unwrap() {
            metric::Data::Gauge(gauge) => {
                assert!(matches!(declared.kind, Kind::Gauge | Kind::Info), "{}", metric.name);
                let points = &gauge.data_points;
                let sets: Vec<_> = points.iter().map(|point| &point.attributes).collect();
                (points.len(), sets, Vec::new())
            }
            metric::Data::Sum(sum) => {
                assert_eq!(sum.is_monotonic, declared.kind == Kind::Counter, "{}", metric.name);
                assert_eq!(sum.aggregation_temporality(), AggregationTemporality::Cumulative);
                let points = &sum.data_points;
                for point in points {
                    if let Some(number_data_point::Value::AsDouble(value)) = point.value {
                        assert!(value.is_finite(), "{}", metric.name);
                    }
                }
                let sets: Vec<_> = points.iter().map(|point| &point.attributes).collect();
                let times = points.iter().map(|point| (point.start_time_unix_nano, point.time_unix_nano));
                (points.len(), sets, times.collect())
            }
            metric::Data::Histogram(histogram) => {
                assert_eq!(declared.kind, Kind::Histogram, "{}", metric.name);
                let points = &histogram.data_points;
                for point in points {
                    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                    assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count);
                    assert!(point.explicit_bounds.is_sorted_by(|one, two| one < two));
                }
                let sets: Vec<_> = points.iter().map(|point| &point.attributes).collect();
                let times = points.iter().map(|point| (point.start_time_unix_nano, point.time_unix_nano));
                (points.len(), sets, times.collect())
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(Some(&count), wanted.get(metric.name.as_str()), "points of {}", metric.name);
        for set in attributes {
            let of: Vec<&str> = set.iter().map(|pair| pair.key.as_str()).collect();
            assert!(of.iter().all(|key| keys.contains(key)), "{}: {of:?}", metric.name);
            assert_eq!(of.iter().collect::<BTreeSet<_>>().len(), of.len(), "twice in {}", metric.name);
        }
        let began_before = matches!(declared.otel, "hw.energy" | "hw.errors");
        for (start, end) in times {
            let wanted = if began_before { 1_796_000_000 } else { 1_795_990_000 };
            assert_eq!((start, end), (wanted * 1_000_000_000, 1_796_000_000_000_000_000), "{}", metric.name);
        }
    }
    assert_eq!(metrics.len(), wanted.len());
    let live = metrics.iter().find(|metric| metric.name == "cotenant.gpu.memory.live").unwrap();
    let metric::Data::Sum(live) = live.data.as_ref().unwrap() else { panic!("not a sum") };
    let of_train = live.data_points.iter().find(|point| {
        attribute(&point.attributes, "k8s.pod.name").as_deref() == Some("train-0")
            && attribute(&point.attributes, "cotenant.gpu.memory.kind").as_deref() == Some("device")
    });
    assert_eq!(
        of_train.unwrap().value,
        Some(number_data_point::Value::AsInt(i64::try_from(100 * fixture::MIB).unwrap()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn exponential_histograms_have_the_counts_sums_and_attributes_of_the_rows() {
    for (protocol, temporality) in [("grpc", "cumulative"), ("http/protobuf", "delta")] {
        let sink = Sink::default();
        let address = if protocol == "grpc" { sink.grpc().await } else { sink.http().await };
        let wishes = Wishes {
            histograms: Some("exponential".to_owned()),
            temporality: Some(temporality.to_owned()),
            ..Wishes::default()
        };
        let sender = Node::new().start(&settings(protocol, address, wishes));
        let account = sender.account();
        until("the metrics", || exported(&account, "metrics") > 0).await;
        stop(sender).await;
        let metrics = sink.metrics();
        let mut families = 0;
        for declared in METRICS.iter().filter(|metric| metric.kind == Kind::Histogram) {
            let found = metrics.iter().find(|metric| metric.name == declared.otel).unwrap();
            let histogram = match found.data.as_ref().unwrap() {
                metric::Data::ExponentialHistogram(histogram) => histogram,
                // NVML's bounds are tenfold.
                metric::Data::Histogram(_) if declared.otel == "cotenant.agent.nvml.call.duration" => {
                    continue;
                }
                other => panic!("{}: {other:?}", declared.otel),
            };
            families += 1;
            assert_eq!(
                histogram.aggregation_temporality().as_str_name().to_lowercase(),
                format!("aggregation_temporality_{temporality}")
            );
            let wanted: Vec<_> =
                rows(&fixture::view()).into_iter().filter(|row| row.metric.id == declared.id).collect();
            assert_eq!(histogram.data_points.len(), wanted.len());
            for (point, row) in histogram.data_points.iter().zip(wanted) {
                let Value::Distribution(distribution) = row.value else { panic!("{row:?}") };
                let positive = point.positive.as_ref().unwrap();
                assert_eq!(point.count, distribution.count());
                assert_eq!(point.count, point.zero_count + positive.bucket_counts.iter().sum::<u64>());
                assert_eq!(point.sum, Some(distribution.sum_seconds));
                assert_eq!(point.attributes.len(), row.labels.len());
                // Each bound is within 7 % of the page's.
                for (place, count) in
                    positive.bucket_counts.iter().enumerate().filter(|(_, count)| **count > 0)
                {
                    let upper = f64::from(positive.offset + i32::try_from(place).unwrap() + 1).exp2();
                    let (bound, there) =
                        *distribution.buckets.iter().find(|(bound, _)| *bound >= upper).unwrap();
                    assert_eq!(*count, there, "up to {upper}");
                    assert!(
                        bound.is_infinite() || (0.93..=1.0).contains(&(upper / bound)),
                        "{upper} for {bound}"
                    );
                }
            }
        }
        assert_eq!(families, 2, "calls and waits");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_resource_is_the_agent_on_its_node_and_no_tenant() {
    let resource = sent("http/protobuf", "none").await.resource();
    for (key, value) in [
        ("service.name", "cotenant"),
        ("service.version", "0.1.0"),
        ("host.name", "gpu-07"),
        ("host.id", "4c4c4544"),
        ("k8s.node.name", "gpu-07.cluster"),
    ] {
        assert_eq!(attribute(&resource.attributes, key).as_deref(), Some(value), "{key}");
    }
    assert!(attribute(&resource.attributes, "service.instance.id").is_some());
    assert_eq!(attribute(&resource.attributes, "k8s.pod.name"), None);
}

/// 512 tenants make more than a receiver takes in one message.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_node_is_cut_into_messages_that_receivers_take() {
    let node = Node::new();
    node.change(|view| {
        let tenants = (0..512).map(|n| fixture::tenant(fixture::pod(&format!("train-{n}")), &[0, 1], n + 1));
        view.tenants = tenants.collect();
    });
    let wanted = rows(&node.0.lock().unwrap()).len() as u64;
    let sink = Sink::default();
    let address = sink.grpc().await;
    let hour = Wishes { interval: Some(std::time::Duration::from_hours(1)), ..Wishes::default() };
    let mut settings = settings("grpc", address, hour);
    settings.bounds.bytes = 64 << 20;
    let begun = std::time::Instant::now();
    let sender = node.start(&settings);
    let account = sender.account();
    until("all points", || exported(&account, "metrics") == wanted).await;
    stop(sender).await;
    let sizes: Vec<usize> = {
        let received = sink.received.lock().unwrap();
        received.metrics.iter().map(prost::Message::encoded_len).collect()
    };
    eprintln!("{wanted} points in {} messages, {sizes:?} bytes, {:?}", sizes.len(), begun.elapsed());
    assert!(sizes.len() > 1 && sizes.iter().all(|size| *size < 4 << 20), "{sizes:?}");
}

#[test]
fn values_of_rows_are_finite() {
    for row in rows(&fixture::view()) {
        assert!(!matches!(row.value, Value::Float(value) if !value.is_finite()), "{}", row.metric.otel);
    }
}
