//! Owns `dashboards/METRICS.md`: the catalogue as a page for people.
//! Refuses words that the catalogue does not have, apart from the page's introduction.

use std::fmt::Write as _;

use crate::{Attribute, METRICS, Metric};

const INTRODUCTION: &str = "\
# Metrics

Made from `agent/export/src/catalogue/table.rs`; `COTENANT_BLESS=1 cargo test -p cotenant-export` rewrites it.

- **Unknown is never zero.** A figure that could not be read has no series; `cotenant_gpu_reading_absent` says which
  one and why, and `cotenant_agent_nvml_last_collect_success` is 0 when the reading should have worked.
- **Per GPU**, the sum of `cotenant_gpu_memory_process_bytes` over tenants, plus
  `cotenant_gpu_memory_unattributed_bytes`, plus `cotenant_gpu_memory_reserved_bytes` where there is one, is
  `hw_gpu_memory_usage_bytes`.
- **Bounds.** T is the number of tenants: the cap (512 by default) and `other`, into which the tenants past the cap
  are folded. A folded tenant stays folded while it lives, so that no counter falls. G is the number of GPUs and MIG
  instances, 64 at most. A tenant that goes takes its series with it.
- **Label values** have at most 128 characters. One that had to be cut or cleaned ends in `~` and 8 hexadecimal digits
  of a hash, so that two names never become one. No label holds a PID, an address or free text, but for `label_value`,
  which has what pods' owners wrote where an operator asks for it. No label is named
  `pod`, `namespace`, `container`, `node`, `job` or `instance`, which a scrape adds itself.
- **Precision.** Prometheus keeps 64-bit floats: byte counts above 2^53 (8 PiB) lose their last digits there.
- **Histograms** have the kernel's bounds, powers of two in nanoseconds from 256 ns to 8.6 s, written in seconds. A
  native histogram in seconds cannot have these bounds, so all formats carry classic buckets. OTLP has exponential ones by
  choice (`otlp.histograms`), with each bound 6.9 % lower.
- **Stability.** *stable*: changes only with a major version. *development*: may change; for `hw_*` because
  OpenTelemetry's hardware conventions may.
";

/// The whole page.
pub fn metrics_page() -> String {
    let mut page = INTRODUCTION.to_owned();
    let groups = [
        ("Tenants and their memory", "cotenant_gpu_"),
        ("What happened", "cotenant_incidents_"),
        ("Host memory of tenants", "cotenant_memory_"),
        ("Memory of the host", "cotenant_host_"),
        ("Kills for memory", "cotenant_oom_"),
        ("What pods are labelled", "cotenant_tenant_"),
        ("Devices, by OpenTelemetry's conventions", "hw_"),
        ("The agent itself", "cotenant_agent_"),
    ];
    for (title, prefix) in groups {
        let metrics: Vec<&Metric> =
            METRICS.iter().filter(|metric| metric.prometheus.starts_with(prefix)).collect();
        let _ =
            write!(page, "\n## {title}\n\n| Prometheus | type | unit | OpenTelemetry |\n|---|---|---|---|\n");
        for metric in &metrics {
            let name = metric.prometheus;
            let _ = writeln!(
                page,
                "| [`{name}`](#{name}) | {} | {} | `{}` |",
                metric.kind.prometheus(),
                metric.unit.prometheus.unwrap_or("-"),
                metric.otel,
            );
        }
        for metric in metrics {
            describe(&mut page, metric);
        }
    }
    page
}

fn describe(page: &mut String, metric: &Metric) {
    let _ = write!(
        page,
        "\n### {}\n\n{}\n\nOpenTelemetry: `{}`, {}, unit `{}`. Series: {}. Stability: {}.\n",
        metric.prometheus,
        metric.help,
        metric.otel,
        metric.kind.as_str(),
        metric.unit.ucum,
        metric.bound.replace(" x ", " × "),
        metric.stability.as_str(),
    );
    if !metric.attributes.is_empty() {
        page.push_str("\n| label | attribute | values |\n|---|---|---|\n");
        for attribute in metric.attributes {
            describe_attribute(page, attribute);
        }
    }
}

fn describe_attribute(page: &mut String, attribute: &Attribute) {
    let Attribute { otel, prometheus, values, absent } = attribute;
    let absent = absent.map(|when| format!(" (left out when {when})")).unwrap_or_default();
    let _ = writeln!(page, "| `{prometheus}` | `{otel}` | {values}{absent} |");
}
