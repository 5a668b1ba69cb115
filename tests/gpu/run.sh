#!/usr/bin/env bash
# Owns the proof on a real GPU: what runs on an H200 host, from a bare machine to files under $OUT.
# Refuses card settings, managed memory beyond a few MiB, and any network but loopback.
#
#   tests/gpu/run.sh [agent binary] [--only SCENARIO ...]      as root, in the repository root; needs python3 (torch, cupy, jax), nvcc, gcc
set -euo pipefail
source "$(dirname "$0")/prologue.sh"

toolkit
for program in driver latency; do
    gcc -O1 -w -I"$cuda/include" "$here/workloads/$program.c" -o "$build/$program" "$library"
done
"$nvcc" -w -cudart static -arch=sm_90 "$here/workloads/runtime.cu" -o "$build/runtime"

python3 "$here/drive.py" --agent "$agent" --library "$library" --build "$build" --out "$out" "$@"
python3 "$here/compare.py" "$out/collected.json" "$out"
