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

    /// How holdings on one GPU changed over the window, up to a moment between two ticks at which these tenants held
    /// that much; the others as they are now. `None` while there is no window.
    pub(super) fn growth_to(
        &self,
        gpu: &GpuId,
        held: &BTreeMap<Tenant, u64>,
    ) -> Option<BTreeMap<Tenant, i64>> {
        let (_, oldest) = self.past.front()?;
        let here = |holdings: &Holdings| -> BTreeMap<Tenant, u64> {
            let rows = holdings.iter().filter(|((_, place), _)| place == gpu);
            rows.map(|((tenant, _), bytes)| (tenant.clone(), *bytes)).collect()
        };
        let mut then = here(&self.now);
        then.extend(held.iter().map(|(tenant, bytes)| (tenant.clone(), *bytes)));
        Some(changes(&here(oldest), &then))
    }
}

fn changes<K: Clone + Ord>(before: &BTreeMap<K, u64>, now: &BTreeMap<K, u64>) -> BTreeMap<K, i64> {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut changes: BTreeMap<K, i64> =
        now.iter().map(|(key, bytes)| (key.clone(), signed(*bytes))).collect();
    for (key, bytes) in before {
        *changes.entry(key.clone()).or_default() -= signed(*bytes);
    }
    changes
}

#[cfg(test)]
mod tests {
    use cotenant_model::TenantKind;

    use super::*;

    #[test]
    fn a_burst_between_two_ticks_is_growth_at_its_moment() {
        let tenant = |name: &str| Tenant::plain(TenantKind::Docker, name);
        let gpu = GpuId::from_uuid([1; 16]);
        let holdings: Holdings = [("a", 5), ("b", 7)]
            .into_iter()
            .map(|(name, bytes)| ((tenant(name), gpu.clone()), bytes))
            .collect();
        let mut history = History { now: holdings.clone(), ..History::default() };
        let burst = BTreeMap::from([(tenant("b"), 40)]);
        assert_eq!(history.growth_to(&gpu, &burst), None, "no window yet");
        history.past.push_back((0, holdings));
        let growth = history.growth_to(&gpu, &burst).expect("a window");
        assert_eq!(growth, BTreeMap::from([(tenant("a"), 0), (tenant("b"), 33)]));
        let elsewhere = GpuId::from_uuid([2; 16]);
        assert_eq!(history.growth_to(&elsewhere, &burst), Some(BTreeMap::from([(tenant("b"), 40)])));
    }
}
