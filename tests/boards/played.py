"""Owns what a played node says: every series that rules, alerts and the Fleet board read, in an agent's shape and number.

Refuses what nothing of those reads (histograms of calls and waits, the GPU and Tenant boards' own): `whole` says how many
series a real agent there has.
"""

import re

import promql
import shipped

GPUS, TENANTS, CULPRITS = 8, 20, 5
# Tenants are jobs with several pods' worth of nodes: each name is on some ten nodes.
POOL = 2000
BOARD = "Cotenant / Fleet"
# Of a tenant, for what it would have in all.
FUNCTIONS, WAITS = 10, ("rm_api_lock", "gpu_lock", "device")
NVML = [f"nvmlDeviceGetThing{number}" for number in range(15)]
NVML_BOUNDS = ("1e-05", "0.0001", "0.001", "0.01", "0.1", "1", "+Inf")
STATES = ("active", "degraded", "unsupported", "broken", "disabled")


def needed():
    """The agent's series that rules and the Fleet board read."""
    expressions = [rule["expr"] for rule in shipped.rules()]
    expressions += [expr for board, _, _, expr in shipped.panel_queries() if board == BOARD]
    return {name for expr in expressions for name in promql.metrics(expr)} & set(shipped.series())


def tenants(number):
    return [f"team-{(number * 7 + one) % POOL // 10}/job-{(number * 7 + one) % POOL}" for one in range(TENANTS)]


def page(number):
    """One node's series, with `@` where counters that grow have their value."""
    lines = []

    def add(name, value, **labels):
        written = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{{{written}}} {value}")

    agent(add, number)
    names = [who(pod) for pod in tenants(number)]
    for gpu in range(GPUS):
        on_gpu(add, number, gpu, f"GPU-{number:08x}-0000-0000-0000-{gpu:012x}", names)
    for place, one in enumerate(names):
        of_tenant(add, number, place, one, names)
    return "\n".join(sorted(lines)) + "\n"


def who(pod):
    namespace, name = pod.split("/")
    return {"tenant": f"pod:{pod}", "tenant_kind": "pod", "k8s_namespace_name": namespace, "k8s_pod_name": name, "k8s_container_name": "main"}


def agent(add, number):
    add("cotenant_agent_build_info", 1, version="0.1.0" if number % 10 else "0.0.9")
    add("cotenant_incidents_open", int(number % 50 == 0))
    for kind in ("noisy_neighbour", "stall", "allocation_failure", "near_miss", "oom_kill", "xid", "xid_echo"):
        add("cotenant_incidents_total", 0, kind=kind)
    for feature in range(13):
        troubled = feature == 7 and number % 40 == 0
        for state in STATES:
            add("cotenant_agent_feature_state", int(state == ("degraded" if troubled else "active")), feature=f"feature_{feature}", state=state)
    for reason in range(24):
        add("cotenant_agent_losses_total", 0, reason=f"reason_{reason}")
    for folded in ("events_lost", "tenants_folded", "blame_folded"):
        add(f"cotenant_agent_{folded}_total", 0)
    add("cotenant_agent_nvml_last_collect_success", int(number % 100 != 0))
    if number % 100 == 0:
        add("cotenant_agent_nvml_absences", 8, reading="power", reason="timeout")
    add("cotenant_agent_nvml_age_seconds", 3)
    for function in NVML:
        for place, le in enumerate(NVML_BOUNDS):
            add("cotenant_agent_nvml_call_duration_seconds_bucket", "@" if place > 2 else 0, function=function, le=le)
        for trouble in ("errors", "timeouts"):
            add(f"cotenant_agent_nvml_call_{trouble}_total", 0, function=function)
    for name in ("cpu_seconds_total", "probe_cost_seconds_total"):
        add(f"cotenant_agent_{name}", "@")
    add("cotenant_agent_resident_memory_bytes", 40_000_000 + number * 1000)
    add("cotenant_agent_tick_duration_seconds", 0.01)
    for map_ in range(10):
        add("cotenant_agent_map_entries", 100 + number % 97, map=f"MAP_{map_}")
        add("cotenant_agent_map_capacity", 65536, map=f"MAP_{map_}")
    for state in ("attached", "partial", "refused", "failed"):
        add("cotenant_agent_probe_libraries", int(state == "attached"), state=state)
        add("cotenant_agent_probe_symbols", 60 * int(state == "attached"), state=state)
    for name in ("probes_shed", "processes_untimed"):
        add(f"cotenant_agent_{name}", 0)
    for source in ("podresources", "runtime"):
        add(f"cotenant_agent_kubelet_{source}_age_seconds", 5)
        add(f"cotenant_agent_kubelet_{source}_errors_total", 0)
    add("cotenant_agent_kubelet_unread_device_ids", 0)
    add("cotenant_gpu_stale_grants", 0)
    for signal in ("metrics", "traces", "logs"):
        add("cotenant_agent_otlp_exported_total", "@", signal=signal)
        for name in ("queue_length", "queue_bytes", "last_success_age_seconds"):
            add(f"cotenant_agent_otlp_{name}", 0, signal=signal)
        for reason in ("queue_full", "refused", "sampled_out"):
            add("cotenant_agent_otlp_dropped_total", 0, signal=signal, reason=reason)
        for reason in ("unreachable", "timeout"):
            add("cotenant_agent_otlp_failures_total", 0, signal=signal, reason=reason)


def on_gpu(add, number, gpu, uuid, names):
    add("hw_gpu_memory_limit_bytes", 150754820096, hw_id=uuid)
    add("hw_gpu_memory_usage_bytes", 100000000000 + (number * 37 + gpu * 11) % 50 * 10**9, hw_id=uuid)
    for kind in ("corrected", "uncorrected"):
        add("hw_errors_total", 0, hw_id=uuid, hw_type="gpu", error_type=kind)
    for horizon in ("10s", "60s", "300s"):
        add("cotenant_gpu_reclaim_risk_ratio", (number + gpu) % 100 / 200, hw_id=uuid, horizon=horizon)
    if gpu == 0:
        add("cotenant_gpu_time_to_exhaustion_seconds", 600 + number, hw_id=uuid)
    if gpu == 0 and number % 100 == 0:
        add("cotenant_gpu_xid_errors_total", 1, hw_id=uuid, xid="31")
        add("cotenant_gpu_xid_last_seen_seconds", 1700000000, hw_id=uuid, xid="31")
    for place, one in enumerate(names):
        add("cotenant_gpu_memory_process_bytes", 5 * 10**9, **one, hw_id=uuid)
        for part in ("baseline", "context", "drift"):
            add("cotenant_gpu_memory_residual_bytes", 0, **one, hw_id=uuid, part=part)
        for kind in ("device", "pool"):
            add("cotenant_gpu_memory_live_bytes", 2 * 10**9, **one, hw_id=uuid, memory_kind=kind)
            add("cotenant_gpu_memory_allocated_bytes_total", "@", **one, hw_id=uuid, memory_kind=kind)
        if place < 3:
            add("cotenant_gpu_reclaim_risk_share_ratio", 0.3, **one, hw_id=uuid)
            add("cotenant_gpu_memory_over_request_bytes", 0, **one, hw_id=uuid, source="kai_memory")
        if place == 19:
            add("cotenant_gpu_idle_holder_bytes", 0, **one, hw_id=uuid)


def of_tenant(add, number, place, one, names):
    add("cotenant_gpu_tenant_processes", 1, **one)
    for word in ("complete", "joined_late", "events_lost"):
        add("cotenant_gpu_memory_confidence", int(word == "complete"), **one, confidence=word)
    uuid = f"GPU-{number:08x}-0000-0000-0000-{place % GPUS:012x}"
    add("cotenant_gpu_memory_failures_total", 0, **one, hw_id=uuid, operation="cuMemAlloc", error_type="CUDA_ERROR_OUT_OF_MEMORY")
    if place == 0 and number % 20 == 0:
        add("cotenant_oom_kills_total", 1, **one, scope="memcg")
    for wait in WAITS:
        add("cotenant_gpu_driver_wait_seconds_total", "@", **one, wait_class=wait)
    for step in range(1, CULPRITS + 1):
        culprit = names[(place + step) % TENANTS]["tenant"]
        for wait in WAITS[:2]:
            add("cotenant_gpu_blame_seconds_total", "@", victim=one["tenant"], culprit=culprit, relation="neighbour", wait_class=wait)


def whole():
    """Series of a real agent on such a node, by the page on scale, each tenant calling FUNCTIONS of CUDA."""
    text = (shipped.DASHBOARDS / "README.md").read_text(encoding="utf-8")
    there = {
        "A": 1,
        "N": len(NVML),
        "G": GPUS,
        "R": 0,
        "T": TENANTS,
        "P": TENANTS * GPUS,
        "Q": TENANTS * GPUS,
        "K": TENANTS * GPUS * 2,
        "C": TENANTS * FUNCTIONS,
        "W": TENANTS * len(WAITS),
        "B": TENANTS * CULPRITS * 2,
        "E": TENANTS,
    }
    terms = re.findall(r"^\| ([\d,]+) × \*\*(\w+)\*\* \|", text, re.M)
    each_gpu, each_tenant = map(int, re.search(r"up to (\d+) for each GPU and (\d+) for each tenant on a GPU", text).groups())
    further = TENANTS * FUNCTIONS * (GPUS - 1)
    return sum(int(factor) * there[name] for factor, name in terms) + further + each_gpu * GPUS + each_tenant * TENANTS * GPUS
