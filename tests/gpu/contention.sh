#!/usr/bin/env bash
# Owns the contention proof on a real GPU: builds the loops, runs the scenarios, leaves files under $OUT.
# Refuses card settings, managed memory, and any network but loopback. The MPS scenario starts and stops its own server.
#
#   tests/gpu/contention.sh [agent binary] [--only SCENARIO ...]    as root; needs python3 (torch, pynvml), nvcc's headers, gcc
set -euo pipefail
source "$(dirname "$0")/prologue.sh"

limits
toolkit
for program in contend latency fault; do
    gcc -O1 -w -I"$cuda/include" "$here/workloads/$program.c" -o "$build/$program" "$library" -lpthread
done
gcc -O1 -w "$here/workloads/switch.c" -o "$build/switch"

python3 "$here/contention.py" --agent "$agent" --library "$library" --build "$build" --out "$out" "$@"
python3 "$here/verdict.py" "$out/collected.json" "$out" h200-waits
