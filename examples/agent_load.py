"""Agents that share contexts: the time between tokens (ITL) with the cascade on and off.

    python examples/agent_load.py
    python examples/agent_load.py --agents 64 --contexts 4 --context 24000        # the default on a GPU

Agents that work on one repository, or on one document, send the same long context with each turn. The engine
keeps its pages once, so the agents' page tables begin alike. With the cascade, attention reads a context once
a step for all of its agents. Nothing declares this: the only difference is `Attention(cascade=)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import decode_step
import llama
import torch
from decode_step import LLAMA_31_8B, SMALL, DecodeStep, Shape
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

PAGE_SIZE = 16


class Load(NamedTuple):
    """A step in which every agent decodes one token."""

    view: BSRView
    cache: KVCache
    slots: Tensor  # of the new tokens
    read_once: int  # tokens, if each context is read once
    read: int  # tokens that all agents see


def make(shape: Shape, agents: int, contexts: int, context: int, dtype: torch.dtype, device: str) -> Load:
    """Agent i works on context i % contexts, and has a history of its turn of 100 to 400 tokens."""
    shared_pages, own_pages = context // PAGE_SIZE, 400 // PAGE_SIZE
    own_tokens = torch.randint(100, 400, (agents,), generator=torch.Generator().manual_seed(0))
    of_contexts = torch.arange(contexts * shared_pages).view(contexts, shared_pages)
    of_agents = contexts * shared_pages + torch.arange(agents * own_pages).view(agents, own_pages)
    block_table = torch.cat([of_contexts[torch.arange(agents) % contexts], of_agents], 1).int()
    kv_lens = (shared_pages * PAGE_SIZE + own_tokens).int()
    last = kv_lens.long() - 1
    slots = block_table[torch.arange(agents), last // PAGE_SIZE].long() * PAGE_SIZE + last % PAGE_SIZE

    page_shape = (2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    pages = torch.randn(contexts * shared_pages + agents * own_pages, *page_shape, dtype=dtype, device=device)
    table = PageTable.block_table(block_table.to(device), kv_lens.to(device), PAGE_SIZE)
    qo_indptr = torch.arange(agents + 1, dtype=torch.int32, device=device)
    return Load(
        BSRView(qo_indptr, table),
        KVCache.from_tensor(pages),
        slots.to(device),
        contexts * shared_pages * PAGE_SIZE + int(own_tokens.sum()),
        int(kv_lens.sum()),
    )


def step_of(
    model: DecodeStep, load: Load, agents: int, cascade: bool, dtype: torch.dtype, device: str
) -> Callable[[], Tensor]:
    """One step of the engine: a plan, then all layers."""
    shape = model.shape
    attention = Attention(
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        dtype=dtype,
        device=device,
        max_rows=agents,
        max_batch=agents,
        cascade=cascade,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        append_kv(k, v, load.cache, load.slots)
        return attention.run(q, load.cache, after_append=True)

    def step() -> Tensor:
        attention.plan(load.view)
        return model(attend)

    return step


def main(argv: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--agents", type=int, help="agents that decode concurrently (64; on a CPU 16)")
    parser.add_argument("--contexts", type=int, help="contexts that the agents share (4; on a CPU 2)")
    parser.add_argument("--context", type=int, help="tokens of each context (24000; on a CPU 4096)")
    arguments = parser.parse_args(argv)
    device = llama.pick_device(arguments.device)
    on_gpu = device.startswith("cuda")
    agents = arguments.agents or (64 if on_gpu else 16)
    contexts = arguments.contexts or (4 if on_gpu else 2)
    context = arguments.context or (24000 if on_gpu else 4096)
    dtype, shape = (torch.bfloat16, LLAMA_31_8B) if on_gpu else (torch.float32, SMALL)

    load = make(shape, agents, contexts, context, dtype, device)
    model = DecodeStep(shape, agents, dtype, device)
    make_step = partial(step_of, model, load, agents, dtype=dtype, device=device)
    off, on = decode_step.measure([make_step(cascade=False), make_step(cascade=True)], device)
    print(f"{agents} agents over {contexts} contexts of {context} tokens, on {device}")
    print(f"{'':12} {'ITL, ms':>8} {'tokens read per layer':>22}")
    print(f"{'cascade off':12} {off:8.2f} {load.read:22,}")
    print(f"{'cascade on':12} {on:8.2f} {load.read_once:22,}")
    print(f"{off / on:.1f} times faster with the cascade")
    return off, on


if __name__ == "__main__":
    main()
