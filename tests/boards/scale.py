"""Owns the measurement of a fleet: plays nodes into a real Prometheus, which scrapes them and evaluates the shipped rules
at a real pace, and says what rules and the Fleet board's queries cost there.

Refuses to be a test: its figures are this machine's. `python3 tests/boards/scale.py --nodes 1000 --seconds 720`.
"""

import argparse
import collections
import contextlib
import http.server
import pathlib
import re
import statistics
import tempfile
import threading
import time

import yaml

import node
import played
import promql
import shipped

LOOK = 5
# Of the board, as Grafana asks for it.
STEP = 15


class Fleet:
    def __init__(self, nodes):
        pages, began = [played.page(number) for number in range(nodes)], time.time()
        self.series = sum(one.count("\n") for one in pages)

        class Node(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                number = int(self.path.rsplit("/", 1)[1])
                # Threads of a percent of the time.
                body = pages[number].replace("@", f"{(time.time() - began) * 0.01:.3f}").encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle(self):
                # Prometheus ends with its connections open.
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Node)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def settings(self, nodes, interval):
        address = f"127.0.0.1:{self.server.server_port}"
        targets = [{"targets": [address], "labels": {"instance": f"node-{one:04}", "__metrics_path__": f"/node/{one}"}} for one in range(nodes)]
        return yaml.safe_dump(
            {
                "global": {"scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": interval},
                "rule_files": [str(shipped.RULES)],
                "scrape_configs": [{"job_name": "cotenant", "static_configs": targets}],
            }
        )


class Own:
    """What Prometheus says of itself."""

    def __init__(self, prometheus):
        self.page = node.ask(f"http://{prometheus.address}/metrics")

    def of(self, name):
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (.*)$", self.page, re.M))

    def groups(self, name):
        found = re.findall(rf'^{name}{{rule_group="[^"]*;([\w-]+)"}} (.*)$', self.page, re.M)
        return {group: float(value) for group, value in found}


def cost(prometheus, ask):
    """Seconds of CPU that Prometheus spends on what `ask` asks, nothing else being done, and the wall clock's."""
    before, began = Own(prometheus).of("process_cpu_seconds_total"), time.monotonic()
    ask()
    took = time.monotonic() - began
    return Own(prometheus).of("process_cpu_seconds_total") - before, took


def live(prometheus, seconds):
    """Lets it run, and tells each group's evaluations once rates have their five minutes."""
    began, taken, resident = time.time(), collections.defaultdict(dict), 0
    first = Own(prometheus)
    while time.time() < began + seconds:
        time.sleep(LOOK)
        own = Own(prometheus)
        resident = max(resident, own.of("process_resident_memory_bytes"))
        if time.time() < began + 300:
            first = own
            continue
        at = own.groups("prometheus_rule_group_last_evaluation_timestamp_seconds")
        for group, took in own.groups("prometheus_rule_group_last_duration_seconds").items():
            taken[group][at[group]] = took
    spent = (own.of("process_cpu_seconds_total") - first.of("process_cpu_seconds_total")) / (began + seconds - max(began + 300, began))
    print(f"{own.of('prometheus_tsdb_head_series'):.0f} series in the head, {resident / 1e9:.1f} GB resident at most, {spent:.2f} CPUs on the whole")
    missed = own.of("prometheus_rule_group_iterations_missed_total")
    print(f"an evaluation while all of that goes on, wall clock (missed: {missed:.0f}):")
    for group, took in taken.items():
        took = list(took.values())
        print(f"  {statistics.median(took):6.2f} s (at most {max(took):.2f} s, {len(took)} seen)  group {group}")


def of_board(title):
    """(panel, query) of a board."""
    (board,) = (one for one in shipped.boards() if one["title"] == title)
    return [(panel["title"], target) for panel in board["panels"] for target in panel.get("targets", [])]


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--nodes", type=int, default=200)
    asked.add_argument("--seconds", type=int, default=720)
    asked.add_argument("--interval", default="60s")
    asked = asked.parse_args()
    fleet = Fleet(asked.nodes)
    pairs = asked.nodes * played.GPUS * played.TENANTS
    print(f"{asked.nodes} nodes of {played.GPUS} GPUs, {played.TENANTS} tenants on each GPU: {pairs} pairs of a tenant and a GPU")
    print(f"{fleet.series // asked.nodes} series a node are played, of some {played.whole()} that an agent has there; {fleet.series} in all")
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        with node.prometheus(place, fleet.settings(asked.nodes, asked.interval)) as prometheus:
            live(prometheus, asked.seconds)
            now = time.time()
            answering = prometheus.at("sum(up)", now)[0]["value"][1]
            longest = float(prometheus.at("max(scrape_duration_seconds)", now)[0]["value"][1])
            print(f"{answering} nodes answer, the longest scrape took {longest:.2f} s")
        # The same data, with nothing scraped or evaluated beside what is asked.
        with node.prometheus(place, "{}", patience=300) as prometheus:
            print("CPU of one evaluation, nothing else going on, the best of three:")
            for group in yaml.safe_load(shipped.RULES.read_text(encoding="utf-8"))["groups"]:
                taken = []
                for rule in group["rules"]:
                    # Collecting garbage of gigabytes falls to whoever asks at that moment.
                    spent, took = (min(pair) for pair in zip(*(cost(prometheus, lambda: prometheus.at(rule["expr"], now)) for _ in range(3))))
                    taken.append((spent, took, rule.get("record") or rule["alert"]))
                most, took, name = max(taken)
                print(f"  {sum(one for one, *_ in taken):6.2f} s  group {group['name']}, most by {name} ({most:.2f} s of CPU, {took:.2f} s)")
            taken, points = [], asked.seconds // STEP
            for title, target in of_board(played.BOARD):
                expr = promql.filled(target["expr"], "", "", "", "4m", "10m")
                if target["instant"]:
                    spent, took = cost(prometheus, lambda: prometheus.at(expr, now))
                else:
                    spent, took = cost(prometheus, lambda: prometheus.over(expr, now - asked.seconds, now, STEP))
                taken.append((took, spent, f"{title} ({target['refId']}{', a table or figure' if target['instant'] else ''})"))
            took, spent = sum(one for one, *_ in taken), sum(one for _, one, _ in taken)
            print(f"the Fleet board's {len(taken)} queries as Grafana asks them, graphs over {asked.seconds} s in {points} steps:")
            print(f"  {took:.1f} s one after another, {spent:.1f} s of CPU; longest:")
            for took, spent, name in sorted(taken, reverse=True)[:10]:
                print(f"  {took:6.2f} s ({spent:.2f} s of CPU)  {name}")


if __name__ == "__main__":
    main()
