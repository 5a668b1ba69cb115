"""Owns the claim that what agents send by OTLP serves boards and rules as a scrape does: straight into VictoriaMetrics, and
through an OpenTelemetry Collector, both of others' making, with the settings in deploy/otlp.

Refuses a receiver of this project's making: tests/node and agent/export have those. `make test-receivers`.
"""

import contextlib
import pathlib
import re
import socket
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/boards"))
import bad_day  # noqa: E402
import node  # noqa: E402
import recorded  # noqa: E402
import shipped  # noqa: E402

import fetch  # noqa: E402

OTLP = ROOT / "deploy/otlp"
SECONDS = 45
EXACT = ("cotenant_gpu_memory_allocated_bytes_total", "cotenant_gpu_memory_operations_total", "cotenant_gpu_memory_failures_total")
# The agent's word of what it sends changes by being sent.
RESTLESS = re.compile("cotenant_agent_otlp_")


@contextlib.contextmanager
def victoria(place):
    address = f"127.0.0.1:{node.port()}"
    command = [
        fetch.VICTORIA / "victoria-metrics",
        f"-storageDataPath={place / 'victoria'}",
        f"-httpListenAddr={address}",
        "-opentelemetry.usePrometheusNaming",
        f"-relabelConfig={OTLP / 'relabel.yml'}",
        "-search.latencyOffset=0s",
        "-loggerLevel=WARN",
    ]
    with node.running(command, place / "victoria.log"):
        node.until(lambda: node.ask(f"http://{address}/health"), what="VictoriaMetrics")
        yield node.Prometheus(address)


@contextlib.contextmanager
def evaluating(place, store):
    """vmalert with the shipped rules, at the pace of the recorded run."""
    rules = place / "rules.yml"
    rules.write_text(shipped.brisk(shipped.RULES.read_text(encoding="utf-8"), recorded.FASTER), encoding="utf-8")
    address = f"127.0.0.1:{node.port()}"
    url = f"http://{store.address}"
    command = [
        fetch.VICTORIA / "vmalert",
        f"-rule={rules}",
        f"-httpListenAddr={address}",
        f"-datasource.url={url}",
        f"-remoteWrite.url={url}",
        f"-remoteRead.url={url}",
        "-remoteWrite.flushInterval=200ms",
        "-notifier.blackhole",
        "-evaluationInterval=1s",
        "-rule.evalDelay=0s",
        "-loggerLevel=WARN",
    ]
    with node.running(command, place / "vmalert.log"):
        yield


@contextlib.contextmanager
def collector(place, store):
    """A Collector with the settings that are shipped, at ports of its own; gives where it takes gRPC."""
    grpc, http = (f"127.0.0.1:{node.port()}" for _ in range(2))
    text = (OTLP / "collector.yml").read_text(encoding="utf-8")
    for shown, own in (("127.0.0.1:4317", grpc), ("127.0.0.1:4318", http), ("127.0.0.1:8428", store.address)):
        assert shown in text
        text = text.replace(shown, own)
    # All of it is looked at here.
    assert "verbosity: basic" in text
    text = text.replace("verbosity: basic", "verbosity: detailed")
    (place / "collector.yml").write_text(text + "  telemetry:\n    metrics:\n      level: none\n", encoding="utf-8")
    log = place / "collector.log"
    with node.running([fetch.COLLECTOR, f"--config={place / 'collector.yml'}"], log):
        node.until(lambda: "Everything is ready" in log.read_text(encoding="utf-8"), what="the Collector")
        yield grpc


def page(text):
    """A page of /metrics: value by name and labels."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()
            found[key(name, dict(re.findall(r'(\w+)="((?:\\.|[^"\\])*)"', labels or "")))] = float(value)
    return found


def key(name, labels):
    bound = labels.get("le")
    return name, tuple(sorted((label, str(float(bound)) if label == "le" else value) for label, value in labels.items()))


class Receivers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        fetch.victoria()
        fetch.collector()

    def test_straight_into_victoriametrics(self):
        place = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        store = self.enterContext(victoria(place))
        self.played(place, store, f'endpoint = "http://{store.address}/opentelemetry"\nprotocol = "http/protobuf"\ntraces = false\nlogs = false\n')

    def test_through_a_collector(self):
        place = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        store = self.enterContext(victoria(place))
        grpc = self.enterContext(collector(place, store))
        self.played(place, store, f'endpoint = "http://{grpc}"\nprotocol = "grpc"\n')
        said = (place / "collector.log").read_text(encoding="utf-8")
        self.told(said)
        self.assertNotRegex(said, r"\terror\t", said[-3000:])

    def played(self, place, store, otlp):
        """A demo whose agent sends there, then all that boards, rules and a scrape must find there."""
        settings = f'[otlp]\nenabled = true\ncompression = "gzip"\ninterval = "1s"\n{otlp}'
        with evaluating(place, store), node.demo(place, SECONDS, settings) as (_, demo):
            start = time.time()
            node.until(lambda: demo.poll() is not None, SECONDS + 120, "the demo's end")
            end = time.time() - 3
        self.assertEqual(demo.returncode, 0, (place / "demo.log").read_text(encoding="utf-8")[-2000:])
        time.sleep(4)
        self.acknowledged(place, ("metrics", "traces", "logs") if "traces" not in otlp else ("metrics",))
        self.scraped(place, store, start, end)
        self.expressions(store, start, end)

    def acknowledged(self, place, signals):
        """By the agent's account the receiver took everything: an answer that it cannot read would be a refusal there."""
        there = page((place / "target/demo/metrics.prom").read_text(encoding="utf-8"))
        exported = {dict(labels)["signal"]: value for (name, labels), value in there.items() if name == "cotenant_agent_otlp_exported_total"}
        self.assertEqual({signal for signal, value in exported.items() if value > 0}, set(signals))
        lost = {one: value for one, value in there.items() if re.match("cotenant_agent_otlp_(dropped|failures)", one[0]) and value}
        self.assertEqual({one: value for one, value in lost.items() if ("reason", "sampled_out") not in one[1]}, {})
        print(f"acknowledged: {exported}", flush=True)

    def told(self, said):
        """Incidents and calls as the Collector read them, in its own words."""
        spans = re.split(r"\nSpan #\d+\n", said)
        named = lambda pattern: [one for one in spans if re.search(rf"^    Name +: {pattern}$", one, re.M)]  # noqa: E731
        times = lambda one: re.findall(r"(?:Start|End) time +: (.+)", one)  # noqa: E731
        calls = named("cuMem.+")
        self.assertTrue(calls)
        for key in ("cotenant.call.blocked_seconds", "cotenant.call.runnable_seconds", "cotenant.sampled_out", "cotenant.tenant"):
            self.assertIn(f"-> {key}: ", calls[0])
        self.assertLess(*times(calls[0])[:2])
        incidents = named("incident noisy_neighbour.*")
        self.assertTrue(incidents)
        for key in ("cotenant.incident.victims", "cotenant.incident.culprits", "cotenant.incident.summary"):
            self.assertIn(f"-> {key}: ", incidents[0])
        records = re.split(r"\nLogRecord #\d+\n", said)[1:]
        severities = {re.search(r"EventName: (\S+)", one)[1]: re.search(r"SeverityText: (\w+)", one)[1] for one in records}
        self.assertEqual(severities.get("cotenant.allocation_failure"), "ERROR", severities)
        self.assertIn("cotenant.incident.opened", severities)
        print(f"{len(calls)} calls, {len(incidents)} times a noisy neighbour; records: {severities}", flush=True)

    def scraped(self, place, store, start, end):
        """The last scrape and what arrived: the same series, and counters that are at rest the same to the last byte."""
        there = page((place / "target/demo/metrics.prom").read_text(encoding="utf-8"))
        # Not what vmalert recorded.
        found = store.at('last_over_time({job="cotenant",__name__!~".*:.*|ALERTS.*"}[15s])', end + 3)
        own = {"job": "cotenant", "instance": socket.gethostname()}
        arrived = {}
        for one in found:
            labels = dict(one["metric"])
            self.assertEqual({name: labels.pop(name, None) for name in own}, own, one)
            arrived[key(labels.pop("__name__"), labels)] = float(one["value"][1])
        names = lambda keys: {one for one in keys if not RESTLESS.match(one[0])}  # noqa: E731
        # What went away shortly before, a forecast say, has no end by OTLP: its last value stands for a while.
        missing, strange = names(there) - names(arrived), names(arrived) - names(there)
        print(f"{len(there)} series on the last scrape, {len(arrived)} arrived; missing {len(missing)}, strange {len(strange)}", flush=True)
        self.assertEqual(missing, set(), f"in their place: {sorted(strange)}")
        self.assertLess(len(strange), 20, sorted(strange))
        self.assertEqual({name for name, _ in strange} - set(shipped.series()), set())
        labels = {label for _, labels in there for label, _ in labels}
        self.assertEqual({label for _, found in strange for label, _ in found} - labels, set())
        for name in EXACT:
            mine = {one: value for one, value in there.items() if one[0] == name}
            self.assertTrue(mine, name)
            self.assertEqual(mine, {one: arrived[one] for one in mine})

    def expressions(self, store, start, end):
        """Every query that has data on a scraped demo has data here."""
        listed = [(f"{board}: {panel} ({letter})", expr) for board, panel, letter, expr in shipped.panel_queries()]
        for rule in shipped.rules():
            listed.append((f"{rule.get('record') or rule['alert']} ({rule['labels']['severity'] if 'alert' in rule else 'recorded'})", rule["expr"]))
        without = set()
        for where, expr in listed:
            if not recorded.answers(store, shipped.brisk(expr, recorded.FASTER), start, end, node_name=socket.gethostname()):
                without.add(where)
        without -= set(bad_day.SITUATIONS)
        print(f"{len(listed)} expressions; without data: {sorted(without)}", flush=True)
        self.assertEqual(without, set())
        # At its most: the demo waits for NVML at its end, and nobody allocates then.
        ranked = store.at(f"topk(1, max_over_time(tenant:cotenant_memory_allocated_bytes:rate5m[{int(end - start)}s]))", end)
        self.assertEqual(ranked[0]["metric"]["tenant"], "slurm:4711")


if __name__ == "__main__":
    unittest.main()
