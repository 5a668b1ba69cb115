//! Owns the views that the tests publish, and a reader of text 0.0.4 that is as simple as the assertions need.
//! Refuses hosts: everything is made up here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cotenant_export::{Format, Row, encode, otlp::Exemplars, rows};
use cotenant_model::blame::{Edge, Share};
use cotenant_model::device::{CallCost, ComputeMode, DeviceMemory, LibraryFacts};
use cotenant_model::excess::Excess;
use cotenant_model::grant::{
    GrantsView, RequestRow, RequestSource, ShareRow, SourceView, Standing, StandingRow,
};
use cotenant_model::idle::{HoldersView, IdleHolder};
use cotenant_model::incident::Kind;
use cotenant_model::kill::Scope;
use cotenant_model::risk::warning::WarningCounts;
use cotenant_model::risk::{
    Calibration, Exhaustion, Forecast, GpuForecast, Growth, Headroom, HostForecast, MemoryForecast,
    TenantForecast, TenantMemoryForecast,
};
use cotenant_model::sample::{Confidence, GpuRef, Histogram, LibraryState, MapFill};
use cotenant_model::sharing::{Basis, Mode, Sharing};
use cotenant_model::verdict::{Limit, LimitScope, LimitSource};
use cotenant_model::view::{
    AgentView, EventsView, Feature, FeatureState, GpuView, MemoryTotals, OtlpView, Residual, TenantNote,
    TenantView, View,
};
use cotenant_model::xid::XidSource;
use cotenant_model::{
    Absence, CudaError, Culprit, GpuId, GpuSample, Loss, MemoryKind, Note, Operation, Tenant, TenantKind,
    WaitClass,
};

pub(crate) const MIB: u64 = 1 << 20;

const LIMIT: Limit =
    Limit { bytes: 4096 * MIB, source: LimitSource::Mps, scope: LimitScope::Process, used: Some(1024 * MIB) };

pub(crate) fn gpu_id(index: u32) -> GpuId {
    let mut bytes = [7; 16];
    bytes[..4].copy_from_slice(&index.to_be_bytes());
    GpuId::from_uuid(bytes)
}

pub(crate) fn gpu(index: u32) -> GpuView {
    let sample = GpuSample {
        id: gpu_id(index),
        index,
        name: "NVIDIA H200".to_owned(),
        pci: format!("00000000:{index:02x}:00.0"),
        parent: None,
        memory: Ok(DeviceMemory {
            total: 143_771 * MIB,
            used: 5_000 * MIB,
            free: 138_126 * MIB,
            reserved: Some(645 * MIB),
        }),
        processes: Ok(Vec::new()),
        process_utilization: Ok(Vec::new()),
        utilization: Ok(0.42),
        memory_bandwidth_utilization: Ok(0.17),
        power_watts: Ok(312.5),
        energy_joules: Ok(123_456.789),
        temperature_celsius: Ok(41.0),
        pcie_transmit_bytes_per_second: Ok(1_024_000.0),
        pcie_receive_bytes_per_second: Ok(2_048_000.0),
        clocks_event_reasons: Ok(0x4 | 0x1000),
        ecc_corrected: Ok(3),
        ecc_uncorrected: Ok(0),
        mig_enabled: Ok(false),
        compute_mode: Ok(ComputeMode::Default),
        read: BTreeMap::new(),
    };
    GpuView {
        sample,
        age_seconds: 1.25,
        figure_ages: BTreeMap::from([("energy", 120.5), ("utilization", 41.0)]),
        sharing: Sharing { mode: Mode::TimeSliced, basis: Basis::Processes, tenants: 3 },
        reserved: Ok(645 * MIB),
        unattributed: Ok(5_000 * MIB),
        unattributed_reason: None,
    }
}

pub(crate) fn pod(name: &str) -> Tenant {
    Tenant {
        name: format!("pod:ml/{name}"),
        kind: TenantKind::Pod,
        namespace: Some("ml".to_owned()),
        pod: Some(name.to_owned()),
        container: Some("main".to_owned()),
    }
}

pub(crate) fn histogram(seed: u64) -> Histogram {
    let mut histogram = Histogram::default();
    for (index, bucket) in histogram.buckets.iter_mut().enumerate() {
        *bucket = seed * index as u64;
        histogram.count += *bucket;
        histogram.sum_ns += *bucket * (200 << index.min(20));
    }
    histogram
}

/// A tenant on `gpus`, whose every figure is of size `seed`.
pub(crate) fn tenant(tenant: Tenant, gpus: &[u32], seed: u64) -> TenantView {
    let known = |index: &u32| GpuRef::Known(gpu_id(*index));
    let totals = MemoryTotals {
        live: seed * MIB,
        peak: 2 * seed * MIB,
        allocated: 10 * seed * MIB,
        freed: 9 * seed * MIB,
        allocations: 10 * seed,
        frees: 9 * seed,
    };
    let mut memory = BTreeMap::from([((GpuRef::Host, MemoryKind::HostPinned), totals)]);
    let mut operations = BTreeMap::from([((GpuRef::Host, Operation::MemHostAlloc), seed)]);
    let mut failures = BTreeMap::new();
    for gpu in gpus.iter().map(known).chain([GpuRef::Unknown]) {
        memory.insert((gpu.clone(), MemoryKind::Device), totals);
        operations.insert((gpu.clone(), Operation::MemAlloc), 10 * seed);
        operations.insert((gpu.clone(), Operation::MemFree), 9 * seed);
        failures.insert((gpu.clone(), Operation::MemAlloc, CudaError::OUT_OF_MEMORY), seed);
        failures.insert((gpu, Operation::PrimaryCtxRelease, CudaError::DEINITIALIZED), seed);
    }
    let residual = Residual { context: 480 * 1_048_576, baseline: 0, drift: -4096 };
    let note = TenantNote { source: "label", key: "app".into(), value: format!("of-{seed}") };
    let notes = if tenant.namespace.is_some() { vec![note] } else { Vec::new() };
    TenantView {
        tenant,
        notes,
        processes: 2,
        confidence: Confidence::Complete,
        memory,
        process_bytes: gpus.iter().map(|index| (gpu_id(*index), Ok(seed * MIB))).collect(),
        pool_reserved: gpus.iter().map(|index| (gpu_id(*index), Some(32 * seed * MIB))).collect(),
        residual: gpus.iter().map(|index| (gpu_id(*index), residual)).collect(),
        utilization: gpus.iter().map(|index| (gpu_id(*index), 0.25)).collect(),
        operations,
        failures,
        latency: [Operation::MemAlloc, Operation::MemFree].map(|op| (op, histogram(seed))).into(),
        waits: [WaitClass::RmApiLock, WaitClass::Reclaim].map(|class| (class, histogram(seed))).into(),
        excess: Excess { time_ns: seed * 1_000_000, calls: seed, unjudged: seed },
        limits: gpus.iter().map(|index| (gpu_id(*index), LIMIT)).collect(),
        device_cgroup_bytes: gpus.iter().map(|index| (gpu_id(*index), seed * MIB)).collect(),
    }
}

pub(crate) fn agent() -> AgentView {
    AgentView {
        version: "0.1.0",
        losses: Loss::ALL.iter().map(|loss| (*loss, 0)).collect(),
        notes: Note::ALL.iter().map(|note| (*note, 11)).collect(),
        maps: vec![MapFill { name: "POINTERS", entries: 120, capacity: 65_536 }],
        libraries: vec![LibraryState {
            path: "/proc/4242/root/usr/lib/libcuda.so.1".to_owned(),
            device: 66_306,
            inode: 4_242,
            attached: 48,
            missing: 3,
            failed: 0,
            processes: 5,
            pids: Vec::new(),
            shed: false,
            refused: None,
        }],
        features: vec![Feature {
            name: "kernel_boundary",
            state: FeatureState::Degraded,
            reason: "no kprobes; using the tracepoint".to_owned(),
            lost: String::new(),
            remedy: String::new(),
        }],
        missing_gpus: Some(1),
        nvml: Ok(LibraryFacts { driver_version: "580.159.04".to_owned(), nvml_version: "13.580".to_owned() }),
        nvml_age_seconds: Some(1.25),
        nvml_calls: vec![CallCost {
            function: "nvmlDeviceGetMemoryInfo_v2",
            calls: 6,
            errors: 1,
            timeouts: 0,
            total: Duration::from_micros(1_500),
            buckets: [1, 4, 5, 6, 6, 6, 6],
        }],
        nvml_absences: BTreeMap::from([(("mig_mode", Absence::NotSupported), 1)]),
        cpu_seconds: 12.5,
        resident_bytes: 14 * MIB,
        tick_seconds: 0.0021,
        tenants_folded: 0,
        blame_folded: 0,
        holder_candidates: Vec::new(),
        alert_pushes: vec![("accepted", 4), ("refused", 0), ("unreachable", 1)],
        otlp: vec![OtlpView {
            signal: "metrics",
            exported: 12_000,
            dropped: vec![("queue_full", 3), ("rejected", 0)],
            failures: vec![("unreachable", 2)],
            queued: 400,
            queued_bytes: 81_920,
            last_success_seconds: Some(12.5),
        }],
        probe_cost_seconds: Some(0.95e-6),
        probes_shed: 1,
        processes_untimed: 2,
    }
}

/// Everybody waited for the first tenant, and for the device.
fn blame(tenants: &[TenantView]) -> BTreeMap<Edge, Share> {
    let Some(culprit) = tenants.first().map(|view| Culprit::Tenant(view.tenant.clone())) else {
        return BTreeMap::new();
    };
    let share = Share { waits: 3, time_ns: 1_500_000_000 };
    let of = |victim: &TenantView| {
        let victim = victim.tenant.clone();
        [
            ((victim.clone(), culprit.clone(), WaitClass::RmApiLock), share),
            ((victim, Culprit::Device, WaitClass::Reclaim), share),
        ]
    };
    tenants.iter().flat_map(of).collect()
}

fn events(tenants: &[TenantView]) -> EventsView {
    EventsView {
        incidents: BTreeMap::from([(Kind::NoisyNeighbour, 4)]),
        open_incidents: 1,
        kills: tenants
            .iter()
            .map(|view| ((Some(view.tenant.clone()), Some(Scope::Memcg)), 2))
            .chain([((None, None), 1)])
            .collect(),
        xid_reports: BTreeMap::from([
            ((Some(gpu_id(0)), 31, XidSource::Kmsg), 2),
            ((Some(gpu_id(0)), 31, XidSource::Nvml), 1),
        ]),
        xids: BTreeMap::from([
            ((Some(gpu_id(0)), 31), (2, 1_795_999_000.5)),
            ((None, 45), (1, 1_795_999_001.0)),
        ]),
        lost: 0,
    }
}

/// Every tenant drives every GPU to the same part.
fn risk(gpus: &[GpuView], tenants: &[TenantView]) -> Forecast {
    let part = 1.0 / tenants.len().max(1) as f64;
    let of = |tenant: &TenantView| TenantForecast {
        tenant: tenant.tenant.clone(),
        share: part,
        live: 100 * MIB,
        peak: 130 * MIB,
        ceiling: 120 * MIB,
        rate: 0.0,
        growth: [Growth { median: MIB, p90: 2 * MIB, p99: 3 * MIB }; 3],
        need: 768 * MIB,
        quota: 768 * MIB,
    };
    let gpus = gpus.iter().map(|gpu| GpuForecast {
        gpu: gpu.sample.id.clone(),
        headroom: Headroom {
            limit: 143_771 * MIB,
            reserved: Some(645 * MIB),
            used: 5_000 * MIB,
            free: 138_126 * MIB,
            pool: Some(MIB),
            managed: 2 * MIB,
        },
        risk: [0.01, 0.25, 0.5],
        exhaustion: Some(Exhaustion { seconds: 75.0, low: 40.0, high: 150.0 }),
        tenants: tenants.iter().map(of).collect(),
        victims: tenants.iter().take(3).map(|tenant| tenant.tenant.clone()).collect(),
        exhausted: false,
        calibration: Calibration::default(),
        warning: None,
        warnings: [WarningCounts { came_true: 2, cleared: 1 }; 2],
    });
    let memory = MemoryForecast {
        limit: Some(64 * MIB),
        held: 48 * MIB,
        room: 16 * MIB,
        risk: [0.01, 0.25, 0.5],
        exhaustion: Some(Exhaustion { seconds: 75.0, low: 40.0, high: 150.0 }),
    };
    let bound = |tenant: &TenantView| TenantMemoryForecast {
        tenant: tenant.tenant.clone(),
        pinned: MIB,
        rate: 1e6,
        memory,
    };
    let host = HostForecast {
        node: Some(memory),
        tenants: tenants.iter().map(bound).collect(),
        ..HostForecast::default()
    };
    Forecast { at: Duration::from_secs(100), gpus: gpus.collect(), host: Some(host) }
}

/// Every pod was granted the first GPU and asked for half of what it holds; the first tenant lies idle on it.
fn grants(tenants: &[TenantView]) -> GrantsView {
    let pods = || tenants.iter().map(|view| view.tenant.clone()).filter(|of| of.kind == TenantKind::Pod);
    let share =
        |tenant| ShareRow { tenant, gpu: Some(gpu_id(0)), resource: "nvidia.com/gpu".to_owned(), shares: 2 };
    let standing = |tenant| StandingRow {
        tenant,
        gpu: gpu_id(0),
        standing: Ok(Standing::GrantedAndUsed),
        bytes: None,
        idle_seconds: Some(3.5),
    };
    let request = |tenant: Tenant| RequestRow {
        tenant: Tenant { container: None, ..tenant },
        gpu: gpu_id(0),
        source: RequestSource::KaiMemory,
        bytes: 50 * MIB,
        over: Some(50 * MIB),
    };
    let source = |name| SourceView { name, errors: 2, age_seconds: Some(1.5) };
    GrantsView {
        shares: pods().map(share).collect(),
        standings: pods().map(standing).collect(),
        requests: pods().map(request).collect(),
        stale: Some(1),
        unread_ids: 0,
        sources: ["podresources", "runtime", "apiserver"].map(source).into(),
    }
}

fn holders(tenants: &[TenantView]) -> HoldersView {
    let on = |view: &TenantView| (view.tenant.clone(), gpu_id(0));
    let idle = |view: &TenantView| IdleHolder {
        pid: 4242,
        tenant: view.tenant.clone(),
        gpu: gpu_id(0),
        bytes: 100 * MIB,
        idle_seconds: 900.5,
    };
    HoldersView {
        after_seconds: 600.0,
        idle: tenants.iter().take(1).map(idle).collect(),
        judged: tenants.iter().map(on).collect(),
    }
}

pub(crate) fn node(gpus: Vec<GpuView>, tenants: Vec<TenantView>) -> View {
    let blame = blame(&tenants);
    let events = events(&tenants);
    let risk = risk(&gpus, &tenants);
    let (grants, holders) = (grants(&tenants), holders(&tenants));
    View {
        taken_unix: 1_796_000_000.0,
        started_unix: 1_795_990_000.0,
        gpus,
        tenants,
        blame,
        events,
        risk,
        grants,
        holders,
        agent: agent(),
    }
}

/// Two GPUs, a pod on both and a user on one; every metric of the catalogue has a sample.
pub(crate) fn view() -> View {
    let mut second = gpu(1);
    second.sample.parent = Some(gpu_id(0));
    second.sample.ecc_corrected = Err(Absence::NotSupported);
    let user = Tenant::plain(TenantKind::User, "ada");
    node(vec![gpu(0), second], vec![tenant(pod("train-0"), &[0, 1], 100), tenant(user, &[1], 7)])
}

pub(crate) fn published(view: &View) -> Arc<[Row]> {
    rows(view).into()
}

pub(crate) fn page(view: &View, format: Format) -> String {
    String::from_utf8(encode(published(view), format, &Exemplars::default()).unwrap()).unwrap()
}

/// Samples of text 0.0.4 by the series as written, `name{labels}`.
pub(crate) fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let twice = samples.insert(series.to_owned(), value.parse().unwrap());
        assert_eq!(twice, None, "two samples of {series}");
    }
    samples
}
