//! Owns where tenants are at one tick: the GPUs on which they hold memory, the kernel stacks that cost them most.
//! Refuses to walk the processes once an edge of blame: it walks them once a tick.

use std::collections::{BTreeMap, BTreeSet};

use cotenant_model::{
    GpuId, Tenant, WaitClass,
    sample::{GpuRef, StackId},
};

use super::Tick;
use crate::stacks::Stacks;

#[derive(Default)]
pub(super) struct Whereabouts<'a> {
    gpus: BTreeMap<&'a Tenant, BTreeSet<&'a GpuId>>,
    /// The stack that has cost most, with what that was, by class.
    stacks: BTreeMap<(&'a Tenant, WaitClass), (u64, StackId)>,
}

impl<'a> Whereabouts<'a> {
    pub(super) fn of(tick: &Tick<'a>) -> Self {
        let mut whereabouts = Self::default();
        if tick.blame.is_empty() && tick.kernel.stalls.is_empty() {
            // Nobody will be asked for.
            return whereabouts;
        }
        for process in &tick.kernel.processes {
            let Some(tenant) = tick.tenants.get(&process.id) else { continue };
            for row in process.ledger.iter().filter(|row| row.live > 0) {
                if let GpuRef::Known(gpu) = &row.gpu {
                    whereabouts.gpus.entry(tenant).or_default().insert(gpu);
                }
            }
            for row in &process.waits {
                let Some(stack) = row.stack else { continue };
                let Some(class) = tick.stacks.classes().get(&stack) else { continue };
                let dearest = whereabouts.stacks.entry((tenant, *class)).or_insert((0, stack));
                if row.histogram.sum_ns >= dearest.0 {
                    *dearest = (row.histogram.sum_ns, stack);
                }
            }
        }
        whereabouts
    }

    /// The API lock is the host's; everything else is on the victim's GPUs, on those that the culprit holds too where
    /// there are such.
    pub(super) fn places(&self, victim: &Tenant, culprit: Option<&Tenant>, class: WaitClass) -> Vec<GpuId> {
        if class == WaitClass::RmApiLock {
            return Vec::new();
        }
        let nowhere = BTreeSet::new();
        let of = |tenant: &Tenant| self.gpus.get(tenant).unwrap_or(&nowhere);
        let both = |culprit| of(victim).intersection(of(culprit)).map(|gpu| (*gpu).clone()).collect();
        let shared: Vec<GpuId> = culprit.map(both).unwrap_or_default();
        if shared.is_empty() { of(victim).iter().map(|gpu| (*gpu).clone()).collect() } else { shared }
    }

    /// Where a tenant's waits of one class have cost it most.
    pub(super) fn stack(&self, stacks: &Stacks, victim: &Tenant, class: WaitClass) -> Vec<String> {
        let dearest = self.stacks.get(&(victim, class));
        dearest.map(|(_, stack)| stacks.symbols(*stack).to_vec()).unwrap_or_default()
    }
}
