"""For --benchmark of the other examples: times a decode step of a model with a given shape.

The weights are random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int


VICUNA_13B = Shape(40, 5120, 13824, 40, 40, 128, 32000)
LLAMA_31_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
SMALL = Shape(2, 256, 512, 8, 4, 64, 1024)  # a CPU computes this in a moment

# q, k, v of one layer -> attention output, [rows, heads, head_dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DecodeStep:
    """All layers of one decode step.

    All layers share one layer's weights and KV cache. At the shapes of real models these are larger than a
    GPU's L2 cache, so each layer reads them from memory as it would read its own.
    """

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype, device: str) -> None:
        self.shape = shape

        def weight(out: int, inside: int) -> Tensor:
            return torch.randn(out, inside, dtype=dtype, device=device) * inside**-0.5

        self.qkv = weight((shape.num_qo_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden)
        self.o = weight(shape.hidden, shape.num_qo_heads * shape.head_dim)
        self.gate_up = weight(2 * shape.inner, shape.hidden)
        self.down = weight(shape.hidden, shape.inner)
        self.head = weight(shape.vocab, shape.hidden)
        self.hidden = torch.randn(rows, shape.hidden, dtype=dtype, device=device)

    def __call__(self, attend: Attend) -> Tensor:
        shape, hidden = self.shape, self.hidden
        sizes = (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
        for _ in range(shape.layers):
            q, k, v = linear(_norm(hidden), self.qkv).unflatten(1, (-1, shape.head_dim)).split(sizes, 1)
            hidden = hidden + linear(attend(q, k, v).flatten(1), self.o)
            gate, up = linear(_norm(hidden), self.gate_up).chunk(2, 1)
            hidden = hidden + linear(silu(gate) * up, self.down)
        return linear(_norm(hidden), self.head)


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:])


def measure(steps: Sequence[Callable[[], object]], device: str, repeats: int = 20) -> list[float]:
    """Median milliseconds of each step; they take turns. On a GPU as replays of CUDA graphs."""
    with torch.inference_mode():
        launches = [_captured(step) for step in steps] if device.startswith("cuda") else steps
        times: list[list[float]] = [[] for _ in launches]
        for repeat in range(2 + repeats):  # the first two warm up
            for launch, its_times in zip(launches, times, strict=True):
                _wait(device)
                start = time.perf_counter()
                launch()
                _wait(device)
                if repeat >= 2:
                    its_times.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(its_times) for its_times in times]


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    step()  # permanent effects (compiling, allocating) happen outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
