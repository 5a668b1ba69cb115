"""Owns the proof of the image and the chart together: unpacked, and run by runc as kubelet would have it run."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import unittest

import node
from node import chart, run, until

IMAGE = node.ROOT / "target/image/cotenant.oci.tar"
# Of the compressed image, with the debug binary; the release binary is smaller.
BUDGET = 32 << 20
UID = "0f5a2b4c-1111-2222-3333-444455556666"
CONTAINER = "3fd09c1f2b7e4d5c6b7a8990a1b2c3d4e5f60718293a4b5c6d7e8f9012345678"
MASKED = "/proc/acpi /proc/asound /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list /proc/timer_stats /proc/sched_debug /proc/scsi /sys/firmware"
READ_ONLY = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger"


def bundle(place):
    """The unpacked image: its root, and what it says of its process."""
    layout = place / "layout"
    layout.mkdir()
    run("tar", "--extract", "--file", IMAGE, "--directory", layout)
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    blob = lambda digest: layout / "blobs" / digest.replace(":", "/")  # noqa: E731
    described = json.loads(blob(index["manifests"][0]["digest"]).read_text(encoding="utf-8"))
    if "manifests" in described:
        own = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
        (first,) = [one for one in described["manifests"] if one["platform"]["architecture"] == own]
        described = json.loads(blob(first["digest"]).read_text(encoding="utf-8"))
    settings = json.loads(blob(described["config"]["digest"]).read_text(encoding="utf-8"))
    root = place / "root"
    root.mkdir()
    for layer in described["layers"]:
        run("tar", "--extract", "--file", blob(layer["digest"]), "--directory", root)
    return root, settings["config"], sum(layer["size"] for layer in described["layers"])


def runtime_default(place, capabilities):
    """What containerd makes of RuntimeDefault for these capabilities, as it says itself: nothing is run by it."""
    place.mkdir()
    (place / "rootfs").mkdir()
    settings = f'''version = 2
root = "{place}/root"
state = "{place}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{place}/sock"
[ttrpc]
address = "{place}/ttrpc"
'''
    (place / "config.toml").write_text(settings, encoding="utf-8")
    with open(place / "log", "w", encoding="utf-8") as log:
        daemon = subprocess.Popen(["containerd", "--config", place / "config.toml"], stdout=log, stderr=log)
    try:
        until(lambda: subprocess.run(["ctr", "--address", place / "sock", "version"], capture_output=True).returncode == 0, "containerd")
        added = [word for name in capabilities for word in ("--cap-add", name)]
        ctr = ["ctr", "--address", place / "sock", "containers"]
        run(*ctr, "create", "--rootfs", "--seccomp", *added, place / "rootfs", "probe", "/bin/true")
        profile = json.loads(run(*ctr, "info", "probe"))["Spec"]["linux"]["seccomp"]
        run(*ctr, "delete", "probe")
        return profile
    finally:
        daemon.terminate()
        daemon.wait(30)


def written(place, objects, root, image, extra):
    """What a container runtime makes of the pod: the OCI configuration, with nothing that the pod does not ask for."""
    pod, container = chart.pod(objects), chart.container(objects)
    security = container["securityContext"]
    assert pod["hostPID"] and not security["privileged"]
    (place / "config").mkdir()
    (place / "config/cotenant.toml").write_text(chart.configuration(objects), encoding="utf-8")
    (place / "run").mkdir()
    (place / "podinfo").mkdir()
    (place / "podinfo/release").write_text("", encoding="utf-8")
    own = {name: str(place / name) for name in ("config", "run", "podinfo")}
    volumes = {one["name"]: one["hostPath"]["path"] if "hostPath" in one else own[one["name"]] for one in pod["volumes"]}
    capabilities = [f"CAP_{name}" for name in security["capabilities"]["add"]]
    environment = {one["name"]: one.get("value", "this-node") for one in container["env"]}
    if pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault":
        seccomp = runtime_default(place / "containerd", capabilities)
    else:
        seccomp = json.loads((chart.DEPLOY / "seccomp/cotenant.json").read_text(encoding="utf-8"))
        for one in seccomp["syscalls"]:
            one.pop("comment")
    mount = lambda to, kind, source, *options: {"destination": to, "type": kind, "source": source, "options": list(options)}  # noqa: E731
    mounts = [
        mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
        mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
        *(mount(one["mountPath"], "bind", volumes[one["name"]], "rbind", "rprivate", "ro" if one.get("readOnly") else "rw") for one in container["volumeMounts"]),
        *extra,
    ]
    spec = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": pod["securityContext"]["runAsUser"], "gid": pod["securityContext"]["runAsGroup"]},
            "args": image["Entrypoint"] + container["args"],
            "cwd": "/",
            "env": [*image["Env"], *(f"{name}={value}" for name, value in environment.items())],
            "capabilities": {name: capabilities for name in ("bounding", "effective", "permitted")},
            "noNewPrivileges": not security["allowPrivilegeEscalation"],
        },
        "root": {"path": str(root), "readonly": security["readOnlyRootFilesystem"]},
        "hostname": "this-node",
        "mounts": mounts,
        "linux": {
            # No PID namespace: hostPID. The network is the host's, for the test to reach it.
            "namespaces": [{"type": name} for name in ("mount", "ipc", "uts")],
            "maskedPaths": MASKED.split(),
            "readonlyPaths": READ_ONLY.split(),
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "memory": {"limit": int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20},
            },
            "seccomp": seccomp,
        },
    }
    (place / "config.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")


@contextlib.contextmanager
def running(place, log):
    name = f"cotenant-test-{os.getpid()}"
    with open(log, "w", encoding="utf-8") as file:
        # Its state is not the host's.
        child = subprocess.Popen(["runc", "--root", str(place / "runc"), "run", "--bundle", str(place), name], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield child, lambda: json.loads(run("runc", "--root", place / "runc", "state", name))["pid"]
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
        subprocess.run(["runc", "--root", str(place / "runc"), "delete", "--force", name], capture_output=True)


class Image(unittest.TestCase):
    def test_it_has_the_agent_what_it_is_linked_with_and_no_shell(self):
        with tempfile.TemporaryDirectory() as directory:
            root, image, size = bundle(pathlib.Path(directory))
            print(f"\nthe image: {size} bytes compressed")
            self.assertLess(size, BUDGET)
            self.assertEqual(image["Entrypoint"], ["/usr/bin/cotenant"])
            self.assertEqual(image["Labels"]["org.opencontainers.image.licenses"], "Apache-2.0")
            programs = {path.name for path in (root / "usr/bin").iterdir()}
            self.assertEqual(programs, {"cotenant"})
            self.assertFalse((root / "usr/sbin").exists() and any((root / "usr/sbin").iterdir()))
            version = run("chroot", root, "/usr/bin/cotenant", "--version")
            self.assertIn(image["Labels"]["org.opencontainers.image.version"], version)
            self.assertIn("BEGIN CERTIFICATE", (root / "etc/ssl/certs/ca-certificates.crt").read_text(encoding="utf-8"))
            self.bill(json.loads((root / "usr/share/cotenant/sbom.cdx.json").read_text(encoding="utf-8")), root)

    def bill(self, bill, root):
        parts = bill["components"]
        references = [part["bom-ref"] for part in parts]
        self.assertEqual(len(references), len(set(references)))
        names = {part["name"] for part in parts}
        self.assertLessEqual({"aya", "tokio", "nvml-wrapper", "cotenant-ebpf", "libc6", "ca-certificates"}, names)
        installed = {path.name for path in (root / "var/lib/dpkg/status.d").iterdir()}
        self.assertEqual({part["name"] for part in parts if part["purl"].startswith("pkg:deb/")}, installed)
        # Of the build and of tests only.
        self.assertFalse(names & {"protox", "tempfile", "cotenant-sim-state"})
        self.assertTrue(all("licenses" in part for part in parts if part["purl"].startswith("pkg:cargo/")))

    def pod(self, profile, kernel_log=False):
        """The agent in its pod on the simulated node: what it lacks, what it holds, and that it names a tenant's pod."""
        with contextlib.ExitStack() as stack:
            simulated = stack.enter_context(node.node())
            place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cotenant-pod-")))
            logs = place / "pod-logs"
            (logs / f"shop_chat-0_{UID}/server").mkdir(parents=True)
            (place / "pod-resources").mkdir()
            port = node.port()
            objects = chart.rendered(
                f"--set=server.port={port},server.address=127.0.0.1,server.hostNetwork=true",
                f"--set=host.podLogs={logs},host.podResources={place}/pod-resources",
                f"--set=gpu.libraryPath={simulated}/lib,config.nvml.interval=500ms",
                f"--set=securityContext.seccomp.type={profile}",
                f"--set=host.kernelLog={str(kernel_log).lower()}",
                f'--set-json=extraEnv=[{{"name":"COTENANT_SIM_NODE","value":"{simulated}"}}]',
            )
            root, image, _ = bundle(place)
            # Where the simulated driver's state is: on a real node that is behind /dev/nvidia*.
            inside = {"destination": str(simulated), "type": "bind", "source": str(simulated), "options": ["rbind", "rprivate", "rw"]}
            written(place, objects, root, image, [inside])
            log = place / "agent.log"
            _, pid = stack.enter_context(running(place, log))
            agent = node.Agent(port)
            try:
                until(lambda: agent.ask("/metrics"), "the agent")
            except TimeoutError:
                self.fail(log.read_text(encoding="utf-8"))
            status = pathlib.Path(f"/proc/{pid()}/status").read_text(encoding="utf-8")
            self.assertIn("NoNewPrivs:\t1", status)
            self.assertIn("Seccomp:\t2", status)
            self.sees_a_tenant(agent, simulated)
            self.holds_to_its_memory(pid(), objects)
            # NVML has answered by now.
            lacking = agent.lacking()
            print(f"\nlacking in the pod with seccomp {profile}: {lacking}")
            self.assertLessEqual(set(lacking), self.allowed())
            # The pod's device cgroup lets nobody open the device, mounted or not; the call is let through by both profiles.
            state, reason = agent.feature("kernel_log")
            self.assertEqual(state, "active", reason)
            self.assertIn("by syslog(2)", reason)
            self.assertIn("Operation not permitted" if kernel_log else "No such file", reason)

    def holds_to_its_memory(self, pid, objects):
        """Half of the limit at most, the kernel's maps included, on an idle node."""
        groups = dict(line.split(":", 2)[1:] for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines())
        places = [f"/sys/fs/cgroup/memory{groups.get('memory')}/memory.usage_in_bytes", f"{node.UNIFIED}{groups.get('')}/memory.current"]
        used = int(next(path for path in map(pathlib.Path, places) if path.exists()).read_text())
        limit = int(chart.container(objects)["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
        print(f"memory of its cgroup: {used >> 20} of {limit >> 20} MiB")
        self.assertLess(used, limit / 2)

    def allowed(self):
        """What this host lacks for everybody: a kubelet, NVIDIA's module, and a kernel with the dmem controller."""
        lacks = {"kubelet", "grants", "xid_tracepoint", "dmem"}
        if not pathlib.Path("/sys/bus/event_source/devices/kprobe").exists():
            lacks.add("gpu_boundary")
        return lacks

    def sees_a_tenant(self, agent, simulated):
        cgroup = f"kubepods/besteffort/pod{UID}/{CONTAINER}"
        script = "init\nuuid 0\nretain 0\nprint loaded\nwait\nalloc a 64MiB\nprint held\nwait\n"
        with node.tenant(simulated, cgroup, script) as one:
            self.assertEqual(one.stdout.readline(), "loaded\n")
            until(lambda: agent.value("cotenant_agent_probe_libraries", state="attached"), "the tenant's libcuda")
            one.stdin.write("\n")
            one.stdin.flush()
            self.assertEqual(one.stdout.readline(), "held\n")
            labels = {"tenant": "pod:shop/chat-0", "k8s_namespace_name": "shop", "k8s_pod_name": "chat-0"}
            live = lambda: agent.value("cotenant_gpu_memory_live_bytes", memory_kind="device", **labels)  # noqa: E731
            until(lambda: live() == 64 << 20, f"the tenant's bytes; {agent.lacking()}")
            until(lambda: (agent.value("cotenant_gpu_memory_process_bytes", **labels) or 0) > 64 << 20, "NVML's figure")

    def test_the_pod_runs_under_the_chart_s_rights(self):
        # With the profile that containerd has for these capabilities.
        self.pod("RuntimeDefault")

    def test_c73_and_under_the_shipped_seccomp_profile(self):
        self.pod("Localhost", kernel_log=True)


if __name__ == "__main__":
    unittest.main()
