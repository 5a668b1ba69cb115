#!/usr/bin/env python3
"""Owns the matrix: which kernels, what each must show, and the page that says what it showed.
Refuses to call a kernel good that did not boot; one that its suite has no more is skipped, and the page says so.

    tests/kernels/matrix.py [NAME...]     all kernels, or those named, then the page
    tests/kernels/matrix.py --page        the page again, from what each kernel's last run left
"""

import concurrent.futures
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

# Seconds for one machine, and for one check in it: a busy host of two processors emulates slowly. They end what hangs, and
# nothing is judged by them.
LIMIT = int(os.environ.get("KERNELS_SECONDS", "5400"))
# Machines at a time. Each has two processors.
JOBS = int(os.environ.get("KERNELS_JOBS", max(1, (os.cpu_count() or 1) // 2)))
CHECK = int(os.environ.get("KERNELS_CHECK_SECONDS", "900"))
RESULTS = packages.ROOT / "tests" / "kernels" / "results"

# The chart's capabilities and no other, and CAP_SYS_ADMIN beside them where the kernel wants that for uprobes.
SET = ("rights", "where_uprobes_want_sys_admin_it_is_said_and_with_it_they_work")
# As setpriv spells the chart's capabilities.
RIGHTS = "+bpf,+perfmon,+sys_ptrace,+dac_read_search,+syslog"
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
# What an agent alone or the doctor was under, as machine.py words it.
BARE = f"without {BTF}"
STRICT = "under kernel.perf_event_paranoid=4"
INTEGRITY, CONFIDENTIALITY = "under lockdown=integrity", "under lockdown=confidentiality"


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    suite: Suite
    wanted: object
    newest: bool = True
    floor: bool = False
    # The kernel is locked down while it runs, as Secure Boot does at its start.
    locked: bool = False


def since(major, minor):
    def wanted(version):
        numbers = version.split(".")
        return (int(numbers[0]), int(numbers[1])) >= (major, minor)

    return wanted


BACKPORTS = Suite("trixie-backports")
ROWS = [
    Row("5.10", Suite("bullseye"), "5.10", floor=True),
    Row("6.1", Suite("bookworm"), "6.1"),
    Row("6.1 locked", Suite("bookworm"), "6.1", locked=True),
    Row("6.12", Suite("bookworm-security", SECURITY), "6.12"),
    Row("6.12 locked", Suite("bookworm-security", SECURITY), "6.12", locked=True),
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
    lines = (["module"] if has_module else []) + ["agent", "doctor root"]
    if row.floor:
        return lines
    if row.locked:
        return lines + ["lock integrity", "agent", "doctor root", "lock confidentiality", "agent", "doctor root"]
    # C72: as distributions set it, with the chart's capabilities; and as CAPABILITIES.md has it set.
    lines += [f"set {PARANOID} 4", f"doctor set {RIGHTS}", f"set {PARANOID} 2"]
    # C74: without the kernel's types the probes go on, and waits alone are gone.
    binary, name = BOUNDARY
    lines += [f"hide {BTF}", "agent", f"check {binary} {name} {CHECK}", f"bare {BTF}"]
    return lines + [f"check {binary} {name} {CHECK}" for binary, name in CHECKS]


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
        wrong += consult(report, "root", "", 2, {"kernel": ("unsupported", "5.15", "5.15"), "btf": ("ok", "", "")})
        return wrong
    wrong += [
        f"{name} is {whole.get(name, ('absent', ''))}" for name in ACTIVE if whole.get(name, ("", ""))[0] != "active"
    ]
    boundary = whole.get("gpu_boundary", ("absent", ""))
    if boundary[0] != "active" or ("kprobe" in boundary[1]) != has_module:
        wrong.append(f"gpu_boundary is {boundary}, {'with' if has_module else 'without'} the module")
    wrong += plain(report)
    if row.locked:
        return wrong + locked(report, whole)
    without = report.features.get(BARE, {})
    if without.get("waits", ("", ""))[0] != "unsupported" or without.get("allocation_probes", ("", ""))[0] != "active":
        wrong.append(f"without BTF: {without.get('waits')}, {without.get('allocation_probes')}")
    ran = [(check.binary, check.name) for check in report.checks]
    wrong += [f"{name} did not run" for binary, name in [*CHECKS, BOUNDARY] if (binary, name) not in ran]
    wrong += paranoid(report)
    wrong += [
        f"{check.name} failed{f' {check.under}' if check.under else ''}"
        for check in report.checks
        if not check.ok and unjudged(check) is None
    ]
    return wrong


def consult(report, who, under, code, wanted):
    """What the doctor said otherwise than `wanted`: name -> (state, a word of what it saw, a word of the remedy)."""
    asked = f"the doctor ({who}{f', {under}' if under else ''})"
    found = [doctor for doctor in report.doctors if (doctor.who, doctor.under) == (who, under)]
    if not found:
        return [f"{asked} was not asked"]
    (doctor,) = found
    wrong = [] if doctor.code == code else [f"{asked} ended with {doctor.code}, not {code}"]
    verdict = {0: "ok", 1: "degraded", 2: "broken"}[code]
    if doctor.page.get("verdict") != verdict:
        wrong.append(f"{asked}: the verdict is {doctor.page.get('verdict')}, not {verdict}")
    for name, (state, seen, remedy) in wanted.items():
        said = doctor.checks.get(name, ("absent", "", ""))
        if said[0] != state or seen not in said[1] or remedy not in said[2]:
            wrong.append(f"{asked}: {name} is {said}, not {(state, seen, remedy)}")
    return wrong


FINE = ("ok", "", "")


def plain(report):
    """What the doctor should have said of the kernel as it is, and did not."""
    release = tuple(int(number) for number in report.release.split(".")[:2])
    return consult(report, "root", "", 1, {
        "kernel": ("ok", f"Linux {release[0]}.{release[1]}.", ""), "btf": FINE, "tracefs": FINE, "capabilities": FINE,
        "lockdown": ("ok", "none", ""), "allocation_probes": FINE, "uprobes": FINE, "kprobes": FINE, "oom_kills": FINE,
        "uprobe_multi": FINE if release >= (6, 6) else ("unsupported", "6.6", "6.6"),
    })  # fmt: skip


def paranoid(report):
    """The same of Debian's levels, under the chart's capabilities: everything that asks for perf events names the level."""
    sysctl = ("broken", "perf_event_paranoid is 4", "sysctl kernel.perf_event_paranoid=2")
    return consult(report, "set", STRICT, 2, {
        "perf_event_paranoid": ("broken", "4: ", "sysctl kernel.perf_event_paranoid=2"),
        "perf_events": sysctl, "process_life": sysctl, "oom_kills": sysctl,
    })  # fmt: skip


def locked(report, whole):
    """And of lockdown: integrity costs nothing, confidentiality what reads the kernel's memory, and that is said."""
    wrong = []
    same = report.features.get(INTEGRITY, {})
    differs = {name: state for name, state in same.items() if state[0] != whole.get(name, ("",))[0]}
    if not same or differs:
        wrong.append(f"{INTEGRITY}: {differs or 'the agent served no status'}")
    wrong += consult(report, "root", INTEGRITY, 1, {"lockdown": ("ok", "integrity", ""), "allocation_probes": FINE})
    # Seen: on 6.12 programs read a tenant's memory on, and its calls are counted; on 6.1 no program of a call loads.
    closed = ("broken", "lockdown is at confidentiality", "lockdown=integrity")
    lost = ["gpu_boundary", "process_life", "waits", "oom_kills"]
    said = report.features.get(CONFIDENTIALITY, {})
    for name in lost:
        state, reason = said.get(name, ("absent", ""))
        if state != closed[0] or closed[1] not in reason:
            wrong.append(f"{CONFIDENTIALITY}: {name} is {state}: {reason}")
    return wrong + consult(report, "root", CONFIDENTIALITY, 2, {
        "lockdown": ("broken", "confidentiality", "lockdown=integrity"),
        "allocation_probes": FINE if report.release.startswith("6.12.") else closed,
        **dict.fromkeys(lost, closed),
    })  # fmt: skip


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


def bring(row, shared):
    """What a row needs on disk: the outcome so far, and how to come to its end; `None` where there is nothing to run."""
    outcome = Outcome(row)
    try:
        architecture = row.suite.architecture
        if architecture not in shared:
            shared[architecture] = machine.base(architecture, *programs(architecture), packages.CACHE)
        kernel = packages.fetch(row.suite, row.wanted, row.newest)
        outcome.version = kernel.version
        ours, outcome.moduleless = module.build(kernel)
        image = kernel.image
    except packages.Gone as gone:
        outcome.skipped = str(gone)
        return outcome, None

    def boot():
        # Also for a run that is ended from outside: its console is there.
        keep(outcome)
        print(f"{row.name}: Linux {kernel.version} ({image.name})", flush=True)
        lines = plan(row, ours is not None)
        outcome.report = machine.run(kernel, shared[architecture], ours, lines, kept(row), LIMIT)
        outcome.wrong = judge(row, outcome.report, ours is not None)

    return outcome, boot


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
        "| kernel | booted | loaded | UVM boundary | fired: ledger | fired: kills, group kill | fired: waits | the chart's rights | without BTF | locked down |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        lines.append("| " + " | ".join(cells(outcome)) + " |")
    lines += ["", "## What was degraded, and why", ""]
    for outcome in outcomes:
        if outcome.report is None:
            continue
        for under, features in sorted(outcome.report.features.items()):
            for name, (state, reason) in features.items():
                # There is no NVML beside the agent by itself.
                if state not in ("active", "disabled") and name != "nvml":
                    where = f" {under}" if under else ""
                    lines.append(f"- {outcome.report.release}{where}: `{name}` {state}: {reason}")
        if outcome.moduleless:
            lines.append(f"- {outcome.report.release}: no kprobe was tried, there is no module for it: {outcome.moduleless}")
    lines += ["", "## Checks", ""]
    for outcome in outcomes:
        if outcome.report is None:
            continue
        for doctor in outcome.report.doctors:
            wrong = [name for name, (state, _, _) in doctor.checks.items() if state != "ok"]
            where = f", {doctor.under}" if doctor.under else ""
            rights = "root" if doctor.who == "root" else "the chart's capabilities"
            told = f"{doctor.page.get('verdict')} (exit status {doctor.code}); not ok: {', '.join(wrong)}"
            lines.append(f"- {outcome.report.release}{where}: doctor as {rights}: {told}")
        for check in outcome.report.checks:
            where = f", {check.under}" if check.under else ""
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
        return [f"{outcome.row.name}: skipped, {outcome.skipped}", *[""] * 9]
    report = outcome.report
    whole = report.features.get("", {})
    loaded = [name for name in ACTIVE if whole.get(name, ("",))[0] == "active"]
    boundary = whole.get("gpu_boundary", ("", ""))

    def of(*binaries, under=""):
        found = [check for check in report.checks if check.binary in binaries and check.under == under]
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
        of("boundary", under=BARE),
        ", ".join(
            f"{under.partition('=')[2]}: probes {report.features[under]['allocation_probes'][0]}, "
            f"boundary {report.features[under]['gpu_boundary'][0]}"
            for under in (INTEGRITY, CONFIDENTIALITY)
            if "allocation_probes" in report.features.get(under, {})
        )
        or "not run",
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
    # One after the other: apt and the compiler have one place each.
    shared = {}
    brought = [bring(row, shared) for row in rows]

    def end(outcome, boot):
        if boot is not None:
            boot()
        keep(outcome)
        tell(outcome)
        return outcome

    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        outcomes = list(pool.map(lambda one: end(*one), brought))
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
