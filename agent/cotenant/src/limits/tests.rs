//! Owns what is made of processes' words and of cgroups on a host of files.
//! Refuses maps: ordinals need a kernel, and are shown with the whole agent.

use std::fs;

use cotenant_model::{
    Absence, GpuProcess, GpuSample, MemoryKind, TenantKind,
    sample::{CallRow, Confidence, LedgerRow},
};

use super::*;

const GIB: u64 = 1 << 30;
const GPU: &str = "GPU-6a1b2c3d-0000-4444-8888-123456789abc";
const PROCESS: ProcessId = ProcessId(7);

fn gpu() -> GpuId {
    GpuId::from_nvml(GPU)
}

fn write(root: &tempfile::TempDir, file: &str, text: &str) {
    let path = root.path().join(file);
    fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    fs::write(path, text).expect("a file");
}

/// A process of PID 7 that holds 3 GiB and says something of itself.
fn root(environment: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    write(&root, "proc/7/environ", environment);
    write(&root, "proc/7/cgroup", "0::/pods/a\n");
    root
}

fn kernel() -> KernelSample {
    let row = LedgerRow {
        gpu: GpuRef::Known(gpu()),
        kind: MemoryKind::Device,
        live: 3 * GIB,
        peak: 3 * GIB,
        allocated: 3 * GIB,
        freed: 0,
        allocations: 1,
        frees: 0,
    };
    let call =
        CallRow { gpu: GpuRef::Known(gpu()), operation: cotenant_model::Operation::MemAlloc, calls: 1 };
    let process = ProcessSample {
        id: PROCESS,
        tgid: 7,
        uid: 0,
        cgroup_id: 1,
        comm: "tenant".into(),
        first_seen: 1,
        ended: None,
        ended_at: 0,
        confidence: Confidence::Complete,
        before_memory: true,
        last_calls: Vec::new(),
        pools: Vec::new(),
        ledger: vec![row],
        calls: vec![call],
        failures: Vec::new(),
        latency: Vec::new(),
        waits: Vec::new(),
        blame: Vec::new(),
        effort: Vec::new(),
    };
    KernelSample { processes: vec![process], ..KernelSample::default() }
}

fn device(client: bool) -> DeviceSample {
    let listed = GpuProcess {
        pid: 7,
        bytes: Ok(GIB),
        compute: true,
        graphics: false,
        mps_client: client,
        mps_server: false,
    };
    let gpu = GpuSample {
        pci: "00000000:03:00.0".into(),
        processes: Ok(vec![listed]),
        ..GpuSample::absent(gpu(), 0, Absence::NotSupported)
    };
    DeviceSample { gpus: vec![gpu], ..DeviceSample::absent(Duration::ZERO, Absence::NotYet) }
}

fn after(root: &tempfile::TempDir, device: &DeviceSample) -> Limits {
    let mut limits = Limits::new(Host::at(root.path()));
    limits.advance(&kernel(), device, (None, None), Duration::from_secs(1));
    limits
}

fn of(limits: &Limits) -> Vec<(u64, LimitSource, Option<u64>)> {
    limits.of(PROCESS, &gpu()).map(|limit| (limit.bytes, limit.source, limit.room())).collect()
}

#[test]
fn a_word_is_a_limit_only_of_a_client() {
    let root = root(&format!("A=1\0{MPS_VARIABLE}={GPU}=4G\0"));
    assert_eq!(of(&after(&root, &device(true))), [(4 * GIB, LimitSource::Mps, Some(GIB))]);
    assert_eq!(of(&after(&root, &device(false))), [(4 * GIB, LimitSource::Declared, Some(GIB))]);
}

#[test]
fn a_gpu_that_nvml_does_not_list_is_nothing() {
    let root = root(&format!("{MPS_VARIABLE}=GPU-\"}} evil 1=4G,GPU-junk=1G\0"));
    let limits = after(&root, &device(true));
    assert_eq!(of(&limits), []);
    assert!(limits.by_process.is_empty());
}

#[test]
fn c116_the_tightest_cgroup_above_counts_with_what_it_uses() {
    let root = root("");
    let region = "drm/0000:03:00.0/vram0";
    write(&root, "sys/fs/cgroup/cgroup.controllers", "memory dmem\n");
    write(&root, "sys/fs/cgroup/pods/a/dmem.current", &format!("{region} {}\n", 4 * GIB));
    write(&root, "sys/fs/cgroup/pods/a/dmem.max", &format!("{region} {}\n", 16 * GIB));
    write(&root, "sys/fs/cgroup/pods/dmem.current", &format!("{region} {}\n", 18 * GIB));
    write(&root, "sys/fs/cgroup/pods/dmem.max", &format!("{region} {}\n", 20 * GIB));
    let limits = after(&root, &device(false));
    assert_eq!(of(&limits), [(20 * GIB, LimitSource::Dmem, Some(2 * GIB))]);
    let tenant = Tenant::plain(TenantKind::Docker, "a");
    let tenants = BTreeMap::from([(PROCESS, tenant.clone())]);
    let mut node = cotenant_model::Node::default();
    let (by_pid, classes) = (BTreeMap::new(), BTreeMap::new());
    let names = cotenant_model::Names { by_process: &tenants, by_pid: &by_pid, classes: &classes };
    let minute = Duration::from_mins(1);
    let mut step = node.advance(&kernel(), &device(false), names, minute, minute);
    limits.publish(&tenants, &mut step.tenants);
    let view = step.tenants.iter().find(|view| view.tenant == tenant).expect("a tenant");
    assert_eq!(view.device_cgroup_bytes, BTreeMap::from([(gpu(), 4 * GIB)]), "its own, not the pods'");
    let [(on, limit)] = view.limits.as_slice() else { panic!("{:?}", view.limits) };
    assert_eq!((on, limit.bytes, limit.used), (&gpu(), 20 * GIB, Some(18 * GIB)));
}

#[test]
fn c116_without_the_controller_there_is_nothing_and_no_error() {
    assert_eq!(of(&after(&root(""), &device(true))), []);
}
