//! Owns the cost of a forecast: per tick on a large node, and of a long recording's replay.
//! Refuses to judge by the clock: other work on this machine takes none of a thread's own processor time.

use std::time::Duration;

use cotenant_model::risk::{Forecaster, GpuMemory, GpuMoment, Holding, Moment, TenantMoment};
use cotenant_model::{GpuId, Tenant, TenantKind};
use cotenant_recording::{Blocks, Written, head, pack, replay};
use cotenant_risk_runs::{Chance, GIB, LIMIT, MIB};

/// Seconds that this thread has computed.
fn computed() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("a Linux host with schedstat");
    text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

/// A node of eight GPUs; every tenant holds memory on `each` of them, and half of the tenants move in each second.
struct Node {
    chance: Chance,
    second: u64,
    tenants: Vec<TenantMoment>,
    gpus: Vec<GpuId>,
}

impl Node {
    fn new(tenants: usize, each: usize) -> Self {
        let gpus: Vec<GpuId> = (0..8)
            .map(|index| GpuId::from_nvml(&format!("GPU-{index:08x}-0000-0000-0000-000000000000")))
            .collect();
        let of = |index: usize| TenantMoment {
            tenant: Tenant::plain(TenantKind::Docker, &format!("worker-{index}")),
            holdings: (0..each).map(|place| Holding::on(gpus[(index + place) % 8].clone())).collect(),
            reclaim_waits: 0,
            reclaim_ns: 0,
        };
        let tenants = (0..tenants).map(of).collect();
        Self { chance: Chance::new(7), second: 0, tenants, gpus }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, not below zero")]
    fn step(&mut self) -> Moment {
        self.second += 1;
        for holding in self.tenants.iter_mut().flat_map(|tenant| &mut tenant.holdings) {
            if self.chance.happens(0.5) {
                let grow = self.chance.between(0.0, 64.0 * MIB) as u64;
                holding.allocations += 3;
                holding.allocated += grow;
                holding.live += grow;
                holding.peak = holding.peak.max(holding.live);
                if holding.live > 512 * MIB as u64 {
                    holding.freed += holding.live;
                    holding.live = 0;
                }
            }
        }
        let polled = Duration::from_secs(self.second / 10 * 10);
        let used = 120.0 * GIB;
        let memory =
            GpuMemory { limit: LIMIT as u64, reserved: None, used: used as u64, free: (LIMIT - used) as u64 };
        let gpus = self.gpus.iter().map(|gpu| GpuMoment { gpu: gpu.clone(), polled, memory: Some(memory) });
        let (at, gpus) = (Duration::from_secs(self.second), gpus.collect());
        Moment { at, gpus, tenants: self.tenants.clone(), host: None }
    }
}

#[test]
fn a_tick_of_a_large_node_takes_little() {
    for (tenants, each) in [(200, 1), (200, 8)] {
        let mut node = Node::new(tenants, each);
        let mut forecaster = Forecaster::default();
        for _ in 0..60 {
            forecaster.advance(&node.step());
        }
        let moments: Vec<Moment> = (0..60).map(|_| node.step()).collect();
        let begun = computed();
        for moment in &moments {
            assert_eq!(forecaster.advance(moment).gpus.len(), 8);
        }
        let tick = (computed() - begun) / moments.len() as f64;
        println!("8 GPUs, {tenants} tenants on {each} each: {:.2} ms a tick", 1000.0 * tick);
        // One per cent of a core would be 10 ms; a debug build of the rest of this test is not in it.
        assert!(tick < 0.25, "{tick} s");
    }
}

/// Ten hours of 200 tenants on 8 GPUs, as `cotenant replay` does it. `--ignored`, as it takes minutes; `COTENANT_HOURS=1` takes
/// a tenth, and `COTENANT_RECORDING` names a file to leave the recording in.
#[test]
#[ignore = "minutes of processor time"]
fn ten_hours_replay_in_two_minutes() {
    let hours = std::env::var("COTENANT_HOURS").ok().and_then(|text| text.parse().ok()).unwrap_or(10);
    let mut node = Node::new(200, 1);
    let mut file = head();
    for _ in 0..360 * hours {
        let moments: Vec<Moment> = (0..10).map(|_| node.step()).collect();
        file.extend(pack(&Written::Moments(&moments)).unwrap());
    }
    if let Some(path) = std::env::var_os("COTENANT_RECORDING") {
        std::fs::write(path, &file).unwrap();
    }
    let processor = || {
        let text = std::fs::read_to_string("/proc/self/stat").expect("a Linux host");
        let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    };
    let (begun, before) = (std::time::Instant::now(), processor());
    let done = replay(Blocks::of(file.as_slice()).unwrap(), std::io::sink()).unwrap();
    let (took, computed) = (begun.elapsed().as_secs_f64(), processor() - before);
    let (bytes, seconds) = (file.len(), done.moments);
    println!(
        "{seconds} s of 200 tenants on 8 GPUs, {bytes} bytes: {took:.1} s, {computed:.1} s of processor time"
    );
    assert_eq!(seconds, 3600 * hours);
    // By the clock a minute is wanted of a release build that has two processors to itself: no claim on a busy machine.
    assert!(computed < 15.0 * hours as f64, "{computed} s");
}
