"""Owns the proof of the unit: a real systemd boots in a container, with the .deb in it, and runs the agent in its whole sandbox.

Refuses to speak of tenants: the container has PIDs of its own, so that none is found; test_deb.py looks for them.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

import node
import test_deb
from node import run, until

INIT = "systemd,systemd-sysv,dbus"
# PTRACE_SEIZE and PTRACE_INTERRUPT; whoever stopped a thread must also wait for its end (__WALL), or it has none.
STOPPER = """\
import ctypes, os, sys
libc, thread = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
for request in (0x4206, 0x4207):
    if libc.ptrace(request, thread, None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(thread, 0x40000000)
print("stopped", flush=True)
os.waitpid(thread, 0x40000000)
"""
# What the simulated driver needs, and a shorter patience.
DROP_IN = """\
[Service]
Environment=COTENANT_SIM_NODE=/node
ReadWritePaths=/node
WatchdogSec=6s
RestartSec=1s
"""
# The container has PIDs and devices of its own; nothing of the unit is to blame for these.
CONTAINER_S_OWN = {"host_pid_namespace", "cgroup_namespace", "probe_cost", "kernel_log"}
# This host has neither NVIDIA's module nor, before Linux 6.14, the dmem controller, and no kubelet.
CONTAINER_S_OWN |= {"xid_tracepoint", "dmem", "grants"}


def descendants(pid):
    children = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, rest = path.parent.name, path.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(rest[1]), []).append(int(number))
    found, left = [], [pid]
    while left:
        found += (next_ones := children.get(left.pop(), []))
        left += next_ones
    return found


@contextlib.contextmanager
def booted(root, place, log):
    command = [
        "systemd-nspawn", f"--directory={root}", "--boot", "--register=no", "--keep-unit", "--capability=all",
        "--system-call-filter=bpf perf_event_open", "--bind-ro=/sys/kernel/tracing", f"--bind={place}:/node",
    ]  # fmt: skip
    with open(log, "w", encoding="utf-8") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield child
    finally:
        # Powers off in order.
        child.terminate()
        try:
            child.wait(node.PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Unit(unittest.TestCase):
    def test_a_real_systemd_starts_it_and_starts_it_again_when_its_tick_hangs(self):
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(node.node())
            root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cotenant-init-", dir=node.ROOT / "target")))
            run("tar", "--extract", "--file", test_deb.clean(INIT), "--directory", root)
            port = node.port()
            self.furnish(root, place, port)
            log = place / "boot.log"
            container = stack.enter_context(booted(root, place, log))
            agent = node.Agent(port)
            try:
                until(lambda: agent.ask("/metrics"), "the agent")
            except TimeoutError:
                self.fail(log.read_text(encoding="utf-8")[-4000:])
            # NVML is asked for the first time some moments later.
            until(lambda: set(agent.lacking()) <= CONTAINER_S_OWN, f"all of the rest; {agent.lacking()}")
            before = self.agent(container)
            status = pathlib.Path(f"/proc/{before}/status").read_text(encoding="utf-8")
            for wanted in ("NoNewPrivs:\t1", "Seccomp:\t2"):
                self.assertIn(wanted, status)
            self.hang_the_tick(before)
            agent.ask("/healthz")
            began = time.monotonic()
            after = until(lambda: (pid := self.agent(container)) not in (None, before) and pid, "a new agent")
            until(lambda: agent.ask("/metrics"), "the new agent")
            print(f"\na hung tick: another agent serves {time.monotonic() - began:.0f} s later")
            self.upgrade_and_purge(container, agent, place, after)

    def upgrade_and_purge(self, container, agent, place, before):
        """What the package's scripts tell a systemd that runs."""
        init = next(pid for pid in descendants(container.pid) if pathlib.Path(f"/proc/{pid}/comm").read_text() == "systemd\n")
        inside = ["nsenter", f"--target={init}", "--mount", "--uts", "--ipc", "--pid", "env", "DEBIAN_FRONTEND=noninteractive"]
        (place / "next.deb").write_bytes(pathlib.Path(test_deb.packaged("9.0.0-1")).read_bytes())
        run(*inside, "dpkg", "--install", "/node/next.deb")
        until(lambda: self.agent(container) not in (None, before), "the agent of the new package")
        until(lambda: agent.ask("/metrics"), "its figures")
        run(*inside, "systemctl", "is-active", "--quiet", "cotenant")
        run(*inside, "dpkg", "--purge", "cotenant")
        self.assertIsNone(self.agent(container))
        known = subprocess.run([*inside, "systemctl", "is-enabled", "cotenant"], capture_output=True, text=True)
        self.assertNotEqual(known.returncode, 0, known.stdout)

    def furnish(self, root, place, port):
        (root / "tmp/cotenant.deb").write_bytes(test_deb.packaged().read_bytes())
        run("chroot", root, "dpkg", "--install", "/tmp/cotenant.deb")
        settings = f'[server]\nlisten = "127.0.0.1:{port}"\n[nvml]\nlibrary = "/node/lib/libnvidia-ml.so.1"\ninterval = "500ms"\n'
        (root / "etc/cotenant/cotenant.toml").write_text(settings, encoding="utf-8")
        drop_in = root / "etc/systemd/system/cotenant.service.d/test.conf"
        drop_in.parent.mkdir()
        drop_in.write_text(DROP_IN, encoding="utf-8")
        # On a booted host the package does that itself.
        run("chroot", root, "systemctl", "enable", "cotenant")

    def agent(self, container):
        for pid in descendants(container.pid):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/exe") == "/usr/bin/cotenant":
                    return pid
        return None

    def hang_the_tick(self, pid):
        """Stops that one thread, and no other, until the process is ended."""
        (tick,) = [path.parent.name for path in pathlib.Path(f"/proc/{pid}/task").glob("*/comm") if path.read_text() == "tick\n"]
        stopper = subprocess.Popen([sys.executable, "-c", STOPPER, tick], stdout=subprocess.PIPE, text=True)
        self.addCleanup(stopper.communicate)
        self.addCleanup(stopper.kill)
        self.assertEqual(stopper.stdout.readline(), "stopped\n")


if __name__ == "__main__":
    unittest.main()
