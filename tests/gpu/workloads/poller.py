"""Owns a neighbour that only watches: it asks NVML for its process lists without a pause.

Refuses any allocation: what it costs others is the driver's locks alone.
"""

import json
import os
import sys
import time

import pynvml


def main():
    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        begun, asked = time.monotonic_ns(), 0
        until = begun + int(float(line.split()[1]) * 1e9)
        while time.monotonic_ns() < until:
            for device in devices:
                pynvml.nvmlDeviceGetComputeRunningProcesses(device)
                asked += 1
        ended = time.monotonic_ns()
        print(json.dumps({"begun_ns": begun, "ended_ns": ended, "count": asked, "sum_ns": ended - begun, "slowest": []}), flush=True)


if __name__ == "__main__":
    main()
