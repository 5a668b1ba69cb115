"""Owns programs of others' making that receive OTLP, from later suites of Debian than this machine's: VictoriaMetrics as it is,
and a Collector built of Debian's library packages with Debian's Go.

Refuses to install anything: all of it is below target/receivers. Some 350 MB are fetched the first time, most of it Go.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACE = ROOT / "target/receivers"
sys.path.insert(0, str(ROOT / "tests/kernels"))
import packages  # noqa: E402

VICTORIA = PLACE / "victoria/usr/bin"
COLLECTOR = PLACE / "otelcol"
SOURCE = pathlib.Path(__file__).parent / "collector"
# Of the Collector's packages' own dependencies: large, and of nothing that is built here.
UNUSED = ("aws-sdk", "google-cloud-dev", "google-api-dev", "circl", "gonum-v1-plot", "tools_", "pprof", "mongo")


def victoria():
    if not (VICTORIA / "victoria-metrics").exists():
        suite = packages.Suite("trixie")
        suite.update()
        suite.unpack("victoria-metrics", PLACE / "victoria")
    return VICTORIA


def collector():
    if not COLLECTOR.exists():
        build(libraries())
    return COLLECTOR


def libraries():
    """Debian's Go and the Collector's libraries with all that they need, unpacked."""
    root = PLACE / "libraries"
    if (root / ".done").exists():
        return root
    suite = packages.Suite("sid")
    suite.update()
    nothing = PLACE / "nothing-is-installed"
    nothing.parent.mkdir(parents=True, exist_ok=True)
    nothing.write_text("")
    wanted = ("golang-opentelemetry-collector-dev", "golang-any")
    options = ("-o", f"Dir::State::status={nothing}", "-qq", "-y", "--no-install-recommends", "--download-only")
    answer = suite.apt("apt-get", *options, "install", *wanted)
    if answer.returncode != 0:
        raise packages.Gone(f"{', '.join(wanted)} of sid cannot be fetched: {answer.stderr}")
    for deb in sorted((suite.place / "cache/archives").glob("golang-*.deb")):
        if not any(word in deb.name for word in UNUSED):
            subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        deb.unlink()
    (root / ".done").touch()
    return root


def build(root):
    (go,) = (root / "usr/lib").glob("go-*")
    path = PLACE / "gopath"
    path.mkdir(exist_ok=True)
    if not (path / "src").exists():
        (path / "src").symlink_to(root / "usr/share/gocode/src")
    settings = {"GOROOT": go, "GOPATH": path, "GOCACHE": PLACE / "gocache", "GO111MODULE": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    print("building the Collector (some minutes)", flush=True)
    subprocess.run([go / "bin/go", "build", "-trimpath", "-o", COLLECTOR, "."], cwd=SOURCE, env={**os.environ, **settings}, check=True)
