"""Cases whose cache has the other 16-bit type than Q and the output: the cases of case_tensors.py, with K and
V rounded to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import case_tensors
import cases
import oracle
import torch
from float8_cases import lse_tolerance_of_transforms, rounded

from attn_backend import KVCache

# dtype, kv_dtype
MIXTURES = ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16))
# ||o - ref|| / ||ref|| over a case, with ref's Q in the cache's type. Probabilities are rounded to the
# cache's type, the output to its own.
TOLERANCE = 3e-3


def other(dtype: torch.dtype) -> torch.dtype:
    return dict(MIXTURES)[dtype]


def build(spec: cases.Spec, device: torch.device | str) -> case_tensors.Case:
    """A case with Q and out of spec.dtype over a cache of the other type."""
    case = case_tensors.build(spec, device)
    kv_dtype = other(spec.dtype)
    k = rounded(case.kv.k, kv_dtype)
    v = k[..., : spec.columns_of_v] if spec.v_in_k else rounded(case.kv.v, kv_dtype)
    return replace(
        case, kv=KVCache.from_pair(k, v), k_slots=case.k_slots.to(kv_dtype), v_slots=case.v_slots.to(kv_dtype)
    )


def as_multiplied(case: case_tensors.Case) -> case_tensors.Case:
    """With Q in the cache's type; values beyond the float16 range become the largest float16."""
    limit = torch.finfo(case.kv.dtype).max
    return replace(case, q=case.q.double().clamp(-limit, limit).to(case.kv.dtype))


def check(
    case: case_tensors.Case,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    variant: oracle.Variant | None = None,
    **changes: Any,
) -> None:
    """Compares with float64: closely if Q is first rounded to the cache's type, as in kernels, and also with
    the original Q. variant: has CPU tensors. changes: to the oracle's arguments.
    """
    multiplied = as_multiplied(case)
    if variant is None:
        case_tensors.check(case, out, lse, multiplied.expected(**changes), TOLERANCE)
        case_tensors.check(case, out, None, case.expected(**changes), cases.TOLERANCE[torch.bfloat16])
    else:  # which may amplify rounding differences
        expected = multiplied.on_cpu().expected(variant=variant, **changes)
        case_tensors.check(
            case, out, lse, expected, TOLERANCE, lse_tolerance_of_transforms(case, variant, case.kv.dtype)
        )
    case_tensors.check_padding(case)
