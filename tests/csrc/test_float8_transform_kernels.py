"""Variants that transform K or V of 8-bit caches, in the attention kernels without a GPU. Rows are
dequantized in shared memory and transformed there.
"""

from __future__ import annotations

from pathlib import Path

import cases
import host_planner
import numpy
import oracle
import pytest
import torch
from device_attention import CACHES, KERNELS, DeviceAttention
from float8_cases import DTYPES, TOLERANCE, Float8Case, rounding
from variant_fuzz.arguments import Sizes
from variant_fuzz.catalogue import entry_of

from attn_backend import Attention, BSRView, KVCache, PageTable

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

# Some columns and all, halves and neighbors as pairs, also ending inside 16 bytes; K, V and both. A transform
# that adds to a row shows where scaling happens.
FORMS = {
    "rope": (torch.bfloat16, 128, DTYPES[0]),
    "rope_interleaved": (torch.float16, 64, DTYPES[1]),
    "scaled": (torch.bfloat16, 256, DTYPES[0]),
}
BATCHES = (  # every kind of row tile, by itself and one after the other
    ((150,), (170,)),
    ((40, 5, 130, 1), (90, 300, 150, 45)),
    ((1, 2, 1, 3), (70, 300, 0, 129)),
)


def run_and_check(
    folder: Path, kernel: str, name: str, problem: Float8Case, **options: object
) -> DeviceAttention:
    entry, case, spec = entry_of(name), problem.case, problem.case.spec
    args = entry.args(
        numpy.random.default_rng(spec.seed),
        Sizes(spec.qo_lens, spec.kv_lens, spec.num_kv_heads * spec.group_size),
    )
    made = case.attention(kernel=kernel, variant=entry.variant, **problem.options, **options)
    attention = DeviceAttention(folder, made, kernel, spec.seed, entry.variant)
    attention.plan(case.view, variant_args=args)
    case.run(attention, out=case.out, lse=case.lse, variant_args=args, **problem.run_options)  # type: ignore[arg-type]
    problem.check(case.out, case.lse, kernel, rounding(entry.oracle(args), entry.variant, spec.dtype))
    assert attention.schedule().errors == 0
    return attention


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_row_tile(emulated: Path, kernel: str, name: str) -> None:
    dtype, head_dim, kv_dtype = FORMS[name]
    scales = (("request and head", "head"), ("number", "request"), ("head", "tensor"))
    for seed, (qo_lens, kv_lens) in enumerate(BATCHES):
        for group_size in (4,) if kernel == "generic" else (1, 4):
            spec = cases.Spec(
                qo_lens,
                kv_lens,
                num_kv_heads=2,
                group_size=group_size,
                head_dim=head_dim,
                dtype=dtype,
                num_ctas=5,
                page_size=5,
                seed=seed,
            )
            run_and_check(
                emulated, kernel, name, Float8Case(spec, "cpu", kv_dtype, *scales[seed]), cascade=False
            )


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_form_of_cache(emulated: Path, kernel: str) -> None:
    dtype, head_dim, kv_dtype = FORMS["rope"]
    for seed, (form, cache) in enumerate(CACHES.items()):
        spec = cases.Spec(
            (1, 70, 3),
            (200, 70, 300),
            num_kv_heads=2,
            group_size=2,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=3,
            seed=seed,
        )
        problem = Float8Case(
            spec.with_(**cache, window_left=90 if seed % 2 else -1), "cpu", kv_dtype, "head", "head"
        )
        attention = run_and_check(emulated, kernel, "rope", problem, cascade=False)
        if kernel != "generic":
            assert attention.launched == (
                "attention" if form in ("pages", "large pages", "ragged") else "attention_rows"
            )


@pytest.mark.parametrize("options", [{"cascade": "always"}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_prefixes_and_chunks(emulated: Path, kernel: str, options: dict[str, object]) -> None:
    dtype, head_dim, kv_dtype = FORMS["rope"]
    for seed, rows in enumerate((1, 20)):
        spec = cases.Spec(
            (rows,) * 5,
            (150,) * 5,
            num_kv_heads=1,
            group_size=4,
            head_dim=head_dim,
            dtype=dtype,
            sharing=0.9,
            num_ctas=5,
            seed=seed,
        )
        attention = run_and_check(
            emulated, kernel, "rope", Float8Case(spec, "cpu", kv_dtype, "head", "tensor"), **options
        )
        assert (attention.schedule().links.shape[1] > 0) == ("cascade" in options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_of_8_bits(emulated: Path, kernel: str) -> None:
    for seed, (qo_lens, kv_lens) in enumerate(BATCHES):
        spec = cases.Spec(
            qo_lens, kv_lens, num_kv_heads=2, group_size=2, head_dim=64, num_ctas=5, page_size=16, seed=seed
        )
        run_and_check(
            emulated, kernel, "scaled", Float8Case(spec, "cpu", DTYPES[0], "head", "number", "head")
        )


@pytest.mark.parametrize(
    ("kernel", "head_dim", "head_dim_v"),
    [*((kernel, 72, 200) for kernel in KERNELS), ("generic", 512, 512)],
)
def test_other_widths(emulated: Path, kernel: str, head_dim: int, head_dim_v: int) -> None:
    spec = cases.Spec(
        (5, 70),
        (90, 150),
        num_kv_heads=2,
        group_size=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        cache_form="pair",
        num_ctas=3,
    )
    run_and_check(emulated, kernel, "scaled", Float8Case(spec, "cpu", DTYPES[1], "number", "head"))


def test_latents(emulated: Path) -> None:
    """They are scaled while loading: K and V are the same bytes, and each is transformed separately."""
    entry, generator = entry_of("scaled"), torch.Generator().manual_seed(3)
    latents = torch.randn(14, 16, 576, generator=generator).to(DTYPES[0])
    q = torch.randn(40, 4, 576, dtype=torch.bfloat16, generator=generator)
    qo_indptr, block_table = torch.tensor([0, 37, 40]), torch.arange(14, dtype=torch.int32).view(2, 7)
    view = BSRView(
        qo_indptr, PageTable.block_table(block_table, torch.tensor([100, 66], dtype=torch.int32), 16)
    )
    args = {"key_scale": torch.tensor([1.5])}
    made = Attention(
        4,
        1,
        576,
        head_dim_v=512,
        kv_dtype=DTYPES[0],
        kernel="generic",
        device="cpu",
        max_rows=40,
        max_batch=2,
        num_ctas=3,
        variant=entry.variant,
    )
    attention = DeviceAttention(emulated, made, "generic", 0, entry.variant)
    attention.plan(view)
    out = attention.run(q, KVCache.from_latent(latents, scale=0.75), variant_args=args)
    rows = (latents.double() * 0.75).to(torch.bfloat16).view(2, 112, 1, 576)
    for request, (begin, end, kv_len) in enumerate(((0, 37, 100), (37, 40, 66))):
        k = rows[request, :kv_len]
        expected, _ = oracle.attention(
            q[begin:end], k, k[..., :512], variant=entry.oracle(args), request=request, first_row=begin
        )
        assert (out[begin:end].double() - expected).norm() <= TOLERANCE * expected.norm()
