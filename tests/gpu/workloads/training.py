"""Owns a training step of so many tokens: a real transformer in PyTorch, or blocks of the same sizes from the driver.

Refuses data: tokens are random, and so are the weights.
"""

from memory import GIB, MIB


class TorchTraining:
    """A pre-norm encoder in bf16 with AdamW. A step is forward, backward and, at the end of an accumulation, the optimiser."""

    WIDE, LAYERS, ROWS = 1024, 16, 16

    def __init__(self, memory):
        self.memory, torch = memory, memory.torch
        with memory.refusals(GIB):
            layers = [
                torch.nn.TransformerEncoderLayer(
                    self.WIDE, 16, 4 * self.WIDE, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(self.LAYERS)
            ]
            self.model = torch.nn.Sequential(*layers).to(memory.device, torch.bfloat16).train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # Twice: the first step makes the optimiser's states.
        self.step(1024)
        self.per_token = max(self.measure(8192), 1.0)

    def measure(self, tokens):
        """Bytes of activations a token, at the peak of a step."""
        cuda = self.memory.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        self.step(tokens)
        return (cuda.max_memory_allocated() - before) / tokens

    def step(self, tokens, last=True):
        """One micro-batch of `tokens`, in rows of equal length."""
        torch = self.memory.torch
        length = max(int(tokens) // self.ROWS, 16)
        try:
            with self.memory.refusals(tokens * getattr(self, "per_token", 0)):
                batch = torch.randn(self.ROWS, length, self.WIDE, device=self.memory.device, dtype=torch.bfloat16)
                self.model(batch).square().mean().backward()
                if last:
                    self.optimiser.step()
                    self.optimiser.zero_grad(set_to_none=True)
        except Exception:
            self.optimiser.zero_grad(set_to_none=True)
            raise
        torch.cuda.synchronize()

    def evaluate(self, tokens):
        torch = self.memory.torch
        rows = max(int(tokens) // 1024, 1)
        with self.memory.refusals(tokens * self.evaluated_per_token()), torch.no_grad():
            batch = torch.randn(rows, 1024, self.WIDE, device=self.memory.device, dtype=torch.bfloat16)
            kept = []
            for layer in self.model:
                batch = layer(batch)
                # Hidden states are kept for the metrics, as evaluations do.
                kept.append(batch)
        torch.cuda.synchronize()

    def evaluated_per_token(self):
        """Kept hidden states, and half as much again at the peak of a layer."""
        return 3.0 * self.WIDE * self.LAYERS


class DriverTraining:
    """The same demand in blocks: each step takes its activations in pieces, and gives them back."""

    PIECE = 256 * MIB

    def __init__(self, memory):
        self.memory, self.per_token = memory, float(MIB)
        self.weights = [memory.take(512 * MIB) for _ in range(4)]

    def step(self, tokens, last=True):
        blocks = []
        try:
            for _ in range(max(int(tokens * self.per_token) // self.PIECE, 1)):
                blocks.append(self.memory.take(self.PIECE))
        finally:
            for block in blocks:
                self.memory.free(block)

    def evaluate(self, tokens):
        self.step(tokens * self.evaluated_per_token() / self.per_token)

    def evaluated_per_token(self):
        return self.per_token / 4


def training(memory):
    return DriverTraining(memory) if hasattr(memory, "ask") else TorchTraining(memory)
