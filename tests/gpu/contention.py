"""Owns the contention scenarios: victims alone and beside their neighbours, the agent's figures before and after.

Refuses verdicts: what the figures say is blame.py's business. Needs root, a GPU, nvcc's headers, gcc; see contention.sh.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import programs
import switches
from drive import CGROUPS, HERE, LABEL, SERIES, Agent, Workload, get, host

# A tick of the agent (1 s) and slack.
SETTLE = 1.6
SOLO, TOGETHER, TRACED = 2.0, 4.0, 2.0
GIB = 1 << 30
WANTED = re.compile(r"cotenant_(gpu_(blame|driver_wait|contention|memory_operation_duration)|agent_(losses|notes|cpu|resident|blame)|oom|gpu_xid)")
TRACING = Path("/sys/kernel/tracing")


class Loop(Workload):
    """A workload that runs for a while each time it is asked, and answers with its own times."""

    def __init__(self, name, command, environment=None, solo=SOLO):
        super().__init__(name, command, environment)
        self.solo, self.runs = solo, {}

    @property
    def tenant(self):
        return f"systemd:wl-{self.name}.service"

    def start_traced(self):
        """A shell that waits for a line takes the process id; the program comes under a second witness."""
        self.command = ["sh", "-c", 'echo "{}"; read line; exec "$@"', "sh", *self.command]
        self.start()
        with switches.Switches(self.process.pid, "arrival") as witness:
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
            self.begun = time.monotonic()
            self.listen(60)
        self.phases = self.phases[1:]
        return witness

    def ask(self, seconds, slowest=0):
        if self.failure is None:
            self.process.stdin.write(f"run {seconds} {slowest}\n".encode())
            self.process.stdin.flush()
        return self

    def answer(self, phase, timeout=60):
        if self.failure is None:
            self.listen(timeout)
            self.runs[phase] = self.phases[-1]
        return self

    def end(self):
        if self.failure is None:
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def account(self):
        return {
            "name": self.name,
            "tenant": self.tenant,
            "pid": self.process.pid,
            "start": self.phases[0] if self.phases else None,
            "runs": self.runs,
            "failure": self.failure,
        }


def figures():
    """The agent's counters of this moment: [series, labels, value]; of histograms only those of waits keep buckets."""
    rows = []
    for line in get("/metrics").splitlines():
        match = SERIES.match(line)
        if not match or not WANTED.match(match[1]) or float(match[3]) == 0:
            continue
        if match[1].endswith("_bucket") and "driver_wait" not in match[1]:
            continue
        labels = {key: text for key, text in LABEL.findall(match[2] or "") if text and key != "tenant_kind"}
        rows.append([match[1], labels, float(match[3])])
    return rows


def settled():
    time.sleep(SETTLE)
    return figures()


def contend(options, name, device=0, size=2 << 20, threads=1, pause=0, environment=None, solo=SOLO):
    command = [options.build / "contend", "loop", device, size, threads, pause]
    return Loop(name, command, environment, solo)


def python(name, file, *arguments, solo=SOLO):
    return Loop(name, [sys.executable, HERE / "workloads" / file, *arguments], solo=solo)


def pin(workloads):
    """Each main thread to a CPU of its own: how near that is to the GPU changes a call by up to 40 %, whoever else there is."""
    for place, workload in enumerate(workloads):
        if workload.failure is None:
            os.sched_setaffinity(workload.process.pid, {(2 + 2 * place) % os.cpu_count()})


def scenario(options, name, victim, others, newcomer=None, together=TOGETHER, pinned=True):
    """Each alone, then all together, then together once more with a second witness on the victim's main thread."""
    everybody = [victim, *others]
    log = options.build / f"agent-{name}.log"
    result = {"victim": victim.name}
    with Agent(options.agent, log) as agent:
        for workload in everybody:
            workload.start()
        if pinned:
            pin(everybody)
        for workload in everybody:
            if workload.solo:
                workload.ask(workload.solo).answer("solo")
        result["before"] = settled()
        for workload in others:
            workload.ask(together + 0.6)
        time.sleep(0.3)
        victim.ask(together, 200).answer("together")
        for workload in others:
            workload.answer("together")
        result["after"] = settled()
        for workload in others:
            workload.ask(TRACED + 1.5)
        time.sleep(0.3)
        begun = time.monotonic()
        # There the second witness sees when a thread runs again, too.
        os.sched_setaffinity(victim.process.pid, {0})
        with switches.Switches(victim.process.pid) as witness:
            time.sleep(0.2)
            victim.ask(TRACED, 200).answer("traced")
        os.sched_setaffinity(victim.process.pid, range(os.cpu_count()))
        if pinned:
            pin([victim])
        for workload in others:
            workload.answer("traced")
        result["after_traced"] = settled()
        if newcomer is not None:
            for workload in everybody:
                workload.ask(3)
            time.sleep(0.3)
            arrival = newcomer.start_traced()
            for workload in everybody:
                workload.answer("newcomer")
            result["after_newcomer"] = settled()
            newcomer.end()
        # Once more alone: a GPU, a CPU and their clocks are not the same for the whole of a run.
        for workload in everybody:
            if workload.solo:
                workload.ask(workload.solo).answer("solo again")
        for workload in everybody:
            workload.end()
        result["driver_open"] = holders()
    run = victim.runs["traced"]
    waits = witness.waits(run["begun_ns"] / 1e9, run["ended_ns"] / 1e9)
    if newcomer is not None:
        arrived = arrival.waits(newcomer.begun, newcomer.phases[0]["at"]) if newcomer.phases else []
        result["arrival"] = {"stacks": switches.by_stack(arrived, str)[:12]}
    pids = {workload.process.pid: workload.name for workload in everybody}
    names = {}

    def waker(task):
        if not isinstance(task, int):
            return task
        if task not in names:
            names[task] = next((owner for pid, owner in pids.items() if Path(f"/proc/{pid}/task/{task}").exists()), None)
            names[task] = names[task] or pids.get(task) or "somebody else"
        return names[task]

    result["witness"] = {
        "blocked_seconds": sum(wait["woken"] - wait["blocked"] for wait in waits),
        "woken_until_running_seconds": sum(wait["running"] - wait["woken"] for wait in waits if wait["running"]),
        "woken_until_running_waits": sum(wait["running"] is not None for wait in waits),
        "waits": len(waits),
        "buffer_losses": witness.lost,
        "buffers": witness.sizes,
        "stacks": switches.by_stack(waits, waker)[:25],
        "slowest": within(run["slowest"], waits),
    }
    return {
        **result,
        "workloads": [workload.account() for workload in everybody + ([newcomer] if newcomer else [])],
        "agent_stop_seconds": agent.stopped,
        "log": log.read_text()[-3000:],
        "tracing_seconds": time.monotonic() - begun,
    }


def within(slowest, waits):
    """Of each slow pair or step: [took, of which the second witness saw it blocked], nanoseconds."""
    rows = []
    for at, took in slowest:
        begun, ended = at / 1e9, (at + took) / 1e9
        inside = [wait for wait in waits if begun <= wait["blocked"] <= ended]
        blocked = sum(wait["woken"] - wait["blocked"] for wait in inside)
        rows.append([took, round(blocked * 1e9)])
    return rows


def hog(options, environment=None):
    return contend(options, "hog", size=30 * GIB, environment=environment)


def light(options):
    return contend(options, "light", size=1 << 20, pause=100_000)


def pair(options):
    return scenario(options, "pair", contend(options, "one"), [contend(options, "two")])


def beside_hog(options):
    victim = contend(options, "victim")
    newcomer = contend(options, "newcomer")
    return scenario(options, "hog", victim, [hog(options), light(options)], newcomer)


def threads(options):
    return scenario(options, "threads", contend(options, "threads", threads=4), [], pinned=False)



def poller(options):
    return scenario(options, "poller", contend(options, "polled"), [python("poller", "poller.py", solo=0)], together=3)


def cached(options):
    return scenario(options, "cached", python("cached", "inference.py", "cached"), [hog(options)], together=3)


def emptied(options):
    return scenario(options, "emptied", python("emptied", "inference.py", "empty"), [hog(options)], together=6)


def two_gpus(options):
    victim, other = contend(options, "gpu0", 0), contend(options, "gpu1", 1)
    return scenario(options, "two-gpus", victim, [other])


def other_gpu_hog(options):
    """The neighbour is on the other GPU; a third process on it holds no lock for long."""
    return scenario(options, "far", contend(options, "near", 0), [contend(options, "farhog", 1, 30 * GIB), light(options)])


def mps(options):
    pipe, logs = options.build / "mps", options.build / "mps-log"
    pipe.mkdir(), logs.mkdir()
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    group = CGROUPS / "wl-mps.service"
    group.mkdir(parents=True, exist_ok=True)
    control = subprocess.Popen(
        ["nvidia-cuda-mps-control", "-f"],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )
    try:
        time.sleep(1)
        victim = contend(options, "client", environment=environment)
        newcomer = contend(options, "late", environment=environment)
        result = scenario(options, "mps", victim, [hog(options, environment)], newcomer)
        result["server_log"] = "".join(file.read_text(errors="replace")[-1500:] for file in sorted(logs.iterdir()))
        return result
    finally:
        quit = ["sh", "-c", "echo quit | nvidia-cuda-mps-control"]
        subprocess.run(quit, env={**os.environ, **environment}, timeout=20, capture_output=True)
        try:
            control.wait(10)
        except subprocess.TimeoutExpired:
            control.kill()


def kills(options):
    """Real kills at memory.max of processes that hold GPU memory; one without CUDA that is dead at once."""
    directory = TRACING / "instances/kills"
    directory.mkdir(exist_ok=True)
    (directory / "trace_clock").write_text("mono")
    (directory / "events/oom/mark_victim/enable").write_text("1")
    log = options.build / "agent-kills.log"
    rows, kernel_log = [], kernel_lines()
    strangers = set()
    over = threading.Event()

    def watch():
        while not over.wait(0.1):
            strangers.update((name, group) for _, name, group in holders() if "/wl-" not in group)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with Agent(options.agent, log):
        before = settled()
        for number in range(10):
            at_once = number == 9
            name = f"oom{number}"
            group = CGROUPS / f"wl-{name}.service"
            group.mkdir(parents=True, exist_ok=True)
            limit = 64 << 20 if at_once else 3000 << 20
            (group / "memory.max").write_text(str(limit))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            command = ["eat-at-once"] if at_once else ["eat", 0, GIB]
            eater = Loop(name, [options.build / "contend", *command])
            if at_once:
                eater.listen = lambda _: eater
            eater.start()
            begun = eater.begun if at_once else time.monotonic()
            if not at_once:
                eater.ask(0)
            status = eater.process.wait(60)
            rows.append({
                "tenant": eater.tenant,
                "pid": eater.process.pid,
                "limit": limit,
                "seconds_to_death": time.monotonic() - begun,
                "seconds_of_life": time.monotonic() - eater.begun,
                "signal": signal.Signals(-status).name if status < 0 else status,
                "memory.events": dict(line.split() for line in (group / "memory.events").read_text().splitlines()),
                "failure": eater.failure,
            })
        # A kill is told when its witnesses have had their time: some four ticks.
        time.sleep(5)
        after = settled()
        status = json.loads(get("/status"))
    over.set()
    watcher.join()
    events = [line.strip() for line in (directory / "trace").read_text().splitlines() if "mark_victim" in line and not line.startswith("#")]
    (directory / "events/oom/mark_victim/enable").write_text("0")
    directory.rmdir()
    return {
        "rows": rows,
        "before": before,
        "after": after,
        "features": status.get("features"),
        "strangers": sorted(strangers),
        "mark_victim": events,
        "kernel_log": [line for line in kernel_lines()[len(kernel_log):] if "oom" in line or "Killed process" in line],
        "log": log.read_text()[-4000:],
    }


def faults(options):
    """Tenants that write where they have no memory; the kernel's tracepoint and log of it beside the agent's account."""
    directory = TRACING / "instances/faults"
    directory.mkdir(exist_ok=True)
    event = directory / "events/nvidia/nvidia_dev_xid/enable"
    if event.exists():
        event.write_text("1")
    log, kernel_log = options.build / "agent-faults.log", kernel_lines()
    rows = []
    with Agent(options.agent, log):
        innocent = contend(options, "bystander").start()
        before = settled()
        for number in range(3):
            faulty = Loop(f"fault{number}", [options.build / "fault", 0, GIB]).start()
            settled()
            innocent.ask(1)
            faulty.ask(0)
            faulty.listen(30)
            rows.append({"tenant": faulty.tenant, "pid": faulty.process.pid, "codes": faulty.phases[-1], "failure": faulty.failure})
            faulty.end()
            innocent.answer(f"beside {number}")
            # Faults of one code within five seconds on one GPU are one.
            time.sleep(6)
        after = settled()
        status, incidents = json.loads(get("/status")), json.loads(get("/api/v1/incidents"))
        innocent.end()
    told = [line.strip() for line in (directory / "trace").read_text().splitlines() if "nvidia_dev_xid" in line and not line.startswith("#")]
    if event.exists():
        event.write_text("0")
    directory.rmdir()
    return {
        "rows": rows,
        "before": before,
        "after": after,
        "features": status.get("features"),
        "incidents": incidents,
        "tracepoint": told,
        "kernel_log": [line for line in kernel_lines()[len(kernel_log):] if "Xid" in line],
        "log": log.read_text()[-4000:],
    }


def kernel_lines():
    return subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20).stdout.splitlines()


def holders():
    """Processes outside this run that have the driver open: possible culprits that nobody started here."""
    rows = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            opened = {os.readlink(entry) for entry in (process / "fd").iterdir()}
            if any(path.startswith("/dev/nvidia") for path in opened):
                group = (process / "cgroup").read_text().strip()
                rows.append([int(process.name), (process / "comm").read_text().strip(), group])
        except OSError:
            continue
    return rows


VARIANTS = {
    "off": None,
    "on": "",
    "on without waits": "[waits]\nenabled = false\n",
    "on without the syscalls tracepoint": "[kernel]\nsyscall_tracepoint = false\n",
}


def cost(options):
    """Off, on without the scheduler hooks, on, in turn: allocation pairs and context switches, idle and with a call in flight."""
    runs = []
    for turn in range(3):
        for variant, config in VARIANTS.items():
            if config is None:
                runs.append({"variant": variant, "turn": turn, **costs(options)})
                continue
            with Agent(options.agent, options.build / "agent-cost.log", config):
                latency(options)
                runs.append({"variant": variant, "turn": turn, **costs(options)})
    return {"runs": runs, "programs": program_costs(options)}


def latency(options):
    command = ["taskset", "-c", str(os.cpu_count() - 2), options.build / "latency"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


def switch(options, first, second, rounds):
    command = [options.build / "switch", str(first), str(second), str(rounds)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)["ns_per_switch"]


def switching(options):
    core = os.cpu_count() - 3
    # The first run wakes the core up; of the others the lower one counts.
    one_core = [switch(options, core, core, 80_000) for _ in range(3)]
    return {
        "one core": min(one_core[1:]),
        "two cores": switch(options, core, core - 1, 30_000),
        "unpinned": switch(options, -1, -1, 30_000),
    }


def costs(options):
    figures = {"latency": latency(options), "idle": switching(options)}
    busy = hog(options)
    busy.command = ["taskset", "-c", str(os.cpu_count() - 6), *busy.command]
    busy.start().ask(2)
    time.sleep(0.3)
    figures["call in flight"] = switching(options)
    busy.answer("busy").end()
    figures["idle again"] = switching(options)
    return figures


def program_costs(options):
    core = os.cpu_count() - 3
    rows = {}
    with Agent(options.agent, options.build / "agent-programs.log"), programs.statistics():
        latency(options)
        for name, work in {
            "switches, no call in flight": lambda: switch(options, core, core, 300_000),
            "allocation pairs": lambda: latency(options),
        }.items():
            before = programs.runs()
            work()
            rows[name] = programs.between(before, programs.runs())
        busy = hog(options)
        busy.start().ask(3)
        time.sleep(0.3)
        before = programs.runs()
        switch(options, core, core, 200_000)
        rows["switches, a call in flight"] = programs.between(before, programs.runs())
        busy.answer("busy").end()
    return rows


SCENARIOS = {
    "pair": pair,
    "beside_hog": beside_hog,
    "threads": threads,
    "poller": poller,
    "cached": cached,
    "emptied": emptied,
    "mps": mps,
    "kills": kills,
    "faults": faults,
    "cost": cost,
    "two_gpus": two_gpus,
    "other_gpu_hog": other_gpu_hog,
}
SEVERAL_GPUS = {"two_gpus", "other_gpu_hog"}


def main():
    parser = argparse.ArgumentParser()
    for name in ("agent", "library"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("build", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    # The agent is a tenant of its own, apart from all workloads: as a culprit it is told from them.
    group = CGROUPS / "wl-agent.service"
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    collected = {"host": {**host(options), "cpus": os.cpu_count(), "driver_open": holders()}}
    for name in options.only:
        if name in SEVERAL_GPUS and len(collected["host"]["gpus"]) < 2:
            continue
        begun = time.monotonic()
        try:
            collected[name] = SCENARIOS[name](options)
        except Exception as error:  # one scenario's failure must not cost the others' figures
            collected[name] = {"failure": repr(error)}
        print(name, round(time.monotonic() - begun, 1), "s", collected[name].get("failure"), flush=True)
        (options.out / "collected.json").write_text(json.dumps(collected))


if __name__ == "__main__":
    main()
