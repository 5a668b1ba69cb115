#!/usr/bin/env python3
"""Owns what follows from the chart's values: its schema, and the plain manifests that show the chart's defaults.

Refuses keys that it does not find in values.yaml or, for the agent's configuration, in deploy/cotenant.toml.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import yaml

DEPLOY = pathlib.Path(__file__).resolve().parents[1]
CHART = DEPLOY / "helm/cotenant"
SCHEMA = CHART / "values.schema.json"
MANIFEST = DEPLOY / "kubernetes/daemonset.yaml"
API_WATCH = DEPLOY / "kubernetes/api-watch.yaml"
TOOLS = DEPLOY.parent / "target/tools/bin"
NAMESPACE = "cotenant"

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
QUANTITY = {"type": ["string", "integer"]}
CAPABILITY = {"type": "array", "items": {"type": "string", "pattern": "^[A-Z_]+$"}, "uniqueItems": True}

# What a default does not tell: values of Kubernetes' own types, and those with a few allowed words.
KNOWN = {
    "config.otlp.protocol": {"enum": ["grpc", "http/protobuf"]},
    "config.otlp.compression": {"enum": ["none", "gzip", "zstd"]},
    "config.otlp.temporality": {"enum": ["cumulative", "delta"]},
    "config.otlp.histograms": {"enum": ["explicit", "exponential"]},
    "config.log.format": {"enum": ["text", "json"]},
    "affinity": OBJECT,
    "tolerations": OBJECTS,
    "extraEnv": OBJECTS,
    "imagePullSecrets": OBJECTS,
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "server.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "securityContext.capabilities.add": CAPABILITY,
    "securityContext.seccomp.type": {"enum": ["RuntimeDefault", "Localhost", "Unconfined"]},
    "securityContext.appArmor.type": {"enum": ["", "RuntimeDefault", "Localhost", "Unconfined"]},
    "updateStrategy": OBJECT,
    # A request for a GPU would take it from a tenant: resources are those of the processor and the memory only.
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            of: {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: QUANTITY for name in ("cpu", "memory", "ephemeral-storage")},
            }
            for of in ("requests", "limits")
        },
    },
    "otlp.protocol": {"enum": ["grpc", "http/protobuf"]},
    "monitoring.podMonitor.metricRelabelings": OBJECTS,
    "monitoring.podMonitor.tlsConfig": OBJECT,
    "monitoring.podMonitor.basicAuth": OBJECT,
    "monitoring.serviceMonitor.tlsConfig": OBJECT,
    "monitoring.serviceMonitor.basicAuth": OBJECT,
    "monitoring.serviceMonitor.metricRelabelings": OBJECTS,
    "networkPolicy.from": OBJECTS,
    "networkPolicy.egress": OBJECTS,
    "gpuNodeLabels": {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["key"],
            "properties": {"key": {"type": "string"}, "value": {"type": "string"}},
        },
    },
}
PROBE = {
    name: {"type": "integer", "minimum": 1}
    for name in ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold")
}
# Set by the chart from other values; here they would be a second place for the same thing.
ELSEWHERE = {
    "config.server.listen",
    "config.server.web_config",
    "config.nvml.library",
    "config.nvml.release_file",
    "config.kubernetes.api_watch",
}


def configuration():
    """Every key of the commented configuration with its default or its example."""
    lines = (DEPLOY / "cotenant.toml").read_text(encoding="utf-8").splitlines()
    uncommented = [re.sub(r"^#+ ?(?=[a-z_]+ = )", "", line) for line in lines]
    return tomllib.loads("\n".join(uncommented))


def described(value, path=""):
    if path in KNOWN:
        return KNOWN[path]
    if re.fullmatch(r"probes\.\w+", path):
        return {"type": "object", "additionalProperties": False, "properties": PROBE}
    if value == {}:
        return STRINGS
    if isinstance(value, dict):
        inner = {key: described(of, f"{path}.{key}".lstrip(".")) for key, of in value.items()}
        for key in {name.rpartition(".")[2] for name in ELSEWHERE if name.rpartition(".")[0] == path}:
            inner.pop(key, None)
        return {"type": "object", "additionalProperties": False, "properties": inner}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer", "minimum": 0}
    if isinstance(value, float):
        return {"type": "number"}
    if isinstance(value, str):
        return {"type": "string"}
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(value, list) and path.startswith("config."):
        return {"type": "array"}
    raise TypeError(f"{path}: what its value may be is not known; say it in KNOWN")


def schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    values["config"] = configuration()
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart cotenant"}
    whole |= described(values)
    # Helm's own.
    whole["properties"] |= {"global": OBJECT}
    return json.dumps(whole, indent=2) + "\n"


def helm():
    found = shutil.which("helm", path=f"{TOOLS}:/usr/local/bin:/usr/bin:/bin") or shutil.which("helm")
    if not found:
        sys.exit("helm is missing: `make setup` brings it")
    return found


def plain(*arguments):
    """The chart with its defaults and these, as lines without Helm's own labels."""
    command = [helm(), "template", "cotenant", str(CHART), "--namespace", NAMESPACE, "--skip-tests", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    kept = [line for line in done.stdout.splitlines() if not re.match(r"\s*(helm\.sh/chart|app\.kubernetes\.io/managed-by):", line)]
    return "\n".join(line.rstrip() for line in kept if not line.startswith("# Source:")) + "\n"


def manifest():
    """Everything that the defaults make."""
    head = f"""\
# Cotenant on every GPU node, without Helm: what the chart makes of its defaults. Written by deploy/helm/generate.py.
# kubectl apply -f daemonset.yaml; deploy/README.md says what other platforms need changed.
---
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    # hostPID and hostPath are beyond the milder levels.
    pod-security.kubernetes.io/enforce: privileged
"""
    return head + plain()


def api_watch():
    """The rights that the watch at the API server needs."""
    head = """\
# What kubernetes.api_watch = true needs beside daemonset.yaml. Written by deploy/helm/generate.py.
# kubectl apply -f api-watch.yaml; then, in daemonset.yaml, automountServiceAccountToken: true in the DaemonSet and
# api_watch = true below [kubernetes] of the ConfigMap.
"""
    return head + plain("--set=apiWatch.enabled=true", "--show-only=templates/rbac.yaml")


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
    MANIFEST.parent.mkdir(exist_ok=True)
    MANIFEST.write_text(manifest(), encoding="utf-8")
    API_WATCH.write_text(api_watch(), encoding="utf-8")
