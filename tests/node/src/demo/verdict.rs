//! Owns the end of the demo: the last scrape against the driver's record, in files and in words.
//! Refuses to soften it: a figure that differs is listed and the demo fails.

use std::{collections::BTreeMap, fmt::Write as _};

use cotenant_model::Operation;
use cotenant_node::{
    compare::{self, TenantTruth},
    losses,
    scrape::Scrape,
};
use serde_json::{Value, json};

use crate::{
    GPUS,
    figures::{self, bytes, time},
};

const HEAD_START: &str = "Every program loads the driver's library 250 ms before its first call, as imports do: a cuInit that is under way \
     while a library gets its first probes is not counted.";
pub(crate) struct Verdict {
    pub(crate) figures: usize,
    /// In words; R2 and losses among them.
    pub(crate) differences: Vec<String>,
}

impl Verdict {
    pub(crate) fn of(scrape: &Scrape, truths: &BTreeMap<String, TenantTruth>) -> Self {
        let mut differences: Vec<String> =
            truths.iter().flat_map(|(tenant, truth)| compare::differences(scrape, tenant, truth)).collect();
        differences.extend(compare::balance(scrape));
        differences
            .extend(losses(scrape).iter().map(|(reason, count)| format!("{count} events lost: {reason}")));
        let gpus = scrape.of("cotenant_gpu_memory_unattributed_bytes").count();
        if gpus != GPUS {
            differences.push(format!("{gpus} of {GPUS} GPUs have a memory balance to check"));
        }
        let losses = scrape.of("cotenant_agent_losses_total").count();
        Self { figures: truths.values().map(compared).sum::<usize>() + gpus + losses, differences }
    }

    pub(crate) fn line(&self) -> String {
        format!("{} figures compared, {} differ", self.figures, self.differences.len())
    }
}

/// How many figures `compare::differences` checks: live, allocated and freed by place (the peak too for a tenant of
/// one process), two sums, calls and timed calls by operation, failures by error and their sum.
fn compared(truth: &TenantTruth) -> usize {
    let by_place = if truth.processes == 1 { 4 } else { 3 };
    truth.balances.len() * by_place + 2 + Operation::ALL.len() * 2 + truth.failures.len() + 1
}

/// The driver's record, by tenant.
pub(crate) fn truth(truths: &BTreeMap<String, TenantTruth>, verdict: &Verdict) -> Value {
    let tenants: Vec<Value> = truths
        .iter()
        .map(|(tenant, truth)| {
            let balances: Vec<Value> = truth
                .balances
                .iter()
                .map(|((gpu, kind), balance)| {
                    json!({
                        "hw_id": gpu, "memory_kind": kind.as_str(), "live": balance.live, "peak": balance.peak,
                        "allocated": balance.allocated, "freed": balance.freed,
                        "allocations": balance.allocations, "frees": balance.frees,
                    })
                })
                .collect();
            let calls: BTreeMap<&str, u64> =
                truth.calls.iter().map(|(operation, count)| (operation.as_str(), *count)).collect();
            let failures: Vec<Value> = truth
                .failures
                .iter()
                .map(|((operation, error), count)| {
                    json!({ "operation": operation.as_str(), "error_type": error, "count": count })
                })
                .collect();
            json!({
                "tenant": tenant, "processes": truth.processes, "balances": balances, "calls": calls,
                "failures": failures,
            })
        })
        .collect();
    json!({
        "source": "the simulated driver's own record, one entry a call",
        "figures_compared": verdict.figures, "differences": verdict.differences, "tenants": tenants,
    })
}

/// What the agent published, in words, and the verdict.
pub(crate) fn report(
    scrape: &Scrape,
    truths: &BTreeMap<String, TenantTruth>,
    stories: &BTreeMap<String, String>,
    verdict: &Verdict,
) -> String {
    let mut text = String::from("What the agent saw, from its last scrape (metrics.prom):\n");
    for (tenant, truth) in truths {
        let story = stories.get(tenant).map_or("", String::as_str);
        let _ = writeln!(text, "\n{tenant}: {story}");
        section(&mut text, scrape, tenant, truth);
    }
    let _ = writeln!(text, "\nBeside the driver's own record (truth.json): {}.", verdict.line());
    for difference in &verdict.differences {
        let _ = writeln!(text, "  {difference}");
    }
    let _ = writeln!(text, "{HEAD_START}");
    text
}

fn section(text: &mut String, scrape: &Scrape, tenant: &str, truth: &TenantTruth) {
    let of_tenant = [("tenant", tenant)];
    for held in scrape.of(figures::LIVE).filter(|sample| sample.label("tenant") == tenant) {
        let (gpu, kind) = (held.label("hw_id"), held.label("memory_kind"));
        let place = [("tenant", tenant), ("hw_id", gpu), ("memory_kind", kind)];
        let sum = |name: &str| bytes(scrape.sum(name, &place));
        let _ = writeln!(
            text,
            "  holds {} of {kind} on {}: peak {}, allocated {}, freed {}",
            bytes(held.value),
            if gpu.is_empty() { "the host" } else { gpu },
            sum("cotenant_gpu_memory_live_peak_bytes"),
            sum(figures::ALLOCATED),
            sum("cotenant_gpu_memory_freed_bytes_total"),
        );
    }
    for part in scrape.of(figures::PROCESS).filter(|sample| sample.label("tenant") == tenant) {
        let _ = writeln!(text, "  NVML lists {} on {}", bytes(part.value), part.label("hw_id"));
    }
    let failed =
        scrape.of(figures::FAILURES).filter(|sample| sample.label("tenant") == tenant && sample.value > 0.0);
    for failure in failed {
        let (operation, error) = (failure.label("operation"), failure.label("error_type"));
        let _ = writeln!(text, "  failed: {operation} {} times with {error}", failure.value);
    }
    if scrape.sum(figures::FAILURES, &of_tenant) == 0.0 {
        let _ = writeln!(text, "  nothing failed");
    }
    for operation in truth.calls.keys() {
        let name = operation.as_str();
        let durations = figures::buckets(scrape, tenant, *operation);
        let _ = writeln!(
            text,
            "  {name:26} {:>7} calls   p50 {:>10}   p99 {:>10}",
            scrape.sum(figures::OPERATIONS, &[("tenant", tenant), ("operation", name)]) + 0.0,
            time(figures::quantile(&durations, 0.5)),
            time(figures::quantile(&durations, 0.99)),
        );
    }
}
