"""Owns building uvm.c for a kernel whose headers are at hand.
Refuses kbuild: the tools in newer suites' header packages need a newer libc than this machine's, and one file needs none
of them. What they would add (checksums of symbols, the module's own record) is one table and ten lines of C."""

import re
import subprocess

import packages

SOURCE = packages.ROOT / "tests" / "kernels" / "uvm.c"
ARCH = {"amd64": "x86", "arm64": "arm64"}
COMPILER = {"amd64": "gcc", "arm64": "aarch64-linux-gnu-gcc"}
# A function that ftrace does not know of takes no kprobe either: it is compiled to be traced, as kbuild does it.
FLAGS = {
    "amd64": "-m64 -mno-sse -mno-mmx -mno-sse2 -mno-3dnow -mno-avx -mno-80387 -mno-red-zone -mcmodel=kernel "
    "-fcf-protection=none -falign-functions=16 -pg -mfentry -mrecord-mcount",
    "arm64": "-mgeneral-regs-only -mabi=lp64 -mno-outline-atomics",
}
# Of newer compilers than this machine's.
UNKNOWN_HERE = ["CONFIG_CC_HAS_TYPEOF_UNQUAL", "CONFIG_CC_HAS_COUNTED_BY"]


def build(kernel):
    """Path of the built module and None, or None and the reason."""
    headers = kernel.headers
    if headers is None:
        return None, "its headers are not in the suite"
    own, common = headers
    architecture = kernel.suite.architecture
    arch = ARCH[architecture]
    out = packages.CACHE / "modules" / f"{architecture}-{kernel.version}"
    out.mkdir(parents=True, exist_ok=True)
    missing = out / "unknown_here.h"
    missing.write_text("".join(f"#undef {name}\n" for name in UNKNOWN_HERE))
    includes = [
        f"-I{common}/arch/{arch}/include",
        f"-I{own}/arch/{arch}/include/generated",
        f"-I{common}/include",
        f"-I{own}/include",
        f"-I{common}/arch/{arch}/include/uapi",
        f"-I{own}/arch/{arch}/include/generated/uapi",
        f"-I{common}/include/uapi",
        f"-I{own}/include/generated/uapi",
    ]
    for name in ("compiler-version.h", "kconfig.h"):
        if (common / "include/linux" / name).exists():
            includes += ["-include", common / "include/linux" / name]
    includes += ["-include", missing, "-include", common / "include/linux/compiler_types.h"]
    compiler = COMPILER[architecture]
    own_headers = subprocess.run([compiler, "-print-file-name=include"], text=True, capture_output=True).stdout.strip()
    command = [
        compiler, "-c", "-nostdinc", "-isystem", own_headers, *includes,
        "-D__KERNEL__", "-DMODULE", '-DKBUILD_MODNAME="cotenant_sim_uvm"', "-D__KBUILD_MODNAME=cotenant_sim_uvm",
        '-DKBUILD_BASENAME="uvm"', '-DKBUILD_MODFILE="cotenant_sim_uvm"', "-DCC_USING_FENTRY",
        "-std=gnu11", "-fms-extensions", "-O2", "-w", "-fshort-wchar", "-fno-strict-aliasing", "-fno-common",
        "-fno-pie", "-fno-PIE", "-fno-asynchronous-unwind-tables", "-fno-stack-protector", "-fno-strict-overflow",
        *FLAGS[architecture].split(),
    ]  # fmt: skip
    built = out / "cotenant_sim_uvm.ko"
    try:
        run([*command, "-o", built, SOURCE])
        if "CONFIG_MODVERSIONS=y" not in (own / ".config").read_text().splitlines():
            return built, None
        sums = checksums(own / "Module.symvers")
        needed = ["module_layout", *undefined(built)]
        absent = [name for name in needed if name not in sums]
        if absent:
            return None, f"its headers give no checksum for {', '.join(absent)}"
        table = "".join(f'{{{sums[name]},"{name}"}},' for name in needed)
        run([*command, f"-DVERSIONS={table}", "-o", built, SOURCE])
    except Refused as refusal:
        return None, str(refusal)
    return built, None


class Refused(Exception):
    pass


def run(command):
    answer = subprocess.run(command, text=True, capture_output=True)
    if answer.returncode != 0:
        wrong = [line for line in answer.stderr.splitlines() if "error" in line]
        raise Refused(f"it does not compile: {(wrong or [answer.stderr.strip()])[0]}")


def checksums(symvers):
    rows = (line.split("\t") for line in symvers.read_text().splitlines())
    return {row[1]: row[0] for row in rows if len(row) > 1}


def undefined(built):
    text = subprocess.run(["nm", "-u", built], text=True, capture_output=True, check=True).stdout
    return sorted(set(re.findall(r"^\s+U (\S+)$", text, re.MULTILINE)))
