#!/usr/bin/env bash
# Owns the contention proof on a real GPU: builds the loops, runs the scenarios, leaves files under $OUT.
# Refuses card settings, managed memory, and any network but loopback. The MPS scenario starts and stops its own server.
#
#   tests/gpu/contention.sh [agent binary [--only SCENARIO ...]]    as root; needs python3 (torch, pynvml), nvcc's headers, gcc
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
mkdir -p /sys/fs/cgroup/system.slice
# For memory.max of the kill scenario.
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
echo +memory >/sys/fs/cgroup/system.slice/cgroup.subtree_control

library=$(realpath "$(ldconfig -p | awk '/libcuda\.so\.1 .*x86-64/ {print $NF; exit}')")
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cuda=$(dirname "$(dirname "$(realpath "$nvcc")")")
for program in contend latency; do
    gcc -O1 -w -I"$cuda/include" "$here/workloads/$program.c" -o "$build/$program" "$library" -lpthread
done
gcc -O1 -w "$here/workloads/switch.c" -o "$build/switch"

python3 "$here/contention.py" --agent "$agent" --library "$library" --build "$build" --out "$out" "${@:2}"
python3 "$here/verdict.py" "$out/collected.json" "$out" h200-waits
