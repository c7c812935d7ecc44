"""Caches whose tokens and heads have their own scales: one each (int8, e4m3, int4), or one for 16 columns
(NVFP4, and SGLang's fp4_mx_block16); K and V may differ.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import case_tensors
import cases
import cpu_isa
import pytest
import torch
from append_problems import HEADS
from float8_cases import FP4_DTYPES, INT4, NVFP4, PAIR, ROUNDED_TOLERANCE, TOKEN_DTYPES, Float8Case
from tiers import mostly_slow
from token_scaled_caches import token_scaled_cache
from torch import Tensor
from variant_fuzz.catalogue import by_reference

from attn_backend import (
    Attention,
    BlockScales,
    BSRView,
    KVCache,
    PageTable,
    append_kv,
    append_mla_kv,
    append_qkv,
)
from attn_backend.jit import compilers, progress
from attn_backend.kernels.append import append_rounded
from attn_backend.variants import builtin

CPU = torch.device("cpu")
DTYPES = (*TOKEN_DTYPES, *FP4_DTYPES, PAIR)


def attention(head_dim: int = 64, **options: Any) -> Attention:
    made = {"device": "cpu", "max_rows": 3, "max_batch": 1, "token_scales": True} | options
    return Attention(HEADS, HEADS, head_dim, **made)


def run(problem: Float8Case, **options: object) -> None:
    case = problem.case
    attention = case.attention(**problem.options, **options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    problem.check(case.out, case.lse)
    assert attention.schedule().errors == 0


def random_case(seed: int, device: torch.device, is_fp4: bool) -> Float8Case:
    """is_fp4: V has FP4 numbers, perhaps K, too."""
    spec = cases.random_spec(seed, device.type)
    if is_fp4:
        dtype, head_dims = (*FP4_DTYPES, PAIR)[seed // 4 % 3], (64, 128, 192, 256)
        if (seed % 5 == 0 or dtype == PAIR) and spec.table_form != "ragged":
            spec = spec.with_(head_dim_v=64 if seed % 5 == 0 else None, cache_form="pair")
    else:
        dtype = TOKEN_DTYPES[seed // 2 % 3]
        head_dims = (64, 96, 128, 256) if dtype == INT4 else (64, 72, 128, 256)
    spec = spec.with_(head_dim=head_dims[seed % 4], strided=spec.strided and device.type == "cpu")
    if spec.dtype == torch.float32 and device.type == "cuda":
        spec = spec.with_(dtype=torch.bfloat16)
    return Float8Case(spec, device, dtype, "token", "token")


@pytest.mark.parametrize("is_fp4", [False, True], ids=["token", "fp4"])
@pytest.mark.parametrize("block", mostly_slow(range(10), fast=2))
def test_random_cases(device: torch.device, kernel: str | None, block: int, is_fp4: bool) -> None:
    for seed in range(12 * block, 12 * (block + 1)):
        options = {} if kernel is None else {"kernel": kernel}
        run(random_case(seed, device, is_fp4), cascade=("always", True, False)[seed % 3], **options)


RUN_CASES = """\
import torch
from test_token_scales import random_case, run
for seed in range(16):
    for is_fp4 in (False, True):
        run(random_case(seed, torch.device("cpu"), is_fp4))
"""


@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_every_instruction_set(isa: str) -> None:
    program = f"import sys\nsys.path[:0] = {sys.path}\n{RUN_CASES}"
    subprocess.run([sys.executable, "-c", program], env=cpu_isa.environment(isa), check=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_and_chunks(device: torch.device, kernel: str | None, dtype: torch.dtype | str) -> None:
    spec = cases.Spec(
        (3, 1, 20), (90, 400, 64), num_kv_heads=2, group_size=4, head_dim=128, seed=DTYPES.index(dtype)
    )
    problem = Float8Case(spec.with_(logits_soft_cap=20.0), device, dtype, "token", "token")
    case, sinks = problem.case, torch.linspace(-2, 3, 8, device=device)
    attention = case.attention(kernel=kernel, sinks=True, batch_invariant=True, **problem.options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
    expected, expected_lse = problem.expected(sinks=sinks.cpu())
    assert (case.out[: case.rows].double() - expected).norm() <= ROUNDED_TOLERANCE * expected.norm()
    assert (case.lse[: case.rows].double() - expected_lse).abs().max() <= 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interprets", [False, True])
def test_variants_see_scaled_rows(
    dtype: torch.dtype | str, interprets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no C++ compiler is found. The variant transforms K."""
    if interprets:
        monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
        monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
        monkeypatch.setattr(progress, "warned", set())
    spec = cases.Spec(
        (5, 1, 20), (40, 50, 20), group_size=2, dtype=torch.float32, sharing=0.8, num_ctas=3, head_dim=64
    )
    problem = Float8Case(spec, CPU, dtype, "token", "token")
    case, variant = problem.case, builtin.rope(builtin.rope_frequencies(32))
    attention = case.attention(variant=variant, **problem.options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(case, case.out, case.lse, problem.expected(variant=by_reference(variant, {})))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_of_the_engine(dtype: torch.dtype | str) -> None:
    """Rows and scales that share pages, appended and read on a CPU."""
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 70, HEADS, 64, generator=generator).bfloat16()
    q = torch.randn(3, HEADS, 64, generator=generator).bfloat16()
    cache = token_scaled_cache(dtype, 5, 16, 64, "HND")
    append_kv(k, v, cache, torch.arange(70))
    made = attention(kv_dtype=dtype)
    table = PageTable.block_table(torch.arange(5, dtype=torch.int32)[None], torch.tensor([70]).int(), 16)
    made.plan(BSRView(torch.tensor([0, 3], dtype=torch.int32), table))
    out = made.run(q, cache)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, k, v)),
        attn_mask=torch.arange(70)[None] <= torch.arange(67, 70)[:, None],
    ).transpose(0, 1)
    assert (out.double() - exact).norm() <= (0.04 if isinstance(dtype, torch.dtype) else 0.2) * exact.norm()


@pytest.mark.parametrize("dtype", [torch.int8, NVFP4, PAIR], ids=str)
def test_pages_of_one_token(dtype: torch.dtype | str) -> None:
    kv = token_scaled_cache(dtype, 3, 16, 64, "apart").by_slot()
    columns = 32 if dtype == NVFP4 else 64
    assert kv.k.shape == (48, 1, HEADS, columns)
    assert (kv.stored_dtype, kv.head_dim) == (dtype, 64)
    scales = kv.k_scale.blocks if isinstance(kv.k_scale, BlockScales) else kv.k_scale
    assert isinstance(scales, Tensor)
    assert scales.shape == (48, 1, HEADS, *([4] if dtype == NVFP4 else []))


def test_pages_that_hold_their_scales() -> None:
    kv = token_scaled_cache(torch.int8, 3, 16, 64, "NHD").by_slot()
    assert isinstance(kv.k_scale, Tensor)
    assert kv.k_scale.shape == (48, 1, HEADS)
    assert kv.k_scale[17].data_ptr() - kv.k[17].data_ptr() == 64
    apart = torch.ones(3, 20, HEADS)[:, :16]
    rows = torch.zeros(2, 3, 16, HEADS, 64, dtype=torch.int8)
    for other in (
        KVCache.from_pair(*rows, k_scale=apart, v_scale=apart),
        token_scaled_cache(NVFP4, 3, 16, 64, "NHD"),
    ):
        with pytest.raises(ValueError, match=r"kv\.k_scale is .*, must be in pages as many tokens apart"):
            other.by_slot()


def view_of_one_row(tokens: int) -> BSRView:
    """One request, on page 0."""
    table = PageTable.block_table(torch.zeros(1, 1).int(), torch.tensor([tokens]).int(), 16)
    return BSRView(torch.tensor([0, 1]).int(), table)


REFUSED = {
    r"token_scales is False, must be True with kv_dtype=torch.int8": {
        "kv_dtype": torch.int8,
        "token_scales": None,
    },
    r"token_scales is False, must be True with kv_dtype='int4'": {"kv_dtype": INT4, "token_scales": False},
    r"kv_dtype is torch.uint8, must be another one: .*; pass 'int4', .* for bytes of two columns": {
        "kv_dtype": torch.uint8,
        "token_scales": None,
    },
    r"kv_dtype is None, must be torch.float8_e4m3fn, torch.int8, 'int4', .* with token_scales=": {},
    r"kv_dtype is torch.float8_e5m2, must be torch.float8_e4m3fn, ": {"kv_dtype": torch.float8_e5m2},
    r"kv_dtype is torch.uint8, must be torch.float8_e4m3fn, ": {"kv_dtype": torch.uint8},
    r"kv_dtype is \{\}, must be torch.float8_e4m3fn, ": {"kv_dtype": {}},  # not hashable
    r"head_dim_v is 48, must be a multiple of 32 with kv_dtype='int4'": {
        "kv_dtype": INT4,
        "head_dim_v": 48,
        "token_scales": None,
    },
    r"head_dim is 96, must be a multiple of 64 with kv_dtype='int8_k_nvfp4_v'": {
        "head_dim": 96,
        "kv_dtype": PAIR,
    },
    r"head_dim is 96, must be a multiple of 64 with kv_dtype='nvfp4'": {
        "head_dim": 96,
        "kv_dtype": NVFP4,
        "token_scales": None,
    },
    r"kv_dtype is 'int3', must be .*'int4', 'nvfp4', 'fp4_mx_block16', 'int8_k_nvfp4_v' or None": {
        "kv_dtype": "int3",
        "token_scales": False,
    },
    r"kv_dtype is \['int4'\], must be a torch.dtype, 'int4', ": {"kv_dtype": ["int4"], "token_scales": None},
    r"q_dtype is torch.int8, must be None, dtype = torch.bfloat16": {
        "kv_dtype": INT4,
        "q_dtype": torch.int8,
    },
    r"q_dtype is torch.float8_e4m3fn, must be None or dtype = torch.bfloat16 with token_scales=True": {
        "kv_dtype": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
    },
    r"q_dtype is torch.int8, must be None, dtype": {"kv_dtype": torch.int8, "q_dtype": torch.int8},
    r"token_scales is 1, must be True, False or None": {"kv_dtype": torch.int8, "token_scales": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_objects(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**REFUSED[message])


def test_refused_runs_and_appends() -> None:
    kv = token_scaled_cache(torch.float8_e4m3fn, 2, 16, 64, "NHD")
    q, view = torch.zeros(1, HEADS, 64).bfloat16(), view_of_one_row(3)
    plain, of_tokens = (
        attention(kv_dtype=torch.float8_e4m3fn, token_scales=token_scales) for token_scales in (False, True)
    )
    plain.plan(view)
    of_tokens.plan(view)
    with pytest.raises(ValueError, match=r"kv\.k_scale\.shape is \[2, 16, 3\], must be .*token_scales=True"):
        plain.run(q, kv)
    for scale, message in (
        (None, r"kv\.v_scale is None, must be a tensor \[pages, page_size, num_kv_heads\]"),
        (0.5, r"kv\.v_scale is a number, must be a tensor \[pages, page_size, num_kv_heads\]"),
        (torch.ones(HEADS), r"kv\.v_scale\.shape is \[3\], must be \[pages = 2, page_size = 16"),
        (torch.ones(2, 16, 3).double(), r"kv\.v_scale\.dtype is float64, must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            of_tokens.run(q, KVCache.unchecked(kv.k, kv.v, kv.k_scale, scale))
    slots = torch.zeros(1).long()
    with pytest.raises(ValueError, match=r"k is .*, must be bfloat16, float16 or float32: append computes"):
        append_kv(q.to(torch.float8_e4m3fn), q.to(torch.float8_e4m3fn), kv, slots)
    one = torch.ones(1, 1, 1).expand(2, 16, HEADS)
    with pytest.raises(ValueError, match=r"kv\.k_scale\.stride\(.\) is 0, must be such that no two"):
        append_kv(q, q, KVCache.from_pair(kv.k, kv.v, k_scale=one, v_scale=one), slots)
    with pytest.raises(ValueError, match=r"kv\.v_scale is None or of another shape, must be one for each"):
        append_kv(q, q, KVCache.unchecked(kv.k, kv.v, kv.k_scale, None), slots)
    with pytest.raises(ValueError, match=r"kv\.k\.dtype is float8_e5m2, must be float8_e4m3fn, int8 or"):
        append_kv(
            q, q, KVCache.unchecked(*torch.zeros(2, 2, 16, HEADS, 64).to(torch.float8_e5m2), one, one), slots
        )
    latents = torch.zeros(2, 16, 576).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scale is .*, must be one for all: latents have no scale for each"):
        KVCache.from_latent(latents, scale=torch.ones(2, 16, 1))
    k = latents[:, :, None]
    kv = KVCache.unchecked(k, k[..., :512], torch.ones(2, 16, 1), torch.ones(2, 16, 1))
    with pytest.raises(ValueError, match=r"kv\.k_scale is .*, must be one for all: latents have no scale"):
        append_mla_kv(torch.zeros(1, 512).bfloat16(), torch.zeros(1, 64).bfloat16(), kv, slots)


@pytest.mark.parametrize("dtype", [torch.int8, NVFP4], ids=str)
def test_scales_without_memory_are_named(dtype: torch.dtype | str) -> None:
    kv = token_scaled_cache(dtype, 2, 16, 64)
    scale = kv.v_scale
    if isinstance(scale, BlockScales):
        scale, name = scale._replace(blocks=scale.blocks.to("meta")), r"kv\.v_scale\.blocks"
    else:
        assert isinstance(scale, Tensor)
        scale, name = scale.to("meta"), r"kv\.v_scale"
    kv = KVCache.unchecked(kv.k, kv.v, kv.k_scale, scale)
    made, rows = attention(kv_dtype=dtype), torch.zeros(1, HEADS, 64).bfloat16()
    made.plan(view_of_one_row(3))
    slots = torch.zeros(1).long()
    for call in (
        lambda: made.run(rows, kv),
        lambda: append_kv(rows, rows, kv, slots),
        lambda: append_qkv(rows, rows, rows, kv, slots),
        lambda: append_rounded(rows, rows, kv, slots),
    ):
        with pytest.raises(ValueError, match=rf"^{name} is .* without memory"):
            call()


def test_refused_pairs() -> None:
    """Of formats, and of a pair's own rows and scales."""
    kv, of_fp4 = (token_scaled_cache(dtype, 2, 16, 64) for dtype in (PAIR, NVFP4))
    int8 = token_scaled_cache(torch.int8, 2, 16, 64)
    assert (kv.stored_dtype, kv.head_dim, kv.head_dim_v) == (PAIR, 64, 64)
    with pytest.raises(ValueError, match=r"v is .*, must be of k's shape .* of dtype int8, or uint8 with"):
        KVCache.from_pair(kv.k, kv.v, k_scale=kv.k_scale, v_scale=kv.k_scale)
    with pytest.raises(ValueError, match=r"v is .*, must be of k's shape .* of dtype uint8"):
        KVCache.from_pair(of_fp4.k, int8.v, k_scale=of_fp4.k_scale, v_scale=int8.v_scale)
    with pytest.raises(ValueError, match=r"k_scale is None, must be a float32 tensor"):
        KVCache.from_pair(kv.k, kv.v, v_scale=kv.v_scale)
    with pytest.raises(
        ValueError, match=r"k is .*, must be of head_dim columns, and head_dim a multiple of 64"
    ):
        KVCache.from_pair(kv.k[..., :32], kv.v, k_scale=kv.k_scale, v_scale=kv.v_scale)
    q, view = torch.zeros(1, HEADS, 64).bfloat16(), view_of_one_row(3)
    made, of_int8 = attention(kv_dtype=PAIR, token_scales=None), attention(kv_dtype=torch.int8)
    made.plan(view)
    of_int8.plan(view)
    with pytest.raises(ValueError, match=r"kv\.v\.dtype is int8, must be uint8"):
        made.run(q, int8)
    with pytest.raises(ValueError, match=r"kv\.v\.dtype is uint8, must be int8"):
        of_int8.run(q, kv)
    with pytest.raises(ValueError, match=r"kv\.k\.dtype is uint8, must be int8"):
        made.run(q, of_fp4)


def test_refused_block_scales() -> None:
    kv = token_scaled_cache(NVFP4, 2, 16, 64, "NHD")
    k_scale, v_scale = kv.k_scale, kv.v_scale
    assert isinstance(k_scale, BlockScales)
    assert isinstance(v_scale, BlockScales)
    for scales, message in (
        ((k_scale, None), r"v_scale is None, must be BlockScales if k_scale is, and only then"),
        (
            (torch.ones(2, 16, HEADS), v_scale),
            r"v_scale is BlockScales\(.*, must be BlockScales if k_scale is",
        ),
        (
            (BlockScales(k_scale.blocks[:1]), v_scale),
            r"k_scale\.blocks is .*, must be float8_e4m3fn or uint8 \[",
        ),
        (
            (k_scale, BlockScales(v_scale.blocks.view(torch.uint8))),
            r"v_scale\.blocks is .*, must be float8_e4m3",
        ),
        ((BlockScales(None), v_scale), r"k_scale\.blocks is None, must be a tensor"),  # type: ignore[arg-type]
        ((BlockScales(k_scale.blocks, 0.0), v_scale), r"k_scale\.factor is 0\.0, must be a number above 0"),
        ((BlockScales(k_scale.blocks, torch.ones(1)), v_scale), r"k_scale\.factor is .*, must be a number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            KVCache.from_pair(kv.k, kv.v, k_scale=scales[0], v_scale=scales[1])
    with pytest.raises(ValueError, match=r"k_scale is .*, must be a number or a tensor over int8"):
        KVCache.from_pair(kv.k.view(torch.int8), kv.v.view(torch.int8), k_scale=k_scale, v_scale=v_scale)
    narrow = torch.zeros(2, 2, 16, HEADS, 48, dtype=torch.uint8)
    blocks = BlockScales(torch.zeros(2, 16, HEADS, 6, dtype=torch.uint8))
    with pytest.raises(
        ValueError, match=r"k is .*, must be of head_dim / 2 columns, and head_dim a multiple of 64"
    ):
        KVCache.from_pair(*narrow, k_scale=blocks, v_scale=blocks)
    for dtype in (torch.float32, torch.float16):  # with any number of columns
        blocks = BlockScales(torch.zeros(2, 16, HEADS, 3, dtype=dtype))
        with pytest.raises(ValueError, match=r"k_scale\.blocks is .*, must be of float8_e4m3fn or uint8$"):
            KVCache.from_pair(*narrow[..., :24], k_scale=blocks, v_scale=blocks)
    made = attention(kv_dtype=NVFP4)
    made.plan(view_of_one_row(3))
    q = torch.zeros(1, HEADS, 64).bfloat16()
    apart = torch.zeros(2, 16, HEADS, 5, dtype=torch.uint8)[..., 1:]
    for scale, message in (
        (0.5, r"kv\.v_scale is a number, must be a tensor \[pages, page_size, num_kv_heads, head_dim / 16\]"),
        (
            BlockScales(v_scale.blocks.view(torch.uint8)),
            r"kv\.v_scale\.dtype is uint8, must be float8_e4m3fn",
        ),
        (BlockScales(apart.view(torch.float8_e4m3fn)), r"kv\.v_scale\.(data_ptr|stride)"),
        (v_scale._replace(factor=-1.0), r"kv\.v_scale\.factor is -1, must be above 0 and finite"),
        (v_scale._replace(factor=1e-60), r"kv\.v_scale\.factor is 1e-60, must be above 0 and finite"),
    ):
        with pytest.raises(ValueError, match=message):
            made.run(q, KVCache.unchecked(kv.k, kv.v, k_scale, scale))
    with pytest.raises(ValueError, match=r"k is .*, must be bfloat16, float16 or float32: append computes"):
        append_kv(kv.k[0], kv.v[0], kv, torch.arange(16))
