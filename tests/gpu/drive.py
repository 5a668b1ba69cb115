"""Owns the scenarios: starts agent and workloads, each workload in a cgroup of its own, and collects both accounts.

Refuses verdicts: what the figures say is compare.py's business.
"""

import argparse
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from witness import Witness

HERE = Path(__file__).resolve().parent
CGROUPS = Path("/sys/fs/cgroup/system.slice")
AGENT = "http://127.0.0.1:9468"
# One NVML poll, one tick, and slack: after this long the agent's figures are all younger than the hold.
SETTLE = 7.0
SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Agent:
    # What comes before the configuration of a scenario.
    HEAD = '[nvml]\ninterval = "5s"\n'

    def __init__(self, binary, log, config=""):
        self.binary, self.log, self.config = binary, log, config

    def __enter__(self):
        config = self.log.with_suffix(".toml")
        config.write_text(self.HEAD + self.config)
        self.begun = time.monotonic()
        command = [self.binary, "run", "--config", str(config)]
        environment = {**os.environ, "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stderr=self.log.open("w"), env=environment)
        while time.monotonic() - self.begun < 30:
            try:
                get("/status")
                self.ready = time.monotonic() - self.begun
                return self
            except OSError:
                time.sleep(0.02)
        raise RuntimeError("the agent does not serve: " + self.log.read_text()[-2000:])

    def __exit__(self, *_):
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.stopped = time.monotonic() - begun


def get(path):
    with urllib.request.urlopen(AGENT + path, timeout=5) as answer:
        return answer.read().decode()


def series_of(page):
    """Name, labels and value of each series but a histogram's buckets."""
    found = (match for line in page.splitlines() if (match := SERIES.match(line)) and "_bucket" not in match[1])
    return [[match[1], dict(LABEL.findall(match[2] or "")), float(match[3])] for match in found]


def scrape():
    series = series_of(get("/metrics"))
    try:
        ready = get("/readyz")
    except urllib.error.HTTPError as error:
        ready = error.read().decode()
    return {"at": time.monotonic(), "metrics": series, "status": json.loads(get("/status")), "ready": ready}


class Workload:
    """A process in `system.slice/wl-NAME.service` that prints an account a phase and holds until told to go on."""

    def __init__(self, name, command, environment=None):
        self.name, self.command = name, [str(part) for part in command]
        self.environment = environment or {}
        self.phases, self.failure = [], None

    def start(self, timeout=120):
        group = CGROUPS / f"wl-{self.name}.service"
        group.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.environment},
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        )
        return self.listen(timeout)

    def listen(self, timeout):
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if not select.select([self.process.stdout], [], [], 0.5)[0]:
                continue
            line = self.process.stdout.readline().decode()
            if not line:
                break
            if line.startswith("{"):
                self.phases.append({**json.loads(line), "at": time.monotonic()})
                return self
        self.process.kill()
        self.failure = self.process.stderr.read().decode()[-3000:]
        print(f"{self.name} FAILED: {self.failure}", flush=True)
        return self

    def go(self, timeout=60, last=False):
        if self.failure is not None:
            return self
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        if last:
            # A workload with a further phase to go finds the end of its input instead.
            self.process.stdin.close()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
            return self
        return self.listen(timeout)

    def account(self):
        return {
            "name": self.name,
            "tenant": f"systemd:wl-{self.name}.service",
            "pid": self.process.pid,
            "begun": self.begun,
            "environment": self.environment,
            "phases": self.phases,
            "failure": self.failure,
        }


def framework(name, which, **environment):
    return Workload(name, [sys.executable, HERE / "workloads/framework.py", which], environment)


def all_at_once(options):
    """Seven tenants on one GPU, started one after the other, held together."""
    workloads = [
        Workload("driver", [options.build / "driver", "all"]),
        Workload("runtime", [options.build / "runtime"]),
        framework("torch", "torch"),
        framework("torch-async", "torch", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"),
        framework("torch-expandable", "torch", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        framework("cupy", "cupy"),
        framework("jax", "jax", XLA_PYTHON_CLIENT_PREALLOCATE="false"),
    ]
    scrapes = {}
    witness = Witness(options.library)
    with Agent(options.agent, options.build / "agent.log") as agent:
        with witness:
            for workload in workloads:
                workload.start()
                print(workload.name, "holds after", round(time.monotonic() - workload.begun, 2), "s", flush=True)
            time.sleep(SETTLE)
            scrapes["hold"] = scrape()
            time.sleep(2)
            scrapes["hold_again"] = scrape()
            for workload in workloads:
                workload.go()
            time.sleep(SETTLE)
            scrapes["after_free"] = scrape()
            for workload in workloads:
                workload.go(last=True)
            time.sleep(SETTLE)
            scrapes["after_exit"] = scrape()
    return {
        "workloads": [workload.account() for workload in workloads],
        "scrapes": scrapes,
        "witness": witness.report(),
        "witness_lost": witness.lost,
        "witness_lines": witness.lines,
        "witness_refused": witness.refused,
        "exported": witness.exported,
        "agent_ready_seconds": agent.ready,
        "agent_stop_seconds": agent.stopped,
        "log": (options.build / "agent.log").read_text(),
        "clock_offset": time.time() - time.monotonic(),
    }


def joined_late(options):
    workload = Workload("late", [options.build / "driver", "late"]).start()
    scrapes = {}
    with Agent(options.agent, options.build / "agent-late.log"):
        time.sleep(SETTLE)
        scrapes["untouched"] = scrape()
        workload.go()
        time.sleep(SETTLE)
        scrapes["touched"] = scrape()
        workload.go(last=True)
        time.sleep(3)
        scrapes["after_exit"] = scrape()
    log = (options.build / "agent-late.log").read_text()
    return {"workloads": [workload.account()], "scrapes": scrapes, "log": log}


def pool_overhead(options):
    """The same bytes by a plain and by a stream-ordered allocation: what NVML sees of each, and of a refused one."""
    workloads = [Workload(mode, [options.build / "driver", mode, 96]) for mode in ("hold", "pool", "refused")]
    for allocator in ("native", "cudaMallocAsync"):
        asks = {"PYTORCH_CUDA_ALLOC_CONF": f"backend:{allocator}", "WITHOUT_REFUSAL": "1"}
        workloads.append(framework(f"torch-{allocator}-without-refusal", "torch", **asks))
    with Agent(options.agent, options.build / "agent-pool.log"):
        for workload in workloads:
            workload.start()
        time.sleep(SETTLE)
        scrapes = {"hold": scrape()}
        for workload in workloads:
            workload.go(last=True)
    return {"workloads": [workload.account() for workload in workloads], "scrapes": scrapes}


def residual(options):
    """What NVML counts beyond the framework's allocator, step by step, for both of PyTorch's backends."""
    runs = []
    for backend in ("native", "cudaMallocAsync"):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"backend:{backend}"}
        command = [sys.executable, HERE / "workloads/residual.py"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
        runs.append(json.loads(answer.stdout.splitlines()[-1]))
    return {"runs": runs}


def several_gpus(options, gpus):
    """One process a GPU, in reverse order of what CUDA_VISIBLE_DEVICES makes of the ordinals."""
    workloads = [
        Workload(
            f"gpu{index}",
            [options.build / "driver", "hold", 100 * (index + 1)],
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": f"{index},{(index + 1) % len(gpus)}"},
        )
        for index in reversed(range(len(gpus)))
    ]
    with Agent(options.agent, options.build / "agent-several.log"):
        for workload in workloads:
            workload.start()
        time.sleep(SETTLE)
        scrapes = {"hold": scrape()}
        for workload in workloads:
            workload.go(last=True)
    return {"workloads": [workload.account() for workload in workloads], "scrapes": scrapes, "gpus": gpus}


VARIANTS = {
    "off": None,
    "on": "",
    "on, no syscalls tracepoint": "[kernel]\nsyscall_tracepoint = false\n",
    "on, no NVML": "enabled = false\n",
}


def cost(options):
    """The same loop with the agent off, on, and on without one part, in turn."""
    runs = []
    for turn in range(2):
        for name, config in VARIANTS.items():
            if config is None:
                runs.append({"variant": name, "turn": turn, **loop(options)})
                continue
            agent = Agent(options.agent, options.build / "agent-cost.log", config)
            with agent:
                # The first run has the probes attached; the second is the one that counts.
                loop(options)
                before = scrape()
                figures = loop(options)
                after = scrape()
            runs.append({
                "variant": name,
                "turn": turn,
                **figures,
                "agent_cpu_seconds": value(after, "cotenant_agent_cpu_seconds_total")
                - value(before, "cotenant_agent_cpu_seconds_total"),
                "agent_resident_bytes": value(after, "cotenant_agent_resident_memory_bytes"),
                "wall_seconds": after["at"] - before["at"],
                "stop_seconds": agent.stopped,
                "losses": {key: count for key, count in after["status"]["losses"].items() if count},
            })
    return {"runs": runs}


def loop(options):
    """On one core, not the first: the host's own work is there."""
    command = ["taskset", "-c", str(os.cpu_count() - 2), options.build / "latency"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(answer.stdout)


def value(scraped, name):
    return next((number for series, _, number in scraped["metrics"] if series == name), 0.0)


def command(*words):
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError as error:
        return str(error)


def host(options):
    symbols = Path("/proc/kallsyms").read_text()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "kernel": platform.release().split("-")[0],
        "glibc": platform.libc_ver()[1],
        "gpus": command("nvidia-smi", "--query-gpu=uuid,name,driver_version,memory.total", "--format=csv,noheader").splitlines(),
        "library": options.library,
        "kprobe_pmu": Path("/sys/bus/event_source/devices/kprobe").exists(),
        "uprobe_pmu": Path("/sys/bus/event_source/devices/uprobe").exists(),
        "uvm_unlocked_ioctl_entry": " uvm_unlocked_ioctl_entry\t" in symbols,
        "sched_process_exit": Path("/sys/kernel/tracing/events/sched/sched_process_exit/format").read_text(),
        "agent": command(options.agent, "--version"),
        "versions": command(sys.executable, "-c", "import torch, cupy, jax; print(torch.__version__, cupy.__version__, jax.__version__)"),
    }


def main():
    parser = argparse.ArgumentParser()
    for name in ("agent", "library"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("build", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=["all_at_once", "joined_late", "pool_overhead", "residual", "cost", "several_gpus"])
    options = parser.parse_args()
    collected = {"host": host(options)}
    gpus = [row.split(",")[0] for row in collected["host"]["gpus"]]
    scenarios = {
        "all_at_once": lambda: all_at_once(options),
        "joined_late": lambda: joined_late(options),
        "pool_overhead": lambda: pool_overhead(options),
        "residual": lambda: residual(options),
        "cost": lambda: cost(options),
        "several_gpus": lambda: several_gpus(options, gpus) if len(gpus) > 1 else None,
    }
    for name in options.only:
        begun = time.monotonic()
        try:
            collected[name] = scenarios[name]()
        except Exception as error:  # one scenario's failure must not cost the others' figures
            collected[name] = {"failure": repr(error)}
        print(name, round(time.monotonic() - begun, 1), "s", collected[name] and collected[name].get("failure"), flush=True)
        (options.out / "collected.json").write_text(json.dumps(collected))


if __name__ == "__main__":
    main()
