//! Owns the live table: every figure in it came out of the agent's /metrics.
//! Refuses to draw in place where there is no terminal: there, blocks follow each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io::{IsTerminal, Write},
    time::Instant,
};

use cotenant_model::{MemoryKind, Operation};
use cotenant_node::scrape::Scrape;

use crate::figures::{self, ALLOCATED, FAILURES, LIVE, PROCESS, buckets, bytes, optional, time};

pub(crate) struct Table {
    /// By NVML UUID, as the node numbers them.
    gpus: BTreeMap<String, usize>,
    terminal: bool,
    lines: usize,
    before: Option<(Instant, Scrape)>,
}

impl Table {
    pub(crate) fn new(gpus: BTreeMap<String, usize>) -> Self {
        Self { gpus, terminal: std::io::stdout().is_terminal(), lines: 0, before: None }
    }

    pub(crate) fn draw(&mut self, title: &str, scrape: &Scrape) {
        let now = Instant::now();
        let block = self.block(title, scrape, now);
        let mut out = std::io::stdout().lock();
        // A pipe that is closed is no reason to leave the node standing. In place: up, clear, and no line wraps.
        let _ = if self.terminal {
            let up = if self.lines > 0 { format!("\x1b[{}A\x1b[J", self.lines) } else { String::new() };
            self.lines = block.lines().count();
            write!(out, "{up}\x1b[?7l{block}\x1b[?7h")
        } else {
            writeln!(out, "{block}")
        };
        let _ = out.flush();
        self.before = Some((now, scrape.clone()));
    }

    fn block(&self, title: &str, scrape: &Scrape, now: Instant) -> String {
        let age =
            figures::nvml_age(scrape).map_or("not asked yet".to_owned(), |age| format!("{age:.1} s ago"));
        let mut text = format!("{title} (NVML: {age})\n");
        for (uuid, index) in &self.gpus {
            let gpu = [("hw_id", uuid.as_str())];
            let of = |name: &str| optional(scrape.get(name, &gpu));
            let _ = writeln!(
                text,
                "  GPU {index}: limit {}, used {}, reserved {}, unattributed {}",
                of("hw_gpu_memory_limit_bytes"),
                of("hw_gpu_memory_usage_bytes"),
                of("cotenant_gpu_memory_reserved_bytes"),
                of("cotenant_gpu_memory_unattributed_bytes"),
            );
        }
        let _ = writeln!(
            text,
            "  {:3} {:22} {:>8} {:>12} {:>6} {:>10} {:>10}  LIVE, BY KIND",
            "GPU", "TENANT", "ALLOC/s", "CHURN/s", "FAILED", "p99 ALLOC", "NVML"
        );
        let series = scrape.of(LIVE).chain(scrape.of(PROCESS));
        let tenants: BTreeSet<&str> = series.map(|sample| sample.label("tenant")).collect();
        for tenant in tenants {
            text += &self.row(tenant, scrape, now);
        }
        text
    }

    fn row(&self, tenant: &str, scrape: &Scrape, now: Instant) -> String {
        let of_tenant = [("tenant", tenant)];
        let listed = scrape.of(PROCESS).any(|sample| sample.label("tenant") == tenant);
        let nvml = listed.then(|| scrape.sum(PROCESS, &of_tenant));
        let failures = scrape.sum(FAILURES, &of_tenant) + 0.0;
        let calls = buckets(scrape, tenant, Operation::MemAlloc);
        // Rates and the quantile are of the time between two draws; the first draw has none.
        let (rate, churn, p99) =
            self.before.as_ref().map_or(("-".into(), "-".into(), "-".into()), |(then, before)| {
                let seconds = now.duration_since(*then).as_secs_f64().max(0.001);
                let allocations = figures::allocations(scrape, tenant) - figures::allocations(before, tenant);
                let churned = scrape.sum(ALLOCATED, &of_tenant) - before.sum(ALLOCATED, &of_tenant);
                let fresh = figures::since(&calls, &buckets(before, tenant, Operation::MemAlloc));
                (
                    format!("{:.1}", allocations / seconds),
                    bytes((churned / seconds).round()),
                    time(figures::quantile(&fresh, 0.99)),
                )
            });
        let name: String = tenant.chars().take(22).collect();
        format!(
            "  {:3} {name:22} {rate:>8} {churn:>12} {failures:>6} {p99:>10} {:>10}  {}\n",
            self.places(tenant, scrape),
            optional(nvml),
            live(tenant, scrape)
        )
    }

    /// Numbers of the GPUs on which a tenant has a ledger.
    fn places(&self, tenant: &str, scrape: &Scrape) -> String {
        let numbers: BTreeSet<usize> = scrape
            .of(LIVE)
            .chain(scrape.of(PROCESS))
            .filter(|sample| sample.label("tenant") == tenant)
            .filter_map(|sample| self.gpus.get(sample.label("hw_id")).copied())
            .collect();
        numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
}

/// Live bytes of a tenant, the kinds that it holds nothing of left out.
fn live(tenant: &str, scrape: &Scrape) -> String {
    let kinds: Vec<String> = MemoryKind::ALL
        .iter()
        .map(|kind| (kind.as_str(), scrape.sum(LIVE, &[("tenant", tenant), ("memory_kind", kind.as_str())])))
        .filter(|(_, live)| *live != 0.0)
        .map(|(kind, live)| format!("{kind} {}", bytes(live)))
        .collect();
    if kinds.is_empty() { "nothing".to_owned() } else { kinds.join(", ") }
}
