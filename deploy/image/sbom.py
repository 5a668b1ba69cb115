#!/usr/bin/env python3
"""Owns the image's bill of materials, as CycloneDX 1.5 JSON: the crates in the agent, and the packages in its root.

Refuses to guess: crates by `cargo metadata` for the target, packages by what was unpacked.
usage: sbom.py ARCHITECTURE ROOT OUTPUT
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = {"amd64": "x86_64-unknown-linux-gnu", "arm64": "aarch64-unknown-linux-gnu"}


def metadata(directory, *more):
    command = ["cargo", "metadata", "--locked", "--format-version", "1", *more]
    return json.loads(subprocess.run(command, cwd=directory, check=True, capture_output=True).stdout)


def linked(data, start):
    """The packages that `start` has linked in: no tools of the build, no tests."""
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    reached, left = set(), [start]
    while left:
        package = left.pop()
        if package in reached:
            continue
        reached.add(package)
        left += [dep["pkg"] for dep in nodes[package]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    return reached


def crates(directory, name, *more):
    data = metadata(directory, *more)
    start = next(package["id"] for package in data["packages"] if package["name"] == name)
    reached = linked(data, start)
    return [package for package in data["packages"] if package["id"] in reached]


def crate(package):
    url = f"pkg:cargo/{package['name']}@{package['version']}"
    one = {"type": "library", "bom-ref": url, "name": package["name"], "version": package["version"], "purl": url}
    if package["license"]:
        one["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    return one


def debian(control, architecture):
    field = dict(re.findall(r"^(\S+): (.*)$", control, re.M))
    url = f"pkg:deb/debian/{field['Package']}@{field['Version']}?arch={architecture}"
    return {"type": "library", "bom-ref": url, "name": field["Package"], "version": field["Version"], "purl": url}


def bill(architecture, root):
    found = crates(ROOT, "cotenant", "--filter-platform", TARGETS[architecture])
    found += crates(ROOT / "ebpf/programs", "cotenant-ebpf")
    parts = {part["bom-ref"]: part for part in map(crate, found)}
    agent = parts.pop(next(url for url, part in parts.items() if part["name"] == "cotenant"))
    for control in sorted((root / "var/lib/dpkg/status.d").iterdir()):
        part = debian(control.read_text(encoding="utf-8"), architecture)
        parts[part["bom-ref"]] = part
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**agent, "type": "application"}},
        "components": [parts[url] for url in sorted(parts)],
        "dependencies": [{"ref": agent["bom-ref"], "dependsOn": sorted(parts)}],
    }


if __name__ == "__main__":
    architecture, root, output = sys.argv[1:]
    text = json.dumps(bill(architecture, pathlib.Path(root)), indent=1)
    pathlib.Path(output).write_text(text + "\n", encoding="utf-8")
