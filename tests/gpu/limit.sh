#!/usr/bin/env bash
# Owns the proof on a real GPU that a tenant's way to memory.max is warned of before the kernel kills it; leaves limit.txt under $OUT.
# Refuses card settings, managed memory, and any network but loopback.
#
#   tests/gpu/limit.sh [agent binary]    as root; needs python3, nvcc's headers, gcc; two minutes
set -euo pipefail
source "$(dirname "$0")/prologue.sh"

limits
toolkit
gcc -O1 -w -I"$cuda/include" "$here/workloads/contend.c" -o "$build/contend" "$library" -lpthread
python3 "$here/limit.py" --agent "$agent" --build "$build" --out "$out"
