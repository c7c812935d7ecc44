"""The variants of the fuzz: each with arguments for any batch, and with its definition in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import oracle
import torch
import variant_sources
from torch import Tensor

from attn_backend.variants import Variant, builtin

from .arguments import (
    Args,
    Sizes,
    bias,
    bits,
    cap,
    ids,
    items,
    positions,
    prefix_lens,
    scales,
    slopes,
    sm_scales,
)

FUNCTIONS = Path(__file__).resolve().parent.parent / "variants" / "variant_functions.py"
NO_LIMIT = 2**31
STEPS = ("rounding", "casts")  # a score with a rounding error may give a completely different result
OF_ONE_LEVEL = ("custom_mask", "tree_mask", "slanted")  # they read kv_len, which is the level's in a level


@dataclass(frozen=True)
class Entry:
    """A variant.

    args: makes the arguments of a run, on the CPU. oracle: the float64 variant of these arguments, also on
    the CPU. The batch must not be larger than max_requests, max_heads, max_tokens.
    """

    name: str
    variant: Variant
    args: Callable[[numpy.random.Generator, Sizes], Args]
    oracle: Callable[[Args], oracle.Variant]
    is_builtin: bool = False
    max_requests: int = NO_LIMIT
    max_heads: int = NO_LIMIT
    max_tokens: int = NO_LIMIT

    @property
    def is_plain(self) -> bool:
        """Whether a view without a causal setting is causal."""
        return not (self.variant.has_mask or self.variant.causal or self.variant.window_left >= 0)

    @property
    def fits_levels(self) -> bool:
        """Whether the variant has the same meaning in a batch that is split into levels."""
        return not self.variant.tells_requests_apart and not any(name in self.name for name in OF_ONE_LEVEL)

    @property
    def has_steps(self) -> bool:
        return self.name in STEPS


@cache
def entries() -> tuple[Entry, ...]:
    """All entries. Their tensors are on the CPU; GPU kernels read copies."""
    return (*_functions(), *_builtins(), *_combinations(), *_cpp())


def entry_of(name: str) -> Entry:
    return next(entry for entry in entries() if entry.name == name)


def _entry(
    name: str,
    variant: Variant,
    args: Callable[[numpy.random.Generator, Sizes], Args] | None = None,
    **more: Any,
) -> Entry:
    return Entry(
        name, variant, args or (lambda _rng, _sizes: {}), lambda given: by_reference(variant, given), **more
    )


def by_reference(variant: Variant, args: Mapping[str, Any]) -> oracle.Variant:
    """A variant's Python functions, over all pairs of a request, and over its rows."""
    functions = variant.reference()
    assert functions is not None
    parts = functions.parts

    def logits(score: Tensor, at: oracle.Pairs) -> Tensor:
        for part in parts:
            if part.score_mod is not None:
                score = over_pairs(part.bound(part.score_mod, args, torch.float64), at, score)
        return score

    def mask(at: oracle.Pairs) -> Tensor:
        seen = torch.ones((), dtype=torch.bool, device=at.token.device)
        for part in parts:
            if part.mask_mod is not None:
                seen = seen & over_pairs(
                    part.bound(part.mask_mod, args, torch.float32), at, wants_row=part.wants_row
                )
        return seen

    def number(n: int, like: Tensor) -> Tensor:
        return torch.tensor(n, dtype=torch.int32, device=like.device)

    def query(q: Tensor, at: oracle.Pairs) -> Tensor:
        coordinates = {"b": number(at.request, q), "h": at.head[..., 0], "q_idx": at.position[..., 0]}
        return functions.query(q, **coordinates, args=args, row=at.row[..., 0], kv_len=number(at.kv_len, q))

    def of_tokens(transform: Callable[..., Tensor]) -> Callable[[Tensor, oracle.Pairs], Tensor]:
        def transformed(rows: Tensor, at: oracle.Pairs) -> Tensor:
            kv_heads = torch.arange(len(rows), device=rows.device)[:, None]
            return transform(
                rows,
                b=number(at.request, rows),
                h=kv_heads,
                kv_idx=at.token[None],
                args=args,
                kv_len=number(at.kv_len, rows),
            )

        return transformed

    transforms = {"query": query, "key": of_tokens(functions.key), "value": of_tokens(functions.value)}
    return oracle.Variant(logits, mask, uses_softmax=variant.uses_softmax, **transforms)


def over_pairs(
    function: Callable[..., Any], at: oracle.Pairs, score: Tensor | None = None, wants_row: bool = False
) -> Tensor:
    """[heads, rows, tokens] of a function of 0-d tensors in flex_attention's signature, mapped as in
    flex_attention. score: [heads, rows, tokens].
    """
    h, q_idx, index, kv_idx = (t.flatten().int() for t in (at.head, at.position, at.index, at.token))
    # a query before the first token sees nothing, and tensors have no entry for it
    q_idx = q_idx.clamp(min=0)
    shape = (len(h), len(q_idx), len(kv_idx))
    b, kv_len = (torch.tensor(n, dtype=torch.int32, device=h.device) for n in (at.request, at.kv_len))
    arguments = [
        *([] if score is None else [score]),
        b,
        h,
        q_idx,
        kv_idx,
        *([index, kv_len] if wants_row else []),
    ]
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=h.device) if score is None else score

    def as_tensor(*elements: Tensor) -> Tensor:
        result = function(*elements)
        return result if isinstance(result, Tensor) else torch.tensor(result, device=h.device)

    mapped = as_tensor
    for of_axis in ((kv_idx,), (q_idx, index), (h,)):
        dims = tuple(
            0 if argument is score or any(argument is of for of in of_axis) else None
            for argument in arguments
        )
        mapped = torch.vmap(mapped, in_dims=dims)
    with torch.no_grad():
        return mapped(*arguments)


# ---- Traced functions ----

REQUESTS, HEADS, TOKENS = 24, 8, 1024  # limits of batches for functions with tensors


@cache
def function_cases() -> ModuleType:
    """variant_functions.py loaded again, for larger batches."""
    name = "variant_functions_of_the_fuzz"
    spec = importlib.util.spec_from_file_location(name, FUNCTIONS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.SIZES = (REQUESTS, HEADS, TOKENS)  # type: ignore[attr-defined]
    sys.modules[name] = module
    with torch.random.fork_rng(devices=[]):
        spec.loader.exec_module(module)
    return module


def _functions() -> list[Entry]:
    found = []
    for case in function_cases().CASES:
        variant = case.variant()
        limits = (
            {"max_requests": REQUESTS, "max_heads": HEADS, "max_tokens": TOKENS}
            if any(param.is_tensor for param in variant.params)
            else {}
        )
        found.append(_entry(case.name, variant, lambda _rng, _sizes, args=case.args: args, **limits))
    return found


# ---- Built-ins ----


def _builtins() -> list[Entry]:
    made = [
        _entry("causal", builtin.causal()),
        _entry("sliding_window", builtin.sliding_window(90)),
        _entry("streaming_llm", builtin.streaming_llm(100, 4)),
        _entry("soft_cap", builtin.soft_cap(5.0)),
        _entry("soft_cap_given", builtin.soft_cap(), cap),
        _entry("alibi", builtin.alibi(), slopes),
        _entry("alibi_bound", builtin.alibi(builtin.alibi_slopes(HEADS)), max_heads=HEADS),
        _entry("sigmoid", builtin.sigmoid(-1.5)),
        _entry("sigmoid_given", builtin.sigmoid(None), bias),
        _entry("prefix_lm", builtin.prefix_lm(), prefix_lens),
        _entry("bidirectional_spans", builtin.bidirectional_spans(), ids("span_ids")),
        _entry("chunked_local", builtin.chunked_local(150)),
        _entry("document", builtin.document(), ids("document_ids")),
        _entry("multi_item_scoring", builtin.multi_item_scoring(), items),
        _entry("temperature", builtin.temperature(0.1, 50)),
        _entry("position_temperature", builtin.position_temperature(), scales),
        _entry("request_scale", builtin.request_scale(), sm_scales),
        _entry("custom_mask", builtin.custom_mask(), bits(square=False)),
        _entry(
            "custom_mask_of_booleans", builtin.custom_mask(packed=False), bits(square=False, packed=False)
        ),
        _entry("tree_mask", builtin.tree_mask(), bits(square=True)),
        _entry("tree_mask_of_booleans", builtin.tree_mask(packed=False), bits(square=True, packed=False)),
        _entry("rope", builtin.rope(builtin.llama3_frequencies(64, original_max_position_embeddings=256))),
        _entry("rope_interleaved", builtin.rope(builtin.rope_frequencies(44), interleaved=True)),
        _entry("rope_at", builtin.rope_at(builtin.rope_frequencies(48)), positions),
        _entry("rope_in_cache", builtin.rope_in_cache(builtin.rope_frequencies(16, 500.0), 60, 4)),
    ]
    return [replace(entry, is_builtin=True) for entry in made]


def _combinations() -> list[Entry]:
    def both(
        *makers: Callable[[numpy.random.Generator, Sizes], Args],
    ) -> Callable[[numpy.random.Generator, Sizes], Args]:
        return lambda rng, sizes: {name: value for make in makers for name, value in make(rng, sizes).items()}

    def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 0.3 * torch.log2(1.0 + torch.abs(q_idx - kv_idx)) * (h + 1)

    causal, mine = builtin.causal(), Variant.from_functions(by_distance)
    return [
        _entry("causal_soft_cap", builtin.soft_cap() & causal, cap),
        _entry("gemma", builtin.soft_cap(20.0) & causal & builtin.sliding_window(120)),
        _entry("causal_alibi", causal & builtin.alibi(), slopes),
        _entry("causal_document", builtin.document() & causal, ids("document_ids")),
        _entry(
            "window_of_documents",
            builtin.document() & builtin.sliding_window(64) & builtin.alibi(),
            both(ids("document_ids"), slopes),
        ),
        _entry("tree_mask_alibi", builtin.tree_mask() & builtin.alibi(), both(bits(square=True), slopes)),
        _entry("custom_mask_causal", builtin.custom_mask() & causal & mine, bits(square=False)),
        _entry("llama4", builtin.chunked_local(128) & builtin.temperature(0.1, 40)),
        _entry("spans_soft_cap", builtin.bidirectional_spans() & builtin.soft_cap(8.0), ids("span_ids")),
        _entry(
            "prefix_lm_scaled",
            builtin.position_temperature() & builtin.prefix_lm(),
            both(scales, prefix_lens),
        ),
        _entry(
            "sigmoid_causal_alibi",
            builtin.soft_cap(9.0) & causal & builtin.alibi() & builtin.sigmoid(-2.0),
            slopes,
        ),
        _entry(
            "sigmoid_document", builtin.document() & builtin.sigmoid(None), both(ids("document_ids"), bias)
        ),
        _entry("mine_streaming", mine & builtin.streaming_llm(64, 16)),
        _entry(
            "rope_streaming",
            builtin.rope_in_cache(builtin.rope_frequencies(64), 64, 16) & builtin.streaming_llm(64, 16),
        ),
        _entry(
            "rope_gemma",
            builtin.rope(builtin.rope_frequencies(32))
            & builtin.soft_cap(20.0)
            & causal
            & builtin.sliding_window(120),
        ),
        _entry(
            "rope_tree_mask_alibi",
            builtin.tree_mask() & builtin.alibi() & builtin.rope(builtin.rope_frequencies(64)),
            both(bits(square=True), slopes),
        ),
    ]


# ---- C++ ----

PAGES_CPP = """\
float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
  return logit + strength(row.qo_head) * exp(-0.5f * (kv_position % 16));
}
bool mask(const ScoreRow& row, int32_t kv_position) const {
  return kv_position <= row.position || kv_position < sink_tokens;
}
"""
GATED_CPP = (
    "float output(float value, const ScoreRow& row, int32_t column) const { return value * "
    "gate(row.qo_head) + 0.01f * (column % 8 + row.request % 5); }"
)


SCALED_CPP = """\
Pair query(Pair x, int32_t first, int32_t second, const ScoreRow& row) const {
  const float factor = 1.0f + 0.25f * (row.qo_head % 3 + row.position % 2);
  return {x.first * factor, x.second * factor};
}
Pair key(Pair x, int32_t, int32_t, const KvToken& token) const {
  return {x.first * key_scale(token.kv_head), x.second * key_scale(token.kv_head)};
}
Pair value(Pair x, int32_t first, int32_t second, const KvToken& token) const {
  return {x.first * 0.5f + 0.125f * (first % 4),
          x.second * 0.5f + 0.125f * (second % 4 + token.position % 3)};
}
"""
BY_REQUEST_CPP = """\
Pair value(Pair x, int32_t first, int32_t, const KvToken& token) const {
  const float factor = value_scale(token.request, token.position) + 0.001f * (token.kv_len % 5 + first % 7);
  return {x.first * factor, x.second * factor};
}
float output(float value, const ScoreRow& row, int32_t column) const {
  return value + 0.01f * (column % 8 + row.request % 5);
}
"""


def _cpp() -> list[Entry]:
    slope = 0.02

    def pages_args(rng: numpy.random.Generator, sizes: Sizes) -> Args:
        return {
            "strength": torch.from_numpy(rng.normal(0, 2, sizes.heads)).float(),
            "sink_tokens": int(rng.integers(0, 200)),
        }

    def pages(args: Args) -> oracle.Variant:
        return oracle.Variant(
            lambda logits, at: (
                logits + args["strength"].double()[at.head] * torch.exp(-0.5 * (at.token % 16))
            ),
            lambda at: (at.token <= at.position) | (at.token < args["sink_tokens"]),
        )

    def gate_args(rng: numpy.random.Generator, sizes: Sizes) -> Args:
        return {"gate": torch.from_numpy(rng.uniform(0.5, 2, sizes.heads)).float()}

    def gated(args: Args) -> oracle.Variant:
        def output(o: Tensor, at: oracle.Pairs) -> Tensor:
            return o * args["gate"].double()[at.head] + 0.01 * (
                torch.arange(o.shape[-1], device=o.device) % 8 + at.request % 5
            )

        return oracle.Variant(output=output)

    def scaled_args(rng: numpy.random.Generator, sizes: Sizes) -> Args:
        return {"key_scale": torch.from_numpy(rng.uniform(0.5, 2, sizes.heads)).float()}

    def scaled(args: Args) -> oracle.Variant:
        def query(q: Tensor, at: oracle.Pairs) -> Tensor:
            return q * (1 + 0.25 * (at.head % 3 + at.position % 2))

        def key(k: Tensor, at: oracle.Pairs) -> Tensor:
            return k * args["key_scale"].double()[: len(k), None, None]

        def value(v: Tensor, at: oracle.Pairs) -> Tensor:  # neighbors are pairs
            column = torch.arange(v.shape[-1])
            return v * 0.5 + 0.125 * (column % 4 + column % 2 * (at.token[:, None] % 3))

        return oracle.Variant(query=query, key=key, value=value)

    def by_request_args(rng: numpy.random.Generator, sizes: Sizes) -> Args:
        return {"value_scale": torch.from_numpy(rng.uniform(0.5, 2, (sizes.batch, sizes.longest))).float()}

    def by_request(args: Args) -> oracle.Variant:
        def value(v: Tensor, at: oracle.Pairs) -> Tensor:  # halves are pairs
            column = torch.arange(v.shape[-1]) % (v.shape[-1] // 2)
            return v * (
                args["value_scale"].double()[at.request][at.token][:, None]
                + 0.001 * (at.kv_len % 5 + column % 7)
            )

        def output(o: Tensor, at: oracle.Pairs) -> Tensor:
            return o + 0.01 * (torch.arange(o.shape[-1], device=o.device) % 8 + at.request % 5)

        return oracle.Variant(value=value, output=output)

    return [
        Entry(
            "slanted",
            variant_sources.SLANTED,
            lambda _rng, _sizes: {"slope": slope},
            lambda args: variant_sources.slanted_oracle(args["slope"]),
        ),
        Entry(
            "alibi_in_cpp",
            variant_sources.ALIBI,
            lambda _rng, _sizes: {"slope": slope},
            lambda args: variant_sources.alibi_oracle(args["slope"]),
        ),
        Entry(
            "squared",
            variant_sources.SQUARED,
            lambda _rng, _sizes: {},
            lambda _args: variant_sources.SQUARED_ORACLE,
        ),
        Entry(
            "pages",
            Variant.from_source(PAGES_CPP, {"strength": torch.float32, "sink_tokens": int}, name="pages"),
            pages_args,
            pages,
        ),
        Entry(
            "gated", Variant.from_source(GATED_CPP, {"gate": torch.float32}, name="gated"), gate_args, gated
        ),
        Entry(
            "scaled",
            Variant.from_source(SCALED_CPP, {"key_scale": torch.float32}, name="scaled", pair_distance=1),
            scaled_args,
            scaled,
        ),
        Entry(
            "by_request",
            Variant.from_source(BY_REQUEST_CPP, {"value_scale": (torch.float32, 2)}, name="by_request"),
            by_request_args,
            by_request,
        ),
    ]
