"""Merges attention states stored in tensors. A state is (o, lse): normalized output and log-sum-exp over some
of a row's tokens.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..jit import manifest
from ..validation import check_plain, check_types, refuse
from .native import by_name, float_element, kernel_file


@cache
def _kernel_file(dtype: torch.dtype, device: torch.device) -> str:
    return kernel_file(manifest.merge_states_name(float_element(dtype)), device)


def merge_states(
    o: Tensor, lse: Tensor, indptr: Tensor | None = None, *, log2: bool = False
) -> tuple[Tensor, Tensor]:
    """Merges the states of each row, in order.

    One launch; capturable in a CUDA graph; never synchronizes.

    Args:
        o: float32, float16 or bfloat16 [rows, states, heads, head_dim]; with an indptr [states of all rows,
            heads, head_dim]. head_dim is contiguous.
        lse: float32, of o's shape without head_dim; heads are contiguous. -inf: the state of a row that sees
            nothing.
        indptr: int32 or int64 [rows + 1]: row i has the states indptr[i]:indptr[i + 1]. They must exist (not
            checked).
        log2: the given and the returned lse are base-2 logarithms, not natural ones.

    Returns:
        o [rows, heads, head_dim] in o's dtype, lse float32 [rows, heads]. A row without states: 0 and -inf.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.

    Source: arXiv 2501.01005, section 2.2.
    """
    check_plain("o", o)
    check_plain("lse", lse)
    ndim = 4 if indptr is None else 3
    if o.ndim != ndim:
        refuse("o", o, f"a tensor of {ndim} dimensions")
    rows = o.shape[0] if indptr is None else check_plain("indptr", indptr).shape[0] - 1
    if rows < 0:
        refuse("indptr", indptr, "of at least one element: [rows + 1]")
    out = torch.empty((rows, *o.shape[-2:]), dtype=o.dtype, device=o.device)
    out_lse = torch.empty((rows, o.shape[-2]), dtype=torch.float32, device=o.device)
    _merge(o=o, lse=lse, indptr=indptr, out=out, out_lse=out_lse, log2=log2)
    return out, out_lse


def merge_state(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
    mask: Tensor | None = None,
    log2: bool = False,
) -> tuple[Tensor, Tensor]:
    """Merges two states of each row. One launch; capturable in a CUDA graph; never synchronizes.

    Args:
        o_a, o_b: float32, float16 or bfloat16 [rows, heads, head_dim], with the same dtype and strides;
            head_dim is contiguous.
        lse_a, lse_b: float32 [rows, heads].
        out, out_lse: written; allocated if None. They may be o_a and lse_a themselves.
        mask: bool [rows]: rows with False are left unchanged.
        log2: the given and the returned lse are base-2 logarithms, not natural ones.

    Returns:
        out, out_lse.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    for name, tensor in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        check_plain(name, tensor)
    out = (
        torch.empty(o_a.shape, dtype=o_a.dtype, device=o_a.device) if out is None else check_plain("out", out)
    )
    out_lse = (
        torch.empty(lse_a.shape, dtype=torch.float32, device=o_a.device)
        if out_lse is None
        else check_plain("out_lse", out_lse)
    )
    _merge(o=o_a, lse=lse_a, o_b=o_b, lse_b=lse_b, out=out, out_lse=out_lse, mask=mask, log2=log2)
    return out, out_lse


def _merge(
    *,
    o: Tensor,
    lse: Tensor,
    out: Tensor,
    out_lse: Tensor,
    log2: bool,
    o_b: Tensor | None = None,
    lse_b: Tensor | None = None,
    indptr: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    check_types(bool, "True or False", log2=log2)
    if mask is not None:
        check_plain("mask", mask)
        mask = mask.view(torch.uint8)
    by_name("merge_states")(
        o=o,
        lse=lse,
        out=out,
        out_lse=out_lse,
        is_log2=log2,
        file=_kernel_file(o.dtype, o.device),
        o_b=o_b,
        lse_b=lse_b,
        indptr=indptr,
        mask=mask,
    )
