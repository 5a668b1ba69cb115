//! Owns the declaration of every metric: both names, unit, kind, help, attributes, bound and stability.
//! Refuses values: what a metric is worth now is made in `rows`; what has nothing behind it is not declared.

mod table;

pub use table::{Id, METRICS};

/// What a metric's numbers mean over time, in OpenTelemetry's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A reading that cannot be added up. Prometheus: gauge.
    Gauge,
    /// A level that adds up over tenants, kinds or GPUs. Prometheus: gauge.
    UpDownCounter,
    Counter,
    Histogram,
    /// Text as labels with the value 1. OpenTelemetry: a gauge.
    Info,
}

impl Kind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::UpDownCounter => "updowncounter",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }

    /// The type as Prometheus knows it.
    pub const fn prometheus(self) -> &'static str {
        match self {
            Self::Gauge | Self::UpDownCounter | Self::Info => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }
}

/// How far a name can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Name, unit and labels change only with a major version.
    Stable,
    /// May still change; for `hw.*` because OpenTelemetry's own conventions may.
    Development,
}

impl Stability {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stable => "stable",
            Self::Development => "development",
        }
    }
}

/// One unit in both spellings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    pub ucum: &'static str,
    /// The suffix of the Prometheus name; `None` where the metric counts things.
    pub prometheus: Option<&'static str>,
}

impl Unit {
    pub(crate) const BYTES: Self = Self::of("By", "bytes");
    pub(crate) const BYTES_PER_SECOND: Self = Self::of("By/s", "bytes_per_second");
    pub(crate) const SECONDS: Self = Self::of("s", "seconds");
    pub(crate) const RATIO: Self = Self::of("1", "ratio");
    pub(crate) const WATTS: Self = Self::of("W", "watts");
    pub(crate) const JOULES: Self = Self::of("J", "joules");
    pub(crate) const CELSIUS: Self = Self::of("Cel", "celsius");
    /// A state, 0 or 1: no suffix, and `ratio` would be wrong, which is what stores make of a gauge in `1`.
    pub(crate) const STATE: Self = Self { ucum: "{state}", prometheus: None };

    const fn of(ucum: &'static str, prometheus: &'static str) -> Self {
        Self { ucum, prometheus: Some(prometheus) }
    }

    /// A count of things, named in UCUM's braces.
    pub(crate) const fn count(ucum: &'static str) -> Self {
        Self { ucum, prometheus: None }
    }
}

/// One attribute in both spellings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute {
    pub otel: &'static str,
    pub prometheus: &'static str,
    /// What the value is, or the list of values.
    pub values: &'static str,
    /// When the label is left out; `None` when it is always there.
    pub absent: Option<&'static str>,
}

/// One metric, declared once for every exporter.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub id: Id,
    pub otel: &'static str,
    /// The name of the sample, with the unit and `_total` or `_info`; histograms add their own suffixes.
    pub prometheus: &'static str,
    pub unit: Unit,
    pub kind: Kind,
    /// Meaning, unit, source and error in plain words. One line of ASCII.
    pub help: &'static str,
    pub attributes: &'static [Attribute],
    /// The most series that one agent publishes.
    pub bound: &'static str,
    pub stability: Stability,
}

impl Metric {
    /// The Prometheus name without `_total` or `_info` and without the unit.
    pub fn stem(&self) -> &'static str {
        let suffix = match self.kind {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            Kind::Gauge | Kind::UpDownCounter | Kind::Histogram => "",
        };
        let name = self.prometheus.strip_suffix(suffix).unwrap_or(self.prometheus);
        let Some(unit) = self.unit.prometheus else { return name };
        name.strip_suffix(unit).and_then(|stem| stem.strip_suffix('_')).unwrap_or(name)
    }
}

pub(crate) mod attributes {
    //! Owns the attributes, each spelled once.
    //! Refuses labels that a scrape adds itself (`pod`, `namespace`, `container`, `job`, `instance`, `node`): they
    //! would come back as `exported_…`.

    use super::Attribute;

    const NOT_A_POD: Option<&str> = Some("the tenant is not a Kubernetes pod");

    const fn always(otel: &'static str, prometheus: &'static str, values: &'static str) -> Attribute {
        Attribute { otel, prometheus, values, absent: None }
    }

    const fn kubernetes(otel: &'static str, prometheus: &'static str, values: &'static str) -> Attribute {
        Attribute { otel, prometheus, values, absent: NOT_A_POD }
    }

    pub(crate) const TENANT: Attribute = always(
        "cotenant.tenant",
        "tenant",
        "`pod:<namespace>/<pod>`, `team:<label>` (`kubernetes.tenant_label`), `docker:<name>`, `podman:<name>`, `systemd:<unit>`, `slurm:<job>`, \
         `user:<name>`, `system:<what>`, `unknown:<why>`, `other`",
    );
    pub(crate) const TENANT_KIND: Attribute = always(
        "cotenant.tenant.kind",
        "tenant_kind",
        "`pod`, `team`, `docker`, `podman`, `containerd`, `crio`, `ecs`, `lxc`, `systemd`, `slurm`, `user`, \
         `system`, `other`, `unknown`",
    );
    pub(crate) const VICTIM: Attribute =
        always("cotenant.victim", "victim", "the tenant whose thread was blocked, as in `tenant`");
    pub(crate) const CULPRIT: Attribute = always(
        "cotenant.culprit",
        "culprit",
        "the tenant that had what was waited for, as in `tenant`; `device` (an interrupt or a timer), `kernel` (a \
         kernel thread), `unknown` (nobody was seen)",
    );
    pub(crate) const RELATION: Attribute = always(
        "cotenant.culprit.relation",
        "relation",
        "`neighbour` (another tenant), `self`, `device`, `kernel`, `unknown`",
    );
    pub(crate) const INCIDENT_KIND: Attribute = always(
        "cotenant.incident.kind",
        "kind",
        "`noisy_neighbour`, `stall`, `allocation_failure`, `near_miss`, `oom_kill`, `xid`, `xid_echo`",
    );
    pub(crate) const OOM_SCOPE: Attribute = always(
        "cotenant.oom.scope",
        "scope",
        "`memcg` (a memory cgroup's limit), `cpuset`, `global` (the host), `unknown` (the kernel's log did not say)",
    );
    pub(crate) const XID: Attribute = always("cotenant.gpu.xid", "xid", "the driver's number for the fault");
    pub(crate) const XID_SOURCE: Attribute = always(
        "cotenant.gpu.xid.source",
        "source",
        "`kmsg` (the kernel's log), `tracepoint`, `nvml` (NVML's events)",
    );
    pub(crate) const FIGURE: Attribute =
        always("cotenant.figure", "figure", "the figure, such as `energy` or `process_utilization`");
    pub(crate) const SHARING_MODE: Attribute = always(
        "cotenant.gpu.sharing.mode",
        "sharing_mode",
        "`exclusive`, `time_sliced`, `mps`, `mig` (its instances have modes of their own), `unknown`",
    );
    pub(crate) const LIMIT_SOURCE: Attribute = always(
        "cotenant.gpu.limit.source",
        "limit_source",
        "`mps` (the environment of an MPS client), `dmem` (a cgroup), `declared` (the environment of a process that \
         is no MPS client: nothing enforces it)",
    );
    pub(crate) const LIMIT_SCOPE: Attribute =
        always("cotenant.gpu.limit.scope", "limit_scope", "`process` (each by itself), `tenant`");
    pub(crate) const WAIT_CLASS: Attribute = always(
        "cotenant.wait.class",
        "wait_class",
        "`rm_api_lock`, `gpu_lock`, `reclaim`, `uvm_eviction`, `userspace_lock`, `device`, `other`",
    );
    pub(crate) const NAMESPACE: Attribute =
        kubernetes("k8s.namespace.name", "k8s_namespace_name", "the pod's namespace");
    pub(crate) const POD: Attribute = kubernetes("k8s.pod.name", "k8s_pod_name", "the pod");
    pub(crate) const CONTAINER: Attribute =
        kubernetes("k8s.container.name", "k8s_container_name", "the container in the pod");

    pub(crate) const LABEL_SOURCE: Attribute =
        always("cotenant.tenant.label.source", "label_source", "`label`, `annotation`");
    pub(crate) const LABEL_KEY: Attribute = always(
        "cotenant.tenant.label.key",
        "label_key",
        "one of `kubernetes.labels` or `kubernetes.annotations`, such as `app.kubernetes.io/name`",
    );
    pub(crate) const LABEL_VALUE: Attribute = always(
        "cotenant.tenant.label.value",
        "label_value",
        "what the pod's owner wrote, cleaned and cut at 128 bytes",
    );

    pub(crate) const HW_ID: Attribute = always("hw.id", "hw_id", "the NVML UUID, `GPU-…` or `MIG-…`");
    pub(crate) const HW_ID_OR_UNKNOWN: Attribute = Attribute {
        values: "the NVML UUID, `GPU-…` or `MIG-…`; `unknown` when nobody said which GPU",
        ..HW_ID
    };
    /// Of rows that come from the ledger, where the GPU may be none or not known.
    pub(crate) const LEDGER_HW_ID: Attribute = Attribute {
        values: "the NVML UUID, `GPU-…` or `MIG-…`; `unknown` when the call did not say which GPU",
        absent: Some("the memory is host memory"),
        ..HW_ID
    };
    pub(crate) const HW_TYPE: Attribute = always("hw.type", "hw_type", "`gpu`");
    pub(crate) const HW_NAME: Attribute = always("hw.name", "hw_name", "the product name that NVML gives");
    pub(crate) const HW_PARENT: Attribute = Attribute {
        otel: "hw.parent",
        prometheus: "hw_parent",
        values: "the UUID of the whole GPU that a MIG instance is cut from",
        absent: Some("the GPU is a whole one"),
    };
    pub(crate) const HW_DRIVER_VERSION: Attribute = Attribute {
        otel: "hw.driver_version",
        prometheus: "hw_driver_version",
        values: "the NVIDIA driver's version",
        absent: Some("NVML does not answer"),
    };
    pub(crate) const HW_SENSOR_LOCATION: Attribute =
        always("hw.sensor_location", "hw_sensor_location", "`gpu` (the die)");
    pub(crate) const HW_GPU_TASK: Attribute = always("hw.gpu.task", "hw_gpu_task", "`general`");
    pub(crate) const IO_DIRECTION: Attribute =
        always("network.io.direction", "network_io_direction", "`receive`, `transmit`, seen from the GPU");
    pub(crate) const ECC_ERROR: Attribute = always("error.type", "error_type", "`corrected`, `uncorrected`");

    pub(crate) const MEMORY_KIND: Attribute = always(
        "cotenant.gpu.memory.kind",
        "memory_kind",
        "`device`, `managed` (virtual), `pool`, `vmm`, `array`, `host_pinned`, `host_registered`, `imported`",
    );
    pub(crate) const OPERATION: Attribute = always(
        "cotenant.gpu.operation",
        "operation",
        "the CUDA driver function without version or stream suffix, such as `cuMemAlloc`",
    );
    pub(crate) const CUDA_ERROR: Attribute = always(
        "error.type",
        "error_type",
        "the name in cuda.h, such as `CUDA_ERROR_OUT_OF_MEMORY`, or `other`",
    );
    pub(crate) const CONFIDENCE: Attribute = always(
        "cotenant.gpu.memory.confidence",
        "confidence",
        "`complete`, `joined_late` (ran before the probes), `events_lost` (a map was full)",
    );
    pub(crate) const PART: Attribute = always(
        "cotenant.gpu.memory.part",
        "part",
        "`context` (contexts, modules, rounding), `baseline` (held before the probes came), `drift` (unexplained)",
    );
    pub(crate) const THROTTLE_REASON: Attribute = always(
        "cotenant.gpu.clocks_event.reason",
        "reason",
        "`gpu_idle`, `applications_clocks_setting`, `sw_power_cap`, `hw_slowdown`, `sync_boost`, \
         `sw_thermal_slowdown`, `hw_thermal_slowdown`, `hw_power_brake_slowdown`, `display_clock_setting`, `other`",
    );

    pub(crate) const READING: Attribute =
        always("cotenant.reading", "reading", "the figure that is missing, such as `memory` or `power`");
    pub(crate) const ABSENCE_REASON: Attribute = always(
        "cotenant.absence.reason",
        "reason",
        "`not_supported`, `not_available`, `no_permission`, `timeout`, `gpu_lost`, `version_mismatch`, \
         `library_missing`, `symbol_missing`, `implausible`, `foreign_pid_namespace`, `failed`, `not_yet`, `released`",
    );
    /// Of an absence that may concern NVML as a whole.
    pub(crate) const ABSENT_HW_ID: Attribute =
        Attribute { absent: Some("NVML as a whole does not answer"), ..HW_ID };
    const NOT_A_TENANT: Option<&str> = Some("the figure is not one tenant's");
    pub(crate) const ABSENT_TENANT: Attribute = Attribute { absent: NOT_A_TENANT, ..TENANT };
    pub(crate) const ABSENT_TENANT_KIND: Attribute = Attribute { absent: NOT_A_TENANT, ..TENANT_KIND };

    pub(crate) const HORIZON: Attribute =
        always("cotenant.gpu.horizon", "horizon", "how far ahead: `10s`, `60s`, `300s`");
    pub(crate) const MIG_PROFILE: Attribute = Attribute {
        absent: Some("no profile of the GPU holds it for sure, or no GPU of this size has MIG"),
        ..always("cotenant.gpu.mig.profile", "mig_profile", "a MIG profile of NVIDIA's, such as `3g.71gb`")
    };
    pub(crate) const HEADROOM_PART: Attribute = always(
        "cotenant.gpu.memory.headroom.part",
        "part",
        "`free`, `pool` (kept by pools, could be given back), `managed` (virtual, the most that could be evicted)",
    );
    pub(crate) const FORECAST: Attribute = always(
        "cotenant.gpu.forecast",
        "forecast",
        "what the risk was said to be: `up_to_20_percent`, and so on by 20 to `up_to_100_percent`",
    );
    pub(crate) const SEVERITY: Attribute = always(
        "cotenant.warning.severity",
        "severity",
        "`warning` (somebody should look), `critical` (somebody should act)",
    );
    pub(crate) const WARNING_OUTCOME: Attribute = always(
        "cotenant.warning.outcome",
        "outcome",
        "`exhausted` (while it stood an allocation failed, or somebody was killed for host memory), `cleared` (it was over \
         before that)",
    );
    pub(crate) const FORECAST_OUTCOME: Attribute = always(
        "cotenant.gpu.forecast.outcome",
        "outcome",
        "`exhausted` (an allocation failed within the horizon), `spared`",
    );

    pub(crate) const GRANT: Attribute = always(
        "cotenant.gpu.grant",
        "grant",
        "`used`, `idle` (granted, not used), `allocation_mismatch` (used, another GPU is granted), `none` (used, nothing \
         is granted), `stale` (the pod is gone), `reservation` (held for others)",
    );
    pub(crate) const RESOURCE: Attribute = always(
        "cotenant.gpu.grant.resource",
        "resource",
        "the name that the device plugin gave, such as `nvidia.com/gpu`",
    );
    pub(crate) const REQUEST_SOURCE: Attribute = always(
        "cotenant.gpu.request.source",
        "source",
        "`device` (the whole device was granted), `hami`, `kai_memory`, `kai_fraction`, `gpushare` (annotations)",
    );

    pub(crate) const LOSS_REASON: Attribute =
        always("cotenant.loss.reason", "reason", "why, such as `pointer_map_full` or `ring_full`");
    pub(crate) const NOTE: Attribute =
        always("cotenant.note", "note", "what, such as `probe_hits` or `unmatched_free`");
    pub(crate) const MAP: Attribute = always("cotenant.map", "map", "the BPF map");
    pub(crate) const LIBRARY_STATE: Attribute = always(
        "cotenant.library.state",
        "state",
        "`attached`, `partial` (some symbols failed), `refused` (nothing attached)",
    );
    pub(crate) const SYMBOL_STATE: Attribute =
        always("cotenant.symbol.state", "state", "`attached`, `missing` (not in this driver), `failed`");
    pub(crate) const FEATURE: Attribute =
        always("cotenant.feature", "feature", "the capability, as on `/status`");
    pub(crate) const FEATURE_STATE: Attribute = always(
        "cotenant.feature.state",
        "state",
        "`active`, `degraded`, `unsupported`, `broken`, `disabled`",
    );
    pub(crate) const OTLP_SIGNAL: Attribute =
        always("cotenant.otlp.signal", "signal", "`metrics`, `traces`, `logs`");
    pub(crate) const OTLP_DROP_REASON: Attribute = always(
        "cotenant.otlp.drop.reason",
        "reason",
        "`queue_full` (no room while the receiver was away), `refused` (the receiver will never take it), `rejected` (a part of a request that it took), \
         `too_old` (half an hour), `stopped`, `superseded` (delta: levels of a failed export), `sampled_out`",
    );
    pub(crate) const OTLP_FAILURE_REASON: Attribute = always(
        "cotenant.otlp.failure.reason",
        "reason",
        "`unreachable`, `tls`, `timeout`, `throttled` (it asked for patience), `unavailable`, `refused`",
    );
    pub(crate) const PUSH_OUTCOME: Attribute = always(
        "cotenant.alertmanager.outcome",
        "outcome",
        "`accepted`, `refused` (an answer that is an error), `unreachable` (no answer)",
    );
    pub(crate) const FUNCTION: Attribute = always("cotenant.nvml.function", "function", "the NVML function");
    pub(crate) const VERSION: Attribute = always("service.version", "version", "the agent's version");
}
