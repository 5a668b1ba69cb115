"""Owns the check of a take: what its recording replays to, beside the accounts that the tenants kept of themselves.

Refuses to read the recording's bytes: `cotenant replay` does that, so that the file is proven readable.

    tests/gpu/recorded.py AGENT FOLDER ...      a line a tenant and a line an exhaustion, for each take's folder
"""

import bisect
import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
# The kernel's figures are read some time within the tick, and accounts are written a little after what they say.
SLACK = 1.0
# What ledgers have beyond PyTorch's reserve (the libraries' own memory), and less by it.
NEAR = 64 * MIB


def forecasts(agent, recording):
    answer = subprocess.run([str(agent), "replay", str(recording)], capture_output=True, text=True, timeout=120)
    return [json.loads(line) for line in answer.stdout.splitlines()], answer.stderr.strip()


def seconds(duration):
    return duration["secs"] + duration["nanos"] / 1e9


def truths(folder, unit):
    rows = []
    for line in (folder / f"{unit}.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass  # the last line of a tenant that was ended while writing
    return rows


def refusals(rows):
    """What the program saw as an error: as it told of it, or as its library counted where it went on without a word."""
    known = 0
    for row in rows:
        counted = row.get("ooms", known)
        if row.get("event") == "refused" or counted > known:
            yield row
        known = counted


def compare(agent, folder):
    """Lines of text; the first says what the take is."""
    folder = Path(folder)
    take = json.loads((folder / "take.json").read_text())
    said, complaint = forecasts(agent, folder / "recording")
    low, high = take["clock"]
    zero = (low + high) / 2
    yield (
        f"{take['take']}: {len(said)} moments, {take['recording_bytes']} bytes, clock known to {1000 * (high - low):.0f} ms"
        + (f", losses {take['losses']}" if take.get("losses") else "")
        + (f", replay says: {complaint}" if complaint else "")
    )
    if len(said) < 0.8 * take["seconds"] * take["pace"] - 12:
        yield f"  TOO SHORT: {take['seconds'] * take['pace']:.0f} s were played"
    for player in take["players"]:
        yield "  " + tenant(folder, take, player, said, zero)
    for story in take["stories"]:
        yield "  " + exhaustion(folder, take, story, said, zero)
    answer = subprocess.run([str(agent), "backtest", str(folder / "recording"), "--rule", "risk"], capture_output=True, text=True, timeout=120)
    yield f"  backtest: {answer.stdout.splitlines()[-1] if answer.returncode == 0 else answer.stderr.strip()}"


def tenant(folder, take, player, said, zero):
    """How far the recorded bytes are from the tenant's own at moments when these stood still."""
    rows = [row for row in truths(folder, player["unit"]) if "reserved" in row]
    times = [row["t"] for row in rows]
    moments = gap = wrong = 0
    most = 0
    for forecast in said:
        at = zero + seconds(forecast["at"])
        if not times or not times[0] <= at <= times[-1]:
            # Before its first word and after its last its own account says nothing.
            continue
        around = rows[bisect.bisect_left(times, at - SLACK) : bisect.bisect_right(times, at + SLACK)]
        gpu = next((gpu for gpu in forecast["gpus"] if gpu["gpu"] == player["gpu"]), None)
        if gpu is None or len(around) < 2:
            continue
        live = next((one["live"] for one in gpu["tenants"] if one["tenant"]["name"] == f"systemd:{player['unit']}"), 0)
        most = max(most, live)
        levels = {row["reserved"] for row in around}
        # Between the account's levels anything may have been the case.
        off = max(min(levels) - live, live - max(levels), 0)
        moments += 1
        wrong += off > NEAR
        gap = max(gap, off)
    refused = sum(1 for _ in refusals(truths(folder, player["unit"])))
    codes = [start.get("code") for start in player["starts"]]
    return (
        f"{player['unit']} ({player['habit']}, {player['story']}): most {most / MIB:.0f} MiB by the recording, "
        f"{max((row['reserved'] for row in rows), default=0) / MIB:.0f} MiB by itself; {wrong} of {moments} moments further than "
        f"{NEAR // MIB} MiB off, at most {gap / MIB:.1f} MiB; {refused} refusals, exit codes {codes}"
    )


def exhaustion(folder, take, story, said, zero):
    """When the card ran out first, by the recording and by the tenants."""
    recorded = next(
        (zero + seconds(forecast["at"]) for forecast in said for gpu in forecast["gpus"] if gpu["gpu"] == story["gpu"] and gpu["exhausted"]),
        None,
    )
    refused = [
        (row["t"], player["unit"])
        for player in take["players"]
        if player["gpu"] == story["gpu"]
        for row in refusals(truths(folder, player["unit"]))
    ]
    begun = take["begun"]
    words = [f"{story['name']} is to end with {story['ends']}:"]
    if refused:
        at, unit = min(refused)
        words.append(f"{unit} was refused first, at {at - begun:.1f} s;")
    else:
        words.append("nobody was refused;")
    words.append(f"the recording runs out at {recorded - begun:.1f} s" if recorded else "the recording never runs out")
    if (story["ends"] == "nothing") == bool(refused) or bool(refused) != bool(recorded):
        words.append("NOT AS MEANT")
    return " ".join(words)


if __name__ == "__main__":
    for place in sys.argv[2:]:
        for text in compare(sys.argv[1], place):
            print(text)
