"""Owns the verdict on the contention scenarios: what the agent explained, whom it blamed, what it cost; one page, one JSON.

Refuses to smooth: a figure beyond its bound is a problem by name, a repeated run is shown with its spread.

  verdict.py COLLECTED.json OUT_DIRECTORY NAME [COLLECTED.json of another run ...]
"""

import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

TABLE = next(path for parent in Path(__file__).resolve().parents if (path := parent / "agent/model/src/wait.rs").exists())
BLAME = "cotenant_gpu_blame_seconds_total"
# Who did it, by scenario and victim. `light` is the innocent third.
CULPRITS = {
    "pair": {"one": "two", "two": "one"},
    "beside_hog": {"victim": "hog", "light": "hog", "newcomer": "hog"},
    "threads": {"threads": "threads"},
    "poller": {"polled": "poller"},
    "emptied": {"emptied": "hog"},
    "cached": {"cached": "hog"},
    "mps": {"client": "hog"},
    "two_gpus": {"gpu0": "gpu1", "gpu1": "gpu0"},
    "other_gpu_hog": {"near": "farhog", "light": "farhog"},
}
SITUATIONS = {
    "pair": "two processes, same GPU",
    "beside_hog": "beside a neighbour that allocates and frees 30 GiB",
    "threads": "four threads of one process",
    "poller": "beside a process that asks NVML for process lists",
    "emptied": "PyTorch inference, empty_cache each step, beside the 30 GiB neighbour",
    "cached": "PyTorch inference, cache kept, beside the 30 GiB neighbour",
    "mps": "MPS client beside a 30 GiB MPS client",
    "two_gpus": "two processes, different GPUs",
    "other_gpu_hog": "beside a 30 GiB neighbour on the other GPU",
}
EXPLAINED, GUILTY, INNOCENT, OWN = 0.90, 0.95, 0.01, 0.001


def classes():
    rows = re.findall(r'^\s*\("([^"]+)", WaitClass::(\w+)\)', TABLE.read_text(), re.M)
    return [(re.compile(re.escape(pattern).replace(r"\*", ".*") + "$"), re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()) for pattern, name in rows]


def class_of(stack, rules):
    return next((name for pattern, name in rules if any(pattern.match(frame) for frame in stack)), "other")


def total(rows, name, **labels):
    return sum(value for series, found, value in rows if series == name and all(found.get(k) == v for k, v in labels.items()))


def by(rows, name, keys, **labels):
    sums = Counter()
    for series, found, value in rows:
        if series == name and all(found.get(k) == v for k, v in labels.items()):
            sums[tuple(found.get(key, "") for key in keys)] += value
    return sums


def change(before, after):
    return {key: value - before.get(key, 0) for key, value in after.items() if value - before.get(key, 0) > 1e-9}


def short(tenant):
    if tenant == "system:cotenant":
        return "agent"
    if tenant == "system:mps-server":
        return "mps"
    return re.sub(r"^systemd:wl-(.+)\.service$", r"\1", tenant)


class Page:
    def __init__(self):
        self.lines, self.problems, self.figures = [], [], {}

    def say(self, *lines):
        self.lines += lines

    def table(self, head, rows):
        self.say("| " + " | ".join(head) + " |", "|" + "---|" * len(head))
        self.say(*("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), "")


def us(nanoseconds):
    return f"{nanoseconds / 1e3:,.0f}"


def percent(share):
    return "" if share is None else f"{100 * share:.1f} %"


def victims(page, collected):
    """Latency, inflation, what of it the agent saw, and whom it blamed."""
    rows, blames = [], []
    for scenario, guilty in CULPRITS.items():
        part = collected.get(scenario) or {}
        if "before" not in part:
            if part.get("failure"):
                page.problems.append(f"{scenario}: {part['failure']}")
            continue
        for workload in part["workloads"]:
            name, runs = workload["name"], workload["runs"]
            if name not in guilty or "together" not in runs or not runs["together"]["count"]:
                continue
            tenant, alone, beside = workload["tenant"], runs["solo"], runs["together"]
            mean = alone["sum_ns"] / alone["count"]
            if "solo again" in runs and runs["solo again"]["count"]:
                again = runs["solo again"]["sum_ns"] / runs["solo again"]["count"]
                drift, mean = again / mean - 1, (mean + again) / 2
            else:
                drift = None
            grew = {series: total(part["after"], series, tenant=tenant) - total(part["before"], series, tenant=tenant)
                    for series in ("cotenant_gpu_driver_wait_seconds_total", "cotenant_gpu_contention_excess_seconds_total")}
            blocked, excess = grew.values()
            inflation = (beside["sum_ns"] - beside["count"] * mean) / 1e9
            judged = inflation > 0.1 * beside["sum_ns"] / 1e9 and scenario != "threads"
            explained = (blocked + excess) / inflation if judged else None
            page.figures[f"{scenario}/{name}"] = figures = {
                "alone": {key: alone[key] for key in ("count", "p50_ns", "p99_ns", "max_ns", "sum_ns")},
                "beside": {key: beside[key] for key in ("count", "p50_ns", "p99_ns", "max_ns", "sum_ns")},
                "drift": drift, "inflation_seconds": inflation, "blocked_seconds": blocked, "excess_seconds": excess, "explained": explained,
            }
            rows.append([SITUATIONS[scenario], name, f"{us(alone['p50_ns'])} / {us(alone['p99_ns'])} / {us(alone['max_ns'])}",
                         f"{us(beside['p50_ns'])} / {us(beside['p99_ns'])} / {us(beside['max_ns'])}",
                         percent(drift), f"{inflation:.3f}", f"{blocked:.3f}", f"{excess:.3f}", percent(explained)])
            if explained is not None and explained < EXPLAINED:
                page.problems.append(f"{scenario}: {percent(explained)} of {name}'s inflation is explained, not {percent(EXPLAINED)}")
            edges = change(by(part["before"], BLAME, ("culprit", "wait_class"), victim=tenant), by(part["after"], BLAME, ("culprit", "wait_class"), victim=tenant))
            blames.append(blame(page, scenario, name, guilty[name], edges, figures))
    page.say("## Victims", "",
             "Each ran alone for 2 s, then beside its neighbours; same process, its main thread on one CPU (not the four threads), agent on. Pairs of",
             "`cuMemAlloc` + `cuMemFree` of 2 MiB (light: 1 MiB each 100 ms), or inference steps. p50 / p99 / max in µs. Drift: how the mean alone changed by the end of the",
             "scenario, when each ran alone again. Inflation: total time − calls × mean alone, of both times.",
             "Explained: (blocked + excess) / inflation; not computed where the inflation is below a tenth of the time.", "")
    page.table(["situation", "victim", "alone", "beside", "drift", "inflation s", "blocked s", "excess s", "explained"], rows)
    page.say("## Blame", "", "Shares of the victim's blocked time in the same run. Agent: this agent's own NVML polling, every 5 s.", "")
    page.table(["situation", "victim", "blocked s", "true culprit", "light", "agent", "unknown", "device, kernel", "others", "classes"],
               [row for row in blames if row])


def blame(page, scenario, name, guilty, edges, figures):
    whole = sum(edges.values())
    if whole < 1e-4:
        return None
    culprits, kinds = Counter(), Counter()
    for (culprit, kind), seconds in edges.items():
        culprits[short(culprit)] += seconds / whole
        kinds[kind] += seconds / whole
    figures["culprits"], figures["classes"] = dict(culprits), dict(kinds)
    innocent = culprits["light"] if name != "light" else 0
    if culprits[guilty] < GUILTY:
        page.problems.append(f"{scenario}: {percent(culprits[guilty])} of {name}'s blocked time is on {guilty}, not {percent(GUILTY)}")
    if innocent > INNOCENT:
        page.problems.append(f"{scenario}: {percent(innocent)} of {name}'s blocked time is on the innocent third")
    if culprits["agent"] > OWN:
        page.problems.append(f"{scenario}: {percent(culprits['agent'])} of {name}'s blocked time ({whole * culprits['agent'] * 1e3:.1f} ms) is on the agent's NVML polling, more than {percent(OWN)}")
    known = {guilty, "light", "agent", "unknown", "device", "kernel"}
    rest = ", ".join(f"{who} {percent(share)}" for who, share in culprits.most_common() if who not in known)
    return [SITUATIONS[scenario], name, f"{whole:.3f}", f"{guilty} {percent(culprits[guilty])}", percent(innocent), percent(culprits["agent"]),
            percent(culprits["unknown"]), percent(culprits["device"] + culprits["kernel"]), rest,
            ", ".join(f"{kind} {percent(share)}" for kind, share in kinds.most_common() if share > 0.0005)]


def witness(page, collected):
    rules, rows, stacks, tails = classes(), [], Counter(), []
    for scenario in CULPRITS:
        part = collected.get(scenario) or {}
        if "witness" not in part:
            continue
        seen = part["witness"]
        victim = next(w for w in part["workloads"] if w["name"] == part["victim"])
        agent = change(by(part["after"], "cotenant_gpu_driver_wait_seconds_total", ("wait_class",), tenant=victim["tenant"]),
                       by(part["after_traced"], "cotenant_gpu_driver_wait_seconds_total", ("wait_class",), tenant=victim["tenant"]))
        wakers, kinds = Counter(), Counter()
        for row in seen["stacks"]:
            kind = class_of(row["stack"], rules)
            kinds[kind] += row["seconds"]
            wakers[row["waker"] or "nobody seen"] += row["seconds"]
            stacks[(kind, frames(row["stack"]))] += row["seconds"]
        delay = seen["woken_until_running_seconds"] / max(1, seen.get("woken_until_running_waits", 0)) * 1e6
        if scenario != "threads":
            whole = sum(wakers.values()) or 1
            rows.append([SITUATIONS[scenario], seen["waits"], f"{seen['blocked_seconds']:.3f}", f"{sum(agent.values()):.3f}",
                         ", ".join(f"{who} {percent(time / whole)}" for who, time in wakers.most_common(3)),
                         ", ".join(f"{kind} {time:.3f}" for kind, time in kinds.most_common()),
                         ", ".join(f"{kind[0]} {time:.3f}" for kind, time in sorted(agent.items(), key=lambda pair: -pair[1])), f"{delay:.1f}"])
        beyond = [pair for pair in seen["slowest"] if pair[0] > victim["runs"]["solo"]["p99_ns"]]
        tail = beyond[: max(20, victim["runs"]["traced"]["count"] // 100)]
        if tail and scenario != "threads":
            tails.append([SITUATIONS[scenario], len(tail), us(min(took for took, _ in tail)), percent(sum(b for _, b in tail) / sum(t for t, _ in tail))])
        for row in (part.get("arrival") or {}).get("stacks", []):
            stacks[(class_of(row["stack"], rules), frames(row["stack"]) + " (context creation)")] += row["seconds"]
    page.say("## A second witness", "",
             "The kernel's own `sched_switch` and `sched_waking` of the victim's main thread for 2 s, with its stack at each blocking, from",
             "tracefs; the victim is on CPU 0 meanwhile. Agent: its figures for the same 2 s. Delay: from waking to running, a wait.", "")
    page.table(["situation", "waits", "blocked s", "agent: blocked s", "wakers", "classes by the table, s", "agent: classes, s", "delay µs"], rows)
    page.say("Its slowest calls in that run (a hundredth, 20 at least, each above its p99 alone): how much of them the second witness saw",
             "blocked. The rest is spinning and the work itself.", "")
    page.table(["situation", "calls", "each at least, µs", "of their time blocked"], tails)
    page.say("Stacks by blocked time, innermost first, with the class that `agent/model/src/wait.rs` gives them:", "")
    page.table(["class", "seconds", "stack"], [[kind, f"{time:.4f}", stack] for (kind, stack), time in stacks.most_common(14)])
    loose = [[kind, f"{time:.4f}", stack] for (kind, stack), time in stacks.most_common() if kind in ("other", "device")][:14]
    page.say("Unclassified ones (`other`, `device`) among the witness's:", "")
    page.table(["class", "seconds", "stack"], loose) if loose else page.say("None.", "")
    unclassified = Counter()
    for scenario in CULPRITS:
        part = collected.get(scenario) or {}
        rows = part.get("after_newcomer") or part.get("after_traced") or []
        for kind in ("other", "device"):
            for (victim, culprit), seconds in by(rows, BLAME, ("victim", "culprit"), wait_class=kind).items():
                unclassified[(scenario, short(victim), short(culprit), kind)] += seconds
    page.say("What the agent itself left unclassified over a whole scenario, context creation included, from 0.5 ms on:", "")
    page.table(["scenario", "victim", "culprit", "class", "seconds"],
               [[*key, f"{seconds:.4f}"] for key, seconds in unclassified.most_common() if seconds >= 5e-4])


def frames(stack):
    noise = re.compile(r"(do_syscall_64|entry_SYSCALL_64\w*|x64_sys_call|__x64_sys_\w+|\w+WithSecInfo(Tls)?|schedule_\w+|uvm_unlocked_ioctl_entry|os_acquire_\w+|portSync\w+)$")
    return " ← ".join([frame for frame in stack if not noise.match(frame)][:11])


def newcomer(page, collected):
    rows = []
    for scenario, name in (("beside_hog", "newcomer"), ("mps", "late")):
        part = collected.get(scenario) or {}
        workload = next((w for w in part.get("workloads", []) if w["name"] == name and w["start"]), None)
        if not workload:
            continue
        alone = next(w for w in part["workloads"] if w["name"] == part["victim"])["start"]
        edges = by(part["after_newcomer"], BLAME, ("culprit", "wait_class"), victim=workload["tenant"])
        whole = sum(edges.values()) or 1
        rows.append([SITUATIONS[scenario], f"{alone['context_ns'] / 1e6:,.0f}", f"{workload['start']['context_ns'] / 1e6:,.0f}", f"{whole:.3f}",
                     ", ".join(f"{short(culprit)} {kind} {percent(seconds / whole)}" for (culprit, kind), seconds in edges.most_common(5))])
        page.figures[f"{scenario}/{name}"] = {"alone_ns": alone["context_ns"], "beside_ns": workload["start"]["context_ns"], "blocked_seconds": whole,
                                              "edges": {f"{short(c)} {k}": s for (c, k), s in edges.items()}}
    if rows:
        page.say("## A newcomer", "", "`cuDevicePrimaryCtxRetain` of a process that starts while the others run.", "")
        page.table(["situation", "alone ms", "beside ms", "blocked s", "blame"], rows)


def kills(page, collected):
    part = collected.get("kills")
    if not part or "rows" not in part:
        return
    page.say("## Kills at memory.max", "", "Each in a cgroup of its own with `memory.max` (no swap), holding 1 GiB of GPU memory; the last has no CUDA and is",
             "dead at once. Truth: the exit status, `oom:mark_victim`, the kernel log and `memory.events`.", "")
    rows = []
    series = any(name.startswith("cotenant_oom") for name, _, _ in part["after"])
    for row in part["rows"]:
        marked = sum(f"pid={row['pid']} " in line for line in part["mark_victim"])
        logged = next((re.search(r"oom_memcg=([^,]+)", line)[1] for line in part["kernel_log"] if f"pid={row['pid']}," in line), None)
        told = int(total(part["after"], "cotenant_oom_kills_total", tenant=row["tenant"])) if series else ""
        page.figures[f"kills/{short(row['tenant'])}"] = {**row, "marked": marked, "logged": logged, "agent": told}
        rows.append([short(row["tenant"]), f"{row['limit'] >> 20:,}", f"{row['seconds_of_life']:.3f}", row["signal"], marked, logged,
                     row["memory.events"]["oom_kill"], told])
        if row["signal"] != "SIGKILL" or marked != 1 or row["memory.events"]["oom_kill"] != "1":
            page.problems.append(f"{row['tenant']}: the kill is not what the kernel's three accounts say")
    page.table(["tenant", "limit MiB", "lived s", "ended by", "mark_victim", "log: limit of", "memory.events oom_kill", "agent"], rows)
    if series and sum(row[-1] for row in rows) != len(rows):
        page.problems.append(f"kills: the agent counted {sum(row[-1] for row in rows)} of {len(rows)}")
    if not series:
        page.say("This build has no `cotenant_oom_kills_total` yet: the last column is to come.", "")


def faults(page, collected):
    part = collected.get("faults")
    if not part or "rows" not in part:
        return
    page.say("## Faults", "", "A kernel writes to an address that its process does not have: Xid 31. Truth: CUDA's return code, the tracepoint `nvidia_dev_xid` and",
             "the kernel's log. Sources: how often each told the agent, all faults together.", "")
    told = {source: int(seen) for (source,), seen in by(part["after"], "cotenant_gpu_xid_reports_total", ("source",)).items()}
    logged = [re.search(r"Xid.*?: (\d+)", line) for line in part["kernel_log"]]
    counted = by(part["after"], "cotenant_gpu_xid_errors_total", ("xid",))
    rows = []
    for row in part["rows"]:
        known = [xid for xid in part["incidents"]["incidents"] if xid["kind"] in ("xid", "xid_echo") and row["tenant"] in json.dumps(xid)]
        rows.append([short(row["tenant"]), row["codes"]["ended"], sum(f"pid={row['pid']}," in line for line in part["kernel_log"]), len(known)])
        if len(known) != 1:
            page.problems.append(f"faults: {len(known)} incidents name {short(row['tenant'])}")
    page.table(["tenant", "CUDA's code", "log lines that name its pid", "incidents that name it"], rows)
    page.say(f"Kernel log: {len(part['kernel_log'])} lines, codes {', '.join(sorted({m[1] for m in logged if m}))}. Tracepoint (tracefs): {len(part['tracepoint'])}. "
             f"Agent: {', '.join(f'{code} {int(seen)} times' for (code,), seen in counted.items())}; told by {', '.join(f'{s} {n}' for s, n in told.items())}.", "")
    page.figures["faults"] = {"rows": part["rows"], "sources": told, "counted": {code: seen for (code,), seen in counted.items()}}


def middle(values):
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def cost(page, collected):
    part = collected.get("cost")
    if not part or "runs" not in part:
        return
    variants = list(dict.fromkeys(run["variant"] for run in part["runs"]))
    measures = {
        "cuMemAlloc + cuMemFree 2 MiB, p50": lambda run: run["latency"]["alloc_free"]["p50_ns"],
        "cuMemAllocAsync + cuMemFreeAsync, p50": lambda run: run["latency"]["alloc_free_async"]["p50_ns"],
        "getppid, mean": lambda run: run["latency"]["getppid"]["mean_ns"],
    }
    for moment in ("idle", "call in flight", "idle again"):
        for cores in ("one core", "two cores", "unpinned"):
            measures[f"a context switch, {cores}, {moment}"] = lambda run, moment=moment, cores=cores: run[moment][cores]
    rows = []
    for name, read in measures.items():
        values = {variant: [read(run) for run in part["runs"] if run["variant"] == variant] for variant in variants}
        page.figures[f"cost/{name}"] = values
        rows.append([name, *(middle(values[variant]) for variant in variants)])
    page.say("## Cost", "", "Nanoseconds, median (lowest to highest) of repeats in turn: off, on, on without a part, off, … A context switch: half a round trip of",
             "a byte between two processes by pipes (`workloads/switch.c`). Call in flight: another process allocates and frees 30 GiB all the time.", "")
    page.table(["", *variants], rows)
    page.say("The kernel's own statistics (`kernel.bpf_stats_enabled`, on for this alone; two clock reads a run are in the figures):", "")
    table = []
    for moment, programs in part["programs"].items():
        page.figures[f"programs/{moment}"] = programs
        table += [[moment, name, f"{row['runs']:,}", row["ns_per_run"]] for name, row in sorted(programs.items(), key=lambda pair: -pair[1]["runs"]) if row["runs"] > 1000]
    page.table(["", "program", "runs", "ns a run"], table)


def losses(page, collected):
    rows = []
    for scenario in CULPRITS:
        part = collected.get(scenario) or {}
        if "after_traced" not in part:
            continue
        counted = {next(iter(labels.values())): int(value) for name, labels, value in part["after_traced"] if name.startswith(("cotenant_agent_losses", "cotenant_agent_notes"))}
        lost = {labels["reason"]: value for name, labels, value in part["after_traced"] if name.startswith("cotenant_agent_losses") and "reason" in labels}
        rows.append([scenario, ", ".join(f"{name} {count:,}" for name, count in counted.items() if name not in ("boundary_hits", "probe_hits")) or "none"])
        if lost:
            page.problems.append(f"{scenario}: lost {lost}")
    page.say("## Losses and notes", "")
    page.table(["scenario", "counted by the agent"], rows)


def repeats(page, others):
    """The same scenarios on other machines or at another time: what a figure above is worth."""
    rows = []
    for path in others:
        collected, scratch = json.loads(Path(path).read_text()), Page()
        victims(scratch, collected)
        for key, figures in scratch.figures.items():
            scenario, name = key.split("/")
            share = figures.get("culprits", {})
            rows.append([len(collected["host"]["gpus"]), SITUATIONS[scenario], name, us(figures["alone"]["p99_ns"]), us(figures["beside"]["p99_ns"]),
                         percent(figures["explained"]), percent(share.get(CULPRITS[scenario][name], 0)), percent(share.get("light", 0)) if name != "light" else "",
                         percent(share.get("agent", 0))])
        page.figures.setdefault("repeats", []).append(scratch.figures)
    if rows:
        page.say("## Other runs of the day", "", "On other machines of the kind, with one GPU or two.", "")
        page.table(["GPUs", "situation", "victim", "p99 alone µs", "p99 beside µs", "explained", "true culprit", "light", "agent"], rows)


def main():
    collected, out, name = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    host, page = collected["host"], Page()
    for section in (victims, newcomer, witness, kills, faults, cost, losses):
        section(page, collected)
    repeats(page, sys.argv[4:])
    head = [f"# Waits and blame on a real GPU, {host['date']}", "",
            "Made by `tests/gpu/verdict.py` from what `tests/gpu/contention.sh` collected on an H200 host.", "",
            f"- {len(host['gpus'])} × {host['gpus'][0].split(',')[1].strip()}, driver {host['gpus'][0].split(',')[2].strip()}, kernel {host['kernel']}, {host['cpus']} CPUs; {host['agent']}.",
            f"- torch, cupy, jax: {host['versions']}.", "", "## Problems", ""]
    head += [f"- {problem}." for problem in page.problems] or ["None."]
    (out / f"{host['date']}-{name}.md").write_text("\n".join([*head, "", *page.lines]).rstrip() + "\n")
    (out / f"{host['date']}-{name}.json").write_text(json.dumps({"host": host, "problems": page.problems, "figures": page.figures}, indent=1) + "\n")
    print("\n".join(page.problems) or "no problems")


if __name__ == "__main__":
    main()
