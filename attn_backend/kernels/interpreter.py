"""Attention under a variant in torch, by the variant's Python functions: for a CPU without a compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..metadata import BSRView, KVCache, PageTable
from ..metadata.kv_cache import BLOCK_COLUMNS, BlockScales, CacheScale, Scale
from ..metadata.values import check_page_ids
from ..validation import refuse
from ..variants import Variant
from .append import rotation_matrix

_TILE_ROWS = 256
_TILE_TOKENS = 1024


def can_be_interpreted(variant: Variant) -> bool:
    """Whether Python functions, traced or built-in, define the whole variant."""
    return variant.reference() is not None and not variant.has_output


@dataclass(frozen=True)
class RequestRows:
    """Rows of one request, with all of its tokens in one level."""

    request: int  # index in the view
    rows: Tensor  # int64 [rows], rows of Q
    # int64 [rows], positions among the level's tokens of the request, for causal and window_left
    places: Tensor
    positions: Tensor  # int64 [rows], given to the variant
    indices: Tensor  # int64 [rows], among the rows of the request
    requests: Tensor  # int64 [rows]
    slots: Tensor  # int64 [tokens]
    kv_offset: int
    kv_len: int  # given to the variant


def interpret(
    variant: Variant,
    args: Mapping[str, Any],
    levels: Sequence[BSRView],
    visibilities: Sequence[tuple[bool, int]],
    q: Tensor,
    kv: KVCache,
    out: Tensor,
    lse: Tensor | None,
    sm_scale: float,
    sinks: Tensor | None,
    q_scale: Scale,
    out_scale: Scale,
    rotation: bool = False,
) -> None:
    """Attention.run() in torch. All arguments are checked, except page ids. visibilities: causal and
    window_left of each level. If the variant transforms rows, their scales are applied before the transform.
    Other scales multiply the scores before the variant sees them, or the sums of values. rotation: rows of K
    and V are rotated.

    Raises:
        ValueError: a page id beyond the cache, or levels that lack something the variant's functions need.
    """
    levels = [view.with_slots_counted() for view in levels]
    for view in levels:
        check_page_ids(view, kv.num_pages)
    states = _States(out, variant.uses_softmax)
    functions = variant.reference()
    assert functions is not None
    # (scales of transformed rows, scales of other rows)
    scales = tuple(
        None if kv.has_token_scales or isinstance(scale, BlockScales) else scale
        for scale in (kv.k_scale, kv.v_scale)
    )
    k_scales = (scales[0], None) if variant.has_key else (None, scales[0])
    v_scales = (scales[1], None) if variant.has_value else (None, scales[1])
    q_scales = (q_scale, None) if variant.has_query else (None, q_scale)
    back = rotation_matrix(kv.head_dim).T.double() / (kv.head_dim & -kv.head_dim) if rotation else None
    heads, kv_heads = torch.arange(q.shape[1])[:, None, None], torch.arange(kv.num_kv_heads)[None, :]
    for view, (causal, window_left) in zip(levels, visibilities, strict=True):
        if len(levels) > 1 and variant.causal and not causal and view.positions is None:
            refuse(
                "positions",
                None,
                f"given in levels that are not causal: variant {variant.name}, which is interpreted, hides "
                f"what comes after a row",
            )
        for part in _parts_of(view, q.shape[0]):
            row_tiles = torch.arange(part.rows.numel()).split(_TILE_ROWS)
            for tokens in torch.arange(part.slots.numel()).split(_TILE_TOKENS):
                page, place = part.slots[tokens] // kv.page_size, part.slots[tokens] % kv.page_size
                token, kv_len = part.kv_offset + tokens, torch.tensor(part.kv_len)
                of_tokens = (torch.tensor(part.request), kv_heads, token[:, None], args)
                k_scale, v_scale = (
                    _of_heads(of_rows[0], of_tokens[0][None], kv.num_kv_heads)[0, :, None]
                    for of_rows in (k_scales, v_scales)
                )
                k_rows, v_rows = kv.k[page, place], kv.v[page, place]
                if kv.has_token_scales:
                    k_rows, k_scale = _rows_and_scales(k_rows, kv.k_scale, page, place)
                    v_rows, v_scale = _rows_and_scales(v_rows, kv.v_scale, page, place)
                k, v = k_rows.double() * k_scale.double(), v_rows.double() * v_scale.double()
                if back is not None:
                    k, v = k @ back, v @ back
                k = functions.key(k, *of_tokens, kv_len=kv_len)
                v = functions.value(v, *of_tokens, kv_len=kv_len)
                token = token[None, None, :]
                for tile in row_tiles:
                    rows, position = part.rows[tile], part.positions[tile][None, :, None]
                    request, index = part.requests[tile][None, :, None], part.indices[tile][None, :, None]
                    of_rows = (request[0], heads[:, 0, 0], position[0], args)
                    own_q, of_q, of_k, of_v = (
                        _of_heads(scale, part.requests[tile], kv.num_kv_heads)
                        for scale in (*q_scales, k_scales[1], v_scales[1])
                    )
                    own_q = own_q.repeat_interleave(q.shape[1] // kv.num_kv_heads, 1)[:, :, None]
                    queries = functions.query(
                        q[rows].double() * own_q, *of_rows, row=rows[:, None], kv_len=kv_len
                    )
                    products = (
                        _scores(queries, k)
                        * sm_scale
                        * (of_k * of_q).repeat_interleave(q.shape[1] // kv.num_kv_heads, 1).T[:, :, None]
                    )
                    scores = functions.logits(products, request, heads, position, token, args)
                    distance = part.places[tile][:, None] - tokens[None, :]
                    seen = functions.mask(request, heads, position, token, args, index=index, kv_len=kv_len)
                    seen = (
                        seen
                        & ((distance >= 0) | (not causal))
                        & ((distance <= window_left) | (window_left < 0))
                    )
                    states.add(rows, scores, seen, v, of_v)
    states.finish(out, lse, sinks, out_scale)


def _rows_and_scales(rows: Tensor, scale: CacheScale, page: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of K or V with a scale for each token and head, or block: numbers [..., columns], and what
    multiplies them.
    """
    if isinstance(scale, BlockScales):
        return _fp4_rows(rows, scale, page, place)
    assert isinstance(scale, Tensor)
    of_rows = scale[page, place][:, :, None]
    return _int4_rows(rows, of_rows) if rows.dtype == torch.uint8 else (rows, of_rows)


def _int4_rows(rows: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of an int4 cache less their zero points, [..., columns], and their scales."""
    bits = stored.view(torch.int32)
    columns = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2)
    return columns.int() - (bits & 15), (bits & ~15).view(torch.float32)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _fp4_rows(rows: Tensor, scales: BlockScales, page: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of an FP4 cache, [..., columns], and the scales of their columns."""
    columns = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2)
    blocks = scales.blocks[page, place]
    of_blocks = torch.exp2(blocks.double() - 127) if blocks.dtype == torch.uint8 else blocks.double()
    return _E2M1[columns.long()], of_blocks.repeat_interleave(BLOCK_COLUMNS, -1) * scales.factor


def _of_heads(scale: Scale, requests: Tensor, num_kv_heads: int) -> Tensor:
    """[rows, KV heads]: the scale for rows of these requests; requests out of range are clamped."""
    scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64)
    of_rows = scale[requests.clamp(0, scale.shape[0] - 1)] if scale.ndim == 2 else scale
    return of_rows.expand(requests.numel(), num_kv_heads)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, tokens] from q [rows, heads, head_dim] and k [tokens, KV heads, head_dim]."""
    rows, heads, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, head_dim)
    return torch.einsum("rkgd,tkd->kgrt", grouped, k).reshape(heads, rows, k.shape[0])


class _States:
    """Attention states of all rows of Q, in float64. Tiles are added in any order, by online softmax, or as
    sums without softmax.
    """

    def __init__(self, out: Tensor, uses_softmax: bool) -> None:
        rows, heads, head_dim_v = out.shape
        self._uses_softmax = uses_softmax
        self._is_planned = torch.zeros(rows, dtype=torch.bool)
        self._peak = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
        self._sum = torch.zeros(rows, heads, dtype=torch.float64)
        self._o = torch.zeros(rows, heads, head_dim_v, dtype=torch.float64)

    def add(self, rows: Tensor, scores: Tensor, seen: Tensor, v: Tensor, v_scale: Tensor) -> None:
        """scores, seen: [heads, rows, tokens]; v: [tokens, KV heads, head_dim]; v_scale: [rows, KV heads]."""
        self._is_planned[rows] = True
        if not v.shape[0]:
            return
        weights = scores.masked_fill(~seen, -torch.inf if self._uses_softmax else 0.0).transpose(0, 1)
        if self._uses_softmax:
            before = self._peak[rows]
            peak = torch.maximum(before, weights.amax(dim=-1))
            base = peak.masked_fill(peak == -torch.inf, 0.0)
            weights, rescale = torch.exp(weights - base[..., None]), torch.exp(before - base)
            self._peak[rows] = peak
            self._sum[rows] = self._sum[rows] * rescale + weights.sum(dim=-1)
            self._o[rows] *= rescale[..., None]
        grouped = weights.unflatten(1, (v.shape[1], -1)) * v_scale[:, :, None, None]
        self._o[rows] += torch.einsum("rkgt,tkd->rkgd", grouped, v).flatten(1, 2)

    def finish(self, out: Tensor, lse: Tensor | None, sinks: Tensor | None, out_scale: Scale) -> None:
        """Writes the rows that the plan covers."""
        rows, o, peak, total = self._is_planned, self._o, self._peak, self._sum
        if self._uses_softmax:
            if sinks is not None:
                sinks = sinks.double()
                with_sink = torch.maximum(peak, sinks)
                rescale = torch.exp(peak - with_sink)
                peak, o, total = (
                    with_sink,
                    o * rescale[..., None],
                    total * rescale + torch.exp(sinks - with_sink),
                )
            o = o / total.masked_fill(total == 0, 1.0)[..., None]
        if out_scale is not None:
            limit = torch.finfo(out.dtype).max
            o = (o / out_scale).clamp(-limit, limit).float()  # rounded once, as in kernels
        out[rows] = o[rows].to(out.dtype)
        if lse is not None:
            lse[rows] = (peak + torch.log(total))[rows].float()


def _parts_of(view: BSRView, num_rows: int) -> Iterator[RequestRows]:
    """One RequestRows for each request that has rows; num_rows: rows of Q."""
    for request in range(view.batch_size):
        begin, end = (int(view.qo_indptr[i]) for i in (request, request + 1))
        indices = torch.arange(end - begin)
        rows = torch.arange(begin, end) if view.rows is None else view.rows[begin:end].long()
        is_there = rows < num_rows
        rows, indices = rows[is_there], indices[is_there]
        if not rows.numel():
            continue
        slots = _slots_of(view.table, request)
        places = slots.numel() - (end - begin) + indices
        kv_offset = 0 if view.kv_offsets is None else int(view.kv_offsets[request])
        yield RequestRows(
            request,
            rows,
            places,
            kv_offset + places if view.positions is None else view.positions[rows].long(),
            indices,
            torch.full_like(rows, request) if view.requests is None else view.requests[rows].long(),
            slots,
            kv_offset,
            kv_offset + slots.numel(),
        )


def _slots_of(table: PageTable, request: int) -> Tensor:
    """int64 [tokens]: page * page_size + offset in the page, for each token of a request."""
    kv_len, page_size = int(table.lengths()[request]), table.page_size
    begin = 0 if table.indptr is None else int(table.indptr[request])
    if table.indices is None:
        return torch.arange(begin, begin + kv_len)
    if table.rows is not None:
        pages = table.indices[int(table.rows[request]), :kv_len:page_size] // page_size
    else:
        row = table.indices[request] if table.indptr is None else table.indices[begin:]
        pages = row[: -(-kv_len // page_size)]
    return (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()[:kv_len]
