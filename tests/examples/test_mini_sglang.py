"""examples/mini_sglang.py: the calls of mini-sglang's scheduler and model runner, over a cache and a table in
its layout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGE_SIZE, PAGES = 4, 2, 64, 2, 16, 40


class Cache:
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        self.buffer = torch.full((2, LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan)

    def k_cache(self, layer: int) -> Tensor:
        return self.buffer[0, layer]

    def v_cache(self, layer: int) -> Tensor:
        return self.buffer[1, layer]


def request(table_idx: int, cached_len: int, device_len: int) -> SimpleNamespace:
    return SimpleNamespace(
        table_idx=table_idx, cached_len=cached_len, device_len=device_len, extend_len=device_len - cached_len
    )


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 causal attention of a request's last rows over its tokens [tokens, KV heads, head_dim]."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    hidden = torch.ones(len(q), len(k)).tril(len(k) - len(q)) == 0
    weights = (
        (torch.einsum("qhd,khd->hqk", q.double(), k) * HEAD_DIM**-0.5)
        .masked_fill(hidden, -torch.inf)
        .softmax(-1)
    )
    return torch.einsum("hqk,khd->qhd", weights, v)


def test_prefill_chunks_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example: Any = import_module("mini_sglang")
    table = torch.zeros(5, 128, dtype=torch.int32)
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).view(5, 8)
    for row in range(5):
        table[row] = (
            pages[row].repeat_interleave(PAGE_SIZE) * PAGE_SIZE + torch.arange(128) % PAGE_SIZE
        ).int()
    context = SimpleNamespace(kv_cache=Cache(), page_table=table, page_size=PAGE_SIZE)
    backend = example.AttnBackend(context, HEADS, KV_HEADS, HEAD_DIM)
    known: dict[tuple[int, int], list[Tensor]] = {
        (layer, row): [] for layer in range(LAYERS) for row in range(5)
    }
    steps = [
        [request(3, 0, 40), request(1, 0, 7)],
        [request(1, 7, 8), request(4, 0, 100)],  # a decode together with a prompt
        [request(3, 40, 60), request(4, 100, 101), request(1, 8, 9)],  # a chunk
        [request(1, 9, 10), request(3, 60, 61), request(4, 101, 102)],
    ]
    for number, requests in enumerate(steps):
        out_loc = torch.cat([table[r.table_idx, r.cached_len : r.device_len] for r in requests])
        batch = SimpleNamespace(padded_reqs=requests, out_loc=out_loc)
        if number == len(steps) - 1:  # as before a replay
            backend.prepare_for_capture(batch)
            backend.prepare_for_replay(batch)
        else:
            backend.prepare_metadata(batch)
        lens = [r.extend_len for r in requests]
        assert (
            batch.attn_metadata.get_last_indices(len(lens)).tolist()
            == (torch.tensor(lens).cumsum(0) - 1).tolist()
        )
        for layer in range(LAYERS):
            q, k, v = (torch.randn(sum(lens), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = backend.forward(q, k.flatten(1), v.flatten(1), layer, batch)
            for r, *rows in zip(requests, *(x.split(lens) for x in (out, q, k, v)), strict=True):
                tokens = known[layer, r.table_idx]
                tokens.append(torch.stack(rows[2:]))
                torch.testing.assert_close(
                    rows[0].double(), expected(rows[1], *torch.cat(tokens, 1)), rtol=1e-4, atol=1e-5
                )


SERVER = """
    import multiprocessing

    def ask(queue):
        from minisgl.attention import SUPPORTED_ATTENTION_BACKENDS
        queue.put(list(SUPPORTED_ATTENTION_BACKENDS.creators))

    def launch_server():
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        scheduler = context.Process(target=ask, args=(queue,))
        scheduler.start()
        print("registered:", *queue.get())
        scheduler.join()
"""
REGISTRY = """
    class Registry:
        creators = {}

        def register(self, name):
            return lambda creator: self.creators.update({name: creator})

    SUPPORTED_ATTENTION_BACKENDS = Registry()
"""


@pytest.mark.slow
def test_schedulers_that_are_spawned_know_it(tmp_path: Path) -> None:
    """As mini-sglang's server starts them."""
    files = {"__init__": "", "attention": REGISTRY, "server": SERVER}
    files |= {
        "core": "get_global_ctx = None",
        "distributed": "get_tp_info = None",
        "utils": "div_even = None",
    }
    (tmp_path / "minisgl").mkdir()
    for name, text in files.items():
        (tmp_path / "minisgl" / f"{name}.py").write_text(dedent(text))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(EXAMPLES), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "mini_sglang.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "registered: attn_backend\n"
