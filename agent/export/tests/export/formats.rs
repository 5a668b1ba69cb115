//! Owns what each format must look like, and that the three say the same.
//! Refuses readers of its own where a real one exists; see `readers`.

use std::collections::{BTreeMap, BTreeSet};

use cotenant_export::{Format, METRICS, encode, metrics_page, otlp::Exemplars};
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::{MetricFamily, MetricType};
use prost::Message as _;

use crate::fixture::{page, published, samples, view};

#[test]
fn openmetrics_has_units_and_its_end() {
    let text = page(&view(), Format::OpenMetrics);
    assert!(text.ends_with("# EOF\n"));
    for line in [
        "# TYPE cotenant_gpu_memory_live_bytes gauge",
        "# UNIT cotenant_gpu_memory_live_bytes bytes",
        "# TYPE cotenant_gpu_memory_allocated_bytes counter",
        "# TYPE hw_energy_joules counter",
        "# UNIT hw_gpu_utilization_ratio ratio",
        "# TYPE cotenant_gpu info",
        "# TYPE cotenant_gpu_memory_operation_duration_seconds histogram",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}");
    }
    assert!(text.contains("\nhw_energy_joules_total{hw_id=\"GPU-00000000-"));
    assert!(!text.contains("_total_total") && !text.contains("_info_info"));
}

#[test]
fn families_are_sorted_and_the_order_is_stable() {
    let text = page(&view(), Format::Text);
    assert_eq!(text, page(&view(), Format::Text));
    let families: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(families.is_sorted(), "{families:?}");
    let declared: Vec<&str> = METRICS.iter().map(|metric| metric.prometheus).collect();
    assert_eq!(families, declared, "the fixture gives every metric a sample");
}

#[test]
fn text_and_openmetrics_have_the_same_series() {
    let series = |format| -> BTreeSet<String> {
        let text = page(&view(), format);
        samples(text.trim_end_matches("# EOF\n")).into_keys().map(|series| sorted_labels(&series)).collect()
    };
    let (text, open) = (series(Format::Text), series(Format::OpenMetrics));
    assert_eq!(text, open);
}

fn sorted_labels(series: &str) -> String {
    let Some((name, labels)) = series.split_once('{') else { return series.to_owned() };
    let mut labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
    labels.sort_unstable();
    format!("{name}{{{}}}", labels.join(","))
}

#[test]
fn histograms_are_cumulative_and_agree_with_their_count() {
    let samples = samples(&page(&view(), Format::Text));
    let name = "cotenant_agent_nvml_call_duration_seconds";
    let function = "function=\"nvmlDeviceGetMemoryInfo_v2\"";
    let bucket = |le: &str| samples[&format!("{name}_bucket{{{function},le=\"{le}\"}}")];
    assert_eq!(
        ["1e-05", "0.0001", "0.001", "0.01", "0.1", "1.0", "+Inf"].map(bucket),
        [1.0, 4.0, 5.0, 6.0, 6.0, 6.0, 6.0]
    );
    assert_eq!(samples[&format!("{name}_count{{{function}}}")], 6.0);
    assert_eq!(samples[&format!("{name}_sum{{{function}}}")], 0.0015);

    for (series, count) in samples.iter().filter(|(series, _)| series.contains("_duration_seconds_count")) {
        let infinite = series.replace("_count{", "_bucket{").replace('}', ",le=\"+Inf\"}");
        assert_eq!(samples[&infinite], *count, "{series}");
    }
}

#[test]
fn protobuf_decodes_to_the_same_families() {
    let bytes = encode(published(&view()), Format::Protobuf, &Exemplars::default()).unwrap();
    let mut rest = bytes.as_slice();
    let mut families = BTreeMap::new();
    while !rest.is_empty() {
        let family = MetricFamily::decode_length_delimited(&mut rest).unwrap();
        families.insert(family.name.clone(), family);
    }
    let declared: Vec<&str> = METRICS.iter().map(|metric| metric.prometheus).collect();
    assert_eq!(families.keys().collect::<Vec<_>>(), declared);

    let energy = &families["hw_energy_joules_total"];
    assert_eq!((energy.r#type(), energy.unit.as_str()), (MetricType::Counter, "joules"));
    assert_eq!(energy.metric[0].counter.as_ref().unwrap().value, 123_456.789);
    let residual = &families["cotenant_gpu_memory_residual_bytes"];
    assert!(residual.metric.iter().any(|metric| metric.gauge.as_ref().unwrap().value == -4096.0));
    let duration = &families["cotenant_gpu_memory_operation_duration_seconds"].metric[0];
    let histogram = duration.histogram.as_ref().unwrap();
    assert_eq!(histogram.bucket.len(), 27);
    assert_eq!(histogram.bucket[0].upper_bound, 256e-9);
    assert_eq!(histogram.bucket[26].cumulative_count, histogram.sample_count);
    assert!(histogram.positive_span.is_empty(), "no native buckets: their bounds would be wrong");
}

#[test]
fn large_counters_are_exact_in_text() {
    let mut view = view();
    view.agent.losses[0].1 = (1 << 53) + 1;
    let text = page(&view, Format::Text);
    assert!(text.contains("cotenant_agent_losses_total{reason=\"thread_map_full\"} 9007199254740993\n"));
}

#[test]
fn the_committed_page_is_the_catalogue() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dashboards/METRICS.md");
    let made = metrics_page();
    if std::env::var_os("COTENANT_BLESS").is_some() {
        std::fs::write(path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == made,
        "dashboards/METRICS.md is not what the catalogue says; run COTENANT_BLESS=1 cargo test -p cotenant-export"
    );
}

#[test]
fn protobuf_and_text_say_the_same() {
    let text = samples(&page(&view(), Format::Text));
    let bytes = encode(published(&view()), Format::Protobuf, &Exemplars::default()).unwrap();
    let mut rest = bytes.as_slice();
    let mut compared = 0;
    while !rest.is_empty() {
        let family = MetricFamily::decode_length_delimited(&mut rest).unwrap();
        for metric in &family.metric {
            let labels: Vec<String> =
                metric.label.iter().map(|label| format!("{}=\"{}\"", label.name, label.value)).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let values = match (&metric.gauge, &metric.counter, &metric.histogram) {
                (Some(gauge), None, None) => vec![("", gauge.value)],
                (None, Some(counter), None) => vec![("", counter.value)],
                (None, None, Some(histogram)) => {
                    vec![("_sum", histogram.sample_sum), ("_count", histogram.sample_count as f64)]
                }
                _ => panic!("{metric:?}"),
            };
            for (suffix, value) in values {
                assert_eq!(text[&format!("{}{suffix}{labels}", family.name)], value);
                compared += 1;
            }
        }
    }
    assert_eq!(compared, text.keys().filter(|series| !series.contains("_bucket{")).count());
}
