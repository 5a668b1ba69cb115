"""Owns where a recorded tenant's bytes come from: PyTorch's allocator, or the driver itself for nodes without PyTorch.

Refuses managed memory. A refusal is an exception of its own, with what was asked for and what the allocator said.
"""

import ctypes
import os

MIB, GIB = 1 << 20, 1 << 30


class Refused(Exception):
    def __init__(self, asked, answer):
        super().__init__(f"{asked} bytes: {answer}")
        self.asked, self.answer = asked, answer


class Torch:
    """Everything through PyTorch's caching allocator, as its users have it: freed blocks stay reserved until `tidy`."""

    def __init__(self):
        import torch

        self.torch = torch
        self.device = torch.device("cuda")
        self.square = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)

    def take(self, size):
        with self.refusals(size):
            block = self.torch.empty(int(size), dtype=self.torch.uint8, device=self.device)
        # Written to, as a real tensor is; the kernel needs no memory.
        block[: min(len(block), 64 * MIB)].zero_()
        return block

    def refusals(self, size):
        return Turned(self.torch.cuda.OutOfMemoryError, size)

    def free(self, block):
        # The caller's own reference goes with its list; nothing to call.
        del block

    def tidy(self):
        self.torch.cuda.empty_cache()

    def work(self):
        """Some 20 ms of a busy GPU."""
        with self.refusals(2 * self.square.nelement()):
            result = self.square
            for _ in range(80):
                result = (self.square @ result).clamp_(-1, 1)
        self.torch.cuda.synchronize()

    def room(self):
        return self.torch.cuda.mem_get_info()

    def figures(self):
        cuda = self.torch.cuda
        stats = cuda.memory_stats()
        return {
            "reserved": cuda.memory_reserved(),
            "used": cuda.memory_allocated(),
            "retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
        }


class Turned:
    """A context that turns the library's out-of-memory error into ours."""

    def __init__(self, error, asked):
        self.error, self.asked = error, int(asked)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if kind is not None and issubclass(kind, self.error):
            raise Refused(self.asked, f"{kind.__name__}: {str(error)[:300]}") from None


class Driver:
    """Plain cuMemAlloc, with a cache like PyTorch's: freed blocks are kept by size until `tidy`."""

    OUT_OF_MEMORY = 2

    def __init__(self):
        self.library = ctypes.CDLL(os.environ.get("COTENANT_WORKLOAD_LIBCUDA", "libcuda.so.1"))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.cached, self.sums = [], {"reserved": 0, "used": 0, "retries": 0, "ooms": 0}

    def call(self, name, *arguments):
        if code := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} answered {code}")

    def take(self, size):
        size = -(-int(size) // (2 * MIB)) * 2 * MIB
        kept = next((block for block in self.cached if block[1] == size), None)
        if kept:
            self.cached.remove(kept)
        else:
            kept = self.ask(size) or self.ask_again(size)
            self.sums["reserved"] += size
        self.sums["used"] += size
        return kept

    def ask(self, size):
        pointer = ctypes.c_uint64()
        code = self.library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if code not in (0, self.OUT_OF_MEMORY):
            raise RuntimeError(f"cuMemAlloc_v2 answered {code}")
        return None if code else (pointer.value, size)

    def ask_again(self, size):
        self.sums["retries"] += 1
        self.tidy()
        if block := self.ask(size):
            return block
        self.sums["ooms"] += 1
        raise Refused(size, f"CUresult {self.OUT_OF_MEMORY}")

    def free(self, block):
        self.sums["used"] -= block[1]
        self.cached.append(block)

    def tidy(self):
        for pointer, size in self.cached:
            self.call("cuMemFree_v2", ctypes.c_uint64(pointer))
            self.sums["reserved"] -= size
        self.cached.clear()

    def work(self):
        """Nothing to compute with: the driver's interface alone launches no kernel here."""

    def room(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def figures(self):
        return dict(self.sums)


BACKENDS = {"torch": Torch, "driver": Driver}
