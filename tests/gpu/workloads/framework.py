"""Owns one workload per framework: allocate, free some, fail once, hold; the framework's own figures are the truth.

Refuses to compute figures of its own where the framework publishes them.
"""

import json
import os
import sys

MIB = 1 << 20
TOO_MUCH = 400 << 30


def hold(phase, **figures):
    print(json.dumps({"phase": phase, "pid": os.getpid(), **figures}), flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


def torch_workload():
    import torch

    def figures():
        stats = torch.cuda.memory_stats()
        return {
            "reserved": torch.cuda.memory_reserved(),
            "used": torch.cuda.memory_allocated(),
            "ooms": stats.get("num_ooms"),
            "allocations": stats.get("num_device_alloc"),
            "frees": stats.get("num_device_free"),
            "backend": torch.cuda.get_allocator_backend(),
        }

    kept = [torch.empty((i + 1) * 16 * MIB, dtype=torch.uint8, device="cuda") for i in range(12)]
    small = [torch.empty(100 * (i + 1), device="cuda") for i in range(50)]
    del kept[::2]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if "WITHOUT_REFUSAL" not in os.environ:
        try:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            pass
    before = figures()
    square = torch.randn(1024, 1024, device="cuda")
    (square @ square).sum().item()
    hold(1, before_matmul=before, **figures())
    del kept, small, square
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hold(2, **figures())


def cupy_workload():
    import cupy

    pool = cupy.get_default_memory_pool()

    def figures():
        return {"reserved": pool.total_bytes(), "used": pool.used_bytes()}

    kept = [cupy.zeros((i + 1) * 3 * MIB, dtype=cupy.uint8) for i in range(10)]
    del kept[::3]
    pool.free_all_blocks()
    ooms = 0
    try:
        cupy.empty(TOO_MUCH, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError:
        ooms = 1
    hold(1, ooms=ooms, **figures())
    del kept
    pool.free_all_blocks()
    hold(2, ooms=ooms, **figures())


def jax_workload():
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]

    def figures():
        stats = device.memory_stats() or {}
        return {"reserved": stats.get("pool_bytes"), "used": stats.get("bytes_in_use"), "stats": stats}

    kept = [jnp.ones((i + 1) * MIB, dtype=jnp.float32).block_until_ready() for i in range(8)]
    ooms = 0
    try:
        jnp.ones(TOO_MUCH // 4, dtype=jnp.float32).block_until_ready()
    except Exception as error:  # the class differs between releases
        ooms = int("RESOURCE_EXHAUSTED" in str(error))
    hold(1, ooms=ooms, **figures())
    del kept
    hold(2, ooms=ooms, **figures())


if __name__ == "__main__":
    {"torch": torch_workload, "cupy": cupy_workload, "jax": jax_workload}[sys.argv[1]]()
