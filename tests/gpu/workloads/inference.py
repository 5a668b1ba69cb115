"""Owns a small inference loop: a few layers, one answer at a time, its step times, one JSON line a run.

Refuses to measure anything but its own steps. With `empty` the allocator's cache is given back after each step.
"""

import json
import os
import sys
import time

import torch


def step(model, batch, empty):
    begun = time.monotonic_ns()
    with torch.inference_mode():
        model(batch).sum().item()
    if empty:
        torch.cuda.empty_cache()
    return begun, time.monotonic_ns() - begun


def main():
    empty = sys.argv[1] == "empty"
    wide = 2048
    layers = [torch.nn.Linear(wide, wide), torch.nn.ReLU()] * 6
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16).eval()
    batch = torch.randn(256, wide, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        step(model, batch, empty)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        _, seconds, slowest = line.split()
        begun = time.monotonic_ns()
        until = begun + int(float(seconds) * 1e9)
        steps = []
        while time.monotonic_ns() < until:
            steps.append(step(model, batch, empty))
        ended = time.monotonic_ns()
        steps.sort(key=lambda pair: -pair[1])
        count = len(steps)
        print(json.dumps({
            "begun_ns": begun,
            "ended_ns": ended,
            "tids": [os.getpid()],
            "count": count,
            "sum_ns": sum(took for _, took in steps),
            "p50_ns": steps[count // 2][1],
            "p99_ns": steps[count // 100][1],
            "max_ns": steps[0][1],
            "slowest": steps[: int(slowest)],
        }), flush=True)


if __name__ == "__main__":
    main()
