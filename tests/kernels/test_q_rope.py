"""MLA with Q in two tensors: the columns that multiply the latent, and the RoPE columns, with different
strides.
"""

from __future__ import annotations

from typing import Any

import attention_kernels
import latent_cases
import pytest
import torch
from latent_cases import FORMATS, FORMS_OF_Q, PLAIN, SM_SCALE, parts_of_q

from attn_backend import Attention, BSRView, KVCache, PageTable, SelectedTokens
from attn_backend.variants import builtin

pytestmark = pytest.mark.usefixtures("kernel")

BATCHES = (
    ([1, 1, 1, 1], [90, 300, 0, 64]),
    ([1, 3, 40, 2], [700, 200, 64, 1]),
)


def make(batch: latent_cases.Batch, form: str = PLAIN, **options: Any) -> Attention:
    rows, heads, _ = batch.q.shape
    kv_dtype = None if form == PLAIN else FORMATS[form]
    options["kernel"] = attention_kernels.kernel_of(batch.q.device)
    return Attention(
        heads,
        1,
        576,
        head_dim_v=512,
        device=batch.q.device,
        dtype=batch.q.dtype,
        kv_dtype=kv_dtype,
        max_rows=rows,
        max_batch=rows,
        **options,
    )


@pytest.mark.parametrize("form_of_q", FORMS_OF_Q)
@pytest.mark.parametrize("form", [PLAIN, *FORMATS])
def test_batches(device: torch.device, form: str, form_of_q: str) -> None:
    """Pages of 1, 7 and 64 tokens, 3 to 128 heads. One tensor with all columns gives the same bits."""
    for number, (qo_lens, kv_lens) in enumerate(BATCHES * 2):
        heads, page_size = [16, 128, 3, 16][number], [64, 1, 7, 16][number]
        dtype = torch.float16 if number == 3 and form != "scaled" else torch.bfloat16
        batch = latent_cases.make_batch(
            form, qo_lens, kv_lens, heads=heads, page_size=page_size, dtype=dtype, device=device, seed=number
        )
        q, q_rope = parts_of_q(batch.q, form_of_q)
        batch.q = torch.cat((q, q_rope), -1)
        attention = make(batch, form, **[{}, {"num_ctas": 3}, {"batch_invariant": True}, {}][number])
        attention.plan(batch.view)
        out, lse = attention.run(q, batch.kv, q_rope=q_rope, sm_scale=SM_SCALE, return_lse=True)
        batch.check(out, lse)
        assert torch.equal(attention.run(batch.q, batch.kv, sm_scale=SM_SCALE), out)


@pytest.mark.parametrize("form", [PLAIN, "e4m3", "scaled"])
def test_selected_tokens(device: torch.device, form: str) -> None:
    batch = latent_cases.make_batch(form, [6], [200], page_size=8, device=device)
    generator = torch.Generator().manual_seed(1)
    indices = torch.full((6, 64), -1, dtype=torch.int32)
    chosen = []
    for row, count in enumerate((64, 40, 0, 1, 64, 7)):
        tokens = torch.randperm(200, generator=generator)[:count]
        chosen.append(batch.rows[0][tokens])
        indices[row, :count] = tokens.int()
    slots, counts = torch.full_like(indices, -1).to(device), (indices >= 0).sum(1).int().to(device)
    attention = make(batch, form)
    attention.plan(BSRView.selected(slots, counts))
    table = batch.view.table.indices
    assert table is not None
    selected = SelectedTokens(indices.to(device), table, torch.zeros(6, dtype=torch.int32, device=device), 8)
    q, q_rope = parts_of_q(batch.q, "engine")
    found = attention.run(
        q, batch.kv.by_slot(), q_rope=q_rope, sm_scale=SM_SCALE, return_lse=True, selected=selected
    )
    latent_cases.Batch(batch.q, batch.kv, BSRView.selected(slots), chosen, causal=False).check(*found)


def test_shared_prefixes(device: torch.device) -> None:
    batch = latent_cases.make_batch(PLAIN, [1] * 6, [150] * 6, page_size=16, device=device)
    batch.share(8)
    attention = make(batch, cascade="always")
    attention.plan(batch.view)
    q, q_rope = parts_of_q(batch.q, "engine")
    batch.check(*attention.run(q, batch.kv, q_rope=q_rope, sm_scale=SM_SCALE, return_lse=True))


def test_rows_that_no_request_has_are_not_read(device: torch.device) -> None:
    """Padding rows of a captured graph may hold NaN; rows of the plan beyond Q are not computed."""
    batch = latent_cases.make_batch(PLAIN, [1, 1, 1], [40, 70, 9], device=device)
    attention = make(batch, batch_invariant=True)
    attention.plan(batch.view)
    q, q_rope = parts_of_q(batch.q, "dense")
    wanted = attention.run(q, batch.kv, q_rope=q_rope, sm_scale=SM_SCALE)
    padded = [torch.cat((part, torch.full_like(part, torch.nan))) for part in (q, q_rope)]
    assert torch.equal(attention.run(padded[0], batch.kv, q_rope=padded[1], sm_scale=SM_SCALE)[:3], wanted)
    assert torch.equal(attention.run(q[:2], batch.kv, q_rope=q_rope[:2], sm_scale=SM_SCALE), wanted[:2])


def test_out_may_be_q(device: torch.device) -> None:
    batch = latent_cases.make_batch(PLAIN, [1, 2], [300, 70], device=device)
    attention = make(batch)
    attention.plan(batch.view)
    q, q_rope = parts_of_q(batch.q, "dense")
    wanted = attention.run(q, batch.kv, q_rope=q_rope)
    assert attention.run(q, batch.kv, q_rope=q_rope, out=q) is q
    assert torch.equal(q, wanted)


def test_a_variant(device: torch.device) -> None:
    batch = latent_cases.make_batch(PLAIN, [1, 3], [90, 30], device=device)
    attention = make(batch, variant=builtin.soft_cap() & builtin.causal())
    attention.plan(batch.view)
    q, q_rope = parts_of_q(batch.q, "engine")
    out = attention.run(q, batch.kv, q_rope=q_rope, variant_args={"cap": 5.0})
    assert torch.equal(attention.run(batch.q, batch.kv, variant_args={"cap": 5.0}), out)


@pytest.mark.slow
def test_in_a_compiled_function(device: torch.device) -> None:
    batch = latent_cases.make_batch(PLAIN, [1, 2], [300, 70], device=device)
    attention = make(batch)
    attention.plan(batch.view)
    latents = batch.kv.k

    def attend(q: torch.Tensor, q_rope: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        return attention.run(q + q, KVCache.unchecked(latents, latents[..., :512]), q_rope=q_rope) + 1

    q, q_rope = parts_of_q(batch.q, "engine")
    with torch.no_grad():
        torch._dynamo.reset()
        assert torch.equal(
            attend(q, q_rope, latents),
            torch.compile(attend, backend="aot_eager", fullgraph=True)(q, q_rope, latents),
        )


@pytest.mark.gpu
def test_in_a_graph() -> None:
    """Parts whose addresses change, like a layer's from replay to replay."""
    batch = latent_cases.make_batch(PLAIN, [1] * 4, [300, 70, 9, 1], device="cuda")
    attention = make(batch)
    attention.plan(batch.view)
    q, q_rope = parts_of_q(batch.q, "engine")
    attention.run(q, batch.kv, q_rope=q_rope)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(q, batch.kv, q_rope=q_rope, sm_scale=SM_SCALE)
    for _ in range(2):
        q.neg_()
        q_rope.mul_(2)
        graph.replay()
        assert torch.equal(out, attention.run(torch.cat((q, q_rope), -1), batch.kv, sm_scale=SM_SCALE))


def test_other_widths_on_a_cpu() -> None:
    """The CPU's kernels accept any width, including in float32."""
    latents, q, q_rope = torch.randn(9, 1, 80), torch.randn(3, 4, 48), torch.randn(3, 4, 32)
    attention = Attention(4, 1, 80, head_dim_v=48, dtype=torch.float32, device="cpu", max_rows=3, max_batch=1)
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    attention.plan(BSRView(indptr, PageTable.ragged(torch.tensor([0, 9], dtype=torch.int32)), causal=False))
    out = attention.run(q, KVCache.from_ragged(latents, latents[..., :48]), q_rope=q_rope)
    scores = torch.einsum("qhc,tc->qht", torch.cat((q, q_rope), -1), latents[:, 0]) * 80**-0.5
    torch.testing.assert_close(out, scores.softmax(-1) @ latents[:, 0, :48])


def test_refuses(device: torch.device) -> None:
    batch = latent_cases.make_batch(PLAIN, [2], [20], device=device)
    attention = make(batch)
    attention.plan(batch.view)
    q, q_rope = parts_of_q(batch.q, "dense")
    wrong = (
        (
            q_rope[:1],
            r"q_rope\.shape is \[1, 16, 64\], must be \[rows = 2, num_qo_heads = 16, head_dim - head_dim_v = "
            r"64\]",
        ),
        (q_rope[:, :3], r"q_rope\.shape is \[2, 3, 64\], must be \[rows = 2, num_qo_heads = 16, "),
        (q_rope[..., :32], r"q_rope\.shape is \[2, 16, 32\], must be "),
        (q_rope.half(), r"q_rope\.dtype is float16, must be bfloat16"),
        (q_rope.transpose(1, 2).contiguous().transpose(1, 2), r"q_rope\.stride\(2\) is 16, must be 1"),
        (q_rope.to("meta"), "q_rope.* is .*, must be "),
        (q_rope.clone().requires_grad_(), "q_rope is .* that requires a gradient"),
        ([1.0], "q_rope is .*, must be a tensor"),
    )
    for part, message in wrong:
        with pytest.raises(ValueError, match=f"^{message}"):
            attention.run(q, batch.kv, q_rope=part)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"^q\.shape is \[2, 16, 576\], must be \[rows, num_qo_heads = 16, head_dim_v = 512\]",
    ):
        attention.run(batch.q, batch.kv, q_rope=q_rope)
    with pytest.raises(
        ValueError, match=r"^q\.shape is \[2, 16, 512\], must be \[rows, num_qo_heads = 16, head_dim = 576\]"
    ):
        attention.run(q, batch.kv)
    if device.type == "cuda":
        apart = torch.empty(2, 16, 68, dtype=torch.bfloat16, device=device)[..., 4:]
        with pytest.raises(ValueError, match=r"^q_rope\.data_ptr\(\) modulo 16 is 8, must be 0"):
            attention.run(q, batch.kv, q_rope=apart)
    heads = Attention(4, 4, 64, device=device, max_rows=2, max_batch=1)
    heads.plan(
        BSRView(
            torch.tensor([0, 2], dtype=torch.int32, device=device),
            PageTable.ragged(torch.tensor([0, 9], dtype=torch.int32, device=device)),
        )
    )
    k = torch.zeros(9, 4, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(
        ValueError, match=r"^q_rope is a tensor, must be None with head_dim = 64 and head_dim_v = 64"
    ):
        heads.run(k[:2], KVCache.from_ragged(k, k), q_rope=k[:2])
