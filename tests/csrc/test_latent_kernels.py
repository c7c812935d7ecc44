"""The attention kernels over MLA's 8-bit caches without a GPU (test_attention_kernels.py): widened on the way to shared memory."""

from __future__ import annotations

from pathlib import Path

import host_planner
import latent_cases
import pytest
import torch
from device_attention import KERNELS, DeviceAttention

from attn_backend import Attention

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

FORMS = (("e4m3", torch.bfloat16, 0.5), ("scaled", torch.bfloat16, None), ("e5m2", torch.float16, torch.tensor([0.25])))
# Query tokens, tokens, heads, page size, bytes from row to row: full and partly filled row tiles, parts of split ones, pages of one token.
BATCHES = (
    ([1, 2, 1], [200, 70, 0], 16, 16, 0),
    ([1, 1], [130, 64], 128, 1, 704),
    ([30], [150], 3, 7, 0),
)


@pytest.mark.parametrize(("form", "dtype", "scale"), FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_latents(emulated: Path, kernel: str, form: str, dtype: torch.dtype, scale: float | torch.Tensor | None) -> None:
    for number, (qo_lens, kv_lens, heads, page_size, row_bytes) in enumerate(BATCHES):
        batch = latent_cases.make_batch(form, qo_lens, kv_lens, heads=heads, page_size=page_size, scale=scale, dtype=dtype, seed=number, row_bytes=row_bytes)
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
