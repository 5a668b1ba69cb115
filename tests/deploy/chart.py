"""Owns the chart as its users meet it: rendered by the real Helm with some values.

Refuses to judge what comes out: the tests do.
"""

import pathlib
import re
import subprocess
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/cotenant"
UNIT = DEPLOY / "systemd/cotenant.service"
AGENT = ROOT / "target/debug/cotenant"
TOOLS = ROOT / "target/tools"

sys.path.insert(0, str(DEPLOY / "helm"))
sys.path.insert(0, str(TOOLS / "python"))
import generate  # noqa: E402

PLATFORMS = {path.stem: path for path in sorted((CHART / "platforms").glob("*.yaml"))}

# Beside the platforms: everything on, everything off that can be, and each way of being let in.
SETS = {
    "default": [],
    "everything": [
        "--set=monitoring.podMonitor.enabled=true",
        "--set=monitoring.serviceMonitor.enabled=true",
        "--set=monitoring.prometheusRule.enabled=true",
        "--set=monitoring.dashboards.enabled=true",
        "--set=networkPolicy.enabled=true",
        "--set=host.runtimeSocket=/run/containerd",
        "--set=host.kernelLog=true",
        "--set=host.slurmJobMapping=/run/gpu-jobs",
        "--set=otlp.endpoint=https://collector:4317",
        "--set=otlp.envFromSecret=collector",
        "--set=config.otlp.interval=30s",
        "--set=config.kernel.pointers=1048576",
        "--set=config.waits.symbols.my_lock=other",
        "--set=securityContext.legacySysAdmin=true",
        "--set=securityContext.seccomp.type=Localhost",
        "--set=server.hostNetwork=true",
        "--set=gpu.runtimeClassName=nvidia",
        "--set-json=networkPolicy.from=[{\"namespaceSelector\":{}}]",
        "--set-json=imagePullSecrets=[{\"name\":\"registry\"}]",
    ],
    "teams": [
        "--set=apiWatch.enabled=true",
        "--set=networkPolicy.enabled=true",
        "--set=config.kubernetes.tenant_label=team",
        "--set-json=config.kubernetes.labels=[\"team\",\"app.kubernetes.io/name\"]",
    ],
    "least": [
        "--set=host.tracing=,host.cgroup=,host.podLogs=,host.podResources=",
        "--set=serviceAccount.create=false",
        "--set=gpu.visibleDevices=,gpu.driverCapabilities=,priorityClassName=",
        "--set-json=gpuNodeLabels=[]",
        "--set-json=tolerations=[]",
    ],
    "tls": [
        "--set=server.webConfig.secret=cotenant-web,server.webConfig.tls=true",
        "--set=monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true",
        '--set-json=monitoring.podMonitor.tlsConfig={"ca":{"secret":{"name":"authority","key":"ca.crt"}},"serverName":"cotenant"}',
        '--set-json=monitoring.podMonitor.basicAuth={"username":{"name":"scraper","key":"user"},"password":{"name":"scraper","key":"password"}}',
        '--set-json=monitoring.serviceMonitor.tlsConfig={"insecureSkipVerify":true}',
    ],
    "client-certificates": [
        "--set=server.webConfig.secret=cotenant-web,server.webConfig.tls=true,server.webConfig.clientCertificates=true",
    ],
    "passwords": ["--set=server.webConfig.secret=cotenant-web"],
    **{name: [f"--values={path}"] for name, path in PLATFORMS.items()},
}


def helm(*arguments):
    done = subprocess.run([generate.helm(), *arguments], capture_output=True, text=True)
    # What it tells about links in the chart is no complaint.
    words = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("level=INFO"))
    return done.returncode, done.stdout, words


def rendered(*arguments):
    """The objects that the chart makes of these values."""
    code, out, words = helm("template", "cotenant", str(CHART), "--namespace", "gpu", *arguments)
    if code:
        raise ValueError(words)
    return [each for each in yaml.safe_load_all(out) if each]


def of_kind(objects, kind):
    return [each for each in objects if each["kind"] == kind]


def pod(objects):
    (daemons,) = of_kind(objects, "DaemonSet")
    return daemons["spec"]["template"]["spec"]


def container(objects):
    (one,) = pod(objects)["containers"]
    return one


def configuration(objects):
    """The agent's configuration, as text."""
    (first,) = [each for each in of_kind(objects, "ConfigMap") if "cotenant.toml" in each["data"]]
    return first["data"]["cotenant.toml"]


def unit():
    """Every setting of the unit, with all the values that it is given."""
    settings = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"(\w+)=(.*)", line):
            settings.setdefault(found[1], []).append(found[2])
    return settings
