"""Owns the second witness of waits: the kernel's own sched events of one thread, with its stack at each blocking.

Refuses the agent's programs and classes: stacks are symbol names, wakers process ids or an interrupt.
"""

import re
from collections import defaultdict
from pathlib import Path

TRACING = Path("/sys/kernel/tracing")
# Of a context switch itself: they say nothing.
SCHEDULER = re.compile(r"^(__schedule|schedule|schedule_preempt_disabled|preempt_schedule\w*|__traceiter_\w+|trace_\w+|__cond_resched)$")
LINE = re.compile(r"^\s*(.+)-(\d+)\s+(?:\(.{7}\)\s+)?\[(\d+)\]\s+(\S+)\s+([\d.]+): (.*)$")
SWITCH = re.compile(r"prev_pid=(\d+) .*prev_state=(\S+) ==> .*next_pid=(\d+)")


class Switches:
    """Between enter and exit every switch and wake-up of `thread` is in the buffer; `waits()` reads it afterwards."""

    def __init__(self, thread, name="waits"):
        self.thread, self.directory = thread, TRACING / "instances" / name

    def __enter__(self):
        self.directory.mkdir(exist_ok=True)
        self.write("tracing_on", "0")
        self.write("trace_clock", "mono")
        self.write("buffer_size_kb", "8192")
        thread, events = self.thread, "events/sched"
        self.write(f"{events}/sched_switch/filter", f"prev_pid=={thread} || next_pid=={thread}")
        self.write(f"{events}/sched_switch/trigger", f"stacktrace if prev_pid=={thread} && prev_state>0")
        self.write(f"{events}/sched_waking/filter", f"pid=={thread}")
        for event in ("sched_switch", "sched_waking"):
            self.write(f"{events}/{event}/enable", "1")
        self.write("tracing_on", "1")
        return self

    def __exit__(self, *_):
        self.write("tracing_on", "0")
        for event in ("sched_switch", "sched_waking"):
            self.write(f"events/sched/{event}/enable", "0")
        self.write("events/sched/sched_switch/trigger", "!stacktrace")
        # One CPU at a time: the records are put in order here.
        records, self.lost, self.sizes = [], 0, {}
        for cpu in sorted((self.directory / "per_cpu").iterdir()):
            text = (cpu / "trace").read_text(errors="replace")
            found, lost = parse(text)
            records += found
            statistics = dict(line.split(": ", 1) for line in (cpu / "stats").read_text().splitlines())
            self.lost += lost + int(statistics["overrun"]) + int(statistics["dropped events"])
            if found:
                self.sizes[cpu.name] = len(found)
        order = {"out": 0, "stack": 1, "waking": 2, "in": 3}
        for record in records:
            if record["kind"] == "switch":
                record["kind"] = "out" if record["from"] == self.thread else "in"
        self.records = sorted(records, key=lambda record: (record["at"], order[record["kind"]]))
        self.directory.rmdir()

    def write(self, file, text):
        (self.directory / file).write_text(text)

    def waits(self, begun, ended):
        """Waits that began between two moments of the monotonic clock: blocked from, woken and running again at (seconds),
        stack, waker."""
        found, last = [], None
        for record in self.records:
            if not begun <= record["at"] <= ended:
                continue
            kind = record["kind"]
            if kind == "out":
                last = None
                if not record["state"].startswith("R"):
                    last = {"blocked": record["at"], "woken": None, "running": None, "stack": [], "waker": None}
                    found.append(last)
            elif last is None:
                continue
            elif kind == "stack":
                # It is written right after the switch, which another CPU's wake-up may overtake.
                last["stack"] = last["stack"] or record["stack"]
            elif kind == "waking" and last["woken"] is None:
                last["woken"], last["waker"] = record["at"], record["waker"]
            elif kind == "in" and last["running"] is None:
                last["running"] = record["at"]
                last["woken"] = last["woken"] or record["at"]
        # On some CPUs the idle task's switches are not in the buffer: then the wake-up ends the wait.
        return [wait for wait in found if wait["woken"] is not None]


def parse(text):
    """Records in order, and how often the buffer lost some."""
    records, lost, stack = [], 0, None
    for line in text.splitlines():
        if line.startswith(" => "):
            if stack is not None:
                symbol = line[4:].split("+")[0].split(".")[0].strip()
                if not (not stack and SCHEDULER.match(symbol)):
                    stack.append(symbol)
            continue
        if "LOST" in line:
            lost += 1
        match = LINE.match(line)
        if not match:
            continue
        _, task, _, flags, at, rest = match.groups()
        at = float(at)
        if rest.startswith("<stack trace>"):
            stack = []
            records.append({"kind": "stack", "at": at, "stack": stack})
        elif rest.startswith("sched_waking:"):
            interrupt = flags[2] in "hHszZ" or task == "0"
            records.append({"kind": "waking", "at": at, "waker": "interrupt" if interrupt else int(task)})
        elif rest.startswith("sched_switch:") and (switch := SWITCH.search(rest)):
            records.append({"kind": "switch", "at": at, "from": int(switch[1]), "state": switch[2], "to": int(switch[3])})
    return records, lost


def by_stack(waits, names):
    """Blocked seconds by stack and waker, largest first; `names` tells whose threads wake."""
    sums = defaultdict(lambda: [0.0, 0])
    for wait in waits:
        row = sums[(tuple(wait["stack"]), names(wait["waker"]))]
        row[0] += wait["woken"] - wait["blocked"]
        row[1] += 1
    rows = [{"seconds": seconds, "waits": count, "waker": waker, "stack": list(stack)} for (stack, waker), (seconds, count) in sums.items()]
    return sorted(rows, key=lambda row: -row["seconds"])
