//! Owns the proofs of the fold and of the balance, on samples made by hand.

use super::*;
use crate::TenantKind;
use crate::{
    CudaError, DeviceMemory, Operation,
    device::GpuProcess,
    sample::{CallRow, End, FailureRow, PoolRow},
};

const GIB: u64 = 1 << 30;
const KEEP: Duration = Duration::from_mins(15);

fn gpu() -> GpuId {
    GpuId::from_uuid([1; 16])
}

fn process(id: u64, live: u64) -> ProcessSample {
    ProcessSample {
        ledger: vec![LedgerRow {
            gpu: GpuRef::Known(gpu()),
            kind: MemoryKind::Device,
            live,
            peak: live,
            allocated: live,
            freed: 0,
            allocations: 1,
            frees: 0,
        }],
        calls: vec![CallRow { gpu: GpuRef::Known(gpu()), operation: Operation::MemAlloc, calls: 1 }],
        failures: vec![FailureRow {
            gpu: GpuRef::Known(gpu()),
            operation: Operation::MemAlloc,
            error: CudaError::OUT_OF_MEMORY,
            count: 1,
        }],
        ..crate::sample::tests::process(id)
    }
}

fn row(pid: u32, bytes: Reading<u64>) -> GpuProcess {
    GpuProcess { pid, bytes, compute: true, graphics: false, mps_client: false, mps_server: false }
}

fn device(used: u64, processes: Reading<Vec<GpuProcess>>) -> DeviceSample {
    let absent = Err(Absence::NotSupported);
    let mut sample = DeviceSample::absent(Duration::from_secs(1), Absence::NotYet);
    sample.gpus.push(GpuSample {
        id: gpu(),
        index: 0,
        name: "test".into(),
        pci: String::new(),
        parent: None,
        memory: Ok(DeviceMemory { total: 80 * GIB, used, free: 80 * GIB - used, reserved: Some(GIB / 2) }),
        processes,
        process_utilization: Ok(Vec::new()),
        utilization: absent,
        memory_bandwidth_utilization: absent,
        power_watts: absent,
        energy_joules: absent,
        temperature_celsius: absent,
        pcie_transmit_bytes_per_second: absent,
        pcie_receive_bytes_per_second: absent,
        clocks_event_reasons: Err(Absence::NotSupported),
        ecc_corrected: Err(Absence::NotSupported),
        ecc_uncorrected: Err(Absence::NotSupported),
        mig_enabled: Err(Absence::NotSupported),
        compute_mode: Err(Absence::NotSupported),
        read: BTreeMap::new(),
    });
    sample
}

fn tenant(name: &str) -> Tenant {
    Tenant::plain(TenantKind::Docker, name)
}

struct World {
    node: Node,
    by_process: BTreeMap<ProcessId, Tenant>,
    by_pid: BTreeMap<u32, Tenant>,
}

impl World {
    fn of(names: &[(u32, &str)]) -> Self {
        Self {
            node: Node::default(),
            by_process: names.iter().map(|(pid, name)| (ProcessId(u64::from(*pid)), tenant(name))).collect(),
            by_pid: names.iter().map(|(pid, name)| (*pid, tenant(name))).collect(),
        }
    }

    fn step(&mut self, processes: Vec<ProcessSample>, device: &DeviceSample, now: u64) -> Step {
        let kernel = KernelSample { processes, ..KernelSample::default() };
        let classes = BTreeMap::new();
        let names = Names { by_process: &self.by_process, by_pid: &self.by_pid, classes: &classes };
        self.node.advance(&kernel, device, names, Duration::from_secs(now), KEEP)
    }
}

fn memory(step: &Step, name: &str) -> MemoryTotals {
    let view = step.tenants.iter().find(|view| view.tenant == tenant(name)).unwrap();
    view.memory[&(GpuRef::Known(gpu()), MemoryKind::Device)]
}

#[test]
fn c01_sharers_of_one_gpu_have_their_own_values() {
    let mut world = World::of(&[(11, "a"), (12, "b"), (13, "c")]);
    let rows = vec![row(11, Ok(GIB)), row(12, Ok(2 * GIB)), row(13, Ok(3 * GIB))];
    let step = world.step(Vec::new(), &device(6 * GIB, Ok(rows)), 1);
    let bytes: Vec<_> = step.tenants.iter().map(|view| view.process_bytes[&gpu()]).collect();
    assert_eq!(bytes, [Ok(GIB), Ok(2 * GIB), Ok(3 * GIB)]);
    assert_eq!(step.gpus[0].unattributed, Ok(0));
}

#[test]
fn c11_a_killed_process_leaves_its_peak_and_its_counters_but_no_live_bytes() {
    let mut world = World::of(&[(11, "a")]);
    let nothing = device(0, Ok(Vec::new()));
    assert_eq!(memory(&world.step(vec![process(11, 4 * GIB)], &nothing, 1), "a").live, 4 * GIB);
    let mut dead = process(11, 4 * GIB);
    dead.ended = Some(End::Exit);
    let step = world.step(vec![dead], &nothing, 2);
    assert!(step.retired.contains(&ProcessId(11)));
    let after = memory(&world.step(Vec::new(), &nothing, 3), "a");
    assert_eq!((after.live, after.peak, after.allocated, after.freed), (0, 4 * GIB, 4 * GIB, 4 * GIB));
    let step = world.step(Vec::new(), &nothing, 3 + KEEP.as_secs() + 1);
    assert!(step.tenants.is_empty(), "a tenant that is gone ends its series");
}

#[test]
fn c07_the_mps_server_is_its_own_owner() {
    let mut world = World::of(&[(11, "a"), (99, "host")]);
    let mut server = row(99, Ok(69 << 20));
    server.mps_server = true;
    let step = world.step(Vec::new(), &device(GIB, Ok(vec![row(11, Ok(GIB / 2)), server])), 1);
    let owners: Vec<_> = step.tenants.iter().map(|view| view.tenant.name.as_str()).collect();
    assert_eq!(owners, ["docker:a", "system:mps-server"]);
}

#[test]
fn c38_a_process_without_bytes_is_there_and_not_summed() {
    let mut world = World::of(&[(11, "a"), (12, "b")]);
    let rows = vec![row(11, Err(Absence::NotAvailable)), row(12, Ok(GIB))];
    let step = world.step(Vec::new(), &device(3 * GIB, Ok(rows)), 1);
    assert_eq!(step.tenants[0].process_bytes[&gpu()], Err(Absence::NotAvailable));
    assert_eq!(step.gpus[0].unattributed, Ok(2 * GIB));
    assert_eq!(step.gpus[0].unattributed_reason, Some("process_bytes_unknown"));
}

#[test]
fn c30_used_memory_without_a_visible_process_is_unattributed_with_its_reason() {
    let step = World::of(&[]).step(Vec::new(), &device(7 * GIB, Ok(Vec::new())), 1);
    assert_eq!(step.gpus[0].unattributed, Ok(7 * GIB));
    assert_eq!(step.gpus[0].unattributed_reason, Some("no_process_visible"));
}

#[test]
fn r2_is_not_claimed_when_nvml_contradicts_itself() {
    let step = World::of(&[(11, "a")]).step(Vec::new(), &device(GIB, Ok(vec![row(11, Ok(2 * GIB))])), 1);
    assert_eq!(step.gpus[0].unattributed, Err(Absence::Implausible));
}

#[test]
fn c49_what_nvml_sees_beyond_the_ledger_is_named_by_how_the_ledger_began() {
    let mut world = World::of(&[(11, "a"), (12, "b"), (13, "c")]);
    let mut late = process(12, GIB);
    late.confidence = Confidence::JoinedLate;
    let rows = vec![row(11, Ok(GIB + 500)), row(12, Ok(3 * GIB)), row(13, Ok(GIB))];
    let step =
        world.step(vec![process(11, GIB), late, process(13, 2 * GIB)], &device(5 * GIB + 500, Ok(rows)), 1);
    let residual = |index: usize| step.tenants[index].residual[&gpu()];
    assert_eq!(residual(0), Residual { context: 500, ..Residual::default() });
    assert_eq!(residual(1), Residual { baseline: signed(2 * GIB), ..Residual::default() });
    assert_eq!(residual(2), Residual { drift: -signed(GIB), ..Residual::default() });
}

#[test]
fn a_process_that_nvml_lists_and_no_probe_saw_makes_its_tenant_joined_late() {
    let mut world = World::of(&[(11, "a")]);
    let step = world.step(Vec::new(), &device(GIB, Ok(vec![row(11, Ok(GIB))])), 1);
    assert_eq!(step.tenants[0].confidence, Confidence::JoinedLate);
    assert_eq!(step.tenants[0].residual[&gpu()].baseline, signed(GIB));
}

#[test]
fn counters_of_a_tenant_only_grow_over_its_processes_lives() {
    let mut world = World::of(&[(11, "a"), (12, "a")]);
    let nothing = device(0, Ok(Vec::new()));
    world.step(vec![process(11, GIB), process(12, GIB)], &nothing, 1);
    let mut dead = process(11, GIB);
    dead.ended = Some(End::Exec);
    let both = memory(&world.step(vec![dead, process(12, GIB)], &nothing, 2), "a");
    let one = memory(&world.step(vec![process(12, GIB)], &nothing, 3), "a");
    assert_eq!(both, one);
    assert_eq!((one.live, one.allocated, one.freed, one.peak), (GIB, 2 * GIB, GIB, 2 * GIB));
}

#[test]
fn what_pools_have_taken_is_known_of_all_processes_or_not_said() {
    let pooled = |id, live, bytes, confidence| {
        let mut process = process(id, live);
        process.ledger[0].kind = MemoryKind::Pool;
        ProcessSample { pools: vec![PoolRow { gpu: gpu(), bytes }], confidence, ..process }
    };
    let sum = |processes: &[ProcessSample]| {
        super::pools(&processes.iter().collect::<Vec<_>>()).get(&gpu()).copied().flatten()
    };
    let complete = Confidence::Complete;
    assert_eq!(sum(&[pooled(1, 3, Some(32), complete), pooled(2, 0, Some(64), complete)]), Some(96));
    for unknown in [
        pooled(2, 0, None, complete),
        pooled(2, 0, Some(64), Confidence::JoinedLate),
        pooled(2, 65, Some(64), complete),
        ProcessSample { pools: Vec::new(), ..pooled(2, 1, None, complete) },
    ] {
        assert_eq!(sum(&[pooled(1, 3, Some(32), complete), unknown.clone()]), None);
        assert_eq!(sum(&[unknown, pooled(1, 3, Some(32), complete)]), None);
    }
}
