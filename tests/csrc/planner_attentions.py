"""Shapes for which the tests compare the device planner with the host planner."""

from __future__ import annotations

import batches

from attn_backend import Attention

# (num_kv_heads, group_size, head_dim, num_ctas)
SHAPES = [(8, 4, 128, 264), (3, 3, 64, 132), (1, 1, 64, 1), (2, 16, 128, 700), (1, 5, 256, 7)]


def make_attention(shape: tuple[int, int, int, int], **options: object) -> Attention:
    num_kv_heads, group_size, head_dim, num_ctas = shape
    room = {"max_rows": batches.MAX_ROWS, "max_batch": batches.MAX_BATCH} | options
    return Attention(
        num_kv_heads * group_size,
        num_kv_heads,
        head_dim,
        device="cpu",
        num_ctas=num_ctas,
        kernel="hopper",
        **room,
    )
