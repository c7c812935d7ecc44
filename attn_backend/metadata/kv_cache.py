"""K and V of one layer in the engine's storage, as strided views: nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..stored_formats import BLOCK_COLUMNS, FORMATS, FourBitDtype, PairDtype, StoredFormat
from ..validation import (
    brief,
    check_int,
    check_plain,
    check_same_device,
    dtype_name,
    explain_failure,
    refuse,
    require,
    short_repr,
)

_Views = TypeVar("_Views")
CacheDtype = torch.dtype | FourBitDtype | PairDtype


def cache_dtype(stored: StoredFormat) -> CacheDtype:
    return cast(CacheDtype, stored.dtype) if stored.head_columns else getattr(torch, stored.dtype)


INT4: FourBitDtype = "int4"
NVFP4: FourBitDtype = "nvfp4"
MXFP4: FourBitDtype = "fp4_mx_block16"
INT8_NVFP4: PairDtype = "int8_k_nvfp4_v"
# Reversed: of two formats of e4m3, this has the one without a scale for each token and head.
FORMATS_BY_DTYPE = {cache_dtype(stored): stored for stored in reversed(FORMATS)}
# Of caches with a scale for each token and head, or with BlockScales.
TOKEN_SCALED_FORMATS = {cache_dtype(stored): stored for stored in FORMATS if stored.has_token_scales}
# For dtypes with 4 bits in K or V: head_dim must be a multiple of this.
FOUR_BIT_COLUMNS: dict[CacheDtype, int] = {
    dtype: stored.head_columns for dtype, stored in TOKEN_SCALED_FORMATS.items() if stored.head_columns
}
# Bytes of 4 bits are uint8: the dtype of their scales tells them apart.
_FOUR_BITS = [stored for stored in TOKEN_SCALED_FORMATS.values() if stored.head_columns and not stored.pair]
_FOUR_BITS_BY_SCALES = {getattr(torch, stored.scales or ""): cache_dtype(stored) for stored in _FOUR_BITS}
assert len(_FOUR_BITS_BY_SCALES) == len(_FOUR_BITS), "4-bit types whose scales have the same dtype"
# The dtypes of K and V.
_SIDES: dict[CacheDtype, tuple[CacheDtype, CacheDtype]] = {
    dtype: (cache_dtype(stored.sides[0]), cache_dtype(stored.sides[1]))
    for dtype, stored in TOKEN_SCALED_FORMATS.items()
    if stored.pair
}
_PAIRS = {sides: dtype for dtype, sides in _SIDES.items()}
_BLOCK_DTYPES = tuple(dtype for dtype in _FOUR_BITS_BY_SCALES if dtype != torch.float32)
DTYPES = tuple(
    dtype
    for dtype in dict.fromkeys(map(cache_dtype, FORMATS))
    if isinstance(dtype, torch.dtype) and dtype != torch.uint8
)
_DTYPES_TEXT = f"{', '.join(map(dtype_name, DTYPES[:-1]))} or {dtype_name(DTYPES[-1])}"
# Of caches with scales for all, for heads or for requests.
SCALED_DTYPES = tuple(dtype for dtype in DTYPES if FORMATS_BY_DTYPE[dtype].has_given_scales)
# Rows of MLA latents that include their scales, as in DeepSeek V3.2: 512 e4m3 numbers, 4 float32 scales, 64
# bf16 numbers.
SCALED_LATENT_DTYPE, SCALED_LATENT_BYTES, SCALED_LATENT_DIMS = torch.uint8, 656, (576, 512)


class BlockScales(NamedTuple):
    """Scales of an FP4 cache, one for 16 columns of a token's head.

    Attributes:
        blocks: [pages, page_size, num_kv_heads, head_dim / 16], last dimension contiguous. float8_e4m3fn:
            NVFP4. uint8: exponents of powers of 2, plus 127, as in the OCP MX formats.
        factor: multiplies all of them: NVFP4's scale of the tensor. 1 for powers of 2.
    """

    blocks: Tensor
    factor: float = 1.0

    def __repr__(self) -> str:
        """Without reading an element, as short_repr()."""
        return f"BlockScales(blocks={brief(self.blocks)}, factor={self.factor})"


Scale = Tensor | float | None
CacheScale = Scale | BlockScales
_LEAST_FLOAT, _MAX_FLOAT = 2.0**-149, torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class KVCache:
    """k: [pages, page_size, num_kv_heads, head_dim], v: [pages, page_size, num_kv_heads, head_dim_v],
    bfloat16, float16, float32, float8_e4m3fn, float8_e5m2 or int8. The last dimension is contiguous, the
    other strides are free, and V's may differ from K's. V may be a view of K's bytes. Made by the
    `from_...` methods. (For rows that include their scales, `from_latent` makes k: uint8 [pages, page_size,
    1, 656].)

    k_scale, v_scale: factors of a float8 cache's elements; None: 1. A number above 0, or a float32 tensor of
    such numbers on the cache's device: [] or [1], one for all; [num_kv_heads]; [batch, 1] or [batch,
    num_kv_heads], for each request of the batch. With the last two, the levels of a composition must give the
    `requests` of their rows. Tensors are read when a kernel runs: a captured CUDA graph uses their contents
    at replay. Or [pages, page_size, num_kv_heads] for float8_e4m3fn, int8 and uint8: one for each token and
    head, which append computes and writes. This order holds in every layout. Strides are free, and the scales
    may be views of the pages' own bytes. Except in a pair, both have this form, or neither; int8 requires it.

    uint8 with such scales is int4: columns 2i and 2i + 1 are the lower and the upper half of byte i, so k is
    [pages, page_size, num_kv_heads, head_dim / 2]. The lowest 4 bits of a scale hold a zero point z. A number
    c stands for scale * (c - z), without these bits in the scale. head_dim is a multiple of 32.

    uint8 with BlockScales is FP4: e2m1 numbers, packed like int4's, times the scale of their block and its
    factor. Append computes the scales of blocks, and reads the factor. head_dim is a multiple of 64.

    The one pair of different formats is "int8_k_nvfp4_v": int8 K with a scale for each token and head, uint8
    V with float8_e4m3fn BlockScales. head_dim is a multiple of 64.

    Raises:
        ValueError: K or V of another dtype or dimension, K and V that do not match, a head_dim that is not
            contiguous, invalid scales, or scales for a cache without scales.
    """

    k: Tensor
    v: Tensor
    k_scale: CacheScale = None
    v_scale: CacheScale = None

    @classmethod
    def from_tensor(
        cls, kv: Tensor, layout: str = "NHD", *, k_scale: CacheScale = None, v_scale: CacheScale = None
    ) -> KVCache:
        """kv: NHD [pages, 2, page_size, num_kv_heads, head_dim], HND [pages, 2, num_kv_heads, page_size,
        head_dim].
        """
        _check_dimensions("kv", kv, 5, "[pages, 2, page_size, num_kv_heads, head_dim]")
        require(kv.shape[1] == 2, "kv", kv, "a tensor [pages, 2, ...]: K and V along the second dimension")
        k, v = _view("kv", kv, lambda: kv.unbind(1))
        return cls(_token_major("kv", k, layout), _token_major("kv", v, layout), k_scale, v_scale)

    @classmethod
    def from_pair(
        cls,
        k: Tensor,
        v: Tensor,
        layout: str = "NHD",
        *,
        k_scale: CacheScale = None,
        v_scale: CacheScale = None,
    ) -> KVCache:
        """k, v: NHD [pages, page_size, num_kv_heads, head_dim], HND [pages, num_kv_heads, page_size,
        head_dim]; v may differ in the last dimension.
        """
        _check_dimensions("k", k, 4, "[pages, page_size, num_kv_heads, head_dim]")
        _check_dimensions("v", v, 4, "[pages, page_size, num_kv_heads, head_dim]")
        return cls(_token_major("k", k, layout), _token_major("v", v, layout), k_scale, v_scale)

    @classmethod
    def from_packed(
        cls, kv: Tensor, layout: str = "HND", *, k_scale: CacheScale = None, v_scale: CacheScale = None
    ) -> KVCache:
        """K and V concatenated in the last dimension.

        kv: HND [pages, num_kv_heads, page_size, 2 * head_dim], NHD [pages, page_size, num_kv_heads, 2 *
        head_dim].
        """
        _check_dimensions("kv", kv, 4, "[pages, num_kv_heads, page_size, 2 * head_dim]")
        require(kv.shape[3] % 2 == 0, "kv", kv, "a tensor with an even last dimension: 2 * head_dim")
        k, v = _view("kv", kv, lambda: kv.unflatten(3, (2, kv.shape[3] // 2)).unbind(3))
        return cls(_token_major("kv", k, layout), _token_major("kv", v, layout), k_scale, v_scale)

    @classmethod
    def from_slots(
        cls,
        k: Tensor,
        v: Tensor,
        page_size: int = 1,
        *,
        k_scale: CacheScale = None,
        v_scale: CacheScale = None,
    ) -> KVCache:
        """k, v: [slots, num_kv_heads, head_dim]; v may differ in the last dimension.

        Page p consists of the slots [p * page_size, (p + 1) * page_size). Slots that do not fill a page are
        cut off.
        """
        _check_dimensions("k", k, 3, "[slots, num_kv_heads, head_dim]")
        _check_dimensions("v", v, 3, "[slots, num_kv_heads, head_dim]")
        check_int("page_size", page_size, 1)
        return cls(_pages_of_slots("k", k, page_size), _pages_of_slots("v", v, page_size), k_scale, v_scale)

    @classmethod
    def from_ragged(
        cls, k: Tensor, v: Tensor, *, k_scale: CacheScale = None, v_scale: CacheScale = None
    ) -> KVCache:
        """k, v: [tokens, num_kv_heads, head_dim], for `PageTable.ragged`; page_size is 1."""
        return cls.from_slots(k, v, 1, k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_latent(cls, latent: Tensor, head_dim_v: int = 512, *, scale: CacheScale = None) -> KVCache:
        """The latents of multi-head latent attention. A token's row is its key for all query heads, and the
        row's first columns are its value; V is a view of K.

        Args:
            latent: [pages, page_size, width]; the last dimension is contiguous, the other strides are free.
                DeepSeek's width is 576; the first head_dim_v = 512 columns are the value. Or uint8 [pages,
                page_size, 656], which DeepSeek V3.2's engines call fp8_ds_mla. Such a row has 512
                float8_e4m3fn numbers (the latent), 4 float32 factors, each for 128 of them, and 64 bfloat16
                numbers (the rotated part). It requires an Attention with kv_dtype=torch.uint8.
            head_dim_v: columns of V.
            scale: of float8 latents, one for all: both k_scale and v_scale.
        """
        _check_dimensions("latent", latent, 3, "[pages, page_size, width]")
        k = _view("latent", latent, lambda: latent.unsqueeze(2))
        if latent.dtype == SCALED_LATENT_DTYPE:
            if latent.shape[2] != SCALED_LATENT_BYTES:
                refuse(
                    "latent", latent, f"uint8 [pages, page_size, {SCALED_LATENT_BYTES}], or of another dtype"
                )
            check_int("head_dim_v", head_dim_v, SCALED_LATENT_DIMS[1], SCALED_LATENT_DIMS[1])
        check_int("head_dim_v", head_dim_v, 1, max(latent.shape[2], 1))
        require(not _is_of_tokens(scale), "scale", scale, "one for all: latents have no scale for each token")
        return cls(k, k[..., :head_dim_v], scale, scale)

    @classmethod
    def unchecked(
        cls, k: Tensor, v: Tensor, k_scale: CacheScale = None, v_scale: CacheScale = None
    ) -> KVCache:
        """A KVCache without the checks, in a fifth of the time: `Attention.run` and `append_kv` check shapes,
        dtypes and strides themselves.
        """
        return cls.as_given(_with_plain_strides(k), _with_plain_strides(v), k_scale, v_scale)

    @classmethod
    def as_given(
        cls, k: Tensor, v: Tensor, k_scale: CacheScale = None, v_scale: CacheScale = None
    ) -> KVCache:
        """Like `unchecked`, for views whose dimensions of size 1 already have the strides of a contiguous
        tensor.
        """
        cache = object.__new__(cls)
        fields = cache.__dict__  # torch.compile in torch 2.11 does not trace its update()
        fields["k"], fields["v"] = k, v
        return cache if k_scale is None and v_scale is None else cache.with_scales(k_scale, v_scale)

    def with_scales(self, k_scale: CacheScale, v_scale: CacheScale) -> KVCache:
        """The same K and V with these scales, unchecked."""
        cache = object.__new__(KVCache)
        fields = cache.__dict__
        fields["k"], fields["v"], fields["k_scale"], fields["v_scale"] = self.k, self.v, k_scale, v_scale
        return cache

    def by_slot(self) -> KVCache:
        """The same cache in pages of one token.

        Token t of page p is slot p * page_stride + t. If there are slots between pages, they do not belong to
        this cache.

        Raises:
            ValueError: the page stride is not a whole number of tokens.
        """
        by_slot = KVCache.unchecked(_pages_of_one("k", self.k), _pages_of_one("v", self.v))

        def scale_by_slot(name: str, scale: CacheScale) -> CacheScale:
            if isinstance(scale, BlockScales):
                return BlockScales(tensor_by_slot(name, scale.blocks), scale.factor)
            return tensor_by_slot(name, scale) if isinstance(scale, Tensor) and scale.ndim == 3 else scale

        def tensor_by_slot(name: str, of_tokens: Tensor) -> Tensor:
            made = _pages_of_one(name, of_tokens)
            require(
                len(made) == by_slot.num_pages,
                f"kv.{name}",
                made,
                "in pages as many tokens apart as the pages of kv.k",
            )
            return made

        return by_slot.with_scales(
            scale_by_slot("k_scale", self.k_scale), scale_by_slot("v_scale", self.v_scale)
        )

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]

    @property
    def page_stride(self) -> int:
        """Slots from one page to the next in `by_slot()`: page_size, or more if other layers' pages lie in
        between.

        Raises:
            ValueError: as in `by_slot`.
        """
        return _page_stride("k", self.k)

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        if self.dtype == SCALED_LATENT_DTYPE and not self.has_token_scales:
            return SCALED_LATENT_DIMS[0]
        return self.k.shape[3] * (2 if self._stored_dtype_of("k") in FOUR_BIT_COLUMNS else 1)

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3] * (2 if self._stored_dtype_of("v") in FOUR_BIT_COLUMNS else 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of K."""
        return self.k.dtype

    @property
    def stored_dtype(self) -> CacheDtype:
        """The dtype; one of FourBitDtype of 4-bit caches, whose bytes are uint8; one of PairDtype if K and V
        have different formats. `Attention` takes it as kv_dtype.
        """
        of_k = self._stored_dtype_of("k")
        if self.k.dtype is self.v.dtype:
            return of_k
        return _PAIRS.get((of_k, self._stored_dtype_of("v")), of_k)  # the checks refuse other pairs

    def _stored_dtype_of(self, side: Literal["k", "v"]) -> CacheDtype:
        rows, scale = (self.k, self.k_scale) if side == "k" else (self.v, self.v_scale)
        if rows.dtype != torch.uint8 or not _is_of_tokens(scale):
            return rows.dtype
        scales = scale.blocks.dtype if isinstance(scale, BlockScales) else torch.float32
        return _FOUR_BITS_BY_SCALES.get(scales, NVFP4)  # the checks refuse other dtypes of scales

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def has_token_scales(self) -> bool:
        """Whether each token and head has its own scales, one or one for each block."""
        return _is_of_tokens(self.k_scale)

    def __repr__(self) -> str:
        return short_repr(self, **({"page_size": self.page_size} if isinstance(self.k, Tensor) else {}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", _checked("k", self.k))
        object.__setattr__(self, "v", _checked("v", self.v))
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            if not isinstance(scale, BlockScales):
                continue
            if not isinstance(scale.blocks, Tensor):
                refuse(f"{name}.blocks", scale.blocks, "a tensor")
            # First: the other checks take the type of the cache from this dtype.
            rows = self.k if name == "k_scale" else self.v
            if rows.dtype == torch.uint8 and scale.blocks.dtype not in _BLOCK_DTYPES:
                refuse(f"{name}.blocks", scale.blocks, f"of {' or '.join(map(dtype_name, _BLOCK_DTYPES))}")
        is_pair = self.stored_dtype in _SIDES
        if self.v.shape[:3] != self.k.shape[:3] or (self.v.dtype != self.k.dtype and not is_pair):
            refuse(
                "v",
                self.v,
                f"of k's shape {list(self.k.shape)}, except for the last dimension, and of dtype "
                f"{dtype_name(self.k.dtype)}"
                + (", or uint8 with float8_e4m3fn BlockScales" if self.k.dtype == torch.int8 else ""),
            )
        check_same_device("v", self.v, "k", self.k.device)
        step = FOUR_BIT_COLUMNS.get(self.stored_dtype)
        if (
            step is None
            and self.dtype == SCALED_LATENT_DTYPE
            and (self.k.shape[2:], self.v.shape[3], self.v.data_ptr())
            != (
                (1, SCALED_LATENT_BYTES),
                512,
                self.k.data_ptr(),
            )
        ):
            if isinstance(self.k_scale, Tensor):
                needed = f"float32 [pages, page_size, num_kv_heads] = {list(self.k.shape[:3])} over int4"
                refuse("k_scale", self.k_scale, needed)
            refuse(
                "k",
                self.k,
                f"{_DTYPES_TEXT}; uint8 is for KVCache.from_latent, and for 4-bit caches, with k_scale "
                f"[pages, page_size, num_kv_heads] or BlockScales",
            )
        for name, view in (("k", self.k), ("v", self.v)):
            columns, of_row = (2, "head_dim / 2") if view.dtype == torch.uint8 else (1, "head_dim")
            if step is not None and (view.shape[3] * columns) % step:
                refuse(name, view, f"of {of_row} columns, and head_dim a multiple of {step}")
        if not is_pair and isinstance(self.k_scale, BlockScales) != isinstance(self.v_scale, BlockScales):
            refuse("v_scale", self.v_scale, "BlockScales if k_scale is, and only then")
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, self._checked_scale(name, getattr(self, name)))
        if self.dtype == torch.int8 and not self.has_token_scales:
            refuse("k_scale", self.k_scale, f"{self._form_of_token_scales}: int8 has no other scales")
        if self.has_token_scales != _is_of_tokens(self.v_scale):
            needed = (
                self._form_of_token_scales if self.has_token_scales else "no tensor for each token and head"
            )
            refuse("v_scale", self.v_scale, f"{needed}, as k_scale")

    @property
    def _form_of_token_scales(self) -> str:
        return f"a float32 tensor [pages, page_size, num_kv_heads] = {list(self.k.shape[:3])}"

    def _checked_scale(self, name: str, scale: CacheScale) -> CacheScale:
        if scale is None:
            return None
        if isinstance(scale, BlockScales):
            return self._checked_blocks(name, scale)
        stored_dtype = self._stored_dtype_of("v" if name == "v_scale" else "k")
        if stored_dtype not in (*SCALED_DTYPES, *TOKEN_SCALED_FORMATS):
            refuse(name, scale, f"None: a {dtype_name(self.dtype)} cache has no scales")
        if isinstance(scale, Tensor):
            heads, of_tokens = self.num_kv_heads, list(self.k.shape[:3])
            has_token_scales = stored_dtype in TOKEN_SCALED_FORMATS
            is_right = scale.dtype == torch.float32 and (
                has_token_scales and list(scale.shape) == of_tokens
                if scale.ndim > 2
                else scale.numel() == 1 or scale.shape[-1:] == (heads,) or scale.shape[1:] == (1,)
            )
            if not is_right and has_token_scales and stored_dtype not in SCALED_DTYPES:
                refuse(name, scale, self._form_of_token_scales)
            if not is_right or (scale.numel() == 0 and scale.ndim < 3):
                refuse(
                    name,
                    scale,
                    f"a number, or a float32 tensor [], [num_kv_heads = {heads}], [batch, 1] or [batch, "
                    f"num_kv_heads]"
                    + (f" or [pages, page_size, num_kv_heads] = {of_tokens}" if has_token_scales else ""),
                )
            check_same_device(name, check_plain(name, scale), "k", self.device)
            return scale
        return checked_scale(name, scale)

    def _checked_blocks(self, name: str, scale: BlockScales) -> BlockScales:
        blocks, view = scale.blocks, self.v if name == "v_scale" else self.k
        require(
            view.dtype == torch.uint8,
            name,
            "BlockScales",
            f"a number or a tensor over {dtype_name(view.dtype)}",
        )
        shape = [*view.shape[:3], view.shape[3] * 2 // BLOCK_COLUMNS]
        dtypes = _BLOCK_DTYPES
        if name == "v_scale" and isinstance(self.k_scale, BlockScales):
            dtypes = (self.k_scale.blocks.dtype,)
        elif self.stored_dtype in _SIDES:  # found by this dtype
            dtypes = (blocks.dtype,)
        is_right = isinstance(blocks, Tensor) and blocks.dtype in dtypes and list(blocks.shape) == shape
        if not is_right or (blocks.shape[3] > 1 and blocks.stride(3) != 1):
            refuse(
                f"{name}.blocks",
                blocks,
                f"{' or '.join(map(dtype_name, dtypes))} [pages, page_size, num_kv_heads, head_dim / 16] = "
                f"{shape}, contiguous along the last dimension",
            )
        check_same_device(f"{name}.blocks", check_plain(f"{name}.blocks", blocks), "k", self.device)
        if isinstance(scale.factor, Tensor) or checked_scale(f"{name}.factor", scale.factor) is None:
            refuse(f"{name}.factor", scale.factor, "a number above 0")
        if scale.factor != 1 and not TOKEN_SCALED_FORMATS[_FOUR_BITS_BY_SCALES[blocks.dtype]].has_factor:
            refuse(f"{name}.factor", scale.factor, "1: scales that are powers of 2 have none")
        return BlockScales(_with_plain_strides(blocks), float(scale.factor))


def named_tensors(kv: KVCache) -> Iterator[tuple[str, Tensor]]:
    """K, V and their scales, with the names that messages give them."""
    yield "kv.k", kv.k
    yield "kv.v", kv.v
    for name, scale in (("kv.k_scale", kv.k_scale), ("kv.v_scale", kv.v_scale)):
        if isinstance(scale, BlockScales):
            yield f"{name}.blocks", scale.blocks
        elif isinstance(scale, Tensor):
            yield name, scale


def side_dtypes(dtype: CacheDtype) -> tuple[CacheDtype, CacheDtype]:
    """The dtypes of K and of V in a cache of this dtype."""
    return _SIDES.get(dtype, (dtype, dtype))


def stored_columns(columns: int, dtype: CacheDtype) -> int:
    """The elements of a row of K or V in a cache's tensor: 4-bit dtypes have two columns in each.

    dtype: one of side_dtypes().
    """
    return columns // 2 if dtype in FOUR_BIT_COLUMNS else columns


def _is_of_tokens(scale: CacheScale) -> bool:
    return isinstance(scale, BlockScales) or (isinstance(scale, Tensor) and scale.ndim == 3)


def checked_scale(name: str, scale: Scale) -> Scale:
    """A scale in the form that kernels take: a float, None, or a tensor, whose shape and dtype they check."""
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        return check_plain(name, scale)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not _LEAST_FLOAT <= scale <= _MAX_FLOAT:
        refuse(name, scale, "a number above 0 that a float32 holds, or a float32 tensor")
    return float(scale)


def _check_dimensions(name: str, tensor: object, ndim: int, shape: str) -> None:
    if (
        not isinstance(tensor, Tensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.ndim != ndim
    ):
        refuse(name, tensor, f"a dense tensor {shape}")
    check_plain(name, tensor)


def _checked(name: str, view: Tensor) -> Tensor:
    """`view` with plain strides."""
    _check_dimensions(name, view, 4, "[pages, page_size, num_kv_heads, head_dim]")
    if view.dtype not in (*DTYPES, SCALED_LATENT_DTYPE):
        refuse(name, view, _DTYPES_TEXT)
    if view.shape[1] < 1:
        refuse(name, view, "of page_size >= 1: [pages, page_size, num_kv_heads, head_dim]")
    if view.stride(3) != 1 and view.shape[3] > 1:
        refuse(name, view, "contiguous along head_dim")
    return _with_plain_strides(view)


def _with_plain_strides(view: Tensor) -> Tensor:
    """Gives dimensions of size 1 the stride that they have in a contiguous tensor.

    Such a stride is never used and may be anything, but alignment checks look at strides.
    """
    sizes, strides = view.shape, view.stride()
    if 1 not in sizes:
        return view
    plain = list(strides)
    if sizes[3] == 1:
        plain[3] = 1
    for dim in (2, 1, 0):
        if sizes[dim] == 1:
            plain[dim] = plain[dim + 1] * sizes[dim + 1]
    return view if tuple(plain) == strides else view.as_strided(sizes, plain)


def _token_major(name: str, tensor: Tensor, layout: str) -> Tensor:
    """`tensor`, given in this layout, as [pages, page_size, num_kv_heads, head_dim]."""
    if layout == "NHD":
        return tensor
    if layout == "HND":
        return _view(name, tensor, lambda: tensor.transpose(1, 2))
    refuse("layout", layout, "'NHD' or 'HND'")


def _pages_of_slots(name: str, tensor: Tensor, page_size: int) -> Tensor:
    pages = tensor.shape[0] // page_size
    return _view(name, tensor, lambda: tensor[: pages * page_size].unflatten(0, (pages, page_size)))


def _page_stride(name: str, part: Tensor) -> int:
    """Tokens from one page to the next."""
    pages, page_size = part.shape[:2]
    page_stride, token_stride = part.stride()[:2]
    if pages == 1 or page_size == 1:
        return page_size
    if page_stride < page_size * token_stride or page_stride % token_stride != 0:
        refuse(
            f"kv.{name}",
            part,
            "a cache whose pages are a whole number of tokens apart: stride(0) = n * stride(1), n >= "
            "page_size",
        )
    return page_stride // token_stride


def _pages_of_one(name: str, part: Tensor) -> Tensor:
    pages, page_size, *sizes = part.shape
    page_stride, token_stride, *strides = part.stride()
    slots = (pages - 1) * _page_stride(name, part) + page_size if pages > 0 else 0
    step = token_stride if page_size > 1 else page_stride
    return part.as_strided((slots, 1, *sizes), (step, step, *strides))


def _view(name: str, tensor: Tensor, make: Callable[[], _Views]) -> _Views:
    """The views that `make` returns; `name` is the argument's name.

    Refuses a tensor that torch cannot view this way.
    """
    try:
        return make()
    except (RuntimeError, TypeError):
        explain_failure([(name, tensor)])
        raise
