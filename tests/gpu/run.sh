#!/usr/bin/env bash
# Owns the proof on a real GPU: what runs on an H200 host, from a bare machine to files under $OUT.
# Refuses card settings, managed memory beyond a few MiB, and any network but loopback.
#
#   tests/gpu/run.sh [agent binary [--only SCENARIO ...]]      as root, in the repository root; needs python3 (torch, cupy, jax), nvcc, gcc
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
agent=$(realpath "${1:-$here/cotenant}")
out=${OUT:-$here/results/raw}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir -p "$out"

mounted() { grep -q " $1 $2 " /proc/mounts; }
mounted /sys/kernel/tracing tracefs || mount -t tracefs tracefs /sys/kernel/tracing
mounted /sys/fs/bpf bpf || mount -t bpf bpf /sys/fs/bpf
mounted /sys/fs/cgroup cgroup2 || mount -t cgroup2 cgroup2 /sys/fs/cgroup

library=$(realpath "$(ldconfig -p | awk '/libcuda\.so\.1 .*x86-64/ {print $NF; exit}')")
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cuda=$(dirname "$(dirname "$(realpath "$nvcc")")")
for program in driver latency; do
    gcc -O1 -w -I"$cuda/include" "$here/workloads/$program.c" -o "$build/$program" "$library"
done
"$nvcc" -w -cudart static -arch=sm_90 "$here/workloads/runtime.cu" -o "$build/runtime"

python3 "$here/drive.py" --agent "$agent" --library "$library" --build "$build" --out "$out" "${@:2}"
python3 "$here/compare.py" "$out/collected.json" "$out"
