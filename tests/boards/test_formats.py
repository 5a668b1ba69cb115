"""Owns the claim that a scrape's format changes nothing: a real Prometheus reads the demo node in all three of them.

Refuses to choose for Prometheus by its version: each job goes through a door that asks the agent for one format.
"""

import contextlib
import http.server
import pathlib
import tempfile
import threading
import unittest
import urllib.request

import yaml

import node

ACCEPT = {
    "openmetrics": "application/openmetrics-text;version=1.0.0",
    "text": "text/plain;version=0.0.4",
    "protobuf": "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
}
# Their values never change while the agent runs.
CONSTANT = ("hw_gpu_memory_limit_bytes", "cotenant_agent_build_info", "cotenant_gpu_memory_reserved_bytes")
SECONDS = 20


@contextlib.contextmanager
def door(agent, accept):
    """Passes scrapes on to the agent, with an `Accept` of its own, and what comes back unchanged."""

    class Door(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            request = urllib.request.Request(f"http://{agent}{self.path}", headers={"Accept": accept})
            with urllib.request.urlopen(request, timeout=node.PATIENCE) as answer:
                body = answer.read()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def names(found):
    """Series by their labels, without what tells the jobs apart."""
    return {tuple(sorted((key, value) for key, value in one["metric"].items() if key not in ("job", "instance"))): one["value"][1] for one in found}


class Formats(unittest.TestCase):
    def test_prometheus_gets_the_same_series_in_every_format(self):
        with contextlib.ExitStack() as stack:
            place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            agent, _ = stack.enter_context(node.demo(place, SECONDS))
            jobs = [{"job_name": name, "static_configs": [{"targets": [stack.enter_context(door(agent, accept))]}]} for name, accept in ACCEPT.items()]
            settings = yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})
            prometheus = stack.enter_context(node.prometheus(place, settings))

            def same():
                got = [names(prometheus.at(f'{{job="{name}"}}')) for name in ACCEPT]
                buckets = [key for key in got[0] if ("__name__", "cotenant_gpu_memory_operation_duration_seconds_bucket") in key]
                return got if buckets and got[0].keys() == got[1].keys() == got[2].keys() else None

            # A series may come between two scrapes; formats that differ never agree.
            got = node.until(same, SECONDS, "one set of series in all formats")
            for name in CONSTANT:
                values = [{key: value for key, value in one.items() if ("__name__", name) in key} for one in got]
                self.assertTrue(values[0], name)
                self.assertEqual(values[0], values[1], name)
                self.assertEqual(values[0], values[2], name)
            print(f"{len(got[0])} series, the same in {', '.join(ACCEPT)}", flush=True)


if __name__ == "__main__":
    unittest.main()
