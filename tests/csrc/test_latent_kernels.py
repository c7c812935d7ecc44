"""The attention kernels over MLA's caches without a GPU (test_attention_kernels.py): 8-bit latents,
dequantized on the way to shared memory, and trees of queries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import host_planner
import latent_cases
import pytest
import torch
from device_attention import KERNELS, DeviceAttention
from tiers import in_turn

from attn_backend import Attention
from attn_backend.variants import builtin

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

FORMS = (
    ("e4m3", torch.bfloat16, 0.5),
    ("scaled", torch.bfloat16, None),
    ("e5m2", torch.float16, torch.tensor([0.25])),
)
# Query tokens, tokens, heads, page size, row stride in bytes: full and partial row tiles, parts of split
# tiles, pages of one token and of two KV tiles.
BATCHES = (
    ([1, 2, 1], [200, 70, 0], 16, 16, 0),
    ([1, 1], [130, 64], 128, 1, 704),
    ([30], [150], 3, 7, 0),
    ([1, 3], [140, 70], 32, 128, 0),
    ([2, 1], [40, 140], 64, 128, 0),
)


@pytest.mark.parametrize(("form", "dtype", "scale"), FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_latents(
    emulated: Path, kernel: str, form: str, dtype: torch.dtype, scale: float | torch.Tensor | None
) -> None:
    turn = [name for name, *_ in FORMS].index(form) + KERNELS.index(kernel)
    for number, (qo_lens, kv_lens, heads, page_size, row_bytes) in in_turn(BATCHES, turn, without_gpu=3):
        batch = latent_cases.make_batch(
            form,
            qo_lens,
            kv_lens,
            heads=heads,
            page_size=page_size,
            scale=scale,
            dtype=dtype,
            seed=number,
            row_bytes=row_bytes,
        )
        rows, kv_dtype = len(batch.q), latent_cases.FORMATS[form]
        made = Attention(
            heads,
            1,
            576,
            head_dim_v=512,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device="cpu",
            max_rows=rows,
            max_batch=rows,
            kernel=kernel,
            num_ctas=3,  # type: ignore[arg-type]
        )
        attention = DeviceAttention(emulated, made, kernel, number, "standard")
        attention.plan(batch.view)
        lse = torch.full((rows, heads), torch.nan)
        out = attention.run(batch.q, batch.kv, lse=lse, sm_scale=latent_cases.SM_SCALE)
        batch.check(out, lse)
        assert attention.schedule().errors == 0
        assert attention.launched == "attention"
        q, q_rope = latent_cases.parts_of_q(batch.q, latent_cases.FORMS_OF_Q[number % 3])
        assert torch.equal(attention.run(q, batch.kv, q_rope=q_rope, sm_scale=latent_cases.SM_SCALE), out)


@pytest.mark.parametrize(("form", "dtype", "scale"), FORMS)
def test_pairs_of_ctas(
    emulated: Path, form: str, dtype: torch.dtype, scale: float | torch.Tensor | None
) -> None:
    """With 128 or more heads, two CTAs dequantize tokens for each other: split row tiles, several query
    tokens, two pairs of CTAs a token, the work queue.
    """
    cases = (
        ([1, 0, 3, 1], [333, 64, 70, 1], 128, 64),
        ([2, 1], [70, 129], 256, 1),
        ([9, 8], [64, 60], 128, 16),
    )
    for number, (qo_lens, kv_lens, heads, page_size) in enumerate(cases):
        batch = latent_cases.make_batch(
            form, qo_lens, kv_lens, heads=heads, page_size=page_size, scale=scale, dtype=dtype, seed=number
        )
        rows, kv_dtype = len(batch.q), latent_cases.FORMATS[form]
        room: dict[str, Any] = {"max_rows": rows, "max_batch": len(qo_lens), "num_ctas": 2, "device": "cpu"}
        made = Attention(
            heads, 1, 576, head_dim_v=512, dtype=dtype, kv_dtype=kv_dtype, kernel="hopper", **room
        )
        attention = DeviceAttention(emulated, made, "hopper", number, "standard")
        attention.plan(batch.view)
        assert attention.schedule().uses_queue == (number > 0)
        lse = torch.full((rows, heads), torch.nan)
        batch.check(attention.run(batch.q, batch.kv, lse=lse, sm_scale=latent_cases.SM_SCALE), lse)


@pytest.mark.parametrize("kernel", KERNELS)
def test_trees(emulated: Path, kernel: str) -> None:
    """Draft tokens form a tree over 16-bit latents: a mask in row tiles that hold several tokens and all
    their heads.
    """
    variant = builtin.tree_mask()
    for number, (nodes, kv_lens, heads, page_size) in enumerate(
        (([7, 1, 16], [90, 64, 16], 16, 16), ([5], [150], 3, 1), ([3, 4], [150, 40], 128, 16))
    ):
        batch = latent_cases.make_tree_batch(
            latent_cases.PLAIN, nodes, kv_lens, heads=heads, page_size=page_size, seed=number
        )
        rows, arguments = len(batch.q), batch.tree_arguments()
        room = {"max_rows": rows, "max_batch": len(nodes), "num_ctas": 3, "device": "cpu"}
        made = Attention(
            heads, 1, 576, head_dim_v=512, dtype=torch.bfloat16, kernel=kernel, variant=variant, **room
        )  # type: ignore[arg-type]
        attention = DeviceAttention(emulated, made, kernel, number, variant)
        attention.plan(batch.view, variant_args=arguments)
        lse = torch.full((rows, heads), torch.nan)
        out = attention.run(
            batch.q, batch.kv, lse=lse, sm_scale=latent_cases.SM_SCALE, variant_args=arguments
        )
        batch.check(out, lse)
        assert attention.schedule().errors == 0
        assert attention.launched == (
            "attention_rows" if kernel == "hopper" and page_size == 1 else "attention"
        )


@pytest.mark.parametrize("form", latent_cases.FORMS_OF_Q)
@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_of_q(emulated: Path, kernel: str, form: str) -> None:
    """Over 16-bit latents: row tiles that TMA loads whole or row by row, gathered row tiles, parts of groups
    of heads, states of shared prefixes.
    """
    cases = (
        ([1, 1, 1], [130, 64, 1], 16, 16, {}),
        ([5, 2], [70, 40], 16, 64, {}),
        ([1, 0, 2], [65, 0, 2], 128, 1, {}),
        ([30], [150], 3, 7, {}),
        ([2, 1], [40, 140], 32 if form == "dense" else 64, 128, {}),
        ([1] * 5, [100] * 5, 16, 16, {"cascade": "always"}),
    )
    turn = latent_cases.FORMS_OF_Q.index(form) + KERNELS.index(kernel)
    for number, (qo_lens, kv_lens, heads, page_size, options) in in_turn(cases, turn, without_gpu=3):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        batch = latent_cases.make_batch(
            latent_cases.PLAIN, qo_lens, kv_lens, heads=heads, page_size=page_size, dtype=dtype, seed=number
        )
        if "cascade" in options:
            batch.share(5)
        q, q_rope = latent_cases.parts_of_q(batch.q, form)
        batch.q = torch.cat((q, q_rope), -1)
        rows = len(q)
        room: dict[str, Any] = {"max_rows": rows, "max_batch": len(qo_lens), "num_ctas": 3, **options}
        made = Attention(heads, 1, 576, head_dim_v=512, dtype=dtype, device="cpu", kernel=kernel, **room)  # type: ignore[arg-type]
        attention = DeviceAttention(emulated, made, kernel, number, "standard")
        attention.plan(batch.view)
        lse = torch.full((rows, heads), torch.nan)
        batch.check(attention.run(q, batch.kv, q_rope=q_rope, lse=lse, sm_scale=latent_cases.SM_SCALE), lse)
        assert attention.schedule().errors == 0
