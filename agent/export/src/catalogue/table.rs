//! Owns the rows of the catalogue, sorted by Prometheus name: the order in which families are published.
//! Refuses metrics of capabilities that are not built; they are declared with their code.
//!
//! In bounds, T is tenants (the cap, plus `other`) and G is GPUs and MIG instances (64 at most).

use super::Stability::{Development, Stable};
use super::attributes::{
    ABSENCE_REASON, ABSENT_HW_ID, ABSENT_TENANT, ABSENT_TENANT_KIND, CONFIDENCE, CONTAINER, CUDA_ERROR,
    CULPRIT, ECC_ERROR, FEATURE, FEATURE_STATE, FIGURE, FORECAST, FORECAST_OUTCOME, FUNCTION, GRANT,
    HEADROOM_PART, HORIZON, HW_DRIVER_VERSION, HW_GPU_TASK, HW_ID, HW_ID_OR_UNKNOWN, HW_NAME, HW_PARENT,
    HW_SENSOR_LOCATION, HW_TYPE, INCIDENT_KIND, IO_DIRECTION, LABEL_KEY, LABEL_SOURCE, LABEL_VALUE,
    LEDGER_HW_ID, LIBRARY_STATE, LIMIT_SCOPE, LIMIT_SOURCE, LOSS_REASON, MAP, MEMORY_KIND, MIG_PROFILE,
    NAMESPACE, NOTE, OOM_SCOPE, OPERATION, OTLP_DROP_REASON, OTLP_FAILURE_REASON, OTLP_SIGNAL, PART, POD,
    PUSH_OUTCOME, READING, RELATION, REQUEST_SOURCE, RESOURCE, SEVERITY, SHARING_MODE, SYMBOL_STATE, TENANT,
    TENANT_KIND, THROTTLE_REASON, VERSION, VICTIM, WAIT_CLASS, WARNING_OUTCOME, XID, XID_SOURCE,
};
use super::{Attribute, Kind, Metric, Stability, Unit};

/// Declares the ids and the table together, so that an id is its place in the table.
macro_rules! catalogue {
    ($($id:ident: $kind:ident $stability:ident $unit:expr, $otel:literal, $prometheus:literal,
       [$($attribute:expr),*], $bound:literal, $help:literal;)+) => {
        /// A metric's place in [`METRICS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Id { $($id),+ }

        impl Id {
            pub fn metric(self) -> &'static Metric {
                &METRICS[self as usize]
            }
        }

        /// Every metric that this agent can publish.
        pub static METRICS: &[Metric] = &[$(Metric {
            id: Id::$id,
            otel: $otel,
            prometheus: $prometheus,
            unit: $unit,
            kind: Kind::$kind,
            help: $help,
            attributes: { const ATTRIBUTES: &[Attribute] = &[$($attribute),*]; ATTRIBUTES },
            bound: $bound,
            stability: { const STABILITY: Stability = $stability; STABILITY },
        }),+];
    };
}

catalogue! {
    AlertPushes: Counter Development Unit::count("{request}"), "cotenant.agent.alertmanager.requests",
        "cotenant_agent_alertmanager_requests_total", [PUSH_OUTCOME], "3",
        "Messages to Alertmanager by outcome; not there while alertmanager.enabled is off. Nothing is lost by one that \
         failed: the next has everything that is open. Exact.";
    ApiWatchAge: Gauge Development Unit::SECONDS, "cotenant.agent.apiserver.age",
        "cotenant_agent_apiserver_age_seconds", [], "1",
        "Age in seconds of what is known of pods' labels from the API server: 0 while the watch is open, else since its \
         last word. Tenants stay as they were. Not there unless kubernetes.api_watch is on and was answered once.";
    ApiWatchErrors: Counter Development Unit::count("{question}"), "cotenant.agent.apiserver.errors",
        "cotenant_agent_apiserver_errors_total", [], "1",
        "Lists and watches of this node's pods that failed or broke off. Exact. Not there unless kubernetes.api_watch is on.";
    AgentBlameFolded: Counter Development Unit::count("{share}"), "cotenant.agent.blame_folded",
        "cotenant_agent_blame_folded_total", [], "1",
        "Shares of blame whose culprit was written as other because 4096 pairs of victim and culprit were kept already.";
    AgentBuild: Info Development Unit::STATE, "cotenant.agent.build.info", "cotenant_agent_build_info", [VERSION], "1",
        "Version of this agent. Exact.";
    AgentCpu: Counter Development Unit::SECONDS, "cotenant.agent.cpu", "cotenant_agent_cpu_seconds_total", [], "1",
        "CPU time of the agent itself in seconds, user and system, from the kernel. Exact to a clock tick. Probe traps \
         are charged to the traced process and are not in here.";
    AgentEventsLost: Counter Development Unit::count("{event}"), "cotenant.agent.events_lost",
        "cotenant_agent_events_lost_total", [], "1",
        "Failed allocations, waits and reports for which the agent had no room when it looked for incidents. Counters of \
         memory, waits and failures are not touched by this.";
    AgentFeature: Gauge Development Unit::STATE, "cotenant.agent.feature.state", "cotenant_agent_feature_state",
        [FEATURE, FEATURE_STATE], "features x 5",
        "1 for the state that a capability of this agent is in on this host, 0 for the others. The reason is on /status.";
    AgentGpuVisibilityMismatch: Gauge Development Unit::count("{gpu}"), "cotenant.agent.gpu_visibility_mismatch",
        "cotenant_agent_gpu_visibility_mismatch", [], "1",
        "NVIDIA GPUs that the PCI bus or /dev shows on this host and NVML does not list. Above zero the agent is not \
         ready. GPUs given to virtual machines do not count. Not there before NVML was asked, or when it is not asked.";
    PodResourcesAge: Gauge Development Unit::SECONDS, "cotenant.agent.kubelet.podresources.age",
        "cotenant_agent_kubelet_podresources_age_seconds", [], "1",
        "Age in seconds of what is known of grants: the last answer of kubelet's pod-resources socket. Grants stay as they \
         were while it does not answer. Not there on a host without one.";
    PodResourcesErrors: Counter Development Unit::count("{question}"), "cotenant.agent.kubelet.podresources.errors",
        "cotenant_agent_kubelet_podresources_errors_total", [], "1",
        "Questions to kubelet's pod-resources socket that failed. Exact. Not there on a host without one.";
    RuntimeAge: Gauge Development Unit::SECONDS, "cotenant.agent.kubelet.runtime.age",
        "cotenant_agent_kubelet_runtime_age_seconds", [], "1",
        "Age in seconds of what is known of pods' names and annotations from the container runtime's CRI socket. Names \
         stay as they were while it does not answer. Not there on a host without one.";
    RuntimeErrors: Counter Development Unit::count("{question}"), "cotenant.agent.kubelet.runtime.errors",
        "cotenant_agent_kubelet_runtime_errors_total", [], "1",
        "Questions to the container runtime's CRI socket that failed. Exact. Not there on a host without one.";
    UnreadDeviceIds: Gauge Development Unit::count("{device}"), "cotenant.agent.kubelet.unread_device_ids",
        "cotenant_agent_kubelet_unread_device_ids", [], "1",
        "Device ids in kubelet's last answer that are of no known plugin: grants of theirs are missing. Exact.";
    AgentLosses: Counter Development Unit::count("{event}"), "cotenant.agent.losses", "cotenant_agent_losses_total",
        [LOSS_REASON], "27",
        "Events that the kernel side could not book, counted there. Anything above zero means that figures of the \
         tenants concerned are too low; their confidence says so.";
    AgentMapCapacity: Gauge Development Unit::count("{entry}"), "cotenant.agent.map.capacity",
        "cotenant_agent_map_capacity", [MAP], "maps",
        "Entries that a BPF map can hold, as configured. Exact.";
    AgentMapEntries: Gauge Development Unit::count("{entry}"), "cotenant.agent.map.entries",
        "cotenant_agent_map_entries", [MAP], "maps",
        "Entries in a BPF map at the last read. Counted while the map moves, so off by what changed during the read.";
    AgentNotes: Counter Development Unit::count("{event}"), "cotenant.agent.notes", "cotenant_agent_notes_total",
        [NOTE], "13",
        "Facts about the workload counted in the kernel, none of them a loss. probe_hits times \
         cotenant_agent_probe_calibration_seconds is the time that the probes cost all tenants.";
    NvmlAbsences: Gauge Development Unit::count("{reading}"), "cotenant.agent.nvml.absences",
        "cotenant_agent_nvml_absences", [READING, ABSENCE_REASON], "readings x 13",
        "Readings that the last NVML poll did not get, over all GPUs and processes. Not there when none is missing.";
    NvmlAge: Gauge Development Unit::SECONDS, "cotenant.agent.nvml.age", "cotenant_agent_nvml_age_seconds", [], "1",
        "Age in seconds of the last finished NVML poll when this page was made. Not there before the first one.";
    NvmlDuration: Histogram Development Unit::SECONDS, "cotenant.agent.nvml.call.duration",
        "cotenant_agent_nvml_call_duration_seconds", [FUNCTION], "functions x 9",
        "Duration in seconds of the agent's own NVML calls, by wall clock around the call. NVML takes the driver's \
         locks: a slow call here is contention that the agent takes part in.";
    NvmlErrors: Counter Development Unit::count("{call}"), "cotenant.agent.nvml.call.errors",
        "cotenant_agent_nvml_call_errors_total", [FUNCTION], "functions",
        "NVML calls that returned an error, not-supported included. Exact.";
    NvmlTimeouts: Counter Development Unit::count("{call}"), "cotenant.agent.nvml.call.timeouts",
        "cotenant_agent_nvml_call_timeouts_total", [FUNCTION], "functions",
        "NVML calls that were given up at their deadline. Exact.";
    NvmlSuccess: Gauge Development Unit::STATE, "cotenant.agent.nvml.last_collect_success",
        "cotenant_agent_nvml_last_collect_success", [], "1",
        "1 when the last NVML poll got every figure that this host has, 0 when NVML does not answer or a figure failed. \
         With 0, missing series mean unknown, not idle. Figures that the hardware does not have do not count.";
    OtlpDropped: Counter Development Unit::count("{item}"), "cotenant.agent.otlp.dropped",
        "cotenant_agent_otlp_dropped_total", [OTLP_SIGNAL, OTLP_DROP_REASON], "3 x 7",
        "Data points, spans and log records that will never reach the OTLP receiver, by reason. Exact.";
    OtlpExported: Counter Development Unit::count("{item}"), "cotenant.agent.otlp.exported",
        "cotenant_agent_otlp_exported_total", [OTLP_SIGNAL], "3",
        "Data points, spans and log records that the OTLP receiver has acknowledged. Exact.";
    OtlpFailures: Counter Development Unit::count("{request}"), "cotenant.agent.otlp.failures",
        "cotenant_agent_otlp_failures_total", [OTLP_SIGNAL, OTLP_FAILURE_REASON], "3 x 6",
        "Attempts to send to the OTLP receiver that failed, by reason. Nothing is lost by one: see \
         cotenant_agent_otlp_dropped_total.";
    OtlpAge: Gauge Development Unit::SECONDS, "cotenant.agent.otlp.last_success.age",
        "cotenant_agent_otlp_last_success_age_seconds", [OTLP_SIGNAL], "3",
        "Seconds since the OTLP receiver last acknowledged something, when the view was made. Not there before the \
         first time. Traces and logs are sent when something happens, so only the age for metrics is one to alert on.";
    OtlpQueueBytes: UpDownCounter Development Unit::BYTES, "cotenant.agent.otlp.queue",
        "cotenant_agent_otlp_queue_bytes", [OTLP_SIGNAL], "3",
        "Bytes that wait to be sent, before compression. The request under way is not in here. Exact.";
    OtlpQueueLength: UpDownCounter Development Unit::count("{item}"), "cotenant.agent.otlp.queue.length",
        "cotenant_agent_otlp_queue_length", [OTLP_SIGNAL], "3",
        "Data points, spans and log records that wait to be sent. The request under way is not in here. Exact.";
    ProbeCalibration: Gauge Development Unit::SECONDS, "cotenant.agent.probe.calibration",
        "cotenant_agent_probe_calibration_seconds", [], "1",
        "Time in seconds that the two probes of a traced call add to it, measured at start on a function of the agent's \
         own. What the programs do for a tenant's call comes on top, some tenths of it. Not there when it was not measured.";
    ProbeCost: Counter Development Unit::SECONDS, "cotenant.agent.probe.cost",
        "cotenant_agent_probe_cost_seconds_total", [], "1",
        "Time in seconds that probes have added to the calls of all tenants: their number times \
         cotenant_agent_probe_calibration_seconds. An estimate, and rather too low. Not there when that was not measured.";
    ProbeLibraries: Gauge Development Unit::count("{library}"), "cotenant.agent.probe.libraries",
        "cotenant_agent_probe_libraries", [LIBRARY_STATE], "3",
        "libcuda files under observation, by how far the probes are attached. Exact at the last scan.";
    ProbeSymbols: Gauge Development Unit::count("{symbol}"), "cotenant.agent.probe.symbols",
        "cotenant_agent_probe_symbols", [SYMBOL_STATE], "3",
        "Probed symbols over all libcuda files, by state. A missing symbol is one that this driver does not have. Exact.";
    ProbesShed: Gauge Development Unit::count("{library}"), "cotenant.agent.probes.shed",
        "cotenant_agent_probes_shed", [], "1",
        "libcuda files whose stream-ordered calls are not probed for now, because probes cost a process more than \
         kernel.probe_share. Whoever maps them is events_lost. Exact.";
    ProcessesUntimed: Gauge Development Unit::count("{process}"), "cotenant.agent.processes.untimed",
        "cotenant_agent_processes_untimed", [], "1",
        "Processes whose calls are booked and counted, but not timed for now: probes cost them more than \
         kernel.probe_share. Exact.";
    AgentResident: Gauge Development Unit::BYTES, "cotenant.agent.resident_memory",
        "cotenant_agent_resident_memory_bytes", [], "1",
        "Resident memory of the agent in bytes, from the kernel. BPF maps are not in it.";
    AgentTenantsFolded: Counter Development Unit::count("{tenant}"), "cotenant.agent.tenants_folded",
        "cotenant_agent_tenants_folded_total", [], "1",
        "Tenants that came past the cap and were folded into the tenant other, counted when they come. A tenant that \
         leaves and returns counts again.";
    AgentTick: Gauge Development Unit::SECONDS, "cotenant.agent.tick.duration",
        "cotenant_agent_tick_duration_seconds", [], "1",
        "Duration in seconds of the agent's last tick, from reading the kernel to the finished view.";
    BlameSeconds: Counter Stable Unit::SECONDS, "cotenant.gpu.blame", "cotenant_gpu_blame_seconds_total",
        [VICTIM, CULPRIT, RELATION, WAIT_CLASS], "4096 x 7",
        "Time in seconds that a tenant's threads were blocked inside driver calls, by who had what they waited for: \
         whoever woke the thread, from its own turn on; before that, whoever woke that one, 16 turns back. Measured by \
         the scheduler's clock; time spent spinning is not in here (see cotenant_gpu_contention_excess_seconds_total).";
    ClocksEvent: Gauge Development Unit::STATE, "cotenant.gpu.clocks_event.active",
        "cotenant_gpu_clocks_event_active", [HW_ID, THROTTLE_REASON], "G x 10",
        "1 while NVML names this reason for the GPU's clock (throttling), 0 while it does not. A sample at the poll: \
         shorter events are missed.";
    ContentionExcess: Counter Development Unit::SECONDS, "cotenant.gpu.contention.excess",
        "cotenant_gpu_contention_excess_seconds_total", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER], "T",
        "Estimate, in seconds: CPU time inside a tenant's driver calls while another process was in one too, beyond what \
         such calls (same function, size within a factor of two) take alone. Spinning on the driver's locks shows only \
         here. Not there while no call has a baseline. Never part of the measured waits.";
    ContentionUnjudged: Gauge Development Unit::count("{call}"), "cotenant.gpu.contention.unjudged",
        "cotenant_gpu_contention_unjudged", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER], "T",
        "Overlapped calls of running processes that have no baseline yet: their excess is unknown and not in \
         cotenant_gpu_contention_excess_seconds_total. A baseline wants 16 calls that nobody disturbed.";
    DriverWaitDuration: Histogram Stable Unit::SECONDS, "cotenant.gpu.driver.wait.duration",
        "cotenant_gpu_driver_wait_duration_seconds",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, WAIT_CLASS], "T x 7 x 29",
        "Duration in seconds of single waits of a tenant's threads inside driver calls, from leaving the CPU to being \
         woken. Bounds are powers of two in nanoseconds, so a quantile is good to a factor of two.";
    DriverWait: Counter Stable Unit::SECONDS, "cotenant.gpu.driver.wait", "cotenant_gpu_driver_wait_seconds_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, WAIT_CLASS], "T x 7",
        "Time in seconds that a tenant's threads were blocked inside driver calls, by what they waited for, told from the \
         kernel stack at blocking. Measured; time ready to run without a CPU is not in here.";
    FigureAge: Gauge Development Unit::SECONDS, "cotenant.gpu.figure.age", "cotenant_gpu_figure_age_seconds",
        [HW_ID, FIGURE], "G x 11",
        "Age in seconds of a figure that does not come with every NVML poll: the dearer its call and the more tenants wait \
         for the agent, the more seldom it is read. Memory and processes are as old as cotenant_gpu_readings_age_seconds.";
    GrantIdle: Counter Development Unit::SECONDS, "cotenant.gpu.grant.idle", "cotenant_gpu_grant_idle_seconds_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Time in seconds for which a tenant held this grant and had no memory on the GPU, by NVML's process lists and the \
         probes, since the agent came. Time in which that could not be read is not in it.";
    GrantShares: UpDownCounter Development Unit::count("{share}"), "cotenant.gpu.grant.shares",
        "cotenant_gpu_grant_shares", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID_OR_UNKNOWN, RESOURCE],
        "T x G",
        "Devices, or shares of one, that the scheduler granted a tenant, from kubelet or Slurm's prolog. A grant, not a use: see \
         cotenant_gpu_memory_process_bytes. Held for others it is the system's. GPU unknown: a claim without a UUID.";
    GrantState: Gauge Development Unit::STATE, "cotenant.gpu.grant.state", "cotenant_gpu_grant_state",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID, GRANT], "T x G x 6",
        "1 for how grant and use of a GPU stand to each other for a pod or a job of Slurm's, 0 for the others. Not there while \
         nobody said what was granted, and where the use cannot be read. Not there for other.";
    IdleHolderAge: Gauge Development Unit::SECONDS, "cotenant.gpu.idle_holder.age",
        "cotenant_gpu_idle_holder_age_seconds", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "How long the longest idle holder of a tenant has done nothing, in seconds. Not there where none is idle.";
    IdleHolderBytes: UpDownCounter Development Unit::BYTES, "cotenant.gpu.idle_holder", "cotenant_gpu_idle_holder_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Bytes that NVML lists for those of a tenant's processes that called the driver no more and ran no kernel for \
         tenants.idle_after. Kernels shorter than NVML's samples can be missed. The processes are on /api/v1/holders.";
    IdleHolders: UpDownCounter Development Unit::count("{process}"), "cotenant.gpu.idle_holders",
        "cotenant_gpu_idle_holders", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Processes behind cotenant_gpu_idle_holder_bytes. Not there where NVML has no process samples or no probe counts \
         calls: unknown is not idle.";
    GpuInfo: Info Development Unit::STATE, "cotenant.gpu.info", "cotenant_gpu_info",
        [HW_ID, HW_TYPE, HW_NAME, HW_PARENT, HW_DRIVER_VERSION], "G",
        "What a GPU or MIG instance is, from NVML. Join on hw_id.";
    MemoryAllocated: Counter Stable Unit::BYTES, "cotenant.gpu.memory.allocated",
        "cotenant_gpu_memory_allocated_bytes_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LEDGER_HW_ID, MEMORY_KIND], "T x (G + 2) x 8",
        "Bytes that a tenant's successful driver calls allocated since the agent came, from the probes. Exact while \
         confidence is complete. Allocator caches of frameworks hide churn above the driver.";
    MemoryBandwidth: Gauge Development Unit::RATIO, "cotenant.gpu.memory.bandwidth.utilization",
        "cotenant_gpu_memory_bandwidth_utilization_ratio", [HW_ID], "G",
        "Share of NVML's last sample period (up to 1 s) in which GPU memory was read or written, 0 to 1. Time, not bytes.";
    MemoryCgroup: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.cgroup", "cotenant_gpu_memory_cgroup_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Device memory that the kernel counts for a tenant's cgroups (dmem.current, since Linux 6.14). Not there where the \
         kernel or the GPU's driver has no such count.";
    MemoryConfidence: Gauge Development Unit::STATE, "cotenant.gpu.memory.confidence",
        "cotenant_gpu_memory_confidence", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, CONFIDENCE], "T x 3",
        "1 for the word that says how far a tenant's ledger can be trusted, 0 for the others. The worst of its processes.";
    MemoryFailures: Counter Stable Unit::count("{call}"), "cotenant.gpu.memory.failures",
        "cotenant_gpu_memory_failures_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LEDGER_HW_ID, OPERATION, CUDA_ERROR],
        "T x (G + 2) x 45 x 27",
        "Driver calls of a tenant that returned an error, by the error's name in cuda.h, from the probes. \
         CUDA_ERROR_DEINITIALIZED, which every exit returns, is not counted. A GPU that the call did not name is unknown.";
    MemoryFreed: Counter Stable Unit::BYTES, "cotenant.gpu.memory.freed", "cotenant_gpu_memory_freed_bytes_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LEDGER_HW_ID, MEMORY_KIND], "T x (G + 2) x 8",
        "Bytes that a tenant freed since the agent came, by call, context end or process exit, from the probes. Bytes \
         allocated before the agent came are not in it.";
    MemoryHeadroom: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.headroom",
        "cotenant_gpu_memory_headroom_bytes", [HW_ID, HEADROOM_PART], "G x 3",
        "Room for allocations: free memory by NVML, carried on between its polls by what the probes saw, without what \
         driver and firmware keep. The other parts may become free and are not in it; a part that is not known is not \
         there. An estimate between polls.";
    MemoryLive: UpDownCounter Stable Unit::BYTES, "cotenant.gpu.memory.live", "cotenant_gpu_memory_live_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LEDGER_HW_ID, MEMORY_KIND], "T x (G + 2) x 8",
        "Bytes that a tenant holds now by its driver calls, from the probes. Without contexts and modules, see \
         cotenant_gpu_memory_residual_bytes. Kind managed is virtual; kind imported belongs to the exporter.";
    MemoryPeak: UpDownCounter Stable Unit::BYTES, "cotenant.gpu.memory.live_peak",
        "cotenant_gpu_memory_live_peak_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LEDGER_HW_ID, MEMORY_KIND], "T x (G + 2) x 8",
        "Highest live bytes since the agent came. Exact for a tenant of one process, kept in the kernel at each call; for \
         several at least this: the highest of any process and of their sum at each reading.";
    OperationDuration: Histogram Stable Unit::SECONDS, "cotenant.gpu.memory.operation.duration",
        "cotenant_gpu_memory_operation_duration_seconds",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, OPERATION], "T x 45 x 29",
        "Duration in seconds of a tenant's driver calls from entry to return, by the kernel's clock, probe cost included. \
         Bounds are powers of two in nanoseconds, so a quantile is good to a factor of two.";
    Operations: Counter Stable Unit::count("{call}"), "cotenant.gpu.memory.operations",
        "cotenant_gpu_memory_operations_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LEDGER_HW_ID, OPERATION], "T x (G + 2) x 45",
        "Driver calls of a tenant by CUDA function, failed ones included, from the probes. Lost events are missing and \
         counted in cotenant_agent_losses_total.";
    MemoryOverRequest: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.over_request",
        "cotenant_gpu_memory_over_request_bytes", [TENANT, TENANT_KIND, NAMESPACE, POD, HW_ID, REQUEST_SOURCE], "T x G",
        "Bytes that NVML lists for a pod beyond what it asked for on this GPU, contexts included; 0 within it. Nothing \
         enforces a request. Not there where either is not known.";
    MemoryPool: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.pool.reserved",
        "cotenant_gpu_memory_pool_reserved_bytes", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Bytes of the GPU that the tenant's pools (cuMemAllocAsync) have taken, used or not, from what the driver maps and \
         unmaps. What of it is in use is cotenant_gpu_memory_live_bytes of memory_kind pool. Exact. Not there when it is \
         not known of one of the tenant's processes: it was there before the agent, events of it were lost, there is no \
         kernel boundary, or its driver maps pools in another way.";
    MemoryProcess: UpDownCounter Stable Unit::BYTES, "cotenant.gpu.memory.process",
        "cotenant_gpu_memory_process_bytes", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Bytes that NVML lists for a tenant's processes, contexts and modules included; 0 for one that was granted the \
         GPU and is in no list. Not there when NVML does not say it for one of them. Managed memory is mostly not in it.";
    MemoryRequest: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.request",
        "cotenant_gpu_memory_request_bytes", [TENANT, TENANT_KIND, NAMESPACE, POD, HW_ID, REQUEST_SOURCE], "T x G",
        "Bytes that a pod asked for on this GPU, as its scheduler's annotations or the granted device say. A fraction is \
         taken of the GPU's memory. A pod may write its own annotations.";
    MemoryReserved: UpDownCounter Stable Unit::BYTES, "cotenant.gpu.memory.reserved",
        "cotenant_gpu_memory_reserved_bytes", [HW_ID], "G",
        "Bytes that driver and firmware keep for themselves, from NVML. Not there when the driver does not tell; it is \
         then part of the unattributed bytes.";
    MemoryResidual: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.residual",
        "cotenant_gpu_memory_residual_bytes", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID, PART],
        "T x G x 3",
        "NVML's process bytes minus the ledger's device bytes of a tenant, in parts that add up to it. Signed: drift below \
         zero is a ledger above NVML. The two are read at different moments.";
    TenantLimit: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.tenant.limit",
        "cotenant_gpu_memory_tenant_limit_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID, LIMIT_SOURCE, LIMIT_SCOPE], "T x G x 3",
        "What a tenant, or each of its processes, may take of a GPU, by who says so; the tightest of each source. Requests \
         of a scheduler are no limits. An MPS server's own default is not seen.";
    TenantRoom: UpDownCounter Development Unit::BYTES, "cotenant.gpu.memory.tenant.room",
        "cotenant_gpu_memory_tenant_room_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID, LIMIT_SOURCE, LIMIT_SCOPE], "T x G x 3",
        "Bytes between what counts against cotenant_gpu_memory_tenant_limit_bytes and the limit: by the cgroup's own count \
         for dmem, by the ledger for a process. Not there where that is unknown.";
    MemoryUnattributed: UpDownCounter Stable Unit::BYTES, "cotenant.gpu.memory.unattributed",
        "cotenant_gpu_memory_unattributed_bytes", [HW_ID], "G",
        "Used bytes of a GPU that no listed process accounts for, from NVML: managed pages, processes that NVML hides. \
         Process bytes + unattributed + reserved = hw_gpu_memory_usage_bytes.";
    MigEnabled: Gauge Development Unit::STATE, "cotenant.gpu.mig.enabled", "cotenant_gpu_mig_enabled", [HW_ID], "G",
        "1 when the GPU is in MIG mode, 0 when not, from NVML. Exact at the poll.";
    PcieThroughput: Gauge Development Unit::BYTES_PER_SECOND, "cotenant.gpu.pcie.throughput",
        "cotenant_gpu_pcie_throughput_bytes_per_second", [HW_ID, IO_DIRECTION], "G x 2",
        "PCIe throughput of the GPU in bytes per second, which NVML measures over 20 ms. A sample, not an average: do not \
         integrate it. (hw.gpu.io would be a byte counter, which NVML does not have.)";
    ReadingAbsent: Gauge Development Unit::STATE, "cotenant.gpu.reading.absent", "cotenant_gpu_reading_absent",
        [ABSENT_HW_ID, ABSENT_TENANT, ABSENT_TENANT_KIND, NAMESPACE, POD, CONTAINER, READING, ABSENCE_REASON],
        "G x 20 + T x G",
        "1 for a figure that is not published now, and why. Absent is not zero and not idle. Not there when the figure is.";
    ReadingsAge: Gauge Development Unit::SECONDS, "cotenant.gpu.readings.age", "cotenant_gpu_readings_age_seconds",
        [HW_ID], "G",
        "Age in seconds of this GPU's figures when this page was made.";
    ReclaimRiskForecasts: Counter Development Unit::count("{forecast}"), "cotenant.gpu.reclaim.risk.forecasts",
        "cotenant_gpu_reclaim_risk_forecasts_total", [HW_ID, HORIZON, FORECAST, FORECAST_OUTCOME], "G x 30",
        "Forecasts of the agent itself whose time is over, by what they had said and what came. Of those that said 0.8, \
         80 percent should have come true. Ten a horizon are counted.";
    ReclaimRisk: Gauge Stable Unit::RATIO, "cotenant.gpu.reclaim.risk", "cotenant_gpu_reclaim_risk_ratio",
        [HW_ID, HORIZON], "G x 3",
        "Probability that an allocation on this GPU finds no room within the horizon, 0 to 1, from growth and bursts of \
         what is allocated, refused allocations and waits for reclaim. A forecast; 300s is a mean of half a minute. Not \
         there in a GPU's first 30 s.";
    ReclaimRiskShare: Gauge Stable Unit::RATIO, "cotenant.gpu.reclaim.risk.share",
        "cotenant_gpu_reclaim_risk_share_ratio", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "A tenant's part in what is expected to fill the GPU within a minute, 0 to 1. The sum is below 1 where memory \
         grows that no ledger has. Read it only with a risk: it says who, not whether.";
    ReclaimRiskVictim: Gauge Development Unit::STATE, "cotenant.gpu.reclaim.risk.victim",
        "cotenant_gpu_reclaim_risk_victim", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "G x 3",
        "1 for the tenant whose allocation would be refused first if the GPU filled up, by the sizes and the pace of what \
         tenants ask for, and for those that follow it closely: three at most. Read it only with a risk.";
    ReclaimRiskWarnings: Counter Development Unit::count("{warning}"), "cotenant.gpu.reclaim.risk.warnings",
        "cotenant_gpu_reclaim_risk_warnings_total", [HW_ID, SEVERITY, WARNING_OUTCOME], "G x 4",
        "Warnings of the agent itself that are decided, by severity and what came of them. `warning` is raised at a risk of \
         running out that somebody should look at, `critical` at one that somebody should act on; see RISK.md.";
    SharingMode: Gauge Development Unit::STATE, "cotenant.gpu.sharing.mode", "cotenant_gpu_sharing_mode",
        [HW_ID, SHARING_MODE], "G x 5",
        "1 for how the GPU is shared, 0 for the other ways: told from MIG and compute mode, NVML's MPS lists, grants, and who \
         was on it in the last ten minutes. What it was told from is on /status.";
    StaleGrants: UpDownCounter Development Unit::count("{grant}"), "cotenant.gpu.stale_grants",
        "cotenant_gpu_stale_grants", [], "1",
        "Grants in kubelet's list, or in the files of Slurm's prolog, whose pod or job is not on this node any more. They hold \
         no memory.";
    TenantGrowth: Gauge Development Unit::BYTES, "cotenant.gpu.tenant.memory.growth",
        "cotenant_gpu_tenant_memory_growth_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID, HORIZON], "T x G x 3",
        "What a tenant grows by within the horizon above what it holds now, exceeded once in ten. A forecast. Of other, \
         the largest of its members.";
    TenantQuota: Gauge Development Unit::BYTES, "cotenant.gpu.tenant.memory.quota",
        "cotenant_gpu_tenant_memory_quota_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID, MIG_PROFILE], "T x G",
        "The quota recommended for a tenant: its peak or what it passes once in a hundred in 5 min, with 600 MiB for a \
         context, in steps of 256 MiB. Where that is more than there is for all of them, those that grow give it up, down \
         to what they hold. Nobody enforces it. With the smallest MIG profile that holds it. Not there for other.";
    TenantProcesses: UpDownCounter Development Unit::count("{process}"), "cotenant.gpu.tenant.processes",
        "cotenant_gpu_tenant_processes", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER], "T",
        "Processes of a tenant that use the CUDA driver, from the probes and NVML. Threads are not processes.";
    TenantUtilization: Gauge Stable Unit::RATIO, "cotenant.gpu.tenant.utilization",
        "cotenant_gpu_tenant_utilization_ratio", [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HW_ID], "T x G",
        "Share of time in which kernels of a tenant ran on the GPU, 0 to 1, from NVML's process samples. About a second \
         old; busy processes can be missing, and then so is the series.";
    ExhaustionTimeHigh: Gauge Development Unit::SECONDS, "cotenant.gpu.time_to_exhaustion.high",
        "cotenant_gpu_time_to_exhaustion_high_seconds", [HW_ID], "G",
        "Upper end of cotenant_gpu_time_to_exhaustion_seconds: at half of the present pace.";
    ExhaustionTimeLow: Gauge Development Unit::SECONDS, "cotenant.gpu.time_to_exhaustion.low",
        "cotenant_gpu_time_to_exhaustion_low_seconds", [HW_ID], "G",
        "Lower end of cotenant_gpu_time_to_exhaustion_seconds: a quarter faster, and with a burst that nine minutes in ten \
         stay below.";
    ExhaustionTime: Gauge Stable Unit::SECONDS, "cotenant.gpu.time_to_exhaustion",
        "cotenant_gpu_time_to_exhaustion_seconds", [HW_ID], "G",
        "Seconds until this GPU has no free memory if the present growth of its tenants goes on. Not there while nothing \
         grows. Whether it goes on is what cotenant_gpu_reclaim_risk_ratio says.";
    XidErrors: Counter Development Unit::count("{fault}"), "cotenant.gpu.xid.errors", "cotenant_gpu_xid_errors_total",
        [HW_ID_OR_UNKNOWN, XID], "512",
        "Xid faults of a GPU since the agent came, by code, once for each fault whoever tells \
         of it; the follow-ups of a fault are in here.";
    XidLast: Gauge Development Unit::SECONDS, "cotenant.gpu.xid.last_seen", "cotenant_gpu_xid_last_seen_seconds",
        [HW_ID_OR_UNKNOWN, XID], "512",
        "When this Xid was last seen on the GPU, in seconds since the Unix epoch.";
    XidReports: Counter Development Unit::count("{report}"), "cotenant.gpu.xid.reports",
        "cotenant_gpu_xid_reports_total", [HW_ID_OR_UNKNOWN, XID, XID_SOURCE], "512 x 3",
        "What each source told of Xid faults. A source that tells fewer than another misses some; the faults themselves are \
         in cotenant_gpu_xid_errors_total.";
    HostMemoryRisk: Gauge Development Unit::RATIO, "cotenant.host.memory.risk", "cotenant_host_memory_risk_ratio",
        [HORIZON], "3",
        "Probability that this host has no memory left within the horizon, 0 to 1, from growth and bursts of what it has in \
         use by the kernel's own estimate. A forecast. Swap is not counted on.";
    HostMemoryWarnings: Counter Development Unit::count("{warning}"), "cotenant.host.memory.risk.warnings",
        "cotenant_host_memory_risk_warnings_total", [SEVERITY, WARNING_OUTCOME], "4",
        "Warnings of the agent itself about this host's memory that are decided, as of a GPU's: `exhausted` when the kernel \
         killed somebody for want of it while one stood.";
    HostMemoryTime: Gauge Development Unit::SECONDS, "cotenant.host.memory.time_to_exhaustion",
        "cotenant_host_memory_time_to_exhaustion_seconds", [], "1",
        "Seconds until this host has no memory left if its growth goes on. Not there while nothing grows.";
    IncidentsOpen: UpDownCounter Development Unit::count("{incident}"), "cotenant.incidents.open",
        "cotenant_incidents_open", [], "1",
        "Incidents that go on now. They are on /api/v1/incidents, in words.";
    Incidents: Counter Stable Unit::count("{incident}"), "cotenant.incidents", "cotenant_incidents_total",
        [INCIDENT_KIND], "7",
        "Incidents since the agent came, by kind. One that turns out worse than it began counts under each of its names.";
    HostLimit: UpDownCounter Development Unit::BYTES, "cotenant.memory.limit", "cotenant_memory_limit_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER], "T",
        "Host memory limit of a GPU tenant: of its memory cgroups and those above them the one that is the likeliest to be \
         reached. Not there without a limit: the host is the bound then.";
    HostLimitRisk: Gauge Development Unit::RATIO, "cotenant.memory.limit.risk", "cotenant_memory_limit_risk_ratio",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, HORIZON], "T x 3",
        "Probability that a GPU tenant comes to the limit of its memory cgroup, or to the end of the host's memory, within \
         the horizon, 0 to 1. The kernel kills there. A forecast. Swap is not counted on.";
    HostLimitWarnings: Counter Development Unit::count("{warning}"), "cotenant.memory.limit.risk.warnings",
        "cotenant_memory_limit_risk_warnings_total", [SEVERITY, WARNING_OUTCOME], "4",
        "Warnings of the agent itself that a GPU tenant fills the host memory it may hold that are decided: `exhausted` \
         when the kernel killed it while one stood. Of all tenants together; incidents have them one by one.";
    HostLimitTime: Gauge Development Unit::SECONDS, "cotenant.memory.limit.time", "cotenant_memory_limit_time_seconds",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER], "T",
        "Seconds until a GPU tenant comes to that limit if its growth goes on. Not there while nothing grows.";
    HostUsage: UpDownCounter Development Unit::BYTES, "cotenant.memory.usage", "cotenant_memory_usage_bytes",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER], "T",
        "Host memory that is charged to that cgroup and cannot be taken back: without the page cache that can be dropped. \
         What is pinned through the driver is charged to the host and not in it. In steps of 1 MiB.";
    OomKills: Counter Stable Unit::count("{process}"), "cotenant.oom.kills", "cotenant_oom_kills_total",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, OOM_SCOPE], "1024",
        "Processes of a tenant that the kernel killed for memory, GPU users or not, by what ran out. Goes on over restarts \
         of the tenant. A SIGKILL by somebody else is not in here.";
    TenantLabel: Info Development Unit::STATE, "cotenant.tenant.label.info", "cotenant_tenant_label_info",
        [TENANT, TENANT_KIND, NAMESPACE, POD, CONTAINER, LABEL_SOURCE, LABEL_KEY, LABEL_VALUE], "T x 32",
        "Labels and annotations of a tenant's pod that kubernetes.labels and kubernetes.annotations ask for, as the API \
         server last told them. What their owner wrote: no proof of who it is.";
    Energy: Counter Development Unit::JOULES, "hw.energy", "hw_energy_joules_total", [HW_ID, HW_TYPE], "G",
        "Energy that the GPU used in joules since the driver was loaded, from NVML, in steps of a millijoule.";
    Errors: Counter Development Unit::count("{error}"), "hw.errors", "hw_errors_total", [HW_ID, HW_TYPE, ECC_ERROR],
        "G x 2",
        "ECC errors of the GPU as NVML counts them. Starts again when the driver is loaded.";
    MemoryLimit: UpDownCounter Development Unit::BYTES, "hw.gpu.memory.limit", "hw_gpu_memory_limit_bytes", [HW_ID], "G",
        "Memory of the GPU in bytes, from NVML. Exact.";
    MemoryUsage: UpDownCounter Development Unit::BYTES, "hw.gpu.memory.usage", "hw_gpu_memory_usage_bytes", [HW_ID], "G",
        "Used memory of the GPU in bytes, from NVML, the driver's reserve included whichever way the driver counts it: the \
         limit minus this is free. nvidia-smi shows the reserve apart on newer drivers.";
    MemoryUtilization: Gauge Development Unit::RATIO, "hw.gpu.memory.utilization", "hw_gpu_memory_utilization_ratio",
        [HW_ID], "G",
        "Used memory divided by the GPU's memory, 0 to 1, made of NVML's bytes. Space, not time.";
    GpuUtilization: Gauge Development Unit::RATIO, "hw.gpu.utilization", "hw_gpu_utilization_ratio",
        [HW_ID, HW_GPU_TASK], "G",
        "Share of NVML's last sample period (up to 1 s) in which a kernel ran, 0 to 1. One small kernel counts like a full \
         GPU.";
    Power: Gauge Development Unit::WATTS, "hw.power", "hw_power_watts", [HW_ID, HW_TYPE], "G",
        "Power that the GPU draws in watts, from NVML: an average over up to 1 s, good to some 5 percent.";
    Temperature: Gauge Development Unit::CELSIUS, "hw.temperature", "hw_temperature_celsius",
        [HW_ID, HW_SENSOR_LOCATION], "G",
        "Temperature of the GPU die in degrees Celsius, from NVML, in whole degrees.";
}
