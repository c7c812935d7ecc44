"""Append and sampling on a CPU with the device's kernels (tests/csrc/device_kernels.cpp)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulation
import torch
from torch import Tensor

from attn_backend import Samples, SpeculativeSamples


def build(folder: Path) -> ctypes.CDLL:
    library = emulation.build(
        folder, "device_kernels", emulation.TESTS / "device_kernels.cpp", options=["-O2"]
    )
    library.device_append.restype = library.device_merge_states.restype = library.device_sample.restype = (
        ctypes.c_char_p
    )
    return library


def append_kv(
    library: ctypes.CDLL, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, blocks: int
) -> None:
    """k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim].

    Elements of any type, since bytes are copied.
    """
    pointers = (ctypes.c_void_p * 5)(*(t.data_ptr() for t in (k, v, k_cache, v_cache, slots)))
    strides = (ctypes.c_int64 * 10)(
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]
    )
    sizes = (ctypes.c_int64 * 7)(slots.shape[0], *k_cache.shape, k.element_size(), slots.dtype == torch.int64)
    emulation.check(library.device_append(pointers, strides, sizes, blocks))


def merge_states(
    library: ctypes.CDLL,
    o: Tensor,
    lse: Tensor,
    indptr: Tensor | None,
    mask: Tensor | None,
    log2: bool,
    blocks: int,
) -> tuple[Tensor, Tensor]:
    """o [rows, states, heads, head_dim], or with an int64 indptr [states, heads, head_dim]; lse likewise.

    Rows that the mask excludes are NaN.
    """
    rows = o.shape[0] if indptr is None else len(indptr) - 1
    out, out_lse = (
        torch.full((rows, *o.shape[-2:]), torch.nan, dtype=o.dtype),
        torch.full((rows, o.shape[-2]), torch.nan),
    )
    pointers = (ctypes.c_void_p * 6)(
        *(None if t is None else t.data_ptr() for t in (o, lse, out, out_lse, indptr, mask))
    )
    of_states = [0] if indptr is not None else []
    strides = (ctypes.c_int64 * 8)(
        *of_states, *o.stride()[:-1], *of_states, *lse.stride()[:-1], *out.stride()[:2], out_lse.stride(0)
    )
    dtype = (torch.float32, torch.float16, torch.bfloat16).index(o.dtype)
    sizes = (ctypes.c_int64 * 5)(0 if indptr is not None else o.shape[1], rows, *o.shape[-2:], dtype)
    failure = library.device_merge_states(
        pointers, strides, sizes, ctypes.c_double(1.0 if log2 else math.log2(math.e)), blocks
    )
    emulation.check(failure)
    return out, out_lse


class _RowFloat(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("value", ctypes.c_float))


class _RowInt(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_int64", ctypes.c_int32), ("value", ctypes.c_int64))


class _IndexArray(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_int64", ctypes.c_int32))


class _SamplingParams(ctypes.Structure):
    """SamplingParams of csrc/sampling/sampling.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("source_rows", _IndexArray),
        ("num_source_rows", ctypes.c_int32),
        ("token_mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        ("temperature", _RowFloat),
        ("top_p", _RowFloat),
        ("min_p", _RowFloat),
        ("top_k", _RowInt),
        ("seed", _RowInt),
        ("position", _RowInt),
        ("token_ids", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("top_token_ids", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("written_stride", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("draft_probs", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        ("num_accepted", ctypes.c_void_p),
        ("num_passed", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("draft_ids_are_int64", "num_draft_tokens", "batch", "vocab", "num_top_logprobs")
        ),
        *((name, ctypes.c_int32) for name in ("token_ids_are_int64", "joint", "tempered_logprobs", "task")),
    )


class DeviceSampling:
    """Sampling's kernels.

    Keyword arguments are SamplingParams' fields; `temperature` to `position`: a number or a tensor.
    """

    SAMPLE, RENORM, MASK_LOGITS, SPECULATE = range(4)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self,
        values: Tensor,
        *,
        from_probs: bool = False,
        ctas: int = 1,
        unfiltered: bool = False,
        run_seed: int = 0,
        order: Sequence[int] | None = None,
        **fields: Any,
    ) -> None:
        params = _SamplingParams(
            values=values.data_ptr(),
            row_stride=values.stride(0),
            batch=values.shape[0],
            vocab=values.shape[-1],
        )
        fields = {
            "temperature": 1.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "top_k": 0,
            "seed": 0,
            "position": 0,
            **fields,
        }
        for name, value in fields.items():
            if name in ("temperature", "top_p", "min_p"):
                setattr(
                    params,
                    name,
                    _RowFloat(value.data_ptr(), 0.0) if isinstance(value, Tensor) else _RowFloat(None, value),
                )
            elif name in ("top_k", "seed", "position"):
                is_tensor = isinstance(value, Tensor)
                setattr(
                    params,
                    name,
                    _RowInt(value.data_ptr(), value.dtype == torch.int64, 0)
                    if is_tensor
                    else _RowInt(None, 0, value),
                )
            else:
                setattr(params, name, value.data_ptr() if isinstance(value, Tensor) else value)
        element = 2 if from_probs else int(values.dtype == torch.bfloat16)
        ctas_in_order = None if order is None else (ctypes.c_int32 * len(order))(*order)
        emulation.check(
            self._library.device_sample(
                ctypes.byref(params), element, ctas, unfiltered, run_seed, ctas_in_order
            )
        )

    def sample(
        self,
        values: Tensor,
        *,
        token_mask: Tensor | None = None,
        filter_order: str = "top_k_first",
        logprobs_of: str = "logits",
        **given: Any,
    ) -> Samples:
        """As `sample`, or `sample_from_probs` with from_probs=True."""
        rows = given.pop("rows", None)
        if rows is not None:
            given |= {
                "source_rows": _IndexArray(rows.data_ptr(), rows.dtype == torch.int64),
                "num_source_rows": len(values),
                "batch": len(rows),
            }
        batch, count = len(values) if rows is None else len(rows), given.pop("num_top_logprobs", 0)
        samples = Samples(
            torch.full((batch,), -1, dtype=torch.int32),
            torch.full((batch,), False),
            torch.zeros(batch) if given.pop("return_logprobs", False) else None,
            torch.full((batch, count), -1, dtype=torch.int32) if count else None,
            torch.zeros(batch, count) if count else None,
        )
        outputs = {
            "token_ids": samples.token_ids,
            "valid": samples.valid,
            "logprobs": samples.logprobs,
            "top_token_ids": samples.top_token_ids,
            "top_logprobs": samples.top_logprobs,
        }
        if token_mask is not None:
            given |= {"token_mask": token_mask, "mask_stride": token_mask.stride(0)}
        given |= {
            "joint": filter_order == "joint",
            "tempered_logprobs": logprobs_of == "tempered",
            "num_top_logprobs": count,
        }
        self.launch(values, **outputs, **given)
        return samples

    def write_rows(self, values: Tensor, task: int, **given: Any) -> Tensor:
        out = torch.full(values.shape, torch.nan)
        self.launch(values, task=task, written=out, written_stride=out.stride(0), **given)
        return out

    def speculate(
        self, draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, **given: Any
    ) -> SpeculativeSamples:
        batch, rows = target_probs.shape[:2]
        counts = torch.full((2, batch), -7, dtype=torch.int32)
        samples = SpeculativeSamples(
            torch.full((batch, rows), -7, dtype=torch.int32), *counts, valid=torch.full((batch,), False)
        )
        drafts = {
            "draft_probs": draft_probs,
            "draft_token_ids": draft_token_ids,
            "draft_ids_are_int64": True,
            "num_draft_tokens": rows - 1,
        }
        self.launch(target_probs, from_probs=True, task=self.SPECULATE, **drafts, **vars(samples), **given)
        return samples
