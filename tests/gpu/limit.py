"""Owns one tenant's way to its memory.max: what the agent said each second, and what it says of the kill.

Refuses to judge beyond its last line: warned half a minute ahead, counted, and told with the kill.
"""

import argparse
import json
import os
import re
import subprocess
import time
from pathlib import Path

from drive import CGROUPS, Agent, Workload, get, series_of

LIMIT = 2048 << 20
# 16 MiB each: a minute and a half to the limit, after what CUDA itself takes.
PAUSE_US = 900_000
NAME = "limit"
TENANT = f"systemd:wl-{NAME}.service"
LEAD = 30


def figure(page, name, **labels):
    of = (value for known, had, value in series_of(page) if known == name and labels.items() <= had.items())
    return next(of, None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    for name in ("build", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    group = CGROUPS / f"wl-{NAME}.service"
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(str(LIMIT))
    if (group / "memory.swap.max").exists():
        (group / "memory.swap.max").write_text("0")
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    release = os.uname().release.split("-")[0]
    lines = [f"{smi.stdout.splitlines()[0]}, kernel {release}, {time.strftime('%F')}; memory.max {LIMIT >> 20} MiB", ""]
    with Agent(options.agent, options.out / "agent-limit.log"):
        eater = Workload(NAME, [options.build / "contend", "eat", 0, 1 << 30, 1, PAUSE_US])
        eater.start()
        # What was there at its start is told of after half a minute.
        time.sleep(32)
        eater.process.stdin.write(b"run\n")
        eater.process.stdin.flush()
        begun, warned = time.monotonic(), None
        while eater.process.poll() is None and time.monotonic() - begun < 240:
            page, at = get("/metrics"), time.monotonic() - begun
            risks = [figure(page, "cotenant_memory_limit_risk_ratio", tenant=TENANT, horizon=one) for one in ("10s", "60s", "300s")]
            held = figure(page, "cotenant_memory_usage_bytes", tenant=TENANT)
            left = figure(page, "cotenant_memory_limit_time_seconds", tenant=TENANT)
            if warned is None and risks[1] is not None and (risks[1] >= 0.5 or risks[2] >= 0.35):
                warned = at
            if int(at) % 5 == 0:
                lines.append(f"{at:6.1f} s  held {held}  risk {risks}  full in {left}")
            time.sleep(1 - (time.monotonic() - begun) % 1)
        died, status = time.monotonic() - begun, eater.process.wait()
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        time.sleep(6)
        page = get("/metrics")
        incidents = json.loads(get("/api/v1/incidents"))["incidents"]
        counted = {
            (severity, outcome): figure(page, "cotenant_memory_limit_risk_warnings_total", severity=severity, outcome=outcome)
            for severity in ("warning", "critical")
            for outcome in ("exhausted", "cleared")
        }
        words = subprocess.run([options.agent, "explain"], capture_output=True, text=True).stdout
    kill = next((one for one in incidents if one["kind"] == "oom_kill"), None)
    told = (kill or {}).get("warnings", [])
    lead = died - warned if warned is not None else None
    lines += ["", f"warned at {warned} s, killed at {died:.1f} s (status {status}, {events})", f"counted: {counted}", f"the kill's incident: {json.dumps(told)}", "", words]
    good = lead is not None and lead >= LEAD and counted["warning", "exhausted"] == 1 and [one["memory"] for one in told] == ["limit"]
    lines.append(f"{'holds' if good else 'DOES NOT HOLD'}: warned {LEAD} s ahead and more, counted as come true, told with the kill")
    (options.out / "limit.txt").write_text("\n".join(re.sub(r"\s+$", "", line) for line in lines) + "\n")
    print("\n".join(lines))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
