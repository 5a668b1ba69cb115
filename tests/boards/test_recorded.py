"""Owns what boards, rules and alerts must be on data: of a demo run recorded by a real Prometheus, and of a bad day."""

import collections
import pathlib
import re
import subprocess
import tempfile
import time
import unittest

import bad_day
import node
import recorded
import shipped


def expressions():
    for board, panel, letter, expr in shipped.panel_queries():
        yield f"{board}: {panel} ({letter})", expr
    for rule in shipped.rules():
        yield f"{rule.get('record') or rule['alert']} ({rule['labels']['severity'] if 'alert' in rule else 'recorded'})", rule["expr"]


class Recorded(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.run_ = recorded.Run(recorded.PLACE / "run")
        cls.addClassCleanup(cls.run_.inbox.close)
        cls.run_.record()

    def prometheus(self):
        """On the recorded data alone: nothing is scraped or evaluated any more."""
        place = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        return self.enterContext(node.prometheus(place, "{}", self.run_.place / "data"))

    def test_every_expression_has_data_or_a_situation(self):
        prometheus = self.prometheus()
        run = self.run_
        without = set()
        for where, expr in expressions():
            if not recorded.answers(prometheus, shipped.brisk(expr, recorded.FASTER), run.start, run.end):
                without.add(where)
        self.assertEqual(without - set(bad_day.SITUATIONS), set(), "these have no data on the demo and no situation")
        self.assertEqual(set(bad_day.SITUATIONS) - bad_day.BY_LUCK - without, set(), "these have data on the demo: take them off the list")

    def test_the_demo_ended_well(self):
        self.assertEqual(self.run_.verdict, 0, (self.run_.place / "demo.log").read_text(encoding="utf-8")[-2000:])

    def test_c10_the_agent_s_own_pod_and_the_tenants_labels_do_not_collide(self):
        prometheus = self.prometheus()
        (one,) = prometheus.at('cotenant_gpu_memory_process_bytes{tenant="systemd:train.service"}', self.run_.end)
        self.assertEqual(one["metric"]["pod"], recorded.TARGET["pod"])
        names = prometheus.get("labels")
        self.assertFalse([name for name in names if name.startswith("exported_")])

    def test_c16_the_batch_job_ranks_first_in_churn(self):
        prometheus = self.prometheus()
        # At its most: on a busy host the programs may be done before the demo is.
        most = f"max_over_time(tenant:cotenant_memory_allocated_bytes:rate5m[{int(self.run_.end - self.run_.start)}s])"
        ranked = prometheus.at(f"topk(1, {most})", self.run_.end)
        self.assertEqual(ranked[0]["metric"]["tenant"], "slurm:4711")

    def test_the_neighbour_s_alert_is_received_grouped_and_resolved(self):
        inbox = self.run_.inbox
        fired = inbox.alerts("CotenantNoisyNeighbour", "firing")
        self.assertTrue(fired)
        for receiver, group, alert in fired:
            labels, notes = alert["labels"], alert["annotations"]
            self.assertEqual(receiver, "chat")
            self.assertEqual(group, {"tenant": labels["tenant"]}, "one message a tenant")
            self.assertEqual(labels["instance"], recorded.NODE)
            self.assertIn(labels["culprit"], notes["summary"])
            self.assertIn(labels["tenant"], notes["summary"])
        pairs = {(alert["labels"]["tenant"], alert["labels"]["culprit"]) for _, _, alert in fired}
        self.assertIn(("systemd:chat.service", "slurm:4711"), pairs)
        self.assertIn("GPU-", next(a for _, _, a in fired if a["labels"]["culprit"] == "slurm:4711")["annotations"]["description"])
        resolved = inbox.alerts("CotenantNoisyNeighbour", "resolved")
        self.assertIn(("systemd:chat.service", "slurm:4711"), {(a["labels"]["tenant"], a["labels"]["culprit"]) for _, _, a in resolved})

    def test_a_node_has_the_series_that_the_page_on_scale_says(self):
        page = (self.run_.place / "target/demo/metrics.prom").read_text(encoding="utf-8")
        found = collections.Counter(re.match(r"\w+", line)[0] for line in page.splitlines() if not line.startswith("#"))
        text = (shipped.DASHBOARDS / "README.md").read_text(encoding="utf-8")
        # Forecasts come when there is something to say; the page has their bound.
        forecasts = [name for name in found if re.match("cotenant_gpu_(reclaim_risk|time_to_exhaustion|memory_headroom|tenant_memory_growth)", name)]
        forecast = sum(found.pop(name) for name in forecasts)
        each_gpu, each_tenant = map(int, re.search(r"up to (\d+) for each GPU and (\d+) for each tenant on a GPU", text).groups())
        self.assertLessEqual(forecast, each_gpu * found["hw_gpu_memory_limit_bytes"] + each_tenant * found["cotenant_gpu_memory_process_bytes"])
        hosts = sum(found.pop(name) for name in list(found) if re.match("cotenant_(host_memory|memory_(usage|limit))_", name))
        each_tenant, each_host = map(int, re.search(r"of host memory (\d+) for each tenant and\s+(\d+) for the agent", text).groups())
        self.assertGreater(hosts, 0)
        self.assertLessEqual(hosts, each_tenant * found["cotenant_gpu_tenant_processes"] + each_host)
        terms = re.findall(r"^\| ([\d,]+) × \*\*(\w+)\*\* \|", text, re.M)
        agent = sum(count for name, count in found.items() if re.match("cotenant_(agent|incidents)_", name) and "_nvml_call_" not in name)
        there = {
            "A": 1,
            "N": found["cotenant_agent_nvml_call_errors_total"],
            "G": found["hw_gpu_memory_limit_bytes"],
            "R": found["cotenant_gpu_reading_absent"],
            "T": found["cotenant_gpu_tenant_processes"],
            "P": found["cotenant_gpu_memory_process_bytes"],
            "Q": found["cotenant_gpu_memory_pool_reserved_bytes"],
            "K": found["cotenant_gpu_memory_live_bytes"],
            "C": found["cotenant_gpu_memory_operations_total"],
            "W": found["cotenant_gpu_driver_wait_seconds_total"],
            "B": found["cotenant_gpu_blame_seconds_total"],
            "E": found["cotenant_gpu_memory_failures_total"],
        }
        self.assertEqual({name for _, name in terms}, set(there))
        # Features and maps come and go with versions of the agent.
        said = sum(int(factor) * there[name] for factor, name in terms if name != "A") + agent
        # A tenant whose calls have no baseline has no excess.
        self.assertAlmostEqual(said, sum(found.values()), delta=there["T"])

    def test_the_demo_fires_nothing_else(self):
        during = {one["metric"]["alertname"] for one in self.run_.heard if float(one["values"][0][0]) < self.run_.end}
        self.assertEqual(during - {"CotenantNoisyNeighbour", "CotenantAllocationFailureStorm", "CotenantGpuNearlyFull"}, set())


class BadDay(unittest.TestCase):
    def test_every_situation_gives_its_expressions_data(self):
        with tempfile.TemporaryDirectory() as place:
            place = pathlib.Path(place)
            end = time.time() // 60 * 60 - 3 * 3600
            start = end - 3600
            (place / "day.txt").write_text(bad_day.openmetrics(start, end), encoding="utf-8")
            made = subprocess.run(
                ["promtool", "tsdb", "create-blocks-from", "openmetrics", place / "day.txt", place / "data"], capture_output=True, text=True
            )
            self.assertEqual(made.returncode, 0, made.stderr)
            with node.prometheus(place, "{}") as prometheus:
                without = [
                    where
                    for where, expr in expressions()
                    if where in bad_day.SITUATIONS
                    and not recorded.answers(prometheus, expr, start, end, "2m", "30m", 60, (bad_day.TENANT,), bad_day.NODE)
                ]
        self.assertEqual(without, [])


if __name__ == "__main__":
    unittest.main()
