"""Owns what is shipped and checked here: boards, rules, catalogue, lists; each read as its user would.

Refuses to know what is right about them: the tests do.
"""

import json
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
RULES = DASHBOARDS / "rules/cotenant.rules.yml"
ALERTMANAGER = ROOT / "deploy/alertmanager/alertmanager.example.yml"
PROMETHEUS = ROOT / "deploy/prometheus/prometheus.example.yml"


def boards():
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((DASHBOARDS / "grafana").glob("*.json"))]


def panel_queries():
    """(board, panel, query's letter, expression) of every panel."""
    for board in boards():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield board["title"], panel["title"], target["refId"], target["expr"]


def rules():
    """Every rule, as it stands in the file."""
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def catalogue():
    """The metrics' names by type, from the reference page that the catalogue writes."""
    page = (DASHBOARDS / "METRICS.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (\w+) \|", page, re.M))


def series():
    """Every series name that an agent can publish, by its metric."""
    names = {}
    for name, kind in catalogue().items():
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            names[name + suffix] = name
    return names


def raw():
    """Metrics that are on no board and in no rule, with the reason."""
    lines = (DASHBOARDS / "raw.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))


def brisk(text, by):
    """Rules or settings with every time in them divided, so that a demo of a minute is long enough for all."""

    def divided(found):
        seconds = int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
        return f"{max(1, round(seconds / by))}s"

    return re.sub(r"(?<![\w$.%-])(\d+)([smhd])(?!\w)", divided, text)
