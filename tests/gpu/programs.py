"""Owns the kernel's own count of what BPF programs cost: runs and nanoseconds by program name.

Refuses to leave the statistics switched on: they cost every run of every program two clock reads.
"""

import contextlib
import ctypes
import os
import struct
from pathlib import Path

SWITCH = Path("/proc/sys/kernel/bpf_stats_enabled")
LIBC = ctypes.CDLL(None, use_errno=True)
BPF = 321  # x86-64
NEXT_ID, FD_BY_ID, INFO_BY_FD = 11, 13, 15
# struct bpf_prog_info up to run_cnt, with where the two counts and the name are.
INFO_BYTES, NAME_AT, RUNS_AT = 208, 64, 192


@contextlib.contextmanager
def statistics():
    before = SWITCH.read_text()
    SWITCH.write_text("1")
    try:
        yield
    finally:
        SWITCH.write_text(before)


def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    answer = LIBC.syscall(BPF, command, buffer, 128)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer, buffer.raw


def runs():
    """(nanoseconds, runs) of every program loaded, summed by name."""
    sums, at = {}, 0
    while True:
        try:
            _, answer = bpf(NEXT_ID, struct.pack("<II", at, 0))
        except OSError:
            return sums
        at = struct.unpack_from("<I", answer, 4)[0]
        try:
            descriptor, _ = bpf(FD_BY_ID, struct.pack("<I", at))
        except OSError:
            continue
        info = ctypes.create_string_buffer(INFO_BYTES)
        bpf(INFO_BY_FD, struct.pack("<IIQ", descriptor, INFO_BYTES, ctypes.addressof(info)))
        os.close(descriptor)
        name = info.raw[NAME_AT : NAME_AT + 16].split(b"\0")[0].decode()
        took, count = struct.unpack_from("<QQ", info.raw, RUNS_AT)
        old = sums.get(name, (0, 0))
        sums[name] = (old[0] + took, old[1] + count)


def between(before, after):
    """What ran between two readings: runs and nanoseconds a run."""
    rows = {}
    for name, (took, count) in after.items():
        took, count = took - before.get(name, (0, 0))[0], count - before.get(name, (0, 0))[1]
        if count > 0:
            rows[name] = {"runs": count, "ns_per_run": round(took / count, 1)}
    return rows
