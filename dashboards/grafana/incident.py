"""Owns *Incident*: one stretch of time, who hurt whom, in which order, what broke.

Refuses deltas: they extrapolate, and a tenant that has come has no earlier value.
"""

from asked import CALM, CLUSTER, DEVICE_KINDS, each_rate, grown, NODE, ON_NODES, quantile, rate, table, VICTIM, WATCH
from panels import board, column, figure, graph, query, row, source, traces, words


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
            "- `cotenant explain` in a terminal on the node\n"
            "- as a trace, where agents send them (`[otlp]`): *Traces of incidents* above asks the chosen Tempo, and points on \"Calls of the victims\" lead to single calls\n\n"
            "This board shows the same stretch of time as series. Choose it so that it begins before the trouble.",
            height=7,
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
            each_rate("tenant", f"cotenant_gpu_memory_allocated_bytes_total{{{ON_NODES}}}"),
        ),
        graph(
            "Calls of the victims",
            "99th percentile from entry to return, good to a factor of two.",
            "s",
            query(quantile(0.99, "tenant, operation", f'cotenant_gpu_memory_operation_duration_seconds_bucket{{{by_victim}}}'), "{{tenant}} {{operation}}"),
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
            figures=("Processes",),
            width=8,
        ),
        table(
            "Xid faults",
            "In this time. A fault at the same moment as a kill is often its echo.",
            "short",
            query(grown("instance, hw_id, xid", f"cotenant_gpu_xid_errors_total{{{ON_NODES}}}")),
            figures=("Faults",),
            width=8,
        ),
    ]
    tempo = source("traces", "Traces", "tempo", "A Tempo that agents send to; none is needed for the panels")
    told = traces("Traces of incidents", "In this time, all nodes", "traces", '{ resource.service.name = "cotenant" && name =~ "incident .+" }')
    return board("incident", "Incident", "One stretch of time: who hurt whom, in which order, what broke.", [CLUSTER, NODE, VICTIM, tempo], panels, links=[told])
