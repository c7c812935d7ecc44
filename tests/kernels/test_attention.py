"""plan and run: edge cases, determinism, and results that do not depend on how the work is split."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from dataclasses import replace

import attention_kernels
import case_tensors
import cases
import numpy
import pytest
import torch
from cases import Spec
from tiers import distinct, mostly_slow

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable

pytestmark = pytest.mark.usefixtures("kernel")


def run(spec: Spec, device: torch.device, num_ctas: int | None = None) -> case_tensors.Case:
    """Plans and runs a case, with and without lse; the result is in `out` and `lse` of the case."""
    case = case_tensors.build(spec, device)
    attention = case.attention(num_ctas)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    without_lse = case.run(attention)
    assert without_lse[: case.rows].equal(case.out[: case.rows])
    return case


def check(case: case_tensors.Case) -> None:
    case_tensors.check(case, case.out, case.lse)
    case_tensors.check_padding(case)


def test_room_grows(device: torch.device) -> None:
    case = case_tensors.build(Spec((1, 70, 3), (300, 200, 130), dtype=torch.bfloat16), device)
    small = Attention(
        8,
        2,
        64,
        device=device,
        max_rows=8,
        max_batch=2,
        num_ctas=37,
        cascade=False,
        kernel=attention_kernels.kernel_of(device),
    )
    with pytest.raises(ValueError, match="max_batch = 2"):
        small.plan(case.view)
    assert small.with_room(max_rows=3, max_batch=2) is small
    large = small.with_room(max_rows=case.rows, max_batch=3)
    assert (large.max_rows, large.max_batch, large.max_levels, small.max_batch) == (74, 3, 1, 2)
    large.plan(case.view)
    assert large.schedule().num_ctas == 37
    case.run(large, out=case.out, lse=case.lse)
    check(case)
    with pytest.raises(ValueError, match="max_rows is -1"):
        small.with_room(max_rows=-1)


def test_growth_keeps_every_option(device: torch.device) -> None:
    options = {"max_rows": 8, "max_batch": 2, "kernel": attention_kernels.kernel_of(device)}
    small = Attention(
        4, 2, 64, q_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn, device=device, **options
    )
    large = small.with_room(max_rows=16)
    assert (large.q_dtype, large.max_rows) == (torch.float8_e4m3fn, 16)
    assert {"self", *vars(small._config)} == set(inspect.signature(Attention.__init__).parameters)


@pytest.mark.parametrize("page_size", [1, 16])
def test_csr_with_lengths(device: torch.device, page_size: int) -> None:
    """Requests own pages beyond their lengths, which hold NaN and are shared with others. The bits equal a
    run without them.
    """
    case = case_tensors.build(Spec((1, 5, 40, 1), (70, 5, 130, 0), page_size=page_size, sharing=0.5), device)
    attention = case.attention()
    attention.plan(case.view)
    expected = case.run(attention)
    table = case.view.table
    ends = [] if table.indptr is None else table.indptr.tolist()
    assert table.indices is not None
    spare = torch.full((2,), int(table.indices[0]), dtype=torch.int32, device=device)
    indices = torch.cat(
        [torch.cat((table.indices[begin:end], spare)) for begin, end in itertools.pairwise(ends)]
    )
    indptr = torch.tensor([end + 2 * i for i, end in enumerate(ends)], dtype=torch.int32, device=device)
    lens = torch.tensor(case.spec.kv_lens, dtype=torch.int64, device=device)
    view = replace(case.view, table=PageTable.csr(indptr, indices, None, page_size, kv_lens=lens))
    attention.plan(view)
    assert case.run(attention)[: case.rows].equal(expected[: case.rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 4, 16])
def test_mixed_batch(device: torch.device, head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    """Decode, chunked prefill, prefill, a padding request and an empty one in one launch."""
    spec = Spec(
        (1, 70, 130, 0, 1, 1),
        (300, 200, 130, 0, 0, 1025),
        head_dim=head_dim,
        group_size=group_size,
        dtype=dtype,
        padding_rows=3,
    )
    check(run(spec, device))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 112, 192])
def test_heads_that_do_not_fill_a_row_of_a_tile(head_dim: int, kernel: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for page_size, seed in ((16, 0), (3, 1), (1, 2)):
            spec = Spec(
                (1, 70, 130, 0, 1, 1),
                (300, 200, 130, 0, 0, 1025),
                head_dim=head_dim,
                dtype=dtype,
                page_size=page_size,
                seed=seed,
                padding_rows=3,
            )
            check(run(spec.with_(sharing=0.5 if seed else 0.0), torch.device("cuda")))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_of_a_cpu(head_dim: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(run(Spec((1, 9, 40), (70, 9, 100), head_dim=head_dim, dtype=dtype), torch.device("cpu")))


@pytest.mark.parametrize("page_size", [*range(1, 20), 63, 64, 65, 256])
@pytest.mark.parametrize("table_form", ["csr", "block_table", "token_slots"])
def test_page_sizes(device: torch.device, table_form: str, page_size: int) -> None:
    check(
        run(
            Spec(
                (1, 5, 1),
                (page_size, 3 * page_size + 1, 700),
                table_form=table_form,
                page_size=page_size,
                sharing=0.5,
            ),
            device,
        )
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("table_form", ["csr", "block_table", "token_slots"])
def test_pages_of_one_token_that_follow_one_another(
    device: torch.device, table_form: str, window_left: int, head_dim: int
) -> None:
    """In runs that end anywhere in a KV tile and are too short for one; the last run ends with the cache."""
    for run_pages in (33, 64, 150, 5000):
        for seed in range(3 if device.type == "cuda" else 1):
            spec = Spec(
                (1, 200, 5, 1),
                (300, 700, 90, 129),
                table_form=table_form,
                page_size=1,
                run_pages=run_pages,
                seed=seed,
            )
            check(run(spec.with_(window_left=window_left, head_dim=head_dim), device))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("cache_form", ["tensor", "pair", "packed", "slots"])
@pytest.mark.parametrize("strided", [False, True])
def test_cache_forms(device: torch.device, cache_form: str, layout: str, strided: bool) -> None:
    for seed in range(5):
        for page_size, num_kv_heads in [(1, 2), (16, 1), (5, 3)]:
            spec = Spec(
                (1, 20),
                (90, 40),
                cache_form=cache_form,
                layout=layout,
                page_size=page_size,
                num_kv_heads=num_kv_heads,
                strided=strided,
                seed=seed,
            )
            check(run(spec, device))


@pytest.mark.parametrize(
    "form",
    mostly_slow(
        distinct(itertools.product((5, 1, 40), ("block_table", "token_slots")), repeated={1, 2, 5}), fast=1
    ),
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "group_size"),
    mostly_slow(
        [(64, 8), (128, 48), (256, 20), (128, 1), (64, 33), (128, 4), (128, 8), (128, 9), (256, 4)],
        fast=9,
        without_gpu=5,
    ),
)
def test_many_short_requests(
    device: torch.device, head_dim: int, group_size: int, form: tuple[int, str]
) -> None:
    """Requests of a few KV tiles, many for each CTA, mixed with long ones, short prompts and long prompts;
    the same bits every time.
    """
    num_ctas, table_form = form
    rng = numpy.random.default_rng(num_ctas)
    kv_lens = [int(length) for length in rng.integers(1, 300, 120)]
    qo_lens = [1] * len(kv_lens)
    for request, qo_len, kv_len in (
        (7, 1, 1500),
        (30, 3, 200),
        (31, 150, 150),
        (60, 1, 700),
        (90, 40, 400),
        (119, 1, 0),
    ):
        qo_lens[request], kv_lens[request] = qo_len, kv_len
    spec = Spec(
        tuple(qo_lens),
        tuple(kv_lens),
        head_dim=head_dim,
        group_size=group_size,
        table_form=table_form,
        page_size=1 if num_ctas == 5 else 16,
    )
    case = run(spec, device, num_ctas)
    check(case)
    attention = case.attention(num_ctas)
    attention.plan(case.view)
    for _ in range(20 if device.type == "cuda" else 2):  # a CPU has no varying order
        assert same_bits(
            case.run(attention, out=torch.full_like(case.out, torch.nan))[: case.rows], case.out[: case.rows]
        )


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513])
@pytest.mark.parametrize("qo_len", [1, 2, 16, 33])
def test_lengths_around_tiles(device: torch.device, qo_len: int, kv_len: int) -> None:
    for causal in (True, False):
        check(run(Spec((qo_len, qo_len), (kv_len, kv_len + 1), causal=causal, group_size=3), device))


@pytest.mark.parametrize("window_left", [0, 1, 15, 63, 64, 65, 200, 10**6, 2**31 - 1])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(device: torch.device, causal: bool, window_left: int) -> None:
    check(run(Spec((1, 40, 130, 9), (300, 200, 130, 3), causal=causal, window_left=window_left), device))


@pytest.mark.parametrize("logits_soft_cap", [0.5, 5.0, 30.0, 1000.0])
def test_soft_cap(device: torch.device, logits_soft_cap: float) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(
            run(Spec((1, 40), (300, 100), logits_soft_cap=logits_soft_cap, sm_scale=0.5, dtype=dtype), device)
        )


@pytest.mark.parametrize("sm_scale", [1e-6, 0.2, 1.0])
def test_scales(device: torch.device, sm_scale: float) -> None:
    check(run(Spec((1, 40), (300, 100), sm_scale=sm_scale), device))


def test_rows_that_see_nothing_are_zero(device: torch.device) -> None:
    for causal in (True, False):
        case = run(Spec((1, 5, 70), (0, 2, 3), causal=causal, padding_rows=2), device)
        check(case)
        assert (case.out[0] == 0).all()
        assert (case.lse[0] == -torch.inf).all()
        if causal:
            assert (case.out[1:4] == 0).all()
            assert (case.lse[1:4] == -torch.inf).all()


def test_empty_batches(device: torch.device) -> None:
    check(run(Spec((), (), padding_rows=4), device))
    check(run(Spec((0, 0), (5, 0), padding_rows=1), device))
    check(run(Spec((0,), (5,)), device))  # q without rows


@pytest.mark.parametrize("max_levels", [1, 2])
@pytest.mark.parametrize(
    "page_size", [None, 1, 16], ids=lambda size: "ragged" if size is None else f"pages of {size}"
)
def test_a_cache_without_tokens(device: torch.device, page_size: int | None, max_levels: int) -> None:
    """Every row sees nothing: its output is 0 and its lse is -inf, as for a request without tokens."""
    lengths, qo_indptr = (
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.tensor([0, 2, 73], dtype=torch.int32, device=device),
    )
    if page_size is None:
        table, shape = PageTable.ragged(torch.zeros(3, dtype=torch.int32, device=device)), (0, 1)
    else:
        table, shape = (
            PageTable.block_table(torch.zeros(2, 3, dtype=torch.int32, device=device), lengths, page_size),
            (0, page_size),
        )
    for dtype, head_dim, causal, sinks in itertools.product(
        (torch.bfloat16, torch.float16), (64, 128), (True, False), (True, False)
    ):
        options = {"kernel": attention_kernels.kernel_of(device), "sinks": sinks, "max_levels": max_levels}
        attention = Attention(8, 2, head_dim, dtype=dtype, device=device, max_rows=73, max_batch=2, **options)
        view = BSRView(qo_indptr, table, causal=causal and max_levels == 1)
        attention.plan(view if max_levels == 1 else Composition([view, view]))
        q = torch.randn(75, 8, head_dim, dtype=dtype, device=device)
        kv = KVCache.from_pair(
            *(torch.empty(*shape, 2, head_dim, dtype=dtype, device=device) for _ in range(2))
        )
        out, lse = torch.full_like(q, torch.nan), torch.full((75, 8), torch.nan, device=device)
        of_sinks = torch.randn(8, device=device) if sinks else None
        attention.run(q, kv, out=out, lse=lse, sinks=of_sinks)
        attention.raise_for_errors()
        assert (out[:73] == 0).all()
        torch.testing.assert_close(
            lse[:73], torch.full_like(lse[:73], -torch.inf) if of_sinks is None else of_sinks.expand(73, 8)
        )
        assert out[73:].isnan().all()
        assert lse[73:].isnan().all()


def test_a_cache_without_the_tokens_of_a_plan(device: torch.device) -> None:
    attention = Attention(
        4, 2, 64, device=device, max_rows=8, max_batch=1, kernel=attention_kernels.kernel_of(device)
    )
    q = torch.randn(3, 4, 64, dtype=torch.bfloat16, device=device)
    kv = KVCache.from_pair(
        *(torch.empty(0, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    )
    one = torch.tensor([[0]], dtype=torch.int32, device=device)
    attention.plan(
        BSRView(
            torch.tensor([0, 3], dtype=torch.int32, device=device), PageTable.block_table(one, one[0] + 5, 16)
        )
    )
    by_host, by_kernel = r"page 0 of request 0 is 0, must be in \[0, 0\)", "a page id is outside the cache"
    if device.type == "cuda":
        assert (attention.run(q, kv) == 0).all()
    with pytest.raises(ValueError, match=by_kernel if device.type == "cuda" else by_host):
        attention.raise_for_errors() if device.type == "cuda" else attention.run(q, kv)


def test_tokens_that_no_row_sees_may_be_anything(device: torch.device) -> None:
    """The engine may have freed pages before every window: they belong to another request, or to none."""
    for qo_len, kv_len, window_left in [(1, 300, 10), (1, 300, 63), (20, 500, 100), (130, 300, 5)]:
        case = case_tensors.build(Spec((qo_len,), (kv_len,), window_left=window_left), device)
        expected = case.expected()
        gone = case.slots[0][: kv_len - qo_len - window_left]
        for view in (case.kv.k, case.kv.v):
            view[gone // 16, gone % 16] = torch.nan
        attention = case.attention()
        attention.plan(case.view)
        case_tensors.check(case, case.run(attention, lse=case.lse), case.lse, expected)


def test_large_logits(device: torch.device) -> None:
    """Softmax of logits in the thousands: exponentials must not overflow."""
    for sm_scale in (10.0, 100.0):
        case = case_tensors.build(Spec((1, 30), (200, 100), sm_scale=sm_scale, dtype=torch.float16), device)
        attention = case.attention()
        attention.plan(case.view)
        o, lse = case.expected()
        out = case.run(attention, lse=case.lse)
        assert (out.double() - o).norm() <= 1e-2 * o.norm()
        torch.testing.assert_close(case.lse.double(), lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("growth", [0.5, 3.0, 30.0, 400.0])
def test_logits_that_grow(device: torch.device, growth: float, dtype: torch.dtype) -> None:
    """Rows whose largest logits come last, larger by a little, or beyond the range of exponentials relative
    to the first; neighboring rows keep their bits.
    """
    head_dim = 128
    case = case_tensors.build(Spec((600,), (700,), head_dim=head_dim, group_size=2, dtype=dtype), device)
    attention = case.attention()
    attention.plan(case.view)

    tokens = torch.arange(700, device=device)
    # the logits of every third row grow with the tokens, in an element that other rows lack
    grows = torch.arange(600, device=device) % 3 == 1
    case.q[:600, :, 0] = torch.where(grows, head_dim**0.5, 0.0)[:, None].to(dtype)
    growing = (tokens / 700 * growth).to(dtype)[:, None]
    case.k_slots[case.slots[0], :, 0] = growing
    case.kv.k[case.slots[0] // 16, case.slots[0] % 16, :, 0] = growing
    before = case.run(attention, lse=case.lse).clone()
    case_tensors.check(case, before, case.lse)
    case.q[:600, :, 0] = 0
    after = case.run(attention, lse=case.lse)
    assert torch.equal(before[:600][~grows], after[:600][~grows])
    assert not torch.equal(before[:600][grows], after[:600][grows])


def test_out_is_allocated(device: torch.device) -> None:
    case = case_tensors.build(Spec((1, 3), (5, 3)), device)
    attention = case.attention()
    attention.plan(case.view)
    out = case.run(attention)
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    case_tensors.check(case, out, None)


def test_slices_of_a_fused_projection(device: torch.device) -> None:
    """q, k and v as slices of one tensor [tokens, heads, head_dim], without a page table."""
    lens, heads, kv_heads = [7, 1, 90], 8, 2
    tokens = sum(lens)
    qkv = torch.randn(
        tokens, heads + 2 * kv_heads, 64, device=device, generator=torch.Generator(device).manual_seed(0)
    ).bfloat16()
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    indptr = torch.tensor([0, 7, 8, 98], dtype=torch.int32, device=device)
    attention = Attention(
        heads,
        kv_heads,
        64,
        device=device,
        max_rows=tokens,
        max_batch=3,
        kernel=attention_kernels.kernel_of(device),
    )
    attention.plan(BSRView(indptr, PageTable.ragged(indptr)))
    out = attention.run(q, KVCache.from_ragged(k, v))
    for part_q, part_k, part_v, part in zip(
        q.split(lens), k.split(lens), v.split(lens), out.split(lens), strict=True
    ):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.double().transpose(0, 1) for x in (part_q, part_k, part_v)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        assert (part.double() - expected).norm() <= 5e-3 * expected.norm()


def test_fewer_rows_than_planned(device: torch.device) -> None:
    """Rows of the plan beyond q are ignored."""
    case = case_tensors.build(Spec((3, 4, 5), (30, 40, 50)), device)
    attention = case.attention()
    attention.plan(case.view)
    out = torch.full_like(case.q, torch.nan)
    attention.run(case.q[:6], case.kv, out=out[:6], lse=case.lse[:6])
    expected_o, expected_lse = case.expected()
    assert (out[:6].double() - expected_o[:6]).norm() <= 5e-3 * expected_o[:6].norm()
    assert (case.lse[:6].double() - expected_lse[:6]).abs().max() <= 1e-3
    assert out[6:].isnan().all()
    assert case.lse[6:].isnan().all()


def test_one_plan_serves_many_layers(device: torch.device) -> None:
    case = case_tensors.build(Spec((1, 20), (300, 20)), device)
    attention = case.attention()
    attention.plan(case.view)
    for layer in range(3):
        other = case_tensors.build(case.spec.with_(seed=layer), device)  # other pages, other data
        mapped = KVCache.from_pair(*(torch.full_like(view, torch.nan) for view in (case.kv.k, case.kv.v)))
        for own, theirs in zip(case.slots, other.slots, strict=True):
            mapped.k[own // 16, own % 16] = other.k_slots[theirs]
            mapped.v[own // 16, own % 16] = other.v_slots[theirs]
        out = attention.run(other.q, mapped, lse=case.lse)
        case_tensors.check(other, out, case.lse)


@pytest.mark.parametrize("as_composition", [False, True])
def test_a_plan_keeps_its_tensors(device: torch.device, as_composition: bool) -> None:
    """Only the plan keeps page tables and row lists alive until `run` reads them; otherwise their memory
    would be reused.
    """
    case = case_tensors.build(Spec((3, 1, 40), (300, 700, 400), padding_rows=2), device)
    tensors = [
        case.view.qo_indptr,
        case.view.table.indices,
        case.view.table.indptr,
        case.view.table.last_page_len,
    ]
    if as_composition:
        rows = torch.arange(case.rows, dtype=torch.int32, device=device)
        tensors.append(rows)
        attention = case.attention(max_levels=2, cascade=False)
        attention.plan(Composition((replace(case.view, rows=rows),)))
        del rows
    else:
        attention = case.attention()
        attention.plan(case.view)
    sizes = [(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None]
    held = [weakref.ref(tensor) for tensor in tensors if tensor is not None]
    expected = case.expected()
    case.view = BSRView(
        torch.zeros(1, dtype=torch.int32, device=device),
        PageTable.ragged(torch.zeros(1, dtype=torch.int32, device=device)),
    )
    del tensors
    gc.collect()
    taken = [torch.full(shape, -1, dtype=dtype, device=device) for shape, dtype in sizes for _ in range(20)]
    case_tensors.check(case, case.run(attention, lse=case.lse), case.lse, expected)
    assert all(ref() is not None for ref in held)
    attention.plan(case.view)
    gc.collect()
    assert all(ref() is None for ref in held), "tensors of the plan before are let go"
    assert taken


@pytest.mark.parametrize(("num_qo_heads", "max_rows"), [(1, 2**31), (2, 2**30), (64, 2**25)])
def test_packed_rows_fit_into_31_bits(device: torch.device, num_qo_heads: int, max_rows: int) -> None:
    with pytest.raises(ValueError, match=r"^max_rows\b.* is .*, must be "):
        Attention(
            num_qo_heads,
            1,
            64,
            device=device,
            max_rows=max_rows,
            max_batch=1,
            kernel=attention_kernels.kernel_of(device),
        )


@pytest.mark.parametrize("seed", range(40))
def test_same_bits_every_time(device: torch.device, seed: int) -> None:
    case = case_tensors.build(cases.random_spec(seed, device.type), device)
    attention = case.attention()
    attention.plan(case.view)
    first = case.run(attention, lse=case.lse)
    for _ in range(3):
        again, lse = torch.full_like(first, torch.nan), torch.full_like(case.lse, torch.nan)
        other = case.attention()
        other.plan(case.view)
        case.run(other, out=again, lse=lse)
        assert same_bits(first[: case.rows], again[: case.rows])
        assert same_bits(case.lse, lse)


@pytest.mark.parametrize("seed", range(40))
def test_threads_do_not_change_a_bit(seed: int) -> None:
    case = case_tensors.build(cases.random_spec(seed, "cpu"), "cpu")
    attention = case.attention()
    attention.plan(case.view)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            lse = torch.full_like(case.lse, torch.nan)
            results.append((case.run(attention, lse=lse)[: case.rows], lse))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(out, results[0][0]) and same_bits(lse, results[0][1]) for out, lse in results[1:])


@pytest.mark.parametrize("seed", mostly_slow(range(60), fast=20))
def test_split_does_not_change_the_result(device: torch.device, seed: int) -> None:
    """One CTA: nothing is merged. Many CTAs: most pairs are."""
    spec = cases.random_spec(seed, device.type)
    whole = run(spec, device, num_ctas=1)
    check(whole)
    tolerance = 2 * cases.TOLERANCE[spec.dtype]
    for num_ctas in (2, 7, 64, 500):
        split = run(spec, device, num_ctas=num_ctas)
        o, reference = split.out[: split.rows].double(), whole.out[: whole.rows].double()
        assert (o - reference).norm() <= tolerance * reference.norm()
        assert torch.equal(split.lse.isinf(), whole.lse.isinf())
        torch.testing.assert_close(split.lse, whole.lse, rtol=0, atol=2 * cases.LSE_TOLERANCE, equal_nan=True)


def test_workspace_grows_by_the_states_of_the_levels() -> None:
    """Each level needs head_dim + 1 floats for each row and query head, plus a little for the schedule's
    links.
    """
    sizes = []
    for max_levels in (1, 2, 4):
        attention = Attention(
            8, 2, 64, device="cpu", max_rows=1000, max_batch=4, max_levels=max_levels, cascade=False
        )
        sizes.append(attention.workspace_bytes)
    for levels, size in ((2, sizes[1]), (4, sizes[2])):
        states = 4 * levels * 1000 * 8 * (64 + 1)
        assert states <= size - sizes[0] <= 1.05 * states


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))
