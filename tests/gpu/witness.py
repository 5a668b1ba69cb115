"""Owns the second witness: the kernel's own uprobe events on the driver's memory calls, read from tracefs.

Refuses the agent's tables and programs: offsets come from the ELF file here, sizes from registers (x86-64).
"""

import os
import re
import struct
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

TRACING = Path("/sys/kernel/tracing")
GROUP = "gpuwitness"
# Operation, exported name, register that holds the bytes (x86-64 calling convention), if any.
CALLS = [
    ("cuMemAlloc", "cuMemAlloc_v2", "si"),
    ("cuMemFree", "cuMemFree_v2", None),
    ("cuMemAllocPitch", "cuMemAllocPitch_v2", None),
    ("cuMemAllocManaged", "cuMemAllocManaged", "si"),
    ("cuMemAllocAsync", "cuMemAllocAsync", "si"),
    ("cuMemAllocAsync", "cuMemAllocAsync_ptsz", "si"),
    ("cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync", "si"),
    ("cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz", "si"),
    ("cuMemFreeAsync", "cuMemFreeAsync", None),
    ("cuMemFreeAsync", "cuMemFreeAsync_ptsz", None),
    ("cuMemCreate", "cuMemCreate", "si"),
    ("cuMemRelease", "cuMemRelease", None),
    ("cuMemMap", "cuMemMap", "si"),
    ("cuMemUnmap", "cuMemUnmap", "si"),
    ("cuMemHostAlloc", "cuMemHostAlloc", "si"),
    ("cuMemAllocHost", "cuMemAllocHost_v2", "si"),
    ("cuMemFreeHost", "cuMemFreeHost", None),
    ("cuMemHostRegister", "cuMemHostRegister_v2", "si"),
    ("cuArrayCreate", "cuArrayCreate_v2", None),
    ("cuArray3DCreate", "cuArray3DCreate_v2", None),
    ("cuMipmappedArrayCreate", "cuMipmappedArrayCreate", None),
    ("cuMemPoolTrimTo", "cuMemPoolTrimTo", None),
    ("cuMemPoolImportPointer", "cuMemPoolImportPointer", None),
    ("cuMemImportFromShareableHandle", "cuMemImportFromShareableHandle", None),
]
# Memory calls of recent drivers that may not be in the agent's table: only counted.
UNPROBED = re.compile(
    r"^cu(Mem(Alloc|Create|Pool|Import|Map|Free|Release|Unmap|Retain)|Array|Mipmapped|Ipc|Multicast|GraphMem|DeviceGraphMem"
    r"|External|ImportExternal|GraphAddMem|DeviceGetDefaultMemPool|GreenCtxCreate|CtxFromGreenCtx)\w*$"
)
LINE = re.compile(r"-(\d+)\s+(?:\(.{7}\)\s+)?\[\d+\]\s+\S+\s+([\d.]+): ([er]\d+_?\w*): (.*)$")


def exports(path):
    """File offset by exported function name."""
    data = Path(path).read_bytes()
    section_at, = struct.unpack_from("<Q", data, 0x28)
    program_at, = struct.unpack_from("<Q", data, 0x20)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", data, 0x36)
    loads = []
    for index in range(programs):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, program_at + index * program_size)
        if kind == 1:
            loads.append((address, offset, size))
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, section_at + i * section_size) for i in range(sections)]
    found = {}
    for _, kind, _, _, at, size, link, *_ in headers:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = headers[link][4]
        for symbol in range(at, at + size, 24):
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, symbol)
            if info & 15 != 2 or section == 0:
                continue
            text = data[strings + name : data.index(b"\0", strings + name)].decode()
            for address, offset, length in loads:
                if address <= value < address + length:
                    found[text] = value - address + offset
    return found


class Witness:
    def __init__(self, library):
        self.library = library
        self.directory = TRACING / "instances" / GROUP
        self.names = {}
        self.processes = defaultdict(lambda: {"calls": Counter(), "bytes": Counter(), "first": {}, "sizes": Counter()})
        self.open = {}
        self.tgids = {}
        self.maps = {}
        self.stop = threading.Event()
        self.lines = 0

    def __enter__(self):
        self.directory.mkdir(exist_ok=True)
        (self.directory / "trace_clock").write_text("mono")
        (self.directory / "buffer_size_kb").write_text("4096")
        offsets = exports(self.library)
        self.exported = sorted(name for name in offsets if UNPROBED.match(name))
        probed = {name for _, name, _ in CALLS}
        rows = [row for row in CALLS if row[1] in offsets]
        rows += [(name, name, None) for name in self.exported if name not in probed]
        seen = set()
        for number, (operation, symbol, register) in enumerate(rows):
            offset = offsets[symbol]
            if offset in seen:
                continue
            seen.add(offset)
            self.names[number] = operation
            where = f"{self.library}:{offset:#x}"
            size = f" bytes=%{register}:u64" if register else ""
            self.define(f"p:{GROUP}/e{number} {where} caller=$stack0:x64{size}")
            self.define(f"r:{GROUP}/r{number} {where} code=$retval:s32")
        self.refused = []
        for number in list(self.names):
            # The return first: an entry without its return would stay open.
            for side in "re":
                try:
                    (self.directory / "events" / GROUP / f"{side}{number}" / "enable").write_text("1")
                except OSError as error:
                    self.refused.append([rows[number][1], side, str(error)])
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        return self

    def define(self, text):
        # Not Python's append mode: it seeks to the end, which this file refuses.
        descriptor = os.open(TRACING / "uprobe_events", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, (text + "\n").encode())
        except OSError as error:
            said = (TRACING / "error_log").read_text()[-300:]
            raise RuntimeError(f"{text}: {error}: {said}") from error
        finally:
            os.close(descriptor)

    def __exit__(self, *_):
        time.sleep(0.5)
        for number in self.names:
            for side in "er":
                (self.directory / "events" / GROUP / f"{side}{number}" / "enable").write_text("0")
        self.stop.set()
        self.thread.join(5)
        self.lost = sum(
            int(value)
            for stats in self.directory.glob("per_cpu/cpu*/stats")
            for value in re.findall(r"(?:overrun|dropped events): (\d+)", stats.read_text())
        )
        for number in self.names:
            for side in "er":
                self.define(f"-:{GROUP}/{side}{number}")
        self.directory.rmdir()

    def read(self):
        descriptor = os.open(self.directory / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
        rest = b""
        while not self.stop.is_set():
            try:
                chunk = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                self.take(line.decode(errors="replace"))
        os.close(descriptor)

    def take(self, line):
        match = LINE.search(line)
        if not match:
            return
        self.lines += 1
        thread, at, event, fields = int(match[1]), float(match[2]), match[3], match[4]
        operation = self.names[int(event[1:])]
        if event[0] == "e":
            values = dict(re.findall(r"(\w+)=(\S+)", fields))
            self.open.setdefault(thread, []).append((operation, int(values["caller"], 16), int(values.get("bytes", 0)), at))
            return
        stack = self.open.get(thread)
        if not stack:
            return
        # A tail call returns through both return probes: the inner first.
        opened = next((i for i in range(len(stack) - 1, -1, -1) if stack[i][0] == operation), None)
        if opened is None:
            return
        _, caller, size, begun = stack[opened]
        del stack[opened:]
        nested = bool(stack)
        code = int(re.search(r"code=(-?\d+)", fields)[1])
        process = self.processes[self.tgid(thread)]
        process["calls"][operation, code, nested] += 1
        process["first"].setdefault(operation, begun)
        if size and code == 0:
            where = self.where(thread, caller)
            process["bytes"][operation, where] += size
            process["sizes"][operation, where, size] += 1

    def tgid(self, thread):
        if thread not in self.tgids:
            try:
                text = Path(f"/proc/{thread}/status").read_text()
                self.tgids[thread] = int(re.search(r"Tgid:\s+(\d+)", text)[1])
            except (OSError, TypeError):
                self.tgids[thread] = thread
        return self.tgids[thread]

    def where(self, thread, address):
        """The file that holds the return address: who called."""
        process = self.tgid(thread)
        for fresh in (False, True):
            if fresh or process not in self.maps:
                try:
                    rows = Path(f"/proc/{process}/maps").read_text().splitlines()
                except OSError:
                    return "gone"
                self.maps[process] = [
                    (*(int(part, 16) for part in row.split()[0].split("-")), row.split()[-1]) for row in rows
                ]
            for start, end, path in self.maps[process]:
                if start <= address < end:
                    return Path(path).name
        return "unknown"

    def report(self):
        return {
            process: {
                "calls": [[*key, count] for key, count in sorted(figures["calls"].items())],
                "bytes": [[*key, count] for key, count in sorted(figures["bytes"].items())],
                "sizes": [[*key, count] for key, count in figures["sizes"].most_common(60)],
                "first": figures["first"],
            }
            for process, figures in list(self.processes.items())
        }
