"""An independent oracle of paged attention: jax's reference for its TPU kernel, in float32.

It supports causal attention of requests with tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

MODULE = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"


@functools.cache
def reference() -> Callable[..., Any]:
    """jax's `ref_ragged_paged_attention` on the CPU.

    Skips the calling test if jax is not installed.
    """
    jax = pytest.importorskip("jax", reason="jax is not installed: the independent oracle did not run")
    jax.config.update("jax_platforms", "cpu")
    return pytest.importorskip(MODULE).ref_ragged_paged_attention


def paged_attention(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    page_size: int,
    qo_lens: list[int],
    kv_lens: list[int],
    pages: list[list[int]],
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    """Same arguments as oracle.paged_attention, plus the pages of each request; causal.

    Returns float32 o [sum of qo_lens, num_qo_heads, head_dim] on the CPU.

    Rows that see nothing (before the first token) are not computed: 0. jax compiles for every shape, in about
    a second. So cache and table are padded to powers of two, and requests run one by one.
    """
    import jax.numpy as jnp

    slots, num_kv_heads, head_dim = k_slots.shape
    num_pages, width = slots // page_size, power_of_two(max([1024, *kv_lens]) // page_size)
    # K and V head by head
    cache = numpy.zeros((power_of_two(num_pages), page_size, 2 * num_kv_heads, head_dim), dtype=numpy.float32)
    for first, tensor in enumerate((k_slots, v_slots)):
        cache[:num_pages, :, first::2] = (
            tensor.view(num_pages, page_size, num_kv_heads, head_dim).float().cpu().numpy()
        )
    kv_pages = jnp.asarray(cache)
    results, begin = [], 0
    for qo_len, kv_len, own in zip(qo_lens, kv_lens, pages, strict=True):
        begin += qo_len
        seeing = min(qo_len, kv_len)
        results.append(torch.zeros(qo_len, *q.shape[1:]))
        if seeing == 0:
            continue
        table = numpy.zeros((1, width), dtype=numpy.int32)
        table[0, : len(own)] = own
        o = reference()(
            jnp.asarray(q[begin - seeing : begin].float().cpu().numpy()),
            kv_pages,
            jnp.asarray([kv_len], dtype=jnp.int32),
            jnp.asarray(table),
            jnp.asarray([0, seeing], dtype=jnp.int32),
            jnp.asarray([1], dtype=jnp.int32),
            sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
            sliding_window=None if window_left < 0 else window_left + 1,  # includes the row's own token
            soft_cap=logits_soft_cap or None,
        )
        results[-1][qo_len - seeing :] = torch.from_numpy(numpy.array(o))
    return torch.cat(results)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()
