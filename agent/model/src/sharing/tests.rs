//! Owns the situations in which a GPU's sharing mode is told, and those in which it is not.
//! Refuses a node: the samples are made by hand.

use super::*;
use crate::grant::DeviceId;
use crate::{Absence, TenantKind};

const UUID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";

fn id() -> GpuId {
    GpuId::from_nvml(&format!("GPU-{UUID}"))
}

fn at(minutes: u64) -> Duration {
    Duration::from_mins(minutes)
}

fn process(pid: u32) -> GpuProcess {
    let bytes = Ok(1 << 30);
    GpuProcess { pid, bytes, compute: true, graphics: false, mps_client: false, mps_server: false }
}

fn gpu(processes: Vec<GpuProcess>) -> GpuSample {
    GpuSample { processes: Ok(processes), ..GpuSample::absent(id(), 0, Absence::NotSupported) }
}

fn sample(gpus: Vec<GpuSample>) -> DeviceSample {
    DeviceSample { gpus, ..DeviceSample::absent(Duration::ZERO, Absence::NotYet) }
}

/// A process belongs to the tenant of its PID's tens; below ten it is nobody's.
fn owner(process: &GpuProcess) -> Option<Tenant> {
    let tens = process.pid / 10;
    (tens > 0).then(|| Tenant::plain(TenantKind::Docker, &tens.to_string()))
}

fn judge(sharers: &mut Sharers, gpu: GpuSample, now: Duration) -> (Mode, Basis) {
    let told = sharers.advance(&sample(vec![gpu]), owner, &BTreeMap::new(), now);
    (told[&id()].mode, told[&id()].basis)
}

#[test]
fn nobody_was_seen_is_unknown_and_one_tenant_takes_ten_minutes() {
    let mut sharers = Sharers::default();
    assert_eq!(judge(&mut sharers, gpu(vec![]), at(0)), (Mode::Unknown, Basis::Nothing));
    // Two processes of one tenant are one tenant.
    let both = || gpu(vec![process(11), process(12)]);
    assert_eq!(judge(&mut sharers, both(), at(1)).0, Mode::Unknown);
    assert_eq!(judge(&mut sharers, both(), at(11)), (Mode::Exclusive, Basis::Processes));
    assert_eq!(judge(&mut sharers, gpu(vec![]), at(30)).0, Mode::Unknown, "who left says nothing any more");
}

#[test]
fn two_tenants_at_once_are_time_slices_for_a_while() {
    let mut sharers = Sharers::default();
    let told = judge(&mut sharers, gpu(vec![process(11), process(21)]), at(0));
    assert_eq!(told, (Mode::TimeSliced, Basis::Processes));
    assert_eq!(judge(&mut sharers, gpu(vec![process(11)]), at(9)).0, Mode::TimeSliced);
    assert_eq!(judge(&mut sharers, gpu(vec![process(11)]), at(20)), (Mode::Exclusive, Basis::Processes));
}

#[test]
fn one_after_the_other_is_not_at_once() {
    let mut sharers = Sharers::default();
    judge(&mut sharers, gpu(vec![process(11)]), at(0));
    assert_eq!(judge(&mut sharers, gpu(vec![process(21)]), at(1)), (Mode::Unknown, Basis::Nothing));
}

#[test]
fn c07_mps_is_told_by_its_clients_and_the_server_is_no_tenant() {
    let mut sharers = Sharers::default();
    let client = |pid| GpuProcess { mps_client: true, ..process(pid) };
    let server = GpuProcess { mps_server: true, ..process(99) };
    let mut with = gpu(vec![client(11), client(21), server]);
    with.compute_mode = Ok(ComputeMode::ExclusiveProcess);
    let told = sharers.advance(&sample(vec![with.clone()]), owner, &BTreeMap::new(), at(0));
    let sharing = told[&id()];
    assert_eq!((sharing.mode, sharing.basis, sharing.tenants), (Mode::Mps, Basis::MpsLists, 2));
    with.processes = Ok(vec![]);
    assert_eq!(judge(&mut sharers, with, at(20)), (Mode::Exclusive, Basis::ComputeMode), "the server left");
}

#[test]
fn c41_a_cut_gpu_is_mig_and_its_instances_have_modes_of_their_own() {
    let mut sharers = Sharers::default();
    let whole = GpuSample { mig_enabled: Ok(true), processes: Err(Absence::NotSupported), ..gpu(vec![]) };
    let instance = GpuId::from_nvml("MIG-1");
    let cut = GpuSample {
        id: instance.clone(),
        parent: Some(id()),
        mig_enabled: Err(Absence::NotSupported),
        ..gpu(vec![process(11), process(21)])
    };
    let told = sharers.advance(&sample(vec![whole, cut]), owner, &BTreeMap::new(), at(0));
    assert_eq!(told[&id()].mode, Mode::Mig);
    assert_eq!((told[&instance].mode, told[&instance].tenants), (Mode::TimeSliced, 2));
}

#[test]
fn what_was_granted_counts_before_what_was_seen_and_after_what_is_enforced() {
    let grant = |device: &str, resource: &str| Grant {
        namespace: "ml".into(),
        pod: "a".into(),
        pod_uid: None,
        container: "main".into(),
        resource: resource.into(),
        devices: vec![GrantedDevice::Known(DeviceId::parse(&format!("{device}{UUID}")).unwrap())],
    };
    let replica = |device: &str| {
        let id = DeviceId::parse(&format!("{device}{UUID}::1")).unwrap();
        Grant { devices: vec![GrantedDevice::Known(id)], ..grant("GPU-", "nvidia.com/gpu") }
    };
    let of = |grants: &[Grant]| granted(grants).get(&id()).copied();
    assert_eq!(of(&[grant("GPU-", "nvidia.com/gpu")]), Some(Granted::Whole));
    assert_eq!(of(&[grant("GPU-", "nvidia.com/gpu.shared")]), Some(Granted::Shares));
    assert_eq!(of(&[grant("GPU-", "nvidia.com/gpu"), replica("GPU-")]), Some(Granted::Shares));
    let reserved = Grant { namespace: "kai-resource-reservation".into(), ..replica("GPU-") };
    assert_eq!(of(&[reserved]), None);
    let shares = BTreeMap::from([(id(), Granted::Shares)]);
    let told = |gpu, granted: &BTreeMap<_, _>| {
        Sharers::default().advance(&sample(vec![gpu]), owner, granted, at(0))[&id()]
    };
    assert_eq!(told(gpu(vec![]), &shares).mode, Mode::TimeSliced);
    let enforced = GpuSample { compute_mode: Ok(ComputeMode::ExclusiveProcess), ..gpu(vec![]) };
    assert_eq!(told(enforced, &shares).basis, Basis::ComputeMode);
    let whole = BTreeMap::from([(id(), Granted::Whole)]);
    assert_eq!(told(gpu(vec![process(11)]), &whole).basis, Basis::Grants);
    assert_eq!(told(gpu(vec![process(11), process(21)]), &whole).mode, Mode::TimeSliced, "seen is seen");
}

#[test]
fn a_list_that_was_not_read_takes_nothing_away() {
    let mut sharers = Sharers::default();
    judge(&mut sharers, gpu(vec![process(11), process(21)]), at(0));
    let unread = GpuSample { processes: Err(Absence::Timeout), ..gpu(vec![]) };
    assert_eq!(judge(&mut sharers, unread, at(5)).0, Mode::TimeSliced);
}
