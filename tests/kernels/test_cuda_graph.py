"""CUDA graphs: one capture serves every later plan."""

from __future__ import annotations

import attention_kernels
import case_tensors
import numpy
import pytest
import torch
from cases import Spec

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel")]

MAX_ROWS, MAX_BATCH, PAGES, PAGE_SIZE, WIDTH = 256, 64, 2048, 16, 128
QO_HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128


def random_lengths(rng: numpy.random.Generator) -> tuple[list[int], list[int]]:
    batch = int(rng.integers(1, MAX_BATCH + 1))
    qo_lens, left = [], MAX_ROWS
    for i in range(batch):
        qo_len = int(rng.choice([0, 1, 1, 1, 1, 5, 60]))
        qo_len = min(qo_len, left - (batch - 1 - i))
        qo_lens.append(max(qo_len, 0))
        left -= qo_lens[-1]
    return qo_lens, [
        int(numpy.exp(rng.uniform(0, numpy.log(WIDTH * PAGE_SIZE)))) if rng.random() < 0.95 else 0
        for _ in range(batch)
    ]


def make_view(rng: numpy.random.Generator) -> BSRView:
    qo_lens, kv_lens = random_lengths(rng)
    table = torch.from_numpy(rng.integers(0, PAGES, (len(kv_lens), WIDTH))).to("cuda", torch.int32)
    qo_indptr = torch.tensor([0, *numpy.cumsum(qo_lens).tolist()], dtype=torch.int32, device="cuda")
    lens = torch.tensor(kv_lens, dtype=torch.int64 if rng.random() < 0.5 else torch.int32, device="cuda")
    window_left = int(rng.integers(0, 500)) if rng.random() < 0.3 else -1
    return BSRView(
        qo_indptr,
        PageTable.block_table(table, lens, PAGE_SIZE),
        causal=bool(rng.random() < 0.7),
        window_left=window_left,
    )


def make_attention() -> Attention:
    kernel = attention_kernels.kernel_of(torch.device("cuda"))
    return Attention(
        QO_HEADS, KV_HEADS, HEAD_DIM, device="cuda", max_rows=MAX_ROWS, max_batch=MAX_BATCH, kernel=kernel
    )


@pytest.fixture(scope="module")
def tensors() -> tuple[torch.Tensor, KVCache]:
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(MAX_ROWS, QO_HEADS, HEAD_DIM, device="cuda", generator=generator).bfloat16()
    kv = torch.randn(PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, device="cuda", generator=generator).bfloat16()
    return q, KVCache.from_tensor(kv)


def test_run_captured_once_serves_every_plan(tensors: tuple[torch.Tensor, KVCache]) -> None:
    q, kv = tensors
    rng = numpy.random.default_rng(0)
    captured, eager = make_attention(), make_attention()
    out, lse = torch.empty_like(q), torch.empty(MAX_ROWS, QO_HEADS, device="cuda")
    captured.plan(make_view(rng))
    captured.run(q, kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(q, kv, out=out, lse=lse)
    for _ in range(100):
        view = make_view(rng)
        rows = int(view.qo_indptr[-1])
        expected, expected_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        eager.plan(view)
        eager.run(q, kv, out=expected, lse=expected_lse)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        captured.plan(view)
        graph.replay()
        assert torch.equal(out[:rows], expected[:rows])
        assert torch.equal(lse[:rows], expected_lse[:rows])
        assert out[rows:].isnan().all()
        assert lse[rows:].isnan().all()


@pytest.mark.parametrize("after_append", [False, True])
def test_plan_in_the_graph_reads_what_the_engine_writes(
    tensors: tuple[torch.Tensor, KVCache], after_append: bool
) -> None:
    """A whole step as an engine captures it: append, plan and run, over buffers that are filled before each
    replay. Requests beyond the batch are empty.

    after_append: two layers after the plan, whose runs start while their appends still write.
    """
    q, kv = tensors
    rng = numpy.random.default_rng(1)
    kv = KVCache.from_pair(kv.k.contiguous(), kv.v.contiguous())
    qo_indptr = torch.zeros(MAX_BATCH + 1, dtype=torch.int32, device="cuda")
    table = torch.zeros(MAX_BATCH, WIDTH, dtype=torch.int32, device="cuda")
    lens = torch.zeros(MAX_BATCH, dtype=torch.int32, device="cuda")
    slots = torch.full((MAX_ROWS,), -1, dtype=torch.int64, device="cuda")
    k_new, v_new = torch.randn(2, MAX_ROWS, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    view = BSRView(qo_indptr, PageTable.block_table(table, lens, PAGE_SIZE))
    captured, eager = make_attention(), make_attention()
    out = torch.empty_like(q)

    def step() -> None:
        if after_append:
            captured.plan(view)
            for new in (v_new, k_new):  # the first layer reads different values than the second
                append_kv(new, v_new, kv, slots)
                captured.run(q, kv, out=out, after_append=True)
        else:
            append_kv(k_new, v_new, kv, slots)
            captured.plan(view)
            captured.run(q, kv, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(30):
        qo_lens, kv_lens = random_lengths(rng)
        batch, rows = len(qo_lens), sum(qo_lens)
        qo_indptr.fill_(rows)
        qo_indptr[: batch + 1] = torch.tensor([0, *numpy.cumsum(qo_lens).tolist()])
        lens.zero_()
        lens[:batch] = torch.tensor(kv_lens)
        table.copy_(torch.from_numpy(rng.integers(0, PAGES, (MAX_BATCH, WIDTH))))
        slots.fill_(-1)
        slots[:rows] = torch.from_numpy(rng.permutation(PAGES * PAGE_SIZE)[:rows])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(kv.k.flatten(0, 1)[slots[:rows]], k_new[:rows])
        expected = torch.full_like(out, torch.nan)
        eager.plan(
            BSRView(
                qo_indptr[: batch + 1].clone(),
                PageTable.block_table(table[:batch].clone(), lens[:batch].clone(), PAGE_SIZE),
            )
        )
        eager.run(q, kv, out=expected)
        assert torch.equal(out[:rows], expected[:rows])
        assert out[rows:].isnan().all()


def test_eager_agrees_with_the_oracle_at_these_shapes() -> None:
    case = case_tensors.build(
        Spec((1, 60, 5), (2048, 700, 33), num_kv_heads=KV_HEADS, group_size=4, head_dim=HEAD_DIM), "cuda"
    )
    attention = case.attention()
    attention.plan(case.view)
    case_tensors.check(case, case.run(attention, lse=case.lse), case.lse)


def test_plan_and_run_never_synchronise(tensors: tuple[torch.Tensor, KVCache]) -> None:
    q, kv = tensors
    attention = make_attention()
    view = make_view(numpy.random.default_rng(2))
    out = torch.empty_like(q)
    slots = torch.arange(4, device="cuda")
    attention.plan(view)
    attention.run(q, kv, out=out)
    append_kv(kv.k[0, :4], kv.v[0, :4], kv, slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.plan(view)
        attention.run(q, kv, out=out)
        append_kv(kv.k[0, :4], kv.v[0, :4], kv, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
