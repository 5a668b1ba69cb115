//! Owns how a page is read for people: units, rates between two scrapes, quantiles of a histogram.
//! Refuses precision that the histogram has not: a quantile is the bound that it lies below.

use std::collections::BTreeMap;

use cotenant_model::Operation;
use cotenant_node::scrape::Scrape;

pub(crate) const LIVE: &str = "cotenant_gpu_memory_live_bytes";
pub(crate) const ALLOCATED: &str = "cotenant_gpu_memory_allocated_bytes_total";
pub(crate) const OPERATIONS: &str = "cotenant_gpu_memory_operations_total";
pub(crate) const FAILURES: &str = "cotenant_gpu_memory_failures_total";
pub(crate) const PROCESS: &str = "cotenant_gpu_memory_process_bytes";
const BUCKETS: &str = "cotenant_gpu_memory_operation_duration_seconds_bucket";

const ALLOCATES: &[Operation] = &[
    Operation::MemAlloc,
    Operation::MemAllocPitch,
    Operation::MemAllocManaged,
    Operation::MemAllocAsync,
    Operation::MemAllocFromPoolAsync,
    Operation::MemCreate,
    Operation::MemHostAlloc,
    Operation::MemAllocHost,
    Operation::MemHostRegister,
];

/// Seconds since NVML's last poll ended.
pub(crate) fn nvml_age(scrape: &Scrape) -> Option<f64> {
    scrape.get("cotenant_agent_nvml_age_seconds", &[])
}

/// Allocating calls so far, failed ones included.
pub(crate) fn allocations(scrape: &Scrape, tenant: &str) -> f64 {
    let of = |operation: &Operation| {
        scrape.sum(OPERATIONS, &[("tenant", tenant), ("operation", operation.as_str())])
    };
    ALLOCATES.iter().map(of).sum()
}

/// Calls below each bound, by bound in nanoseconds.
pub(crate) type Buckets = BTreeMap<u64, f64>;

pub(crate) fn buckets(scrape: &Scrape, tenant: &str, operation: Operation) -> Buckets {
    let mut all = Buckets::new();
    for sample in scrape.of(BUCKETS) {
        if sample.label("tenant") == tenant && sample.label("operation") == operation.as_str() {
            let bound = sample.label("le").parse::<f64>().unwrap_or(f64::INFINITY);
            *all.entry(nanoseconds(bound)).or_default() += sample.value;
        }
    }
    all
}

/// The last bucket, which has no bound, is `u64::MAX`.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bounds are 256 ns and up; the cast saturates"
)]
fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

pub(crate) fn since(now: &Buckets, before: &Buckets) -> Buckets {
    now.iter().map(|(bound, count)| (*bound, count - before.get(bound).copied().unwrap_or(0.0))).collect()
}

/// The bound below which this share of the calls ended. `None`: there was no call.
pub(crate) fn quantile(buckets: &Buckets, share: f64) -> Option<u64> {
    let total = *buckets.values().last()?;
    (total > 0.0)
        .then(|| buckets.iter().find(|(_, count)| **count >= share * total).map(|(bound, _)| *bound))?
}

pub(crate) fn time(bound: Option<u64>) -> String {
    match bound {
        None => "-".to_owned(),
        Some(u64::MAX) => "> 8 s".to_owned(),
        Some(bound) if bound < 1_000 => format!("< {bound} ns"),
        Some(bound) if bound < 1_000_000 => format!("< {:.1} us", bound as f64 / 1e3),
        Some(bound) if bound < 1_000_000_000 => format!("< {:.1} ms", bound as f64 / 1e6),
        Some(bound) => format!("< {:.1} s", bound as f64 / 1e9),
    }
}

pub(crate) fn bytes(bytes: f64) -> String {
    // An empty sum of floats is -0.
    let bytes = bytes + 0.0;
    let (divisor, unit) = match bytes.abs() {
        small if small < 1024.0 => return format!("{bytes} B"),
        kib if kib < 1024.0 * 1024.0 => (1 << 10, "KiB"),
        mib if mib < 1024.0 * 1024.0 * 1024.0 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    format!("{:.1} {unit}", bytes / f64::from(divisor))
}

pub(crate) fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "absent".to_owned(), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_bound_that_it_lies_below() {
        let before = Buckets::from([(256, 0.0), (512, 5.0), (u64::MAX, 5.0)]);
        let now = Buckets::from([(256, 98.0), (512, 104.0), (u64::MAX, 105.0)]);
        let between = since(&now, &before);
        assert_eq!((quantile(&between, 0.5), quantile(&between, 0.99)), (Some(256), Some(512)));
        assert_eq!(quantile(&between, 1.0), Some(u64::MAX));
        assert_eq!(quantile(&since(&now, &now), 0.5), None);
        assert_eq!(quantile(&Buckets::new(), 0.5), None);
    }

    #[test]
    fn units_are_binary_and_times_are_bounds() {
        assert_eq!(
            (bytes(512.0), bytes(1536.0 * 1024.0 * 1024.0)),
            ("512 B".to_owned(), "1.5 GiB".to_owned())
        );
        assert_eq!((time(None), time(Some(131_072))), ("-".to_owned(), "< 131.1 us".to_owned()));
        assert_eq!(nanoseconds(f64::INFINITY), u64::MAX);
    }
}
