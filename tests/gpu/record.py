"""Owns the takes: a fresh agent and a recorder for each, its tenants in cgroups of their own, and all accounts packed up.

Refuses verdicts: what a recording says beside the tenants' own accounts is recorded.py's business.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import drive
import stories
from recorded import compare

HERE = Path(__file__).resolve().parent
# Starting and ending a take, beside its seconds; and the first use of PyTorch on a cold disk.
BETWEEN, WARMING = 19.0, 15.0
# A unit that failed is started again after so long.
RESTART = 3.0


class Agent(drive.Agent):
    """As it is shipped: its own defaults, but for what the node needs."""

    HEAD = ""


def hierarchy():
    """The cgroup2 mount."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return Path(next(row[1] for row in rows if row[2] == "cgroup2"))


class Units:
    """Cgroups as systemd would have them; removed at the end, those that were made here."""

    def __init__(self):
        self.slice, self.made = hierarchy() / "system.slice", []

    def enter(self, unit):
        group = self.slice / unit
        if not group.exists():
            group.mkdir(parents=True)
            self.made.append(group)
        return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self):
        for group in self.made:
            with contextlib.suppress(OSError):
                group.rmdir()


class Player:
    """One tenant of a take: started, started again where its unit would be, stopped."""

    def __init__(self, options, units, take, cast, gpu, place):
        self.cast, self.enter = cast, units.enter(cast.unit)
        self.truth = place / f"{cast.unit}.jsonl"
        self.log = (place / f"{cast.unit}.log").open("w")
        self.starts, self.ended = [], None
        self.given = cast.given
        self.command = [
            sys.executable, HERE / "workloads/tenant.py", cast.habit, "--truth", self.truth, "--backend", options.backend,
            "--seed", f"{take.name}/{cast.unit}", "--pace", options.pace, "--seconds", take.seconds,
        ]
        self.environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}

    def start(self, begun):
        self.begun = begun
        command = [str(word) for word in (*self.command, "--given", json.dumps(self.given), "--begun", begun)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=self.environment, preexec_fn=self.enter
        )
        self.starts.append({"t": time.monotonic(), "pid": self.process.pid})
        self.ended = None

    def look(self, pace):
        """Notes an end, and after a while starts again what is to be."""
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()
            self.starts[-1].update(ended=self.ended, code=self.process.returncode)
        elif self.ended and self.due(pace):
            self.given = {**self.cast.given, **self.cast.again}
            self.start(self.begun)

    def due(self, pace):
        failed = self.cast.again is not None and self.process.returncode != 0
        return failed and time.monotonic() > self.ended + RESTART * pace

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.starts[-1].setdefault("code", self.process.returncode)
        self.log.close()

    def account(self, story, gpu):
        return {
            "unit": self.cast.unit, "habit": self.cast.habit, "given": self.cast.given, "drives": self.cast.drives,
            "story": story.name, "gpu": gpu, "starts": self.starts,
        }


def clock(seconds=2.5):
    """From when to when, by this host's monotonic clock, the agent's own clock was at zero."""
    low, high, last, before = float("-inf"), float("inf"), None, time.monotonic()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        at = json.loads(drive.get("/api/v1/risk"))["at"]
        after = time.monotonic()
        at = at["secs"] + at["nanos"] / 1e9
        # The tick came before the answer; where it is a new one, after the question before.
        high = min(high, after - at)
        if last is not None and at != last:
            low = max(low, before - at)
        last, before = at, after
        time.sleep(0.02)
    return [low, high]


def play(options, units, take, gpus, place):
    place.mkdir(parents=True)
    file = place / "recording"
    account = {"take": take.name, "seconds": take.seconds, "pace": options.pace, "backend": options.backend}
    account["stories"] = [{"name": story.name, "ends": story.ends, "gpu": gpus[index]} for index, story in enumerate(take.stories)]
    players = [
        (Player(options, units, take, cast, index, place), story, gpus[index])
        for index, story in enumerate(take.stories)
        for cast in story.cast
    ]
    with Agent(options.agent, place / "agent.log", options.config) as agent:
        account["agent_ready_seconds"] = agent.ready
        command = [options.agent, "record", file, "--from", drive.AGENT.removeprefix("http://")]
        with (place / "recorder.log").open("w") as log:
            recorder = subprocess.Popen([str(word) for word in command], stderr=log)
        account["clock"] = clock()
        account["begun"] = begun = time.monotonic()
        try:
            for player, _, _ in players:
                player.start(begun)
            while time.monotonic() < begun + take.seconds * options.pace:
                for player, _, _ in players:
                    player.look(options.pace)
                time.sleep(0.1)
            account["losses"] = {name: count for name, count in json.loads(drive.get("/status"))["losses"].items() if count}
        finally:
            account["stopping"] = time.monotonic()
            recorder.send_signal(signal.SIGINT)
            # It waits for the block that the agent is filling.
            account["recorder"] = recorder.wait(20)
            for player, _, _ in players:
                if player.starts:
                    player.stop()
    account["players"] = [player.account(story, gpu) for player, story, gpu in players]
    account["recording_bytes"] = file.stat().st_size
    (place / "take.json").write_text(json.dumps(account, indent=1))
    return account


def cards():
    rows = drive.command("nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader").splitlines()
    # Ordinals are by bus, as the tenants are told to count.
    return [row.split(", ")[0] for row in sorted(rows, key=lambda row: row.split(", ")[1])]


def pack(out, name, folder):
    """Whole at any moment: a command may be cut off."""
    fresh = out / f".{name}.new"
    with tarfile.open(fresh, "w:gz") as tar:
        tar.add(folder, arcname=name)
    fresh.rename(out / f"{name}.tar.gz")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    for name in ("build", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--part", type=int, default=1)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of one part")
    parser.add_argument("--list", action="store_true", help="show the parts and leave")
    parser.add_argument("--only", nargs="*", help="takes to play, by name")
    parser.add_argument("--pace", type=float, default=1.0, help="below 1, the takes are so much shorter")
    parser.add_argument("--backend", default="torch", choices=("torch", "driver"))
    parser.add_argument("--gpus", nargs="*", help="UUIDs in the order of the driver's ordinals")
    parser.add_argument("--config", default="", help="the agent's configuration, as TOML")
    parser.add_argument("--address", default=drive.AGENT)
    options = parser.parse_args()
    begun = time.monotonic()
    drive.AGENT = options.address
    gpus = options.gpus or cards()
    if not gpus:
        sys.exit("no GPU here: nvidia-smi lists none")
    parts = stories.parts(len(gpus), (options.budget - WARMING) / options.pace, BETWEEN / options.pace)
    if options.list:
        for number, takes in enumerate(parts, 1):
            print(f"part {number}:", ", ".join(f"{take.name} ({take.seconds:g} s)" for take in takes))
        return
    takes = parts[options.part - 1] if options.only is None else [take for part in parts for take in part if take.name in options.only]
    name = f"recorded-part-{options.part}"
    folder = options.build / name
    folder.mkdir()
    if options.backend == "torch":
        subprocess.run([sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"], timeout=120, check=True)
    host = drive.host(argparse.Namespace(agent=options.agent, library=None))
    (folder / "host.json").write_text(json.dumps({**host, "ordinals": gpus}, indent=1))
    units = Units()
    units.enter("cotenant.service")()
    try:
        for take in takes:
            left = begun + options.budget - time.monotonic()
            if take.seconds * options.pace + BETWEEN > left:
                print(f"{take.name} LEFT OUT: {left:.0f} s are left", flush=True)
                continue
            try:
                play(options, units, take, gpus, folder / take.name)
                for line in compare(options.agent, folder / take.name):
                    print(line, flush=True)
            except Exception as error:  # one take's failure must not cost the others
                print(f"{take.name} FAILED: {error!r}", flush=True)
            pack(options.out, name, folder)
    finally:
        units.remove()
    print(f"{time.monotonic() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
