"""8-bit outputs: divided by a scale, rounded and clamped; lse does not change."""

from __future__ import annotations

import os
from pathlib import Path

import case_tensors
import cases
import cpu_isa
import numpy
import pytest
import torch
import variant_sources
from attention_kernels import kernel_of
from compositions import Shape, cascade_problem
from float8_cases import DTYPES, MULTIPLIED_TOLERANCE, TOLERANCE, Float8Case
from float8_outputs import DTYPE, LARGEST, check_like_unfused, check_rounded, out_of_8_bits, scale_for
from tiers import mostly_slow

from attn_backend import Attention, BSRView, KVCache, PageTable
from attn_backend.jit import compilers, manifest

HEAD_DIMS = (128, 64, 72, 256)  # the package has kernels for the first one


def run(
    case: case_tensors.Case,
    attention: Attention,
    expected: torch.Tensor,
    out_scale: torch.Tensor | float,
    tolerance: float,
    **options: object,
) -> None:
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, **options)
    plain, plain_lse = case.out[: case.rows].clone(), case.lse.clone()
    case.lse.fill_(torch.nan)
    out = out_of_8_bits(case)
    case.run(attention, out=out, lse=case.lse, out_scale=out_scale, **options)
    check_rounded(out[: case.rows], expected, out_scale, tolerance, case.spec)
    check_like_unfused(out[: case.rows], plain, out_scale, case.spec)
    assert out[case.rows :].float().isnan().all()
    torch.testing.assert_close(case.lse, plain_lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert attention.schedule().errors == 0


def of_form(scale: float, form: int, device: torch.device) -> torch.Tensor | float:
    return (scale, torch.tensor(scale, device=device), torch.tensor([[scale]], device=device))[form]


@pytest.mark.parametrize("block", mostly_slow(range(8), fast=2))
def test_random_cases(device: torch.device, kernel: str | None, block: int) -> None:
    """Over 16-bit and 8-bit caches, with both kinds of queries; in a third of the cases outputs exceed the
    largest value.
    """
    for seed in range(9 * block, 9 * (block + 1)):
        spec = cases.random_spec(seed + 1700, device.type)
        spec = spec.with_(
            head_dim=HEAD_DIMS[0 if device.type == "cuda" and seed % 2 else seed % 4],
            strided=spec.strided and device.type == "cpu",
        )
        if spec.dtype == torch.float32 and device.type == "cuda":
            spec = spec.with_(dtype=torch.bfloat16)
        options = {"kernel": kernel, "cascade": ("always", True, False)[seed % 3]}
        if seed % 4 == 3:
            case = case_tensors.build(spec, device)
            expected, tolerance, run_options = case.expected()[0], cases.TOLERANCE[spec.dtype], {}
        else:
            problem = Float8Case(
                spec, device, DTYPES[seed % 5 == 0], "head", "request", "number" if seed % 4 else None
            )
            case, expected, run_options = problem.case, problem.expected()[0], problem.run_options
            tolerance = MULTIPLIED_TOLERANCE if problem.is_multiplied() and kernel == "hopper" else TOLERANCE
            options |= problem.options
        scale = scale_for(expected, 0.2 * (seed % 3 == 0))
        run(
            case,
            case.attention(float8_out=True, **options),
            expected,
            of_form(scale, seed % 3, device),
            tolerance,
            **run_options,
        )


def test_wide_heads_over_8_bits(device: torch.device, kernel: str | None) -> None:
    spec = cases.Spec((1, 3, 1), (90, 40, 200), num_kv_heads=1, group_size=16, head_dim=512, num_ctas=3)
    problem = Float8Case(spec, device, DTYPES[0], "head", "request")
    attention, expected = (
        problem.case.attention(float8_out=True, kernel=kernel, **problem.options),
        problem.expected()[0],
    )
    run(problem.case, attention, expected, scale_for(expected, 0.1), TOLERANCE)


@pytest.mark.parametrize("head_dims", [(512, 512), (576, 512)])
def test_wide_heads(device: torch.device, kernel: str | None, head_dims: tuple[int, int]) -> None:
    spec = cases.Spec(
        (1, 3, 1),
        (90, 40, 200),
        num_kv_heads=1,
        group_size=16,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        num_ctas=3,
    )
    case = case_tensors.build(spec.with_(cache_form="pair", v_in_k=head_dims[0] > 512), device)
    expected = case.expected()[0]
    run(
        case,
        case.attention(float8_out=True, kernel=kernel),
        expected,
        scale_for(expected, 0.1),
        cases.TOLERANCE[spec.dtype],
    )


def test_compositions(device: torch.device, kernel: str | None) -> None:
    """Rows of several row groups are rounded once, when their states are merged."""
    for seed in range(3):
        shape = Shape(
            num_kv_heads=2, group_size=2, page_size=8, head_dim=128, dtype=torch.bfloat16, num_ctas=7
        )
        problem = cascade_problem(numpy.random.default_rng([seed, 87]), shape, device, 2)
        attention = problem.attention(float8_out=True, kernel=kernel)
        problem.run(attention)
        exact, rows = problem.expected()[0], sorted({row for seen in problem.seen for row in seen.rows})
        scale = scale_for(exact[rows], 0.1)
        out = attention.run(
            problem.q,
            problem.memory.kv,
            out_scale=scale,
            sm_scale=shape.sm_scale,
            logits_soft_cap=shape.logits_soft_cap,
        )
        check_rounded(out[rows], exact[rows], scale, cases.TOLERANCE[shape.dtype])
        check_like_unfused(out[rows], problem.out[rows], scale)


def test_sinks(device: torch.device, kernel: str | None) -> None:
    case = case_tensors.build(
        cases.Spec((3, 1, 40), (40, 300, 90), num_kv_heads=2, group_size=2, head_dim=128, num_ctas=5), device
    )
    sinks = torch.linspace(-2, 3, 4, device=device)
    expected = case.expected(sinks=sinks)[0]
    run(
        case,
        case.attention(float8_out=True, sinks=True, kernel=kernel),
        expected,
        scale_for(expected, 0.0),
        cases.TOLERANCE[case.spec.dtype],
        sinks=sinks,
    )


@pytest.mark.parametrize("num_ctas", [1, 9])
def test_what_a_variant_makes_of_the_output_is_divided(device: torch.device, num_ctas: int) -> None:
    """The kernel that has a complete row rounds it, and so does the kernel that merges."""
    case = case_tensors.build(
        cases.Spec((3, 1, 40), (40, 300, 90), num_kv_heads=1, group_size=2, num_ctas=num_ctas), device
    )
    expected = case.expected(variant=variant_sources.slanted_oracle(0.03))[0]
    attention = case.attention(float8_out=True, variant=variant_sources.SLANTED)
    run(case, attention, expected, 0.02, cases.TOLERANCE[case.spec.dtype], variant_args={"slope": 0.03})


def test_an_interpreted_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    from attn_backend.variants.builtin import soft_cap

    case = case_tensors.build(cases.Spec((3, 1), (40, 60), num_ctas=3, logits_soft_cap=0.0), "cpu")
    attention = case.attention(float8_out=True, variant=soft_cap(5.0))
    expected = case.expected(logits_soft_cap=5.0)[0]
    run(case, attention, expected, torch.tensor([scale_for(expected, 0.1)]), cases.TOLERANCE[case.spec.dtype])


def one_token(
    device: torch.device, values: torch.Tensor, dtype: torch.dtype, float8_out: bool = True
) -> tuple[Attention, torch.Tensor, KVCache]:
    """Rows that see one token each: the output is V."""
    rows = len(values)
    v = values.to(device, dtype)[:, None, None].expand(rows, 1, 128).contiguous()
    q = torch.zeros(rows, 1, 128, dtype=dtype, device=device)
    attention = Attention(
        1, 1, 128, dtype=dtype, device=device, max_rows=rows, max_batch=rows, float8_out=float8_out
    )
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
    attention.plan(BSRView(indptr, PageTable.ragged(indptr)))
    return attention, q, KVCache.from_ragged(torch.zeros_like(v), v)


@pytest.mark.parametrize("out_scale", [1.0, 0.25, 2.0**-40, 2.0**-149, 2.0**120])
def test_every_number(device: torch.device, out_scale: float) -> None:
    """To nearest even, clamped; as torch rounds values in range."""
    values = torch.cat(
        [
            sign * torch.arange(0, 2**16, 37, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
            for sign in (1, -1)
        ]
    )
    values = values[values.isfinite() & (values.abs() < 1e30)]
    has_amx = device.type == "cpu" and cpu_isa.used(os.environ.get("ATTN_BACKEND_CPU_ISA") or "amx") == "amx"
    # AMX treats subnormal values as 0
    seen = values.where(values.abs() >= torch.finfo(torch.float32).tiny, 0) if has_amx else values
    attention, q, kv = one_token(device, values, torch.bfloat16)
    for scale in (out_scale, torch.tensor(out_scale, device=device)):
        out = attention.run(q, kv, out_scale=scale)[:, 0].cpu()
        factor = min(1 / out_scale, torch.finfo(torch.float32).max)
        wanted = (seen.double() * factor).clamp(-LARGEST, LARGEST).to(DTYPE).float()
        assert not out.float().isnan().any()
        assert torch.equal(out.float(), wanted[:, None].expand_as(out))


def test_a_scale_of_0_makes_no_nan(device: torch.device) -> None:
    attention, q, kv = one_token(device, torch.tensor([0.0, 1.0, -1.0]), torch.bfloat16)
    out = attention.run(q, kv, out_scale=torch.zeros(1, device=device))[:, 0, 0]
    assert out.float().tolist() == [0.0, LARGEST, -LARGEST]


def test_nan_stays_nan(device: torch.device) -> None:
    attention, q, kv = one_token(device, torch.tensor([1.0, torch.nan]), torch.bfloat16)
    assert attention.run(q, kv, out_scale=1.0)[:, 0, 0].float().isnan().tolist() == [False, True]


def test_the_output_that_is_allocated(device: torch.device) -> None:
    attention, q, kv = one_token(device, torch.tensor([3.0, 5.0]), torch.bfloat16)
    out, lse = attention.run(q, kv, out_scale=0.5, return_lse=True)
    assert (out.dtype, out.shape, lse.dtype) == (DTYPE, q.shape, torch.float32)
    assert (attention.run(q, kv).dtype, out[:, 0, 0].float().tolist()) == (torch.bfloat16, [6.0, 10.0])
    larger = attention.with_room(max_rows=7)
    larger.plan(
        BSRView(
            torch.arange(3, dtype=torch.int32, device=device),
            PageTable.ragged(torch.arange(3, dtype=torch.int32, device=device)),
        )
    )
    assert larger.run(q, kv, out_scale=0.5).dtype == DTYPE


def test_bits_do_not_depend_on_the_batch(device: torch.device, kernel: str | None) -> None:
    generator = torch.Generator(device).manual_seed(5)
    qo_lens, kv_lens = [150, 40, 1, 20], [200, 1300, 2500, 20]
    q = torch.randn(sum(qo_lens), 4, 128, device=device, generator=generator).to(torch.bfloat16)
    k, v = (
        torch.randn(sum(kv_lens), 2, 128, device=device, generator=generator).to(torch.bfloat16)
        for _ in range(2)
    )

    def attend(requests: list[int]) -> torch.Tensor:
        rows, own_k, own_v = (
            torch.cat([x.split(lens)[i] for i in requests])
            for x, lens in ((q, qo_lens), (k, kv_lens), (v, kv_lens))
        )
        attention = Attention(
            4,
            2,
            128,
            max_rows=len(q),
            max_batch=4,
            batch_invariant=True,
            kernel=kernel_of(device),
            device=device,
            float8_out=True,
        )
        indptr = [
            torch.tensor([0, *[lens[i] for i in requests]], dtype=torch.int32)
            .cumsum(0, dtype=torch.int32)
            .to(device)
            for lens in (qo_lens, kv_lens)
        ]
        attention.plan(BSRView(indptr[0], PageTable.ragged(indptr[1])))
        return attention.run(rows, KVCache.from_ragged(own_k, own_v), out_scale=0.01).view(torch.uint8)

    together = attend([0, 1, 2, 3]).split(qo_lens)
    for request in range(4):
        assert torch.equal(attend([request]), together[request])


@pytest.mark.gpu
def test_a_captured_graph_reads_the_scale_of_its_replay(kernel: str | None) -> None:
    for problem in (
        None,
        Float8Case(
            cases.Spec((1, 70, 3), (900, 90, 300), head_dim=128, num_ctas=20),
            "cuda",
            DTYPE,
            "head",
            "head",
            "number",
        ),
    ):
        case = (
            case_tensors.build(cases.Spec((1, 70, 3), (900, 90, 300), head_dim=128, num_ctas=20), "cuda")
            if problem is None
            else problem.case
        )
        attention = case.attention(
            float8_out=True, kernel=kernel, **({} if problem is None else problem.options)
        )
        expected, options = (
            (case.expected()[0], {}) if problem is None else (problem.expected()[0], problem.run_options)
        )
        scale, out = torch.tensor([0.01], device="cuda"), out_of_8_bits(case)
        attention.plan(case.view)
        case.run(attention, out=out, out_scale=scale, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.run(attention, out=out, out_scale=scale, **options)
        for value in (0.003, 0.5):
            scale.fill_(value)
            out.view(torch.uint8).fill_(0x7F)
            graph.replay()
            check_rounded(out[: case.rows], expected, value, MULTIPLIED_TOLERANCE)


def test_a_compiled_function(device: torch.device) -> None:
    attention, q, kv = one_token(device, torch.tensor([3.0, 500.0]), torch.bfloat16)

    @torch.compile(backend="eager", fullgraph=True)
    def attend(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return attention.run(q, kv, out_scale=scale)

    @torch.compile(backend="eager", fullgraph=True)
    def attend_by_number(q: torch.Tensor) -> torch.Tensor:
        return attention.run(q, kv, out_scale=0.5)

    for out in (attend(q, torch.tensor([0.5], device=device)), attend_by_number(q)):
        assert out[:, 0, 0].float().tolist() == [6.0, LARGEST]


def test_refusals(device: torch.device) -> None:
    attention, q, kv = one_token(device, torch.tensor([3.0, 5.0]), torch.bfloat16)
    for scale in (0, -1.0, float("inf"), float("nan"), 1e39, 1e-46, True, "1"):
        with pytest.raises(
            ValueError,
            match=r"out_scale is .*must be a number above 0 that a float32 holds, or a float32 tensor",
        ):
            attention.run(q, kv, out_scale=scale)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out_scale.shape is \[2\], must be of one element"):
        attention.run(q, kv, out_scale=torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"out_scale.dtype is float16, must be float32"):
        attention.run(q, kv, out_scale=torch.ones(1, device=device).half())
    with pytest.raises(ValueError, match=r"out_scale.device is|out_scale is a"):
        attention.run(q, kv, out_scale=torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"out.dtype is bfloat16, must be float8_e4m3fn"):
        attention.run(q, kv, out=torch.empty_like(q), out_scale=1.0)
    with pytest.raises(ValueError, match=r"out.dtype is float8_e4m3fn, must be bfloat16"):
        attention.run(q, kv, out=torch.empty_like(q, dtype=DTYPE))
    with pytest.raises(ValueError, match=r"float8_out is 1, must be True or False"):
        Attention(4, 2, 64, max_rows=4, max_batch=4, device=device, float8_out=1)  # type: ignore[arg-type]
    plain, q, kv = one_token(device, torch.tensor([3.0, 5.0]), torch.bfloat16, float8_out=False)
    for refused in (1.0, torch.ones(1, device=device)):
        with pytest.raises(
            ValueError, match=r"out_scale is .*must be None, or the Attention made with float8_out=True"
        ):
            plain.run(q, kv, out_scale=refused)


def test_kernels_that_are_not_in_the_package() -> None:
    name = "attention_sm90_f16_to_e4m3_d72_standard"
    assert "attn::Float16, attn::Float8E4M3>" in str(manifest.source_of(name, "sm_90a"))
    assert manifest.compile_options(name) == " --head-dim 72 --float8-out"
