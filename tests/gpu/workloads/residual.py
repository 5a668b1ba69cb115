"""Owns the naming of what NVML counts beyond PyTorch's allocator: its process bytes after each step of one program.

Refuses the agent: both figures are read in this process, NVML's list and PyTorch's own reserve.
"""

import json
import os

import pynvml
import torch

MIB = 1 << 20


def main():
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    steps, kept, before = [], [], 0

    def say(step):
        nonlocal before
        torch.cuda.synchronize()
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
        nvml = sum(process.usedGpuMemory for process in listed if process.pid == os.getpid())
        beyond = nvml - torch.cuda.memory_reserved()
        steps.append({"step": step, "nvml": nvml, "beyond_reserved": beyond, "more": beyond - before})
        before = beyond

    kept.append(torch.empty(96 * MIB, dtype=torch.uint8, device="cuda"))
    say("first tensor")
    torch.cuda.Stream()
    say("first stream of PyTorch's stream pool")
    square = torch.randn(1024, 1024, device="cuda")
    say("randn")
    product = square @ square
    say("matmul (cuBLAS)")
    product.sum().item()
    say("sum")
    print(json.dumps({"backend": torch.cuda.get_allocator_backend(), "steps": steps}))


if __name__ == "__main__":
    main()
