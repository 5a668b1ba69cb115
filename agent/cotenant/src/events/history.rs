//! Owns how much each tenant held on each GPU a short while ago.
//! Refuses more than the last minute.

use std::collections::{BTreeMap, VecDeque};

use cotenant_model::{
    GpuId, ProcessId, Tenant,
    incident::Movement,
    sample::{GpuRef, KernelSample},
};

use super::Clock;

pub(super) type Holdings = BTreeMap<(Tenant, GpuId), u64>;

const WINDOW_NS: u64 = 30_000_000_000;
const STEP_NS: u64 = 1_000_000_000;

#[derive(Default)]
pub(super) struct History {
    now: Holdings,
    past: VecDeque<(u64, Holdings)>,
}

impl History {
    /// Takes the present state and gives what has moved since the last one.
    pub(super) fn advance(
        &mut self,
        kernel: &KernelSample,
        tenants: &BTreeMap<ProcessId, Tenant>,
        clock: Clock,
    ) -> Vec<Movement> {
        let mut now = Holdings::new();
        for process in kernel.processes.iter().filter(|process| process.ended.is_none()) {
            let Some(tenant) = tenants.get(&process.id) else { continue };
            for row in process.ledger.iter().filter(|row| row.kind.is_device()) {
                if let GpuRef::Known(gpu) = &row.gpu {
                    *now.entry((tenant.clone(), gpu.clone())).or_default() += row.live;
                }
            }
        }
        let before = std::mem::replace(&mut self.now, now);
        let moved = changes(&before, &self.now);
        let due = self.past.back().is_none_or(|(at, _)| clock.monotonic_ns.saturating_sub(*at) >= STEP_NS);
        if due {
            self.past.push_back((clock.monotonic_ns, before));
        }
        while self.past.front().is_some_and(|(at, _)| clock.monotonic_ns.saturating_sub(*at) > WINDOW_NS) {
            self.past.pop_front();
        }
        moved
            .into_iter()
            .map(|((tenant, gpu), bytes)| Movement { tenant, gpu, bytes })
            .filter(|movement| movement.bytes != 0)
            .collect()
    }

    /// How holdings changed over the window; `None` while there is none.
    pub(super) fn growth(&self) -> Option<BTreeMap<(Tenant, GpuId), i64>> {
        let (_, oldest) = self.past.front()?;
        Some(changes(oldest, &self.now))
    }
}

fn changes(before: &Holdings, now: &Holdings) -> BTreeMap<(Tenant, GpuId), i64> {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut changes: BTreeMap<_, i64> =
        now.iter().map(|(key, bytes)| (key.clone(), signed(*bytes))).collect();
    for (key, bytes) in before {
        *changes.entry(key.clone()).or_default() -= signed(*bytes);
    }
    changes
}
