"""Owns one recorded run: the demo node scraped by Prometheus with the shipped rules, its alerts sent through
Alertmanager with the shipped routing; and, from the same data, the answers that boards get.

Refuses the rules' own pace: every time in rules and routing is divided by FASTER, so that a minute is long enough.
"""

import contextlib
import json
import pathlib
import shutil
import time

import yaml

import node
import promql
import shipped

FASTER = 30
SECONDS = 45
NODE = "demo-node"
TENANT_LABELS = ("systemd:chat.service", "systemd:train.service", "slurm:4711", "docker:3fd09c1f2b7e")
# The agent's own pod, as a scrape in Kubernetes may add it (C10).
TARGET = {"instance": NODE, "pod": "cotenant-x7k2p", "namespace": "monitoring", "node": "worker-3"}
PLACE = shipped.ROOT / "target/boards"


def settings(place, alertmanager):
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(place / "rules.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [
                {"job_name": "cotenant", "file_sd_configs": [{"files": [str(place / "targets.json")], "refresh_interval": "1s"}]},
            ],
        }
    )


def routing(inbox):
    text = shipped.ALERTMANAGER.read_text(encoding="utf-8").replace("127.0.0.1:9999", inbox)
    return shipped.brisk(text, FASTER)


def aim(place, *addresses):
    targets = [{"targets": [address], "labels": TARGET} for address in addresses]
    (place / "targets.json").write_text(json.dumps(targets), encoding="utf-8")


class Run:
    """What is left of a run: its data, when it was, what was told to whom."""

    def __init__(self, place):
        self.place = place
        self.inbox = node.Inbox()
        self.start = self.end = 0.0
        self.verdict = None

    def record(self):
        """Runs the demo to its end, and stays until its alerts are resolved."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        (self.place / "rules.yml").write_text(shipped.brisk(shipped.RULES.read_text(encoding="utf-8"), FASTER), encoding="utf-8")
        aim(self.place)
        with contextlib.ExitStack() as stack:
            told = stack.enter_context(node.alertmanager(self.place, routing(self.inbox.address)))
            prometheus = stack.enter_context(node.prometheus(self.place, settings(self.place, told)))
            address, demo = stack.enter_context(node.demo(self.place, SECONDS))
            self.start = time.time()
            aim(self.place, address)
            node.until(lambda: demo.poll() is not None, SECONDS + 120, "the demo's end")
            self.verdict = demo.returncode
            # The agent's last scrape.
            seen = prometheus.at("max_over_time(timestamp(cotenant_agent_build_info)[1h:1s])")
            self.end = float(seen[0]["value"][1])
            self.heard = prometheus.over('ALERTS{alertstate="firing"}', self.start, time.time(), 1)
            node.until(lambda: self.inbox.alerts("CotenantAgentDown", "firing"), what="word of the agent's end")
            # The node is taken away.
            aim(self.place)
            for name in ("CotenantNoisyNeighbour", "CotenantAgentDown"):
                node.until(lambda name=name: self.inbox.alerts(name, "resolved"), 60, f"the end of {name}")
        (self.place / "run.json").write_text(json.dumps({"start": self.start, "end": self.end}), encoding="utf-8")


def gpus(prometheus, end):
    return sorted(one["metric"]["hw_id"] for one in prometheus.at("hw_gpu_memory_limit_bytes", end))


def answers(prometheus, expr, start, end, rate_interval="10s", span="30s", step=2, tenants=TENANT_LABELS, node_name=NODE):
    """What a board gets for an expression, for each GPU and tenant that could be chosen there."""
    got = []
    for gpu in gpus(prometheus, end) if "$gpu" in expr else ("",):
        for tenant in tenants if "$tenant" in expr else ("",):
            asked = promql.filled(expr, node_name, gpu, tenant, rate_interval, span)
            got += prometheus.over(asked, start, end, step)
    return got


def kept(place=PLACE / "run"):
    """The last recorded run: where its data are, when it began and ended."""
    place = pathlib.Path(place)
    run = json.loads((place / "run.json").read_text(encoding="utf-8"))
    return place, run["start"], run["end"]
