"""Owns what of a take is shipped with the tests: its recording without what the forecaster knew, and the truth beside it.

Refuses a take of two tenants with one name: their accounts are one file.

    tests/gpu/shipped.py AGENT HOST.json TAKE-FOLDER INTO      INTO/TAKE.rec and INTO/TAKE.json; AGENT reads both recordings
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

from recorded import refusals, truths

# The file's name and version; then blocks: length, checksum, so many bytes.
HEAD, BLOCK = 16, struct.Struct("<II")


def moments(recording):
    """The recording as it is, less its first block: where the forecaster stood when it began."""
    held = recording.read_bytes()
    length, _ = BLOCK.unpack_from(held, HEAD)
    return held[:HEAD] + held[HEAD + BLOCK.size + length :]


def replayed(agent, recording):
    answer = subprocess.run([agent, "replay", str(recording)], capture_output=True, text=True, timeout=120, check=True)
    return len(answer.stdout.splitlines())


def began(folder, players, zero):
    """When the growth of those who drive began, or a burst; a line a start, for each is started as often as the others."""
    starts = {}
    for player in players:
        number, known = -1, False
        for row in truths(folder, player["unit"]):
            if row.get("event") == "started":
                number, known = number + 1, False
            first = row.get("event") == "burst" or row.get("event") in ("ramp", "cell") and player["drives"]
            if first and not known:
                known = True
                starts[number] = min(row["t"] - zero, starts.get(number, float("inf")))
    return [round(at, 1) for at in sorted(starts.values())]


def story(folder, take, told, zero):
    players = [player for player in take["players"] if player["gpu"] == told["gpu"]]
    refused = [
        {"at": round(row["t"] - zero, 1), "tenant": f"systemd:{player['unit']}", "asked": row.get("asked")}
        for player in players
        for row in refusals(truths(folder, player["unit"]))
    ]
    return {
        "name": told["name"], "gpu": told["gpu"], "meant": told["ends"],
        "drivers": [f"systemd:{player['unit']}" for player in players if player["drives"]],
        "began": began(folder, players, zero),
        "refusals": sorted(refused, key=lambda refusal: refusal["at"]),
    }


def main():
    agent, host, folder, into = sys.argv[1], *map(Path, sys.argv[2:])
    host, take = json.loads(host.read_text()), json.loads((folder / "take.json").read_text())
    units = [player["unit"] for player in take["players"]]
    if len(set(units)) < len(units):
        sys.exit(f"{folder}: two tenants with one name; name them apart in stories.py and play it again")
    low, high = take["clock"]
    _, gpu, driver, memory = host["gpus"][0].split(", ")
    truth = {
        "take": take["take"], "date": host["date"][:10], "kernel": host["kernel"], "gpu": f"{gpu}, {memory}", "driver": driver,
        "clock_known_to_ms": round(1000 * (high - low)),
        "stories": [story(folder, take, told, (low + high) / 2) for told in take["stories"]],
    }
    shipped = into / f"{take['take']}.rec"
    shipped.write_bytes(moments(folder / "recording"))
    if replayed(agent, shipped) != replayed(agent, folder / "recording"):
        sys.exit(f"{folder}: its first block was no beginning, or more than one is")
    shipped.with_suffix(".json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
