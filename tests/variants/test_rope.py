"""Rotary embeddings: their frequencies, the layout of pairs, the positions of tokens, and the functions that
kernels use.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
import torch
from compiled_variants import COMPILER, CSRC

from attn_backend.variants import Variant, builtin

needs_cpp = pytest.mark.skipif(not COMPILER, reason="needs g++")


def test_frequencies_are_powers_of_theta() -> None:
    frequencies = builtin.rope_frequencies(8, 10000.0)
    torch.testing.assert_close(
        frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_llama3_scales_long_wavelengths_only() -> None:
    """Each frequency, by the case that applies, with the numbers of Llama 3.1 8B."""
    plain, scaled = builtin.rope_frequencies(128, 500000.0), builtin.llama3_frequencies(128)
    cases = set()
    for f, g in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4.0:
            expected, case = f, "kept"
        elif wavelength > 8192 / 1.0:
            expected, case = f / 8, "divided"
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected, case = (1 - smooth) * f / 8 + smooth * f, "between"
        assert g == pytest.approx(expected, rel=1e-12)
        cases.add(case)
    assert cases == {"kept", "divided", "between"}


def rotated_by_hand(
    row: torch.Tensor, position: float, frequencies: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Pair by pair, as complex numbers."""
    made, n = row.clone(), len(frequencies)
    for i, frequency in enumerate(frequencies.tolist()):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
        turned = complex(row[first], row[second]) * complex(
            math.cos(position * frequency), math.sin(position * frequency)
        )
        made[first], made[second] = turned.real, turned.imag
    return made


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_turns_pairs(interleaved: bool) -> None:
    frequencies = builtin.rope_frequencies(16, 100.0)
    # 24 columns: the last 8 stay
    x = torch.randn(3, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    b, h, positions = torch.tensor(0), torch.tensor(0), torch.tensor([0, 1, 7, 1000, -2])
    functions = builtin.rope(frequencies, interleaved=interleaved).reference()
    assert functions is not None
    for transform in (functions.query, functions.key):
        made = transform(x, b, h, positions)
        for i, j in ((i, j) for i in range(3) for j in range(5)):
            torch.testing.assert_close(
                made[i, j],
                rotated_by_hand(x[i, j], int(positions[j]), frequencies, interleaved),
                rtol=1e-9,
                atol=1e-9,
            )
    assert torch.equal(functions.value(x, b, h, positions), x)


def test_positions_that_are_given() -> None:
    frequencies = builtin.rope_frequencies(16, 100.0)
    functions, plain = builtin.rope_at(frequencies).reference(), builtin.rope(frequencies).reference()
    assert functions is not None
    assert plain is not None
    x = torch.randn(4, 16, dtype=torch.float64)
    args = {
        "q_positions": torch.tensor([5, 9, 2, 7], dtype=torch.int32),
        "kv_positions": torch.tensor([[1, 2, 3, 4], [30, 20, 10, 0]], dtype=torch.int32),
    }
    row, one = torch.tensor([3, 0, 1, 1]), torch.tensor(1)
    queries = functions.query(x, one, one, torch.arange(4), args, row=row, kv_len=one)
    torch.testing.assert_close(queries, plain.query(x, one, one, torch.tensor([7, 5, 9, 9])))
    keys = functions.key(x, one, one, torch.arange(4), args, kv_len=one)
    torch.testing.assert_close(keys, plain.key(x, one, one, torch.tensor([30, 20, 10, 0])))
    with pytest.raises(ValueError, match="kv_len is missing; this variant's key depends on them"):
        functions.key(x, one, one, torch.arange(4), args)


def test_positions_in_a_cache_with_sink_tokens() -> None:
    """For 30 tokens, the cache holds the first 4 and the last 10."""
    frequencies = builtin.rope_frequencies(16, 100.0)
    functions, plain = (
        builtin.rope_in_cache(frequencies, 10, 4).reference(),
        builtin.rope(frequencies).reference(),
    )
    assert functions is not None
    assert plain is not None
    zero = torch.tensor(0)
    for kv_len, in_cache, query in (
        (30, {0: 0, 3: 3, 20: 4, 29: 13}, {29: 13, 25: 9}),
        (14, {0: 0, 4: 4, 13: 13}, {13: 13}),
        (3, {2: 2}, {2: 2}),
    ):
        for places, transform, same in (
            (in_cache, functions.key, plain.key),
            (query, functions.query, plain.query),
        ):
            x = torch.randn(len(places), 16, dtype=torch.float64)
            more = {"kv_len": torch.tensor(kv_len)} | ({"row": zero} if places is query else {})
            made = transform(x, zero, zero, torch.tensor(list(places)), **more)
            torch.testing.assert_close(made, same(x, zero, zero, torch.tensor(list(places.values()))))


def test_what_is_shared() -> None:
    """Requests may share a token if all of them rotate it in the same way."""
    frequencies = builtin.rope_frequencies(16)
    assert not builtin.rope(frequencies).tells_requests_apart
    assert builtin.rope_at(frequencies).tells_requests_apart
    assert builtin.rope_in_cache(frequencies, 100).tells_requests_apart
    assert (builtin.rope_at(frequencies) & builtin.causal()).tells_requests_apart
    for body, expected in {
        "return x;": False,
        "return {x.first * token.position, x.second * token . kv_head};": False,
        "return token.position > 3 ? x : Pair{x.second, x.first};": False,
        "return {x.first * token.request, x.second};": True,
        "return {x.first * token.kv_len, x.second};": True,
        "const KvToken& other = token; return {x.first * other.request, x.second};": True,
    }.items():
        for hook in ("key", "value"):
            made = Variant.from_source(
                f"Pair {hook}(Pair x, int32_t first, int32_t second, const KvToken& token) const {{ {body} "
                f"}}",
                name="mine",
            )
            assert made.tells_requests_apart == expected, body
    unnamed = "Pair key(Pair x, int32_t, int32_t, const KvToken&) const { return {x.second, x.first}; }"
    assert not Variant.from_source(unnamed, name="mine").tells_requests_apart
    of_query = (
        "Pair query(Pair x, int32_t, int32_t, const ScoreRow& row) const { return {x.first * "
        "row.request, x.second}; }"
    )
    assert not Variant.from_source(of_query, name="mine").tells_requests_apart
    macro = (
        "#define REQUEST token.request\nPair key(Pair x, int32_t, int32_t, const KvToken& token) const { "
        "return {x.first * REQUEST, x.second}; }"
    )
    assert Variant.from_source(macro, name="mine").tells_requests_apart


MATH = """
#include "attention/variant/variant_math.h"
extern "C" void turn(int n, const int* positions, const float* high, const float* low, float* cosines,
                     float* sines) {
  for (int i = 0; i < n; ++i) {
    const float turns = attn::turns_of(positions[i], high[i], low[i]);
    const attn::Pair made = attn::rotated(attn::Pair{1.0f, 0.0f}, turns);
    cosines[i] = made.first;
    sines[i] = made.second;
  }
}
"""


@needs_cpp
def test_the_angle_is_right_at_positions_of_millions(tmp_path: Path) -> None:
    source, library = tmp_path / "turn.cpp", tmp_path / "turn.so"
    source.write_text(MATH)
    subprocess.run(
        [COMPILER, "-std=c++17", "-O3", "-fPIC", "-shared", f"-I{CSRC}", str(source), "-o", str(library)],
        check=True,
    )
    generator = torch.Generator().manual_seed(2)
    positions = torch.cat(
        [torch.randint(-(2**24), 2**24, (20000,), generator=generator), torch.arange(-3, 20000)]
    ).int()
    frequencies = builtin.rope_frequencies(128)[torch.randint(64, positions.shape, generator=generator)]
    turns = frequencies / (2 * math.pi)
    high = turns.float()
    low = (turns - high.double()).float()
    cosines, sines = torch.empty_like(high), torch.empty_like(high)
    ctypes.CDLL(str(library)).turn(
        len(positions), *(ctypes.c_void_p(t.data_ptr()) for t in (positions, high, low, cosines, sines))
    )
    angle = positions.double() * frequencies
    assert (cosines.double() - angle.cos()).abs().max() < 1e-6
    assert (sines.double() - angle.sin()).abs().max() < 1e-6
