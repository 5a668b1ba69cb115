#!/usr/bin/env bash
# Owns the recorded runs of a real GPU: the agent records, tenants of every habit fill the memory, files under $OUT.
# Refuses card settings, managed memory, and any network but loopback.
#
#   tests/gpu/record.sh [agent binary] --part N      as root; needs python3 with torch. --list shows the parts
set -euo pipefail
source "$(dirname "$0")/prologue.sh"

python3 "$here/record.py" --agent "$agent" --build "$build" --out "$out" "$@"
