"""Owns what the boards ask in common: variables, selectors, titles and links of columns, rates and counts.

Refuses zeros for what is unknown: no query ends in `or vector(0)`.
"""

import re

import panels as shapes
from panels import column, link, query, variable

IN_CLUSTER = 'cluster=~"$cluster"'
ON_NODES = f'{IN_CLUSTER},instance=~"$node"'
ON_NODE = f'{IN_CLUSTER},instance="$node"'
ON_GPU = f'{ON_NODE},hw_id="$gpu"'
OF_TENANT = f'{ON_NODES},tenant="$tenant"'
DEVICE_KINDS = 'memory_kind=~"device|pool|vmm|array"'

# All, where series have no such label, as in a Prometheus of one cluster.
CLUSTER = variable("cluster", "Cluster", "Where one Prometheus has several", "label_values(cotenant_agent_build_info, cluster)", every=".*")
AGENTS = f"label_values(cotenant_agent_build_info{{{IN_CLUSTER}}}, instance)"
NODE = variable("node", "Node", "Targets that are Cotenant agents", AGENTS, every=".+")
ONE_NODE = variable("node", "Node", "The agent's target", AGENTS)
GPU = variable("gpu", "GPU", "NVML's UUID", f"label_values(hw_gpu_memory_limit_bytes{{{ON_NODE}}}, hw_id)")
TENANTS = f"label_values(cotenant_gpu_tenant_processes{{{ON_NODES}}}, tenant)"
TENANT = variable("tenant", "Tenant", "As the agent writes tenants", TENANTS)
VICTIM = variable("victim", "Victim", "Who waited, failed or died", TENANTS, every=".+")

CALM, WATCH, ACT = "green", "orange", "red"
TO_GPU = link("This GPU", "gpu", node="${__data.fields.Node:percentencode}", gpu="${__data.fields.GPU:percentencode}")
TO_TENANT = link("This tenant", "tenant", node="$__all", tenant="${__data.fields.Tenant:percentencode}")
TO_TENANT_SERIES = link("This tenant", "tenant", node="$__all", tenant="${__field.labels.tenant:percentencode}")
TO_VICTIM = link("This tenant", "tenant", node="$__all", tenant="${__data.fields.Victim:percentencode}")
TO_CULPRIT = link("This tenant", "tenant", node="$__all", tenant="${__data.fields.Culprit:percentencode}")
# A column is called the same on every board, and leads to the same place.
TITLES = {
    "alertname": "Alert",
    "culprit": "Culprit",
    "error_type": "Error",
    "feature": "Feature",
    "hw_driver_version": "Driver",
    "hw_id": "GPU",
    "hw_name": "Product",
    "hw_parent": "Part of",
    "instance": "Node",
    "reading": "Figure",
    "reason": "Why",
    "resource": "Resource",
    "scope": "What ran out",
    "severity": "Severity",
    "sharing_mode": "Mode",
    "state": "State",
    "tenant": "Tenant",
    "version": "Version",
    "victim": "Victim",
    "xid": "Xid",
}
LINKS = {"GPU": TO_GPU, "Tenant": TO_TENANT, "Victim": TO_VICTIM, "Culprit": TO_CULPRIT}
TO_INCIDENT = link("Incident", "incident", node="${__data.fields.Node:percentencode}", victim="$__all")


def grown(by, series):
    """What a counter of rare events counted in the board's time.

    A series that comes with its first event, at 1, has no increase: its first value is added. Not so where the agent
    itself was not yet scraped at the beginning, as its counters may be days old.
    """
    first = f"""min_over_time({series}[$__range]) unless {series} offset $__range
        and on (cluster, job, instance) cotenant_agent_build_info offset $__range"""
    # Under a label of its own, so that a series that grew after its first value counts both.
    return f'sum by ({by}) (increase({series}[$__range]) > 0 or label_replace({first}, "value", "first", "", "")) > 0'


def rate(by, series):
    return f"sum by ({by}) (rate({series}[$__rate_interval]))"


def quantile(share, by, buckets):
    return f"histogram_quantile({share}, {rate(f'{by}, le', buckets)})"


def each(by, series, of="sum"):
    """A line for each, called by its labels."""
    return query(f"{of} by ({by}) ({series})", called(by))


def each_rate(by, series):
    return query(rate(by, series), called(by))


def called(by):
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", "))


def table(title, description, unit, *queries, figures=(), titles=None, hide=(), overrides=(), matrix=None, **rest):
    """Rows of labels, called by TITLES, and of `figures`, one a query; without them labels are all that is to be seen."""
    if matrix:
        return shapes.table(title, description, unit, *queries, matrix=matrix, overrides=overrides, **rest)
    grouped = " ".join(re.findall(r"(?:by|on) \(([^)]*)\)", " ".join(one["expr"] for one in queries)))
    names = {label: called for label, called in TITLES.items() if re.search(rf"\b{label}\b", grouped)} | (titles or {})
    links = [column(called, links=[LINKS[called]]) for called in names.values() if called in LINKS]
    if len(figures) > 1:
        names |= {f"Value #{chr(ord('A') + place)}": called for place, called in enumerate(figures)}
    elif figures:
        names["Value"] = figures[0]
    else:
        hide = ("Value", *hide)
    return shapes.table(title, description, unit, *queries, names=names, hide=hide, overrides=[*links, *overrides], **rest)
