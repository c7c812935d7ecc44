"""Heads whose K and V differ in width, wide heads, and V inside K's bytes: random batches and compositions
compared with the oracle.
"""

from __future__ import annotations

import case_tensors
import cases
import compositions
import forests
import numpy
import pytest
import torch
from tiers import mostly_slow

from attn_backend import Attention, BSRView, KVCache, PageTable

pytestmark = pytest.mark.usefixtures("kernel")

CPU = torch.device("cpu")
# head_dim, head_dim_v, whether V lies in K's bytes
SHAPES = [
    (192, 128, False),
    (192, 128, True),
    (96, 96, False),
    (64, 128, False),
    (200, 72, False),
    (72, 200, False),
]
WIDE_SHAPES = [(512, 512, False), (512, 512, True), (576, 512, True), (576, 512, False)]
RAGGED = {"table_form": "ragged", "cache_form": "ragged", "page_size": 1}


def small_spec(seed: int, device: torch.device, head_dim: int, head_dim_v: int, v_in_k: bool) -> cases.Spec:
    """A random batch with heads of these widths."""
    spec = cases.random_spec(seed, device.type)
    form = spec.cache_form if spec.cache_form in ("slots", "ragged") else "pair"
    heads = {"num_kv_heads": 1, "group_size": [16, 5, 64, 1, 128][seed % 5]} if head_dim > 256 else {}
    form = "pair" if v_in_k else form
    spec = spec.with_(head_dim=head_dim, head_dim_v=head_dim_v, v_in_k=v_in_k, cache_form=form, **heads)
    if head_dim > 256:  # limited by the oracle's time
        rows, tokens = (40, 1200) if device.type == "cuda" else (15, 500)
        spec = spec.with_(
            qo_lens=tuple(min(n, rows) for n in spec.qo_lens),
            kv_lens=tuple(min(n, tokens) for n in spec.kv_lens),
        )
    return spec.with_(dtype=torch.bfloat16) if device.type == "cuda" and spec.dtype == torch.float32 else spec


@pytest.mark.parametrize("seed", mostly_slow(range(12), fast=2, without_gpu=6))
@pytest.mark.parametrize(("head_dim", "head_dim_v", "v_in_k"), SHAPES + WIDE_SHAPES)
def test_random_batches(
    device: torch.device, head_dim: int, head_dim_v: int, v_in_k: bool, seed: int
) -> None:
    case = case_tensors.build(small_spec(seed + 1000, device, head_dim, head_dim_v, v_in_k), device)
    for options in ({}, {"batch_invariant": True}):
        attention = case.attention(**options)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)
        case_tensors.check(case, case.out, case.lse)
        case_tensors.check_padding(case)
        assert case.run(attention)[: case.rows].equal(case.out[: case.rows]), (
            "another buffer, no lse, the same bits"
        )


@pytest.mark.parametrize("seed", mostly_slow(range(6), fast=1))
@pytest.mark.parametrize(("head_dim", "head_dim_v", "v_in_k"), [SHAPES[0], *WIDE_SHAPES])
def test_random_compositions(
    device: torch.device, head_dim: int, head_dim_v: int, v_in_k: bool, seed: int
) -> None:
    rng = numpy.random.default_rng([seed, head_dim, v_in_k])
    sizes = {"num_kv_heads": 1, "group_size": [4, 16, 2][seed % 3], "page_size": [16, 64, 1][seed // 2]}
    shape = compositions.Shape(
        **sizes,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        v_in_k=v_in_k,
        dtype=torch.bfloat16,
        num_ctas=[None, 7][seed % 2],
        seed=seed,
    )
    problem = (
        compositions.tree_problem(rng, shape, device)
        if seed % 2
        else compositions.cascade_problem(rng, shape, device, 2)
    )
    problem.run(problem.attention())
    problem.check()
    batch = forests.random_batch(
        rng, shape.page_size, kv_cost=head_dim * 16, budget=4e7, max_requests=24, max_rows=80
    )
    shared = forests.make_problem(rng, shape, batch, device)
    for options in ({"cascade": "always"}, {"batch_invariant": True}):
        shared.run(shared.attention(**options), batch.view(rng, device))
        shared.check()


@pytest.mark.parametrize(("head_dim", "head_dim_v", "v_in_k"), [SHAPES[0], *WIDE_SHAPES])
def test_a_request_has_the_same_bits_in_every_batch(
    device: torch.device, head_dim: int, head_dim_v: int, v_in_k: bool
) -> None:
    spec = cases.Spec(
        (1, 3, 1, 20),
        (900, 200, 2100, 64),
        num_kv_heads=1,
        group_size=16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        v_in_k=v_in_k,
    )
    spec = spec.with_(cache_form="pair", table_form="block_table", num_ctas=7)
    case = case_tensors.build(spec, device)
    together = case.attention(batch_invariant=True)
    together.plan(case.view)
    out = case.run(together)
    for i in range(4):
        first, rows = sum(spec.qo_lens[:i]), spec.qo_lens[i]
        indptr = torch.tensor([0, rows], dtype=torch.int32, device=device)
        table = case.view.table
        own = PageTable.block_table(table.indices[i : i + 1], table.kv_lens[i : i + 1], spec.page_size)
        alone = case.attention(batch_invariant=True)
        alone.plan(BSRView(indptr, own))
        assert alone.run(case.q[first : first + rows], case.kv).equal(out[first : first + rows])


def test_wrong_widths_are_refused_by_name() -> None:
    def made(**changes: object) -> Attention:
        return Attention(
            **(
                {
                    "num_qo_heads": 4,
                    "num_kv_heads": 2,
                    "head_dim": 192,
                    "head_dim_v": 128,
                    "max_rows": 4,
                    "max_batch": 2,
                    "device": "cpu",
                }
                | changes
            )
        )

    for wrong in (0, 4, 60, 600, -8):
        with pytest.raises(ValueError, match=f"head_dim_v is {wrong}"):
            made(head_dim_v=wrong)
    with pytest.raises(ValueError, match=r"head_dim_v is 128\.0"):
        made(head_dim_v=128.0)
    attention = made()
    view = BSRView(
        torch.tensor([0, 2], dtype=torch.int32), PageTable.ragged(torch.tensor([0, 5], dtype=torch.int32))
    )
    attention.plan(view)
    q, k, v = (
        torch.ones(2, 4, 192).bfloat16(),
        torch.ones(5, 2, 192).bfloat16(),
        torch.ones(5, 2, 128).bfloat16(),
    )
    assert attention.run(q, KVCache.from_ragged(k, v)).shape == (2, 4, 128)
    with pytest.raises(ValueError, match=r"kv\.v\.shape is \[5, 1, 2, 192\], must be .*head_dim_v = 128"):
        attention.run(q, KVCache.from_ragged(k, k))
    with pytest.raises(ValueError, match=r"kv\.k\.shape is \[5, 1, 2, 128\], must be .*head_dim = 192"):
        attention.run(q, KVCache.from_ragged(v, v))
    with pytest.raises(ValueError, match=r"out\.shape is \[2, 4, 192\], must be .*head_dim_v = 128"):
        attention.run(q, KVCache.from_ragged(k, v), out=torch.empty_like(q))
    with pytest.raises(ValueError, match=r"v is .*k's shape"):
        KVCache.from_ragged(k, v[:4])
