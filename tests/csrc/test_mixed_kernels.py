"""The attention kernels over caches with the other 16-bit type than Q, without a GPU
(test_attention_kernels.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_tensors
import cases
import host_planner
import mixed_cases
import numpy
import pytest
import torch
from device_attention import KERNELS, DeviceAttention
from float8_cases import rounding
from float8_outputs import check_rounded, out_of_8_bits, scale_for
from variant_fuzz.arguments import Sizes
from variant_fuzz.catalogue import entry_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

# Decode, prefill and both: row tiles of every kind, some shared by CTAs. dtype and head_dim, in turn.
BATCHES = (
    ((1, 70, 3, 20), (200, 70, 300, 150)),
    ((1,) * 6, (70, 300, 1, 0, 64, 129)),
    ((40, 1, 260), (140, 500, 300)),
)
FORMS = ((torch.float16, 64), (torch.bfloat16, 128))


def run_and_check(
    emulated: Path, kernel: str, case: case_tensors.Case, seed: int, wants_lse: bool = True, **options: Any
) -> DeviceAttention:
    attention = DeviceAttention(
        emulated, case.attention(kernel=kernel, kv_dtype=case.kv.dtype, **options), kernel, seed
    )
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse if wants_lse else None)  # type: ignore[arg-type]
    mixed_cases.check(case, case.out, case.lse if wants_lse else None)
    assert attention.schedule().errors == 0
    return attention


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_cases(emulated: Path, kernel: str, form: tuple[torch.dtype, int]) -> None:
    """Q by TMA and gathered, K and V by boxes and by rows, windows, soft caps, shared prefixes, chunks."""
    dtype, head_dim = form
    launched = set()
    for number, (qo_lens, kv_lens) in enumerate(BATCHES):
        rng = numpy.random.default_rng([number, head_dim, 97])
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=(4, 3, 1)[number],
            head_dim=head_dim,
            dtype=dtype,
            seed=number,
            aligned=True,
        )
        spec = spec.with_(
            page_size=(16, 3, 64)[number], num_ctas=(5, 3, 11)[number], sharing=0.9, strided=number == 1
        )
        spec = spec.with_(
            window_left=int(rng.choice([-1, 60])), logits_soft_cap=float(rng.choice([0.0, 20.0]))
        )
        options = ({"cascade": "always"}, {"batch_invariant": True}, {"cascade": False})[number]
        launched.add(
            run_and_check(
                emulated, kernel, mixed_cases.build(spec, "cpu"), number, number != 2, **options
            ).launched
        )
    assert launched == ({"attention", "attention_rows"} if kernel == "hopper" else {"attention"})


@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"), [(torch.bfloat16, 576, 512), (torch.float16, 72, 200)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_widths(
    emulated: Path, kernel: str, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> None:
    """Also latents, with Q in two parts."""
    is_latent = head_dim > head_dim_v
    spec = cases.Spec(
        (1, 9),
        (70, 150),
        num_kv_heads=1,
        group_size=16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        v_in_k=is_latent,
        dtype=dtype,
        num_ctas=3,
    )
    case = mixed_cases.build(spec.with_(cache_form="pair"), "cpu")
    attention = run_and_check(emulated, kernel, case, 1)
    if is_latent:
        out = attention.run(
            case.q[..., :head_dim_v].contiguous(), case.kv, q_rope=case.q[..., head_dim_v:].contiguous()
        )
        assert out.equal(case.out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_variant_that_transforms_q_and_k(emulated: Path, kernel: str) -> None:
    entry = entry_of("rope")
    for seed, (qo_lens, kv_lens) in enumerate(BATCHES[::2]):
        spec = cases.Spec(qo_lens, kv_lens, num_kv_heads=2, group_size=2, head_dim=64, num_ctas=5, seed=seed)
        case = mixed_cases.build(spec, "cpu")
        args = entry.args(numpy.random.default_rng(seed), Sizes(qo_lens, kv_lens, 4))
        attention = DeviceAttention(
            emulated,
            case.attention(kernel=kernel, kv_dtype=case.kv.dtype, variant=entry.variant),
            kernel,
            seed,
            entry.variant,
        )
        attention.plan(case.view, variant_args=args)
        case.run(attention, out=case.out, lse=case.lse, variant_args=args)  # type: ignore[arg-type]
        mixed_cases.check(
            case, case.out, case.lse, rounding(entry.oracle(args), entry.variant, case.kv.dtype)
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_of_8_bits_and_large_numbers(emulated: Path, kernel: str) -> None:
    """Q beyond the float16 range becomes the largest float16."""
    case = mixed_cases.build(cases.Spec((1, 40), (60, 90), head_dim=64, num_ctas=3), "cpu")
    case.q[:, 0, 0] = torch.tensor([1e30, -torch.inf, 7e4]).bfloat16().repeat(14)[: len(case.q)]
    case.kv.k[..., 0] *= 2.0**-14
    case.k_slots[..., 0] *= 2.0**-14
    attention = DeviceAttention(
        emulated, case.attention(kernel=kernel, kv_dtype=case.kv.dtype, float8_out=True), kernel
    )
    attention.plan(case.view)
    expected = mixed_cases.as_multiplied(case).expected()
    case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
    case_tensors.check(case, case.out, case.lse, expected, mixed_cases.TOLERANCE)
    out, scale = out_of_8_bits(case), scale_for(expected[0], 0.1)
    case.run(attention, out=out, out_scale=scale)  # type: ignore[arg-type]
    check_rounded(out[: case.rows], expected[0], scale, cases.TOLERANCE[torch.bfloat16], case.spec)
