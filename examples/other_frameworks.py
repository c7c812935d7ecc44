"""Tensors of other frameworks, through DLPack: nothing is copied.

    python examples/other_frameworks.py          # numpy; jax, and on a GPU CuPy, if they are installed

Any object that supports DLPack (`__dlpack__`) becomes a torch tensor that shares its memory, and results go
back the same way. jax's arrays may be read in this way, but not written. The KV cache, which append_kv
writes, must be a tensor of torch, numpy or CuPy. On a GPU each from_dlpack makes the reading stream wait for
the writing stream. Later writes to shared memory are not synchronized, unless both frameworks use the same
stream.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16
KV_LENS = [40, 7, 100]  # including the new token of each request


def arrays() -> dict[str, numpy.ndarray[Any, Any]]:
    """float16 q, k, v of one decode step, its cache, and its page table."""
    rng = numpy.random.default_rng(0)
    pages = [-(-length // PAGE_SIZE) for length in KV_LENS]
    table = numpy.zeros((len(KV_LENS), max(pages)), numpy.int32)
    for row, (count, first) in enumerate(zip(pages, numpy.cumsum([0, *pages]), strict=False)):
        table[row, :count] = numpy.arange(first, first + count)
    slots = [
        table[i, (length - 1) // PAGE_SIZE] * PAGE_SIZE + (length - 1) % PAGE_SIZE
        for i, length in enumerate(KV_LENS)
    ]

    def normal(*shape: int) -> numpy.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(numpy.float16)

    return {
        "q": normal(len(KV_LENS), HEADS, HEAD_DIM),
        "k": normal(len(KV_LENS), KV_HEADS, HEAD_DIM),
        "v": normal(len(KV_LENS), KV_HEADS, HEAD_DIM),
        "cache": normal(sum(pages), 2, PAGE_SIZE, KV_HEADS, HEAD_DIM),
        "table": table,
        "kv_lens": numpy.array(KV_LENS, numpy.int32),
        "qo_indptr": numpy.arange(len(KV_LENS) + 1, dtype=numpy.int32),
        "slots": numpy.array(slots, numpy.int64),
    }


def attend(given: dict[str, Any]) -> torch.Tensor:
    """given: the result of arrays(), in any framework."""
    t = {name: torch.from_dlpack(array) for name, array in given.items()}
    kv = KVCache.from_tensor(t["cache"])
    append_kv(t["k"], t["v"], kv, t["slots"])
    attention = Attention(
        HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float16, device=t["q"].device, max_rows=16, max_batch=8
    )
    attention.plan(BSRView(t["qo_indptr"], PageTable.block_table(t["table"], t["kv_lens"], PAGE_SIZE)))
    return attention.run(t["q"], kv)


def expected(given: dict[str, numpy.ndarray[Any, Any]]) -> numpy.ndarray[Any, Any]:
    """float64."""
    out = numpy.empty(given["q"].shape)
    for i, length in enumerate(KV_LENS):
        tokens = (
            given["cache"][given["table"][i]]
            .swapaxes(0, 1)
            .reshape(2, -1, KV_HEADS, HEAD_DIM)[:, :length]
            .astype(float)
            .copy()
        )
        tokens[:, -1] = given["k"][i], given["v"][i]
        k, v = numpy.repeat(tokens, HEADS // KV_HEADS, axis=2)
        scores = numpy.einsum("hd,thd->ht", given["q"][i].astype(float), k) * HEAD_DIM**-0.5
        weights = numpy.exp(scores - scores.max(1, keepdims=True))
        out[i] = numpy.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v)
    return out


def framework(name: str) -> ModuleType:
    """numpy, or a module with its functions. Raises ImportError if it is not installed."""
    return import_module("jax.numpy" if name == "jax" else name)


def converted(name: str, given: dict[str, numpy.ndarray[Any, Any]]) -> dict[str, Any]:
    """Arrays of a framework. jax's are on the host. numpy's cache and slots replace jax's, which cannot be
    written and have no 64-bit types by default.
    """
    if name != "jax":
        return {key: framework(name).asarray(array) for key, array in given.items()}
    host = import_module("jax").devices("cpu")[0]
    return {
        key: array if key in ("cache", "slots") else framework(name).asarray(array, device=host)
        for key, array in given.items()
    }


def on_host(array: Any) -> numpy.ndarray[Any, Any]:
    """CuPy's arrays do not convert to numpy implicitly."""
    return array.get() if hasattr(array, "get") else numpy.asarray(array)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    for name in ("numpy", "jax", "cupy"):
        if find_spec(name) is None or (name == "cupy" and not torch.cuda.is_available()):
            continue
        given = arrays()
        wanted = expected(given)
        out = framework(name).from_dlpack(attend(converted(name, given)))
        print(f"{name}: largest difference from float64 {numpy.abs(on_host(out) - wanted).max():.1e}")


if __name__ == "__main__":
    main()
