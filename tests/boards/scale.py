"""Owns the measurement of a fleet: plays nodes with the series that rules and the Fleet board read into a real
Prometheus, and says what the rules and the board's queries cost there.

Refuses to be a test: its figures are this machine's. `python3 tests/boards/scale.py --nodes 1000`.
"""

import argparse
import http.server
import pathlib
import re
import tempfile
import threading
import time

import yaml

import node
import promql
import shipped

GPUS, TENANTS, CULPRITS = 8, 20, 5
POOL = 2000
BOARD = "Cotenant / Fleet"


def page(number):
    """One node's series, with `@` where counters have their value."""
    lines = []

    def add(name, value, **labels):
        written = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{{{written}}} {value}")

    tenants = [f"pod:team-{(number * 7 + one) % POOL // 10}/job-{(number * 7 + one) % POOL}" for one in range(TENANTS)]
    add("cotenant_agent_build_info", 1, version="0.1.0")
    add("cotenant_incidents_open", number % 50 == 0 and 1 or 0)
    for kind in ("noisy_neighbour", "stall", "allocation_failure", "near_miss", "oom_kill", "xid", "xid_echo"):
        add("cotenant_incidents_total", 0, kind=kind)
    for feature in range(12):
        for state in ("active", "degraded", "unsupported", "broken", "disabled"):
            add("cotenant_agent_feature_state", int(state == "active"), feature=f"feature_{feature}", state=state)
    for reason in range(24):
        add("cotenant_agent_losses_total", 0, reason=f"reason_{reason}")
    add("cotenant_agent_events_lost_total", 0)
    add("cotenant_agent_nvml_last_collect_success", 1)
    add("cotenant_agent_nvml_age_seconds", 3)
    for gpu in range(GPUS):
        uuid = f"GPU-{number:08x}-0000-0000-0000-{gpu:012x}"
        add("hw_gpu_memory_limit_bytes", 150754820096, hw_id=uuid)
        add("hw_gpu_memory_usage_bytes", 100000000000 + (number * 37 + gpu * 11) % 50 * 10**9, hw_id=uuid)
        for tenant in tenants:
            who = {"tenant": tenant, "tenant_kind": "pod", "hw_id": uuid}
            add("cotenant_gpu_memory_process_bytes", 5 * 10**9, **who)
            add("cotenant_gpu_memory_residual_bytes", 0, **who, part="drift")
            for kind in ("device", "pool"):
                add("cotenant_gpu_memory_live_bytes", 2 * 10**9, **who, memory_kind=kind)
                add("cotenant_gpu_memory_allocated_bytes_total", "@", **who, memory_kind=kind)
    for place, tenant in enumerate(tenants):
        who = {"tenant": tenant, "tenant_kind": "pod"}
        add("cotenant_gpu_tenant_processes", 1, **who)
        for word in ("complete", "joined_late", "events_lost"):
            add("cotenant_gpu_memory_confidence", int(word == "complete"), **who, confidence=word)
        add("cotenant_gpu_memory_failures_total", 0, **who, hw_id=uuid, operation="cuMemAlloc", error_type="CUDA_ERROR_OUT_OF_MEMORY")
        for wait in ("rm_api_lock", "gpu_lock", "device"):
            add("cotenant_gpu_driver_wait_seconds_total", "@", **who, wait_class=wait)
        for step in range(1, CULPRITS + 1):
            culprit = tenants[(place + step) % TENANTS]
            for wait in ("rm_api_lock", "gpu_lock"):
                add("cotenant_gpu_blame_seconds_total", "@", victim=tenant, culprit=culprit, relation="neighbour", wait_class=wait)
    return "\n".join(sorted(lines)) + "\n"


class Fleet:
    def __init__(self, nodes):
        pages, began = [page(number) for number in range(nodes)], time.time()
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


def cpu(prometheus):
    return float(re.search(r"^process_cpu_seconds_total (.*)$", node.ask(f"http://{prometheus.address}/metrics"), re.M)[1])


def cost(prometheus, ask):
    """Seconds of CPU that Prometheus spends on what `ask` asks, nothing else being done."""
    before = cpu(prometheus)
    ask()
    return cpu(prometheus) - before


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--nodes", type=int, default=200)
    asked.add_argument("--seconds", type=int, default=150)
    asked.add_argument("--interval", default="30s")
    asked = asked.parse_args()
    fleet = Fleet(asked.nodes)
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        with node.prometheus(place, fleet.settings(asked.nodes, asked.interval)) as prometheus:
            time.sleep(asked.seconds)
            now = time.time()
            own = node.ask(f"http://{prometheus.address}/metrics")
            print(f"{asked.nodes} nodes, {fleet.series // asked.nodes} series a node from the agent, {fleet.series} in all")
            for name in ("prometheus_tsdb_head_series", "process_resident_memory_bytes"):
                print(f"{name} {float(re.search(rf'^{name} (.*)$', own, re.M)[1]):.4g}")
        # The same data, with nothing scraped or evaluated beside what is asked.
        with node.prometheus(place, "{}") as prometheus:
            print("CPU of one evaluation:")
            for group in yaml.safe_load(shipped.RULES.read_text(encoding="utf-8"))["groups"]:
                taken = [(cost(prometheus, lambda: prometheus.at(rule["expr"], now)), rule.get("record") or rule["alert"]) for rule in group["rules"]]
                print(f"  {sum(one for one, _ in taken):6.2f} s  group {group['name']}, most by {max(taken)[1]} ({max(taken)[0]:.2f} s)")
            taken = []
            for board, title, letter, expr in shipped.panel_queries():
                if board == BOARD:
                    expr = promql.filled(expr, "", "", "", "2m", "1h")
                    taken.append((cost(prometheus, lambda: prometheus.over(expr, now - asked.seconds, now, 15)), f"{title} ({letter})"))
            print(f"CPU of the Fleet board, {asked.seconds} s in steps of 15 s: {sum(one for one, _ in taken):.2f} s in {len(taken)} queries; most:")
            for seconds, name in sorted(taken, reverse=True)[:5]:
                print(f"  {seconds:6.2f} s  {name}")


if __name__ == "__main__":
    main()
