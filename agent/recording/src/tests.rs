use std::collections::BTreeMap;
use std::time::Duration;

use cotenant_model::risk::{
    GpuMemory, GpuMoment, Holding, HostMemory, Kills, Place, TenantMemory, TenantMoment,
};
use cotenant_model::{GpuId, Tenant, TenantKind};

use super::*;

/// A node with so many tenants on eight GPUs that all allocate, at one second.
fn busy(second: u64, tenants: u64) -> Moment {
    let gpu = |index: u64| GpuId::from_nvml(&format!("GPU-{index:08x}-aaaa-bbbb-cccc-000000000000"));
    let noise = |of: u64, second: u64| {
        let mixed =
            of.wrapping_mul(6_364_136_223_846_793_005) ^ second.wrapping_mul(1_442_695_040_888_963_407);
        mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
    };
    let memory = GpuMemory {
        limit: 150 << 30,
        reserved: Some(600 << 20),
        used: noise(7, second) << 10,
        free: 1 << 30,
    };
    let polled = Duration::from_secs(second / 10 * 10);
    let tenant = |index: u64| {
        let live = noise(index, second.saturating_sub((second + index) % 2)) << 12;
        let second = second.saturating_sub((second + index) % 2);
        let holding = Holding {
            live,
            peak: live + (1 << 30),
            allocated: (live + second) << 4,
            freed: second << 20,
            allocations: second * 17 + index,
            ..Holding::on(gpu(index % 8))
        };
        let tenant = Tenant {
            namespace: Some(format!("team-{}", index % 20)),
            pod: Some(format!("worker-{index}-7d9f8b6c5d-x{index}")),
            container: Some("main".to_owned()),
            ..Tenant::plain(TenantKind::Pod, &format!("team-{}/worker-{index}", index % 20))
        };
        TenantMoment { tenant, holdings: vec![holding], reclaim_waits: index, reclaim_ns: second * index }
    };
    let memory_of = |of: TenantMoment| {
        // In steps of a MiB, as the agent reads it.
        let moved = second.saturating_sub((second + of.reclaim_waits) % 2);
        let held = noise(moved, of.reclaim_waits) >> 8 << 20;
        let path = format!(
            "/kubepods.slice/kubepods-pod{}.slice/cri-containerd-{}",
            of.tenant.name, of.reclaim_waits
        );
        let places = vec![Place { path, limit: Some(64 << 30), held }];
        TenantMemory { tenant: of.tenant, pinned: of.reclaim_waits << 20, places }
    };
    let host = HostMoment {
        taken: Duration::from_secs(second),
        memory: Some(HostMemory { total: 2 << 40, available: noise(9, second) >> 8 << 20 }),
        tenants: (0..tenants).map(tenant).map(memory_of).collect(),
        kills: Kills { by_tenant: BTreeMap::from([(tenant(1).tenant, second / 7)]), of_host: second / 50 },
    };
    Moment {
        at: Duration::from_millis(second * 1000 + 3),
        host: Some(host),
        gpus: (0..8).map(|index| GpuMoment { gpu: gpu(index), polled, memory: Some(memory) }).collect(),
        tenants: (0..tenants).map(tenant).collect(),
    }
}

fn recording(seconds: u64) -> Vec<u8> {
    let mut forecaster = Forecaster::default();
    for second in 0..40 {
        forecaster.advance(&busy(second, 12));
    }
    let mut file = head();
    file.extend(pack(&Written::Start(&forecaster)).unwrap());
    for from in (40..40 + seconds).step_by(10) {
        let moments: Vec<Moment> = (from..from + 10).map(|second| busy(second, 12)).collect();
        file.extend(pack(&Written::Moments(&moments)).unwrap());
    }
    file
}

#[test]
fn live_and_replayed_forecasts_are_the_same_to_the_byte() {
    let mut live = Forecaster::default();
    let mut said = Vec::new();
    for second in 0..140 {
        let forecast = live.advance(&busy(second, 12));
        if second >= 40 {
            said.push(serde_json::to_string(&forecast).unwrap());
        }
    }
    let mut replayed = Vec::new();
    let done = replay(Blocks::of(recording(100).as_slice()).unwrap(), &mut replayed).unwrap();
    assert_eq!(done, Replayed { moments: 100, other_start: None });
    let replayed: Vec<&str> = std::str::from_utf8(&replayed).unwrap().lines().collect();
    let last = said.last().unwrap();
    assert!(last.contains("GPU-00000007") && last.contains("\"room\""), "nothing was forecast");
    assert_eq!(said, replayed);
}

fn framed(stored: &Storing<'_>) -> Vec<u8> {
    let payload = zstd::bulk::compress(&postcard::to_stdvec(stored).unwrap(), LEVEL).unwrap();
    let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
    [&length[..], &crc32fast::hash(&payload).to_le_bytes(), &payload].concat()
}

#[test]
fn recordings_from_before_host_memory_are_read_without_it() {
    let mut file = [&NAME[..], &2_u32.to_le_bytes()].concat();
    file.extend(framed(&Storing::Moments(&[busy(40, 12)])));
    let blocks: Vec<Block> = Blocks::of(file.as_slice()).unwrap().map(Result::unwrap).collect();
    let wanted = Moment { host: None, ..busy(40, 12) };
    assert!(matches!(&blocks[..], [Block::Moments(moments)] if *moments == [wanted.clone()]));
}

#[test]
fn moments_are_read_after_the_start_of_another_forecaster() {
    let mut file = head();
    file.extend(framed(&Storing::Start { version: KNOWLEDGE + 1, knowledge: vec![1, 2, 3] }));
    file.extend(pack(&Written::Moments(&[busy(40, 12)])).unwrap());
    let blocks: Vec<Block> = Blocks::of(file.as_slice()).unwrap().map(Result::unwrap).collect();
    assert!(matches!(&blocks[0], Block::OtherStart { version } if *version == KNOWLEDGE + 1));
    assert!(matches!(&blocks[1], Block::Moments(moments) if moments[0] == busy(40, 12)));
}

#[test]
fn a_recording_that_breaks_off_anywhere_gives_what_was_whole() {
    let whole = recording(30);
    let all = Blocks::of(whole.as_slice()).unwrap().count();
    assert_eq!(all, 4);
    for length in (16..whole.len()).step_by(97) {
        let blocks: Vec<_> = Blocks::of(&whole[..length]).unwrap().collect();
        let good = blocks.iter().filter(|block| block.is_ok()).count();
        assert!(blocks.len() - good <= 1 && good < all);
        if let Some(Err(error)) = blocks.last() {
            assert!(matches!(error, FormatError::CutShort), "{error}");
        }
    }
}

/// Nobody reads it.
struct Closed;

impl io::Write for Closed {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_replay_keeps_what_was_whole_and_ends_when_nobody_takes_its_lines() {
    let whole = recording(30);
    let mut lines = Vec::new();
    let broken = replay(Blocks::of(&whole[..whole.len() - 9]).unwrap(), &mut lines);
    assert!(matches!(broken, Err(ReplayError::Format { moments: 20, .. })), "{broken:?}");
    assert_eq!(std::str::from_utf8(&lines).unwrap().lines().count(), 20);
    let closed = replay(Blocks::of(recording(1000).as_slice()).unwrap(), Closed);
    assert!(matches!(&closed, Err(ReplayError::Print(error)) if error.kind() == io::ErrorKind::BrokenPipe));
}

#[test]
fn foreign_newer_and_damaged_files_are_told_apart() {
    assert!(matches!(Blocks::of(&b"PK\x03\x04 something else entirely"[..]), Err(FormatError::Foreign)));
    assert!(matches!(Blocks::of(&b""[..]), Err(FormatError::Foreign)));
    let mut newer = recording(10);
    newer[12] = 9;
    assert!(matches!(Blocks::of(newer.as_slice()), Err(FormatError::Version(9))));
    let mut damaged = recording(30);
    let at = damaged.len() - 5;
    damaged[at] ^= 1;
    let last = Blocks::of(damaged.as_slice()).unwrap().last().unwrap();
    assert!(matches!(last, Err(FormatError::Damaged)));
}

#[test]
fn an_hour_of_a_busy_node_is_below_20_megabytes() {
    // 200 tenants on 8 GPUs, half of them moving in each second, by amounts that nothing predicts. With all of them
    // moving it is 22 MB.
    let computed = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
    };
    let (mut bytes, mut seconds) = (0, 0.0);
    for block in 0..6 {
        let moments: Vec<Moment> = (0..10).map(|second| busy(block * 10 + second, 200)).collect();
        let begun = computed();
        bytes += pack(&Written::Moments(&moments)).unwrap().len();
        seconds += computed() - begun;
    }
    let hour = bytes * 60;
    println!("{hour} bytes an hour; packing takes {:.3} % of a core", 100.0 * seconds / 60.0);
    // One per cent of a core is what a recorder may cost; this is a build without optimisation.
    assert!(seconds / 60.0 < 0.01, "{seconds} s a minute");
    assert!(hour < 20_000_000, "{hour} bytes an hour");
}
