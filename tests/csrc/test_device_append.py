"""The device kernel of append_qkv without a GPU (tests/csrc/device_append.cpp): its threads are fibers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import emulation
import numpy
import pytest
import torch
from append_problems import (
    HEADS,
    Problem,
    check,
    empty_cache,
    expected,
    frequencies,
    large_positions,
    random_problem,
)
from device_attention import KvScale, KvScales
from float8_cases import DTYPES, FP4_DTYPES, INT4, PAIR, TOKEN_DTYPES
from host_planner import COMPILER, ROOT
from mixed_cases import MIXTURES
from rotations import rotated
from tiers import mostly_slow
from token_scaled_caches import cache_for, check_token_scaled, fits, has_same_bits, tensors_of
from torch import Tensor

from attn_backend import BlockScales, KVCache, Rotary, append_kv, append_mla_kv, append_qkv
from attn_backend.kernels.native import data_type

PLAIN, NORMED, ROUNDED = 0, 1, 3  # QkvKernel of csrc/cache/params.h


class _HeadRows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class _KvTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_stride", "token_stride", "head_stride")),
    )


class _IndexArray(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_int64", ctypes.c_int32))


class _FastDivisor(ctypes.Structure):
    _fields_ = (("divisor", ctypes.c_int32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_int32))


class _UnalignedParams(ctypes.Structure):
    """QkvParams of csrc/cache/params.h."""

    _fields_ = (
        *((name, _HeadRows) for name in ("q", "k", "v", "q_out")),
        *((name, _KvTensor) for name in ("k_cache", "v_cache")),
        *((name, _IndexArray) for name in ("slots", "positions")),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int32) for name in ("rotary", "is_interleaved", "rotary_dim", "num_positions")),
        *((name, ctypes.c_float) for name in ("norm_eps", "norm_offset")),
        *(
            (name, ctypes.c_int32)
            for name in ("num_tokens", "num_qo_heads", "num_kv_heads", "head_dim", "num_pages")
        ),
        ("page_size", _FastDivisor),
    )


class _QkvParams(_UnalignedParams):
    _fields_ = (
        ("padding", ctypes.c_char * (-ctypes.sizeof(_UnalignedParams) % 16)),
        ("scales", KvScales),
        ("groups_of_token", _FastDivisor),
        ("lane_bits", ctypes.c_int32),
        ("k_token_scales", _KvTensor),
        ("v_token_scales", _KvTensor),
        *((name, ctypes.c_float) for name in ("k_factor", "v_factor")),
        ("rotates_rows", ctypes.c_int32),
        ("padding_at_end", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path, tests = tmp_path_factory.mktemp("append_qkv") / "libappend.so", ROOT / "tests" / "csrc"
    options = [
        "-std=c++17",
        "-O1",
        "-Wno-unknown-pragmas",
        "-fPIC",
        "-shared",
        f"-I{tests / 'emulated'}",
        f"-I{ROOT / 'csrc'}",
    ]
    sources = [tests / "device_append.cpp", tests / "emulated" / "cuda_emulation.cpp"]
    subprocess.run([str(COMPILER), *options, *map(str, sources), "-o", str(path)], check=True)
    loaded = ctypes.CDLL(str(path))
    assert loaded.qkv_params_bytes() == ctypes.sizeof(_QkvParams)
    return loaded


def _rows(tensor: Tensor) -> _HeadRows:
    return _HeadRows(tensor.data_ptr(), *tensor.stride()[:2])


def _cache(tensor: Tensor) -> _KvTensor:
    return _KvTensor(tensor.data_ptr(), *tensor.stride()[:3])


def _indices(tensor: Tensor) -> _IndexArray:
    return _IndexArray(tensor.data_ptr(), tensor.dtype == torch.int64)


def _params(problem: Problem) -> _QkvParams:
    params = _QkvParams(
        q=_rows(problem.q),
        k=_rows(problem.k),
        v=_rows(problem.v),
        q_out=_rows(problem.written_q),
        k_cache=_cache(problem.kv.k),
        v_cache=_cache(problem.kv.v),
        slots=_indices(problem.slots),
        norm_eps=problem.norm_eps,
        norm_offset=problem.norm_offset,
        num_tokens=len(problem.slots),
        num_pages=problem.kv.num_pages,
        num_qo_heads=problem.num_qo_heads,
        num_kv_heads=HEADS,
        head_dim=problem.kv.head_dim,
    )
    for name in ("q_norm", "k_norm"):
        weight = getattr(problem, name)
        setattr(params, name, None if weight is None else weight.data_ptr())
    if problem.rotary is not None:
        table = problem.rotary.table
        params.positions, params.table, params.is_interleaved = (
            _indices(problem.positions),
            table.data_ptr(),
            problem.rotary.interleaved,
        )
        if table.ndim == 1:
            params.rotary, params.rotary_dim = 1, 2 * len(table)
        else:
            params.rotary = 3 if table.dtype == torch.float32 else 2
            params.num_positions, params.rotary_dim, params.table_stride = *table.shape, table.stride(0)
    return params


def aligned_problem(seed: int, head_dim: int, rotary_dim: int, q_heads: int, interleaved: bool) -> Problem:
    """Without norms."""
    dtype = torch.bfloat16
    rng = numpy.random.default_rng([seed, interleaved])
    kv, storage = empty_cache("tensor", "NHD", 5, 16, head_dim, dtype, torch.device("cpu"))
    angles = torch.arange(50)[:, None] * frequencies(rotary_dim)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to([dtype, torch.float32][seed % 2])
    return Problem(
        torch.randn(9, q_heads + 2 * HEADS, head_dim).to(dtype),
        q_heads,
        kv,
        storage,
        torch.from_numpy(rng.permutation(80)[:7] - 5),
        torch.from_numpy(rng.integers(0, 60, 7)),
        Rotary(table, interleaved),
        None,
        None,
        norm_eps=1e-5,
        norm_offset=float(seed % 2),
        out=None,
    )


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("block", mostly_slow(range(6), fast=2))
def test_random_cases(library: ctypes.CDLL, block: int) -> None:
    for seed in range(10 * block, 10 * (block + 1)):
        problem = random_problem(seed, [torch.bfloat16, torch.float16][seed % 2], torch.device("cpu"))
        library.device_append_qkv(
            ctypes.byref(_params(problem)), problem.kv.page_size, problem.qkv.dtype == torch.bfloat16
        )
        problem.check()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    "norms",
    [(), ("q_norm",), ("k_norm",), ("q_norm", "k_norm")],
    ids=lambda names: "+".join(names) or "no norm",
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_aligned_heads(library: ctypes.CDLL, interleaved: bool, norms: tuple[str, ...]) -> None:
    """Shapes of real models, for the kernels that move 16 bytes at a time.

    Numbers of heads that do and do not fill groups.
    """
    for seed, (head_dim, rotary_dim, q_heads) in enumerate(
        [(128, 128, 4), (64, 32, 5), (96, 96, 1), (256, 64, 3), (16, 16, 2)]
    ):
        problem = aligned_problem(seed, head_dim, rotary_dim, q_heads, interleaved)
        dtype = problem.qkv.dtype
        for name in norms:
            setattr(problem, name, torch.randn(head_dim).to(dtype))
        kernel = library.device_append_qkv(ctypes.byref(_params(problem)), problem.kv.page_size, True)
        assert kernel == (NORMED if norms else PLAIN)
        problem.check()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_angles_of_large_positions(library: ctypes.CDLL) -> None:
    positions = large_positions()
    tokens = len(positions)
    for interleaved in (True, False):
        kv, storage = empty_cache("pair", "NHD", 1, tokens, 64, torch.float16, torch.device("cpu"))
        qkv = torch.randn(tokens, 2 + 2 * HEADS, 64, generator=torch.Generator().manual_seed(1)).half()
        rotary = Rotary(frequencies(64), interleaved)
        problem = Problem(
            qkv,
            2,
            kv,
            storage,
            torch.arange(tokens),
            positions,
            rotary,
            None,
            None,
            norm_eps=1e-5,
            norm_offset=0.0,
            out=None,
        )
        library.device_append_qkv(ctypes.byref(_params(problem)), kv.page_size, False)
        problem.check()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_latents_with_scales_of_their_own(tmp_path: Path) -> None:
    """append_latent: the same bytes as on a CPU."""
    library = emulation.build(
        tmp_path, "append_latent", emulation.TESTS / "device_append_latent.cpp", options=["-O1"]
    )
    generator = torch.Generator().manual_seed(1)
    projection = (torch.randn(9, 512 + 64 + 8, generator=generator) * torch.logspace(-9, 4, 584)).bfloat16()
    latent, rope = projection[:, :512], projection[:, 520:]
    latent[3] = 0
    latent[4, 300] = torch.inf
    slots = torch.tensor([7, -1, 0, 23, 24, 11, 3, 2**31 - 1, 22], dtype=torch.int32)
    caches = [torch.full((8, 3, 672), 0x55, dtype=torch.uint8) for _ in range(2)]
    append_mla_kv(latent, rope, KVCache.from_latent(caches[0][..., :656]), slots)
    strides = (ctypes.c_int64 * 4)(latent.stride(0), rope.stride(0), *caches[1].stride()[:2])
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (latent, rope, caches[1], slots))
    library.device_append_latent(*pointers, strides, len(slots), 8, 3)
    assert torch.equal(*caches)
    assert (caches[0] != 0x55).any()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scales",
    [(0.5, torch.tensor([0.125, 3.0, 0.7])), (1e30, torch.tensor([1e-30, 1e-38, 1e38]))],
    ids=["ordinary", "extreme"],
)
def test_8_bit_caches(library: ctypes.CDLL, scales: tuple[float, torch.Tensor], dtype: torch.dtype) -> None:
    """The same bytes as on a CPU, aligned or not."""
    for seed in range(12):
        problem = random_problem(seed, [torch.bfloat16, torch.float16][seed % 2], torch.device("cpu"))
        problem.rotary = problem.q_norm = problem.k_norm = None
        problem.qkv.mul_(torch.logspace(-4, 4, len(problem.qkv))[:, None, None])
        problem.qkv[::2, :, ::3] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])[seed % 4]
        written = [
            KVCache.from_pair(
                *(torch.zeros(problem.kv.k.shape).to(dtype) for _ in range(2)),
                k_scale=scales[0],
                v_scale=scales[1],
            )
            for _ in range(2)
        ]
        append_kv(problem.k, problem.v, written[0], problem.slots)
        params = _params(problem)
        params.k_cache, params.v_cache = _cache(written[1].k), _cache(written[1].v)
        element = data_type(dtype)
        params.scales = KvScales(KvScale.of(scales[0]), KvScale.of(scales[1]), element)
        library.device_append_qkv(
            ctypes.byref(params), problem.kv.page_size, problem.qkv.dtype == torch.bfloat16
        )
        for of_cpu, of_device in zip((written[0].k, written[0].v), (written[1].k, written[1].v), strict=True):
            assert torch.equal(of_cpu.view(torch.uint8), of_device.view(torch.uint8))


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", TOKEN_DTYPES, ids=str)
def test_a_scale_for_each_token_and_head(library: ctypes.CDLL, dtype: torch.dtype | str) -> None:
    """Without norm and RoPE the same bytes as on a CPU, and the same scales; else the oracle's, and Q."""
    element = data_type(dtype)
    for seed in range(48 if dtype == INT4 else 24):
        problem = random_problem(seed, [torch.bfloat16, torch.float16][seed % 2], torch.device("cpu"))
        if not fits(problem.kv.head_dim, dtype):
            continue
        if seed % 3 == 0:
            problem.rotary = problem.q_norm = problem.k_norm = None
            problem.qkv.mul_(torch.logspace(-9, 4, len(problem.qkv))[:, None, None])
            problem.qkv[::4, :, ::3] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])[seed % 4]
            problem.before = problem.qkv.clone()
        written = [cache_for(problem, dtype) for _ in range(2)]
        params = _params(problem)
        params.k_cache, params.v_cache = _cache(written[1].k), _cache(written[1].v)
        params.k_token_scales, params.v_token_scales = _cache(written[1].k_scale), _cache(written[1].v_scale)
        params.scales = KvScales(KvScale.of(None), KvScale.of(None), element)
        kernel = library.device_append_qkv(
            ctypes.byref(params), problem.kv.page_size, problem.qkv.dtype == torch.bfloat16
        )
        assert kernel != ROUNDED
        if seed % 3:
            check_token_scaled(problem, written[1])
            continue
        append_kv(problem.k, problem.v, written[0], problem.slots)
        for name in ("k", "v"):
            of_cpu, of_device = (getattr(kv, name).view(torch.uint8) for kv in written)
            scales, of_device_scales = (getattr(kv, f"{name}_scale") for kv in written)
            assert torch.equal(scales, of_device_scales)
            finite = scales.isfinite()  # a row with an infinity is lost
            assert torch.equal(of_cpu[finite], of_device[finite])


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_caches_of_the_other_16_bit_type(
    library: ctypes.CDLL, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """K is normalized and rotated. V, including values beyond float16, has the same bits as on a CPU."""
    for seed in range(16):
        problem = random_problem(seed, dtypes[0], torch.device("cpu"))
        problem.v.mul_(torch.logspace(-9, 7, len(problem.qkv))[:, None, None])
        problem.before = problem.qkv.clone()
        written = [
            KVCache.from_pair(*(torch.zeros(problem.kv.k.shape, dtype=dtypes[1]) for _ in range(2)))
            for _ in range(2)
        ]
        append_kv(problem.k, problem.v, written[0], problem.slots)
        params = _params(problem)
        params.k_cache, params.v_cache = _cache(written[1].k), _cache(written[1].v)
        element = data_type(dtypes[1])
        params.scales = KvScales(KvScale.of(None), KvScale.of(None), element)
        library.device_append_qkv(ctypes.byref(params), problem.kv.page_size, dtypes[0] == torch.bfloat16)
        assert torch.equal(written[0].v, written[1].v)
        tokens, q_heads, norm = (
            len(problem.slots),
            problem.num_qo_heads,
            (problem.norm_eps, problem.norm_offset),
        )
        check(
            problem.written_q[:tokens],
            expected(
                problem.before[:tokens, :q_heads], problem.positions, problem.rotary, problem.q_norm, *norm
            ),
        )
        k = expected(
            problem.before[:tokens, q_heads : q_heads + HEADS],
            problem.positions,
            problem.rotary,
            problem.k_norm,
            *norm,
        )
        for i, slot in enumerate(problem.slots.tolist()):
            if 0 <= slot < problem.kv.num_pages * problem.kv.page_size:
                check(written[1].k[divmod(slot, problem.kv.page_size)], k[i])


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_rounding_alone(library: ctypes.CDLL, head_dim: int, dtype: torch.dtype) -> None:
    """K and V without Q, norm and RoPE, aligned: the same bytes as on a CPU, and no change to other slots."""
    for seed, (heads, element) in enumerate(
        [(1, torch.bfloat16), (2, torch.float16), (8, torch.bfloat16), (17, torch.float16)]
    ):
        qkv = (torch.randn(7, 2 * heads, head_dim) * torch.logspace(-4, 4, 7)[:, None, None]).to(element)
        k, v = qkv[:, :heads], qkv[:, heads:]
        slots = torch.tensor([3, -1, 79, 80, 16, 31, 0], dtype=[torch.int32, torch.int64][seed % 2])
        k_scale, v_scale = torch.rand(heads) + 0.1, 0.37
        shape = (5, heads, 16, head_dim)
        written = [
            KVCache.from_pair(
                *(torch.full(shape, 7.0).to(dtype) for _ in range(2)),
                layout="HND",
                k_scale=k_scale,
                v_scale=v_scale,
            )
            for _ in range(2)
        ]
        append_kv(k, v, written[0], slots)
        params = _QkvParams(
            k=_rows(k),
            v=_rows(v),
            k_cache=_cache(written[1].k),
            v_cache=_cache(written[1].v),
            slots=_indices(slots),
            num_tokens=len(slots),
            num_pages=5,
            num_kv_heads=heads,
            head_dim=head_dim,
        )
        number = data_type(dtype)
        params.scales = KvScales(KvScale.of(k_scale), KvScale.of(v_scale), number)
        assert library.device_append_qkv(ctypes.byref(params), 16, element == torch.bfloat16) == ROUNDED
        for of_cpu, of_device in zip((written[0].k, written[0].v), (written[1].k, written[1].v), strict=True):
            assert torch.equal(of_cpu.view(torch.uint8), of_device.view(torch.uint8))


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_and_rounded(library: ctypes.CDLL, interleaved: bool, dtype: torch.dtype) -> None:
    """K without Q, with and without V, aligned and not: rotated in float32, then rounded once."""
    slots, positions = torch.tensor([3, -1, 79, 80, 16, 31, 0]), torch.tensor([0, 5, 49, 7, 31, 2, 90])
    for seed, (head_dim, heads, has_v, offset) in enumerate(
        [(64, 2, True, 0), (128, 5, False, 0), (64, 3, False, 1), (256, 1, True, 1)]
    ):
        angles = torch.arange(50)[:, None] * frequencies(head_dim)
        rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), interleaved)
        k, v = torch.randn(
            2, 7, heads, head_dim + offset, generator=torch.Generator().manual_seed(seed)
        ).half()[..., offset:]
        kv = KVCache.from_pair(*(torch.full((5, 16, heads, head_dim), 7.0).to(dtype) for _ in range(2)))
        params = _QkvParams(
            k=_rows(k),
            k_cache=_cache(kv.k),
            slots=_indices(slots),
            positions=_indices(positions),
            table=rotary.table.data_ptr(),
            table_stride=head_dim,
            rotary=3,
            is_interleaved=interleaved,
            rotary_dim=head_dim,
            num_positions=50,
            num_tokens=7,
            num_pages=5,
            num_kv_heads=heads,
            head_dim=head_dim,
        )
        if has_v:
            params.v, params.v_cache = _rows(v), _cache(kv.v)
        element = data_type(dtype)
        params.scales = KvScales(KvScale.of(None), KvScale.of(None), element)
        assert (library.device_append_qkv(ctypes.byref(params), 16, False) == PLAIN) == (offset == 0)
        is_written = (slots >= 0) & (slots < 80)
        exact = expected(k, positions, rotary, None, 0.0, 0.0)[is_written]
        step = (
            exact.abs().clamp(min=torch.finfo(dtype).smallest_normal).log2().floor().exp2()
            * torch.finfo(dtype).eps
        )
        found_k, found_v = (part.view(-1, heads, head_dim).float() for part in (kv.k, kv.v))
        assert ((found_k[slots[is_written]].double() - exact).abs() <= 0.5 * step + 2e-6).all()
        assert (found_k.sum(-1) == 7.0 * head_dim).sum() == (80 - 5) * heads
        assert torch.equal(
            found_v[slots[is_written]],
            v[is_written].to(dtype).float() if has_v else torch.full_like(exact, 7.0).float(),
        )


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", FP4_DTYPES)
def test_scales_of_blocks(library: ctypes.CDLL, dtype: str) -> None:
    """The same bytes as on a CPU, except for rounding after norm, RoPE and rotation."""
    kinds = set()
    for seed in range(60):
        problem = random_problem(seed, [torch.bfloat16, torch.float16][seed % 2], torch.device("cpu"))
        if not fits(problem.kv.head_dim, dtype):
            continue
        if seed % 3 == 0:
            problem.rotary = problem.q_norm = problem.k_norm = None
        kinds.add(
            _check_blocks(library, problem, dtype, ("NHD", "HND")[seed % 2], seed % 4 == 1, seed % 3 == 0)
        )
    assert len(kinds - {ROUNDED}) >= 2


def _check_blocks(
    library: ctypes.CDLL, problem: Problem, dtype: str, layout: str, rotation: bool, is_exact: bool
) -> int:
    """is_exact: without norm and RoPE. Returns the kernel."""
    on_cpu, written = (cache_for(problem, dtype, layout) for _ in range(2))
    params = _params(problem)
    params.k_cache, params.v_cache = _cache(written.k), _cache(written.v)
    for which in "kv":
        scale = getattr(written, f"{which}_scale")
        strides = [stride // 4 for stride in scale.blocks.stride()[:3]]
        setattr(params, f"{which}_token_scales", _KvTensor(scale.blocks.data_ptr(), *strides))
        setattr(params, f"{which}_factor", scale.factor)
    params.scales = KvScales(KvScale.of(None), KvScale.of(None), data_type(dtype))
    params.rotates_rows = rotation
    append_qkv(
        *(problem.q.clone(), problem.k, problem.v, on_cpu, problem.slots),
        **problem.options,
        rotation=rotation,
    )
    kernel = library.device_append_qkv(
        ctypes.byref(params), problem.kv.page_size, problem.qkv.dtype == torch.bfloat16
    )
    for which in "kv":
        rows = [getattr(kv, which) for kv in (on_cpu, written)]
        blocks = [getattr(kv, f"{which}_scale").blocks.view(torch.uint8) for kv in (on_cpu, written)]
        for of_cpu, of_device in (rows, blocks):
            if is_exact and not rotation:
                assert torch.equal(of_cpu, of_device)
            assert (of_cpu != of_device).float().mean() <= 0.01
    return kernel


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [INT4, *FP4_DTYPES])
@pytest.mark.parametrize("rotation", [False, True])
def test_lanes_whose_columns_are_apart(library: ctypes.CDLL, rotation: bool, dtype: str) -> None:
    """Aligned heads, for the kernels whose lanes quantize the columns that they load, where they can.

    Halves of heads pair up, or neighbors; all, a part or none of a head turns.
    """
    for seed, (head_dim, rotary_dim) in enumerate(
        [(64, 64), (128, 128), (192, 192), (256, 256), (128, 64), (256, 64), (64, 48), (192, 16)]
    ):
        for interleaved in (False, True):
            problem = aligned_problem(seed, head_dim, rotary_dim, 3, interleaved)
            if dtype != INT4:
                kernel = _check_blocks(library, problem, dtype, ("NHD", "HND")[seed % 2], rotation, False)
                assert kernel == PLAIN
                continue
            written, params = cache_for(problem, INT4), _params(problem)
            params.k_cache, params.v_cache = _cache(written.k), _cache(written.v)
            params.k_token_scales, params.v_token_scales = _cache(written.k_scale), _cache(written.v_scale)
            params.scales = KvScales(KvScale.of(None), KvScale.of(None), data_type(INT4))
            params.rotates_rows = rotation
            assert library.device_append_qkv(ctypes.byref(params), problem.kv.page_size, True) == PLAIN
            check_token_scaled(problem, written, rotation=rotation)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_k_and_v_of_different_formats(library: ctypes.CDLL) -> None:
    """One launch. The same bytes as on a CPU, except for rounding after norm, RoPE and rotation."""
    kinds = set()
    for seed in range(60):
        problem = random_problem(seed, [torch.bfloat16, torch.float16][seed % 2], torch.device("cpu"))
        if not fits(problem.kv.head_dim, PAIR):
            continue
        is_exact = seed % 3 == 0
        if is_exact:
            problem.rotary = problem.q_norm = problem.k_norm = None
        rotation = seed % 4 == 1
        on_cpu, written = (cache_for(problem, PAIR, ("apart", "NHD", "HND")[seed % 3]) for _ in range(2))
        params = _params(problem)
        params.k_cache, params.v_cache = _cache(written.k), _cache(written.v)
        k_scale, v_scale = written.k_scale, written.v_scale
        assert isinstance(k_scale, Tensor)
        assert isinstance(v_scale, BlockScales)
        params.k_token_scales = _KvTensor(k_scale.data_ptr(), *k_scale.stride())
        strides = [stride // 4 for stride in v_scale.blocks.stride()[:3]]
        params.v_token_scales = _KvTensor(v_scale.blocks.data_ptr(), *strides)
        params.k_factor, params.v_factor = 1.0, v_scale.factor
        params.rotates_rows = rotation
        q = append_qkv(
            *(problem.q.clone(), problem.k, problem.v, on_cpu, problem.slots),
            **problem.options,
            rotation=rotation,
        )
        kinds.add(
            library.device_append_pair(
                ctypes.byref(params), problem.kv.page_size, problem.qkv.dtype == torch.bfloat16
            )
        )
        count = len(problem.slots)
        torch.testing.assert_close(problem.written_q[:count], q[:count], rtol=2e-2, atol=2e-2)
        for name, of_cpu in tensors_of(on_cpu).items():
            of_device = tensors_of(written)[name]
            if is_exact and not rotation:
                assert has_same_bits(of_cpu, of_device)
            if name == "k_scale":
                torch.testing.assert_close(of_cpu, of_device, rtol=2e-5, atol=0)
            else:
                assert (of_cpu.view(torch.uint8) != of_device.view(torch.uint8)).float().mean() <= 0.02
    assert len(kinds) >= 2


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_rotated_rows(library: ctypes.CDLL) -> None:
    """After norm and RoPE, in float32, into every cache. Q is left as it is."""
    kinds = set()
    for seed in range(36):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        problem = random_problem(seed, dtype, torch.device("cpu"))
        form = seed // 2 % 3
        if seed % 5 == 0:
            problem.rotary = None
        params = _params(problem)
        params.rotates_rows = 1
        kv, element = problem.kv, None
        if form == 1:
            of_tokens = TOKEN_DTYPES[seed // 6 % (3 if fits(problem.kv.head_dim, INT4) else 2)]
            kv, element = cache_for(problem, of_tokens), data_type(of_tokens)
            params.k_token_scales, params.v_token_scales = _cache(kv.k_scale), _cache(kv.v_scale)
        elif form == 2:
            others = (dict(MIXTURES)[dtype], torch.float8_e4m3fn, torch.float8_e5m2)
            other = others[seed // 6 % 3]
            kv = KVCache.from_pair(*(torch.zeros(problem.kv.k.shape).to(other) for _ in range(2)))
            element = data_type(other)
        params.k_cache, params.v_cache = _cache(kv.k), _cache(kv.v)
        if element is not None:
            of_cache = KvScale.of(0.5 if kv.dtype in DTYPES and form == 2 else None)
            params.scales = KvScales(of_cache, of_cache, element)
        kinds.add(library.device_append_qkv(ctypes.byref(params), kv.page_size, dtype == torch.bfloat16))
        if form == 0:
            problem.check(rotation=True)
        elif form == 1:
            check_token_scaled(problem, kv, rotation=True)
        else:
            v = rotated(problem.before[: len(problem.slots), problem.num_qo_heads + HEADS :])
            scale = 0.5 if kv.dtype in DTYPES else 1.0
            for i, slot in enumerate(problem.slots.tolist()):
                if 0 <= slot < kv.num_pages * kv.page_size:
                    found = kv.v[divmod(slot, kv.page_size)].double() * scale
                    step = torch.finfo(kv.dtype).eps * v[i].abs().clamp_min(2 * torch.finfo(kv.dtype).tiny)
                    assert ((found - v[i]).abs() <= 0.51 * step + 1e-5).all()
    assert kinds == {0, 1, 2}
