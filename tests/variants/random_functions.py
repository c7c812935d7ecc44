"""Random functions in flex_attention's signatures, with nested and negated conditions in branches; and
whether their C++ gives the float64 results.

Integers stay small, and floats that decide a condition are exact in float32: a rounding error never selects
another branch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compiled_variants import CompiledVariants, Coordinates, interval

from attn_backend.variants import Variant

B, H, LENGTH = 3, 4, 96
POINTS = 1000
# Sums of a few terms below 100, each accurate to a few units in the last place of a float32.
TOLERANCE = {"rtol": 2e-5, "atol": 1e-4}
TENSORS = {"flags": (torch.bool, 1), "numbers": (torch.int32, 2), "halves": (torch.float32, 1), "limit": int}
EXACT_FUNCTIONS = ("-", "torch.abs", "torch.floor", "torch.ceil", "torch.relu")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def arguments() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)
    return {
        "flags": torch.randint(0, 2, (LENGTH,), generator=draw).bool(),
        "numbers": torch.randint(-9, 10, (H, LENGTH), dtype=torch.int32, generator=draw),
        "halves": torch.randint(-9, 10, (LENGTH,), generator=draw) / 2,
        "limit": 17,
    }


class _Expressions:
    """Python text of random expressions: booleans, integers, floats that are exact in float32, and other
    floats.
    """

    def __init__(self, seed: int, has_score: bool) -> None:
        self._draw = random.Random(seed)
        self._has_score = has_score

    def boolean(self, depth: int) -> str:
        if depth == 0:
            return self._one_of(
                "kv_idx <= q_idx",
                "h == 0",
                "kv_idx < limit",
                "flags[kv_idx]",
                "q_idx - kv_idx <= 8",
                "kv_idx % 3 == 1",
                "b != 1",
                "flags[q_idx]",
            )
        return self._one_of(
            lambda: self._comparison(self.integer, self.integer, depth),
            lambda: self._comparison(self.integer, self.integer, depth),
            lambda: self._comparison(self.exact, self.exact, depth),
            lambda: self._comparison(self.boolean, self.boolean, depth),
            lambda: self._comparison(self.boolean, self.integer, depth),
            lambda: f"({self.boolean(depth - 1)}) {self._one_of('&', '|', '^')} ({self.boolean(depth - 1)})",
            lambda: f"({self.boolean(depth - 1)}) {self._one_of('&', '|', '^')} ({self.boolean(depth - 1)})",
            lambda: f"~({self.boolean(depth - 1)})",
            lambda: f"torch.logical_not({self._any(depth - 1)})",
            lambda: (
                f"torch.logical_{self._one_of('and', 'or', 'xor')}({self._any(depth - 1)}, "
                f"{self._any(depth - 1)})"
            ),
            lambda: self._where(depth, self.boolean, self.boolean),
            lambda: self._where(depth, self.boolean, self.boolean),
            lambda: (
                f"torch.where({self.boolean(depth - 1)}, {self._one_of('True', 'False')}, "
                f"{self.boolean(depth - 1)})"
            ),
            lambda: (
                f"torch.where({self.boolean(depth - 1)}, {self.boolean(depth - 1)}, "
                f"{self._one_of('True', 'False')})"
            ),
            lambda: f"({self.boolean(depth - 1)}) {self._one_of('+', '*')} ({self.boolean(depth - 1)})",
            lambda: (
                f"torch.{self._one_of('minimum', 'maximum')}({self.boolean(depth - 1)}, "
                f"{self.boolean(depth - 1)})"
            ),
            lambda: f"({self.integer(depth - 1)}).bool()",
        )

    def integer(self, depth: int) -> str:
        if depth == 0:
            return self._one_of("q_idx", "kv_idx", "q_idx - kv_idx", "h", "b", "numbers[h, kv_idx]", "limit")
        return self._one_of(
            lambda: (
                f"({self.integer(depth - 1)}) {self._one_of('+', '-', '&', '|', '^')} "
                f"({self.integer(depth - 1)})"
            ),
            lambda: (
                f"({self.integer(depth - 1)}) {self._one_of('+', '*', '&', '|', '^')} "
                f"({self.boolean(depth - 1)})"
            ),
            lambda: f"({self.integer(depth - 1)}) * {self._one_of('-3', '-1', '2', '5')}",
            lambda: (
                f"({self.integer(depth - 1)}) {self._one_of('//', '%')} "
                f"{self._one_of('-4', '-3', '-1', '2', '3', '7', '16', '(h + 1)', '(b - 5)')}"
            ),
            lambda: (
                f"torch.{self._one_of('minimum', 'maximum')}({self.integer(depth - 1)}, "
                f"{self.integer(depth - 1)})"
            ),
            lambda: (
                f"torch.clamp({self.integer(depth - 1)}, {self._one_of('-5', '4')}, "
                f"{self._one_of('-2', '20')})"
            ),
            lambda: f"{self._one_of('-', '~', 'torch.abs')}({self.integer(depth - 1)})",
            lambda: f"({self.integer(depth - 1)}) {self._one_of('<< 1', '>> 2')}",
            lambda: f"numbers[h, ({self.integer(depth - 1)}) % {LENGTH}]",
            lambda: self._where(depth, self.integer, self.integer),
            lambda: self._where(depth, self.integer, self.boolean),
            lambda: self._where(depth, self.boolean, self.integer),
            lambda: f"torch.where({self.boolean(depth - 1)}, 3, {self.integer(depth - 1)})",
            lambda: f"({self.boolean(depth - 1)}).to(torch.int32)",
            lambda: f"({self.exact(depth - 1)}).to(torch.int32)",
        )

    def exact(self, depth: int) -> str:
        if depth == 0:
            return self._one_of(
                *(["score", "score"] if self._has_score else []),
                "halves[kv_idx]",
                "0.5 * kv_idx",
                "q_idx.float()",
                "0.25 * h",
            )
        return self._one_of(
            lambda: f"({self.exact(depth - 1)}) {self._one_of('+', '-')} ({self.exact(depth - 1)})",
            lambda: f"({self.exact(depth - 1)}) * ({self.boolean(depth - 1)})",
            lambda: f"({self.exact(depth - 1)}) {self._one_of('+', '-')} ({self.integer(depth - 1)})",
            lambda: f"({self.exact(depth - 1)}) {self._one_of('* 0.5', '* -2', '/ 2')}",
            lambda: (
                f"torch.{self._one_of('minimum', 'maximum')}({self.exact(depth - 1)}, "
                f"{self.exact(depth - 1)})"
            ),
            lambda: f"{self._one_of(*EXACT_FUNCTIONS)}({self.exact(depth - 1)})",
            lambda: self._where(depth, self.exact, self.exact),
            lambda: self._where(depth, self.exact, self.integer),
            lambda: self._where(depth, self.boolean, self.exact),
            lambda: f"torch.where({self.boolean(depth - 1)}, {self.exact(depth - 1)}, 0.5)",
        )

    def real(self, depth: int) -> str:
        """Below 100 or so."""
        if depth == 0:
            return self._one_of("score", "score", "halves[q_idx]")
        return self._one_of(
            lambda: f"({self.real(depth - 1)}) {self._one_of('+', '-')} ({self.real(depth - 1)})",
            lambda: f"({self.real(depth - 1)}) {self._one_of('* 1.1', '/ 1.7', '* -0.3')}",
            lambda: f"({self.real(depth - 1)}) * ({self.boolean(depth - 1)})",
            lambda: (
                f"{self._one_of('torch.tanh', 'torch.sigmoid')}"
                f"({self._one_of(self.real, self.exact)(depth - 1)})"
            ),
            lambda: f"torch.clamp({self.exact(depth - 1)}, -20, 20)",
            lambda: f"torch.log(1 + torch.abs({self._one_of(self.integer, self.exact)(depth - 1)}))",
            lambda: self._where(depth, self.real, self.real),
            lambda: self._where(depth, self.real, self.real),
            lambda: self._where(depth, self.boolean, self.real),
            lambda: f"torch.where({self.boolean(depth - 1)}, {self.real(depth - 1)}, 0.0)",
        )

    def _one_of(self, *choices: Any) -> Any:
        chosen = self._draw.choice(choices)
        return chosen() if callable(chosen) and getattr(chosen, "__name__", "") == "<lambda>" else chosen

    def _any(self, depth: int) -> str:
        return str(self._one_of(self.boolean, self.boolean, self.integer, self.exact)(depth))

    def _comparison(self, left: Any, right: Any, depth: int) -> str:
        return f"({left(depth - 1)}) {self._one_of(*COMPARISONS)} ({right(depth - 1)})"

    def _where(self, depth: int, yes: Any, no: Any) -> str:
        return f"torch.where({self.boolean(depth - 1)}, {yes(depth - 1)}, {no(depth - 1)})"


@dataclass(frozen=True)
class RandomFunctions:
    """A score_mod and a mask_mod that depend only on the seed."""

    seed: int

    @property
    def score_text(self) -> str:
        draw = _Expressions(2 * self.seed, has_score=True)
        return f"torch.where({draw.boolean(3)}, {draw.real(3)}, {draw.real(2)})"

    @property
    def mask_text(self) -> str:
        return _Expressions(2 * self.seed + 1, has_score=False).boolean(4)

    def variant(self) -> Variant:
        names: dict[str, Any] = {"torch": torch}
        score_mod = eval(f"lambda score, b, h, q_idx, kv_idx: {self.score_text}", names)
        mask_mod = eval(f"lambda b, h, q_idx, kv_idx: {self.mask_text}", names)
        used = {
            name: dtype for name, dtype in TENSORS.items() if name in f"{self.score_text} {self.mask_text}"
        }
        return Variant.from_functions(score_mod, mask_mod, tensors=used, name=f"random_{self.seed}")


def points(seed: int) -> tuple[Coordinates, torch.Tensor]:
    """Coordinates of existing tokens, and scores that are multiples of 1 / 16."""
    draw = torch.Generator().manual_seed(seed)

    def ints(high: int) -> torch.Tensor:
        return torch.randint(0, high, (POINTS,), dtype=torch.int32, generator=draw)

    q_idx = ints(LENGTH)
    return Coordinates(
        ints(B), ints(H), q_idx, ints(LENGTH), q_idx, torch.full((POINTS,), LENGTH, dtype=torch.int32)
    ), (ints(256) - 128) / 16


def wrong(seeds: Sequence[int], folder: Path) -> dict[int, str]:
    """Faults by their seeds: a function is refused, its C++ does not compile, or its results differ from
    float64. One call of g++ compiles all.
    """
    found: dict[int, str] = {}
    variants: dict[int, Variant] = {}
    for seed in seeds:
        try:
            variants[seed] = RandomFunctions(seed).variant()
        except ValueError as error:
            found[seed] = f"refused: {error}"
    compiled = _compiled(variants, folder, found)
    for i, (seed, variant) in enumerate(variants.items()):
        try:
            check(compiled, i, variant, seed)
        except AssertionError as error:
            found[seed] = (
                f"{error}\nscore: {RandomFunctions(seed).score_text}\nmask: {RandomFunctions(seed).mask_text}"
            )
    return found


def _compiled(variants: dict[int, Variant], folder: Path, found: dict[int, str]) -> CompiledVariants:
    """All variants that compile; the others are removed."""
    try:
        return CompiledVariants(list(variants.values()), folder)
    except AssertionError:
        for seed, variant in list(variants.items()):
            try:
                CompiledVariants([variant], _inside(folder, str(seed)))
            except AssertionError as alone:
                found[seed] = f"does not compile: {alone}"
                del variants[seed]
        return CompiledVariants(list(variants.values()), _inside(folder, "others"))


def _inside(folder: Path, name: str) -> Path:
    """A new folder for each library, since a loaded library must not be overwritten."""
    (folder / name).mkdir()
    return folder / name


def check(compiled: CompiledVariants, i: int, variant: Variant, seed: int) -> None:
    at, scores = points(seed)
    args = {param.name: arguments()[param.name] for param in variant.params}
    reference = variant.reference()
    assert reference is not None
    logits, mask, _ = compiled.evaluate(i, variant, at, scores, args)
    expected = reference.logits(scores.double(), at.b, at.h, at.q_idx, at.kv_idx, args)
    torch.testing.assert_close(logits.double(), expected.double(), **TOLERANCE)
    seen = reference.mask(at.b, at.h, at.q_idx, at.kv_idx, args, index=at.index, kv_len=at.kv_len)
    assert torch.equal(mask & interval(variant, at), seen), "the mask differs"
