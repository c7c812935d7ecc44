"""Attention of one layer: where vLLM's tensors meet run() and append_kv()."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from attn_backend.adapters.float8_queries import multiplies_float8
from attn_backend.adapters.plan_key import PlanKey
from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.layer_cache import FLOAT8_CACHES, PLAIN_CACHES, kv_cache_view
from attn_backend.adapters.vllm.memory import outside_memory_pools
from attn_backend.adapters.vllm.metadata import AttnMetadata, window_left
from attn_backend.adapters.vllm.refusal import OTHER_BACKEND, refuse
from attn_backend.jit.manifest import SHIPPED_FLOAT8_OUT_HEAD_DIMS, HeadDims
from attn_backend.kernels.append import append_kv
from attn_backend.metadata.kv_cache import KVCache
from attn_backend.validation import describe


def has_float8_outputs(head_size: int, device: torch.device) -> bool:
    """Whether outputs of 8 bits need no kernel that takes a minute of the engine's start to compile."""
    return device.type != "cuda" or HeadDims.of(head_size) in SHIPPED_FLOAT8_OUT_HEAD_DIMS


class AttnImpl(AttentionImpl[AttnMetadata]):
    """Made once for each attention layer, with the arguments of vLLM's `Attention`."""

    head_sizes: ClassVar[list[int]] = [dim for dim in range(8, 1024, 8) if HeadDims.of(dim).runs_on_cuda]
    attn_types: ClassVar[tuple[str, ...]] = (
        AttentionType.DECODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    other_backend: ClassVar[str] = OTHER_BACKEND
    head_size_v: int | None = None  # columns of V, where they are not K's (diff_kv.py)
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_quant_query_input: bool = False  # of some layers True
    can_return_lse_for_decode: bool = True  # what DCP asks of a layer
    # several new tokens: no mask is laid over interleaved ones
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
            sliding_window: tokens that a query sees, itself included; in an encoder, and in steps that are
                not causal, to either side.
            sinks: [num_heads], a parameter of the model: weights are loaded into it later.
            extra: arguments that only some models pass (chunk_lookback, ...). Each is refused unless it is
                None, False or -1.

        Raises:
            NotImplementedError: the layer needs what this package does not have.
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

        if head_size not in self.head_sizes:
            self._refuse(f"head size {head_size}")
        heads = HeadDims(head_size, head_size if self.head_size_v is None else self.head_size_v)
        if not heads.runs_on_cuda:
            self._refuse(f"heads of {heads.qk}/{heads.v} columns")
        if heads.v != head_size and attn_type != AttentionType.DECODER:
            self._refuse(f"heads of {heads.qk}/{heads.v} columns in attention of type {attn_type}")
        if attn_type not in self.attn_types:
            self._refuse(f"attention of type {attn_type}")
        if kv_cache_dtype not in ("auto", *PLAIN_CACHES, *FLOAT8_CACHES):
            self._refuse(
                f"a KV cache of dtype {kv_cache_dtype}", "pass fp8 or the model's dtype as --kv-cache-dtype"
            )
        if sinks is not None and sinks.shape != (num_heads,):
            self._refuse(f"sinks of shape {tuple(sinks.shape)} in a layer of {num_heads} heads")
        for name, value in extra.items():
            # Not `in`: 0 == False, but chunk_lookback=0 hides the chunks before the query's own.
            if isinstance(value, torch.Tensor) or (value is not None and value is not False and value != -1):
                self._refuse(f"the attention argument {name} = {describe(value)}")

        shares_kv = self.dcp_world_size > 1
        if shares_kv:
            self._check_shared_kv(heads, alibi_slopes is not None, sliding_window)

        is_decoder, is_encoder = attn_type == AttentionType.DECODER, attn_type == AttentionType.ENCODER_ONLY
        key = PlanKey(
            num_heads,
            self.num_kv_heads,
            head_size,
            window_left(sliding_window),
            causal=is_decoder,
            of_this_step=is_encoder,
        )
        key = key._replace(
            has_alibi=alibi_slopes is not None,
            has_sinks=sinks is not None,
            logits_soft_cap=self.logits_soft_cap,
        )
        # an encoder reads this step's K and V, which are in no cache
        self.float8 = None if is_encoder else FLOAT8_CACHES.get(kv_cache_dtype)
        v_is_as_wide = heads.v == head_size
        self.supports_quant_query_input = (
            v_is_as_wide
            and not shares_kv
            and multiplies_float8(self.float8, head_size, torch.get_default_device())
        )
        float8_out = (
            v_is_as_wide
            and not shares_kv
            and compat.fuses_output_scales()
            and has_float8_outputs(head_size, torch.get_default_device())
        )
        key = key._replace(head_dim_v=None if v_is_as_wide else heads.v, kv_dtype=self.float8)
        key = key._replace(float8_q=self.supports_quant_query_input, float8_out=float8_out)
        if sliding_window is not None and (not is_decoder or compat.may_see_both_sides()):
            key = key._replace(window_right=sliding_window - 1)  # which a causal step cuts anyway
        self.plan_key = key
        self._float_sinks: torch.Tensor | None = None
        self.alibi_slopes: torch.Tensor | None = None
        if alibi_slopes is not None:
            device = torch.get_default_device()
            self.alibi_slopes = outside_memory_pools(
                lambda: torch.tensor(alibi_slopes, dtype=torch.float32, device=device), device
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """vLLM asks before it takes the quantisation after a layer out of the model's graph, and gives its
        scale to forward(). It then matches all layers of these sizes, so the answer depends on nothing else.
        """
        return self.plan_key.float8_out and compat.has_one_fixed_scale(quant_key)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this whenever weights have been loaded, also a second time."""
        if self.sinks is None:
            return
        sinks = self.sinks.detach()
        if self._float_sinks is None:
            self._float_sinks = outside_memory_pools(lambda: sinks.float().contiguous(), sinks.device)
        else:
            self._float_sinks.copy_(sinks)  # captured graphs read it where it is

    def _refuse(self, what: str, advice: str | None = None) -> None:
        refuse(what, self.other_backend if advice is None else f"{advice}, or {self.other_backend}")

    def _check_shared_kv(self, heads: HeadDims, has_alibi: bool, sliding_window: int | None) -> None:
        """Refuses what is not supported in a layer whose KV lies on several ranks (dcp.py)."""
        reasons = {
            "attention sinks, which would count once for each rank,": self.sinks is not None,
            "a sliding window, which would cut KV that is interleaved over ranks,": sliding_window
            is not None,
            "ALiBi, which needs to know where the interleaved tokens stand,": has_alibi,
            f"attention of type {self.attn_type}": self.attn_type != AttentionType.DECODER,
            "a layer that reads another one's KV cache": self.kv_sharing_target_layer_name is not None,
            f"{self.num_kv_heads} KV heads on a rank": self.num_kv_heads != 1,
            f"values of {heads.v} columns, where vLLM merges those of a power of two,": heads.v
            & (heads.v - 1)
            != 0,
        }
        for what, is_so in reasons.items():
            if is_so:
                self._refuse(
                    f"{what} with decode context parallelism", "pass --decode-context-parallel-size 1"
                )

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
                batch are padding and left alone. query: where supports_quant_query_input is True,
                float8_e4m3fn, divided by layer._q_scale.
            key, value: [tokens, num_kv_heads, columns of K, of V]. Only read by an encoder, which has no
                cache, and where ranks share KV: else do_kv_cache_update has put them into the cache, just
                before. None where another layer's cache is read.
            kv_cache: [blocks, num_kv_heads, page, columns of K and of V], any strides; of 8 bits uint8, or
                its own dtype.
            attn_metadata: None in profiling runs, which have no cache: the output is filled with 0.
            output_scale: float32, one element: output is float8_e4m3fn, divided by it, where
                fused_output_quant_supported().

        Returns:
            output
        """
        if output_block_scale is not None or (output_scale is not None and not self.plan_key.float8_out):
            raise NotImplementedError(
                "attn_backend does not quantize its output by blocks, nor where vLLM is not configured to "
                "fuse that (fuse_attn_quant)"
            )
        if attn_metadata is None:
            # vLLM measures a step's memory: queries and outputs of all ranks, and copies by the collectives
            if self.dcp_world_size > 1:
                query.new_empty((4 * self.dcp_world_size, *query.shape))
            return output.fill_(0)
        plan = attn_metadata.plans[self.plan_key]
        if plan.context is not None:
            assert attn_metadata.context_parallel is not None
            assert key is not None
            assert value is not None
            rows = attn_metadata.num_actual_tokens
            attn_metadata.context_parallel.attend(
                plan.attention,
                plan.context,
                query[:rows],
                key[:rows],
                value[:rows],
                self._view(layer, kv_cache),
                output[:rows],
                has_context=attn_metadata.has_context,
                single_tokens=attn_metadata.single_tokens,
                sm_scale=self.scale,
                logits_soft_cap=plan.logits_soft_cap,
            )
            return output
        if self.plan_key.of_this_step:
            assert key is not None
            assert value is not None
            kv, appended = KVCache.from_ragged(key, value), False
        else:
            kv = self._view(layer, kv_cache)
            # when vLLM calls do_kv_cache_update
            appended = key is not None and self.kv_sharing_target_layer_name is None
        if self.sinks is not None and self._float_sinks is None:
            self.process_weights_after_loading(query.dtype)
        arguments = plan.arguments
        if self.alibi_slopes is not None:
            arguments = {"slopes": self.alibi_slopes, **(arguments or {})}
        plan.attention.run(
            query,
            kv,
            out=output,
            sm_scale=self.scale,
            logits_soft_cap=plan.logits_soft_cap,
            after_append=appended,
            variant_args=arguments,
            sinks=self._float_sinks,
            q_scale=layer._q_scale if self.plan_key.float8_q else None,
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
        """Writes new K and V into the cache; into one of 8 bits divided by the layer's scales, rounded and
        limited to what it holds.

        Args:
            layer: vLLM's, which has the scales.
            key, value: [tokens, num_kv_heads, columns of K, of V]
            slot_mapping: int64 [tokens]; negative for padding. Keys beyond it are padding too.
        """
        if self.plan_key.of_this_step:
            return
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:
            tokens = min(tokens, key.shape[0])
            key, value, slot_mapping = key[:tokens], value[:tokens], slot_mapping[:tokens]
        append_kv(key, value, self._view(layer, kv_cache), slot_mapping)

    def _view(self, layer: Any, kv_cache: torch.Tensor) -> KVCache:
        return kv_cache_view(
            kv_cache, self.head_size, self.float8, layer, writes=self.kv_sharing_target_layer_name is None
        )


class CpuAttnImpl(AttnImpl):
    """A layer on a CPU."""

    other_backend: ClassVar[str] = "unset ATTN_BACKEND_VLLM_CPU to serve with vLLM's own CPU backend"
