"""8-bit caches: K and V are dequantized to Q's type, with scales."""

from __future__ import annotations

from typing import Any

import cases
import numpy
import oracle
import pytest
import torch
import variant_sources
from attention_kernels import kernel_of
from compositions import Shape, cascade_problem
from float8_cases import (
    DTYPES,
    MULTIPLIED_LSE_TOLERANCE,
    MULTIPLIED_TOLERANCE,
    Q_SCALES,
    SCALES,
    TOLERANCE,
    Float8Case,
    Needle,
    rounded_cache,
)
from tiers import mostly_slow

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

HEAD_DIMS = (64, 72, 128, 256)


def run(problem: Float8Case, **options: object) -> None:
    case = problem.case
    attention = case.attention(**problem.options, **options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, **problem.run_options)
    problem.check(case.out, case.lse)
    assert attention.schedule().errors == 0


def random_case(seed: int, device: torch.device) -> Float8Case:
    rng = numpy.random.default_rng([seed, 80])
    spec = cases.random_spec(seed, device.type)
    spec = spec.with_(head_dim=HEAD_DIMS[seed % 4], strided=spec.strided and device.type == "cpu")
    if spec.dtype == torch.float32 and device.type == "cuda":
        spec = spec.with_(dtype=torch.bfloat16)
    k_form, v_form = (str(form) for form in rng.choice(SCALES, size=2))
    q_form = None if seed % 3 else str(rng.choice(Q_SCALES))
    return Float8Case(spec, device, DTYPES[seed % len(DTYPES)], k_form, v_form, q_form)


@pytest.mark.parametrize("block", mostly_slow(range(10), fast=2))
def test_random_cases(device: torch.device, kernel: str | None, block: int) -> None:
    for seed in range(12 * block, 12 * (block + 1)):
        options = {} if kernel is None else {"kernel": kernel}
        run(random_case(seed, device), cascade=("always", True, False)[seed % 3], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)], ids=str)
def test_a_16_bit_copy_for_long_prompts_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, head_dims: tuple[int, int], kernel: str | None
) -> None:
    assert kernel == kernel_of(torch.device("cuda"))
    caches: list[dict[str, Any]] = [
        {"page_size": 16, "padding_rows": 70},
        {"page_size": 3},
        {"page_size": 1, "logits_soft_cap": 20.0},
        {"page_size": 64, "layout": "HND", "window_left": 700},
        {"page_size": 1, "table_form": "ragged", "cache_form": "ragged"},
    ]
    for seed, cache in enumerate(caches):
        spec = cases.Spec(
            (600, 1, 700, 20, 520),
            (2500, 900, 700, 300, 3000),
            num_kv_heads=2,
            group_size=3,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=(torch.bfloat16, torch.float16)[seed % 2],
            seed=seed,
            **({"cache_form": "pair"} if head_dims[0] != head_dims[1] else {}) | cache,
        )
        problem = Float8Case(spec, "cuda", DTYPES[seed % 2], "head", "request")
        case, outs = problem.case, []
        for mib in (0, 2, 32):
            monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", str(mib))
            attention = case.attention(kernel=kernel, cascade=False, **problem.options)
            attention.plan(case.view)
            case.run(attention, out=case.out, lse=case.lse)
            problem.check(case.out, case.lse)
            outs.append(case.out[: case.rows].clone())
            schedule = attention.schedule()
            assert schedule.errors == 0
            copied = int((schedule.of_groups("dequantized_row") >= 0).sum())
            if kernel == "hopper" and mib == 32:
                assert copied == 3
            elif mib == 0:
                assert copied == 0
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


@pytest.mark.gpu
def test_a_graph_of_prompts_and_decodes(monkeypatch: pytest.MonkeyPatch, kernel: str | None) -> None:
    """A captured run copies what its plan has placed, whichever batch was captured."""
    assert kernel == kernel_of(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2000, 8, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    pages = torch.randn(1000, 2, 16, 2, 128, device="cuda", generator=generator).to(DTYPES[0])
    kv = KVCache.from_tensor(pages, k_scale=0.5, v_scale=2.0)
    block_table = torch.randperm(1000, device="cuda", generator=generator).int().view(4, 250)
    batches = [
        ((1500, 20, 1, 479), (3000, 600, 900, 2479)),
        ((1, 1, 1, 1), (4000, 3, 100, 1000)),
        ((600, 700, 699, 1), (4000, 700, 1699, 2000)),
        ((1999, 1, 0, 0), (3999, 900, 0, 0)),
    ]
    qo_indptr = torch.zeros(5, dtype=torch.int32, device="cuda")
    kv_lens = torch.zeros(4, dtype=torch.int32, device="cuda")
    view = BSRView(qo_indptr, PageTable.block_table(block_table, kv_lens, 16))

    def fill(batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        qo_indptr[1:] = torch.tensor(batch[0]).cumsum(0)
        kv_lens.copy_(torch.tensor(batch[1]))

    def made(mib: int) -> Attention:
        monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", str(mib))
        room = {"max_rows": 2000, "max_batch": 4, "device": "cuda", "kernel": kernel}
        return Attention(8, 2, 128, kv_dtype=DTYPES[0], cascade=False, **room)

    plain, captured = made(0), made(8)
    for first in batches:
        fill(first)
        out, expected = torch.zeros_like(q), torch.zeros_like(q)
        captured.plan(view)
        captured.run(q, kv, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.run(q, kv, out=out)
        for batch in batches:
            fill(batch)
            plain.plan(view)
            plain.run(q, kv, out=expected.zero_())
            out.zero_()
            captured.plan(view)
            graph.replay()
            assert torch.equal(out, expected), (first, batch)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "v_in_k"),
    [(192, 128, False), (192, 128, True), (72, 200, False), (96, 64, False)],
)
def test_heads_of_different_widths(
    device: torch.device, kernel: str | None, head_dim: int, head_dim_v: int, v_in_k: bool
) -> None:
    for seed in range(3):
        spec = cases.random_spec(seed + 500, device.type)
        form = spec.cache_form if spec.cache_form in ("slots", "ragged") and not v_in_k else "pair"
        spec = spec.with_(
            head_dim=head_dim, head_dim_v=head_dim_v, v_in_k=v_in_k, cache_form=form, strided=False
        )
        if spec.dtype == torch.float32 and device.type == "cuda":
            spec = spec.with_(dtype=torch.bfloat16)
        options = {} if kernel is None else {"kernel": kernel}
        run(
            Float8Case(spec, device, DTYPES[seed % len(DTYPES)], *SCALES[seed + 1 : seed + 3]),
            cascade=("always", True, False)[seed % 3],
            **options,
        )


def wide_case(seed: int, device: torch.device) -> Float8Case:
    """A case with heads of 512 columns, small enough for the oracle."""
    rng = numpy.random.default_rng([seed, 85])
    spec = cases.random_spec(seed + 2000, device.type)
    spec = spec.with_(
        head_dim=512,
        num_kv_heads=1 + seed // 5 % 2,
        group_size=(16, 5, 64, 1, 128)[seed % 5],
        strided=spec.strided and device.type == "cpu",
    )
    spec = spec.with_(
        qo_lens=tuple(min(n, 40) for n in spec.qo_lens), kv_lens=tuple(min(n, 1200) for n in spec.kv_lens)
    )
    if spec.dtype == torch.float32 and device.type == "cuda":
        spec = spec.with_(dtype=torch.bfloat16)
    return Float8Case(
        spec, device, DTYPES[seed % len(DTYPES)], *(str(form) for form in rng.choice(SCALES, size=2))
    )


@pytest.mark.parametrize("block", mostly_slow(range(6), fast=1))
def test_wide_heads(device: torch.device, kernel: str | None, block: int) -> None:
    for seed in range(8 * block, 8 * (block + 1)):
        options = {} if kernel is None else {"kernel": kernel}
        schedule = ({"cascade": "always"}, {"batch_invariant": True}, {"cascade": False})[seed % 3]
        run(wide_case(seed, device), **schedule, **options)


def test_wide_heads_with_sinks(device: torch.device, kernel: str | None) -> None:
    spec = cases.Spec(
        (3, 1, 20),
        (90, 400, 64),
        num_kv_heads=2,
        group_size=4,
        head_dim=512,
        num_ctas=3,
        logits_soft_cap=20.0,
    )
    problem = Float8Case(spec, device, DTYPES[0], "request and head", "head")
    case, sinks = problem.case, torch.linspace(-2, 3, 8, device=device)
    attention = case.attention(kernel=kernel, sinks=True, **problem.options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
    expected, expected_lse = problem.expected(sinks=sinks.cpu())
    assert (case.out[: case.rows].double() - expected).norm() <= TOLERANCE * expected.norm()
    assert (case.lse[: case.rows].double() - expected_lse).abs().max() <= 1e-3


def test_wide_values_in_the_bytes_of_keys(device: torch.device, kernel: str | None) -> None:
    """V has separate scales."""
    spec = cases.Spec(
        (1, 30), (200, 90), num_kv_heads=1, group_size=16, head_dim=512, cache_form="pair", num_ctas=3
    )
    case = Float8Case(spec, device, DTYPES[0]).case
    k, outs = case.kv.k, []
    for v in (k, k.clone()):
        attention = case.attention(kernel=kernel, kv_dtype=DTYPES[0])
        attention.plan(case.view)
        outs.append(attention.run(case.q[: case.rows], KVCache.from_pair(k, v, k_scale=0.5, v_scale=2.0)))
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


@pytest.mark.parametrize("q_form", Q_SCALES)
def test_queries_of_8_bits(device: torch.device, kernel: str | None, q_form: str) -> None:
    """Prompts and decodes; the output has 16 bits."""
    options = {} if kernel is None else {"kernel": kernel}
    for seed, head_dim in enumerate((64, 72, 128, 256)):
        spec = cases.Spec(
            (150, 1, 40, 3),
            (200, 90, 40, 300),
            num_kv_heads=2,
            group_size=1 + seed,
            head_dim=head_dim,
            num_ctas=5,
            seed=seed,
        )
        run(
            Float8Case(spec, device, DTYPES[seed % len(DTYPES)], SCALES[seed], "head", q_form),
            cascade=("always", False)[seed % 2],
            **options,
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("place", [0, 60_000, 131_071])
def test_a_needle_among_128k_tokens(
    device: torch.device, kernel: str | None, head_dim: int, place: int
) -> None:
    """One CTA's sum over all tokens must lose little, although tensor cores add 8-bit products with about 14
    bits.
    """
    needle = Needle(131_072, place, 128 if device.type == "cuda" else 3, head_dim, device)
    attention = needle.attention(kernel=kernel_of(device))
    attention.plan(needle.view)
    assert needle.error(attention.run(needle.q, needle.kv, sm_scale=needle.sm_scale)) <= 1e-2


def test_output_of_8_bit_queries(device: torch.device) -> None:
    """Allocated in dtype, for any width of V."""
    for head_dim_v in (64, 32):
        problem = Float8Case(
            cases.Spec((3,), (40,), head_dim=64, head_dim_v=head_dim_v, cache_form="pair"),
            device,
            DTYPES[0],
            q_form="number",
        )
        attention = problem.case.attention(**problem.options)
        attention.plan(problem.case.view)
        out = problem.case.run(attention, **problem.run_options)
        assert (out.dtype, out.shape[2]) == (torch.bfloat16, head_dim_v)
        problem.check(out, None)


def test_refused_query_dtypes_and_scales(device: torch.device) -> None:
    room = {"max_rows": 4, "max_batch": 4, "device": device}
    for kv_dtype, q_dtype in ((None, DTYPES[0]), (DTYPES[0], DTYPES[1]), (DTYPES[0], torch.float16)):
        with pytest.raises(
            ValueError,
            match=rf"q_dtype is {q_dtype}, must be None, dtype = torch.bfloat16, or kv_dtype if that is",
        ):
            Attention(4, 2, 64, kv_dtype=kv_dtype, q_dtype=q_dtype, **room)
    problem = Float8Case(
        cases.Spec((2, 1), (40, 50), num_kv_heads=2, group_size=2), device, DTYPES[0], q_form="number"
    )
    case = problem.case
    attention = case.attention(**problem.options)
    attention.plan(case.view)
    for scale in (0, -1.0, float("inf"), float("nan"), 1e39, 1e-60, True, "1"):
        with pytest.raises(
            ValueError,
            match=r"q_scale is .*must be a number above 0 that a float32 holds, or a float32 tensor",
        ):
            case.run(attention, q_scale=scale)
    for shape in ((3,), (2, 1), (2, 2)):
        with pytest.raises(ValueError, match=r"q_scale.shape is .*must be \[\]"):
            case.run(attention, q_scale=torch.ones(shape, device=device))
    with pytest.raises(ValueError, match=r"q_scale.dtype is float64, must be float32"):
        case.run(attention, q_scale=torch.ones(1, device=device).double())
    with pytest.raises(ValueError, match=r"q.dtype is bfloat16, must be float8_e4m3fn"):
        attention.run(case.q.bfloat16(), case.kv)
    plain = case.attention(kv_dtype=problem.dtype)
    plain.plan(case.view)
    with pytest.raises(ValueError, match=r"q_scale is a tensor, must be None: q is not of 8 bits"):
        plain.run(case.q.bfloat16(), case.kv, q_scale=torch.ones(1, device=device))


def test_shared_prefixes_with_scales_of_requests(device: torch.device) -> None:
    """Rows of one row group, which reads the shared pages once, have different scales."""
    for seed in range(6):
        spec = cases.Spec(
            (1,) * 9,
            (300,) * 9,
            head_dim=(64, 128)[seed % 2],
            sharing=0.9,
            page_size=16,
            num_ctas=(3, 20)[seed % 2],
            seed=seed,
        )
        run(
            Float8Case(spec, device, DTYPES[seed % len(DTYPES)], "request and head", "request"),
            cascade="always",
        )


@pytest.mark.parametrize("k_form", ["number", "head"])
def test_compositions(device: torch.device, k_form: str) -> None:
    for seed in range(4):
        shape = Shape(
            num_kv_heads=2,
            group_size=2,
            page_size=8,
            head_dim=(64, 72, 64, 512)[seed],
            dtype=torch.bfloat16,
            num_ctas=7,
            logits_soft_cap=20.0 * (seed % 2),
        )
        problem = cascade_problem(numpy.random.default_rng([seed, 81]), shape, device, 2)
        memory, dtype = problem.memory, DTYPES[seed // 2]
        scale = torch.full((2,), 0.75, device=device)
        memory.kv = rounded_cache(memory.kv, dtype, scale if k_form == "head" else 0.75, 0.5)
        memory.k_slots, memory.v_slots = (
            memory.k_slots.to(dtype).double() * 0.75,
            memory.v_slots.to(dtype).double() * 0.5,
        )
        problem.q = problem.q.contiguous()
        problem.run(problem.attention(kv_dtype=dtype))
        rows = sorted({row for seen in problem.seen for row in seen.rows})
        wide = problem.q
        problem.q = wide.double()
        expected, _ = problem.expected()
        assert (problem.out[rows].double() - expected[rows]).norm() <= TOLERANCE * expected[rows].norm()


def one_request(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, sm_scale: float | None = None, **scales: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of one request over all tokens, each of k and v: [tokens, heads, head_dim]."""
    heads, head_dim = q.shape[1:]
    kv = KVCache.from_ragged(k, v, **scales)
    attention = Attention(
        heads,
        k.shape[1],
        head_dim,
        dtype=q.dtype,
        kv_dtype=k.dtype,
        device=q.device,
        max_rows=len(q),
        max_batch=1,
    )
    indptr = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    attention.plan(
        BSRView(indptr, PageTable.ragged(torch.tensor([0, len(k)], dtype=torch.int32, device=q.device)))
    )
    lse = torch.empty(q.shape[:2], device=q.device)
    return attention.run(q, kv, lse=lse, sm_scale=sm_scale), lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number(device: torch.device, dtype: torch.dtype) -> None:
    """Each row sees only one of the 256 values, including subnormals, infinities and NaN."""
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    v = bits.view(dtype)[:, None].expand(256, 64).contiguous()
    for q_dtype in (torch.bfloat16, torch.float16):
        q = torch.zeros(256, 1, 64, dtype=q_dtype, device=device)
        k = torch.zeros(256, 1, 64, device=device).to(dtype)
        kv = KVCache.from_ragged(k, v[:, None].contiguous())
        attention = Attention(
            1, 1, 64, dtype=q_dtype, kv_dtype=dtype, device=device, max_rows=256, max_batch=256
        )
        indptr = torch.arange(257, dtype=torch.int32, device=device)
        attention.plan(BSRView(indptr, PageTable.ragged(indptr)))
        out = attention.run(q, kv)[:, 0, 0].float()
        expected = v[:, 0].float()
        finite = expected.isfinite()
        assert torch.equal(out[finite], expected[finite])
        assert not out[~finite].isfinite().any()


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1e-6, 1e-30), (30.0, 1e4), (1e-30, 1.0)])
def test_extreme_scales(device: torch.device, k_scale: float, v_scale: float) -> None:
    generator = torch.Generator(device).manual_seed(3)
    k, v = (
        torch.randn(200, 2, 64, device=device, generator=generator).to(torch.float8_e4m3fn) for _ in range(2)
    )
    q = torch.randn(5, 4, 64, device=device, generator=generator).to(torch.bfloat16)
    out, lse = one_request(k, v, q, k_scale=k_scale, v_scale=v_scale)
    expected, expected_lse = oracle.attention(q.double(), k.double() * k_scale, v.double() * v_scale)
    assert (out.double() - expected).norm() <= TOLERANCE * expected.norm()
    assert (lse.double() - expected_lse).abs().max() <= 1e-3


@pytest.mark.parametrize("exponent", [-100, -30, -15, 15, 60])
def test_queries_of_any_magnitude(device: torch.device, exponent: int) -> None:
    """Rows of one row tile differ too: the multiplication may have a smaller range than their type."""
    generator = torch.Generator(device).manual_seed(4)
    k, v = (
        torch.randn(200, 2, 128, device=device, generator=generator).to(torch.float8_e4m3fn) for _ in range(2)
    )
    q = torch.randn(3, 4, 128, device=device, generator=generator) * 2.0**exponent
    q *= torch.tensor([1.0, 2.0**-20, 2.0**8], device=device)[:, None, None]
    q = q.to(torch.bfloat16)
    sm_scale = 2.0**-exponent / 128**0.5
    out, lse = one_request(k, v, q, sm_scale)
    expected, expected_lse = oracle.attention(q.double(), k.double(), v.double(), sm_scale=sm_scale)
    assert ((out.double() - expected).norm(dim=(1, 2)) <= TOLERANCE * expected.norm(dim=(1, 2))).all()
    assert ((lse.double() - expected_lse).abs() <= 1e-3 + 1e-6 * expected_lse.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saturated_values(device: torch.device, dtype: torch.dtype) -> None:
    """K and V at their limits: one token takes all the weight."""
    generator = torch.Generator(device).manual_seed(4)
    largest = torch.finfo(dtype).max
    k, v = (
        torch.randn(90, 2, 64, device=device, generator=generator).sign().mul(largest).to(dtype)
        for _ in range(2)
    )
    q = torch.randn(5, 4, 64, device=device, generator=generator).to(torch.bfloat16)
    scale = 1 / largest
    out, lse = one_request(k, v, q, k_scale=scale, v_scale=scale)
    expected, expected_lse = oracle.attention(q.double(), k.double() * scale, v.double() * scale)
    assert (out.double() - expected).norm() <= TOLERANCE * expected.norm()
    assert (lse.double() - expected_lse).abs().max() <= 1e-3


def test_bits_of_8_bit_queries_do_not_depend_on_the_batch(device: torch.device, kernel: str | None) -> None:
    generator = torch.Generator(device).manual_seed(5)
    qo_lens, kv_lens = [150, 40, 1, 20], [200, 1300, 2500, 20]
    q = torch.randn(sum(qo_lens), 4, 128, device=device, generator=generator).to(torch.float8_e4m3fn)
    k, v = (
        torch.randn(sum(kv_lens), 2, 128, device=device, generator=generator).to(torch.float8_e4m3fn)
        for _ in range(2)
    )

    def attend(requests: list[int]) -> torch.Tensor:
        rows, own_k, own_v = (
            torch.cat([x.view(torch.uint8).split(lens)[i] for i in requests]).view(x.dtype)
            for x, lens in ((q, qo_lens), (k, kv_lens), (v, kv_lens))
        )
        room = {
            "max_rows": len(q),
            "max_batch": 4,
            "batch_invariant": True,
            "kernel": kernel_of(device),
            "device": device,
        }
        attention = Attention(4, 2, 128, q_dtype=q.dtype, kv_dtype=q.dtype, **room)
        indptr = [
            torch.tensor([0, *[lens[i] for i in requests]], dtype=torch.int32)
            .cumsum(0, dtype=torch.int32)
            .to(device)
            for lens in (qo_lens, kv_lens)
        ]
        attention.plan(BSRView(indptr[0], PageTable.ragged(indptr[1])))
        return attention.run(rows, KVCache.from_ragged(own_k, own_v))

    together = attend([0, 1, 2, 3]).split(qo_lens)
    for request in range(4):
        assert torch.equal(attend([request]), together[request])


def test_saturated_queries(device: torch.device, kernel: str | None) -> None:
    """All values at their limits."""
    generator = torch.Generator(device).manual_seed(4)
    shapes = ((40, 4, 128), (300, 2, 128), (300, 2, 128))
    q, k, v = (
        torch.randn(shape, device=device, generator=generator).sign().mul(448).to(torch.float8_e4m3fn)
        for shape in shapes
    )
    scale = 1 / 448
    attention = Attention(
        4,
        2,
        128,
        q_dtype=q.dtype,
        kv_dtype=q.dtype,
        device=device,
        max_rows=40,
        max_batch=1,
        kernel=kernel_of(device),
    )
    indptr = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in (40, 300)]
    attention.plan(BSRView(indptr[0], PageTable.ragged(indptr[1])))
    out, lse = attention.run(
        q, KVCache.from_ragged(k, v, k_scale=scale, v_scale=scale), q_scale=scale, return_lse=True
    )
    expected, expected_lse = oracle.attention(q.double() * scale, k.double() * scale, v.double() * scale)
    assert (out.double() - expected).norm() <= MULTIPLIED_TOLERANCE * expected.norm()
    assert (lse.double() - expected_lse).abs().max() <= 5 * MULTIPLIED_LSE_TOLERANCE  # logits of 11


def test_scales_are_read_when_the_kernel_runs(device: torch.device) -> None:
    problem = Float8Case(cases.Spec((3, 1), (40, 50), num_ctas=2), device, DTYPES[0], "head", "request")
    case = problem.case
    attention = case.attention(kv_dtype=problem.dtype)
    attention.plan(case.view)
    for factor in (1.0, 0.5):
        assert isinstance(case.kv.k_scale, torch.Tensor)
        assert isinstance(case.kv.v_scale, torch.Tensor)
        case.kv.k_scale.mul_(factor)
        case.kv.v_scale.mul_(factor)
        case.run(attention, out=case.out, lse=case.lse)
        problem.check(case.out, case.lse)


def test_a_variant_sees_scaled_scores(device: torch.device) -> None:
    """A variant's logits are computed from the represented values. Its mask hides tokens, and its additions
    are not scaled.
    """
    problem = Float8Case(
        cases.Spec((5, 1, 20), (40, 50, 20), group_size=2, num_ctas=3),
        device,
        DTYPES[0],
        "request and head",
        "head",
    )
    case, spec = problem.case, problem.case.spec
    attention = case.attention(kv_dtype=problem.dtype, variant=variant_sources.SLANTED)
    attention.plan(case.view)
    out = case.run(attention, variant_args={"slope": 0.03})
    k, v = (slots.to(problem.dtype).double() for slots in (case.k_slots, case.v_slots))
    begin = 0
    for request, (qo_len, own) in enumerate(zip(spec.qo_lens, case.slots, strict=True)):
        k_scale, v_scale = case.kv.k_scale[request][:, None], case.kv.v_scale[:, None]  # type: ignore[index]
        q = case.q[begin : begin + qo_len].double()
        expected, _ = oracle.attention(
            q,
            k[own] * k_scale,
            v[own] * v_scale,
            variant=variant_sources.slanted_oracle(0.03),
            request=request,
            first_row=begin,
        )
        assert (out[begin : begin + qo_len].double() - expected).norm() <= TOLERANCE * expected.norm()
        begin += qo_len


def test_refusals(device: torch.device) -> None:
    k, v = (torch.zeros(4, 16, 3, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    for scale in (
        torch.ones(2),
        torch.ones(3, 2),
        torch.ones(1, 2, 3),
        torch.ones(3).double(),
        torch.ones(0),
    ):
        with pytest.raises(ValueError, match=r"k_scale is a .*must be a number, or a float32 tensor"):
            KVCache.from_pair(k, v, k_scale=scale.to(device))
    for number in (0, -1.0, float("inf"), float("nan"), 1e39, 1e-60, True, "1"):
        with pytest.raises(ValueError, match=r"v_scale is .*must be a number above 0"):
            KVCache.from_pair(k, v, v_scale=number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k_scale is 0\.5, must be None: a bfloat16 cache has no scales"):
        KVCache.from_pair(k.bfloat16(), v.bfloat16(), k_scale=0.5)
    with pytest.raises(ValueError, match=r"k_scale is .*meta.*must be"):
        KVCache.from_pair(k, v, k_scale=torch.ones(3, device="meta"))
    shape = {"max_rows": 4, "max_batch": 4, "device": device}
    with pytest.raises(
        ValueError,
        match=r"kv_dtype is torch.float32, must be None, dtype = torch.bfloat16, torch.float8_e4m3fn, "
        r"torch.float8_e5m2, torch.uint8 or",
    ):
        Attention(6, 3, 64, kv_dtype=torch.float32, **shape)
    attention = Attention(6, 3, 64, kv_dtype=torch.float8_e4m3fn, **shape)
    lens = torch.tensor([5, 6], dtype=torch.int32, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    attention.plan(
        BSRView(
            torch.tensor([0, 1, 2], dtype=torch.int32, device=device), PageTable.block_table(table, lens, 16)
        )
    )
    q = torch.zeros(2, 6, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"kv.k.dtype is bfloat16, must be float8_e4m3fn"):
        attention.run(q, KVCache.from_pair(k.bfloat16(), v.bfloat16()))
    with pytest.raises(ValueError, match=r"kv.k.dtype is float8_e5m2, must be float8_e4m3fn"):
        attention.run(q, KVCache.from_pair(k.view(torch.float8_e5m2), v.view(torch.float8_e5m2)))
    with pytest.raises(ValueError, match=r"kv.v.dtype|v is a"):
        KVCache.from_pair(k, v.view(torch.float8_e5m2))
    three = torch.ones(3, 1, device=device)
    attention.run(q, KVCache.from_pair(k, v, k_scale=three, v_scale=three))
    attention.plan(
        BSRView(
            torch.arange(5, dtype=torch.int32, device=device),
            PageTable.block_table(table.repeat(2, 1), lens.repeat(2), 16),
        )
    )
    with pytest.raises(
        ValueError, match=r"kv.v_scale.shape\[0\] is 3, must be at least 4, the requests of the plan"
    ):
        attention.run(torch.cat([q, q]), KVCache.from_pair(k, v, v_scale=three))
    with pytest.raises(
        ValueError,
        match=r"kv.k_scale.shape is \[5, 3\], must be \[\] or \[num_kv_heads\]: append knows no requests",
    ):
        append_kv(
            *(torch.zeros(1, 3, 64, dtype=torch.bfloat16, device=device),) * 2,
            KVCache.from_pair(k, v, k_scale=torch.ones(5, 3, device=device)),
            lens[:1],
        )
