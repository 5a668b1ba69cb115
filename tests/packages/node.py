"""Owns the simulated node that packages are tried on, tenants on it, and what an agent there says.

Refuses to start the agent: each package does that in its own way.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARTEFACTS = ROOT / "target/debug"
UNIFIED = next(path for path in map(pathlib.Path, ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")) if (path / "cgroup.controllers").exists())
PATIENCE = 60

sys.path.insert(0, str(ROOT / "tests/deploy"))
import chart  # noqa: E402, F401


def run(*command, **options):
    """What a command says; its words too when it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def until(wanted, what, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if got := wanted():
                return got
        time.sleep(0.2)
    raise TimeoutError(f"{what} did not come in {seconds} s")


def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def node():
    """The node's directory; its libraries are in lib/. Waits for other simulated nodes to end."""
    with tempfile.TemporaryDirectory(prefix="cotenant-packages-") as place:
        with subprocess.Popen(
            [ARTEFACTS / "cotenant-sim-node", place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout.readline() == "ready\n", "no simulated node"
                # The agent's user uses it as well: on a real node that is the driver's business.
                run("chmod", "-R", "a+rwX", place)
                yield pathlib.Path(place)
            finally:
                child.stdin.close()
                child.wait(PATIENCE)


@contextlib.contextmanager
def tenant(node, cgroup, script):
    """A process that uses the node's GPUs, in a cgroup; ends when it is left."""
    directory = UNIFIED / cgroup
    directory.mkdir(parents=True, exist_ok=True)
    (node / "tenant.script").write_text(script, encoding="utf-8")

    def join():
        (directory / "cgroup.procs").write_text(str(os.getpid()))

    child = subprocess.Popen(
        [ARTEFACTS / "cotenant-sim-tenant", node / "tenant.script"],
        env={**os.environ, "COTENANT_SIM_NODE": str(node), "COTENANT_SIM_LIBCUDA": str(node / "lib/libcuda.so.1")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=join,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()
        while directory != UNIFIED:
            with contextlib.suppress(OSError):
                directory.rmdir()
            directory = directory.parent


class Agent:
    """One that serves on this port."""

    def __init__(self, port):
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path):
        with urllib.request.urlopen(self.address + path, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def value(self, metric, **labels):
        """The sum of the series with these labels; None where there is none."""
        found = None
        for line in self.ask("/metrics").splitlines():
            if match := re.match(rf"{metric}\{{(.*)\}} (\S+)$", line):
                has = dict(re.findall(r'(\w+)="((?:\\.|[^"])*)"', match[1]))
                if all(has.get(name) == wanted for name, wanted in labels.items()):
                    found = (found or 0) + float(match[2])
        return found

    def feature(self, name):
        """State and reason of one feature."""
        (one,) = [one for one in json.loads(self.ask("/status"))["features"] if one["name"] == name]
        return one["state"], one["reason"]

    def lacking(self):
        """The features that are neither active nor switched off, with the reason."""
        features = json.loads(self.ask("/status"))["features"]
        return {one["name"]: one["reason"] for one in features if one["state"] not in ("active", "disabled")}
