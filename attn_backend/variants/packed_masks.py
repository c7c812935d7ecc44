"""Boolean masks as bits: what custom masks read."""

from __future__ import annotations

from typing import Literal

import numpy
import torch
from torch import Tensor

from ..metadata.structure import INT32_OR_INT64, MAX_INT32, index_tensor, refuse

BitOrder = Literal["big", "little"]


def packbits(x: Tensor, bitorder: BitOrder = "big") -> Tensor:
    """Packs eight values into a byte, as numpy.packbits does: the last byte is filled up with zeros.

    Args:
        x: [n], bool or integers: what is not 0 is a set bit.
        bitorder: "big": the first value is the highest bit of its byte. Masks of attention are "little".

    Returns:
        uint8 [ceil(n / 8)], on the device of x.

    Raises:
        ValueError: another shape, dtype or bit order.
    """
    bits = _bits(x, bitorder)
    padded = torch.zeros(-(-bits.shape[0] // 8) * 8, dtype=torch.bool, device=bits.device)
    padded[: bits.shape[0]] = bits
    return _packed(padded, bitorder)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: BitOrder = "big") -> tuple[Tensor, Tensor]:
    """Packs each segment by itself: a segment begins at a byte of its own.

    Waits for the device of `indptr`, once: the length of the result depends on it.

    Args:
        x: [at least indptr[-1]], bool or integers, the segments one after another: for custom masks q_len x
            kv_len of each request.
        indptr: int32 or int64 [segments + 1], on the device of x or on the host: segment i is
            x[indptr[i]:indptr[i + 1]].
        bitorder: as of packbits.

    Returns:
        uint8 [new_indptr[-1]], and new_indptr int32 [segments + 1], both on the device of x: segment i is
        packed[new_indptr[i]:new_indptr[i + 1]].

    Raises:
        ValueError: another shape, dtype or bit order; an indptr that is negative or falls; or 2^31 bytes and
            more.
    """
    bits = _bits(x, bitorder)
    index_tensor("indptr", indptr, INT32_OR_INT64, "[segments + 1]")
    if indptr.shape[0] == 0:
        refuse("indptr", indptr, "of at least one element: [segments + 1]")
    # so few numbers are counted on the host in less time than a launch takes
    begin = indptr.cpu().numpy().astype(numpy.int64)
    if begin[0] < 0 or (begin[1:] < begin[:-1]).any():
        refuse("indptr", begin.tolist(), "0 or more first, and then never less than before")
    new_begin = numpy.zeros_like(begin)
    numpy.cumsum((begin[1:] - begin[:-1] + 7) // 8, out=new_begin[1:])
    last, num_bytes = begin.item(-1), new_begin.item(-1)
    if last > bits.shape[0]:
        refuse("indptr[-1]", last, f"at most len(x) = {bits.shape[0]}")
    if num_bytes > MAX_INT32:
        refuse("indptr", indptr, f"of segments that take less than 2^31 bytes: they take {num_bytes}")
    end, gap = torch.from_numpy(numpy.stack((begin[1:], new_begin[:-1] * 8 - begin[:-1]))).to(
        x.device, non_blocking=True
    )
    position = torch.arange(begin.item(0), last, device=x.device)
    segment = torch.searchsorted(end, position, right=True)
    padded = torch.zeros(num_bytes * 8, dtype=torch.bool, device=x.device)
    padded.scatter_(0, position.add_(gap.index_select(0, segment)), bits[begin.item(0) : last])
    return _packed(padded, bitorder), torch.from_numpy(new_begin.astype(numpy.int32)).to(
        x.device, non_blocking=True
    )


def _bits(x: object, bitorder: object) -> Tensor:
    """Which values are not 0."""
    if not isinstance(x, Tensor) or x.ndim != 1 or x.is_floating_point() or x.is_complex():
        refuse("x", x, "a vector of booleans or integers")
    if bitorder not in ("big", "little"):
        refuse("bitorder", bitorder, "'big' or 'little'")
    return x if x.dtype == torch.bool else x != 0


def _packed(bits: Tensor, bitorder: BitOrder) -> Tensor:
    first, last, step = (7, -1, -1) if bitorder == "big" else (0, 8, 1)
    shifts = torch.arange(first, last, step, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)
