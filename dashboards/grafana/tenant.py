"""Owns *Tenant*: what one tenant holds, does, waits for, and does to others.

Refuses to tell why in words: the agent does, on its node.
"""

from asked import ACT, CALM, CLUSTER, DEVICE_KINDS, GPU, grown, NODE, OF_TENANT, ON_NODES, rate, table, TENANT, TO_INCIDENT, WATCH
from panels import board, column, figure, graph, matching, query, row, states


def tenant():
    """One tenant: what it holds, does, waits for, and does to others."""
    panels = [
        figure("Held", "On all GPUs of the chosen nodes, by NVML; contexts and modules are in it.", "bytes", f"sum(cotenant_gpu_memory_process_bytes{{{OF_TENANT}}})"),
        figure("Held by calls", "By the probes: kinds that take memory of the GPU.", "bytes", f"sum(cotenant_gpu_memory_live_bytes{{{OF_TENANT},{DEVICE_KINDS}}})"),
        figure("Processes", "That use the CUDA driver. Threads are not processes.", "short", f"sum(cotenant_gpu_tenant_processes{{{OF_TENANT}}})"),
        figure(
            "Blocked by neighbours",
            "Threads that stand still at a time because of another tenant, now.",
            "percentunit",
            f'sum(rate(cotenant_gpu_blame_seconds_total{{{ON_NODES},victim="$tenant",relation="neighbour"}}[$__rate_interval]))',
            [(0, CALM), (0.05, WATCH), (0.2, ACT)],
        ),
        figure("Failed calls", "In this time.", "short", f"sum({grown('tenant', f'cotenant_gpu_memory_failures_total{{{OF_TENANT}}}')})", [(0, CALM), (1, WATCH)]),
        figure("Kills", "Processes that the kernel killed for memory, in this time. No data: none that was seen.", "short", f"sum({grown('tenant', f'cotenant_oom_kills_total{{{OF_TENANT}}}')})", [(0, CALM), (1, ACT)]),
        row("What it holds"),
        graph(
            "Memory by GPU",
            "By NVML; contexts and modules are in it.",
            "bytes",
            query(f"sum by (instance, hw_id) (cotenant_gpu_memory_process_bytes{{{OF_TENANT}}})", "{{instance}} {{hw_id}}"),
            stack=True,
            low=0,
        ),
        graph(
            "Memory by kind",
            "By the probes. Managed is virtual, host kinds are the host's memory, imported belongs to the exporter.",
            "bytes",
            query(f"sum by (memory_kind) (cotenant_gpu_memory_live_bytes{{{OF_TENANT}}})", "{{memory_kind}}"),
            query(f"sum by (memory_kind) (cotenant_gpu_memory_live_peak_bytes{{{OF_TENANT}}})", "{{memory_kind}} peak"),
            query(f"sum(cotenant_gpu_memory_pool_reserved_bytes{{{OF_TENANT}}})", "taken by pools"),
            low=0,
            overrides=[matching("/ peak$/", custom__lineStyle={"fill": "dash", "dash": [4, 6]}, custom__fillOpacity=0)],
        ),
        graph(
            "Churn",
            "Bytes a second in the driver: allocated above, freed below. A framework's own cache hides what it hands out again.",
            "Bps",
            query(rate("memory_kind", f"cotenant_gpu_memory_allocated_bytes_total{{{OF_TENANT}}}"), "{{memory_kind}}"),
            query(rate("memory_kind", f"cotenant_gpu_memory_freed_bytes_total{{{OF_TENANT}}}"), "{{memory_kind}} freed"),
            overrides=[matching("/ freed$/", custom__transform="negative-Y")],
        ),
        states(
            "How far the ledger can be trusted",
            "Complete: every call was seen. Joined late: processes ran before the probes. Events lost: figures are too low.",
            query(f"max by (confidence) (cotenant_gpu_memory_confidence{{{OF_TENANT}}})", "{{confidence}}"),
        ),
        row("What it was granted"),
        graph(
            "Grant against use",
            "What it holds by NVML, what it asked for (annotations of its scheduler, or the whole device), and what its idle holders have. Nothing enforces a request.",
            "bytes",
            query(f"sum by (instance, hw_id) (cotenant_gpu_memory_process_bytes{{{OF_TENANT}}})", "{{instance}} {{hw_id}} held"),
            query(f"max by (instance, hw_id, source) (cotenant_gpu_memory_request_bytes{{{OF_TENANT}}})", "{{instance}} {{hw_id}} asked for ({{source}})"),
            query(f"sum by (instance, hw_id) (cotenant_gpu_idle_holder_bytes{{{OF_TENANT}}})", "{{instance}} {{hw_id}} idle"),
            query(f"max by (instance, hw_id) (cotenant_gpu_memory_over_request_bytes{{{OF_TENANT}}})", "{{instance}} {{hw_id}} beyond"),
            low=0,
            overrides=[matching("/ asked for /", custom__lineStyle={"fill": "dash", "dash": [4, 6]}, custom__fillOpacity=0)],
        ),
        states(
            "Grant and use",
            "Used, idle (granted, not used), allocation mismatch (another GPU is granted), none (nothing is granted), stale (the pod is gone), reservation. A gap is unknown.",
            query(f"max by (instance, hw_id, grant) (cotenant_gpu_grant_state{{{OF_TENANT}}})", "{{instance}} {{hw_id}} {{grant}}"),
        ),
        table(
            "Shares granted",
            "By kubelet: devices, or shares of one, and how long the grant lay idle in this time. No data: nothing is granted, or this is no node of Kubernetes.",
            "short",
            query(f"sum by (instance, hw_id, resource) (cotenant_gpu_grant_shares{{{OF_TENANT}}})"),
            query(f"sum by (instance, hw_id) (increase(cotenant_gpu_grant_idle_seconds_total{{{OF_TENANT}}}[$__range]))"),
            figures=("Shares", "Idle"),
            overrides=[column("Idle", unit="s")],
        ),
        table(
            "Idle holders",
            "Processes that hold memory, call the driver no more and run no kernel; the longest. Which processes: /api/v1/holders on the node.",
            "short",
            query(f"sum by (instance, hw_id) (cotenant_gpu_idle_holders{{{OF_TENANT}}})"),
            query(f"max by (instance, hw_id) (cotenant_gpu_idle_holder_age_seconds{{{OF_TENANT}}})"),
            figures=("Processes", "Idle for"),
            overrides=[column("Idle for", unit="s")],
        ),
        row("What it waits for, and on whom"),
        graph(
            "Time blocked, by what was waited for",
            "Threads blocked inside driver calls, at a time. Time ready to run without a CPU is not in it.",
            "percentunit",
            query(rate("wait_class", f"cotenant_gpu_driver_wait_seconds_total{{{OF_TENANT}}}"), "{{wait_class}}"),
            stack=True,
        ),
        graph(
            "Time blocked, by who had it",
            "The same time by culprit: a tenant, the device, the kernel, or unknown.",
            "percentunit",
            query(rate("culprit", f'cotenant_gpu_blame_seconds_total{{{ON_NODES},victim="$tenant"}}'), "{{culprit}}"),
            stack=True,
        ),
        graph(
            "Whom it makes wait",
            "Threads of others that stand still because of this tenant, at a time.",
            "percentunit",
            query(rate("victim", f'cotenant_gpu_blame_seconds_total{{{ON_NODES},culprit="$tenant",relation="neighbour"}}'), "{{victim}}"),
            stack=True,
        ),
        graph(
            "Length of single waits",
            "Median and 99th percentile by what was waited for, good to a factor of two.",
            "s",
            query(f"histogram_quantile(0.5, {rate('wait_class, le', f'cotenant_gpu_driver_wait_duration_seconds_bucket{{{OF_TENANT}}}')})", "{{wait_class}} p50"),
            query(f"histogram_quantile(0.99, {rate('wait_class, le', f'cotenant_gpu_driver_wait_duration_seconds_bucket{{{OF_TENANT}}}')})", "{{wait_class}} p99"),
        ),
        graph(
            "Length of calls",
            "99th percentile from entry to return, good to a factor of two.",
            "s",
            query(f"histogram_quantile(0.99, {rate('operation, le', f'cotenant_gpu_memory_operation_duration_seconds_bucket{{{OF_TENANT}}}')})", "{{operation}}"),
        ),
        graph(
            "Spinning on locks",
            "Estimate: CPU time in driver calls beyond what such calls take alone. Calls without a baseline are unjudged: their excess is unknown.",
            "percentunit",
            query(f"sum(rate(cotenant_gpu_contention_excess_seconds_total{{{OF_TENANT}}}[$__rate_interval]))", "excess"),
            query(f"sum(cotenant_gpu_contention_unjudged{{{OF_TENANT}}})", "calls unjudged"),
            overrides=[column("calls unjudged", unit="short", custom__axisPlacement="right")],
        ),
        row("What it does, and what went wrong"),
        graph(
            "Busy, by GPU",
            "Share of time in which its kernels ran, by NVML's samples. A gap is unknown, not idle.",
            "percentunit",
            query(f"sum by (instance, hw_id) (cotenant_gpu_tenant_utilization_ratio{{{OF_TENANT}}})", "{{instance}} {{hw_id}}"),
            low=0,
            width=8,
        ),
        graph(
            "Calls",
            "CUDA driver calls about memory, a second.",
            "cps",
            query(rate("operation", f"cotenant_gpu_memory_operations_total{{{OF_TENANT}}}"), "{{operation}}"),
            width=8,
        ),
        graph(
            "Calls that failed",
            "By function and error, a second.",
            "cps",
            query(rate("operation, error_type", f"cotenant_gpu_memory_failures_total{{{OF_TENANT}}}"), "{{operation}} {{error_type}}"),
            width=8,
        ),
        table(
            "Kills for memory",
            "In this time, by node and by what ran out.",
            "short",
            query(grown("instance, scope", f"cotenant_oom_kills_total{{{OF_TENANT}}}")),
            figures=("Processes",),
            overrides=[column("Node", links=[TO_INCIDENT])],
        ),
        table(
            "Figures that are not published, and why",
            "What is not known about this tenant. Absent is not zero and not idle.",
            "short",
            query(f"max by (instance, hw_id, reading, reason) (cotenant_gpu_reading_absent{{{OF_TENANT}}})"),
        ),
    ]
    return board("tenant", "Tenant", "What one tenant holds, waits for, and does to others.", [CLUSTER, NODE, TENANT], panels)
