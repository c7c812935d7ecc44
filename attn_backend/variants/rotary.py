"""Built-in variants that rotate Q and K (RoPE, arXiv 2104.09864), and their frequencies. `builtin` exports
them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..validation import check_int, check_types, refuse, require
from .params import Param
from .reference import Reference
from .variant import Variant

__all__ = ["llama3_frequencies", "rope", "rope_at", "rope_frequencies", "rope_in_cache"]


def rope_frequencies(rotary_dim: int, theta: float = 10000.0) -> Tensor:
    """float64 [rotary_dim / 2] on the CPU: theta^(-2 i / rotary_dim), in radians per position (RoFormer,
    arXiv 2104.09864).

    Args:
        rotary_dim: columns that are rotated: head_dim, or fewer.
        theta: above 0; rope_theta in a model's config.
    """
    rotary_dim = check_int("rotary_dim", rotary_dim, 2)
    require(rotary_dim % 2 == 0, "rotary_dim", rotary_dim, "even")
    _check_above_0(theta=theta)
    return float(theta) ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def llama3_frequencies(
    rotary_dim: int,
    theta: float = 500000.0,
    *,
    factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> Tensor:
    """float64 [rotary_dim / 2] on the CPU: rope_frequencies(), scaled as in Llama 3.1 (rope_type "llama3" in
    a model's config, which uses the same names).

    Let f be the frequency, and n = original_max_position_embeddings * f / 2 pi its turns in the original
    context. The result is f if n > high_freq_factor, and f / factor if n < low_freq_factor. In between it is
    the mean of both, weighted by the position of n.
    """
    _check_above_0(factor=factor, low_freq_factor=low_freq_factor)
    require(
        high_freq_factor > low_freq_factor,
        "high_freq_factor",
        high_freq_factor,
        f"above low_freq_factor = {low_freq_factor}",
    )
    original = check_int("original_max_position_embeddings", original_max_position_embeddings, 1)
    plain = rope_frequencies(rotary_dim, theta)
    kept = (
        (original * plain / (2 * math.pi) - low_freq_factor) / (high_freq_factor - low_freq_factor)
    ).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


def rope(frequencies: Tensor, *, interleaved: bool = False) -> Variant:
    """Rotary embedding of Q and K, for a cache with unrotated keys. In a row at position p, columns i and
    i + R / 2, as a point of the plane, are rotated by p * frequencies[i] radians. The first R =
    2 * len(frequencies) columns are rotated, the others stay. RoFormer (arXiv 2104.09864), Llama. Positions
    count the request's tokens in its pages, and must be below 2^24.

    Args:
        frequencies: a float tensor [R / 2] of up to 1.5 radians, for example from rope_frequencies() or
            llama3_frequencies(). R is at most head_dim, and a multiple of 16 if pairs are not interleaved.
        interleaved: pairs are columns 2 i and 2 i + 1 instead (GPT-J).
    """
    return _rope(
        "rope",
        frequencies,
        interleaved,
        ("row.position", "token.position"),
        (lambda b, q_idx: q_idx, lambda b, kv_idx: kv_idx),
    )


def rope_at(
    frequencies: Tensor,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Variant:
    """rope() at given positions.

    Plans do not look for prefixes that requests share, as a token may have a different position in each
    request.

    Args:
        frequencies, interleaved: as in rope().
        q_positions: int32 [rows of Q].
        kv_positions: int32 [batch, at least the longest kv_len].
    """

    def position_of_query(b: Any, q_idx: Any, row: Any, kv_len: Any) -> Any:
        return q_positions[row]  # type: ignore[index]

    def position_of_key(b: Any, kv_idx: Any, kv_len: Any) -> Any:
        return kv_positions[b, kv_idx]  # type: ignore[index]

    params = (
        Param("q_positions", torch.int32, value=q_positions),  # not for padding rows of Q
        Param("kv_positions", torch.int32, value=kv_positions, shape=("batch", None)),
    )
    places = ("q_positions(row.row)", "kv_positions(token.request, token.position)")
    return _rope("rope_at", frequencies, interleaved, places, (position_of_query, position_of_key), params)


def rope_in_cache(
    frequencies: Tensor, window: int, sink_tokens: int = 4, *, interleaved: bool = False
) -> Variant:
    """rope() at positions in the cache of StreamingLLM (arXiv 2309.17453), which holds the first sink_tokens
    tokens of a request and its last `window`. The cache has dropped d = max(kv_len - window - sink_tokens, 0)
    tokens. Query q has position q - d, key k < sink_tokens position k, any other key position k - d. Combine
    it with streaming_llm(window, sink_tokens), which hides the dropped tokens. If they are not in the pages
    at all, rope() does the same.

    Args:
        frequencies, interleaved: as in rope().
        window, sink_tokens: as in streaming_llm().
    """
    window, sink_tokens = check_int("window", window, 1), check_int("sink_tokens", sink_tokens, 0)

    def position_of_query(b: Any, q_idx: Any, row: Any, kv_len: Any) -> Any:
        return q_idx - torch.clamp(kv_len - window - sink_tokens, min=0)

    def position_of_key(b: Any, kv_idx: Any, kv_len: Any) -> Any:
        return torch.where(
            kv_idx < sink_tokens, kv_idx, kv_idx - torch.clamp(kv_len - window - sink_tokens, min=0)
        )

    dropped = "max({}.kv_len - window - sink_tokens, 0)"
    in_cache = f"token.position < sink_tokens ? token.position : token.position - {dropped.format('token')}"
    places = (f"row.position - {dropped.format('row')}", in_cache)
    params = (Param("window", int, value=window), Param("sink_tokens", int, value=sink_tokens))
    return _rope(
        "rope_in_cache", frequencies, interleaved, places, (position_of_query, position_of_key), params
    )


def _check_above_0(**numbers: Any) -> None:
    for name, number in numbers.items():
        require(isinstance(number, float | int) and 0 < number < math.inf, name, number, "a number above 0")


def _rope(
    name: str,
    frequencies: Tensor,
    interleaved: bool,
    places: tuple[str, str],
    positions: tuple[Any, Any],
    params: tuple[Param, ...] = (),
) -> Variant:
    """places: positions of a query and of a key, in C++. positions: the same as functions, (b, q_idx) and (b,
    kv_idx); if there are params, (b, q_idx, row, kv_len) and (b, kv_idx, kv_len).
    """
    if (
        not isinstance(frequencies, Tensor)
        or not frequencies.is_floating_point()
        or frequencies.ndim != 1
        or not len(frequencies)
    ):
        refuse("frequencies", frequencies, "a float tensor of 1 dimension, such as rope_frequencies() makes")
    check_types(bool, "True or False", interleaved=interleaved)
    pairs = len(frequencies)
    require(
        interleaved or pairs % 8 == 0,
        "len(frequencies)",
        pairs,
        "a multiple of 8 where pairs are not interleaved",
    )
    radians = frequencies.detach().double().cpu()
    largest = float(radians.abs().max())
    # turns_of() (csrc/attention/variant/variant_math.h); also refuses NaN
    require(largest <= 1.5, "largest of frequencies", largest, "at most 1.5 radians")
    turns = radians / (2 * math.pi)
    high = turns.float()
    table = torch.cat([high, (turns - high.double()).float()])
    distance = 1 if interleaved else pairs

    def turned(x: Tensor, position: Any) -> Tensor:
        angle = position.to(x.dtype) * radians.to(x.dtype)
        rotary = x[: 2 * pairs].reshape(pairs, 2).T if interleaved else x[: 2 * pairs].reshape(2, pairs)
        turned = torch.stack(
            [
                rotary[0] * angle.cos() - rotary[1] * angle.sin(),
                rotary[1] * angle.cos() + rotary[0] * angle.sin(),
            ]
        )
        return torch.cat([(turned.T if interleaved else turned).reshape(-1), x[2 * pairs :]])

    of_query, of_key = positions

    def query(x: Any, b: Any, h: Any, q_idx: Any, *more: Any) -> Any:
        return turned(x, of_query(b, q_idx, *more))

    def key(x: Any, b: Any, h: Any, kv_idx: Any, *more: Any) -> Any:
        return turned(x, of_key(b, kv_idx, *more))

    # The kernels' tiles hold whole pairs of columns, so turns.data needs no bounds check.
    hooks = f"""
  ATTN_HD Pair turned(const Pair& x, int32_t first, int32_t position) const {{
    const float* speed = turns.data + static_cast<uint32_t>(first){" / 2" if interleaved else ""};
    return rotated(x, turns_of(position, speed[0], speed[{pairs}]));
  }}
  Pair query(Pair x, int32_t first, int32_t, const ScoreRow& row) const {{
    return turned(x, first, {places[0]});
  }}
  Pair key(Pair x, int32_t first, int32_t, const KvToken& token) const {{
    return turned(x, first, {places[1]});
  }}
"""
    return Variant.from_source(
        hooks,
        (Param("turns", torch.float32, 1, table), *params),
        name=name,
        pair_distance=distance,
        pair_columns=2 * pairs,
        reference=Reference(None, None, params, wants_row=bool(params), query=query, key=key),
    )
