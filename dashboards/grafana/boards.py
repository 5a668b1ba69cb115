"""Owns which boards there are, and writes their JSON files beside this one: `python3 dashboards/grafana/boards.py`.

Refuses files edited by hand: tests/boards fails when they are not what this writes.
"""

import json
import pathlib

from fleet import fleet
from gpu import gpu
from incident import incident
from tenant import tenant

BOARDS = {"fleet": fleet, "gpu": gpu, "tenant": tenant, "incident": incident}


def written(name):
    return json.dumps(BOARDS[name](), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in BOARDS:
        (pathlib.Path(__file__).parent / f"{name}.json").write_text(written(name), encoding="utf-8")
