"""Streaming-LLM (arXiv 2309.17453): endless text in a cache of constant size, even beyond the length that a
model was trained for.

The default model is SmolLM2-135M, from the hub or from `make demo`.

    python examples/streaming_llm.py

Generate past the model's context of 8192 tokens.

    python examples/streaming_llm.py --tokens 10000 --plot loss.png

Use a small random model. It needs no download, and only shows that the example runs.

    python examples/streaming_llm.py --model random

Compare rotation inside attention with rotation of the whole cache, at Vicuna-13B's shape.

    python examples/streaming_llm.py --benchmark

The cache has the first page of the text (the sinks) and its last pages. When it is full, the oldest page
after the sinks is dropped and reused: the block table loses an entry, and nothing moves. The cache stores
keys as their projection returned them; `builtin.rope` rotates each by its position *in the cache* when
attention reads it. Dropping a page changes the positions of all later tokens, and costs nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import decode_step
import llama
import torch
from decode_step import SMALL, VICUNA_13B, DecodeStep, Shape
from packages import require
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable, Rotary, append_kv, rotate_qk
from attn_backend.variants import builtin

PAGE_SIZE = 16


class Stream:
    """One request: `feed()` computes a piece of text of at most one page."""

    def __init__(self, model: llama.Llama, device: str, window: int, keep_sinks: bool = True) -> None:
        self.model, self.device, self.keep_sinks = model, device, keep_sinks
        num_heads, num_kv_heads, head_dim = model.heads
        dtype = model.embedding.dtype
        self.num_pages = window // PAGE_SIZE + 2  # the sinks, the window, and the current page
        shape = (self.num_pages, 2, PAGE_SIZE, num_kv_heads, head_dim)
        self.caches = [
            KVCache.from_tensor(torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(model.num_layers)
        ]
        variant = builtin.rope(model.frequencies) & builtin.causal()
        self.attention = Attention(
            num_heads,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
            max_rows=PAGE_SIZE,
            max_batch=1,
            variant=variant,
        )
        self.pages: list[int] = []
        self.in_last_page = PAGE_SIZE

    def feed(self, tokens: list[int]) -> Tensor:
        """Logits [len(tokens), vocab].

        The tokens must fit into the current page or into a new one.
        """
        if self.in_last_page == PAGE_SIZE:
            full = len(self.pages) == self.num_pages
            self.pages.append(self.pages.pop(1 if self.keep_sinks else 0) if full else len(self.pages))
            self.in_last_page = 0
        first_slot = self.pages[-1] * PAGE_SIZE + self.in_last_page
        self.in_last_page += len(tokens)
        kv_len = (len(self.pages) - 1) * PAGE_SIZE + self.in_last_page
        slots = torch.arange(first_slot, first_slot + len(tokens), device=self.device)
        block_table = torch.tensor([self.pages], dtype=torch.int32, device=self.device)
        qo_indptr = torch.tensor([0, len(tokens)], dtype=torch.int32, device=self.device)
        table = PageTable.block_table(
            block_table, torch.tensor([kv_len], dtype=torch.int32, device=self.device), PAGE_SIZE
        )
        self.attention.plan(BSRView(qo_indptr, table))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            append_kv(k, v, self.caches[layer], slots)
            return self.attention.run(q, self.caches[layer])

        return self.model.forward(torch.tensor(tokens, device=self.device), attend)


def losses(
    model: llama.Llama, device: str, tokens: list[int], window: int, keep_sinks: bool, every: int
) -> Iterator[float]:
    """Mean negative log-likelihood of each `every` tokens of a text, as soon as they are read."""
    stream = Stream(model, device, window, keep_sinks)
    waiting = torch.empty(0, device=device)
    for begin in range(0, len(tokens) - 1, PAGE_SIZE):
        piece = tokens[begin : begin + PAGE_SIZE]
        targets = torch.tensor(tokens[begin + 1 : begin + 1 + PAGE_SIZE], device=device)
        logits = stream.feed(piece)[: len(targets)].float()
        waiting = torch.cat([waiting, torch.nn.functional.cross_entropy(logits, targets, reduction="none")])
        while len(waiting) >= every:
            yield float(waiting[:every].mean())
            waiting = waiting[every:]
    if len(waiting):
        yield float(waiting.mean())


def plot(path: Path, curves: dict[str, list[float]], every: int, window: int) -> None:
    """The loss along the text, a line for each cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for (name, curve), color in zip(curves.items(), ("C3", "gray"), strict=True):
        axes.plot([every * (i + 1) for i in range(len(curve))], curve, color=color, marker="o", label=name)
    axes.set_xlabel(f"tokens of the text; the cache keeps {PAGE_SIZE} + {window}")
    axes.set_ylabel("mean loss")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"wrote {path}")


def generate(model: llama.Llama, device: str, prompt: list[int], window: int, count: int) -> list[int]:
    """Greedy text that continues a prompt."""
    stream = Stream(model, device, window)
    for begin in range(0, len(prompt), PAGE_SIZE):
        logits = stream.feed(prompt[begin : begin + PAGE_SIZE])
    tokens = []
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits = stream.feed(tokens[-1:])
    return tokens


def benchmark(shape: Shape, device: str, windows: list[int], batch: int) -> list[tuple[int, float, float]]:
    """(window, ITL fused, ITL unfused) in ms.

    Unfused: one launch rotates all keys of the cache into a second cache, which attention without a variant
    then reads.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    step = DecodeStep(shape, batch, dtype, device)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    frequencies = builtin.rope_frequencies(shape.head_dim)
    rotary = Rotary(frequencies.float().to(device))
    half = shape.num_kv_heads // 2  # rotate_qk takes two tensors: half of the heads each
    rows = []
    for window in windows:
        pages_each = window // PAGE_SIZE + 1
        cache = KVCache.from_tensor(
            torch.randn(
                batch * pages_each,
                2,
                PAGE_SIZE,
                shape.num_kv_heads,
                shape.head_dim,
                dtype=dtype,
                device=device,
            )
        )
        kv_len = pages_each * PAGE_SIZE
        keys = cache.k.flatten(0, 1) if cache.k.is_contiguous() else cache.k.reshape(-1, *cache.k.shape[2:])
        turned = KVCache.from_pair(torch.empty_like(cache.k, memory_format=torch.contiguous_format), cache.v)
        turned_keys = turned.k.view(-1, *turned.k.shape[2:])
        in_cache = torch.arange(kv_len, device=device).repeat(batch)
        query_position = torch.full((batch,), kv_len - 1, device=device)
        slots = torch.arange(1, batch + 1, device=device) * kv_len - 1
        block_table = torch.arange(batch * pages_each, dtype=torch.int32, device=device).view(
            batch, pages_each
        )
        view = BSRView(
            torch.arange(batch + 1, dtype=torch.int32, device=device),
            PageTable.block_table(
                block_table, torch.full((batch,), kv_len, dtype=torch.int32, device=device), PAGE_SIZE
            ),
        )
        variant = builtin.rope(frequencies) & builtin.causal()
        fused_attention = Attention(
            *heads, dtype=dtype, device=device, max_rows=batch, max_batch=batch, variant=variant
        )
        plain_attention = Attention(*heads, dtype=dtype, device=device, max_rows=batch, max_batch=batch)
        fused_attention.plan(view)
        plain_attention.plan(view)

        def fused(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cache: KVCache = cache,
            slots: Tensor = slots,
            attention: Attention = fused_attention,
        ) -> Tensor:
            append_kv(k, v, cache, slots)
            return attention.run(q, cache)

        def unfused(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cache: KVCache = cache,
            slots: Tensor = slots,
            attention: Attention = plain_attention,
            keys: Tensor = keys,
            turned: KVCache = turned,
            turned_keys: Tensor = turned_keys,
            in_cache: Tensor = in_cache,
            position: Tensor = query_position,
        ) -> Tensor:
            append_kv(k, v, cache, slots)
            rotate_qk(q, k, rotary, position)
            rotate_qk(
                keys[:, :half],
                keys[:, half:],
                rotary,
                in_cache,
                q_out=turned_keys[:, :half],
                k_out=turned_keys[:, half:],
            )
            return attention.run(q, turned)

        times = decode_step.measure([partial(step, fused), partial(step, unfused)], device)
        rows.append((window, times[0], times[1]))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder or name on the hub, or `random`: small; default: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of text (%(default)s)")
    parser.add_argument("--window", type=int, default=256, help="tokens that the cache keeps after the sinks")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(argparse.__file__),
        help="a long text; default: a module of Python's library",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)")
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="time a step with rotation inside attention, and with a launch that rotates the whole cache",
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="with --benchmark: requests in a batch (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.plot:
        require("matplotlib")
    device = llama.pick_device(arguments.device)
    if arguments.benchmark:
        on_gpu = device.startswith("cuda")
        print(f"{'window':>8} {'fused, ms':>10} {'unfused, ms':>12} {'unfused / fused':>16}")
        for window, fused, unfused in benchmark(
            VICUNA_13B if on_gpu else SMALL,
            device,
            [1024, 2048, 4096] if on_gpu else [256, 512],
            arguments.batch,
        ):
            print(f"{window:8} {fused:10.2f} {unfused:12.2f} {unfused / fused:16.2f}")
        return
    name = arguments.model or llama.small_model()
    model = llama.load(None if name == "random" else name, device)
    tokens = model.encode(arguments.text.read_text())[: arguments.tokens]
    every = max(len(tokens) // 8, PAGE_SIZE)
    if name == "random":
        print("A random model has about the same loss with and without sinks.")
    print(
        f"model's context {model.config['max_position_embeddings']} tokens; text of {len(tokens)}; cache of "
        f"{PAGE_SIZE} + {arguments.window} tokens"
    )
    print(f"mean loss of each {every} tokens:")
    curves: dict[str, list[float]] = {}
    for name, keep_sinks in (("with sinks", True), ("window only", False)):
        print(f"  {name:12}", end="", flush=True)
        curves[name] = []
        for loss in losses(model, device, tokens, arguments.window, keep_sinks, every):
            print(f" {loss:6.2f}", end="", flush=True)
            curves[name].append(loss)
        print()
    if arguments.plot:
        plot(arguments.plot, curves, every, arguments.window)
    print(
        "continues with:",
        repr(model.decode(generate(model, device, tokens[-2 * arguments.window :], arguments.window, 16))),
    )


if __name__ == "__main__":
    main()
