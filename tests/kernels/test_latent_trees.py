"""Trees of draft tokens over MLA's latents: each token sees the tokens before the draft, and its ancestors in
the draft.
"""

from __future__ import annotations

import attention_kernels
import latent_cases
import pytest
import torch

from attn_backend import Attention
from attn_backend.variants import builtin

pytestmark = pytest.mark.usefixtures("kernel")

# Draft tokens of each request, the requests' total tokens, heads, page size.
BATCHES = [([7, 1, 16], [90, 64, 16], 16, 16), ([33, 5], [200, 130], 3, 1), ([4, 4], [300, 66], 128, 64)]


@pytest.mark.parametrize(("nodes", "kv_lens", "heads", "page_size"), BATCHES)
@pytest.mark.parametrize("form", [latent_cases.PLAIN, "e4m3"])
def test_trees(
    device: torch.device, form: str, nodes: list[int], kv_lens: list[int], heads: int, page_size: int
) -> None:
    batch = latent_cases.make_tree_batch(
        form,
        nodes,
        kv_lens,
        heads=heads,
        page_size=page_size,
        device=device,
        seed=heads,
        scale=None if form == latent_cases.PLAIN else 0.5,
    )
    rows, arguments = len(batch.q), batch.tree_arguments()
    room = {
        "max_rows": rows,
        "max_batch": len(nodes),
        "device": device,
        "kv_dtype": None if form == latent_cases.PLAIN else latent_cases.FORMATS[form],
    }
    kernel = attention_kernels.kernel_of(device)
    for options in ({}, {"batch_invariant": True}, {"num_ctas": 3}):
        attention = Attention(
            heads,
            1,
            576,
            head_dim_v=512,
            dtype=torch.bfloat16,
            variant=builtin.tree_mask(),
            kernel=kernel,
            **room,
            **options,
        )  # type: ignore[arg-type]
        attention.plan(batch.view, variant_args=arguments)
        out, lse = attention.run(
            batch.q, batch.kv, sm_scale=latent_cases.SM_SCALE, return_lse=True, variant_args=arguments
        )
        batch.check(out, lse)
