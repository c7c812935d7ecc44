"""Transforms of Q, K and V in the attention kernels' shared memory, without a GPU: every kind of row tile,
every way to load caches, prefixes, chunks.

The emulation gives wgmma NaN for data written without a fence, and reports threads that wait forever.
"""

from __future__ import annotations

from pathlib import Path

import case_tensors
import cases
import device_attention
import forests
import host_planner
import numpy
import pytest
import torch
from compositions import Shape
from device_attention import CACHES, DeviceAttention
from tiers import in_turn
from variant_fuzz.arguments import Sizes
from variant_fuzz.catalogue import Entry, entry_of

from attn_backend.jit import compilers, cubins, manifest
from attn_backend.jit.build import fault
from attn_backend.jit.manifest import HeadDims
from attn_backend.variants import builtin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(host_planner.COMPILER is None or compilers.cpp_compiler() is None, reason="needs g++"),
]

CPU = torch.device("cpu")
KERNELS = device_attention.KERNELS
# The forms: halves and neighbors as pairs, some columns and all, Q, K and V, all requests alike or each
# differently, with a mask and a score function.
FORMS = {
    "rope": (torch.bfloat16, 128),
    "rope_interleaved": (torch.float16, 64),
    "rope_at": (torch.bfloat16, 64),
    "rope_streaming": (torch.float16, 128),
    "rope_tree_mask_alibi": (torch.bfloat16, 64),
    "scaled": (torch.bfloat16, 256),
    "by_request": (torch.float16, 64),
}


def check_case(folder: Path, entry: Entry, spec: cases.Spec, kernel: str) -> DeviceAttention:
    case = case_tensors.build(spec, CPU)
    heads = spec.num_kv_heads * spec.group_size
    args = entry.args(numpy.random.default_rng(spec.seed), Sizes(spec.qo_lens, spec.kv_lens, heads))
    made = case.attention(kernel=kernel, cascade=False, variant=entry.variant)
    attention = DeviceAttention(folder, made, kernel, spec.seed, entry.variant)
    attention.plan(case.view, variant_args=args if spec.seed % 2 else None)
    case.run(attention, out=case.out, lse=case.lse, variant_args=args)  # type: ignore[arg-type]
    case_tensors.check(case, case.out, case.lse, case.expected(variant=entry.oracle(args)))
    case_tensors.check_padding(case)
    return attention


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_row_tile(emulated: Path, kernel: str, name: str) -> None:
    entry, (dtype, head_dim) = entry_of(name), FORMS[name]
    lens = (((200,), (200,)), ((40, 5, 130, 20), (90, 500, 200, 45)), ((1, 2, 1, 3), (70, 300, 0, 129)))
    first_group_size = list(FORMS).index(name) % 2
    turn = list(FORMS).index(name) + KERNELS.index(kernel)
    for seed, (qo_lens, kv_lens) in in_turn(lens, turn, without_gpu=2):
        sizes = {
            "num_kv_heads": 2,
            "group_size": (1, 4)[(first_group_size + seed) % 2] if kernel == "hopper" else 4,
            "head_dim": head_dim,
            "num_ctas": 5,
            "padding_rows": 2,
            "page_size": 5,
        }
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            dtype=dtype,
            seed=seed,
            aligned=True,
            causal=entry.is_plain or entry.variant.causal,
            **sizes,
        )
        check_case(emulated, entry, spec, kernel)


def test_large_row_tiles_after_small_ones(emulated: Path) -> None:
    """One CTA computes both. After a row tile of 16 rows the ring holds few stages, and for wide heads fewer
    than transforms might wait for.
    """
    entry = entry_of("scaled")
    for seed, (qo_lens, kv_lens) in enumerate(
        (((1, 40, 2, 100), (300, 700, 500, 400)), ((2, 130, 1, 20, 1), (70, 600, 900, 450, 200)))
    ):
        for dtype, head_dim in ((torch.bfloat16, 256), (torch.float16, 128), (torch.bfloat16, 64)):
            sizes = {"num_kv_heads": 1, "group_size": 2, "head_dim": head_dim, "num_ctas": 1, "page_size": 16}
            check_case(
                emulated,
                entry,
                cases.Spec(qo_lens, kv_lens, dtype=dtype, seed=seed, aligned=True, **sizes),
                "hopper",
            )


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_form_of_cache(emulated: Path, kernel: str, cache: str) -> None:
    for seed, name in enumerate(("rope", "by_request")):
        dtype, head_dim = FORMS[name]
        sizes = {"num_kv_heads": 2, "group_size": 2, "head_dim": head_dim, "num_ctas": 3}
        spec = cases.Spec(
            (1, 70, 3, 20),
            (200, 70, 300, 150),
            dtype=dtype,
            aligned=True,
            seed=seed,
            window_left=90 if seed else -1,
            **sizes,
        )
        attention = check_case(emulated, entry_of(name), spec.with_(**CACHES[cache]), kernel)
        if kernel == "hopper":
            assert attention.launched == (
                "attention" if cache in ("pages", "large pages", "ragged") else "attention_rows"
            )


@pytest.mark.parametrize("options", [{"cascade": "always"}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_prefixes_and_chunks(emulated: Path, kernel: str, options: dict[str, object]) -> None:
    """A rotated prefix is shared; a prefix that is transformed per request is not."""
    for name in ("rope", "scaled", "by_request", "rope_streaming"):
        entry, (dtype, head_dim) = entry_of(name), FORMS[name]
        merged = 0
        for seed in range(3):
            rng = numpy.random.default_rng([seed, 47])
            shape = Shape(
                num_kv_heads=2,
                group_size=2,
                page_size=16,
                head_dim=head_dim,
                dtype=dtype,
                num_ctas=7,
                logits_soft_cap=0.0,
            )
            batch = forests.random_batch(
                rng,
                shape.page_size,
                kv_cost=shape.num_kv_heads * head_dim * 16,
                budget=1e7,
                max_requests=12,
                max_rows=60,
            )
            problem = forests.make_problem(rng, shape, batch, CPU)
            args = entry.args(rng, Sizes(batch.qo_lens, batch.kv_lens, 4))
            made = problem.attention(kernel=kernel, variant=entry.variant, **options)
            attention = DeviceAttention(emulated, made, kernel, seed, entry.variant)
            problem.run(attention, batch.view(rng, CPU), variant_args=args)  # type: ignore[arg-type]
            problem.check(problem.expected(variant=entry.oracle(args)))
            merged += attention.schedule().links.shape[1]
        if "cascade" in options:
            assert (merged > 0) == (not entry.variant.tells_requests_apart)


@pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(("design", "kv_element"), [("sm90", None), ("sm90", "e4m3"), ("sm80", "e4m3")])
def test_they_compile_into_each_kernel(
    design: str, kv_element: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = manifest.attention_source(
        design, manifest.KernelShape("bf16", HeadDims.of(128), kv_element), manifest.USER_VARIANT
    )
    text = manifest.variant_text(builtin.rope(builtin.rope_frequencies(128))) + source
    monkeypatch.setattr(cubins, "kernel_sources", lambda arch: {"rope": text})
    assert fault(cubins.compile_kernel("rope", "sm_90a")[1]) in ("", "SPILLS"), (
        "its products wait for each other"
    )
