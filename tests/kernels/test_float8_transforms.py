"""Variants that transform K or V of 8-bit caches: they see scaled values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import numpy
import pytest
import torch
from float8_cases import DTYPES, SCALES, Float8Case, rounding
from tiers import mostly_slow
from variant_fuzz.arguments import Sizes
from variant_fuzz.catalogue import entry_of

from attn_backend import Attention

# The variant, the dtypes of Q and of the cache, head_dim, head_dim_v, the form of 8-bit Q's scale.
FORMS: list[tuple[str, torch.dtype, torch.dtype, int, int, str | None]] = [
    ("rope", torch.bfloat16, DTYPES[0], 128, 128, None),
    ("scaled", torch.bfloat16, DTYPES[1], 72, 200, None),
    ("rope_interleaved", torch.float16, DTYPES[1], 64, 64, None),
    ("by_request", torch.float16, DTYPES[0], 64, 64, None),
    ("scaled", torch.bfloat16, DTYPES[0], 64, 64, "head"),
    ("scaled", torch.bfloat16, DTYPES[0], 256, 256, None),
]


def run_and_check(name: str, problem: Float8Case, **options: Any) -> Attention:
    entry, case, spec = entry_of(name), problem.case, problem.case.spec
    args = entry.args(
        numpy.random.default_rng(spec.seed),
        Sizes(spec.qo_lens, spec.kv_lens, spec.num_kv_heads * spec.group_size),
    )
    on_device = {
        name: arg.to(case.device) if isinstance(arg, torch.Tensor) else arg for name, arg in args.items()
    }
    attention = case.attention(variant=entry.variant, **problem.options, **options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, variant_args=on_device, **problem.run_options)
    problem.check(case.out, case.lse, None, rounding(entry.oracle(args), entry.variant, spec.dtype))
    assert attention.schedule().errors == 0
    return attention


@pytest.mark.parametrize("form", mostly_slow(FORMS, fast=2), ids=str)
def test_random_cases(
    device: torch.device, kernel: str | None, form: tuple[str, torch.dtype, torch.dtype, int, int, str | None]
) -> None:
    name, dtype, kv_dtype, head_dim, head_dim_v, q_form = form
    options: dict[str, Any] = {} if kernel is None else {"kernel": kernel}
    for seed in range(8):
        rng = numpy.random.default_rng([seed, 90])
        spec = cases.random_spec(seed + 900, device.type)
        if head_dim != head_dim_v:
            spec = spec.with_(cache_form="pair", table_form="csr")
        spec = spec.with_(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            strided=False,
            logits_soft_cap=0.0,
            sharing=0.9,
        )
        k_form, v_form = (str(of) for of in rng.choice(SCALES[:3] if seed % 2 else SCALES, size=2))
        run_and_check(
            name,
            Float8Case(spec, device, kv_dtype, k_form, v_form, q_form),
            cascade="always" if seed % 2 else False,
            **options,
        )


@pytest.mark.parametrize("head_dim", [512])
def test_wide_heads(device: torch.device, head_dim: int) -> None:
    """Only the generic kernel supports this on a GPU."""
    spec = cases.Spec((1, 30), (200, 90), num_kv_heads=2, group_size=4, head_dim=head_dim, num_ctas=3)
    run_and_check(
        "scaled",
        Float8Case(spec, device, DTYPES[0], "head", "number"),
        **({"kernel": "generic"} if device.type == "cuda" else {}),
    )


@pytest.mark.parametrize("cascade", ["always", False])
def test_shared_prefixes(device: torch.device, kernel: str | None, cascade: str | bool) -> None:
    options: dict[str, Any] = {} if kernel is None else {"kernel": kernel}
    for seed, rows in enumerate((1, 5, 20)):
        spec = cases.Spec(
            (rows,) * 7,
            (200,) * 7,
            num_kv_heads=2,
            group_size=4,
            head_dim=128,
            sharing=0.9,
            num_ctas=5,
            seed=seed,
        )
        attention = run_and_check(
            "rope", Float8Case(spec, device, DTYPES[0], "head", "tensor"), cascade=cascade, **options
        )
        assert (attention.schedule().links.shape[1] > 0) == (cascade == "always")


def test_scales_of_requests_belong_to_one_request_each(device: torch.device) -> None:
    problem = Float8Case(
        cases.Spec((3, 1), (40, 50), num_kv_heads=2, head_dim=128), device, DTYPES[0], "request", "request"
    )
    case, variant = problem.case, entry_of("rope").variant
    attention = case.attention(kv_dtype=DTYPES[0], variant=variant)
    attention.plan(case.view)
    with pytest.raises(
        ValueError,
        match=r"kv.k_scale.shape is \[2, 1\], must be .*, or the Attention made with cascade=False .*: "
        r"variant rope transforms K",
    ):
        case.run(attention)
    run_and_check("rope", problem, cascade=False)
    case.view = replace(case.view, requests=torch.tensor([0, 0, 0, 1], dtype=torch.int32, device=device))
    attention = case.attention(kv_dtype=DTYPES[0], variant=variant, cascade=False)
    attention.plan(case.view)
    with pytest.raises(
        ValueError, match="planned with one level without requests: variant rope transforms K"
    ):
        case.run(attention)
