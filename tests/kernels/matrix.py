#!/usr/bin/env python3
"""Owns the matrix: which kernels, what each must show, and the page that says what it showed.
Refuses to call a kernel good that did not boot; one that its suite has no more is skipped, and the page says so.

    tests/kernels/matrix.py [NAME...]     all kernels, or those named, then the page
    tests/kernels/matrix.py --page        the page again, from what each kernel's last run left
"""

import dataclasses
import datetime
import json
import os
import subprocess
import sys

import machine
import module
import packages
from packages import SECURITY, Suite

# Seconds for one machine; a busy host of two processors emulates slowly.
LIMIT = int(os.environ.get("KERNELS_SECONDS", "1500"))
CHECK = 480
RESULTS = packages.ROOT / "tests" / "kernels" / "results"

# The chart's capabilities and no other, and CAP_SYS_ADMIN beside them where the kernel wants that for uprobes.
SET = ("rights", "where_uprobes_want_sys_admin_it_is_said_and_with_it_they_work")
# Debian's patch: above 2 it wants CAP_SYS_ADMIN.
PARANOID = "kernel/perf_event_paranoid"
BOUNDARY = ("boundary", "the_ioctl_names_the_gpu_that_the_context_cannot")
CHECKS = [
    BOUNDARY,
    ("lifecycle", "every_family_is_exact_in_life_and_death"),
    ("lifecycle", "c60_the_main_threads_exit_is_not_the_processs"),
    ("kills", "c97_the_victim_is_not_the_one_that_asked"),
    ("kills", "c101_a_group_kill_is_one_incident_with_every_victim"),
    ("waits", "c108_each_of_two_names_the_other_whatever_the_clock"),
    ("waits", "c108_two_equal_processes_wait_for_each_other"),
    SET,
]
# What an emulated processor may miss without the agent being at fault. Where it passes all the same, it has passed.
EMULATED = {
    "c108_two_equal_processes_wait_for_each_other": "each time stamp costs microseconds (the clock is the HPET) and timers are "
    "late, so that shares within 10 % of waits of 0.1 ms are beyond it; that each names the other is judged by its own row",
}
# What an agent on any kernel of the matrix at or above the floor does fully.
ACTIVE = [
    "tracefs", "allocation_probes", "process_life", "vmm_unmap", "waits", "lock_mode", "oom_kills", "mapping_watch",
    "kernel_log",
]  # fmt: skip
BTF = "/sys/kernel/btf"


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    suite: Suite
    wanted: object
    newest: bool = True
    floor: bool = False


def since(major, minor):
    def wanted(version):
        numbers = version.split(".")
        return (int(numbers[0]), int(numbers[1])) >= (major, minor)

    return wanted


BACKPORTS = Suite("trixie-backports")
ROWS = [
    Row("5.10", Suite("bullseye"), "5.10", floor=True),
    Row("6.1", Suite("bookworm"), "6.1"),
    Row("6.12", Suite("bookworm-security", SECURITY), "6.12"),
    Row("6.16", BACKPORTS, since(6, 16), newest=False),
    Row("newest", BACKPORTS, since(6, 17)),
    Row("arm64", Suite("bookworm", architecture="arm64"), "6.1"),
]


@dataclasses.dataclass
class Outcome:
    row: Row
    version: str = ""
    skipped: str = ""
    report: machine.Report = None
    # Why the module that stands in for nvidia-uvm is not there.
    moduleless: str = ""
    wrong: list = dataclasses.field(default_factory=list)


def plan(row, has_module):
    lines = (["module"] if has_module else []) + ["agent", "doctor"]
    if row.floor:
        return lines
    lines += [f"set {PARANOID} 2"]
    lines += [f"check {binary} {name} {CHECK}" for binary, name in CHECKS]
    # C74: without the kernel's types the probes go on, and waits alone are gone.
    binary, name = BOUNDARY
    return lines + [f"hide {BTF}", "agent", f"check {binary} {name} {CHECK}", f"bare {BTF}"]


def judge(row, report, has_module):
    """Pure: what is not as it has to be, in words."""
    wrong = []
    if not report.done:
        wrong.append("the machine did not come to its end" if report.release else "it did not boot")
    whole = report.features.get("", {})
    if not whole:
        return [*wrong, "the agent served no status"]
    if row.floor:
        state, reason = whole.get("allocation_probes", ("absent", ""))
        if state != "unsupported" or "5.15" not in reason:
            wrong.append(f"the floor is not told: allocation_probes is {state}: {reason}")
        return wrong
    wrong += [
        f"{name} is {whole.get(name, ('absent', ''))}" for name in ACTIVE if whole.get(name, ("", ""))[0] != "active"
    ]
    boundary = whole.get("gpu_boundary", ("absent", ""))
    if boundary[0] != "active" or ("kprobe" in boundary[1]) != has_module:
        wrong.append(f"gpu_boundary is {boundary}, {'with' if has_module else 'without'} the module")
    without = report.features.get(BTF, {})
    if without.get("waits", ("", ""))[0] != "unsupported" or without.get("allocation_probes", ("", ""))[0] != "active":
        wrong.append(f"without BTF: {without.get('waits')}, {without.get('allocation_probes')}")
    ran = [(check.binary, check.name) for check in report.checks]
    wrong += [f"{name} did not run" for binary, name in [*CHECKS, BOUNDARY] if (binary, name) not in ran]
    wrong += [
        f"{check.name} failed{' without BTF' if check.hidden else ''}"
        for check in report.checks
        if not check.ok and unjudged(check) is None
    ]
    return wrong


def unjudged(check):
    """Why a row that did not pass says nothing of the agent on this kernel; `None` where it does."""
    return EMULATED.get(check.name)


def word(check):
    """passed, failed, or not judged."""
    if check.ok:
        return "passed"
    why = unjudged(check)
    return f"**failed** (exit status {check.code})" if why is None else f"not judged under emulation: {why}"


def built():
    """The programs of this build: where they are, and the tests by name."""
    target = packages.ROOT / "target" / "debug"
    command = ["cargo", "test", "--locked", "-p", "cotenant-node", "--no-run", "--message-format=json"]
    names = sorted({binary for binary, _ in CHECKS})
    for name in names:
        command += ["--test", name]
    answer = subprocess.run(command, cwd=packages.ROOT, text=True, stdout=subprocess.PIPE, check=True)
    tests = {}
    for line in answer.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] in names:
            tests[message["target"]["name"]] = message["executable"]
    return target, tests


def try_kernel(row, shared):
    outcome = Outcome(row)
    try:
        kernel = packages.fetch(row.suite, row.wanted, row.newest)
        outcome.version = kernel.version
        ours, outcome.moduleless = module.build(kernel)
        image = kernel.image
    except packages.Gone as gone:
        outcome.skipped = str(gone)
        return outcome
    place = kept(row)
    # Also for a run that is ended from outside: its console is there.
    keep(outcome)
    print(f"{row.name}: Linux {kernel.version} ({image.name})", flush=True)
    outcome.report = machine.run(kernel, shared, ours, plan(row, ours is not None), place, LIMIT)
    outcome.wrong = judge(row, outcome.report, ours is not None)
    return outcome


def kept(row):
    place = packages.CACHE / "machines" / row.name
    place.mkdir(parents=True, exist_ok=True)
    return place


def keep(outcome):
    facts = {name: getattr(outcome, name) for name in ("version", "skipped", "moduleless")}
    (kept(outcome.row) / "outcome.json").write_text(json.dumps(facts))


def last(row):
    """What the last run of a kernel left; a kernel that was never run is skipped."""
    file = kept(row) / "outcome.json"
    if not file.exists():
        return Outcome(row, skipped="not run")
    outcome = Outcome(row, **json.loads(file.read_text()))
    if not outcome.skipped:
        outcome.report = machine.read_console(kept(row))
        outcome.wrong = judge(row, outcome.report, not outcome.moduleless)
    return outcome


def tell(outcome):
    name = outcome.row.name
    if outcome.skipped:
        print(f"{name}: SKIPPED: {outcome.skipped}")
        return
    report = outcome.report
    passed = sum(check.ok for check in report.checks)
    left = sum(not check.ok and unjudged(check) is not None for check in report.checks)
    print(
        f"{name}: {report.release}: booted in {report.booted:.0f} s, {passed} of {len(report.checks)} checks passed"
        f"{f', {left} not judged under emulation' if left else ''}, "
        f"{report.wall:.0f} s: {'ok' if not outcome.wrong else 'FAILED'}",
        flush=True,
    )
    if not outcome.wrong:
        return
    for wrong in outcome.wrong:
        print(f"  {wrong}")
    for check in report.checks:
        if not check.ok:
            print(f"  -- {check.name} (exit status {check.code}):")
            print("\n".join(f"     {line}" for line in check.said))
    print("  -- the agent by itself:")
    print("\n".join(f"     {line}" for line in report.agent_log), flush=True)


def page(outcomes):
    """The result page: what each kernel showed."""
    lines = [
        f"# Kernels, {datetime.date.today()}",
        "",
        "Written by `make test-kernels`: Debian's kernels for virtual machines, emulated (TCG), 2 processors, cgroup v2 alone,",
        "no ld.so.cache. Loaded: the verifier took every program that the kernel's version lets the agent ask for. Fired: the",
        "figures on `/metrics` equal the simulated driver's own record.",
        "",
        "| kernel | booted | loaded | UVM boundary | fired: ledger | fired: kills, group kill | fired: waits | the chart's rights | without BTF |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        lines.append("| " + " | ".join(cells(outcome)) + " |")
    lines += ["", "## What was degraded, and why", ""]
    for outcome in outcomes:
        if outcome.report is None:
            continue
        for hidden, features in sorted(outcome.report.features.items()):
            for name, (state, reason) in features.items():
                # There is no NVML beside the agent by itself.
                if state not in ("active", "disabled") and name != "nvml":
                    where = f" without {hidden}" if hidden else ""
                    lines.append(f"- {outcome.report.release}{where}: `{name}` {state}: {reason}")
        if outcome.moduleless:
            lines.append(f"- {outcome.report.release}: no kprobe was tried, there is no module for it: {outcome.moduleless}")
    lines += ["", "## Checks", ""]
    for outcome in outcomes:
        if outcome.report is None:
            continue
        for check in outcome.report.checks:
            where = f", without {check.hidden}" if check.hidden else ""
            told = f"{check.binary}::{check.name}: {word(check)}; {check.seconds:.0f} s"
            lines.append(f"- {outcome.report.release}{where}: {told}")
            # Of the rights: whether this kernel wants more than the set.
            lines += [f"  - {line}" for line in check.said if check.ok and line.startswith("this kernel")]
    wrong = [f"- {outcome.row.name}: {wrong}" for outcome in outcomes for wrong in outcome.wrong]
    if wrong:
        lines += ["", "## Not as it has to be", "", *wrong]
    return "\n".join(lines) + "\n"


def cells(outcome):
    if outcome.skipped:
        return [f"{outcome.row.name}: skipped, {outcome.skipped}", *[""] * 8]
    report = outcome.report
    whole = report.features.get("", {})
    loaded = [name for name in ACTIVE if whole.get(name, ("",))[0] == "active"]
    boundary = whole.get("gpu_boundary", ("", ""))

    def of(*binaries, hidden=""):
        found = [check for check in report.checks if check.binary in binaries and check.hidden == hidden]
        if not found:
            return "not run"
        counts = {"passed": 0, "failed": 0, "not judged": 0}
        for check in found:
            counts["passed" if check.ok else "failed" if unjudged(check) is None else "not judged"] += 1
        return ", ".join(f"{count} {said}" for said, count in counts.items() if count)

    return [
        report.release or outcome.version,
        f"{report.booted:.0f} s",
        "all" if len(loaded) == len(ACTIVE) else f"{len(loaded)} of {len(ACTIVE)} features",
        f"{boundary[1]}, {of('boundary')}" if boundary[0] == "active" else boundary[0],
        of("lifecycle"),
        of("kills"),
        of("waits"),
        of("rights"),
        of("boundary", hidden=BTF),
    ]


def write_page():
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / f"{datetime.date.today()}.md"
    written.write_text(page([last(row) for row in ROWS]))
    print(f"written: {written.relative_to(packages.ROOT)}")


def main(names):
    if names == ["--page"]:
        write_page()
        return 0
    lacking = machine.available()
    if lacking:
        sys.exit(f"kernels: {', '.join(lacking)} missing: bash tests/setup.sh kernels, and run as root")
    rows = [row for row in ROWS if not names or row.name in names]
    if not rows:
        sys.exit(f"kernels: none of {', '.join(names)}; there are {', '.join(row.name for row in ROWS)}")
    shared = {}
    outcomes = []
    for row in rows:
        architecture = row.suite.architecture
        if architecture not in shared:
            try:
                shared[architecture] = machine.base(architecture, *programs(architecture), packages.CACHE)
            except packages.Gone as gone:
                outcomes.append(Outcome(row, skipped=str(gone)))
                keep(outcomes[-1])
                tell(outcomes[-1])
                continue
        outcomes.append(try_kernel(row, shared[architecture]))
        keep(outcomes[-1])
        tell(outcomes[-1])
    write_page()
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    if not tried:
        sys.exit("kernels: no suite had a kernel")
    return 1 if any(outcome.wrong for outcome in tried) else 0


def programs(architecture):
    if architecture == "amd64":
        return built()
    raise packages.Gone(f"programs for {architecture} are not built")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
