"""Owns a virtual machine for one kernel: what is in its initramfs, the run, and what its lines say.
Refuses KVM: not every host has it, and an emulated processor is as strict a verifier."""

import dataclasses
import gzip
import json
import os
import pathlib
import shutil
import subprocess
import time

import packages

SOURCE = packages.ROOT / "tests" / "kernels"
# Debug programs, their libraries and what tenants may use; the rest is the limit of a memory cgroup.
MEMORY = "2048"
PROCESSORS = "2"
# Of the kernel's own messages on the console; 7 to see why a machine hangs.
LOUDNESS = os.environ.get("KERNELS_LOUDNESS", "1")
MACHINES = {
    "amd64": ["qemu-system-x86_64", "-machine", "q35", "-cpu", "max"],
    "arm64": ["qemu-system-aarch64", "-machine", "virt", "-cpu", "max,pauth-impdef=on"],
}
# Of settings that a plan changes: what the plain rows are run with.
PLAIN = {"kernel/perf_event_paranoid": "2"}
CONSOLE = {"amd64": "ttyS0", "arm64": "ttyAMA0"}
# util-linux's, which busybox lacks and a test of kills asks for.
CHOOM = '#!/bin/sh\n# choom -n SCORE -- PROGRAM\necho "$2" > /proc/self/oom_score_adj\nshift 3\nexec "$@"\n'


@dataclasses.dataclass
class Check:
    binary: str
    name: str
    code: int
    seconds: float
    said: list = dataclasses.field(default_factory=list)
    under: str = ""

    @property
    def ok(self):
        return self.code == 0


@dataclasses.dataclass
class Doctor:
    """What `cotenant doctor --output json` said."""

    who: str
    code: int
    under: str
    page: dict

    @property
    def checks(self):
        """name -> (state, what was seen, remedy)"""
        return {check["name"]: (check["state"], check["seen"], check["remedy"]) for check in self.page.get("checks", [])}


@dataclasses.dataclass
class Report:
    release: str = ""
    machine: str = ""
    booted: float = 0.0
    module: str = "none"
    # Feature states of the agent alone, by what it was under, in words: name -> (state, reason).
    features: dict = dataclasses.field(default_factory=dict)
    agent: list = dataclasses.field(default_factory=list)
    agent_log: list = dataclasses.field(default_factory=list)
    doctors: list = dataclasses.field(default_factory=list)
    checks: list = dataclasses.field(default_factory=list)
    done: bool = False
    wall: float = 0.0


def read(lines):
    """Pure: a console's lines to a report."""
    report, under, last = Report(), "", None
    for line in lines:
        line = line.rstrip("\r\n")
        word, _, rest = line.partition(" ")
        if word == "@booted":
            seconds, report.release, report.machine, _ = rest.split()
            report.booted = float(seconds)
        elif word == "@module":
            report.module, last = rest, report.agent_log
        elif word == "@hidden":
            under = f"without {rest}"
        elif word == "@bare":
            under = ""
        elif word == "@locked":
            under = f"under lockdown={rest}"
        elif word == "@set":
            # A level that is not the plain one is what the next lines are under.
            name, level = rest.split()
            under = f"under {name.replace('/', '.')}={level}" if level != PLAIN.get(name, level) else ""
        elif word == "@status":
            rows = json.loads(rest)["features"]
            report.features[under] = {row["name"]: (row["state"], row["reason"]) for row in rows}
        elif word == "@agent":
            report.agent.append(rest)
            last = report.agent_log
        elif word == "@doctor":
            who, code, said = rest.split(" ", 2)
            report.doctors.append(Doctor(who, int(code), under, page(said)))
            last = report.agent_log
        elif word == "@check":
            binary, name, code, begun, ended = rest.split()
            check = Check(binary, name, int(code), float(ended) - float(begun), under=under)
            report.checks.append(check)
            last = check.said
        elif word in ("@said", "@out", "@log") and last is not None:
            last.append(rest)
        elif word == "@done":
            report.done = True
    return report


def page(text):
    """JSON, or an empty page: the console may have lost the end of a line."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def libraries(program):
    """What a program loads, its loader included."""
    text = subprocess.run(["ldd", program], text=True, capture_output=True, check=True).stdout
    words = (word for line in text.splitlines() for word in line.split())
    return {pathlib.Path(word) for word in words if word.startswith("/")}


def base(architecture, artefacts, tests, place):
    """The part of the initramfs that every kernel shares."""
    root = place / f"root-{architecture}"
    shutil.rmtree(root, ignore_errors=True)
    for directory in ("bin", "dev", "proc", "sys", "tmp", "opt/deps", "lib64", "etc"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    busybox = shutil.which("busybox")
    shutil.copy(busybox, root / "bin/busybox")
    shutil.copy(SOURCE / "init.sh", root / "init")
    (root / "bin/choom").write_text(CHOOM)
    for path in (root / "init", root / "bin/choom"):
        path.chmod(0o755)
    programs = {root / "opt" / name: artefacts / name for name in ARTEFACTS}
    programs |= {root / "bin" / name: pathlib.Path(shutil.which(name)) for name in BORROWED}
    programs |= {root / "opt/deps" / name: path for name, path in tests.items()}
    needed = set()
    for copy, program in programs.items():
        subprocess.run(["strip", "-o", copy, program], check=True)
        needed |= libraries(program)
    for library in needed:
        copy = root / str(library).lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    archive = place / f"base-{architecture}.cpio.gz"
    archive.write_bytes(gzip.compress(cpio(root), compresslevel=1))
    return archive


# util-linux's: busybox's know no bounding set and no cgroup namespace.
BORROWED = ["setpriv", "unshare"]
ARTEFACTS = ["cotenant", "cotenant-sim-tenant", "libcotenant_sim_cuda.so", "libcotenant_sim_nvml.so"]


def cpio(root):
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    answer = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"],
        cwd=root, input="\n".join(names).encode(), capture_output=True, check=True,
    )  # fmt: skip
    return answer.stdout


def run(kernel, shared, module, plan, place, limit):
    """Boots, and gives what the machine's lines say. The console is kept in `place`."""
    own = place / "own"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    (own / "plan").write_text("".join(f"{line}\n" for line in plan))
    if module is not None:
        shutil.copy(module, own / "cotenant_sim_uvm.ko")
    initramfs = place / "initramfs"
    initramfs.write_bytes(shared.read_bytes() + gzip.compress(cpio(own)))
    architecture = kernel.suite.architecture
    console = place / "console.log"
    command = [
        *MACHINES[architecture], "-accel", "tcg,thread=multi", "-m", MEMORY, "-smp", PROCESSORS, "-nodefaults",
        "-display", "none", "-no-reboot", "-serial", f"file:{console}", "-kernel", kernel.image, "-initrd", initramfs,
        "-append", f"console={CONSOLE[architecture]} loglevel={LOUDNESS} panic=-1 random.trust_cpu=on "
        "softlockup_all_cpu_backtrace=1",
    ]  # fmt: skip
    begun = time.monotonic()
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, complaint = machine.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        machine.kill()
        _, complaint = machine.communicate()
    report = read_console(place)
    report.wall = time.monotonic() - begun
    if complaint:
        print(complaint.decode(errors="replace"), end="")
    initramfs.unlink(missing_ok=True)
    return report


def read_console(place):
    console = place / "console.log"
    return read(console.read_text(errors="replace").splitlines() if console.exists() else [])


def available():
    """What this machine lacks to run any of this."""
    needed = ["qemu-system-x86_64", "busybox", "cpio", "apt-get", "dpkg-deb", "gcc", "nm", "strip", *BORROWED]
    return [name for name in needed if not shutil.which(name)] + ([] if os.geteuid() == 0 else ["root"])
