"""Owns what the example routing must do with alerts: which silence which, asked of a real Alertmanager.

Refuses to look into its file: alerts go in by the API and what became of them is read there.
"""

import json
import pathlib
import tempfile
import unittest
import urllib.request

import node
import shipped


def alert(name, severity, **labels):
    return {"labels": {"alertname": name, "severity": severity, "job": "cotenant", **labels}, "annotations": {"summary": name}}


ALERTS = [
    # A GPU at fault on node-1, and what comes with it there and elsewhere.
    alert("CotenantGpuXid", "critical", instance="node-1", hw_id="GPU-a", xid="79"),
    alert("CotenantGpuXid", "warning", instance="node-1", hw_id="GPU-a", xid="45"),
    alert("CotenantAllocationFailureStorm", "warning", instance="node-1", hw_id="GPU-a", tenant="pod:a/b"),
    alert("CotenantAllocationFailureStorm", "warning", instance="node-1", hw_id="GPU-b", tenant="pod:a/b"),
    alert("CotenantGpuNearlyFull", "warning", instance="node-2", hw_id="GPU-a"),
    # A tenant that was killed, and its neighbour.
    alert("CotenantGpuTenantOomKilled", "critical", instance="node-3", tenant="pod:a/c", scope="memcg", culprit="pod:a/c"),
    alert("CotenantAllocationFailureStorm", "warning", instance="node-3", hw_id="GPU-c", tenant="pod:a/c"),
    alert("CotenantAllocationFailureStorm", "warning", instance="node-3", hw_id="GPU-c", tenant="pod:a/d"),
    # An agent that does not answer.
    alert("CotenantAgentDown", "warning", instance="node-4"),
    alert("CotenantNvmlNotAnswering", "warning", instance="node-4"),
    alert("CotenantNvmlNotAnswering", "warning", instance="node-5"),
    alert("CotenantLedgerDrift", "info", instance="node-5", hw_id="GPU-e", tenant="pod:a/b"),
    alert("CotenantLedgerDrift", "info", instance="node-6", hw_id="GPU-f", tenant="pod:a/b"),
    # A neighbour is never silenced.
    alert("CotenantNoisyNeighbour", "warning", instance="node-1", tenant="pod:a/b", victim="pod:a/b", culprit="slurm:1"),
    # A network that breaks.
    *(alert("CotenantAgentDown", "warning", instance=f"node-{number}") for number in range(10, 15)),
    # A forecast of both kinds.
    alert("CotenantGpuReclaimRisk", "critical", instance="node-7", hw_id="GPU-g"),
    alert("CotenantGpuReclaimRisk", "warning", instance="node-7", hw_id="GPU-g"),
    alert("CotenantGpuReclaimRisk", "warning", instance="node-7", hw_id="GPU-h"),
]
SILENCED = [1, 2, 6, 9, 11, 20]


class Routing(unittest.TestCase):
    def test_one_cause_silences_its_consequences_and_nothing_else(self):
        inbox = node.Inbox()
        self.addCleanup(inbox.close)
        settings = shipped.ALERTMANAGER.read_text(encoding="utf-8").replace("127.0.0.1:9999", inbox.address)
        with tempfile.TemporaryDirectory() as place, node.alertmanager(pathlib.Path(place), shipped.brisk(settings, 30)) as address:
            request = urllib.request.Request(f"http://{address}/api/v2/alerts", json.dumps(ALERTS).encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=node.PATIENCE).close()
            sent = len(ALERTS) - len(SILENCED)
            node.until(lambda: sum(len(body["alerts"]) for _, body in inbox.messages) >= sent, what="what was not silenced")
            states = {json.dumps(one["labels"], sort_keys=True): one["status"] for one in json.loads(node.ask(f"http://{address}/api/v2/alerts"))}
        for place, one in enumerate(ALERTS):
            status = states[json.dumps(one["labels"], sort_keys=True)]
            self.assertEqual(bool(status["inhibitedBy"]), place in SILENCED, one["labels"])
        groups = [(receiver, body["groupLabels"]) for receiver, body in inbox.messages]
        # One tenant on several nodes and GPUs is one message; a GPU's is its node's.
        self.assertEqual(groups.count(("chat", {"tenant": "pod:a/b"})), 1)
        self.assertIn(("chat", {"instance": "node-2"}), groups)
        self.assertIn(("record", {"instance": "node-6"}), groups)
        self.assertEqual(groups.count(("chat", {"alertname": "CotenantAgentDown"})), 1, "one message for six nodes")
        self.assertEqual(len([one for one in groups if one[0] == "pager"]), 3)


if __name__ == "__main__":
    unittest.main()
