"""Owns the list of expressions that a healthy demo gives no data, each with the situation in which it has some, and an
hour in which all of that happens.

Refuses to be more than names, labels and figures of the catalogue's shape: that agents publish such series is tested
with them.
"""

NODE = "bad-node"
TENANT = "pod:ml/train"
GPU = "GPU-bad"

KILL = "the kernel kills a process of a GPU tenant for host memory"
XID = "the driver reports a fault"
NVML = "NVML gives an error, runs into its deadline, or lacks a reading"
OTLP = "agents send to an OTLP receiver, which is away for a while"
HOST = "a tenant or its host runs out of host memory"
RISK = "a GPU fills up, on a node that has been watched for longer than the demo lasts"
GRANTS = "a node of Kubernetes, where a pod takes more than it asked for"
LABELS = "the watch at the API server is on, and the server fails at times"
FOLDED = "more tenants, pairs or events than an agent has room for"
HOST_PANELS = ("Host memory under its limit", "Risk of a kill for host memory", "Time until a kill for host memory")
SITUATIONS = {
    "CotenantAgentDegraded (warning)": "a feature is degraded or broken",
    "CotenantAgentDown (warning)": "an agent that was there does not answer (in the recorded run this is after its end)",
    "CotenantAgentLosingData (warning)": "a table of the kernel side is full",
    "CotenantAgentRestarting (warning)": "an agent dies again and again, and is started again at once",
    "CotenantAllocationFailureStorm (warning)": "more refusals than the demo's one in two seconds, at the rules' own pace",
    "CotenantGpuNearlyFull (warning)": "a GPU fills up slowly",
    "CotenantGpuReclaimRisk (critical)": RISK,
    "CotenantGpuReclaimRisk (warning)": RISK,
    "CotenantGpuTenantOomKilled (critical)": KILL,
    "CotenantGpuXid (critical)": XID,
    "CotenantHostMemoryRisk (warning)": HOST,
    "CotenantGpuXid (warning)": XID,
    "CotenantIdleHolder (info)": "orphans hold memory for longer than the demo lasts",
    "CotenantLedgerDrift (info)": "the ledger misses a way to allocate",
    "CotenantMemoryLimitRisk (critical)": HOST,
    "CotenantMemoryLimitRisk (warning)": HOST,
    "CotenantNvmlNotAnswering (warning)": NVML,
    "CotenantOverRequest (warning)": GRANTS,
    "CotenantTenantStuck (warning)": "a single wait takes 5 seconds or more",
    "Cotenant / Fleet: Age of what is known (A)": GRANTS,
    "Cotenant / Fleet: Age of what is known (B)": GRANTS,
    "Cotenant / Fleet: Age of what is known (C)": LABELS,
    "Cotenant / Fleet: Dropped, and attempts that failed (A)": OTLP,
    "Cotenant / Fleet: Dropped, and attempts that failed (B)": OTLP,
    "Cotenant / Fleet: Sent and acknowledged (A)": OTLP,
    "Cotenant / Fleet: Waiting to be sent (A)": OTLP,
    "Cotenant / Fleet: Waiting to be sent (B)": OTLP,
    "Cotenant / Fleet: Waiting to be sent (C)": OTLP,
    "Cotenant / Fleet: Events lost (A)": "a table of the kernel side is full",
    "Cotenant / Fleet: Features that do not work (A)": "a feature is degraded or broken",
    "Cotenant / Fleet: Folded and left out (A)": FOLDED,
    "Cotenant / Fleet: Folded and left out (B)": FOLDED,
    "Cotenant / Fleet: Folded and left out (C)": FOLDED,
    "Cotenant / Fleet: GPUs most likely to run out (A)": RISK,
    "Cotenant / Fleet: GPUs most likely to run out (B)": RISK,
    "Cotenant / Fleet: GPUs most likely to run out (C)": RISK,
    "Cotenant / Fleet: Grants that lead nowhere (A)": GRANTS,
    "Cotenant / Fleet: Grants that lead nowhere (B)": GRANTS,
    "Cotenant / Fleet: Kills for memory (A)": KILL,
    "Cotenant / Fleet: NVML calls that failed (A)": NVML,
    "Cotenant / Fleet: NVML calls that failed (B)": NVML,
    "Cotenant / Fleet: NVML readings missing (A)": NVML,
    "Cotenant / Fleet: Questions that failed (A)": GRANTS,
    "Cotenant / Fleet: Questions that failed (B)": GRANTS,
    "Cotenant / Fleet: Questions that failed (C)": LABELS,
    "Cotenant / Fleet: Risk within a minute, the ten GPUs with most (A)": RISK,
    "Cotenant / Fleet: Uncorrected memory errors (A)": "memory of the GPU is damaged",
    "Cotenant / Fleet: Xid faults (A)": XID,
    "Cotenant / Fleet: Xid faults (B)": XID,
    "Cotenant / GPU: Forecasts that came true (A)": RISK,
    "Cotenant / GPU: Memory bandwidth and PCIe (B)": "PCIe sampling is turned on ([nvml] pcie = true)",
    "Cotenant / GPU: Room below limits (A)": "a tenant has a limit, of MPS or of its cgroup",
    "Cotenant / GPU: Xid faults in this time (A)": XID,
    "Cotenant / Incident: Kills for memory (A)": KILL,
    "Cotenant / Incident: Xid faults (A)": XID,
    "Cotenant / Tenant: Figures that are not published, and why (A)": "NVML leaves a busy process out of its samples",
    "Cotenant / Tenant: Grant against use (B)": GRANTS,
    "Cotenant / Tenant: Grant against use (D)": GRANTS,
    "Cotenant / Tenant: Grant and use (A)": GRANTS,
    **{f"Cotenant / Tenant: {panel} ({query})": HOST for panel in HOST_PANELS for query in "AB"},
    "Cotenant / Tenant: Idle holders (B)": "orphans hold memory for longer than the demo lasts",
    "Cotenant / Tenant: Kills (A)": KILL,
    "Cotenant / Tenant: Kills for memory (A)": KILL,
    "Cotenant / Tenant: Shares granted (A)": GRANTS,
    "Cotenant / Tenant: Shares granted (B)": GRANTS,
    "gpu:cotenant_reclaim_risk_ratio:60s (recorded)": RISK,
}

# What the demo has by luck: NVML is read while the batch job's 30 GiB come or go, and differs for one poll; or the demo takes long
# enough for a forecast.
BY_LUCK = {"CotenantLedgerDrift (info)", *(where for where, situation in SITUATIONS.items() if situation in (RISK, HOST))}

STEP = 30
GIB = 1 << 30


def hour(start, end):
    """(name, labels, value at each second from the start; None: not there)."""
    trouble = 1200

    def then(value, before=None):
        return lambda second: value if second >= trouble else before

    def since(factor, before=0):
        return lambda second: factor * (second - trouble) if second >= trouble else before

    always = lambda value: lambda _: value  # noqa: E731
    alive = lambda second: 1 if second < end - start - 600 else None  # noqa: E731
    tenant, gpu = {"tenant": TENANT}, {"hw_id": GPU}
    yield "up", {}, lambda second: 1 if alive(second) else 0
    yield "cotenant_agent_build_info", {"version": "0.1.0"}, alive
    yield "cotenant_agent_feature_state", {"feature": "waits", "state": "broken"}, then(1, 0)
    yield "cotenant_agent_losses_total", {"reason": "ring_full"}, since(0.5)
    yield "cotenant_agent_notes_total", {"note": "probe_hits"}, lambda second: 100 * second
    yield "cotenant_agent_probe_cost_seconds_total", {}, lambda second: 1e-4 * second
    yield "cotenant_agent_probes_shed", {}, then(1, 0)
    yield "cotenant_agent_processes_untimed", {}, then(2, 0)
    yield "cotenant_agent_cpu_seconds_total", {}, lambda second: second % 300 * 0.01
    for folded in ("tenants_folded", "blame_folded", "events_lost"):
        yield f"cotenant_agent_{folded}_total", {}, since(0.1)
    yield "cotenant_agent_nvml_last_collect_success", {}, then(0, 1)
    yield "cotenant_agent_nvml_absences", {"reading": "memory", "reason": "timeout"}, then(1)
    for kind in ("errors", "timeouts"):
        yield f"fleet:cotenant_agent_nvml_call_{kind}:rate5m", {"function": "nvmlDeviceGetMemoryInfo_v2"}, then(0.1, 0)
    yield "cotenant_gpu_tenant_processes", tenant, always(1)
    yield "cotenant_oom_kills_total", {**tenant, "scope": "memcg"}, then(1)
    yield "cotenant_incidents_total", {"kind": "oom_kill"}, then(1, 0)
    yield "cotenant_incidents_total", {"kind": "stall"}, then(1, 0)
    yield "cotenant_incidents_open", {}, then(2, 0)
    for xid in ("31", "79"):
        yield "cotenant_gpu_xid_errors_total", {**gpu, "xid": xid}, then(1)
        yield "cotenant_gpu_xid_last_seen_seconds", {**gpu, "xid": xid}, then(start + trouble)
    yield "hw_errors_total", {**gpu, "error_type": "uncorrected"}, then(2, 0)
    yield "hw_gpu_memory_limit_bytes", gpu, always(100 * GIB)
    yield "cotenant_gpu_pcie_throughput_bytes_per_second", {**gpu, "network_io_direction": "receive"}, always(GIB)
    yield "cotenant_gpu_reading_absent", {**tenant, **gpu, "reading": "tenant_utilization", "reason": "not_available"}, always(1)
    failed = {**tenant, **gpu, "operation": "cuMemAlloc", "error_type": "CUDA_ERROR_OUT_OF_MEMORY"}
    yield "cotenant_gpu_memory_failures_total", failed, since(0.1)
    yield "cotenant_gpu_memory_process_bytes", {**tenant, **gpu}, always(10 * GIB)
    yield "cotenant_gpu_memory_residual_bytes", {**tenant, **gpu, "part": "drift"}, then(2 * GIB, 0)
    yield "cotenant_gpu_memory_confidence", {**tenant, "confidence": "complete"}, always(1)
    yield "cotenant_gpu_grant_shares", {**tenant, **gpu, "resource": "nvidia.com/gpu"}, always(1)
    yield "cotenant_gpu_grant_state", {**tenant, **gpu, "grant": "used"}, always(1)
    yield "cotenant_gpu_grant_idle_seconds_total", {**tenant, **gpu}, lambda second: second
    yield "cotenant_gpu_memory_request_bytes", {**tenant, **gpu, "source": "kai_memory"}, always(2 * GIB)
    yield "cotenant_gpu_memory_over_request_bytes", {**tenant, **gpu, "source": "kai_memory"}, then(8 * GIB, 0)
    yield "cotenant_gpu_idle_holder_bytes", {**tenant, **gpu}, then(2 * GIB, 0)
    yield "cotenant_gpu_idle_holder_age_seconds", {**tenant, **gpu}, then(700)
    yield "cotenant_gpu_stale_grants", {}, then(1, 0)
    yield "cotenant_gpu_memory_tenant_room_bytes", {**tenant, **gpu, "limit_source": "mps"}, always(GIB)
    for horizon in ("60s", "300s"):
        yield "cotenant_gpu_reclaim_risk_ratio", {**gpu, "horizon": horizon}, then(0.9, 0.01)
    yield "cotenant_gpu_time_to_exhaustion_seconds", gpu, then(600)
    for horizon in ("60s", "300s"):
        yield "cotenant_memory_limit_risk_ratio", {**tenant, "horizon": horizon}, then(0.9, 0.01)
        yield "cotenant_host_memory_risk_ratio", {"horizon": horizon}, then(0.6, 0.01)
    yield "cotenant_memory_limit_bytes", tenant, always(64 * GIB)
    yield "cotenant_memory_usage_bytes", tenant, always(60 * GIB)
    yield "cotenant_memory_limit_time_seconds", tenant, then(45)
    yield "cotenant_host_memory_time_to_exhaustion_seconds", {}, then(300)
    yield "cotenant_gpu_reclaim_risk_share_ratio", {**tenant, **gpu}, then(0.8)
    for outcome in ("exhausted", "spared"):
        yield "cotenant_gpu_reclaim_risk_forecasts_total", {**gpu, "horizon": "60s", "forecast": "0.8-0.9", "outcome": outcome}, since(1)
    yield "cotenant_agent_kubelet_unread_device_ids", {}, always(0)
    yield "cotenant_agent_apiserver_age_seconds", {}, always(5)
    yield "cotenant_agent_apiserver_errors_total", {}, since(0.1)
    for source in ("podresources", "runtime"):
        yield f"cotenant_agent_kubelet_{source}_age_seconds", {}, always(5)
        yield f"cotenant_agent_kubelet_{source}_errors_total", {}, since(0.1)
    signal = {"signal": "metrics"}
    yield "cotenant_agent_otlp_exported_total", signal, since(10)
    yield "cotenant_agent_otlp_dropped_total", {**signal, "reason": "queue_full"}, since(1)
    yield "cotenant_agent_otlp_failures_total", {**signal, "reason": "unreachable"}, since(0.1)
    yield "cotenant_agent_otlp_queue_length", signal, always(100)
    yield "cotenant_agent_otlp_queue_bytes", signal, always(10000)
    yield "cotenant_agent_otlp_last_success_age_seconds", signal, always(120)
    # As the rules record them.
    yield "gpu:cotenant_reclaim_risk_ratio:60s", gpu, then(0.9, 0.01)
    yield "fleet:cotenant_agent_features:count", {"feature": "waits", "state": "broken"}, then(1, 0)
    yield "gpu:cotenant_memory_headroom_bytes:free", gpu, lambda second: GIB * (10 - second / 360)
    yield "gpu:cotenant_memory_headroom_ratio:free", gpu, lambda second: (10 - second / 360) / 100


def openmetrics(start, end):
    """The hour as promtool reads it; each family stands together, untyped."""
    families = {}
    for name, labels, value in hour(start, end):
        labels = {"job": "cotenant", "instance": NODE, **labels}
        written = ",".join(f'{key}="{text}"' for key, text in labels.items())
        points = ((second, value(second)) for second in range(0, int(end - start) + 1, STEP))
        lines = families.setdefault(name, [f"# TYPE {name} unknown"])
        lines += [f"{name}{{{written}}} {point} {start + second}" for second, point in points if point is not None]
    return "\n".join(line for lines in families.values() for line in lines) + "\n# EOF\n"
