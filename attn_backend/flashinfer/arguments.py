"""Converts FlashInfer's arguments to this package's: element types, layouts of K and V, scales, indptrs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jit.manifest import CPU_HEAD_DIMS_TEXT, CUDA_HEAD_DIMS_TEXT, HeadDims
from ..kernels.attention import FLOAT8_Q_DTYPES
from ..kernels.native import CUDA_DTYPES
from ..metadata import KVCache, PageTable
from ..metadata.kv_cache import FORMATS_BY_DTYPE, SCALED_DTYPES
from ..validation import refuse, require
from ..variants import Variant, builtin, packbits, segment_packbits
from ..variants.builtin import alibi_slopes
from .features import not_supported

PagedKV = Tensor | tuple[Tensor, Tensor]
DType = str | torch.dtype
Scale = float | Tensor

_POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


def dtype_of(name: str, value: DType) -> torch.dtype:
    """The torch dtype for a name such as "float16", or for a dtype."""
    if isinstance(value, torch.dtype):
        return value
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        refuse(name, value, "a torch.dtype or its name")
    return found


def element_types(
    q_data_type: DType, kv_data_type: DType | None = None, o_data_type: DType | None = None
) -> dict[str, Any]:
    """dtype, kv_dtype, float8_q and float8_out of Heads, by name.

    Raises:
        NotImplementedError: an unsupported type, or an unsupported combination of types.
    """
    q_type = dtype_of("q_data_type", q_data_type)
    kv_type = q_type if kv_data_type is None else dtype_of("kv_data_type", kv_data_type)
    o_type = q_type if o_data_type is None else dtype_of("o_data_type", o_data_type)
    float8_q, float8_out = q_type in FLOAT8_Q_DTYPES, o_type == torch.float8_e4m3fn
    if q_type.itemsize == 1 and not float8_q:
        not_supported(f"q_data_type = {q_type}")
    is_mixed = {q_type, kv_type} == {*CUDA_DTYPES}
    if kv_type != q_type and not is_mixed and (float8_q or kv_type not in SCALED_DTYPES):
        not_supported(f"kv_data_type = {kv_type} with q_data_type = {q_type}")
    if o_type.itemsize == 1 and not float8_out:
        not_supported(f"o_data_type = {o_type}")
    if o_type != q_type and not float8_q and not float8_out:
        not_supported(f"o_data_type = {o_type} with q_data_type = {q_type}")
    dtype = q_type if not float8_q else torch.bfloat16 if float8_out else o_type
    return {
        "dtype": dtype,
        "kv_dtype": kv_type if is_mixed or kv_type in SCALED_DTYPES else None,
        "float8_q": float8_q,
        "float8_out": float8_out,
    }


def check_kv_layout(kv_layout: object) -> str:
    require(kv_layout in ("NHD", "HND"), "kv_layout", kv_layout, "'NHD' or 'HND'")
    return str(kv_layout)


class PosEncoding(NamedTuple):
    """How positions are encoded. rope: (scale, theta) of a rotary embedding of Q and K, for a cache with
    unrotated keys.
    """

    alibi: bool = False
    rope: tuple[float, float] | None = None


NO_POS_ENCODING = PosEncoding()


def pos_encoding(
    mode: object, rope_scale: float | None = None, rope_theta: float | None = None
) -> PosEncoding:
    if mode == "NONE":
        return NO_POS_ENCODING
    if mode not in _POS_ENCODING_MODES:
        refuse("pos_encoding_mode", mode, f"one of {', '.join(map(repr, _POS_ENCODING_MODES))}")
    if mode == "ROPE_LLAMA":
        return PosEncoding(
            rope=(
                1.0 if rope_scale is None else float(rope_scale),
                1e4 if rope_theta is None else float(rope_theta),
            )
        )
    return PosEncoding(alibi=mode == "ALIBI")


def paged_cache(paged_kv_cache: PagedKV, kv_layout: str) -> KVCache:
    """paged_kv_cache: (k, v), each NHD [pages, page_size, num_kv_heads, head_dim] or HND [pages,
    num_kv_heads, page_size, head_dim]; or both in one tensor, stacked in its second dimension. Tensors
    without page_size have one token per page.
    """
    if not isinstance(paged_kv_cache, tuple):
        first, second = paged_kv_cache, None
    elif len(paged_kv_cache) == 2:
        first, second = paged_kv_cache
    else:
        refuse("len(paged_kv_cache)", len(paged_kv_cache), "2: K and V")
    known = _views.get(id(first))
    if (
        known is not None
        and known.layout == kv_layout
        and _is(first, known.first)
        and (known.second is second is None or _is(second, known.second))
    ):
        return known.cache
    cache = _cache_of(first, second, kv_layout)
    key = id(first)

    def end(_: object) -> None:
        _views.pop(key, None)

    _views[key] = _Views(kv_layout, _seen(first, end), None if second is None else _seen(second, end), cache)
    return cache


def _cache_of(first: Tensor, second: Tensor | None, kv_layout: str) -> KVCache:
    # Detached: the cached views must not keep the caller's tensors alive.
    if second is not None:
        for i, tensor in enumerate((first, second)):
            if not isinstance(tensor, Tensor):
                refuse(f"paged_kv_cache[{i}]", tensor, "a tensor")
        k, v = first.detach(), second.detach()
    elif isinstance(first, Tensor) and first.ndim in (4, 5) and first.shape[1] == 2:
        k, v = first.detach().unbind(1)
    else:
        refuse("paged_kv_cache", first, "a tensor [pages, 2, ...], or the tuple (k, v)")
    if k.element_size() == 1 and k.dtype not in SCALED_DTYPES:
        not_supported(f"a KV-cache of {k.dtype}")
    if k.ndim == 3 and v.ndim == 3:  # [pages, num_kv_heads, head_dim]
        return KVCache.unchecked(k.unsqueeze(1), v.unsqueeze(1))
    for i, tensor in enumerate((k, v)):
        if tensor.ndim != 4:
            refuse(f"paged_kv_cache[{i}]", tensor, "a tensor of 4 dimensions")
    return (
        KVCache.unchecked(k.transpose(1, 2), v.transpose(1, 2))
        if kv_layout == "HND"
        else KVCache.unchecked(k, v)
    )


class _Views(NamedTuple):
    """K and V in the form that kernels take, made from (k, v) or from one tensor with both.

    Cached, because layers recur every step, and making views takes longer than the rest of a run.
    """

    layout: str
    first: _Seen
    second: _Seen | None
    cache: KVCache


# A weak reference to a tensor, and properties that can change in place: address, shape, strides, dtype.
_Seen = tuple[weakref.ref[Tensor], int, torch.Size, tuple[int, ...], torch.dtype]
_views: dict[int, _Views] = {}  # by the first tensor's id; removed when either tensor is freed


def _seen(tensor: Tensor, end: Callable[[object], None]) -> _Seen:
    return weakref.ref(tensor, end), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is(tensor: Tensor | None, seen: _Seen | None) -> bool:
    """Whether this is the same tensor, with unchanged address, shape and strides."""
    if tensor is None or seen is None:
        return False
    known, address, shape, strides, dtype = seen
    return (
        known() is tensor
        and tensor.data_ptr() == address
        and tensor.stride() == strides
        and tensor.shape == shape
        and tensor.dtype == dtype
    )


def token_scales_of(kv_cache_sf: object, kv_layout: str) -> tuple[Tensor, Tensor]:
    """The scales of K and V, float32 [pages, page_size, num_kv_heads]. kv_cache_sf has the order of
    kv_layout.
    """
    if isinstance(kv_cache_sf, tuple | list) and len(kv_cache_sf) == 2:
        k, v = kv_cache_sf
        if isinstance(k, Tensor) and isinstance(v, Tensor) and k.ndim == v.ndim == 3:
            return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))
    order = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
    refuse(
        "kv_cache_sf",
        kv_cache_sf,
        f"(k_sf, v_sf), two float32 tensors [pages, {order}], after a plan with use_token_head_sf=True",
    )


def ragged_cache(k: Tensor, v: Tensor, kv_layout: str = "NHD", num_kv_heads: int | None = None) -> KVCache:
    """k, v: NHD [tokens, num_kv_heads, head_dim], HND [num_kv_heads, tokens, head_dim]. num_kv_heads: the
    required number.
    """
    if k.element_size() == 1 and k.dtype not in SCALED_DTYPES:
        not_supported(f"K and V of {k.dtype}")
    return KVCache.as_given(
        _ragged_pages("k", k, kv_layout, num_kv_heads), _ragged_pages("v", v, kv_layout, num_kv_heads)
    )


def _ragged_pages(name: str, tensor: Tensor, kv_layout: str, num_kv_heads: int | None) -> Tensor:
    """K or V of all requests, concatenated, as pages [tokens, 1, num_kv_heads, head_dim] of one token."""
    if tensor.ndim != 3:
        refuse(name, tensor, "a tensor of 3 dimensions")
    if num_kv_heads not in (None, tensor.shape[0 if kv_layout == "HND" else 1]):
        form = (
            f"[num_kv_heads = {num_kv_heads}, tokens, head_dim]"
            if kv_layout == "HND"
            else f"[tokens, num_kv_heads = {num_kv_heads}, head_dim]"
        )
        refuse(name, tensor, f"{form}, as kv_layout = {kv_layout!r} has it")
    (tokens, heads, columns), (step, head_step, column_step) = tensor.shape, tensor.stride()
    if kv_layout == "HND":
        tokens, heads, step, head_step = heads, tokens, head_step, step
    if heads == 1:
        head_step = columns
    if tokens == 1:
        step = heads * head_step
    return tensor.as_strided((tokens, 1, heads, columns), (step, heads * head_step, head_step, column_step))


def is_number(scale: object) -> bool:
    """Whether the host knows the scale: a number, or a host tensor with one element."""
    return type(scale) is float or not isinstance(scale, Tensor) or (scale.is_cpu and scale.numel() == 1)


@lru_cache(maxsize=1024)
def indptr_of_equal(batch_size: int, length: int, device: torch.device) -> Tensor:
    """int32 [batch_size + 1] for requests of `length` each. Cached by batch size."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


def indptr_of(lengths: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """[len(lengths) + 1]: the prefix sum of lengths."""
    indptr = torch.zeros(len(lengths) + 1, dtype=dtype, device=lengths.device)
    torch.cumsum(lengths, 0, out=indptr[1:])
    return indptr


@lru_cache(maxsize=64)
def alibi_slopes_on(num_heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(num_heads).to(device)


def rows_of(qo_indptr: Tensor) -> int | None:
    """The end of qo_indptr; None if reading it would wait for a device."""
    return qo_indptr.numpy().item(-1) if qo_indptr.is_cpu else None  # numpy takes a third of the time


def on_device(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=non_blocking)


def from_zero(indptr: Tensor) -> tuple[int, Tensor]:
    """The first element of a host indptr, and the indptr shifted to start at 0.

    A device indptr is assumed to start at 0, to avoid waiting for the device.
    """
    first = indptr.numpy().item(0) if indptr.is_cpu else 0
    return first, indptr - first if first else indptr


def pages_from_zero(kv_indptr: Tensor, kv_indices: Tensor) -> tuple[Tensor, Tensor]:
    """kv_indptr shifted to start at 0, and the page ids in its range."""
    first, kv_indptr = from_zero(kv_indptr)
    return kv_indptr, kv_indices[first:] if first else kv_indices


def pages_on_device(
    kv_indptr: Tensor, kv_indices: Tensor, device: torch.device, non_blocking: bool
) -> tuple[Tensor, Tensor]:
    """pages_from_zero, on the device."""
    kv_indptr, kv_indices = pages_from_zero(kv_indptr, kv_indices)
    return on_device(kv_indptr, device, non_blocking), on_device(kv_indices, device, non_blocking)


def check_fits(name: str, tensor: Tensor, buffer_name: str, buffer: Tensor) -> None:
    if len(tensor) > len(buffer):
        refuse(f"len({name})", len(tensor), f"at most {len(buffer)}, that of {buffer_name}")


def copy_if_other(buffer: Tensor, tensor: Tensor, non_blocking: bool) -> None:
    """Copies the tensor to the buffer, unless it is the buffer itself."""
    if buffer.data_ptr() != tensor.data_ptr() or buffer.device != tensor.device:
        buffer.copy_(tensor, non_blocking=non_blocking)


def buffer_length(name: str, buffer: object) -> int:
    """The length of a buffer, which is required with CUDA graphs."""
    if not isinstance(buffer, Tensor):
        refuse(name, buffer, "a tensor with use_cuda_graph=True")
    return len(buffer)


def csr_on_device(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    device: torch.device,
    non_blocking: bool = True,
) -> PageTable:
    """A page table from tensors that may be on the host."""
    indptr, indices = pages_on_device(kv_indptr, kv_indices, device, non_blocking)
    return PageTable.csr(indptr, indices, on_device(kv_last_page_len, device, non_blocking), page_size)


@dataclass(frozen=True)
class Heads:
    """The head configuration of an Attention."""

    num_qo_heads: int
    num_kv_heads: int
    head_dims: HeadDims
    dtype: torch.dtype  # of all of Q, K, V and the output that have at least 16 bits
    kv_dtype: torch.dtype | None = None  # of K and V, if it differs
    float8_q: bool = False  # Q also has kv_dtype
    float8_out: bool = False  # the output is float8_e4m3fn
    token_scales: bool = False  # K and V have a scale for each token and head

    @property
    def q_dtype(self) -> torch.dtype:
        return self.kv_dtype if self.float8_q and self.kv_dtype is not None else self.dtype

    @property
    def o_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.float8_out else self.dtype

    @cached_property
    def is_over_float8(self) -> bool:
        """Whether K and V have scales for all, or for each head."""
        return self.kv_dtype in SCALED_DTYPES and not self.token_scales

    @cached_property
    def default_scale(self) -> float:
        return float(self.head_dims.qk**-0.5)


@lru_cache(maxsize=256)
def heads_of(
    device: torch.device,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int | None,
    q_data_type: DType,
    kv_data_type: DType | None = None,
    o_data_type: DType | None = None,
    use_token_head_sf: bool = False,
) -> Heads:
    """The head configuration of a plan. Cached, as plans rarely differ between steps.

    Raises:
        ValueError: a wrong argument.
        NotImplementedError: there are no kernels for these heads.
    """
    dims = check_head_dims(head_dim_qk, head_dim_vo, device)
    types = element_types(q_data_type, kv_data_type, o_data_type)
    heads = Heads(num_qo_heads, num_kv_heads, dims, **types, token_scales=use_token_head_sf)
    if use_token_head_sf:
        if heads.kv_dtype == torch.float8_e5m2:
            not_supported("use_token_head_sf with kv_data_type = torch.float8_e5m2")
        if heads.kv_dtype != torch.float8_e4m3fn:
            refuse("kv_data_type", kv_data_type, "float8_e4m3fn with use_token_head_sf=True")
        if heads.float8_q:
            refuse("q_data_type", q_data_type, "float16 or bfloat16 with use_token_head_sf=True")
    if (
        heads.float8_q
        and device.type == "cuda"
        and not dims.runs_over(FORMATS_BY_DTYPE[heads.q_dtype].element, float8_q=True)
    ):
        not_supported(f"q_data_type = {heads.q_dtype} with head_dim = {dims} on CUDA")
    return heads


def check_head_dims(head_dim_qk: int, head_dim_vo: int | None, device: torch.device) -> HeadDims:
    """Columns of K and of V; head_dim_vo None: V has as many as K.

    Raises:
        NotImplementedError: there are no kernels for them.
    """
    dims = HeadDims(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)
    if device.type == "cuda" and not dims.runs_on_cuda:
        not_supported(f"head_dim = {dims} on CUDA (must be {CUDA_HEAD_DIMS_TEXT})")
    if device.type != "cuda" and not dims.runs_on_cpu:
        not_supported(f"head_dim = {dims} on a CPU, must be {CPU_HEAD_DIMS_TEXT}")
    return dims


def pack_custom_mask(
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    device: torch.device,
    non_blocking: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The bits of a mask, and the byte offset of each request (int32 [batch_size + 1]), on `device`; None,
    None without a mask.

    Args:
        custom_mask: bool, q_len x kv_len of each request, flattened and concatenated. Packing waits for the
            device.
        packed_custom_mask: uint8, each request starting at a new byte, the first value in the lowest bit. It
            takes precedence over custom_mask.
        kv_lens: [batch_size].
    """
    if custom_mask is None and packed_custom_mask is None:
        return None, None
    bits = qo_indptr.diff().long() * kv_lens.to(qo_indptr.device)
    if packed_custom_mask is None:
        assert custom_mask is not None
        if custom_mask.dtype != torch.bool:
            refuse("custom_mask", custom_mask, "a bool tensor")
        packed_custom_mask, byte_indptr = segment_packbits(
            custom_mask.reshape(-1), indptr_of(bits.cpu(), torch.int64), "little"
        )
    else:
        byte_indptr = indptr_of((bits + 7) // 8, torch.int64)
    return on_device(packed_custom_mask, device, non_blocking), on_device(
        byte_indptr.to(torch.int32), device, non_blocking
    )


def pack_single_mask(
    custom_mask: Tensor | None, packed_custom_mask: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Like pack_custom_mask, for the mask [q_len, kv_len] of one request."""
    if custom_mask is None and packed_custom_mask is None:
        return None, None
    if packed_custom_mask is None:
        assert custom_mask is not None
        packed_custom_mask = packbits(custom_mask.reshape(-1), "little")
    return packed_custom_mask, indptr_of_equal(1, len(packed_custom_mask), device)


def items_of(
    prefix_len_ptr: Tensor | None, token_pos_in_items_ptr: Tensor | None, token_pos_in_items_len: int
) -> tuple[Tensor | None, Tensor | None]:
    """prefix_len int32 [batch_size] and token_pos_in_items uint16 [batch_size, token_pos_in_items_len] for
    multi-item scoring; None, None without it.
    """
    if prefix_len_ptr is None:
        if token_pos_in_items_ptr is not None:
            refuse("token_pos_in_items_ptr", token_pos_in_items_ptr, "None without prefix_len_ptr")
        return None, None
    if token_pos_in_items_ptr is None or token_pos_in_items_len < 1:
        refuse(
            "token_pos_in_items_ptr",
            token_pos_in_items_ptr,
            "a tensor, and token_pos_in_items_len its elements of each request, with prefix_len_ptr",
        )
    prefix_len = (
        prefix_len_ptr.view(torch.int32)
        if prefix_len_ptr.dtype == torch.uint32
        else prefix_len_ptr.to(torch.int32)
    ).reshape(-1)
    positions = token_pos_in_items_ptr.to(torch.uint16)
    wanted = prefix_len.shape[0] * token_pos_in_items_len
    if positions.numel() < wanted:  # the last request may have fewer
        positions = torch.cat((positions.flatten(), positions.new_zeros(wanted - positions.numel())))
    return prefix_len, positions.flatten()[:wanted].view(-1, token_pos_in_items_len)


class Scales(NamedTuple):
    """Factors of the logits."""

    number: float
    of_requests: Tensor | None = None  # float32 [batch] or [1]
    of_query_heads: Tensor | None = None  # float32 [num_qo_heads]
    # For 8-bit queries and keys, read by the kernel: float32 [1] or [num_kv_heads].
    q: Tensor | None = None
    k: Tensor | None = None

    @property
    def params(self) -> dict[str, Tensor]:
        """The arguments of scale_variants()."""
        if self.of_query_heads is not None:
            heads = {"q_scales": self.of_query_heads}
            return heads if self.of_requests is None else {"sm_scales": self.of_requests, **heads}
        return _NO_PARAMS if self.of_requests is None else {"sm_scales": self.of_requests}


_NO_PARAMS: dict[str, Tensor] = {}


def check_scale_of_requests(sm_scale: Tensor, batch_size: int) -> None:
    """Checks that the tensor has one element, or one for each request. Otherwise kernels would read past its
    end, or use elements of no request.
    """
    if sm_scale.numel() not in (1, batch_size):
        refuse(
            "sm_scale",
            sm_scale,
            f"a number, or a tensor of one element, or of one for each request: {batch_size}",
        )


def scaled(
    heads: Heads,
    batch_size: int,
    sm_scale: Scale | None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
) -> Scales:
    """sm_scale times q_scale and k_scale. sm_scale may be a tensor with one element per request (None: the
    default). Device tensors are read when a kernel runs. For 8-bit Q they may have one element per query or
    KV head, for 8-bit K one per KV head.

    Raises:
        ValueError: sm_scale has another number of elements.
        NotImplementedError: another scale has.
    """
    number, of_requests, of_query_heads, q, k = 1.0, None, None, None, None
    for name, scale in (
        ("sm_scale", heads.default_scale if sm_scale is None else sm_scale),
        ("q_scale", q_scale),
        ("k_scale", k_scale),
    ):
        if scale is None:
            continue
        if is_number(scale):
            number *= float(scale)
            continue
        assert isinstance(scale, Tensor)
        if name == "sm_scale":
            check_scale_of_requests(scale, batch_size)
        factor, count = flat(scale), scale.numel()
        if name == "q_scale" and heads.float8_q and count in (1, heads.num_kv_heads):
            q = factor
        elif name == "q_scale" and heads.float8_q and count == heads.num_qo_heads:
            of_query_heads = factor
        elif name == "k_scale" and heads.is_over_float8 and count in (1, heads.num_kv_heads):
            k = factor
        elif count == 1 or (name == "sm_scale" and scale.ndim == 1):
            of_requests = factor if of_requests is None else of_requests * factor
        else:
            not_supported(f"{name} as a tensor of shape {list(scale.shape)}")
    return Scales(number, of_requests, of_query_heads, q, k)


def scale_of_v(v_scale: Scale, is_float8: bool, num_kv_heads: int) -> tuple[Scale | None, Scale | None]:
    """(V's scale for kernels, with a float8 cache; the remaining factor of the output).

    None means 1.

    Raises:
        NotImplementedError: a tensor with another number of elements.
    """
    if is_number(v_scale):
        v_scale = float(v_scale)
        if v_scale == 1.0:
            return None, None
        return (v_scale, None) if is_float8 and v_scale > 0 else (None, v_scale)
    assert isinstance(v_scale, Tensor)
    if v_scale.numel() not in ((1, num_kv_heads) if is_float8 else (1,)):
        not_supported(f"v_scale as a tensor of shape {list(v_scale.shape)}")
    return (flat(v_scale), None) if is_float8 else (None, v_scale)


def flat(scale: Tensor) -> Tensor:
    """float32 [elements]. Returns the tensor itself if possible, because kernels recognize tensors they were
    given before.
    """
    return scale if scale.ndim == 1 and scale.dtype == torch.float32 else scale.reshape(-1).to(torch.float32)


def one_of(**scales: Scale | None) -> Scale | None:
    """The scale that is given, under either of its two names.

    Raises:
        ValueError: both are given.
    """
    given = [(name, scale) for name, scale in scales.items() if scale is not None]
    if len(given) > 1:
        refuse(given[0][0], given[0][1], f"None with {given[1][0]}")
    return given[0][1] if given else None


@lru_cache(maxsize=1)
def _query_head_scale() -> Variant:
    def query_head_scale(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * q_scales[h]  # type: ignore[name-defined]  # noqa: F821

    return Variant.from_functions(query_head_scale, tensors={"q_scales": torch.float32})


def scale_variants(params: frozenset[str]) -> list[Variant]:
    """The variants that multiply scores by runs' arguments of these names."""
    of_requests = [builtin.request_scale()] if "sm_scales" in params else []
    return of_requests + ([_query_head_scale()] if "q_scales" in params else [])
