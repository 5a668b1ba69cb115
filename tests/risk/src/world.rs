//! Owns one simulated GPU: who asks in which order, what is granted, and the moment that an agent would see.
//! Refuses to look ahead: NVML is asked every ten seconds, as on a node.

use std::time::Duration;

use cotenant_model::risk::{GpuMemory, GpuMoment, Holding, Moment, TenantMoment};
use cotenant_model::{GpuId, Tenant, TenantKind};

use crate::chance::Chance;
use crate::tenant::{Actor, Behaviour, MIB};

/// An H200: 143,771 MiB, of which the driver keeps about 600 MiB.
pub const LIMIT: f64 = 143_771.0 * MIB;
const RESERVED: f64 = 600.0 * MIB;
/// A process's context, seen by NVML only.
const CONTEXT: f64 = 530.0 * MIB;
const POLL: u64 = 10;
/// At most so many asks a second are acted out; larger growth asks for more at a time.
const ASKS: f64 = 64.0;

/// A GPU with its tenants.
#[derive(Debug)]
pub struct World {
    gpu: GpuId,
    chance: Chance,
    residents: Vec<Resident>,
    polled: Option<(u64, GpuMemory)>,
    second: u64,
}

#[derive(Debug)]
struct Resident {
    tenant: Tenant,
    actor: Actor,
    holding: Holding,
    context: bool,
}

impl World {
    pub fn new(seed: u64, tenants: Vec<(&str, Behaviour)>) -> Self {
        let mut chance = Chance::new(seed);
        let gpu = GpuId::from_nvml(&format!("GPU-{seed:08x}-0000-0000-0000-000000000000"));
        let residents = tenants
            .into_iter()
            .map(|(name, behaviour)| Resident {
                tenant: Tenant::plain(TenantKind::Docker, name),
                actor: Actor::new(behaviour, Chance::new(chance.bits())),
                holding: Holding::on(gpu.clone()),
                context: false,
            })
            .collect();
        Self { gpu, chance, residents, polled: None, second: 0 }
    }

    fn used(&self) -> f64 {
        let of =
            |resident: &Resident| resident.holding.live as f64 + if resident.context { CONTEXT } else { 0.0 };
        self.residents.iter().map(of).sum()
    }

    /// One second: every tenant goes where it wants to, in random order, in asks.
    pub fn step(&mut self) -> Moment {
        let now = self.second as f64;
        let mut order: Vec<usize> = (0..self.residents.len()).collect();
        for index in (1..order.len()).rev() {
            #[allow(clippy::cast_possible_truncation, reason = "below the number of tenants")]
            order.swap(index, (self.chance.bits() % (index as u64 + 1)) as usize);
        }
        for index in order {
            if self.residents[index].actor.down(now) {
                continue;
            }
            let (levels, ask) = self.residents[index].actor.wants(now);
            for level in levels {
                self.go(index, level, ask, now);
            }
        }
        let moment = self.moment();
        self.second += 1;
        moment
    }

    fn go(&mut self, index: usize, level: f64, ask: f64, now: f64) {
        let room = LIMIT - RESERVED - self.used();
        let resident = &mut self.residents[index];
        let live = resident.holding.live as f64;
        if level < live {
            resident.free(live - level);
            return;
        }
        let grow = level - live;
        if grow < 2.0 * MIB {
            return;
        }
        let context = if resident.context { 0.0 } else { CONTEXT };
        let ask = ask.max(grow / ASKS);
        let (mut left, mut room) = (grow, room - context);
        while left > 1.0 {
            let bytes = ask.min(left);
            if bytes > room {
                resident.holding.failures += 1;
                if resident.actor.refused(now) {
                    resident.free(resident.holding.live as f64);
                    resident.context = false;
                }
                return;
            }
            resident.context = true;
            resident.take(bytes);
            room -= bytes;
            left -= bytes;
        }
    }

    fn moment(&mut self) -> Moment {
        let at = Duration::from_secs(self.second);
        if self.polled.is_none_or(|(polled, _)| self.second - polled >= POLL) {
            let used = bytes(self.used());
            let memory = GpuMemory {
                limit: bytes(LIMIT),
                reserved: Some(bytes(RESERVED)),
                used,
                free: bytes(LIMIT - RESERVED) - used,
            };
            self.polled = Some((self.second, memory));
        }
        let tenants = self.residents.iter().map(|resident| TenantMoment {
            tenant: resident.tenant.clone(),
            holdings: vec![resident.holding.clone()],
            reclaim_waits: 0,
            reclaim_ns: 0,
        });
        let (polled, memory) = self.polled.map_or((0, None), |(polled, memory)| (polled, Some(memory)));
        let gpu = GpuMoment { gpu: self.gpu.clone(), polled: Duration::from_secs(polled), memory };
        Moment { at, gpus: vec![gpu], tenants: tenants.collect(), host: None }
    }
}

impl Resident {
    fn take(&mut self, size: f64) {
        let holding = &mut self.holding;
        holding.live += bytes(size);
        holding.allocated += bytes(size);
        holding.allocations += 1;
        holding.peak = holding.peak.max(holding.live);
    }

    fn free(&mut self, size: f64) {
        let size = bytes(size).min(self.holding.live);
        self.holding.live -= size;
        self.holding.freed += size;
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, not below zero")]
pub(crate) fn bytes(value: f64) -> u64 {
    value.max(0.0) as u64
}
