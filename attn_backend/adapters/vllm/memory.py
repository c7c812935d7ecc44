"""Device memory that vLLM's sleep mode leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_memory_pools(make: Callable[[], T], device: torch.device) -> T:
    """`make()`, with its device memory from torch's general pool whatever pool the caller is in.

    Not while a CUDA graph is captured.

    vLLM makes metadata builders inside the pool of its KV cache (compat.py says which releases). Sleep mode
    unmaps that pool, and what comes back holds anything, while CUDA graphs go on using it.
    torch.cuda.use_mem_pool holds for the thread that called it, and which of several nested pools wins
    depends on torch's release: a thread of its own is in none of them.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def make_on_stream() -> T:
        with torch.cuda.stream(stream):  # a thread begins with device 0 and its default stream
            return make()

    with ThreadPoolExecutor(1, "attn_backend") as thread:
        return thread.submit(make_on_stream).result()
