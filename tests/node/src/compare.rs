//! Owns the comparison of what the agent published with what the driver recorded.
//! Refuses tolerance: a byte or a call off is a difference.

use std::collections::BTreeMap;

use cotenant_model::{CudaError, GpuId, MemoryKind, Operation};
use cotenant_sim_state::{
    Node,
    truth::{Balance, ProcessTruth},
};

use crate::scrape::Scrape;

/// What one tenant's processes did, by the driver's record.
#[derive(Clone, Debug, Default)]
pub struct TenantTruth {
    pub balances: BTreeMap<(Option<String>, MemoryKind), Balance>,
    pub calls: BTreeMap<Operation, u64>,
    pub failures: BTreeMap<(Operation, &'static str), u64>,
    pub processes: u32,
}

impl TenantTruth {
    pub fn add(&mut self, node: &Node, process: &ProcessTruth) {
        self.processes += 1;
        for ((gpu, kind), balance) in &process.balances {
            let gpu = gpu.map(|gpu| GpuId::from_uuid(node.uuid(gpu.into())).as_str().to_owned());
            let sum = self.balances.entry((gpu, *kind)).or_default();
            sum.live += balance.live;
            sum.peak += balance.peak;
            sum.allocated += balance.allocated;
            sum.freed += balance.freed;
            sum.allocations += balance.allocations;
            sum.frees += balance.frees;
        }
        for (operation, count) in &process.calls {
            *self.calls.entry(*operation).or_default() += count;
        }
        for ((operation, code), count) in &process.failures {
            let error = CudaError(*code);
            if error.is_failure() {
                *self.failures.entry((*operation, error.name())).or_default() += count;
            }
        }
    }

    pub fn total_calls(&self) -> u64 {
        self.calls.values().sum()
    }
}

/// Every figure of `tenant` that differs, in words. Empty: equal to the byte and to the call.
pub fn differences(scrape: &Scrape, tenant: &str, truth: &TenantTruth) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |what: String, published: f64, true_value: u64| {
        if published.to_bits() != (true_value as f64).to_bits() && (published != 0.0 || true_value != 0) {
            found.push(format!("{tenant}: {what}: published {published}, true {true_value}"));
        }
    };
    for ((gpu, kind), balance) in &truth.balances {
        let labels = [
            ("tenant", tenant),
            ("memory_kind", kind.as_str()),
            ("hw_id", gpu.as_deref().unwrap_or_default()),
        ];
        let place = format!("{} on {}", kind.as_str(), gpu.as_deref().unwrap_or("host"));
        let sum = |name: &str| scrape.sum(name, &labels);
        check(format!("live {place}"), sum("cotenant_gpu_memory_live_bytes"), balance.live);
        check(
            format!("allocated {place}"),
            sum("cotenant_gpu_memory_allocated_bytes_total"),
            balance.allocated,
        );
        check(format!("freed {place}"), sum("cotenant_gpu_memory_freed_bytes_total"), balance.freed);
        // The peak of several processes' sum is not the sum of their peaks.
        if truth.processes == 1 {
            check(format!("peak {place}"), sum("cotenant_gpu_memory_live_peak_bytes"), balance.peak);
        }
    }
    // Nothing is published that is not true either.
    let of_tenant = [("tenant", tenant)];
    let balances = || truth.balances.values();
    check(
        "live, everywhere".to_owned(),
        scrape.sum("cotenant_gpu_memory_live_bytes", &of_tenant),
        balances().map(|balance| balance.live).sum(),
    );
    check(
        "allocated, everywhere".to_owned(),
        scrape.sum("cotenant_gpu_memory_allocated_bytes_total", &of_tenant),
        balances().map(|balance| balance.allocated).sum(),
    );
    for operation in Operation::ALL {
        let labels = [("tenant", tenant), ("operation", operation.as_str())];
        let calls = truth.calls.get(operation).copied().unwrap_or(0);
        let name = operation.as_str();
        check(format!("calls of {name}"), scrape.sum("cotenant_gpu_memory_operations_total", &labels), calls);
        check(
            format!("timed calls of {name}"),
            scrape.sum("cotenant_gpu_memory_operation_duration_seconds_count", &labels),
            calls,
        );
    }
    for ((operation, error), count) in &truth.failures {
        let labels = [("tenant", tenant), ("operation", operation.as_str()), ("error_type", *error)];
        let published = scrape.sum("cotenant_gpu_memory_failures_total", &labels);
        check(format!("{error} of {}", operation.as_str()), published, *count);
    }
    check(
        "failures".to_owned(),
        scrape.sum("cotenant_gpu_memory_failures_total", &of_tenant),
        truth.failures.values().sum(),
    );
    found
}

/// R2: reserved, attributed and unattributed add up to used, for every GPU of which all of them are published.
pub fn balance(scrape: &Scrape) -> Vec<String> {
    let mut found = Vec::new();
    for used in scrape.of("hw_gpu_memory_usage_bytes") {
        let gpu = [("hw_id", used.label("hw_id"))];
        let (Some(reserved), Some(unattributed)) = (
            scrape.get("cotenant_gpu_memory_reserved_bytes", &gpu),
            scrape.get("cotenant_gpu_memory_unattributed_bytes", &gpu),
        ) else {
            continue;
        };
        let attributed = scrape.sum("cotenant_gpu_memory_process_bytes", &gpu);
        if (attributed + unattributed + reserved).to_bits() != used.value.to_bits() {
            found.push(format!(
                "{}: {attributed} attributed + {unattributed} unattributed + {reserved} reserved is not {}",
                used.label("hw_id"),
                used.value
            ));
        }
    }
    found
}
