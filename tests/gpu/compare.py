"""Owns the verdict: the agent's account beside the workloads', the frameworks' and the second witness's, to the byte.

Refuses tolerance: a difference is 0, or named with its bytes, or a problem.
"""

import json
import re
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

DEVICE_KINDS = {"device", "pool", "vmm", "array"}
DEVICE_CALLS = {"cuMemAlloc", "cuMemAllocPitch", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemCreate"}
# Which file's calls are the framework allocator's own, and which of its figures is the ledger's counterpart.
FRAMEWORKS = {
    "torch": ({"libcudart.so.13", "libcudart.so.12"}, "reserved"),
    "torch-async": ({"libcudart.so.13", "libcudart.so.12"}, "used"),
    "torch-expandable": ({"libc10_cuda.so"}, "reserved"),
    "cupy": (None, "reserved"),
    "jax": ({"xla_cuda_plugin.so"}, "reserved"),
}
ERRORS = {1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 800: "CUDA_ERROR_NOT_PERMITTED"}
# Seen by the workload's caller, not by these probes' table: the runtime chooses the array call.
ARRAYS = {"cuArrayCreate", "cuArray3DCreate", "array"}


class Scrape:
    def __init__(self, scraped):
        self.metrics, self.status = scraped["metrics"], scraped["status"]

    def rows(self, name, **labels):
        return [(found, number) for series, found, number in self.metrics
                if series == name and all(found.get(key) == text for key, text in labels.items())]

    def by(self, name, key, **labels):
        sums = Counter()
        for found, number in self.rows(name, **labels):
            sums[found.get(key)] += int(number)
        return dict(sums)

    def total(self, name, **labels):
        return sum(number for _, number in self.rows(name, **labels))

    def live(self, tenant):
        return self.by("cotenant_gpu_memory_live_bytes", "memory_kind", tenant=tenant)

    def confidence(self, tenant):
        return next((found["confidence"] for found, number in
                     self.rows("cotenant_gpu_memory_confidence", tenant=tenant) if number), None)

    def nvml(self, tenant):
        return int(self.total("cotenant_gpu_memory_process_bytes", tenant=tenant))

    def residual(self, tenant):
        return {part: number for part, number in
                self.by("cotenant_gpu_memory_residual_bytes", "part", tenant=tenant).items() if number}


def nonzero(table):
    return {key: count for key, count in sorted(table.items()) if count}


class Report:
    def __init__(self, collected):
        self.collected, self.figures, self.problems, self.lines = collected, {}, [], []

    def say(self, *lines):
        self.lines += lines

    def table(self, head, rows):
        self.say("| " + " | ".join(head) + " |", "|" + "---|" * len(head))
        self.say(*("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) + " |" for row in rows), "")

    def problem(self, text):
        self.problems.append(text)

    def tenants(self):
        part = self.collected.get("all_at_once") or {}
        if "scrapes" not in part:
            return self.problem(f"all_at_once did not run: {part.get('failure')}")
        scrapes = {name: Scrape(scraped) for name, scraped in part["scrapes"].items()}
        witness = part["witness"]
        rows, figures = [], {}
        for workload in part["workloads"]:
            tenant, name = workload["tenant"], workload["name"]
            if workload["failure"] is not None:
                self.problem(f"{name} failed: {workload['failure'][-200:]}")
                continue
            for moment, truth in zip(("hold", "after_free"), workload["phases"]):
                scraped = scrapes[moment]
                live = scraped.live(tenant)
                ledger = sum(live.get(kind, 0) for kind in DEVICE_KINDS)
                named = {}
                if "live" in truth:
                    own = sum(truth["live"][kind] for kind in DEVICE_KINDS)
                    wrong = {kind: live.get(kind, 0) - truth["live"][kind] for kind in truth["live"]
                             if live.get(kind, 0) != truth["live"][kind]}
                    if wrong:
                        self.problem(f"{name}, {moment}: ledger minus truth by kind {wrong}")
                else:
                    own_files, figure = FRAMEWORKS[name]
                    own = truth[figure]
                    # What others in the process asked for; none of it is freed before the process ends.
                    for operation, caller, count in witness.get(str(workload["pid"]), {}).get("bytes", []):
                        if operation in DEVICE_CALLS and own_files and caller not in own_files:
                            named[caller] = named.get(caller, 0) + count
                unnamed = ledger - own - sum(named.values())
                if unnamed:
                    self.problem(f"{name}, {moment}: {unnamed} bytes that nobody names")
                nvml = scraped.nvml(tenant)
                rows.append((name, moment, own, ledger, ledger - own,
                             ", ".join(f"{caller} {count:,}" for caller, count in named.items()) or "", unnamed,
                             nvml, nvml - ledger, scraped.confidence(tenant)))
                figures.setdefault(name, {})[moment] = {
                    "truth": {key: found for key, found in truth.items() if key not in ("calls", "at", "pid")},
                    "ledger_by_kind": live, "ledger_device_bytes": ledger, "named": named, "unnamed": unnamed,
                    "nvml_process_bytes": nvml, "residual": scraped.residual(tenant),
                    "confidence": scraped.confidence(tenant),
                }
                if scraped.confidence(tenant) != "complete":
                    self.problem(f"{name}, {moment}: confidence {scraped.confidence(tenant)}, though the agent was first")
            left = nonzero(scrapes["after_exit"].live(tenant))
            if left:
                self.problem(f"{name}: live after exit {left}")
            figures[name] |= self.calls(workload, scrapes["after_free"], witness.get(str(workload["pid"])))
        self.figures["tenants"] = figures
        self.say("## Seven tenants on one GPU, held together", "",
                 "Truth: the program's own tally, or the framework's own figure (PyTorch reserved; used for cudaMallocAsync;",
                 "CuPy `total_bytes`; JAX `pool_bytes`). Ledger: live device bytes of the tenant as scraped. Named: bytes that",
                 "other libraries in the process asked for, by the file that made the call (second witness). Residual: NVML",
                 "process bytes minus ledger: context, modules, granularity.", "")
        self.table(("tenant", "moment", "truth", "ledger", "ledger − truth", "named", "unnamed", "NVML", "residual", "confidence"), rows)
        self.async_residual(figures)
        self.failures_table(figures)
        self.sums(scrapes)
        self.losses("seven tenants", scrapes)
        self.timing(part)
        unread = {operation for found in figures.values() for operation in found.get("unprobed", {})}
        self.figures["witness"] = {"lines": part["witness_lines"], "lost": part["witness_lost"], "refused": part["witness_refused"]}
        self.say(f"Second witness: {part['witness_lines']:,} records, {part['witness_lost']} lost; memory calls that the",
                 f"agent does not probe and that were made: {', '.join(sorted(unread)) or 'none'}.", "")

    def async_residual(self, figures):
        """cudaMallocAsync keeps freed bytes in its pool, which the ledger counts as free and NVML as used."""
        if not {"torch", "torch-async"} <= figures.keys():
            return
        rows = []
        for moment in ("hold", "after_free"):
            plain, pooled = (figures[name][moment] for name in ("torch", "torch-async"))
            residuals = [found["nvml_process_bytes"] - found["ledger_device_bytes"] for found in (plain, pooled)]
            kept = pooled["truth"]["reserved"] - pooled["truth"]["used"]
            rows.append((moment, residuals[1], residuals[0], kept, residuals[1] - residuals[0] - kept))
        self.figures["async_residual"] = rows
        self.say("The residual of torch-async, named:", "")
        self.table(("moment", "residual", "context and modules (torch's residual)", "kept in the pool (reserved − used)", "rest"), rows)

    def calls(self, workload, scraped, witness):
        """Operation counts: the agent's beside the workload's and the second witness's, up to the last hold."""
        tenant = workload["tenant"]
        mine = scraped.by("cotenant_gpu_memory_operations_total", "operation", tenant=tenant)
        failures = Counter()
        for found, number in scraped.rows("cotenant_gpu_memory_failures_total", tenant=tenant):
            failures[f"{found['operation']} {found['error_type']}"] += int(number)
        truth = workload["phases"][-1]
        wrong = {}
        if "calls" in truth:
            expected, refused = Counter(), Counter()
            for operation, code, count in truth["calls"]:
                expected["array" if operation in ARRAYS else operation] += count
                if code:
                    refused[f"{operation} {ERRORS.get(code, code)}"] += count
            seen = Counter()
            for operation, count in mine.items():
                seen["array" if operation in ARRAYS else operation] += count
            wrong = {operation: [seen[operation], count] for operation, count in expected.items() if seen[operation] != count}
            if refused != failures:
                self.problem(f"{workload['name']}: failures {dict(failures)}, truth {dict(refused)}")
        seen_too, refused_too, unprobed = Counter(), Counter(), {}
        for operation, code, _, count in (witness or {}).get("calls", []):
            if operation in mine or operation in DEVICE_CALLS:
                seen_too[operation] += count
                if code:
                    refused_too[f"{operation} {ERRORS.get(code, code)}"] += count
            else:
                unprobed[operation] = unprobed.get(operation, 0) + count
        # Exit comes after the scrape: the witness may have seen more of what frees, never of what allocates.
        for operation, count in seen_too.items():
            if operation in DEVICE_CALLS and mine.get(operation, 0) != count:
                wrong[operation] = [mine.get(operation, 0), count]
        if wrong:
            self.problem(f"{workload['name']}: calls, agent and truth: {wrong}")
        if refused_too != failures:
            self.problem(f"{workload['name']}: failures {dict(failures)}, second witness {dict(refused_too)}")
        # Calls that end a process are seen by the witness only, after the scrape.
        probed_at_exit = {"cuMemFree", "cuMemFreeHost", "cuMemUnmap", "cuMemRelease", "cuMemFreeAsync"}
        return {"operations": mine, "failures": dict(failures), "framework_ooms": truth.get("ooms"),
                "unprobed": {key: count for key, count in unprobed.items() if key not in probed_at_exit}}

    def failures_table(self, figures):
        self.say("## Failures", "", "Counted by the agent; the second witness counted the same unless a problem says so.", "")
        self.table(("tenant", "failed driver calls", "out-of-memory errors the framework raised"),
                   [(name, ", ".join(f"{key} × {count}" for key, count in sorted(found["failures"].items())) or "none",
                     "own tally" if found["framework_ooms"] is None else str(found["framework_ooms"]))
                    for name, found in figures.items() if "failures" in found])

    def sums(self, scrapes):
        """R2: used, reserved, attributed and unattributed add up."""
        rows = []
        for moment, scraped in scrapes.items():
            for found, unattributed in scraped.rows("cotenant_gpu_memory_unattributed_bytes"):
                card = found["hw_id"]
                used = scraped.total("hw_gpu_memory_usage_bytes", hw_id=card)
                reserved = scraped.total("cotenant_gpu_memory_reserved_bytes", hw_id=card)
                processes = scraped.total("cotenant_gpu_memory_process_bytes", hw_id=card)
                rows.append((moment, int(used), int(processes), int(unattributed), int(reserved),
                             int(used - processes - unattributed), int(used - processes - unattributed - reserved)))
        self.figures["device"] = rows
        self.say("## The GPU's balance", "")
        self.table(("moment", "used", "Σ process", "unattributed", "reserved", "used − Σ − unattributed", "… − reserved"), rows)

    def losses(self, where, scrapes):
        last = list(scrapes.values())[-1].status
        for moment, scraped in scrapes.items():
            lost = nonzero(scraped.status["losses"])
            if lost:
                self.problem(f"{where}, {moment}: losses {lost}")
        self.figures.setdefault("losses", {})[where] = nonzero(last["losses"])
        self.figures.setdefault("notes", {})[where] = nonzero(last["notes"])
        self.say(f"Losses ({where}): {nonzero(last['losses']) or 'none'}. Notes: {nonzero(last['notes'])}.", "")

    def timing(self, part):
        attached = re.search(r"^(\S+Z).*library probed.*symbols=(\d+) missing=(\d+) failed=(\d+) milliseconds=(\d+)", part["log"], re.M)
        if not attached:
            return self.problem("no library was probed")
        at = datetime.fromisoformat(attached[1]).timestamp() - part["clock_offset"]
        rows = []
        for workload in part["workloads"]:
            first = part["witness"].get(str(workload["pid"]), {}).get("first", {})
            if first and workload["failure"] is None:
                allocation = min(found for operation, found in first.items() if operation in DEVICE_CALLS)
                rows.append((workload["name"], round((allocation - workload["begun"]) * 1000),
                             round((at - workload["begun"]) * 1000) if not rows else "attached before"))
        self.figures["attach"] = {"symbols": int(attached[2]), "missing": int(attached[3]), "failed": int(attached[4]),
                                  "milliseconds": int(attached[5]), "agent_ready_seconds": part["agent_ready_seconds"],
                                  "agent_stop_seconds": part["agent_stop_seconds"], "from_process_start_ms": rows}
        self.say("## Attach", "", f"{attached[2]} symbols in {attached[5]} ms, {attached[3]} missing, {attached[4]} failed; the agent served",
                 f"{part['agent_ready_seconds']:.2f} s after its start and was gone {part['agent_stop_seconds']:.1f} s after SIGTERM.", "")
        self.table(("tenant", "process start to first allocation, ms", "process start to probes attached, ms"), rows)

    def late(self):
        part = self.collected.get("joined_late") or {}
        if "scrapes" not in part:
            return self.problem(f"joined_late did not run: {part.get('failure')}")
        workload, rows = part["workloads"][0], []
        tenant = workload["tenant"]
        scrapes = {name: Scrape(scraped) for name, scraped in part["scrapes"].items()}
        for moment, truth in zip(("untouched", "touched"), workload["phases"]):
            scraped = scrapes[moment]
            ledger, nvml = sum(scraped.live(tenant).values()), scraped.nvml(tenant)
            rows.append((moment, truth["live"]["device"], ledger, nvml, str(scraped.residual(tenant)), scraped.confidence(tenant)))
            if scraped.confidence(tenant) != "joined_late":
                self.problem(f"late, {moment}: confidence {scraped.confidence(tenant)}, though it allocated before the agent came")
        self.figures["joined_late"] = rows
        self.say("## An agent that joins late", "",
                 "150 MiB were allocated before the agent started; then 50 MiB of them are freed and 32 MiB are allocated.", "")
        self.table(("moment", "truth", "ledger", "NVML", "residual", "confidence"), rows)
        self.losses("joined late", scrapes)

    def pool(self):
        part = self.collected.get("pool_overhead") or {}
        if "scrapes" not in part:
            return
        scraped, rows = Scrape(part["scrapes"]["hold"]), []
        for workload in part["workloads"]:
            if workload["failure"] is not None:
                self.problem(f"{workload['name']} failed: {workload['failure'][-200:]}")
                continue
            tenant, truth = workload["tenant"], workload["phases"][0]
            live = scraped.live(tenant)
            ledger, nvml = sum(live.get(kind, 0) for kind in DEVICE_KINDS), scraped.nvml(tenant)
            reserved = truth.get("pool_reserved", truth.get("reserved", -1))
            kept = reserved - live["pool"] if live.get("pool") else 0
            rows.append((workload["name"], ledger, kept, nvml, nvml - ledger, nvml - ledger - kept))
        self.figures["pool_overhead"] = rows
        self.say("## What a stream-ordered pool costs beyond its bytes", "",
                 "96 MiB by `cuMemAlloc` (hold), by `cuMemAllocAsync` (pool), and the same after a refused request of 400 GiB (refused);",
                 "PyTorch as above, without the refused request.", "")
        self.table(("program", "ledger", "kept in the pool", "NVML", "residual", "residual − kept"), rows)

    def residual(self):
        part = self.collected.get("residual") or {}
        if "runs" not in part:
            return
        rows = [(run["backend"], step["step"], step["nvml"], step["beyond_reserved"], step["more"])
                for run in part["runs"] for step in run["steps"]]
        self.figures["residual"] = part["runs"]
        self.say("## What NVML counts beyond PyTorch's allocator", "")
        self.table(("backend", "after", "NVML", "beyond reserved", "of which by this step"), rows)

    def cost(self):
        part = self.collected.get("cost") or {}
        if "runs" not in part:
            return self.problem(f"cost did not run: {part.get('failure')}")
        rows, base = [], {}
        for variant in dict.fromkeys(run["variant"] for run in part["runs"]):
            runs = [run for run in part["runs"] if run["variant"] == variant]
            best = {key: min(run[key]["mean_ns"] for run in runs) for key in ("alloc_free", "alloc_free_async", "getppid")}
            tail = min(run["alloc_free"]["p99_ns"] for run in runs)
            base = base or best
            rows.append((variant, *(f"{best[key]:,.0f} ({best[key] / base[key]:.2f}×)" for key in best), f"{tail:,.0f}",
                         f"{runs[-1].get('agent_cpu_seconds', 0) / runs[-1].get('wall_seconds', 1) * 100:.1f} %",
                         f"{runs[-1].get('agent_resident_bytes', 0) / 2**20:.0f}"))
            for run in runs:
                if run.get("losses"):
                    self.problem(f"cost, {variant}: losses {run['losses']}")
        self.figures["cost"] = part["runs"]
        self.say("## Cost", "", "Nanoseconds; the better of the runs of each variant, in turn. Pairs of 2 MiB on one core; ratio to off.", "")
        self.table(("agent", "cuMemAlloc + cuMemFree", "cuMemAllocAsync + cuMemFreeAsync", "getppid", "alloc + free p99",
                    "agent CPU during the loop", "agent RSS, MiB"), rows)

    def several(self):
        part = self.collected.get("several_gpus")
        if not part:
            self.say("## Several GPUs", "", "Not run: this host has one GPU.", "")
            return
        if "scrapes" not in part:
            return self.problem(f"several_gpus did not run: {part.get('failure')}")
        scraped, rows = Scrape(part["scrapes"]["hold"]), []
        for workload in part["workloads"]:
            index = int(workload["environment"]["CUDA_VISIBLE_DEVICES"].split(",")[0])
            found = scraped.by("cotenant_gpu_memory_live_bytes", "hw_id", tenant=workload["tenant"])
            expected = {part["gpus"][index]: workload["phases"][0]["live"]["device"]}
            rows.append((workload["name"], workload["environment"]["CUDA_VISIBLE_DEVICES"], str(found), found == expected))
            if found != expected:
                self.problem(f"{workload['name']}: {found}, expected {expected}")
        self.figures["several_gpus"] = rows
        self.say("## Several GPUs", "")
        self.table(("tenant", "CUDA_VISIBLE_DEVICES", "live bytes by UUID", "as expected"), rows)

    def write(self, out):
        host = self.collected["host"]
        name, driver = (part.strip() for part in host["gpus"][0].split(",")[1:3])
        what = "ledger" if len(host["gpus"]) == 1 else f"ledger-x{len(host['gpus'])}"
        features = next((part["scrapes"][moment]["status"]["features"] for part in self.collected.values()
                         if isinstance(part, dict) and part.get("scrapes") for moment in part["scrapes"]), [])
        boundary = next((row["reason"] for row in features if row["name"] == "gpu_boundary"), "unknown")
        parts = {"all_at_once": self.tenants, "joined_late": self.late, "pool_overhead": self.pool, "residual": self.residual,
                 "cost": self.cost, "several_gpus": self.several}
        for part, tell in parts.items():
            if part in self.collected:
                tell()
        exit_field = re.search(r"group_dead;\s+offset:(\d+)", host["sched_process_exit"])
        head = [
            f"# The ledger on a real GPU, {host['date']}", "",
            "Made by `tests/gpu/compare.py` from what `tests/gpu/run.sh` collected on an H200 host. Every figure is of that run.", "",
            f"- {len(host['gpus'])} × {name}, driver {driver}, kernel {host['kernel']}, glibc {host['glibc']}; {host['agent']}.",
            f"- torch, cupy, jax: {host['versions']}. libcuda: {Path(host['library']).name}.",
            f"- GPU boundary chosen: {boundary}. kprobes: {'yes' if host['kprobe_pmu'] else 'no'}; `uvm_unlocked_ioctl_entry` in kallsyms: "
            f"{'yes' if host['uvm_unlocked_ioctl_entry'] else 'no'}.",
            f"- `sched_process_exit` has `group_dead`{' at offset ' + exit_field[1] if exit_field else ': no'}.",
            f"- Features: {', '.join(row['name'] + ' ' + row['state'] for row in features)}.", "",
            "## Problems", "", *([f"- {text}" for text in self.problems] or ["None."]), "",
        ]
        stem = out / f"{host['date']}-h200-{what}"
        stem.with_suffix(".json").write_text(json.dumps(
            {"host": host, "features": features, "problems": self.problems, **self.figures}, indent=1) + "\n")
        stem.with_suffix(".md").write_text("\n".join(head + self.lines).rstrip() + "\n")
        print("\n".join(head))
        return stem


if __name__ == "__main__":
    report = Report(json.loads(Path(sys.argv[1]).read_text()))
    print(report.write(Path(sys.argv[2])))
