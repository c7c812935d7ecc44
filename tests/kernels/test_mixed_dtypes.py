"""Caches with the other 16-bit type than Q and the output: Q is rounded to the cache's type, the output has
Q's type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import case_tensors
import cases
import mixed_cases
import numpy
import pytest
import torch
from attention_kernels import kernel_of
from compositions import Shape, cascade_problem, tree_problem
from float8_cases import rounded, rounding
from float8_outputs import check_rounded, out_of_8_bits, scale_for
from mixed_cases import MIXTURES
from tiers import mostly_slow
from variant_fuzz.arguments import Sizes
from variant_fuzz.catalogue import entry_of

from attn_backend import Attention, BSRView, KVCache, PageTable

# head_dim, head_dim_v, whether V lies in K's bytes, query heads of a KV head
WIDTHS = [
    (192, 128, False, 3),
    (72, 200, False, 4),
    (512, 512, False, 16),
    (576, 512, True, 16),
    (576, 512, False, 5),
]


def run_and_check(case: case_tensors.Case, **options: Any) -> Attention:
    attention = case.attention(kv_dtype=case.kv.dtype, **options)
    attention.plan(case.view)
    out = case.run(attention, out=case.out, lse=case.lse)
    assert (out.dtype, attention.kv_dtype) == (case.spec.dtype, mixed_cases.other(case.spec.dtype))
    mixed_cases.check(case, case.out, case.lse)
    assert case.run(attention)[: case.rows].equal(case.out[: case.rows]), (
        "another buffer, no lse, the same bits"
    )
    return attention


@pytest.mark.parametrize("block", mostly_slow(range(10), fast=2, without_gpu=5))
@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_random_batches(
    device: torch.device, kernel: str | None, dtypes: tuple[torch.dtype, torch.dtype], block: int
) -> None:
    options: tuple[dict[str, Any], ...] = ({"cascade": "always"}, {"batch_invariant": True}, {})
    for seed in range(10 * block, 10 * (block + 1)):
        spec = cases.random_spec(seed + 2500, device.type).with_(dtype=dtypes[0])
        if device.type == "cuda" and spec.head_dim not in (64, 128):  # each is compiled
            spec = spec.with_(head_dim=64)
        run_and_check(
            mixed_cases.build(spec, device),
            **options[seed % 3],
            **({} if kernel is None else {"kernel": kernel}),
        )


@pytest.mark.parametrize("dtypes", mostly_slow(MIXTURES, fast=1), ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_other_widths(
    device: torch.device,
    kernel: str | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    widths: tuple[int, int, bool, int],
) -> None:
    head_dim, head_dim_v, v_in_k, group_size = widths
    spec = cases.Spec(
        (1, 33, 3),
        (200, 90, 301),
        num_kv_heads=1,
        group_size=group_size,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        v_in_k=v_in_k,
    )
    spec = spec.with_(dtype=dtypes[0], cache_form="pair", num_ctas=5, page_size=16)
    run_and_check(mixed_cases.build(spec, device), **({} if kernel is None else {"kernel": kernel}))


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_queries_in_two_parts(
    device: torch.device, kernel: str | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    spec = cases.Spec(
        (1, 20),
        (100, 70),
        num_kv_heads=1,
        group_size=16,
        head_dim=576,
        head_dim_v=512,
        v_in_k=True,
        dtype=dtypes[0],
        num_ctas=3,
    )
    case = mixed_cases.build(spec.with_(cache_form="pair"), device)
    attention = case.attention(kv_dtype=dtypes[1], kernel=kernel)
    attention.plan(case.view)
    q, q_rope = case.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), case.q[..., 512:].contiguous()
    attention.run(q, case.kv, q_rope=q_rope, out=case.out, lse=case.lse)
    mixed_cases.check(case, case.out, case.lse)
    assert attention.run(case.q, case.kv).equal(case.out)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_compositions(
    device: torch.device, kernel: str | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for seed, make in enumerate((cascade_problem, tree_problem)):
        rng = numpy.random.default_rng([seed, 95])
        shape = Shape(
            num_kv_heads=2,
            group_size=3,
            page_size=16,
            head_dim=64,
            dtype=torch.bfloat16,
            num_ctas=[None, 5][seed],
            seed=seed,
        )
        problem = make(rng, shape, device, 2)  # values that both types have
        if dtypes[0] == torch.float16:
            problem = replace(problem, q=problem.q.half(), out=problem.out.half())
        else:
            memory = problem.memory
            kv = KVCache.from_pair(rounded(memory.kv.k, torch.float16), rounded(memory.kv.v, torch.float16))
            problem = replace(
                problem,
                memory=replace(memory, kv=kv, k_slots=memory.k_slots.half(), v_slots=memory.v_slots.half()),
            )
        problem.run(problem.attention(dtype=dtypes[0], kv_dtype=dtypes[1], kernel=kernel))
        problem.check()


@pytest.mark.parametrize("dtypes", mostly_slow(MIXTURES, fast=1), ids=str)
@pytest.mark.parametrize("name", ["rope", "scaled", "alibi", "sigmoid"])
def test_variants(
    device: torch.device, kernel: str | None, dtypes: tuple[torch.dtype, torch.dtype], name: str
) -> None:
    """Transforms of Q, K and V, logits, and no softmax."""
    entry = entry_of(name)
    for seed, (qo_lens, kv_lens) in enumerate(
        (((1, 70, 3), (200, 90, 30)), ((1,) * 5, (150, 40, 1, 64, 300)))
    ):
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=4,
            head_dim=64,
            dtype=dtypes[0],
            sharing=0.9,
            num_ctas=3,
            seed=seed,
        )
        case = mixed_cases.build(spec, device)
        args = entry.args(numpy.random.default_rng(seed), Sizes(qo_lens, kv_lens, 8))
        on_device = {
            name: arg.to(device) if isinstance(arg, torch.Tensor) else arg for name, arg in args.items()
        }
        attention = case.attention(kv_dtype=dtypes[1], variant=entry.variant, kernel=kernel)
        attention.plan(case.view)
        lse = case.lse if entry.variant.uses_softmax else None
        case.run(attention, out=case.out, lse=lse, variant_args=on_device)
        mixed_cases.check(case, case.out, lse, rounding(entry.oracle(args), entry.variant, dtypes[1]))


def test_sinks_and_outputs_of_8_bits(device: torch.device, kernel: str | None) -> None:
    for dtype, _ in MIXTURES:
        case = mixed_cases.build(
            cases.Spec((1, 40, 3), (200, 90, 30), head_dim=64, dtype=dtype, num_ctas=5), device
        )
        attention = case.attention(kv_dtype=case.kv.dtype, sinks=True, float8_out=True, kernel=kernel)
        attention.plan(case.view)
        sinks = torch.linspace(-2, 3, case.q.shape[1], device=device)
        case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
        mixed_cases.check(case, case.out, case.lse, sinks=sinks)
        expected, out = case.expected(sinks=sinks)[0], out_of_8_bits(case)
        scale = scale_for(expected, 0.1)
        case.run(attention, out=out, sinks=sinks, out_scale=scale)
        check_rounded(out[: case.rows], expected, scale, cases.TOLERANCE[torch.bfloat16], case.spec)


def test_numbers_that_float16_does_not_have(device: torch.device, kernel: str | None) -> None:
    """Q in bfloat16 becomes the largest float16, not infinity; NaN stays NaN.

    Values beyond the output's range become infinite, as in any float16 product.
    """
    k = torch.full((3, 1, 64), 2.0**-14, device=device)
    v = torch.arange(3, device=device, dtype=torch.float32)[:, None, None].expand(3, 1, 64)
    room: dict[str, Any] = {"device": device, "max_rows": 4, "max_batch": 1, "kernel": kernel_of(device)}
    view = BSRView(
        torch.tensor([0, 4], dtype=torch.int32, device=device),
        PageTable.ragged(torch.tensor([0, 3], dtype=torch.int32, device=device)),
        causal=False,
    )
    q = torch.zeros(4, 1, 64, dtype=torch.bfloat16, device=device)
    q[0, 0, 0], q[1, 0, 0], q[2, 0, 0], q[3, 0, 0] = 3e38, -torch.inf, torch.nan, 65280
    attention = Attention(1, 1, 64, dtype=torch.bfloat16, kv_dtype=torch.float16, **room)
    attention.plan(view)
    out, lse = attention.run(q, KVCache.from_ragged(k.half(), v.half()), sm_scale=1.0, return_lse=True)
    assert lse[[0, 1, 3], 0].tolist() == pytest.approx(
        [
            65504 / 2**14 + torch.tensor(3.0).log().item(),
            -65504 / 2**14 + 1.0986123,
            65280 / 2**14 + 1.0986123,
        ]
    )
    assert out[[0, 1, 3]].float().sub(1).abs().max() < 0.01
    assert out[2].isnan().all()

    attention = Attention(1, 1, 64, dtype=torch.float16, kv_dtype=torch.bfloat16, **room)
    attention.plan(view)
    out = attention.run(
        torch.ones(4, 1, 64, dtype=torch.float16, device=device),
        KVCache.from_ragged(k.bfloat16(), (v * 1e6).bfloat16()),
    )
    assert out.isposinf().all()
    out = attention.run(
        torch.ones(4, 1, 64, dtype=torch.float16, device=device),
        KVCache.from_ragged(k.bfloat16(), (v * 5e4).bfloat16()),
    )
    assert out.float().sub(5e4).abs().max() < 0.01 * 5e4, "V beyond float16 counts as it is"


def test_refusals(device: torch.device) -> None:
    shape: dict[str, Any] = {"device": device, "max_rows": 4, "max_batch": 1}
    with pytest.raises(
        ValueError,
        match=r"kv_dtype is torch.float32, must be None, dtype = torch.float16, .*, torch.uint8 or "
        r"torch.bfloat16$",
    ):
        Attention(4, 2, 64, dtype=torch.float16, kv_dtype=torch.float32, **shape)
    with pytest.raises(
        ValueError,
        match=r"q_dtype is torch.float16, must be None, dtype = torch.bfloat16, or kv_dtype if that is "
        r"torch.float8_e4m3fn",
    ):
        Attention(4, 2, 64, dtype=torch.bfloat16, kv_dtype=torch.float16, q_dtype=torch.float16, **shape)
    if device.type == "cpu":
        with pytest.raises(
            ValueError,
            match=r"kv_dtype is torch.bfloat16, must be None, dtype = torch.float32, .* or torch.uint8$",
        ):
            Attention(4, 2, 64, dtype=torch.float32, kv_dtype=torch.bfloat16, **shape)
    attention = Attention(4, 2, 64, dtype=torch.bfloat16, kv_dtype=torch.float16, **shape)
    indptr = torch.tensor([0, 4], dtype=torch.int32, device=device)
    attention.plan(BSRView(indptr, PageTable.ragged(indptr)))
    q, kv = torch.zeros(4, 4, 64, device=device), torch.zeros(4, 2, 64, device=device)
    with pytest.raises(ValueError, match=r"kv.k.dtype is bfloat16, must be float16"):
        attention.run(q.bfloat16(), KVCache.from_ragged(kv.bfloat16(), kv.bfloat16()))
    with pytest.raises(ValueError, match=r"q.dtype is float16, must be bfloat16"):
        attention.run(q.half(), KVCache.from_ragged(kv.half(), kv.half()))
    with pytest.raises(ValueError, match=r"k_scale is 0.5, must be None"):
        KVCache.from_pair(kv[None].half(), kv[None].half(), k_scale=0.5)
