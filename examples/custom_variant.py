"""A custom variant, from an idea to serving: attention with a learned bias for each head and distance (as in
T5, arXiv 1910.10683).

    python examples/custom_variant.py
    python examples/custom_variant.py --plot heads.png

1. The idea is two Python functions. 2. Autograd learns the bias through plain PyTorch. 3. A picture shows
the attention of each head before and after. 4. The variant is compared with float64 on a CPU. 5. It serves
prompts of different lengths, then decodes, from a paged cache. For a GPU only `device` changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import llama
import torch
from packages import require
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable, Variant, append_kv

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, DISTANCES = 4, 2, 64, 16, 32


# 1. The idea. `bias` is a free variable: a tensor that each run receives.
def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + bias[h, torch.clamp(q_idx - kv_idx, min=0, max=DISTANCES - 1)]  # type: ignore[name-defined]  # noqa: F821


def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


variant = Variant.from_functions(score_mod, mask_mod, tensors={"bias": (torch.float32, 2)})


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One request in plain PyTorch: q [tokens, HEADS, dim], k, v [tokens, KV_HEADS, dim], bias [HEADS,
    DISTANCES]; in q's dtype.
    """
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    kv_idx = torch.arange(k.shape[0], device=q.device)
    q_idx = kv_idx[k.shape[0] - q.shape[0] :, None]
    scores = (
        torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        + bias[:, (q_idx - kv_idx).clamp(0, DISTANCES - 1)]
    )
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(q_idx < kv_idx, -torch.inf).softmax(-1), v)


def learn(steps: int) -> Tensor:
    """2. Head h should look h + 1 tokens back, for any tokens: only the bias can do that."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.zeros(HEADS, DISTANCES, requires_grad=True)
    optimizer = torch.optim.Adam([bias], lr=0.3)
    for step in range(steps):
        q, k, v = (
            torch.randn(64, heads, HEAD_DIM, generator=generator) * 0.3
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        wanted = torch.stack([v[:, h // (HEADS // KV_HEADS)].roll(h + 1, 0) for h in range(HEADS)], 1)
        loss = (dense(q, k, v, bias) - wanted)[HEADS:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 4) == 0 or step == steps - 1:
            print(f"step {step:4}: loss {loss.item():.5f}")
    return bias.detach()


SHADES = " ░▒▓█"


def weights(bias: Tensor, tokens: int) -> Tensor:
    """Attention weights [HEADS, queries, tokens], by the variant's kernel: each token's value is a row of the
    identity, so the outputs are the weights.
    """
    q, k = torch.zeros(tokens, HEADS, HEAD_DIM), torch.zeros(tokens, KV_HEADS, HEAD_DIM)
    v = torch.eye(tokens, HEAD_DIM)[:, None].repeat(1, KV_HEADS, 1)
    attention = Attention(
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        dtype=torch.float32,
        device="cpu",
        max_rows=tokens,
        max_batch=1,
        variant=variant,
    )
    indptr = torch.tensor([0, tokens], dtype=torch.int32)
    attention.plan(BSRView(indptr, PageTable.ragged(indptr)))
    out = attention.run(q, KVCache.from_ragged(k, v), variant_args={"bias": bias})
    return out[:, :, :tokens].transpose(0, 1)


def picture(bias: Tensor, tokens: int = 12) -> str:
    """3. A square for each head: queries from top to bottom, tokens from left to right. Weights below
    0.02 are blank.
    """
    of_heads = weights(bias, tokens)
    lines = ["   ".join(f"head {h}".ljust(2 * tokens) for h in range(HEADS))]
    for query in range(tokens):
        shades = ((of_heads[:, query] - 0.02) * (len(SHADES) - 1)).ceil().clamp(min=0).int().tolist()
        lines.append("   ".join("".join(2 * SHADES[shade] for shade in row) for row in shades))
    return "\n".join(line.rstrip() for line in lines)


def plot(path: Path, bias: Tensor, tokens: int = 32) -> None:
    """The same picture as a file: before learning above, after it below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    grid = figure.subplots(2, HEADS)
    for row, (when, its_bias) in enumerate((("before", torch.zeros_like(bias)), ("after", bias))):
        for h, of_head in enumerate(weights(its_bias, tokens)):
            grid[row, h].imshow(of_head, cmap="Blues", vmin=0, vmax=1)
            grid[row, h].set_title(f"head {h}, {when} learning", fontsize=8)
            grid[row, h].set(xticks=[], yticks=[])
    grid[1, 0].set_xlabel("tokens", fontsize=8)
    grid[1, 0].set_ylabel("queries", fontsize=8)
    figure.savefig(path)
    print(f"wrote {path}")


def check(bias: Tensor) -> float:
    """4. Largest difference from float64, for a chunk of 7 queries after 40 tokens, on a CPU."""
    q, k, v = torch.randn(7, HEADS, HEAD_DIM), *torch.randn(2, 47, KV_HEADS, HEAD_DIM)
    attention = Attention(
        HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float32, device="cpu", max_rows=7, max_batch=1, variant=variant
    )
    attention.plan(BSRView(torch.tensor([0, 7]), PageTable.ragged(torch.tensor([0, 47]))))
    out = attention.run(q, KVCache.from_ragged(k, v), variant_args={"bias": bias})
    return float((out - dense(q.double(), k.double(), v.double(), bias.double())).abs().max())


def serve(bias: Tensor, device: str, steps: int) -> float:
    """5. Largest difference from plain PyTorch over prompts of several lengths and the decodes after them."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    bias = bias.to(device)
    lengths, pages_each = [5, 33, 100], 8
    attention = Attention(
        HEADS, KV_HEADS, HEAD_DIM, dtype=dtype, device=device, max_rows=256, max_batch=4, variant=variant
    )
    cache = KVCache.from_tensor(
        torch.zeros(len(lengths) * pages_each, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    )
    block_table = torch.randperm(len(lengths) * pages_each).int().view(len(lengths), pages_each)
    total = [length + steps for length in lengths]
    texts = [
        tuple(torch.randn(n, heads, HEAD_DIM).to(device, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for n in total
    ]
    worst, begins, ends = 0.0, [0] * len(lengths), list(lengths)
    for _ in range(steps + 1):  # the prompts, then token by token
        q, k, v = (
            torch.cat([text[part][a:b] for text, a, b in zip(texts, begins, ends, strict=True)])
            for part in range(3)
        )
        slots = torch.cat(
            [
                block_table[i, torch.arange(a, b) // PAGE_SIZE] * PAGE_SIZE + torch.arange(a, b) % PAGE_SIZE
                for i, (a, b) in enumerate(zip(begins, ends, strict=True))
            ]
        )
        counts = torch.tensor([b - a for a, b in zip(begins, ends, strict=True)])
        qo_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        kv_lens = torch.tensor(ends, dtype=torch.int32, device=device)
        attention.plan(BSRView(qo_indptr, PageTable.block_table(block_table.to(device), kv_lens, PAGE_SIZE)))
        append_kv(k, v, cache, slots.to(device))
        out = attention.run(q, cache, variant_args={"bias": bias})
        seen = [
            (text[0][a:b].float(), text[1][:b].float(), text[2][:b].float())
            for text, a, b in zip(texts, begins, ends, strict=True)
        ]
        wanted = torch.cat([dense(its_q, its_k, its_v, bias) for its_q, its_k, its_v in seen])
        worst = max(worst, float((out.float() - wanted).abs().max()))
        begins, ends = ends, [end + 1 for end in ends]
    return worst


def main(argv: list[str] | None = None) -> tuple[Tensor, float, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--steps", type=int, default=80, help="training steps (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the heads (needs matplotlib)")
    arguments = parser.parse_args(argv)
    if arguments.plot:
        require("matplotlib")
    device = llama.pick_device(arguments.device)
    torch.manual_seed(0)
    print(f"before learning, every token has the same weight:\n{picture(torch.zeros(HEADS, DISTANCES))}\n")
    bias = learn(arguments.steps)
    print(f"\nafter learning, head h looks h + 1 tokens back:\n{picture(bias)}\n")
    if arguments.plot:
        plot(arguments.plot, bias)
    print("heads look back by", bias.argmax(1).tolist())
    difference = check(bias)
    print(f"on a CPU, compared with float64: largest difference {difference:.1e}")
    served = serve(bias, device, 20)
    print(f"served on {device}: largest difference {served:.1e}")
    return bias, difference, served


if __name__ == "__main__":
    main()
