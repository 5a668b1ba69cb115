#!/usr/bin/env bash
# Owns the proof on a real driver that a release leaves nothing of it held, and that NVML answers a thread without capabilities.
# Refuses to touch the driver itself: what is held is what /proc says of the agent.
#
#   tests/gpu/release.sh AGENT      as root
set -euo pipefail
agent=$(realpath "$1")
place=$(mktemp -d)
grep -q " /sys/kernel/tracing tracefs " /proc/mounts || mount -t tracefs tracefs /sys/kernel/tracing || true
address=127.0.0.1:19468
trap 'kill "${pid:-0}" 2>/dev/null || true; rm -rf "$place"' EXIT

begin() {
    printf '[server]\nlisten = "%s"\n[agent]\ncontrol = "%s/control.sock"\ndrop_privileges = %s\n[nvml]\ninterval = "5s"\n' \
        "$address" "$place" "$1" > "$place/cotenant.toml"
    "$agent" run --config "$place/cotenant.toml" 2> "$place/log" &
    pid=$!
    for _ in $(seq 100); do
        curl -s "http://$address/metrics" | grep -q '^hw_gpu_memory_usage_bytes' && return
        sleep 0.2
    done
    cat "$place/log"
    return 1
}
held() {
    local devices
    devices=$(find "/proc/$pid/fd" -lname '/dev/nvidia*' -printf '%l\n' 2>/dev/null | sort | uniq -c | awk '{print $2 "x" $1}' | tr '\n' ' ')
    echo "$1: devices [${devices% }], mappings of libnvidia-ml $(grep -c libnvidia-ml "/proc/$pid/maps" || true)," \
        "module's users $(cat /sys/module/nvidia/refcnt 2>/dev/null || echo unknown)"
}
figures() { curl -s "http://$address/metrics" | grep -E '^(hw_|cotenant_gpu_reading_absent)' | sed 's/ [^ ]*$//' | sort; }

for drop in false true; do
    begin "$drop"
    sleep 6
    figures > "$place/figures.$drop"
    if [ "$drop" = true ]; then break; fi
    kill "$pid"; wait "$pid" || true
done
echo "series of NVML with capabilities $(wc -l < "$place/figures.false"), without $(wc -l < "$place/figures.true")"
diff "$place/figures.false" "$place/figures.true" && echo "the same"
for task in /proc/"$pid"/task/*; do
    awk '/^(Name|CapEff|CapBnd|NoNewPrivs):/ {printf "%s ", $2} END {print ""}' "$task/status"
done
held before
begun=$(date +%s%N)
"$agent" release --for 8s --socket "$place/control.sock"
echo "released in $((($(date +%s%N) - begun) / 1000000)) ms"
held released
curl -s "http://$address/status" | grep -o '"name":"nvml"[^}]*'
curl -s "http://$address/metrics" | grep -c 'cotenant_gpu_reading_absent{.*released' || true
sleep 16
held "after its time"
curl -s "http://$address/metrics" | grep -c '^hw_gpu_memory_usage_bytes'
