"""Scenarios of attention over caches whose tokens and heads have their own scales, and over rotated rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import case_tensors
import cases
import numpy
import torch
from float8_cases import DTYPES, INT4, ROUNDED_TOLERANCE, SCALES, Float8Case, lse_tolerance_of_rounded_k
from rotations import TOLERANCES, RotatedCase, block_of, matrix, rotated, rotated_case
from token_scaled_caches import fits, token_scaled_cache
from torch import Tensor

from attn_backend import KVCache

from .attention_calls import (
    OWN_SCALES,
    heads_of_cache,
    object_options,
    once,
    plan_call,
    small_spec,
    step_of_case,
)
from .call import Call
from .mutations import around
from .steps import step_call

# A CPU's oracles round what its kernel rounds, so its results have the usual tolerances.


class RoundedCase(Float8Case):
    """Its oracle rounds K and V, multiplied by the scales of their tokens, to the dtype of Q."""

    def _represented(self, *arguments: Any) -> Tensor:
        return super()._represented(*arguments).to(self.case.spec.dtype).double()


class RoundedRotatedCase(RotatedCase):
    """Its oracle rounds the rotated Q."""

    def expected(self, **changes: Any) -> tuple[Tensor, Tensor]:
        given = self.case
        self.case = replace(given, q=rounded_in_rotation(given.q))
        o, lse = super().expected(**changes)
        self.case = given
        return o, lse


class RoundedRowsRotatedCase(RoundedRotatedCase, RoundedCase):
    """Its oracle rounds the rotated Q, and K and V before they are rotated back."""


def rounded_in_rotation(q: Tensor) -> Tensor:
    """float64: q with a rotation that is a row of q's dtype."""
    made = (rotated(q) / block_of(q.shape[-1])).to(q.dtype)
    return made.double() @ matrix(q.shape[-1]).T


def token_scaled_batches(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """One object over caches whose tokens and heads have their own scales; rows may be rotated."""
    dtype, rotation = OWN_SCALES[rng.integers(len(OWN_SCALES))], bool(rng.random() < 0.3)
    heads = heads_of_cache(rng, device, dtype)
    on_cuda = device.type == "cuda"
    if rotation:
        make: type[Float8Case] = RotatedCase if on_cuda else RoundedRowsRotatedCase
    else:
        make = Float8Case if on_cuda else RoundedCase
    attention = None
    while True:
        problem = make(small_spec(rng, device, **heads), device, dtype, "token", "token")
        case = problem.case
        if attention is None:
            attention = case.attention(**problem.options, **object_options(rng, device))
        step = replace(step_of_case(case), expected=once(problem.expected))
        if on_cuda:
            tolerances = TOLERANCES[case.spec.dtype] if rotation else tolerances_of(case.spec, dtype)
            step = replace(step, tolerances=tolerances)
        yield from around(rng, step_call(rng, attention, step))
        if rng.random() < 0.3:
            yield from around(rng, plan_call(rng, attention, step, caches_of_others(case, dtype)))


def rotated_batches(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """One object over rotated rows, of 16 bits and more, or of 8 bits with other scales."""
    dtype = (None, None, *DTYPES)[rng.integers(4)]
    heads = heads_of_cache(rng, device, dtype)
    attention = None
    while True:
        spec = small_spec(rng, device, **heads)
        if dtype is None:
            case = rotated_case(spec, device)
            options: dict[str, Any] = {"rotation": True}
            of_oracle = replace(case, q=rounded_in_rotation(case.q)) if device.type == "cpu" else case
            expected = once(of_oracle.expected)
        else:
            forms = (str(form) for form in rng.choice(SCALES, size=2))
            make = RotatedCase if device.type == "cuda" else RoundedRotatedCase
            problem = make(spec, device, dtype, *forms)
            case, options, expected = problem.case, problem.options, once(problem.expected)
        if attention is None:
            attention = case.attention(**options, **object_options(rng, device))
        step = replace(step_of_case(case), expected=expected)
        if device.type == "cuda":
            step = replace(step, tolerances=TOLERANCES[spec.dtype])
        yield from around(rng, step_call(rng, attention, step))


def tolerances_of(spec: cases.Spec, dtype: torch.dtype | str) -> tuple[float, float]:
    """Tolerances of a GPU's outputs and lse. dtype: of the cache."""
    tolerance = ROUNDED_TOLERANCE if spec.dtype == torch.bfloat16 else cases.TOLERANCE[spec.dtype]
    farthest = 2 if dtype == INT4 else 1  # zero points of some rows are far from their numbers
    return tolerance, max(cases.LSE_TOLERANCE, farthest * lse_tolerance_of_rounded_k(spec))


def caches_of_others(case: case_tensors.Case, dtype: torch.dtype | str) -> list[KVCache]:
    """Caches of the same heads that an Attention for caches of `dtype` must refuse."""
    kv, spec = case.kv, case.spec
    rows = torch.zeros(2, *kv.k.shape[:3], spec.head_dim, dtype=spec.dtype, device=case.device)
    made = [KVCache.from_pair(*rows), KVCache.from_pair(*rows.to(torch.float8_e4m3fn), k_scale=0.5)]
    sizes = kv.num_pages, kv.page_size, spec.head_dim, "apart", case.device, spec.num_kv_heads
    others = (other for other in OWN_SCALES if other != dtype and fits(spec.head_dim, other))
    return made + [token_scaled_cache(other, *sizes) for other in others]
