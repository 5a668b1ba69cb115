//! Owns grants beside use, made by hand: the cases that fleets have met.

use super::*;
use crate::{
    DeviceMemory, GpuProcess, GpuSample, MemoryKind,
    excess::Excess,
    grant::{DeviceId, Grant, GrantedDevice, JobDevice, JobFacts, JobGrant},
    sample::Confidence,
    sharing::Sharing,
    view::MemoryTotals,
};

const GIB: u64 = 1 << 30;
const X: &str = "GPU-00000000-0000-0000-0000-000000000001";
const Y: &str = "GPU-00000000-0000-0000-0000-000000000002";
const SECOND: Duration = Duration::from_secs(1);
/// Nobody answers.
const SILENT: Facts<'static> = Facts {
    answered: false,
    grants: &[],
    live: None,
    all_named: false,
    minors: &BTreeMap::new(),
    declared: &[],
    resources: &[],
    jobs: JobFacts::NONE,
};

fn id(text: &str) -> GpuId {
    GpuId::from_nvml(text)
}

fn gpu(name: &str, processes: Reading<Vec<GpuProcess>>) -> GpuView {
    let sample = GpuSample {
        memory: Ok(DeviceMemory { total: 80 * GIB, used: 0, free: 80 * GIB, reserved: None }),
        processes,
        process_utilization: Ok(Vec::new()),
        ..GpuSample::absent(id(name), 0, Absence::NotSupported)
    };
    GpuView {
        sample,
        age_seconds: 0.0,
        figure_ages: BTreeMap::new(),
        sharing: Sharing::UNKNOWN,
        reserved: Ok(0),
        unattributed: Ok(0),
        unattributed_reason: None,
    }
}

fn both() -> Vec<GpuView> {
    vec![gpu(X, Ok(Vec::new())), gpu(Y, Ok(Vec::new()))]
}

fn holder(namespace: &str, pod: &str) -> Holder {
    Holder::Pod { namespace: namespace.into(), pod: pod.into(), container: Some("main".into()) }
}

/// The only container of a pod of `team-a`, which uses `bytes` by NVML.
fn user(pod: &str, on: &str, bytes: u64) -> TenantView {
    TenantView {
        tenant: holder("team-a", pod).tenant(),
        processes: 1,
        confidence: Confidence::Complete,
        memory: BTreeMap::new(),
        process_bytes: BTreeMap::from([(id(on), Ok(bytes))]),
        residual: BTreeMap::new(),
        pool_reserved: BTreeMap::new(),
        utilization: BTreeMap::new(),
        operations: BTreeMap::new(),
        failures: BTreeMap::new(),
        latency: BTreeMap::new(),
        waits: BTreeMap::new(),
        excess: Excess::default(),
        limits: Vec::new(),
        device_cgroup_bytes: BTreeMap::new(),
        notes: Vec::new(),
    }
}

fn grant(namespace: &str, pod: &str, uid: &str, ids: &[&str]) -> Grant {
    let device = |id: &&str| GrantedDevice::Known(DeviceId::parse(id).unwrap());
    Grant {
        namespace: namespace.into(),
        pod: pod.into(),
        pod_uid: Some(uid.into()),
        container: "main".into(),
        resource: "nvidia.com/gpu".into(),
        devices: ids.iter().map(device).collect(),
    }
}

struct World {
    book: Book,
    grants: Vec<Grant>,
    declared: Vec<Declared>,
    live: BTreeSet<String>,
}

impl World {
    fn of(grants: Vec<Grant>) -> Self {
        Self { book: Book::default(), grants, declared: Vec::new(), live: BTreeSet::from(["live".into()]) }
    }

    fn tick(&mut self, tenants: &[TenantView], gpus: &[GpuView]) -> GrantsView {
        let facts = Facts {
            answered: true,
            grants: &self.grants,
            live: Some(&self.live),
            all_named: true,
            minors: &BTreeMap::from([(3, id(Y))]),
            declared: &self.declared,
            resources: &[],
            jobs: JobFacts::NONE,
        };
        self.book.advance(facts, tenants, gpus, Ok(()), SECOND)
    }

    fn declare(&mut self, namespace: &str, pod: &str, annotations: &[(&str, &str)], group: &str) {
        let find = |key: &str| annotations.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let labels = [("runai-gpu-group", group)].into_iter().filter(|_| !group.is_empty());
        let declared = Declared::read(find, labels);
        self.declared.push(Declared { namespace: namespace.into(), pod: pod.into(), ..declared });
    }
}

fn standing(view: &GrantsView, tenant: &str, on: &str) -> Option<Reading<Standing>> {
    let mut rows = view.standings.iter().filter(|row| row.tenant.name == tenant && row.gpu == id(on));
    let found = rows.next().map(|row| row.standing);
    assert!(rows.next().is_none(), "{tenant} on {on} twice");
    found
}

#[test]
fn c02_slots_of_one_gpu_and_use_of_another_are_a_mismatch() {
    let slots = [format!("{X}::5"), format!("{X}::19")];
    let mut world = World::of(vec![grant("team-a", "a", "live", &[&slots[0], &slots[1]])]);
    let view = world.tick(&[user("a", Y, GIB)], &both());
    assert_eq!(standing(&view, "pod:team-a/a", X), Some(Ok(Standing::GrantedIdle)));
    assert_eq!(standing(&view, "pod:team-a/a", Y), Some(Ok(Standing::Mismatch)));
    assert_eq!(view.shares.len(), 1);
    assert_eq!((view.shares[0].gpu.clone(), view.shares[0].shares), (Some(id(X)), 2));
    // It is used elsewhere: nobody says a zero for it.
    assert!(view.standings.iter().all(|row| row.bytes.is_none()));
}

#[test]
fn c06_use_without_a_grant_is_told_and_only_once_kubelet_answered() {
    let mut world = World::of(Vec::new());
    let view = world.tick(&[user("a", X, GIB)], &both());
    assert_eq!(standing(&view, "pod:team-a/a", X), Some(Ok(Standing::UsedWithoutGrant)));
    let docker = TenantView { tenant: Tenant::plain(TenantKind::Docker, "db"), ..user("a", X, GIB) };
    assert!(world.tick(&[docker], &both()).standings.is_empty(), "no pod, no grant to miss");
    let view = world.book.advance(SILENT, &[user("a", X, GIB)], &both(), Ok(()), SECOND);
    assert!(view.standings.is_empty() && view.stale.is_none());
}

#[test]
fn c14_c24_a_grant_without_a_process_is_idle_only_where_the_lists_were_read() {
    let mut world = World::of(vec![grant("team-a", "a", "live", &[X])]);
    world.tick(&[], &both());
    let view = world.tick(&[], &both());
    let row = &view.standings[0];
    assert_eq!((row.standing, row.bytes), (Ok(Standing::GrantedIdle), Some(Ok(0))));
    assert_eq!(row.idle_seconds, Some(2.0));
    let blind = [gpu(X, Err(Absence::Timeout))];
    let view = world.tick(&[], &blind);
    let row = &view.standings[0];
    assert_eq!((row.standing, row.bytes), (Err(Absence::Timeout), Some(Err(Absence::Timeout))));
    assert_eq!(row.idle_seconds, Some(2.0), "what is not known is not idle");
    assert_eq!(view.shares[0].shares, 1, "the grant is there all the same");
    // The probes see it where NVML does not.
    let mut seen = user("a", X, 0);
    seen.process_bytes.clear();
    let live = MemoryTotals { live: GIB, ..MemoryTotals::default() };
    seen.memory.insert((GpuRef::Known(id(X)), MemoryKind::Device), live);
    assert_eq!(standing(&world.tick(&[seen], &blind), "pod:team-a/a", X), Some(Ok(Standing::GrantedAndUsed)));
    let view = world.tick(&[], &[]);
    assert_eq!(view.standings[0].bytes, Some(Err(Absence::NotAvailable)));
}

#[test]
fn c09_a_stale_grant_is_counted_and_never_idle() {
    let mut world = World::of(vec![grant("team-a", "gone", "dead", &[X])]);
    let view = world.tick(&[], &both());
    assert_eq!(standing(&view, "pod:team-a/gone", X), Some(Ok(Standing::Stale)));
    assert_eq!(view.stale, Some(1));
    assert_eq!((view.standings[0].bytes, view.standings[0].idle_seconds), (None, None));
}

#[test]
fn c28_a_reservation_is_the_system_s_and_whoever_shares_it_has_the_grant() {
    let reserved = "kai-resource-reservation";
    let mut world = World::of(vec![grant(reserved, "gpu-reservation-1", "live", &[X])]);
    world.declare(reserved, "gpu-reservation-1", &[], "g");
    world.declare("team-a", "t", &[("gpu-fraction", "0.5")], "g");
    let view = world.tick(&[user("t", X, 50 * GIB)], &both());
    assert_eq!(standing(&view, "system:gpu-reservation", X), Some(Ok(Standing::Reservation)));
    let of_t = view.standings.iter().find(|row| row.tenant.pod.as_deref() == Some("t")).unwrap();
    assert_eq!((of_t.standing, of_t.gpu.clone()), (Ok(Standing::GrantedAndUsed), id(X)));
    assert!(view.standings.iter().all(|row| row.tenant.namespace.as_deref() != Some(reserved)));
    let row = &view.requests[0];
    assert_eq!((row.source, row.bytes, row.over), (RequestSource::KaiFraction, 40 * GIB, Some(10 * GIB)));
    // Without the label that says for whom the reservation is.
    world.declared.clear();
    world.declare("team-a", "t", &[("gpu-memory", "2000")], "");
    let view = world.tick(&[user("t", X, 6 * GIB), user("u", X, GIB)], &both());
    assert_eq!(standing(&view, "pod:team-a/t", X), Some(Ok(Standing::GrantedAndUsed)));
    assert_eq!(standing(&view, "pod:team-a/u", X), Some(Ok(Standing::UsedWithoutGrant)));
    assert_eq!(view.requests[0].over, Some(6 * GIB - (2000 << 20)));
}

#[test]
fn c19_a_request_is_the_pod_s_and_unknown_use_is_not_over_it() {
    let mut world = World::of(vec![grant("team-a", "a", "live", &[&format!("{X}::1")])]);
    world.declare("team-a", "a", &[("hami.io/vgpu-devices-allocated", &format!("{Y},NVIDIA,3000,30:;"))], "");
    let mut sidecar = user("a", Y, GIB);
    sidecar.tenant.container = Some("sidecar".into());
    let view = world.tick(&[user("a", Y, 3 * GIB), sidecar], &both());
    let row = &view.requests[0];
    assert_eq!(
        (row.gpu.clone(), row.source, row.tenant.container.clone()),
        (id(Y), RequestSource::Hami, None)
    );
    assert_eq!(row.over, Some(4 * GIB - (3000 << 20)));
    // Its scheduler chose this GPU: what kubelet picked is a slot.
    let main = view.standings.iter().find(|row| row.tenant.container.as_deref() == Some("main")).unwrap();
    assert_eq!((main.standing, main.gpu.clone()), (Ok(Standing::GrantedAndUsed), id(Y)));
    let view = world.tick(&[], &[gpu(Y, Err(Absence::GpuLost))]);
    assert_eq!(view.requests[0].over, None);

    let mut world = World::of(vec![grant("team-a", "whole", "live", &["nvidia3"])]);
    let view = world.tick(&[], &both());
    let row = &view.requests[0];
    assert_eq!((row.gpu.clone(), row.source, row.bytes), (id(Y), RequestSource::Device, 80 * GIB));
}

#[test]
fn a_part_of_a_gpu_covers_the_instances_that_nvml_lists() {
    let mut world = World::of(vec![grant("team-a", "a", "live", &["nvidia3/gi1"])]);
    let instance = "MIG-00000000-0000-0000-0000-000000000009";
    let mut gpus = both();
    let mut below = gpu(instance, Ok(Vec::new()));
    below.sample.parent = Some(id(Y));
    gpus.push(below);
    let view = world.tick(&[user("a", instance, GIB)], &gpus);
    assert_eq!(view.standings.len(), 1);
    assert_eq!(standing(&view, "pod:team-a/a", Y), Some(Ok(Standing::GrantedAndUsed)));
    assert!(view.requests.is_empty(), "how much of the GPU is not said");
}

#[test]
fn a_claim_without_a_uuid_covers_what_its_pod_uses() {
    let claim = GrantedDevice::Claimed { pool: "node".into(), device: "gpu-0".into() };
    let claimed = Grant { devices: vec![claim], ..grant("team-a", "a", "live", &[]) };
    let mut world = World::of(vec![claimed]);
    let view = world.tick(&[user("a", X, GIB)], &both());
    assert_eq!(standing(&view, "pod:team-a/a", X), Some(Ok(Standing::GrantedAndUsed)));
    assert_eq!((view.shares[0].gpu.clone(), view.shares[0].shares), (None, 1));
}

#[test]
fn units_of_memory_are_on_no_gpu_and_cover_what_their_pod_uses() {
    let ids = [format!("{X}-_-0"), format!("{X}-_-7"), format!("{Y}-_-3")];
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let units = Grant { resource: "aliyun.com/gpu-mem".into(), ..grant("team-a", "a", "live", &ids) };
    let mut world = World::of(vec![units]);
    world.declare("team-a", "a", &[("ALIYUN_COM_GPU_MEM_POD", "3"), ("ALIYUN_COM_GPU_MEM_DEV", "80")], "");
    let view = world.tick(&[user("a", Y, 4 * GIB)], &both());
    assert_eq!((view.shares.len(), view.shares[0].gpu.clone(), view.shares[0].shares), (1, None, 3));
    assert_eq!(view.standings.len(), 1);
    assert_eq!(standing(&view, "pod:team-a/a", Y), Some(Ok(Standing::GrantedAndUsed)));
    let row = &view.requests[0];
    assert_eq!((row.gpu.clone(), row.bytes, row.over), (id(Y), 3 * GIB, Some(GIB)));
}

#[test]
fn c24_a_job_has_the_same_rows_as_a_pod() {
    let gpus = {
        let mut gpus = both();
        gpus[1].sample.index = 1;
        gpus
    };
    let job = |job: &str, devices: &[JobDevice]| JobGrant {
        job: job.into(),
        devices: devices.iter().cloned().collect(),
    };
    let minors = BTreeMap::from([(9, id(Y))]);
    let live = BTreeSet::from(["1".to_owned(), "2".to_owned(), "3".to_owned()]);
    let grants = [
        job("1", &[JobDevice::Index(0), JobDevice::Uuid(id(X))]),
        job("2", &[JobDevice::Node(9)]),
        job("3", &[JobDevice::Index(7)]),
        job("4", &[JobDevice::Index(1)]),
    ];
    let mut book = Book::default();
    let mut tick = |answered: bool, live: Option<&BTreeSet<String>>, tenants: &[TenantView]| {
        let jobs = JobFacts { answered, grants: &grants, live, minors: &minors };
        book.advance(Facts { jobs, ..SILENT }, tenants, &gpus, Ok(()), SECOND)
    };
    let of = |job: &str, on: &str| TenantView {
        tenant: Tenant::plain(TenantKind::Slurm, job),
        ..user("a", on, GIB)
    };
    // What pods have is not known here, so nothing is missing of theirs.
    let tenants = [of("2", X), of("3", X), of("5", X), user("pod", X, GIB)];
    tick(true, Some(&live), &tenants);
    let view = tick(true, Some(&live), &tenants);
    let standing = |tenant: &str, on: &str| standing(&view, tenant, on);
    assert_eq!(standing("slurm:1", X), Some(Ok(Standing::GrantedIdle)));
    assert_eq!(standing("slurm:2", Y), Some(Ok(Standing::GrantedIdle)));
    assert_eq!(standing("slurm:2", X), Some(Ok(Standing::Mismatch)));
    // A GPU that nothing lists may be the one that it uses.
    assert_eq!(standing("slurm:3", X), Some(Ok(Standing::GrantedAndUsed)));
    assert_eq!(standing("slurm:4", Y), Some(Ok(Standing::Stale)));
    assert_eq!(standing("slurm:5", X), Some(Ok(Standing::UsedWithoutGrant)));
    assert_eq!(view.standings.len(), 6);
    assert_eq!(view.stale, Some(1));
    let idle = view.standings.iter().find(|row| row.tenant.name == "slurm:1").map(|row| row.idle_seconds);
    assert_eq!(idle, Some(Some(2.0)));
    let shares: Vec<_> = view.shares.iter().map(|row| (row.tenant.name.as_str(), row.shares)).collect();
    assert_eq!(shares, [("slurm:1", 1), ("slurm:2", 1), ("slurm:3", 1), ("slurm:4", 1)]);
    assert!(view.requests.is_empty(), "nobody says how much of it");

    // Without the site's word, a job that nothing is said of misses nothing; without cgroups nobody is gone.
    let view = tick(false, None, &tenants);
    assert!(view.standings.iter().all(|row| row.tenant.name != "slurm:5"));
    assert_eq!(view.stale, None);
    assert!(
        view.standings
            .iter()
            .any(|row| row.tenant.name == "slurm:4" && row.standing == Ok(Standing::GrantedIdle))
    );
}

#[test]
fn c24_a_job_on_a_gpu_with_mig_uses_its_parts() {
    let part = "MIG-00000000-0000-0000-0000-000000000009";
    let mut gpus = both();
    gpus[1].sample.index = 1;
    let mut mig = gpu(part, Ok(Vec::new()));
    mig.sample.parent = Some(id(X));
    gpus.push(mig);
    let grants = [JobGrant { job: "1".into(), devices: BTreeSet::from([JobDevice::Index(0)]) }];
    let jobs = JobFacts { answered: true, grants: &grants, ..JobFacts::NONE };
    let job = TenantView { tenant: Tenant::plain(TenantKind::Slurm, "1"), ..user("a", part, GIB) };
    let view = Book::default().advance(Facts { jobs, ..SILENT }, &[job], &gpus, Ok(()), SECOND);
    assert_eq!(standing(&view, "slurm:1", X), Some(Ok(Standing::GrantedAndUsed)));
    assert_eq!(view.standings.len(), 1);
}

#[test]
fn a_claim_is_on_the_gpu_that_its_name_can_only_mean() {
    let claim = |device: &str| GrantedDevice::Claimed { pool: "node".into(), device: device.into() };
    let map = |pairs: &[(u32, &str)]| pairs.iter().map(|(at, gpu)| (*at, id(gpu))).collect();
    let (minors, same): (BTreeMap<u32, GpuId>, BTreeMap<u32, GpuId>) =
        (map(&[(0, X), (1, Y)]), map(&[(0, X), (1, Y)]));
    let swapped = map(&[(0, Y), (1, X)]);
    assert_eq!(claim("gpu-1").claimed(&minors, &same), Some((id(Y), false)));
    assert_eq!(claim("gpu-0-mig-19-2-1").claimed(&minors, &same), Some((id(X), true)));
    assert_eq!(claim(&format!("gpu-{}", &Y[4..])).claimed(&minors, &swapped), Some((id(Y), false)));
    // Index and device node differ, or one is not known: it may be either.
    assert_eq!(claim("gpu-1").claimed(&minors, &swapped), None);
    assert_eq!(claim("gpu-1").claimed(&BTreeMap::new(), &same), None);
    for other in ["gpu-7", "gpu-", "gpu-x", "channel-0", "GPU-0", "gpu-01x", "gpu-0-vfio"] {
        assert_eq!(claim(other).claimed(&minors, &same), None, "{other}");
    }
}
