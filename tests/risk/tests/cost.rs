//! Owns the cost of a forecast: per tick on a large node, and of a long recording's replay.
//! Refuses to judge by the clock: other work on this machine takes none of a thread's own processor time.

use std::time::Duration;

use cotenant_model::risk::{Forecaster, GpuMemory, GpuMoment, Holding, Moment, TenantMoment};
use cotenant_model::{GpuId, Tenant, TenantKind};
use cotenant_recording::{Block, Blocks, Written, head, pack};
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
        Moment { at: Duration::from_secs(self.second), gpus: gpus.collect(), tenants: self.tenants.clone() }
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

/// Ten hours of 200 tenants on 8 GPUs, printed as `cotenant replay` prints them. `--ignored`, as it takes minutes;
/// `COTENANT_HOURS=1` takes a tenth.
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
    let (mut forecaster, mut seconds) = (Forecaster::default(), 0);
    let (mut read, mut forecast, mut print, mut bytes) = (0.0, 0.0, 0.0, 0);
    let mut line = Vec::new();
    let mut blocks = Blocks::of(file.as_slice()).unwrap();
    loop {
        let begun = computed();
        let Some(block) = blocks.next() else { break };
        let Block::Moments(moments) = block.unwrap() else { panic!("there is no start") };
        let had_read = computed();
        read += had_read - begun;
        let said: Vec<_> = moments.iter().map(|moment| forecaster.advance(moment)).collect();
        let had_forecast = computed();
        forecast += had_forecast - had_read;
        for one in &said {
            line.clear();
            serde_json::to_writer(&mut line, one).unwrap();
            bytes += line.len();
        }
        print += computed() - had_forecast;
        seconds += moments.len();
    }
    let took = read + forecast + print;
    println!(
        "{seconds} s of 200 tenants on 8 GPUs, {} bytes, {bytes} printed: {took:.1} s, of which {read:.1} to read, {forecast:.1} to \
         forecast, {print:.1} to print",
        file.len()
    );
    assert_eq!(seconds, 3600 * hours);
    // A minute is wanted; this is a build without link-time optimisation.
    assert!(took < 12.0 * hours as f64, "{took} s");
}
