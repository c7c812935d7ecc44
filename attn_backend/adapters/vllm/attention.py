"""Attention of one layer: vLLM's tensors go to run() and append_kv()."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from attn_backend.adapters.layers import LayerSpec
from attn_backend.jit.manifest import SHIPPED_FLOAT8_OUT_HEAD_DIMS, HeadDims
from attn_backend.kernels.append import append_kv
from attn_backend.metadata.kv_cache import (
    TOKEN_SCALED_FORMATS,
    BlockScales,
    CacheDtype,
    CacheScale,
    KVCache,
    side_dtypes,
)

from . import compat
from .compat import outside_memory_pools
from .metadata import AttnMetadata, window_left
from .rules import (
    ATTN_TYPES,
    BYTE_CACHES,
    CACHE_OF_OLD_RELEASES,
    FLOAT8_CACHES,
    HEAD_SIZES,
    ONE_RANK,
    OTHER_BACKEND,
    OTHER_CACHE,
    OWN_CACHE_OF_OLD_RELEASES,
    ROTATED_DTYPES,
    TOKEN_SCALED_CACHES,
    bytes_of_row,
    unsupported_argument,
    unsupported_cache,
    unsupported_layer,
    unsupported_name,
    unsupported_pages,
    unsupported_sinks,
)
from .support import refuse, refuse_if


def has_float8_outputs(head_size: int, device: torch.device) -> bool:
    """Whether kernels with 8-bit outputs ship: compiling one would delay the engine's start by a minute."""
    return device.type != "cuda" or HeadDims.of(head_size) in SHIPPED_FLOAT8_OUT_HEAD_DIMS


def elements_of_row(columns: int, kv_cache_dtype: str) -> int:
    """The last dimension of the cache's shape: elements of K and V of a token and head, and the bytes of
    their scales. columns: of K and V together.
    """
    dtype = TOKEN_SCALED_CACHES.get(kv_cache_dtype)
    if dtype is None:
        return columns
    return sum(sum(bytes_of_row(columns // 2, of_side)) for of_side in side_dtypes(dtype))


class AttnImpl(AttentionImpl[AttnMetadata]):
    """Made once for each attention layer, with the arguments of vLLM's `Attention`."""

    head_sizes: ClassVar[list[int]] = HEAD_SIZES
    attn_types: ClassVar[tuple[str, ...]] = ATTN_TYPES
    other_backend: ClassVar[str] = OTHER_BACKEND
    head_size_v: int | None = None  # columns of V, if they differ from K's (DiffKvImpl)
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_quant_query_input: bool = False  # 16-bit queries are as fast, and more accurate
    can_return_lse_for_decode: bool = True  # DCP requires it
    # with several new tokens, too: no mask covers interleaved tokens
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        """
        Args:
            alibi_slopes: of this rank's query heads.
            sliding_window: tokens that a query sees, itself included. In an encoder and in non-causal steps
                the window reaches left and right.
            sinks: [num_heads], a parameter of the model: weights are loaded into it later.
            extra: arguments that only some models pass (chunk_lookback, ...). Each is refused unless it is
                None, False or -1.

        Raises:
            NotImplementedError: this package does not support the layer.
        """
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        # to the left and to the right, like vLLM's own backends
        self.sliding_window = (window_left(sliding_window), 0 if sliding_window is not None else -1)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

        heads = HeadDims(head_size, head_size if self.head_size_v is None else self.head_size_v)
        device = torch.get_default_device()
        has_window, has_alibi = sliding_window is not None, alibi_slopes is not None
        shares_kv = self.dcp_world_size > 1
        other_cache = "pass fp8 or the model's dtype as --kv-cache-dtype"
        takes_bytes = compat.takes_bytes_of_rows()
        for what, advice in (
            (unsupported_layer(heads.qk, heads.v, attn_type), ""),
            (unsupported_cache(heads, kv_cache_dtype, device.type), other_cache),
            (unsupported_name(kv_cache_dtype, compat.takes_cache_names()), OWN_CACHE_OF_OLD_RELEASES),
            (unsupported_pages(kv_cache_dtype, has_window, takes_bytes), CACHE_OF_OLD_RELEASES),
            (unsupported_sinks(sinks, num_heads), ""),
            *((unsupported_argument(name, value), "") for name, value in extra.items()),
            (self._unsupported_over_ranks(heads, has_window, has_alibi) if shares_kv else None, ONE_RANK),
        ):
            refuse_if(what, f"{advice}, or {self.other_backend}" if advice else self.other_backend)

        is_decoder, is_encoder = attn_type == AttentionType.DECODER, attn_type == AttentionType.ENCODER_ONLY
        window = window_left(sliding_window)
        # an encoder reads this step's K and V, which are in no cache
        self.cache_dtype = None if is_encoder else BYTE_CACHES.get(kv_cache_dtype)
        self.has_token_scales = self.cache_dtype is not None and kv_cache_dtype in TOKEN_SCALED_CACHES
        stored = None if self.cache_dtype is None else TOKEN_SCALED_FORMATS.get(self.cache_dtype)
        # whether vLLM's scale of K, and of V, multiplies the cache's scales
        self._takes_factors = tuple(side.has_factor for side in stored.sides) if stored else (False, False)
        # A causal step has no tokens to the right. Drafts of DFLASH may have other steps, as in FLASH_ATTN.
        sees_right = window >= 0 and (not is_decoder or compat.setting("attention_config.use_non_causal"))
        self.spec = LayerSpec(
            num_heads,
            self.num_kv_heads,
            head_size,
            window,
            causal=is_decoder,
            of_this_step=is_encoder,
            window_right=window if sees_right else -1,
            has_alibi=has_alibi,
            has_sinks=sinks is not None,
            logits_soft_cap=self.logits_soft_cap,
            head_dim_v=None if heads.v == head_size else heads.v,
            kv_dtype=self.cache_dtype,
            token_scales=self.has_token_scales,
            rotation=self.cache_dtype in ROTATED_DTYPES,
            float8_out=heads.v == head_size
            and not shares_kv
            and not self.has_token_scales
            and compat.fuses_output_scales()
            and has_float8_outputs(head_size, device),
        )
        self._float_sinks: torch.Tensor | None = None
        self.alibi_slopes: torch.Tensor | None = None
        if alibi_slopes is not None:
            self.alibi_slopes = outside_memory_pools(
                lambda: torch.tensor(alibi_slopes, dtype=torch.float32, device=device), device
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether forward() may get the scale of the quantization that follows the layer.

        vLLM fuses it for all layers of these sizes, so the answer depends on nothing else.
        """
        return self.spec.float8_out and compat.has_one_fixed_scale(quant_key)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this after each load of weights; there may be several."""
        if self.sinks is None:
            return
        sinks = self.sinks.detach()
        if self._float_sinks is None:
            self._float_sinks = outside_memory_pools(lambda: sinks.float().contiguous(), sinks.device)
        else:
            self._float_sinks.copy_(sinks)  # captured graphs read this tensor

    def _unsupported_over_ranks(self, heads: HeadDims, has_window: bool, has_alibi: bool) -> str | None:
        """Why the KV of this layer cannot lie on several ranks (dcp.py), or None."""
        reasons = {
            "attention sinks, which would count once for each rank,": self.sinks is not None,
            "a sliding window, which would cut KV that is interleaved over ranks,": has_window,
            "ALiBi, which needs to know where the interleaved tokens stand,": has_alibi,
            f"attention of type {self.attn_type}": self.attn_type != AttentionType.DECODER,
            "a layer that reads another one's KV cache": self.kv_sharing_target_layer_name is not None,
            f"{self.num_kv_heads} KV heads on a rank": self.num_kv_heads != 1,
            f"values of {heads.v} columns, where vLLM merges powers of two,": heads.v & (heads.v - 1) != 0,
        }
        found = (f"{what} with decode context parallelism" for what, is_so in reasons.items() if is_so)
        return next(found, None)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: AttnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            query: [tokens, num_heads, head_size], output: [tokens, num_heads, columns of V]; rows beyond the
                batch are padding: they are not written.
            key, value: [tokens, num_kv_heads, columns of K, of V]. Only an encoder, which has no cache, and
                ranks that share KV read them: for others do_kv_cache_update has just written them into the
                cache. None if the layer reads another layer's cache.
            kv_cache: [blocks, num_kv_heads, page, columns of K and of V], any strides; 8-bit caches are uint8
                or have their own dtype. Scales of tokens follow in each row (bytes_of_row).
            attn_metadata: None in profiling runs, which have no cache: the output is filled with 0.
            output_scale: float32, one element, after fused_output_quant_supported(): output is float8_e4m3fn,
                divided by it.

        Returns:
            output
        """
        if output_block_scale is not None or (output_scale is not None and not self.spec.float8_out):
            raise NotImplementedError(
                "attn_backend does not quantize its output by blocks, nor where vLLM is not configured to "
                "fuse that (fuse_attn_quant)"
            )
        if attn_metadata is None:
            # vLLM measures a step's memory: queries and outputs of all ranks, and copies by the collectives
            if self.dcp_world_size > 1:
                query.new_empty((4 * self.dcp_world_size, *query.shape))
            return output.fill_(0)
        layers = attn_metadata.planned[self.spec]
        if layers.context is not None:
            assert attn_metadata.context_parallel is not None
            assert key is not None
            assert value is not None
            rows = attn_metadata.num_actual_tokens
            attn_metadata.context_parallel.attend(
                layers.attention,
                layers.context,
                query[:rows],
                key[:rows],
                value[:rows],
                self._view(layer, kv_cache),
                output[:rows],
                has_context=attn_metadata.has_context,
                single_tokens=attn_metadata.single_tokens,
                sm_scale=self.scale,
                logits_soft_cap=layers.logits_soft_cap,
            )
            return output
        if self.spec.of_this_step:
            assert key is not None
            assert value is not None
            kv, appended = KVCache.from_ragged(key, value), False
        else:
            kv = self._view(layer, kv_cache)
            # vLLM has called do_kv_cache_update in exactly these cases
            appended = key is not None and not self._shares_cache(layer)
        if self.sinks is not None and self._float_sinks is None:
            self.process_weights_after_loading(query.dtype)
        arguments = layers.arguments
        if self.alibi_slopes is not None:
            arguments = {"slopes": self.alibi_slopes, **(arguments or {})}
        layers.attention.run(
            query,
            kv,
            out=output,
            sm_scale=self.scale,
            logits_soft_cap=layers.logits_soft_cap,
            after_append=appended,
            variant_args=arguments,
            sinks=self._float_sinks,
            out_scale=output_scale,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new K and V into the cache. For an 8-bit cache it divides them by the layer's scales, rounds
        and clamps them. If each token and head has its own scales, it computes and writes those.

        Args:
            layer: vLLM's, which has the other scales.
            key, value: [tokens, num_kv_heads, columns of K, of V]
            slot_mapping: int64 [tokens]; negative for padding. Keys beyond it are padding too.
        """
        if self.spec.of_this_step:
            return
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:
            tokens = min(tokens, key.shape[0])
            key, value, slot_mapping = key[:tokens], value[:tokens], slot_mapping[:tokens]
        append_kv(key, value, self._view(layer, kv_cache), slot_mapping, rotation=self.spec.rotation)

    def _view(self, layer: Any, kv_cache: torch.Tensor) -> KVCache:
        if self.cache_dtype is not None and self.has_token_scales:
            factors = None
            if any(self._takes_factors) and not self._shares_cache(layer):
                takes_k, takes_v = self._takes_factors
                factors = layer._k_scale_float if takes_k else 1.0, layer._v_scale_float if takes_v else 1.0
            return token_scaled_view(kv_cache, self.head_size, self.cache_dtype, factors)
        return kv_cache_view(
            kv_cache,
            self.head_size,
            FLOAT8_CACHES.get(self.kv_cache_dtype),
            layer,
            writes=not self._shares_cache(layer),
        )

    def _shares_cache(self, layer: Any) -> bool:
        """Whether the layer reads the cache of another one.

        For some drafts (Gemma 4's MTP) vLLM only sets this on the layer, after it has made the impl.
        """
        of_layer = getattr(layer, "kv_sharing_target_layer_name", None)
        return of_layer is not None or self.kv_sharing_target_layer_name is not None


class CpuAttnImpl(AttnImpl):
    other_backend: ClassVar[str] = "unset ATTN_BACKEND_VLLM_CPU to serve with vLLM's own CPU backend"


def kv_cache_view(
    kv_cache: torch.Tensor,
    head_size: int,
    float8: torch.dtype | None = None,
    layer: Any = None,
    *,
    writes: bool = True,
) -> KVCache:
    """The K and V of a layer's cache.

    The view is made once and kept on the tensor itself, so that both have the same lifetime: vLLM frees a
    trial cache before it allocates the real one.

    Args:
        kv_cache: [blocks, num_kv_heads, page, columns of K and of V]; uint8 where elements have 8 bits.
        head_size: columns of K.
        float8: the dtype of its elements if they have 8 bits.
        layer: vLLM's, which has the scales of such a cache: `_k_scale` and `_v_scale`, float32 [], [1] or
            [num_kv_heads] on its device. Kernels read them when they run, so their values may change under
            captured graphs.
        writes: whether the layer fills the cache. Otherwise it uses the scales of the layer that does.
    """
    view: KVCache | None = getattr(kv_cache, "_attn_backend_view", None)
    if view is not None and (
        float8 is None or not writes or (view.k_scale is layer._k_scale and view.v_scale is layer._v_scale)
    ):
        return view
    data = kv_cache.data  # so that views do not refer back to the tensor, which would be a cycle
    if float8 is None:
        view = KVCache.from_pair(data[..., :head_size], data[..., head_size:], layout="HND")
    else:
        data = data.view(float8)
        view = KVCache.from_pair(
            data[..., :head_size],
            data[..., head_size:],
            layout="HND",
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
        )
    kv_cache._attn_backend_view = view  # type: ignore[attr-defined]
    return view


def token_scaled_view(
    kv_cache: torch.Tensor,
    head_size: int,
    dtype: CacheDtype,
    factors: tuple[float, float] | None = None,
) -> KVCache:
    """The K, the V and the scales of a layer's cache with scales for each token and head, kept like
    kv_cache_view().

    vLLM's own backend has a row of K, its scale, a row of V and its scale for each token and head. Kernels
    move 16 bytes at a time, and rows of 132 bytes are not aligned for that. So the same bytes have another
    order: all rows of K, all rows of V, the scales of K, the scales of V. In each of these parts one head
    follows another, since a kernel reads many tokens of one head: TMA loads two int4 rows of 64 bytes as one
    of 128 (ADR 57). Where vLLM stores a page head by head (HND), this is the order in each head's bytes of
    the page, otherwise in the whole page. So vLLM may move pages, and heads of HND pages.

    Args:
        kv_cache: of one-byte elements, [blocks, num_kv_heads, page, bytes of K and of V with their scales].
        head_size: columns of K.
        dtype: of the elements, or of a pair.
        factors: of NVFP4's scales, of K and of V: vLLM's scales of the layer; 1 for other formats. None: as
            when the view was made, or 1.

    Raises:
        NotImplementedError: neither a head's nor a page's rows lie side by side.
    """
    view: Any = getattr(kv_cache, "_attn_backend_view", None)
    if view is not None and (factors is None or factors == (_factor(view.k_scale), _factor(view.v_scale))):
        return view
    data = kv_cache.data.view(torch.uint8)
    blocks, heads, page, row = data.shape
    block_stride, head_stride, token_stride, _ = data.stride()
    is_by_head = token_stride == row
    if not is_by_head and (head_stride, token_stride) != (row, heads * row):
        refuse(f"a KV cache of strides {data.stride()} with a scale for each token and head", OTHER_CACHE)
    rows = page if is_by_head else page * heads  # that lie side by side
    dtypes = side_dtypes(dtype)
    k_bytes, k_scale_bytes = bytes_of_row(head_size, dtypes[0])
    of_v = row - k_bytes - k_scale_bytes
    # A column has half a byte, and a sixteenth of its block's scale.
    v_scale_bytes = of_v // 9 if TOKEN_SCALED_FORMATS[dtypes[1]].has_block_scales else 4
    sizes = [rows * size for size in (k_bytes, of_v - v_scale_bytes, k_scale_bytes, v_scale_bytes)]
    parts = data.as_strided(
        (blocks, heads if is_by_head else 1, rows * row), (block_stride, head_stride, 1)
    ).split(sizes, dim=2)

    def rows_of(part: torch.Tensor, of_side: CacheDtype) -> torch.Tensor:
        """Elements [blocks, page, heads, columns]; of 4 bits, bytes of two."""
        part = part if isinstance(of_side, str) else part.view(of_side)
        columns = part.shape[1] * part.shape[2] // (heads * page)
        return part.view(blocks, heads, page, columns).transpose(1, 2)

    def scales_of(part: torch.Tensor, of_side: CacheDtype, factor: float) -> torch.Tensor | BlockScales:
        """Scales [blocks, page, heads], each head's side by side; or BlockScales."""
        stored = TOKEN_SCALED_FORMATS[of_side]
        if stored.has_block_scales:
            of_bytes = part.view(getattr(torch, stored.scales or ""))
            of_blocks = of_bytes.unflatten(2, (-1, page, part.shape[2] // rows))
            return BlockScales(of_blocks.flatten(1, 2).transpose(1, 2), factor)
        return part.view(torch.float32).view(blocks, heads, page).transpose(1, 2)

    k, v = map(rows_of, parts[:2], dtypes)
    view = KVCache(k, v, *map(scales_of, parts[2:], dtypes, factors or (1.0, 1.0)))
    kv_cache._attn_backend_view = view  # type: ignore[attr-defined]
    return view


def _factor(scale: CacheScale) -> float:
    return scale.factor if isinstance(scale, BlockScales) else 1.0
