"""Owns the programs that a recorded run needs: the demo node, Prometheus, Alertmanager, and somebody who gets the alerts.

Refuses to stand in for any of them: they are the real ones, each ended on leaving its `with`.
"""

import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import shipped

# As Debian calls it, and as everybody else does.
ALERTMANAGERS = ("prometheus-alertmanager", "alertmanager")
PATIENCE = 30


def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def until(wanted, seconds=PATIENCE, what="it"):
    """What `wanted` returns as soon as that is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if got := wanted():
                return got
        time.sleep(0.2)
    raise TimeoutError(f"{what} did not come in {seconds} s")


def ask(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def running(command, log, **options):
    with open(log, "w", encoding="utf-8") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Prometheus:
    def __init__(self, address):
        self.address = address

    def get(self, path, **values):
        query = urllib.parse.urlencode(values)
        return json.loads(ask(f"http://{self.address}/api/v1/{path}?{query}"))["data"]

    def over(self, expr, start, end, step):
        return self.get("query_range", query=expr, start=start, end=end, step=step)["result"]

    def at(self, expr, moment=None):
        return self.get("query", query=expr, **({} if moment is None else {"time": moment}))["result"]


@contextlib.contextmanager
def prometheus(place, settings, data=None, patience=PATIENCE):
    """Prometheus with these settings (text), its data in `data` or below `place`; reading many again takes patience."""
    address = f"127.0.0.1:{port()}"
    (place / "prometheus.yml").write_text(settings, encoding="utf-8")
    command = [
        "prometheus",
        f"--config.file={place}/prometheus.yml",
        f"--storage.tsdb.path={data or place / 'data'}",
        "--storage.tsdb.retention.time=10y",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with running(command, place / "prometheus.log"):
        until(lambda: ask(f"http://{address}/-/ready"), patience, "Prometheus")
        yield Prometheus(address)


@contextlib.contextmanager
def alertmanager(place, settings):
    address = f"127.0.0.1:{port()}"
    (place / "alertmanager.yml").write_text(settings, encoding="utf-8")
    program = next(filter(shutil.which, ALERTMANAGERS))
    command = [
        program,
        f"--config.file={place}/alertmanager.yml",
        f"--storage.path={place}/alertmanager",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with running(command, place / "alertmanager.log"):
        until(lambda: ask(f"http://{address}/-/ready"), what="Alertmanager")
        yield address


class Inbox:
    """Who is told: messages as Alertmanager's webhook sends them, with the path that each came to."""

    def __init__(self):
        self.messages = []
        inbox = self

        class Receiver(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.messages.append((self.path.strip("/"), body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def alerts(self, name, status):
        """(receiver, group's labels, alert) of every alert of this name and status that came."""
        return [
            (receiver, body["groupLabels"], alert)
            for receiver, body in list(self.messages)
            for alert in body["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]


def artefacts():
    return pathlib.Path(os.environ.get("COTENANT_ARTEFACTS", shipped.ROOT / "target/debug"))


@contextlib.contextmanager
def demo(place, seconds, settings=""):
    """The demo node, its agent with `settings` (TOML) beside the demo's own; gives the agent's address and the process.
    Waits for other simulated nodes to end."""
    program = artefacts() / "cotenant-demo"
    log = place / "demo.log"
    more = place / "more.toml"
    more.write_text(settings, encoding="utf-8")
    environment = {**os.environ, "DEMO_SECONDS": str(seconds), "DEMO_SETTINGS": str(more)}
    with running([program], log, cwd=place, env=environment) as child:

        def serves():
            if child.poll() is not None:
                raise RuntimeError(f"the demo ended: {log.read_text(encoding='utf-8')[-2000:]}")
            return re.search(r"serves http://([\d.:]+)/metrics", log.read_text(encoding="utf-8"))

        yield until(serves, 600, "the demo's agent")[1], child
