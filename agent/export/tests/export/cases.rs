//! Owns the cases and invariants of the metrics page: C10, C27, C113, C114, R1 to R5, and the catalogue's own law.
//! Refuses to look inside: assertions are on rows and pages.

use std::collections::{BTreeMap, BTreeSet};

use cotenant_export::{Format, Kind, METRICS, Row, Value, rows};
use cotenant_model::device::DeviceMemory;
use cotenant_model::grant::{GrantsView, Standing};
use cotenant_model::idle::HoldersView;
use cotenant_model::sample::GpuRef;
use cotenant_model::view::View;
use cotenant_model::{Absence, CudaError, GpuId, MemoryKind, Operation, Tenant, TenantKind};

use crate::fixture::{MIB, gpu, gpu_id, node, page, pod, samples, tenant, view};

fn of<'a>(rows: &'a [Row], name: &str) -> Vec<&'a Row> {
    rows.iter().filter(|row| row.metric.prometheus == name).collect()
}

fn number(row: &Row) -> f64 {
    match row.value {
        Value::Unsigned(value) => value as f64,
        Value::Signed(value) => value as f64,
        Value::Float(value) => value,
        Value::Distribution(_) => panic!("{} is a histogram", row.metric.prometheus),
    }
}

fn label<'a>(row: &'a Row, name: &str) -> Option<&'a str> {
    row.labels.iter().find(|(label, _)| *label == name).map(|(_, value)| value.as_str())
}

#[test]
fn catalogue_keeps_its_own_law() {
    let names: Vec<&str> = METRICS.iter().map(|metric| metric.prometheus).collect();
    assert!(names.is_sorted(), "sorted by Prometheus name: {names:#?}");
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    assert_eq!(METRICS.iter().map(|metric| metric.otel).collect::<BTreeSet<_>>().len(), names.len());
    for (place, metric) in METRICS.iter().enumerate() {
        let name = metric.prometheus;
        assert_eq!(metric.id as usize, place);
        assert_eq!(name.ends_with("_total"), metric.kind == Kind::Counter, "{name}");
        assert_eq!(name.ends_with("_info"), metric.kind == Kind::Info, "{name}");
        let suffix = match metric.kind {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            _ => "",
        };
        let unit = metric.unit.prometheus.map(|unit| format!("_{unit}")).unwrap_or_default();
        assert_eq!(format!("{}{unit}{suffix}", metric.stem()), name, "the unit is the suffix of the name");
        assert!(metric.help.is_ascii() && !metric.help.contains(['\\', '"', '\n']), "{name}");
        assert!(metric.help.ends_with(['.', ')']), "{name}");
    }
}

#[test]
fn c10_no_label_collides_with_what_a_scrape_adds() {
    const TAKEN: [&str; 9] =
        ["pod", "namespace", "container", "node", "job", "instance", "service", "endpoint", "le"];
    for attribute in METRICS.iter().flat_map(|metric| metric.attributes) {
        let name = attribute.prometheus;
        assert!(
            !TAKEN.contains(&name) && !name.starts_with("exported_") && !name.starts_with("__"),
            "{name}"
        );
    }
}

#[test]
fn rows_have_only_declared_labels_in_order() {
    for row in rows(&view()) {
        let declared: Vec<&str> =
            row.metric.attributes.iter().map(|attribute| attribute.prometheus).collect();
        let mut rest = declared.iter();
        for (name, _) in &row.labels {
            assert!(rest.any(|known| known == name), "{}: {name} in {declared:?}", row.metric.prometheus);
        }
        for attribute in row.metric.attributes.iter().filter(|attribute| attribute.absent.is_none()) {
            assert!(
                label(&row, attribute.prometheus).is_some(),
                "{} lacks {}",
                row.metric.prometheus,
                attribute.otel
            );
        }
    }
}

#[test]
fn c27_no_pid_label() {
    let mut view = view();
    for gpu in &mut view.gpus {
        gpu.sample.index = 31_337;
    }
    let text = page(&view, Format::Text);
    let names: BTreeSet<&str> =
        METRICS.iter().flat_map(|metric| metric.attributes).map(|attribute| attribute.prometheus).collect();
    assert!(
        names.iter().all(|name| !name.contains("pid") && !name.contains("index") && !name.contains("path"))
    );
    for secret in ["pid=", "/proc/", "4242", "libcuda.so", "0x", "31337", "no kprobes"] {
        assert!(!text.lines().any(|line| !line.starts_with('#') && line.contains(secret)), "{secret}");
    }
}

#[test]
fn c113_no_label_equals_a_sample_value_and_ratios_are_ratios() {
    for row in rows(&view()) {
        for (name, value) in &row.labels {
            // An Xid is a name that NVIDIA wrote as a number.
            let number = *name != "xid" && value.parse::<f64>().is_ok();
            assert!(!number, "{} {name}={value}", row.metric.prometheus);
        }
        if row.metric.unit.prometheus == Some("ratio") {
            assert!((0.0..=1.0).contains(&number(&row)), "{row:?}");
        }
    }
    let mut broken = view();
    broken.gpus[0].sample.utilization = Ok(42.0);
    broken.tenants[0].utilization.insert(gpu_id(0), 1.2);
    let rows = rows(&broken);
    assert_eq!(of(&rows, "hw_gpu_utilization_ratio").len(), 1);
    assert!(of(&rows, "cotenant_gpu_tenant_utilization_ratio").iter().all(|row| number(row) <= 1.0));
}

/// What the OpenTelemetry specification makes of a name for Prometheus, and with it every store that takes OTLP.
fn translated(metric: &cotenant_export::Metric) -> String {
    let mut name = metric.otel.replace('.', "_");
    let unit = match metric.unit.ucum {
        "By" => "bytes",
        "By/s" => "bytes_per_second",
        "s" => "seconds",
        "W" => "watts",
        "J" => "joules",
        "Cel" => "celsius",
        "1" if metric.kind == Kind::Gauge || metric.kind == Kind::Info => "ratio",
        unit => {
            assert!(unit == "1" || unit.starts_with('{'), "{unit}");
            ""
        }
    };
    let suffix = if metric.kind == Kind::Counter { "total" } else { "" };
    for part in [unit, suffix].into_iter().filter(|part| !part.is_empty()) {
        if !name.ends_with(part) {
            name = format!("{name}_{part}");
        }
    }
    name
}

#[test]
fn c113_a_name_is_the_same_by_otlp_and_on_the_page() {
    for metric in METRICS {
        assert_eq!(translated(metric), metric.prometheus, "{} in {}", metric.otel, metric.unit.ucum);
    }
}

#[test]
fn c113_two_encodes_are_monotone() {
    let before = view();
    let mut after = view();
    for tenant in &mut after.tenants {
        tenant.memory.values_mut().for_each(|totals| totals.allocated += MIB);
        tenant.operations.values_mut().for_each(|calls| *calls += 1);
        tenant.latency.values_mut().for_each(|histogram| histogram.buckets[3] += 1);
        tenant.memory.values_mut().for_each(|totals| totals.live = 0);
    }
    assert_monotone(&before, &after);
}

/// Every cumulative series of `before` is in `after`, and is not smaller.
pub(crate) fn assert_monotone(before: &View, after: &View) {
    let [before, after] = [before, after].map(|view| samples(&page(view, Format::Text)));
    let mut counters = 0;
    for (series, value) in before {
        let name = series.split('{').next().unwrap();
        if ["_total", "_bucket", "_count", "_sum"].iter().any(|suffix| name.ends_with(suffix)) {
            counters += 1;
            assert!(after.get(&series).is_some_and(|now| *now >= value), "{series} fell");
        }
    }
    assert!(counters > 100, "{counters} counters");
}

#[test]
fn c114_a_failed_query_is_absent_and_not_idle() {
    let mut lost = view();
    lost.gpus[0].sample.utilization = Err(Absence::Failed);
    lost.gpus[0].sample.memory = Err(Absence::Failed);
    lost.gpus[0].unattributed = Err(Absence::Failed);
    let rows = rows(&lost);
    for name in
        ["hw_gpu_utilization_ratio", "hw_gpu_memory_usage_bytes", "cotenant_gpu_memory_unattributed_bytes"]
    {
        let left: Vec<_> =
            of(&rows, name).iter().map(|row| label(row, "hw_id").unwrap().to_owned()).collect();
        assert_eq!(left, [gpu_id(1).as_str()], "{name}");
    }
    assert_eq!(number(of(&rows, "cotenant_agent_nvml_last_collect_success")[0]), 0.0);
    let failed: BTreeSet<&str> = of(&rows, "cotenant_gpu_reading_absent")
        .iter()
        .filter(|row| label(row, "reason") == Some("failed"))
        .map(|row| label(row, "reading").unwrap())
        .collect();
    assert_eq!(failed, BTreeSet::from(["memory", "unattributed", "utilization"]));
}

#[test]
fn c114_success_is_one_when_the_hardware_simply_lacks_a_figure() {
    let rows = rows(&view());
    assert_eq!(number(of(&rows, "cotenant_agent_nvml_last_collect_success")[0]), 1.0);
    assert_eq!(of(&rows, "hw_errors_total").len(), 3, "one GPU does not count corrected errors");
}

#[test]
fn c114_without_nvml_there_are_no_gpus_and_it_says_so() {
    let mut view = node(Vec::new(), vec![tenant(pod("a"), &[], 1)]);
    view.agent.nvml = Err(Absence::LibraryMissing);
    view.agent.nvml_age_seconds = None;
    let rows = rows(&view);
    assert!(rows.iter().all(|row| !row.metric.prometheus.starts_with("hw_")));
    let absent = of(&rows, "cotenant_gpu_reading_absent");
    assert_eq!(
        absent[0].labels,
        [("reading", "library".to_owned()), ("reason", "library_missing".to_owned())]
    );
    assert_eq!(number(of(&rows, "cotenant_agent_nvml_last_collect_success")[0]), 0.0);
    assert!(of(&rows, "cotenant_agent_nvml_age_seconds").is_empty());
    assert!(!of(&rows, "cotenant_gpu_memory_live_bytes").is_empty(), "the ledger needs no NVML");
}

#[test]
fn r1_an_absent_figure_gives_no_sample_anywhere() {
    let mut view = node(vec![gpu(0)], vec![tenant(pod("a"), &[0], 3)]);
    let sample = &mut view.gpus[0].sample;
    let why = Absence::NotAvailable;
    sample.memory = Err(why);
    sample.processes = Err(why);
    sample.process_utilization = Err(why);
    sample.utilization = Err(why);
    sample.memory_bandwidth_utilization = Err(why);
    sample.power_watts = Err(why);
    sample.energy_joules = Ok(f64::NAN);
    sample.temperature_celsius = Err(why);
    sample.pcie_receive_bytes_per_second = Err(why);
    sample.pcie_transmit_bytes_per_second = Err(why);
    sample.clocks_event_reasons = Err(why);
    sample.ecc_corrected = Err(why);
    sample.ecc_uncorrected = Err(why);
    sample.mig_enabled = Err(why);
    view.gpus[0].reserved = Err(why);
    view.gpus[0].unattributed = Err(why);
    view.tenants[0].process_bytes.insert(gpu_id(0), Err(why));
    view.tenants[0].utilization.clear();
    view.agent.probe_cost_seconds = None;
    let rows = rows(&view);
    for metric in METRICS {
        let unknown = metric.prometheus.starts_with("hw_")
            || [
                "cotenant_gpu_memory_process_bytes",
                "cotenant_gpu_memory_unattributed_bytes",
                "cotenant_gpu_memory_reserved_bytes",
                "cotenant_gpu_memory_bandwidth_utilization_ratio",
                "cotenant_gpu_tenant_utilization_ratio",
                "cotenant_gpu_pcie_throughput_bytes_per_second",
                "cotenant_gpu_clocks_event_active",
                "cotenant_gpu_mig_enabled",
                "cotenant_agent_probe_calibration_seconds",
                "cotenant_agent_probe_cost_seconds_total",
            ]
            .contains(&metric.prometheus);
        assert!(!unknown || of(&rows, metric.prometheus).is_empty(), "{}", metric.prometheus);
    }
    assert_eq!(of(&rows, "cotenant_gpu_reading_absent").len(), 16);
}

#[test]
fn r2_tenants_unattributed_and_reserve_are_the_used_bytes() {
    for reserved in [Some(645 * MIB), None] {
        let used = 5_000 * MIB + if reserved.is_none() { 645 * MIB } else { 0 };
        let mut one = gpu(0);
        one.sample.memory =
            Ok(DeviceMemory { total: 143_771 * MIB, used, free: 143_771 * MIB - 5_645 * MIB, reserved });
        one.reserved = reserved.ok_or(Absence::SymbolMissing);
        one.unattributed = Ok(used - 300 * MIB);
        let rows = rows(&node(vec![one], vec![tenant(pod("a"), &[0], 100), tenant(pod("b"), &[0], 200)]));
        let sum = |name: &str| of(&rows, name).iter().map(|row| number(row)).sum::<f64>();
        let parts = sum("cotenant_gpu_memory_process_bytes")
            + sum("cotenant_gpu_memory_unattributed_bytes")
            + sum("cotenant_gpu_memory_reserved_bytes");
        assert_eq!(parts, sum("hw_gpu_memory_usage_bytes"));
        assert_eq!(
            sum("hw_gpu_memory_usage_bytes"),
            (5_645 * MIB) as f64,
            "one meaning with either NVML call"
        );
    }
}

#[test]
fn r3_one_series_per_label_set_whatever_the_view_repeats() {
    let mut view = view();
    view.tenants.push(tenant(pod("train-0"), &[0], 1));
    view.gpus.push(gpu(0));
    view.agent.nvml_calls.push(view.agent.nvml_calls[0].clone());
    let one = &mut view.tenants[1];
    let unknown = GpuRef::Known(GpuId::from_nvml("unknown"));
    one.memory.insert((unknown, MemoryKind::Device), one.memory[&(GpuRef::Unknown, MemoryKind::Device)]);
    for code in [77_777, 88_888] {
        one.failures.insert((GpuRef::Unknown, Operation::MemCreate, CudaError(code)), 4);
    }
    let samples = samples(&page(&view, Format::Text));
    let at = |series: &str| samples.iter().find(|(known, _)| known.contains(series)).map(|(_, value)| *value);
    assert_eq!(at("operation=\"cuMemCreate\",error_type=\"other\"}"), Some(8.0));
    let live = format!("k8s_container_name=\"main\",hw_id=\"{}\",memory_kind=\"device\"}}", gpu_id(0));
    assert_eq!(
        at(&format!(
            "cotenant_gpu_memory_live_bytes{{tenant=\"pod:ml/train-0\",tenant_kind=\"pod\",k8s_namespace_name=\"ml\",k8s_pod_name=\"train-0\",{live}"
        )),
        Some((101 * MIB) as f64)
    );
    let limit = format!("hw_gpu_memory_limit_bytes{{hw_id=\"{}\"}}", gpu_id(0));
    assert_eq!(at(&limit), Some((143_771 * MIB) as f64), "a GPU listed twice is not twice as big");
}

#[test]
fn r3_gpu_labels_of_the_ledger() {
    let rows = rows(&view());
    let mut gpus: BTreeMap<Option<&str>, usize> = BTreeMap::new();
    for row in of(&rows, "cotenant_gpu_memory_live_bytes") {
        assert_eq!(label(row, "hw_id").is_none(), label(row, "memory_kind") == Some("host_pinned"));
        *gpus.entry(label(row, "hw_id")).or_default() += 1;
    }
    assert_eq!(gpus[&None], 2);
    assert_eq!(gpus[&Some("unknown")], 2);
    assert_eq!(gpus[&Some(gpu_id(1).as_str())], 2);
}

#[test]
fn r5_series_go_with_the_tenant() {
    let mut view = view();
    view.tenants.remove(0);
    view.blame.clear();
    view.events.kills.clear();
    view.grants = GrantsView::default();
    view.holders = HoldersView::default();
    assert!(!page(&view, Format::Text).contains("train-0"));
}

#[test]
fn only_pods_have_kubernetes_labels() {
    let mut view = view();
    view.tenants[1].tenant.namespace = Some("leak".to_owned());
    for row in rows(&view).iter().filter(|row| label(row, "tenant").is_some()) {
        let pod = label(row, "tenant_kind") == Some("pod");
        let declared = |name: &&str| row.metric.attributes.iter().any(|one| one.prometheus == *name);
        // A request is the whole pod's.
        for name in ["k8s_namespace_name", "k8s_pod_name", "k8s_container_name"].into_iter().filter(declared)
        {
            assert_eq!(label(row, name).is_some(), pod, "{row:?}");
        }
    }
}

#[test]
fn exit_codes_of_every_program_are_no_failures() {
    let rows = rows(&view());
    let failures = of(&rows, "cotenant_gpu_memory_failures_total");
    assert!(!failures.is_empty());
    assert!(failures.iter().all(|row| label(row, "error_type") == Some("CUDA_ERROR_OUT_OF_MEMORY")));
}

#[test]
fn unknown_throttle_bits_are_other() {
    let rows = rows(&view());
    let active: BTreeSet<_> = of(&rows, "cotenant_gpu_clocks_event_active")
        .iter()
        .filter(|row| number(row) == 1.0)
        .map(|row| label(row, "reason").unwrap())
        .collect();
    assert_eq!(active, BTreeSet::from(["other", "sw_power_cap"]));
}

/// Names that try to break out of a label, to be long, to look like another, or to break a terminal.
pub(crate) fn hostile() -> View {
    let names = [
        "quote\"} 1\nhw_power_watts{hw_id=\"x".to_owned(),
        "back\\slash".to_owned(),
        "bell\u{7}null\0escape\u{1b}[31m".to_owned(),
        "right\u{202e}to\u{200b}left\u{feff}".to_owned(),
        "line\u{2028}separator\r\n".to_owned(),
        "x".repeat(5_000) + "1",
        "x".repeat(5_000) + "2",
        "日本語".repeat(60),
        String::new(),
    ];
    let tenants = names.iter().map(|name| tenant(Tenant::plain(TenantKind::Docker, name), &[0], 1)).collect();
    let mut view = node(vec![gpu(0)], tenants);
    view.tenants[0].tenant = pod("a\"b\\c\nd");
    "NVIDIA \"H200\"\n".clone_into(&mut view.gpus[0].sample.name);
    view
}

#[test]
fn hostile_names_stay_apart_bounded_and_inside_their_quotes() {
    let view = hostile();
    let rows = rows(&view);
    for (name, value) in rows.iter().flat_map(|row| &row.labels) {
        assert!(value.chars().count() <= 128, "{name}={value}");
        assert!(!value.chars().any(char::is_control), "{name}={value:?}");
    }
    let of_memory = rows.iter().filter(|row| row.metric.prometheus.starts_with("cotenant_gpu_memory"));
    let tenants: BTreeSet<_> = of_memory.filter_map(|row| label(row, "tenant")).collect();
    assert_eq!(tenants.len(), view.tenants.len());
    let text = page(&view, Format::Text);
    assert_eq!(text.matches("\nhw_power_watts").count(), 1);
    samples(&text);
}

#[test]
fn c02_c06_c14_one_word_for_a_grant_and_no_zero_for_what_was_not_read() {
    let mut view = view();
    let row = view.grants.standings[0].clone();
    let with = |pod_name: &str, standing, bytes| {
        let mut row = row.clone();
        row.tenant = pod(pod_name);
        (row.standing, row.bytes) = (standing, bytes);
        row
    };
    view.grants.standings = vec![
        with("mismatched", Ok(Standing::Mismatch), None),
        with("without", Ok(Standing::UsedWithoutGrant), None),
        with("idle", Ok(Standing::GrantedIdle), Some(Ok(0))),
        with("blind", Err(Absence::Timeout), Some(Err(Absence::Timeout))),
    ];
    let rows = rows(&view);
    let state = |name: &str| -> Vec<&str> {
        let of_pod = of(&rows, "cotenant_gpu_grant_state");
        let of_pod = of_pod.into_iter().filter(|row| label(row, "k8s_pod_name") == Some(name));
        let (on, off): (Vec<_>, Vec<_>) = of_pod.partition(|row| number(row) == 1.0);
        assert!(off.is_empty() || (on.len() == 1 && off.len() == Standing::ALL.len() - 1));
        on.into_iter().filter_map(|row| label(row, "grant")).collect()
    };
    assert_eq!(state("mismatched"), ["allocation_mismatch"]);
    assert_eq!(state("without"), ["none"]);
    assert_eq!(state("idle"), ["idle"]);
    assert!(state("blind").is_empty());
    let bytes = |name: &str| -> Vec<f64> {
        let of_pod = of(&rows, "cotenant_gpu_memory_process_bytes");
        of_pod.into_iter().filter(|row| label(row, "k8s_pod_name") == Some(name)).map(number).collect()
    };
    assert_eq!((bytes("idle"), bytes("blind"), bytes("without")), (vec![0.0], vec![], vec![]));
    let absent: Vec<&Row> = of(&rows, "cotenant_gpu_reading_absent")
        .into_iter()
        .filter(|row| label(row, "k8s_pod_name") == Some("blind"))
        .collect();
    assert_eq!(absent.len(), 1);
    assert_eq!(
        (label(absent[0], "reading"), label(absent[0], "reason")),
        (Some("process_bytes"), Some("timeout"))
    );
}

#[test]
fn c23_idle_holders_are_summed_by_tenant_and_nobody_idle_is_a_zero() {
    let rows = rows(&view());
    let of_tenant = |name: &str, tenant: &str| -> Option<f64> {
        of(&rows, name).into_iter().find(|row| label(row, "tenant") == Some(tenant)).map(number)
    };
    assert_eq!(of_tenant("cotenant_gpu_idle_holder_bytes", "pod:ml/train-0"), Some((100 * MIB) as f64));
    assert_eq!(of_tenant("cotenant_gpu_idle_holders", "pod:ml/train-0"), Some(1.0));
    assert_eq!(of_tenant("cotenant_gpu_idle_holder_age_seconds", "pod:ml/train-0"), Some(900.5));
    assert_eq!(of_tenant("cotenant_gpu_idle_holders", "user:ada"), Some(0.0));
    assert_eq!(of_tenant("cotenant_gpu_idle_holder_age_seconds", "user:ada"), None);
}
