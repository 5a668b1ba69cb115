"""Owns what the boards show: every panel with its question, its queries and what its figure does not say.

Refuses zeros for what is unknown: no query ends in `or vector(0)`. `python3 dashboards/grafana/boards.py` writes the
JSON files beside it; tests/boards fails when they are not what this writes.
"""

import json
import pathlib

from panels import board, column, figure, graph, link, matching, query, row, states, table, variable, words

NODE = variable("node", "Node", "Targets that are Cotenant agents", "label_values(cotenant_agent_build_info, instance)", many=True)
ONE_NODE = variable("node", "Node", "The agent's target", "label_values(cotenant_agent_build_info, instance)")
GPU = variable("gpu", "GPU", "NVML's UUID", 'label_values(hw_gpu_memory_limit_bytes{instance="$node"}, hw_id)')
TENANT = variable("tenant", "Tenant", "As the agent writes tenants", 'label_values(cotenant_gpu_tenant_processes{instance=~"$node"}, tenant)')
VICTIM = variable(
    "victim", "Victim", "Who waited, failed or died", 'label_values(cotenant_gpu_tenant_processes{instance=~"$node"}, tenant)', many=True
)

ON_NODES = 'instance=~"$node"'
ON_GPU = 'instance="$node",hw_id="$gpu"'
OF_TENANT = 'instance=~"$node",tenant="$tenant"'
DEVICE_KINDS = 'memory_kind=~"device|pool|vmm|array"'

CALM, WATCH, ACT = "green", "orange", "red"
TO_GPU = link("This GPU", "gpu", node="${__data.fields.Node:percentencode}", gpu="${__data.fields.GPU:percentencode}")
TO_TENANT = link("This tenant", "tenant", node="$__all", tenant="${__data.fields.Tenant:percentencode}")
TO_TENANT_SERIES = link("This tenant", "tenant", node="$__all", tenant="${__field.labels.tenant:percentencode}")
TO_VICTIM = link("This tenant", "tenant", node="$__all", tenant="${__data.fields.Victim:percentencode}")
TO_CULPRIT = link("This tenant", "tenant", node="$__all", tenant="${__data.fields.Culprit:percentencode}")
TO_INCIDENT = link("Incident", "incident", node="${__data.fields.Node:percentencode}", victim="$__all")


def grown(by, series):
    """What a counter of rare events counted in the board's time.

    A series that comes with its first event, at 1, has no increase: its first value is added. Not so where the agent
    itself was not yet scraped at the beginning, as its counters may be days old.
    """
    more = f"increase({series}[$__range])"
    first = f"""(
        min_over_time({series}[$__range]) unless {series} offset $__range
          and on (job, instance) cotenant_agent_build_info offset $__range
    )"""
    return f"sum by ({by}) ({more} + {first} or {more} or {first}) > 0"


def rate(by, series):
    return f"sum by ({by}) (rate({series}[$__rate_interval]))"


def fleet():
    """Which GPUs are at risk, and who hurts whom across nodes."""
    at_risk = f"bottomk(20, gpu:cotenant_memory_headroom_ratio:free{{{ON_NODES}}})"
    named = {"instance": "Node", "hw_id": "GPU", "tenant": "Tenant", "victim": "Victim", "culprit": "Culprit"}
    panels = [
        words(
            "What this board needs",
            "This board reads recording rules.",
            "Figures of many nodes come from the recording rules in `dashboards/rules/cotenant.rules.yml`; without them most panels here"
            " have no data. **No data means unknown**, never zero: a GPU that cannot be read is in no sum. What to make of a shape:"
            " `dashboards/patterns.md`.",
            height=3,
        ),
        row("Now"),
        figure("Nodes", "Agents that answer now.", "short", "sum(fleet:cotenant_nodes:count)"),
        figure("GPUs", "GPUs and MIG instances whose memory can be read now. The others are not in this board's sums.", "short", "sum(fleet:cotenant_gpus:count)"),
        figure(
            "GPUs short of memory",
            "GPUs with less than a tenth free, of those that can be read. Full and steady is how many frameworks work; full and shrinking is the alert.",
            "short",
            "sum(fleet:cotenant_gpus_short_of_memory:count)",
            [(0, CALM), (1, WATCH)],
        ),
        figure("Free memory", "Of all GPUs that can be read, by NVML.", "bytes", "sum(fleet:cotenant_memory_headroom_bytes:sum)"),
        figure(
            "Incidents open",
            "Incidents that go on now, over all nodes. Each node tells them in words at /api/v1/incidents.",
            "short",
            "sum(fleet:cotenant_incidents_open:sum)",
            [(0, CALM), (1, WATCH)],
        ),
        figure(
            "Tenant time lost",
            "Threads that stand still in driver calls because of a neighbour, at a time, over all nodes, averaged over 5 minutes.",
            "none",
            "sum(pair:cotenant_blame_seconds:rate5m)",
        ),
        table(
            "Alerts that fire",
            "Empty when none fires, provided that this Prometheus loads the rules.",
            "short",
            query('max by (severity, alertname, instance, hw_id, tenant, culprit, feature, xid) (ALERTS{alertname=~"Cotenant.+",alertstate="firing"})'),
            names={**named, "alertname": "Alert", "severity": "Severity", "feature": "Feature", "xid": "Xid"},
            order=("severity", "alertname", "instance", "tenant", "culprit", "hw_id"),
            hide=("Value",),
            overrides=[column("Node", links=[TO_INCIDENT])],
            width=24,
            height=6,
        ),
        row("GPUs at risk"),
        table(
            "GPUs with the least memory free",
            "By NVML: limit minus used. The pace is that of the last 15 minutes, below zero where free memory shrinks.",
            "bytes",
            query(at_risk),
            query(f"gpu:cotenant_memory_headroom_bytes:free{{{ON_NODES}}} and on (instance, hw_id) {at_risk}"),
            query(f"deriv(gpu:cotenant_memory_headroom_bytes:free{{{ON_NODES}}}[15m]) and on (instance, hw_id) {at_risk}"),
            names={**named, "Value #A": "Free", "Value #B": "Free bytes", "Value #C": "Pace"},
            order=("instance", "hw_id", "Value #A", "Value #B", "Value #C"),
            hide=("job", "cluster", "__name__"),
            overrides=[
                column("GPU", links=[TO_GPU]),
                column("Free", unit="percentunit", custom__cellOptions={"type": "color-text"}, thresholds={"mode": "absolute", "steps": [{"value": None, "color": ACT}, {"value": 0.02, "color": WATCH}, {"value": 0.1, "color": CALM}]}, color={"mode": "thresholds"}),
                column("Pace", unit="Bps"),
            ],
        ),
        graph(
            "Free memory, the ten GPUs with least",
            "Share of the GPU's memory that is free, by NVML. A saw is churn; a slope that reaches zero is the next allocation failure.",
            "percentunit",
            query(f"bottomk(10, gpu:cotenant_memory_headroom_ratio:free{{{ON_NODES}}})", "{{instance}} {{hw_id}}"),
            low=0,
        ),
        table(
            "GPUs most likely to run out",
            "The agents' own forecast: the probability that an allocation finds no room within a minute, and when nothing is free if growth goes on. What it is worth: `dashboards/RISK.md`.",
            "percentunit",
            query(f'topk(20, max by (instance, hw_id) (cotenant_gpu_reclaim_risk_ratio{{{ON_NODES},horizon="60s"}}) > 0.05)'),
            query(f"max by (instance, hw_id) (cotenant_gpu_time_to_exhaustion_seconds{{{ON_NODES}}})"),
            query(f"topk by (instance, hw_id) (1, sum by (instance, hw_id, tenant) (cotenant_gpu_reclaim_risk_share_ratio{{{ON_NODES}}}) > 0)"),
            names={**named, "Value #A": "Within a minute", "Value #B": "Nothing free in", "Value #C": "Share of the growth", "tenant": "Driven by"},
            order=("instance", "hw_id", "Value #A", "Value #B", "tenant", "Value #C"),
            overrides=[column("GPU", links=[TO_GPU]), column("Nothing free in", unit="s")],
            sort="Within a minute",
        ),
        graph(
            "Risk within a minute, the ten GPUs with most",
            "Probability, by the agents' own forecast.",
            "percentunit",
            query(f'topk(10, max by (instance, hw_id) (cotenant_gpu_reclaim_risk_ratio{{{ON_NODES},horizon="60s"}}))', "{{instance}} {{hw_id}}"),
            low=0,
        ),
        row("Who hurts whom"),
        table(
            "Pairs that cost most",
            "Threads of the victim that stand still, at a time, because of the culprit, over all nodes: 100 % is one thread all the time. Measured by the scheduler, 5 minutes.",
            "percentunit",
            query("topk(20, sum by (victim, culprit) (pair:cotenant_blame_seconds:rate5m))"),
            names={**named, "Value": "Lost"},
            order=("victim", "culprit", "Value"),
            overrides=[column("Victim", links=[TO_VICTIM]), column("Culprit", links=[TO_CULPRIT])],
            sort="Lost",
            width=8,
        ),
        graph(
            "Top culprits",
            "Time that others lost because of each, in threads at a time.",
            "percentunit",
            query("topk(5, sum by (culprit) (culprit:cotenant_blame_seconds:rate5m))", "{{culprit}}"),
            width=8,
        ),
        graph(
            "Top victims",
            "Time that each lost because of neighbours, in threads at a time.",
            "percentunit",
            query("topk(5, sum by (victim) (victim:cotenant_blame_seconds:rate5m))", "{{victim}}"),
            width=8,
        ),
        row("What happened in this time"),
        table(
            "Kills for memory",
            "Processes that the kernel killed, by tenant and by what ran out: memcg is the tenant's own limit, global is the host.",
            "short",
            query(grown("instance, tenant, scope", f"cotenant_oom_kills_total{{{ON_NODES}}}")),
            names={**named, "scope": "What ran out", "Value": "Processes"},
            overrides=[column("Tenant", links=[TO_TENANT]), column("Node", links=[TO_INCIDENT])],
            sort="Processes",
            width=8,
        ),
        table(
            "Calls that failed",
            "CUDA driver calls that returned an error, by tenant. A framework that frees its cache and asks again counts too.",
            "short",
            query(f"topk(20, {grown('tenant, error_type', f'cotenant_gpu_memory_failures_total{{{ON_NODES}}}')})"),
            names={**named, "error_type": "Error", "Value": "Calls"},
            overrides=[column("Tenant", links=[TO_TENANT])],
            sort="Calls",
            width=8,
        ),
        graph(
            "Incidents by kind",
            "Incidents that began or took this name, at each step. One that turns out worse counts under each of its names.",
            "short",
            query(f"sum by (kind) (increase(cotenant_incidents_total{{{ON_NODES}}}[$__rate_interval]))", "{{kind}}"),
            stack=True,
            bars=True,
            width=8,
        ),
        table(
            "Xid faults",
            "Faults that the driver reported for a GPU, with the last time. The number is the driver's.",
            "short",
            query(grown("instance, hw_id, xid", f"cotenant_gpu_xid_errors_total{{{ON_NODES}}}")),
            query(f"max by (instance, hw_id, xid) (cotenant_gpu_xid_last_seen_seconds{{{ON_NODES}}}) * 1000"),
            names={**named, "xid": "Xid", "Value #A": "In this time", "Value #B": "Last seen"},
            order=("instance", "hw_id", "xid", "Value #A", "Value #B"),
            overrides=[column("Last seen", unit="dateTimeFromNow"), column("GPU", links=[TO_GPU])],
            width=12,
        ),
        table(
            "Uncorrected memory errors",
            "ECC errors that the hardware could not correct, since the driver was loaded, by NVML.",
            "short",
            query(f'sum by (instance, hw_id) (hw_errors_total{{{ON_NODES},error_type="uncorrected"}}) > 0'),
            names={**named, "Value": "Errors"},
            overrides=[column("GPU", links=[TO_GPU])],
            width=12,
        ),
        row("Tenants"),
        graph(
            "Top tenants by memory held",
            "Over all nodes, by NVML; contexts and modules are in it.",
            "bytes",
            query("topk(10, sum by (tenant) (tenant:cotenant_memory_process_bytes:sum))", "{{tenant}}"),
            links=[TO_TENANT_SERIES],
        ),
        graph(
            "Top tenants by churn",
            "Bytes allocated a second in the driver, over all nodes. A framework's own cache hides what it hands out again.",
            "Bps",
            query("topk(10, sum by (tenant) (tenant:cotenant_memory_allocated_bytes:rate5m))", "{{tenant}}"),
            links=[TO_TENANT_SERIES],
        ),
        graph(
            "Top tenants by time blocked",
            "Threads blocked inside driver calls, at a time, for whatever reason: neighbours, their own locks, the device.",
            "percentunit",
            query("topk(10, sum by (tenant) (tenant:cotenant_driver_wait_seconds:rate5m))", "{{tenant}}"),
            links=[TO_TENANT_SERIES],
        ),
        graph(
            "Top tenants by failures",
            "Driver calls that returned an error, a second.",
            "cps",
            query("topk(10, sum by (tenant) (tenant:cotenant_memory_failures:rate5m))", "{{tenant}}"),
            links=[TO_TENANT_SERIES],
        ),
        row("The agents themselves"),
        table(
            "Features that do not work",
            "Degraded and broken ones are worth a look; the reason is on that node's /status. What a host does not have is not listed.",
            "short",
            query(f'max by (instance, feature, state) (cotenant_agent_feature_state{{{ON_NODES},state=~"degraded|broken"}}) == 1'),
            names={**named, "feature": "Feature", "state": "State"},
            hide=("Value",),
            width=8,
        ),
        table(
            "Events lost",
            "Events that could not be booked. Figures of the tenants concerned are too low.",
            "short",
            query(f"sum by (instance, reason) (increase(cotenant_agent_losses_total{{{ON_NODES}}}[$__range])) > 0"),
            names={**named, "reason": "Why", "Value": "Events"},
            width=8,
        ),
        table(
            "Folded and left out",
            "Tenants past the cap that became other, shares of blame that became other, and events that found no room among the incidents.",
            "short",
            query(f"sum by (instance) (increase(cotenant_agent_tenants_folded_total{{{ON_NODES}}}[$__range]))"),
            query(f"sum by (instance) (increase(cotenant_agent_blame_folded_total{{{ON_NODES}}}[$__range]))"),
            query(f"sum by (instance) (increase(cotenant_agent_events_lost_total{{{ON_NODES}}}[$__range]))"),
            names={**named, "Value #A": "Tenants", "Value #B": "Blame", "Value #C": "Events"},
            width=8,
        ),
        graph(
            "NVML readings missing",
            "Readings that the last poll did not get, and why. Not supported is the hardware's business.",
            "short",
            query(f"sum by (reading, reason) (cotenant_agent_nvml_absences{{{ON_NODES}}})", "{{reading}}: {{reason}}"),
            stack=True,
            width=8,
        ),
        graph(
            "NVML does not answer",
            "Nodes whose last poll missed a figure that they have, and the age of the oldest poll.",
            "short",
            query(f"sum(cotenant_agent_nvml_last_collect_success{{{ON_NODES}}} == bool 0)", "nodes"),
            query(f"max(cotenant_agent_nvml_age_seconds{{{ON_NODES}}})", "oldest poll"),
            overrides=[column("oldest poll", unit="s", custom__axisPlacement="right")],
            width=8,
        ),
        graph(
            "Slowest NVML calls",
            "The 99th percentile of the agent's own NVML calls, good to a factor of two. They queue behind the driver's locks like everybody.",
            "s",
            query(f"topk(5, histogram_quantile(0.99, {rate('function, le', f'cotenant_agent_nvml_call_duration_seconds_bucket{{{ON_NODES}}}')}))", "{{function}}"),
            width=8,
        ),
        graph(
            "NVML calls that failed",
            "Errors (not supported is one) and calls given up at their deadline, a second.",
            "cps",
            query(rate("function", f"cotenant_agent_nvml_call_errors_total{{{ON_NODES}}}") + " > 0", "{{function}}: error"),
            query(rate("function", f"cotenant_agent_nvml_call_timeouts_total{{{ON_NODES}}}") + " > 0", "{{function}}: deadline"),
            width=8,
        ),
        graph(
            "CPU of the agent",
            "Highest of all nodes, and the time that probes cost all tenants of a node together (an estimate).",
            "percentunit",
            query(f"max(rate(cotenant_agent_cpu_seconds_total{{{ON_NODES}}}[$__rate_interval]))", "agent, highest"),
            query(
                f"max(rate(cotenant_agent_probe_cost_seconds_total{{{ON_NODES}}}[$__rate_interval]))",
                "probes, highest",
            ),
            width=8,
        ),
        graph(
            "Memory of the agent",
            "Resident memory, highest of all nodes. BPF maps are not in it.",
            "bytes",
            query(f"max(cotenant_agent_resident_memory_bytes{{{ON_NODES}}})", "highest"),
            width=8,
        ),
        graph(
            "Fullest BPF maps",
            "Share of its entries that a map uses, highest of all nodes. A full map loses events.",
            "percentunit",
            query(f"topk(5, max by (map) (cotenant_agent_map_entries{{{ON_NODES}}} / cotenant_agent_map_capacity{{{ON_NODES}}}))", "{{map}}"),
            width=8,
        ),
        graph(
            "Length of a tick",
            "From reading the kernel to the finished view, the longest of all nodes.",
            "s",
            query(f"max(cotenant_agent_tick_duration_seconds{{{ON_NODES}}})", "longest"),
            width=8,
        ),
        graph(
            "Probes",
            "libcuda files and symbols under observation, over all nodes. Missing is what that driver does not have; partial, refused and failed are troubles.",
            "short",
            query(f"sum by (state) (cotenant_agent_probe_libraries{{{ON_NODES}}})", "libraries {{state}}"),
            query(f"sum by (state) (cotenant_agent_probe_symbols{{{ON_NODES}}})", "symbols {{state}}"),
            query(f"sum(cotenant_agent_probes_shed{{{ON_NODES}}})", "libraries, stream-ordered calls not probed"),
            query(f"sum(cotenant_agent_processes_untimed{{{ON_NODES}}})", "processes, calls not timed"),
            width=8,
        ),
        table(
            "Versions",
            "Agents by version.",
            "short",
            query(f"count by (version) (cotenant_agent_build_info{{{ON_NODES}}})"),
            names={"version": "Version", "Value": "Nodes"},
            width=8,
        ),
        row("What is known of Kubernetes"),
        graph(
            "Age of what is known",
            "Of kubelet's grants and of the runtime's names. While a source does not answer, what it said last stays in force.",
            "s",
            query(f"max by (instance) (cotenant_agent_kubelet_podresources_age_seconds{{{ON_NODES}}})", "{{instance}} grants"),
            query(f"max by (instance) (cotenant_agent_kubelet_runtime_age_seconds{{{ON_NODES}}})", "{{instance}} names"),
            low=0,
            width=8,
        ),
        graph(
            "Questions that failed",
            "To kubelet's pod-resources socket and to the runtime's CRI socket, a second.",
            "cps",
            query(f"sum by (instance) (rate(cotenant_agent_kubelet_podresources_errors_total{{{ON_NODES}}}[$__rate_interval]))", "{{instance}} grants"),
            query(f"sum by (instance) (rate(cotenant_agent_kubelet_runtime_errors_total{{{ON_NODES}}}[$__rate_interval]))", "{{instance}} names"),
            width=8,
        ),
        graph(
            "Grants that lead nowhere",
            "Stale: kubelet lists a pod that is gone. Unread: device ids of a plugin that is not known.",
            "short",
            query(f"max by (instance) (cotenant_gpu_stale_grants{{{ON_NODES}}})", "{{instance}} stale"),
            query(f"max by (instance) (cotenant_agent_kubelet_unread_device_ids{{{ON_NODES}}})", "{{instance}} unread"),
            low=0,
            width=8,
        ),
        row("What the agents send to an OTLP receiver"),
        graph(
            "Sent and acknowledged",
            "Data points, spans and log records that the receiver acknowledged, a second. No data where no agent sends.",
            "cps",
            query(rate("signal", f"cotenant_agent_otlp_exported_total{{{ON_NODES}}}"), "{{signal}}"),
            width=8,
        ),
        graph(
            "Dropped, and attempts that failed",
            "What will never reach the receiver, by reason (sampled_out is meant so), and attempts that failed, of which nothing is lost by itself.",
            "cps",
            query(rate("signal, reason", f"cotenant_agent_otlp_dropped_total{{{ON_NODES}}}") + " > 0", "{{signal}} dropped: {{reason}}"),
            query(rate("signal, reason", f"cotenant_agent_otlp_failures_total{{{ON_NODES}}}") + " > 0", "{{signal}} attempt failed: {{reason}}"),
            width=8,
        ),
        graph(
            "Waiting to be sent",
            "Items and bytes in the agents' queues, all nodes, and the longest time since metrics were acknowledged.",
            "short",
            query(f"sum by (signal) (cotenant_agent_otlp_queue_length{{{ON_NODES}}})", "{{signal}} items"),
            query(f"sum by (signal) (cotenant_agent_otlp_queue_bytes{{{ON_NODES}}})", "{{signal}} bytes"),
            query(f'max(cotenant_agent_otlp_last_success_age_seconds{{{ON_NODES},signal="metrics"}})', "metrics acknowledged"),
            overrides=[matching("/ bytes$/", unit="bytes", custom__axisPlacement="right"), column("metrics acknowledged", unit="s", custom__axisPlacement="right")],
            width=8,
        ),
    ]
    return board("fleet", "Fleet", "Which GPUs are at risk, who hurts whom across nodes, what happened.", [NODE], panels)


def gpu():
    """One GPU: who holds it, who churns, who waits."""
    panels = [
        figure("Free", "By NVML: limit minus used.", "bytes", f"hw_gpu_memory_limit_bytes{{{ON_GPU}}} - hw_gpu_memory_usage_bytes{{{ON_GPU}}}"),
        figure(
            "Used",
            "Share of the GPU's memory in use, by NVML. Space, not time.",
            "percentunit",
            f"hw_gpu_memory_utilization_ratio{{{ON_GPU}}}",
            [(0, CALM), (0.9, WATCH), (0.98, ACT)],
        ),
        figure("Busy", "Share of the last sample (up to 1 s) in which a kernel ran. One small kernel counts like a full GPU.", "percentunit", f"hw_gpu_utilization_ratio{{{ON_GPU}}}"),
        table(
            "Shared how",
            "Of a GPU that is cut by MIG the tenants are on the instances. What this is told from is on the agent's /status.",
            "short",
            query(f"max by (sharing_mode) (cotenant_gpu_sharing_mode{{{ON_GPU}}} == 1)"),
            names={"sharing_mode": "Mode"},
            hide=("Value",),
            width=4,
            height=4,
        ),
        figure("Age of the figures", "When NVML was last asked about this GPU. Old figures are not wrong, they are old.", "s", f"cotenant_gpu_readings_age_seconds{{{ON_GPU}}}", [(0, CALM), (60, WATCH)]),
        table(
            "What it is",
            "Product and driver, and the whole GPU where this is a MIG instance.",
            "short",
            query(f"max by (hw_name, hw_driver_version, hw_parent) (cotenant_gpu_info{{{ON_GPU}}})"),
            names={"hw_name": "Product", "hw_driver_version": "Driver", "hw_parent": "Part of"},
            hide=("Value",),
            width=4,
            height=4,
        ),
        row("Will it run out"),
        graph(
            "Risk of running out",
            "The agent's own forecast: the probability that an allocation finds no room, by how far it looks ahead. What it is worth: `dashboards/RISK.md`.",
            "percentunit",
            query(f"max by (horizon) (cotenant_gpu_reclaim_risk_ratio{{{ON_GPU}}})", "within {{horizon}}"),
            low=0,
            width=8,
        ),
        graph(
            "Time until nothing is free",
            "If the present growth goes on, with the soonest and the latest that its pace allows. No line while nothing grows.",
            "s",
            query(f"cotenant_gpu_time_to_exhaustion_seconds{{{ON_GPU}}}", "at this pace"),
            query(f"cotenant_gpu_time_to_exhaustion_low_seconds{{{ON_GPU}}}", "soonest"),
            query(f"cotenant_gpu_time_to_exhaustion_high_seconds{{{ON_GPU}}}", "latest"),
            low=0,
            width=8,
        ),
        graph(
            "Who drives it",
            "Each tenant's part in what is expected to fill the GPU within a minute. It says who, not whether.",
            "percentunit",
            query(f"sum by (tenant) (cotenant_gpu_reclaim_risk_share_ratio{{{ON_GPU}}})", "{{tenant}}"),
            stack=True,
            low=0,
            links=[TO_TENANT_SERIES],
            width=8,
        ),
        table(
            "Who would be refused first",
            "The three whose allocations would find no room first, if it came to that.",
            "short",
            query(f"max by (tenant) (cotenant_gpu_reclaim_risk_victim{{{ON_GPU}}}) == 1"),
            names={"tenant": "Tenant"},
            hide=("Value",),
            width=8,
        ),
        graph(
            "Room",
            "Free for the next allocation, and beside it what pools could give back and managed memory that could be evicted, which no forecast counts on.",
            "bytes",
            query(f"sum by (part) (cotenant_gpu_memory_headroom_bytes{{{ON_GPU}}})", "{{part}}"),
            low=0,
            width=8,
        ),
        graph(
            "Forecasts that came true",
            "Of those for a minute ahead whose minute is over, by what they had said, since the agent started. Each line should lie within its name.",
            "percentunit",
            query(
                f'sum by (forecast) (cotenant_gpu_reclaim_risk_forecasts_total{{{ON_GPU},horizon="60s",outcome="exhausted"}})'
                f' / sum by (forecast) (cotenant_gpu_reclaim_risk_forecasts_total{{{ON_GPU},horizon="60s"}})',
                "{{forecast}}",
            ),
            low=0,
            width=8,
        ),
        graph(
            "Warnings, and what came of them",
            "Warnings of the agent's forecast that are decided, since it started: an allocation failed while one stood, or it was over and none had.",
            "short",
            query(
                f"sum by (severity, outcome) (cotenant_gpu_reclaim_risk_warnings_total{{{ON_GPU}}})",
                "{{severity}}: {{outcome}}",
            ),
            low=0,
            height=6,
        ),
        row("Memory"),
        graph(
            "Memory by tenant",
            "Stacked up to what is used, by NVML; the line is the limit. Unattributed is what no listed process accounts for: managed pages, or processes that NVML hides.",
            "bytes",
            query(f"sum by (tenant) (cotenant_gpu_memory_process_bytes{{{ON_GPU}}})", "{{tenant}}"),
            query(f"cotenant_gpu_memory_reserved_bytes{{{ON_GPU}}}", "(reserved)"),
            query(f"cotenant_gpu_memory_unattributed_bytes{{{ON_GPU}}}", "(unattributed)"),
            query(f"hw_gpu_memory_limit_bytes{{{ON_GPU}}}", "(limit)"),
            stack=True,
            low=0,
            overrides=[
                column("(limit)", custom__stacking={"mode": "none", "group": "A"}, custom__fillOpacity=0, custom__lineWidth=2, custom__lineStyle={"fill": "dash", "dash": [10, 10]}, color={"mode": "fixed", "fixedColor": "red"}),
                column("(reserved)", color={"mode": "fixed", "fixedColor": "text"}),
                column("(unattributed)", color={"mode": "fixed", "fixedColor": "semi-dark-orange"}),
            ],
            links=[TO_TENANT_SERIES],
            height=10,
        ),
        graph(
            "Memory by tenant and kind, by the probes",
            "What driver calls hold now. Without contexts and modules; managed is virtual, imported belongs to the exporter, and neither is stacked into what is used.",
            "bytes",
            query(f"sum by (tenant, memory_kind) (cotenant_gpu_memory_live_bytes{{{ON_GPU}}})", "{{tenant}} {{memory_kind}}"),
            stack=True,
            low=0,
            overrides=[matching("/ (managed|imported)$/", custom__stacking={"mode": "none", "group": "A"}, custom__fillOpacity=0, custom__lineStyle={"fill": "dash", "dash": [4, 6]})],
            links=[TO_TENANT_SERIES],
            height=10,
        ),
        graph(
            "Churn",
            "Bytes a second in the driver: allocated above, freed below. Counted at each call, so what comes and goes between two scrapes shows too.",
            "Bps",
            query(rate("tenant", f"cotenant_gpu_memory_allocated_bytes_total{{{ON_GPU}}}"), "{{tenant}}"),
            query(rate("tenant", f"cotenant_gpu_memory_freed_bytes_total{{{ON_GPU}}}"), "{{tenant}} freed"),
            overrides=[matching("/ freed$/", custom__transform="negative-Y")],
            links=[TO_TENANT_SERIES],
        ),
        graph(
            "Calls that failed",
            "CUDA driver calls that returned an error, a second.",
            "cps",
            query(rate("tenant, operation, error_type", f"cotenant_gpu_memory_failures_total{{{ON_GPU}}}") + " > 0", "{{tenant}} {{operation}} {{error_type}}"),
            links=[TO_TENANT_SERIES],
        ),
        graph(
            "Calls",
            "CUDA driver calls about memory a second, the ten most frequent.",
            "cps",
            query(f"topk(10, {rate('tenant, operation', f'cotenant_gpu_memory_operations_total{{{ON_GPU}}}')})", "{{tenant}} {{operation}}"),
        ),
        graph(
            "NVML minus the ledger",
            "Parts that add up to the difference: context is contexts, modules and rounding; baseline was held before the probes came; drift has no explanation.",
            "bytes",
            query(f"sum by (tenant, part) (cotenant_gpu_memory_residual_bytes{{{ON_GPU}}})", "{{tenant}} {{part}}"),
        ),
        graph(
            "Room below limits",
            "What a tenant, or each of its processes, may still take under an MPS limit or its cgroup's limit on device memory. Requests of a scheduler limit nothing and are not here.",
            "bytes",
            query(f"min by (tenant, limit_source) (cotenant_gpu_memory_tenant_room_bytes{{{ON_GPU}}})", "{{tenant}} {{limit_source}}"),
            low=0,
        ),
        graph(
            "Age of figures that NVML is seldom asked for",
            "The dearer a call and the more its tenants wait for the agent, the more seldom it is made. Memory and processes come with every poll.",
            "s",
            query(f"cotenant_gpu_figure_age_seconds{{{ON_GPU}}}", "{{figure}}"),
        ),
        row("Waits: of the whole node, as the driver's locks are"),
        graph(
            "Time blocked, by what was waited for",
            "Threads blocked inside driver calls at a time, all tenants of this node. Not by GPU: the driver's API lock is one for all.",
            "percentunit",
            query(rate("wait_class", 'cotenant_gpu_driver_wait_seconds_total{instance="$node"}'), "{{wait_class}}"),
            stack=True,
        ),
        graph(
            "Time blocked by a neighbour",
            "Victim and culprit, in threads of the victim at a time. 5 % and more for 2 minutes is an alert.",
            "percentunit",
            query(rate("victim, culprit", 'cotenant_gpu_blame_seconds_total{instance="$node",relation="neighbour"}'), "{{victim}} by {{culprit}}"),
        ),
        graph(
            "Slowest calls",
            "99th percentile from entry to return, good to a factor of two, the ten slowest of this node.",
            "s",
            query(
                "topk(10, histogram_quantile(0.99, "
                + rate("tenant, operation, le", 'cotenant_gpu_memory_operation_duration_seconds_bucket{instance="$node"}')
                + "))",
                "{{tenant}} {{operation}}",
            ),
        ),
        graph(
            "Spinning on locks",
            "Estimate: CPU time inside driver calls beyond what such calls take alone, while somebody else was in one. Never part of the time blocked.",
            "percentunit",
            query(rate("tenant", 'cotenant_gpu_contention_excess_seconds_total{instance="$node"}'), "{{tenant}}"),
        ),
        row("Work"),
        graph(
            "Busy, by tenant",
            "Share of time in which kernels of each ran, by NVML's process samples, and of the whole GPU. A busy process can be missing from the samples; then its line has a gap.",
            "percentunit",
            query(f"sum by (tenant) (cotenant_gpu_tenant_utilization_ratio{{{ON_GPU}}})", "{{tenant}}"),
            query(f"hw_gpu_utilization_ratio{{{ON_GPU}}}", "(whole GPU)"),
            low=0,
            links=[TO_TENANT_SERIES],
        ),
        graph(
            "Memory bandwidth and PCIe",
            "Share of time in which GPU memory was read or written; PCIe as NVML samples it over 20 ms (off by default).",
            "percentunit",
            query(f"cotenant_gpu_memory_bandwidth_utilization_ratio{{{ON_GPU}}}", "memory busy"),
            query(f"cotenant_gpu_pcie_throughput_bytes_per_second{{{ON_GPU}}}", "PCIe {{network_io_direction}}"),
            overrides=[matching("/^PCIe/", unit="Bps", custom__axisPlacement="right")],
        ),
        graph(
            "Power and heat",
            "Power drawn and temperature of the die, by NVML.",
            "watt",
            query(f"hw_power_watts{{{ON_GPU}}}", "power"),
            query(f"hw_temperature_celsius{{{ON_GPU}}}", "temperature"),
            overrides=[column("temperature", unit="celsius", custom__axisPlacement="right")],
            width=8,
        ),
        states(
            "Why the clock is what it is",
            "Reasons that NVML gives for the GPU's clock, at each poll; shorter ones are missed.",
            query(f"max by (reason) (cotenant_gpu_clocks_event_active{{{ON_GPU}}})", "{{reason}}"),
            width=8,
        ),
        graph(
            "ECC errors",
            "Errors of the GPU's memory a second, by NVML.",
            "cps",
            query(rate("error_type", f"hw_errors_total{{{ON_GPU}}}"), "{{error_type}}"),
            width=8,
        ),
        row("What is not known"),
        table(
            "Figures that are not published, and why",
            "Absent is not zero and not idle. Not supported is the hardware's; the others may pass.",
            "short",
            query(f"max by (reading, reason, tenant) (cotenant_gpu_reading_absent{{{ON_GPU}}})"),
            names={"reading": "Figure", "reason": "Why", "tenant": "Tenant"},
            hide=("Value",),
        ),
        table(
            "Xid faults in this time",
            "Faults that the driver reported for this GPU. The number is the driver's.",
            "short",
            query(grown("xid", f"cotenant_gpu_xid_errors_total{{{ON_GPU}}}")),
            names={"xid": "Xid", "Value": "Faults"},
        ),
    ]
    return board("gpu", "GPU", "Who holds one GPU, who churns, who waits.", [ONE_NODE, GPU], panels)


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
            'sum(rate(cotenant_gpu_blame_seconds_total{instance=~"$node",victim="$tenant",relation="neighbour"}[$__rate_interval]))',
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
            names={"instance": "Node", "hw_id": "GPU", "resource": "Resource", "Value #A": "Shares", "Value #B": "Idle"},
            overrides=[column("Idle", unit="s")],
        ),
        table(
            "Idle holders",
            "Processes that hold memory, call the driver no more and run no kernel; the longest. Which processes: /api/v1/holders on the node.",
            "short",
            query(f"sum by (instance, hw_id) (cotenant_gpu_idle_holders{{{OF_TENANT}}})"),
            query(f"max by (instance, hw_id) (cotenant_gpu_idle_holder_age_seconds{{{OF_TENANT}}})"),
            names={"instance": "Node", "hw_id": "GPU", "Value #A": "Processes", "Value #B": "Idle for"},
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
            query(rate("culprit", 'cotenant_gpu_blame_seconds_total{instance=~"$node",victim="$tenant"}'), "{{culprit}}"),
            stack=True,
        ),
        graph(
            "Whom it makes wait",
            "Threads of others that stand still because of this tenant, at a time.",
            "percentunit",
            query(rate("victim", 'cotenant_gpu_blame_seconds_total{instance=~"$node",culprit="$tenant",relation="neighbour"}'), "{{victim}}"),
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
            names={"instance": "Node", "scope": "What ran out", "Value": "Processes"},
            overrides=[column("Node", links=[TO_INCIDENT])],
        ),
        table(
            "Figures that are not published, and why",
            "What is not known about this tenant. Absent is not zero and not idle.",
            "short",
            query(f"max by (instance, hw_id, reading, reason) (cotenant_gpu_reading_absent{{{OF_TENANT}}})"),
            names={"instance": "Node", "hw_id": "GPU", "reading": "Figure", "reason": "Why"},
            hide=("Value",),
        ),
    ]
    return board("tenant", "Tenant", "What one tenant holds, waits for, and does to others.", [NODE, TENANT], panels)


def incident():
    """One stretch of time: who hurt whom, in which order."""
    of_victim = f'{ON_NODES},victim=~"$victim"'
    by_victim = f'{ON_NODES},tenant=~"$victim"'
    # No delta(): it extrapolates, and a tenant that has come has no earlier value.
    held = f"sum by (instance, tenant, hw_id) (cotenant_gpu_memory_live_bytes{{{ON_NODES},{DEVICE_KINDS}}}"
    grew_or_shrank = f"""
        ({held}) - {held} offset $__interval)
          or ({held}) unless {held} offset $__interval)
            and on (instance) cotenant_agent_build_info offset $__interval)) != 0
    """
    panels = [
        words(
            "In words",
            "Where each incident is told with its evidence.",
            "The agent gathers waits, failures, kills and faults that belong together and says who hurt whom, with evidence and what to do:\n\n"
            "- `curl 'http://127.0.0.1:9468/api/v1/incidents?since=1h'` on the node (or wherever its agent listens; `&tenant=NAME` for one tenant)\n"
            "- `cotenant explain` in a terminal on the node\n\n"
            "This board shows the same stretch of time as series. Choose it so that it begins before the trouble.",
            height=6,
        ),
        row("Who hurt whom"),
        table(
            "Blame",
            "Seconds that threads of the victim (row) stood still because of the culprit (column) in this time. An empty cell: nothing was seen.",
            "s",
            query(grown("victim, culprit", f"cotenant_gpu_blame_seconds_total{{{of_victim}}}")),
            matrix=("victim", "culprit"),
            width=14,
        ),
        figure("Incidents open", "On the chosen nodes, now.", "short", f"sum(cotenant_incidents_open{{{ON_NODES}}})", [(0, CALM), (1, WATCH)], width=4, height=8),
        graph(
            "Incidents by kind",
            "Incidents that began or took this name, at each step.",
            "short",
            query(f"sum by (kind) (increase(cotenant_incidents_total{{{ON_NODES}}}[$__rate_interval]))", "{{kind}}"),
            stack=True,
            bars=True,
            width=6,
        ),
        row("In which order"),
        graph(
            "Blocked by a neighbour",
            "Victim, culprit and what was waited for, in threads of the victim at a time.",
            "percentunit",
            query(rate("victim, culprit, wait_class", f'cotenant_gpu_blame_seconds_total{{{of_victim},relation="neighbour"}}'), "{{victim}} by {{culprit}}: {{wait_class}}"),
            width=24,
        ),
        graph(
            "Who grew and who shrank",
            "Change of what each tenant holds on a GPU, at each step, by the probes. What grew before the first failure took the room.",
            "bytes",
            query(grew_or_shrank, "{{tenant}} {{hw_id}}"),
            bars=True,
        ),
        graph(
            "Free memory",
            "By GPU, by NVML: limit minus used.",
            "bytes",
            query(f"sum by (instance, hw_id) (hw_gpu_memory_limit_bytes{{{ON_NODES}}} - hw_gpu_memory_usage_bytes{{{ON_NODES}}})", "{{instance}} {{hw_id}}"),
            low=0,
        ),
        graph(
            "Churn",
            "Bytes allocated a second in the driver, by tenant.",
            "Bps",
            query(rate("tenant", f"cotenant_gpu_memory_allocated_bytes_total{{{ON_NODES}}}"), "{{tenant}}"),
        ),
        graph(
            "Calls of the victims",
            "99th percentile from entry to return, good to a factor of two.",
            "s",
            query(f"histogram_quantile(0.99, {rate('tenant, operation, le', f'cotenant_gpu_memory_operation_duration_seconds_bucket{{{by_victim}}}')})", "{{tenant}} {{operation}}"),
        ),
        row("What broke"),
        graph(
            "Calls that failed",
            "At each step, by tenant and error.",
            "short",
            query(f"sum by (tenant, operation, error_type) (increase(cotenant_gpu_memory_failures_total{{{by_victim}}}[$__rate_interval])) > 0", "{{tenant}} {{operation}} {{error_type}}"),
            stack=True,
            bars=True,
            width=8,
        ),
        table(
            "Kills for memory",
            "In this time, GPU users or not.",
            "short",
            query(grown("instance, tenant, scope", f"cotenant_oom_kills_total{{{by_victim}}}")),
            names={"instance": "Node", "tenant": "Tenant", "scope": "What ran out", "Value": "Processes"},
            overrides=[column("Tenant", links=[TO_TENANT])],
            width=8,
        ),
        table(
            "Xid faults",
            "In this time. A fault at the same moment as a kill is often its echo.",
            "short",
            query(grown("instance, hw_id, xid", f"cotenant_gpu_xid_errors_total{{{ON_NODES}}}")),
            names={"instance": "Node", "hw_id": "GPU", "xid": "Xid", "Value": "Faults"},
            overrides=[column("GPU", links=[TO_GPU])],
            width=8,
        ),
    ]
    return board("incident", "Incident", "One stretch of time: who hurt whom, in which order, what broke.", [NODE, VICTIM], panels)


BOARDS = {"fleet": fleet, "gpu": gpu, "tenant": tenant, "incident": incident}


def written(name):
    return json.dumps(BOARDS[name](), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in BOARDS:
        (pathlib.Path(__file__).parent / f"{name}.json").write_text(written(name), encoding="utf-8")
