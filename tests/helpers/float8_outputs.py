"""8-bit outputs: the allowed values, given float64 outputs, or given the 16-bit outputs of a run with the
same plan.
"""

from __future__ import annotations

from typing import Any

import case_tensors
import torch
from float8_cases import rounded
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
HALF_UNIT = 2.0**-4  # for a normal number, relative to it
HALF_LEAST = 2.0**-10  # for a subnormal number


def out_of_8_bits(case: case_tensors.Case) -> Tensor:
    """Like case.out: the same strides, and NaN everywhere."""
    return rounded(case.out, DTYPE)


def quantised(out: Tensor, out_scale: Tensor | float) -> Tensor:
    """The result of a separate kernel that quantizes the attention output."""
    return (out.float() / out_scale).clamp(-LARGEST, LARGEST).to(DTYPE)


def check_rounded(
    out: Tensor, exact: Tensor, out_scale: Tensor | float, tolerance: float, where: Any = ""
) -> None:
    """exact: float64, the output before division and rounding. tolerance: relative to its norm."""
    scale = float(out_scale)
    assert out.dtype == DTYPE
    got, limited = out.double().cpu(), (exact.cpu() / scale).clamp(-LARGEST, LARGEST)
    assert not got.isnan().any(), where
    size = exact.cpu().norm(dim=-1, keepdim=True) / exact.shape[-1] ** 0.5 / scale  # for a number in a row
    most = limited.abs() * HALF_UNIT * 1.01 + HALF_LEAST + 20 * tolerance * size
    assert ((got - limited).abs() <= most).all(), (
        f"{float(((got - limited).abs() / most).max()):.2f} times as far off as allowed {where}"
    )


def check_like_unfused(out: Tensor, plain: Tensor, out_scale: Tensor | float, where: Any = "") -> None:
    """plain: the 16-bit output; its rounding can move some numbers to the other side."""
    ours, theirs = out.float(), quantised(plain, out_scale).float()
    different = int((ours != theirs).sum())
    assert different <= 0.15 * ours.numel(), f"{different} of {ours.numel()} {where}"
    apart = (ours - theirs).abs()
    assert (apart <= ours.abs().clamp_min(2.0**-6) * 2 * HALF_UNIT * 1.01).all(), where


def scale_for(exact: Tensor, share: float) -> float:
    """The scale with which this share of the outputs is at the limit."""
    sample = exact.abs().flatten()[:: max(exact.numel() // 10**5, 1)]
    return max(float(torch.quantile(sample, 1 - share)) / LARGEST, 1e-6) if sample.numel() else 1.0
