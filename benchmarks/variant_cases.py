"""The lines of the variants' benchmark: each change to attention as functions in flex_attention's signatures,
as arguments of this package, and in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_backend import Attention, Variant, segment_packbits
from attn_backend.variants import builtin
from benchmarks.batches import Batch, Ours
from benchmarks.cases import Case

CAP, WINDOW, GPT_OSS_WINDOW = 30.0, 1024, 128
DOCUMENTS, PREFIX = 8, 4  # documents of a request; one token of PREFIX is in the prefix
PIECE, IN_TURN = 128, 4  # pieces of PIECE tokens; IN_TURN documents take turns
FIRST_TOKENS = 4  # that stay visible with a window
TREE = 64  # tokens
CHECKED_ROWS = 64
ROWS_AT_ONCE = 1024

SCALED = """
  Pair key(Pair x, int32_t, int32_t, const KvToken& token) const {
    return {x.first * k_scale(token.kv_head), x.second * k_scale(token.kv_head)};
  }
  Pair value(Pair x, int32_t, int32_t, const KvToken& token) const {
    return {x.first * v_scale(token.kv_head), x.second * v_scale(token.kv_head)};
  }
"""

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Meaning:
    """The definition of attention on a line, with its tensors.

    score_mod, mask_mod: in flex_attention's signatures, over tensors that broadcast. None: scores are
        unchanged, all tokens are visible.
    cap, window, slopes, sinks: for peers that take these instead of functions. window: tokens that a query
        sees, including itself. sinks: float32 [num_qo_heads].
    made_with, run_with, variant_args: for this package.
    """

    mask_mod: MaskMod
    score_mod: ScoreMod | None = None
    uses_softmax: bool = True
    is_causal: bool = True  # the mask is only causal, apart from the window
    cap: float = 0.0
    window: int = 0
    is_alibi: bool = False
    sinks: Tensor | None = None
    bias: float = 0.0  # of the sigmoid
    # rows of Q or K [rows, heads, head_dim], and their positions
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None
    scales: tuple[Tensor, Tensor] | None = None  # float32 [num_kv_heads] each: factors of K and V
    made_with: dict[str, Any] = field(default_factory=dict)
    run_with: dict[str, Any] = field(default_factory=dict)
    variant_args: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class VariantCase:
    """A line. name: variant and case."""

    variant: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.case.name}"


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def within(window: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window)


def plain(case: Case, device: torch.device) -> Meaning:
    return Meaning(causal)


def soft_cap(case: Case, device: torch.device) -> Meaning:
    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return Meaning(causal, capped, cap=CAP, run_with={"logits_soft_cap": CAP})


def window(case: Case, device: torch.device) -> Meaning:
    return Meaning(within(WINDOW), window=WINDOW)


def alibi(case: Case, device: torch.device) -> Meaning:
    slopes = builtin.alibi_slopes(case.num_qo_heads).to(device)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    variant = builtin.alibi() & builtin.causal()
    return Meaning(
        causal, biased, is_alibi=True, made_with={"variant": variant}, variant_args={"slopes": slopes}
    )


def sinks(case: Case, device: torch.device) -> Meaning:
    return _sinks(case, device, 0)


def gpt_oss(case: Case, device: torch.device) -> Meaning:
    return _sinks(case, device, GPT_OSS_WINDOW)


def _sinks(case: Case, device: torch.device, window: int) -> Meaning:
    values = torch.randn(case.num_qo_heads, device=device).bfloat16().float()  # peers take bfloat16
    return Meaning(
        within(window) if window else causal,
        window=window,
        sinks=values,
        made_with={"sinks": True},
        run_with={"sinks": values},
    )


def sigmoid(case: Case, device: torch.device) -> Meaning:
    bias = -math.log(max(case.kv_lens))

    def weights(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + bias)

    return Meaning(
        causal,
        weights,
        uses_softmax=False,
        bias=bias,
        made_with={"variant": builtin.sigmoid(bias) & builtin.causal()},
    )


def rope(case: Case, device: torch.device) -> Meaning:
    """Q and K before the rotary embedding: K of the cache is rotated when it is read."""
    frequencies = builtin.rope_frequencies(case.head_dim).to(device)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions.double()[:, None] * frequencies)[:, None]
        first, second = x.double().chunk(2, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()],
            dim=-1,
        )

    return Meaning(causal, rotate=rotate, made_with={"variant": builtin.rope(frequencies) & builtin.causal()})


def scaled(case: Case, device: torch.device) -> Meaning:
    """Both K and V are scaled when they are read: the cheapest transform of each."""
    k_scale, v_scale = (torch.rand(case.num_kv_heads, device=device) + 0.5 for _ in range(2))
    variant = Variant.from_source(
        SCALED, {"k_scale": torch.float32, "v_scale": torch.float32}, name="scaled", causal=True
    )
    return Meaning(
        causal,
        scales=(k_scale, v_scale),
        made_with={"variant": variant},
        variant_args={"k_scale": k_scale, "v_scale": v_scale},
    )


def document(case: Case, device: torch.device) -> Meaning:
    """Documents of about an eighth of a request, with slightly different lengths."""
    longest = max(case.kv_lens)
    generator = torch.Generator().manual_seed(1)
    ends = torch.arange(1, DOCUMENTS) * longest // DOCUMENTS + torch.randint(
        -longest // 50, longest // 50 + 1, (len(case.kv_lens), DOCUMENTS - 1), generator=generator
    )
    ids = (torch.arange(longest)[None, :, None] >= ends[:, None]).sum(-1).int().to(device)

    def of_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    variant = builtin.document() & builtin.causal()
    return Meaning(
        of_document, is_causal=False, made_with={"variant": variant}, variant_args={"document_ids": ids}
    )


def documents_in_pieces(case: Case, device: torch.device) -> Meaning:
    """A mask with holes."""
    ids = (
        (torch.arange(max(case.kv_lens)) // PIECE % IN_TURN)
        .int()
        .expand(len(case.kv_lens), -1)
        .contiguous()
        .to(device)
    )

    def of_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    variant = builtin.document() & builtin.causal()
    return Meaning(
        of_document, is_causal=False, made_with={"variant": variant}, variant_args={"document_ids": ids}
    )


def window_and_first_tokens(case: Case, device: torch.device) -> Meaning:
    """A window that keeps the first tokens: one hole."""

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < WINDOW) | (kv_idx < FIRST_TOKENS))

    return Meaning(seen, is_causal=False, made_with={"variant": builtin.streaming_llm(WINDOW, FIRST_TOKENS)})


def prefix_lm(case: Case, device: torch.device) -> Meaning:
    prefix_lens = torch.tensor(
        [kv_len // PREFIX for kv_len in case.kv_lens], dtype=torch.int32, device=device
    )

    def in_prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) | (kv_idx < prefix_lens[b])

    return Meaning(
        in_prefix,
        is_causal=False,
        made_with={"variant": builtin.prefix_lm()},
        variant_args={"prefix_lens": prefix_lens},
    )


def tree(case: Case, device: torch.device) -> Meaning:
    """Random trees: a query sees the cache, itself, and its ancestors among the queries."""
    generator = torch.Generator().manual_seed(2)
    masks = torch.zeros(len(case.qo_lens), TREE, TREE, dtype=torch.bool)
    for mask in masks:
        for i in range(TREE):
            if i:
                mask[i] = mask[int(torch.randint(0, i, (), generator=generator))]
            mask[i, i] = True
    indptr = torch.arange(len(masks) + 1, dtype=torch.int32) * TREE * TREE
    packed, byte_indptr = (t.to(device) for t in segment_packbits(masks.flatten(), indptr, "little"))
    masks, first = masks.to(device), max(case.kv_lens) - TREE

    def of_tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        above = masks[b, (q_idx - first).clamp(min=0), (kv_idx - first).clamp(min=0)]
        return (kv_idx < first) | above

    return Meaning(
        of_tree,
        is_causal=False,
        made_with={"variant": builtin.tree_mask()},
        variant_args={"packed_mask": packed, "mask_indptr": byte_indptr},
    )


MEANINGS: dict[str, Callable[[Case, torch.device], Meaning]] = {
    "causal": plain,
    "soft cap 30": soft_cap,
    "window 1024": window,
    "ALiBi": alibi,
    "sinks": sinks,
    "sigmoid": sigmoid,
    "RoPE": rope,
    "scaled K and V": scaled,
    "document mask": document,
    "documents in pieces": documents_in_pieces,
    "window 1024 and first tokens": window_and_first_tokens,
    "prefix-LM": prefix_lm,
    "tree mask": tree,
    "gpt-oss": gpt_oss,
}


def _heads(heads: int, head_dim: int) -> str:
    return "" if (heads, head_dim) == (32, 128) else f" h{heads}/8 d{head_dim}"


def prefill(batch: int, tokens: int, heads: int = 32, head_dim: int = 128) -> Case:
    return Case(
        f"prefill {batch} x {tokens}{_heads(heads, head_dim)}",
        (tokens,) * batch,
        (tokens,) * batch,
        heads,
        8,
        head_dim,
        1,
        ragged=True,
    )


def decode(batch: int, tokens: int, heads: int = 32, head_dim: int = 128) -> Case:
    return Case(
        f"decode {batch} x {tokens}{_heads(heads, head_dim)}",
        (1,) * batch,
        (tokens,) * batch,
        heads,
        8,
        head_dim,
    )


def all_cases() -> list[VariantCase]:
    """The lines, grouped by batch: causal first, as the baseline of the others."""
    batches = [prefill(4, 1024), prefill(4, 4096), prefill(1, 16384), decode(64, 4096)]
    lines = [
        VariantCase(name, case)
        for case in batches
        for name in MEANINGS
        if name not in ("tree mask", "gpt-oss")
    ]
    trees = Case(f"16 x {TREE} over 8192", (TREE,) * 16, (8192 + TREE,) * 16, 32, 8)
    lines += [VariantCase(name, trees) for name in ("causal", "tree mask")]
    return lines + [
        VariantCase(name, case)
        for case in (prefill(4, 4096, 64, 64), decode(64, 4096, 64, 64))
        for name in ("causal", "gpt-oss")
    ]


def ours(batch: Batch, meaning: Meaning, **changes: Any) -> Ours:
    """This package. If a mask takes arguments, plan gets them too."""
    case = batch.case
    room: dict[str, Any] = {
        "max_rows": len(batch.q),
        "max_batch": len(case.kv_lens),
        "device": batch.q.device,
    }
    attention = Attention(
        case.num_qo_heads, case.num_kv_heads, case.head_dim, **(room | meaning.made_with | changes)
    )
    view = batch.view_with(
        causal=None if "variant" in meaning.made_with else True, window_left=meaning.window - 1
    )
    kv, out = batch.kv, torch.empty_like(batch.q)
    run_with = dict(meaning.run_with) | (
        {"variant_args": meaning.variant_args} if meaning.variant_args is not None else {}
    )
    variant: Variant | None = meaning.made_with.get("variant")
    plan_with = {"variant_args": meaning.variant_args} if variant is not None and variant.has_mask else {}

    def plan() -> None:
        attention.plan(view, **plan_with)

    plan()
    return Ours(attention, plan, lambda: attention.run(batch.q, kv, out=out, **run_with))


def visible(meaning: Meaning, case: Case, request: int, rows: Tensor) -> Tensor:
    """bool [rows, tokens] for rows of a request; the same in all heads."""
    position = case.kv_lens[request] - case.qo_lens[request] + rows
    b = torch.tensor(request, device=rows.device)
    return meaning.mask_mod(
        b,
        torch.zeros_like(b),
        position[:, None],
        torch.arange(case.kv_lens[request], device=rows.device)[None],
    )


def work(meaning: Meaning, case: Case, device: torch.device) -> tuple[int, int]:
    """Minimum (bytes, FLOPs): Q, O, and all visible K and V once; two products over all visible pairs."""
    pairs = tokens = 0
    for request, qo_len in enumerate(case.qo_lens):
        seen = torch.zeros(case.kv_lens[request], dtype=torch.bool, device=device)
        for rows in torch.arange(qo_len, device=device).split(ROWS_AT_ONCE):
            mask = visible(meaning, case, request, rows)
            pairs += int(mask.sum())
            seen |= mask.any(0)
        tokens += int(seen.sum())
    moved = 2 * case.head_dim * (2 * tokens * case.num_kv_heads + 2 * sum(case.qo_lens) * case.num_qo_heads)
    return moved, 4 * pairs * case.num_qo_heads * case.head_dim


class Expected:
    """float64 outputs of some rows of one request."""

    def __init__(self, batch: Batch, meaning: Meaning) -> None:
        case, device = batch.case, batch.q.device
        request = len(case.qo_lens) - 1
        qo_len, kv_len = case.qo_lens[request], case.kv_lens[request]
        rows = torch.linspace(0, qo_len - 1, min(CHECKED_ROWS, qo_len), device=device).long()
        self.rows = int(batch.qo_indptr[request]) + rows
        hidden = ~visible(meaning, case, request, rows)
        k, v = (tokens.double() for tokens in batch.tokens(request))
        q = batch.q[self.rows].double()
        position, token = (kv_len - qo_len + rows)[:, None], torch.arange(kv_len, device=device)[None]
        if meaning.rotate is not None:
            q, k = meaning.rotate(q, position[:, 0]), meaning.rotate(k, token[0])
        if meaning.scales is not None:
            k, v = (x * scale.double()[:, None] for x, scale in zip((k, v), meaning.scales, strict=True))
        b = torch.tensor(request, device=device)
        self.out = torch.empty(
            len(rows), case.num_qo_heads, case.head_dim, dtype=torch.float64, device=device
        )
        for head in range(case.num_qo_heads):
            kv_head = head // (case.num_qo_heads // case.num_kv_heads)
            weights = q[:, head] @ k[:, kv_head].T * case.head_dim**-0.5
            if meaning.score_mod is not None:
                weights = meaning.score_mod(weights, b, torch.tensor(head, device=device), position, token)
            if not meaning.uses_softmax:
                weights = weights.masked_fill(hidden, 0.0)
            else:
                weights = weights.masked_fill(hidden, -torch.inf)
                if meaning.sinks is not None:
                    weights = torch.cat([weights, meaning.sinks[head].double().expand(len(rows), 1)], 1)
                weights = weights.softmax(-1)[:, :kv_len]
            self.out[:, head] = weights @ v[:, kv_head]

    def error(self, out: Tensor) -> float:
        """‖o − ref‖ / ‖ref‖."""
        return float((out[self.rows].double() - self.out).norm() / self.out.norm())
