"""Levels with scattered rows of Q: the same bits as contiguous rows, and lists that point outside Q."""

from __future__ import annotations

import case_tensors
import cases
import numpy
import pytest
import torch
from compositions import Shape, make_attention, make_memory, same_bits, views_with_row

from attn_backend import BSRView, Composition

SHAPE = Shape(2, 4, 64, torch.bfloat16, 16, None)
each_kernel = pytest.mark.usefixtures("kernel")


@pytest.mark.parametrize("seed", range(60))
def test_row_list_equals_the_plain_view(device: torch.device, seed: int) -> None:
    """Rows of Q at any places, some rows between them in no request: the same bits as contiguous rows."""
    spec = cases.random_spec(seed, device.type)
    case = case_tensors.build(spec, device)
    shape = Shape(
        spec.num_kv_heads,
        spec.group_size,
        spec.head_dim,
        spec.dtype,
        spec.page_size,
        spec.num_ctas,
        seed=seed // 4,
    )
    room = {
        "max_rows": case.rows + 1 + seed % 5,
        "max_batch": len(spec.qo_lens) + 1,
        "max_levels": 1 + seed // 2 % 2,
    }
    attention = make_attention(shape, device, **room, cascade=False)  # row lists know none
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(case, case.out, case.lse)

    rows = numpy.random.default_rng(seed).permutation(attention.max_rows)[: case.rows]
    rows = torch.from_numpy(rows).to(device, torch.int32)
    view = BSRView(case.view.qo_indptr, case.view.table, case.view.causal, case.view.window_left, rows)
    place = rows.long()
    q = torch.full((attention.max_rows, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype, device=device)
    q[place] = case.q[: case.rows]
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    attention.plan(Composition((view,)) if seed % 2 else view)
    attention.run(
        q, case.kv, out=out, lse=lse, sm_scale=case.spec.sm_scale, logits_soft_cap=case.spec.logits_soft_cap
    )
    assert same_bits(out[place], case.out[: case.rows])
    assert same_bits(lse[place], case.lse[: case.rows])
    left = torch.ones(len(q), dtype=torch.bool, device=device)
    left[place] = False
    assert out[left].isnan().all()
    assert lse[left].isnan().all()


# Row lists that point outside Q.

BAD_ROWS = [-1, -(2**31), 8, 2**31 - 1, 10**6]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_refused_on_a_cpu(row: int) -> None:
    device = torch.device("cpu")
    _, compositions = views_with_row(device, row)
    for composition in compositions:
        attention = make_attention(SHAPE, device, max_rows=8, max_batch=8, max_levels=2)
        with pytest.raises(ValueError, match=rf"\brows\[3\] is {row}, must be "):
            attention.plan(composition)


@each_kernel
@pytest.mark.gpu
@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_reported_from_a_gpu(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, O and lse lie between guard regions, so writes outside them would be visible."""
    device, wall = torch.device("cuda"), 64
    memory, compositions = views_with_row(device, row)
    room = torch.ones(wall + 8 + wall, 8, 64, dtype=torch.bfloat16, device=device)
    for composition in compositions:
        out, lse = torch.full_like(room, torch.nan), torch.full(room.shape[:2], torch.nan, device=device)
        attention = make_attention(SHAPE, device, max_rows=8, max_batch=8, max_levels=2)
        attention.plan(composition)
        attention.run(room[wall:-wall], memory.kv, out=out[wall:-wall], lse=lse[wall:-wall])
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=r"\brows\b"):
            attention.raise_for_errors()
        for tensor in (out, lse):
            assert tensor[:wall].isnan().all()
            assert tensor[-wall:].isnan().all()

        _, good = views_with_row(device, 0)  # still usable; the error word is the last plan's
        attention.plan(good[0])
        attention.raise_for_errors()
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")
    with pytest.raises(ValueError, match=r"\brows\b"):
        make_attention(SHAPE, device, max_rows=8, max_batch=8, max_levels=2).plan(compositions[0])


@each_kernel
def test_rows_beyond_q_are_not_computed(device: torch.device) -> None:
    """Rows of a plan that q lacks, but max_rows allows."""
    memory, compositions = views_with_row(device, 7)
    heads = torch.ones(8, 8, 64, dtype=torch.bfloat16, device=device)
    for composition in compositions:
        attention = make_attention(SHAPE, device, max_rows=8, max_batch=8, max_levels=2)
        attention.plan(composition)
        whole, whole_lse = torch.full_like(heads, torch.nan), torch.full((8, 8), torch.nan, device=device)
        attention.run(heads, memory.kv, out=whole, lse=whole_lse)
        out, lse = torch.full_like(heads, torch.nan), torch.full((8, 8), torch.nan, device=device)
        attention.run(heads[:4], memory.kv, out=out[:4], lse=lse[:4])
        assert out[4:].isnan().all()
        assert lse[4:].isnan().all()
        assert same_bits(out[1:4], whole[1:4])
        assert same_bits(lse[1:4], whole_lse[1:4])
        attention.raise_for_errors()


def test_row_list_that_is_too_short(device: torch.device) -> None:
    """qo_indptr ends beyond the row list: a CPU refuses it, a GPU clamps and reports it."""
    memory = make_memory(numpy.random.default_rng(0), Shape(2, 4, 64, torch.bfloat16, 4, None), device, [30])
    table = memory.table(numpy.random.default_rng(0), [0])
    view = BSRView(
        torch.tensor([0, 6], dtype=torch.int32, device=device),
        table,
        rows=torch.arange(4, dtype=torch.int32, device=device),
    )
    attention = make_attention(SHAPE, device, max_rows=8, max_batch=8, max_levels=2)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"\brows\b"):
            attention.plan(view)
    else:
        attention.plan(view)
        attention.run(torch.ones(8, 8, 64, dtype=torch.bfloat16, device=device), memory.kv)
        with pytest.raises(ValueError, match=r"\brows\b"):
            attention.raise_for_errors()
