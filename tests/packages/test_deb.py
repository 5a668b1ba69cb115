"""Owns the proof of the .deb: in a clean Debian it is installed, run as its unit runs it, upgraded and purged."""

import contextlib
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import tempfile
import unittest

import node
from node import chart, run, until

PACKAGES = node.ROOT / "target/packages"
SUITE = "bookworm"
MEMORY = "64MiB"


def clean(more=""):
    """A minimal Debian with these packages beside, made once."""
    made = node.ROOT / f"target/clean-{more or 'minimal'}.tar"
    if not made.exists():
        part = made.with_suffix(".part.tar")
        run("mmdebstrap", "--variant=minbase", "--mode=root", "--quiet", *([f"--include={more}"] if more else []), SUITE, part)
        part.rename(made)
    return made


def packaged(version=None):
    """The .deb of this tree, or the same under another version."""
    if version is None:
        return max(PACKAGES.glob("cotenant_*.deb"), key=lambda path: path.stat().st_mtime)
    directory = tempfile.mkdtemp()
    run("dpkg-deb", "--raw-extract", packaged(), f"{directory}/tree")
    control = pathlib.Path(directory, "tree/DEBIAN/control")
    lines = control.read_text(encoding="utf-8").splitlines()
    control.write_text("\n".join(f"Version: {version}" if line.startswith("Version:") else line for line in lines) + "\n")
    made = f"{directory}/cotenant_{version}.deb"
    run("dpkg-deb", "--build", "--root-owner-group", "-Zgzip", f"{directory}/tree", made)
    return made


class Host:
    """A root to change into, with what a host has mounted; only the processes started in it see that."""

    def __init__(self, root, node):
        self.root = pathlib.Path(root)
        self.node = node

    def command(self, *words):
        root, inside = shlex.quote(str(self.root)), shlex.quote(f"{self.root}{self.node}")
        mounts = "".join(f"mount --rbind /{name} {root}/{name}; " for name in ("proc", "sys", "dev"))
        script = f"{mounts} mkdir -p {inside}; mount --bind {shlex.quote(str(self.node))} {inside}; exec chroot {root} \"$@\""
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *map(str, words)]

    def run(self, *words):
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        return run(*self.command(*words), env=environment)

    def install(self, deb):
        (self.root / "tmp/cotenant.deb").write_bytes(pathlib.Path(deb).read_bytes())
        said = self.run("dpkg", "--install", "/tmp/cotenant.deb")
        (self.root / "tmp/cotenant.deb").unlink()
        return said

    def files(self):
        """Every file that is not dpkg's own record."""
        skipped = ("/var/lib/dpkg", "/var/log", "/var/cache", "/proc", "/sys", "/dev", "/tmp")
        found = set()
        for directory, _, names in os.walk(self.root):
            inside = "/" + os.path.relpath(directory, self.root).lstrip(".")
            if not inside.startswith(skipped):
                found |= {f"{inside}/{name}".replace("//", "/") for name in names} | {inside}
        return found

    def state(self):
        done = subprocess.run(
            self.command("dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Version}", "cotenant"), capture_output=True, text=True
        )
        return done.stdout.strip()


@contextlib.contextmanager
def service(host, manager):
    """The agent as the unit runs it: its command, user and capabilities; `manager` is a socket that listens."""
    unit = chart.unit()
    (command,), (user,) = unit["ExecStart"], unit["User"]
    sets = {key: ",".join(["-all", *(f"+{name[4:].lower()}" for name in unit[key][0].split())]) for key in ("CapabilityBoundingSet", "AmbientCapabilities")}
    launcher = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--no-new-privs",
        f"--bounding-set={sets['CapabilityBoundingSet']}",
        f"--inh-caps={sets['AmbientCapabilities']}",
        f"--ambient-caps={sets['AmbientCapabilities']}",
    ]
    environment = {"NOTIFY_SOCKET": manager, "WATCHDOG_USEC": "4000000", "COTENANT_SIM_NODE": str(host.node), "PATH": os.environ["PATH"]}
    with open(host.node / "agent.log", "w", encoding="utf-8") as log:
        child = subprocess.Popen(host.command(*launcher, *command.split()), env=environment, stderr=log)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait(node.PATIENCE)


class Deb(unittest.TestCase):
    def test_it_is_installed_run_upgraded_and_purged(self):
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(node.node())
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="cotenant-root-"))
            run("tar", "--extract", "--file", clean(), "--directory", root)
            host = Host(root, place)
            host.run("true")
            before = host.files()
            host.install(packaged("0.0.9-1"))
            self.assertEqual(host.state(), "ii 0.0.9-1")
            self.assertIn("cotenant:", host.run("getent", "passwd", "cotenant"))
            self.assertEqual(host.run("stat", "-c", "%U:%G %a", "/etc/cotenant/cotenant.toml").strip(), "root:cotenant 640")
            self.assertIn("identify", host.run("cotenant", "--help"))
            host.run("cotenant", "config", "check", "/etc/cotenant/cotenant.toml")

            # What an administrator would change.
            port = node.port()
            settings = f'[server]\nlisten = "127.0.0.1:{port}"\n[nvml]\nlibrary = "{place}/lib/libnvidia-ml.so.1"\ninterval = "500ms"\n'
            (host.root / "etc/cotenant/cotenant.toml").write_text(settings, encoding="utf-8")
            self.run_and_look(host, port)

            host.install(packaged())
            version = host.state()
            self.assertNotIn("0.0.9", version)
            self.assertEqual((host.root / "etc/cotenant/cotenant.toml").read_text(encoding="utf-8"), settings, "kept over an upgrade")
            self.run_and_look(host, port)

            host.run("dpkg", "--remove", "cotenant")
            self.assertTrue((host.root / "etc/cotenant/cotenant.toml").exists(), "kept until it is purged")
            self.assertFalse((host.root / "usr/bin/cotenant").exists())
            host.run("dpkg", "--purge", "cotenant")
            self.assertEqual(host.state().replace("un", ""), "")
            left = {path for path in host.files() - before if not path.startswith(("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", "/etc/subuid", "/etc/subgid"))}
            self.assertEqual(left, set())

    def run_and_look(self, host, port):
        agent = node.Agent(port)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            path = str(host.node / "notify")
            pathlib.Path(path).unlink(missing_ok=True)
            manager.bind(path)
            os.chmod(path, 0o666)
            manager.settimeout(node.PATIENCE)
            with service(host, path) as child:
                try:
                    first = manager.recv(4096).decode()
                except TimeoutError:
                    self.fail((host.node / "agent.log").read_text(encoding="utf-8"))
                self.assertIn("READY=1", first)
                self.assertIn("STATUS=", first)
                # The tick goes on feeding the watchdog, whatever it has to say besides.
                said = ""
                while "WATCHDOG=1" not in said:
                    said = manager.recv(4096).decode()
                print("\nlacking under the unit's rights:", agent.lacking())
                status = pathlib.Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8")
                self.assertNotIn("\nUid:\t0", status)
                self.sees_a_tenant(agent, host.node)
                child.send_signal(signal.SIGTERM)
                said = ""
                while "STOPPING=1" not in said:
                    said = manager.recv(4096).decode()
                self.assertEqual(child.wait(node.PATIENCE), 0)

    def sees_a_tenant(self, agent, place):
        with node.tenant(place, "system.slice/packaged.service", f"init\nuuid 0\nretain 0\nprint loaded\nwait\nalloc a {MEMORY}\nprint held\nwait\n") as one:
            self.assertEqual(one.stdout.readline(), "loaded\n")
            until(lambda: agent.value("cotenant_agent_probe_libraries", state="attached"), "the tenant's libcuda")
            one.stdin.write("\n")
            one.stdin.flush()
            self.assertEqual(one.stdout.readline(), "held\n")
            wanted = 64 << 20
            live = lambda: agent.value("cotenant_gpu_memory_live_bytes", tenant="systemd:packaged.service", memory_kind="device")  # noqa: E731
            until(lambda: live() == wanted, f"{MEMORY} of the tenant")
            until(lambda: (agent.value("cotenant_gpu_memory_process_bytes", tenant="systemd:packaged.service") or 0) > wanted, "NVML's figure")


if __name__ == "__main__":
    unittest.main()
