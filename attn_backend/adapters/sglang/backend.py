"""SGLang's attention backend: plans once a step from SGLang's device tensors, runs once a layer.

A layer first writes its new tokens to the pool. One schedule then reads prefix and new tokens from the pool.
Nothing is copied to the host, gathered into index lists or merged afterwards: the page table is SGLang's own
req_to_token.

CUDA graphs: decode steps plan inside the captured graph (`init_forward_metadata_in_graph`), so a replay costs
no host time. The kernels read req_to_token until the replay ends. Releases that call `shared_read_ends`
know this. SGLang 0.5.17 does not, and its scheduler may write earlier. It never changes what a running
request reads:

- New tokens lie beyond the planned length.
- A prefix that moved into the radix tree has the same keys and values in its new slots.
- Nobody uses the row of a finished request.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor
from torch.nn import Module

from attn_backend import Attention, KVCache, append_kv
from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.metrics import export_counts, log_start
from attn_backend.adapters.served import warn_if_untried
from attn_backend.metadata.kv_cache import MXFP4, SCALED_DTYPES, BlockScales, CacheDtype, Scale

from . import compat
from .mla import append_latents, ask_for_parts, has_latents
from .plan import BatchReader, Step, StepPlanner, WindowSlots, is_uniform
from .support import (
    attention_layers,
    check_runner,
    cuts_spans,
    drafts_are_trees,
    drafts_in_blocks,
    layer_spec,
    longest_extend,
    most_requests,
    refuse,
    slopes_of,
    verified_tokens,
    wants_spans,
)

logger = logging.getLogger(__name__)


class LayerState:
    """The state of a layer between steps."""

    def __init__(
        self, layer: RadixAttention, planner: StepPlanner, slopes: Tensor | None, cache: LayerCache
    ) -> None:
        self.planner = planner
        self.slopes = slopes
        self.num_qo_heads: int = layer.tp_q_head_num
        self.head_dim: int = layer.head_dim
        self.head_dim_v: int = layer.v_head_dim
        self.sm_scale = float(layer.scaling)
        self.of_encoder = planner.spec.of_encoder
        self.cache = cache


class SGLangAttentionBackend(AttentionBackend):
    """Serves SGLang's attention layers. The constructor raises ValueError for what it cannot serve."""

    needs_cpu_seq_lens = False  # plans read lengths on the device
    extend_dummy_seqs_capped_by_req_pool = True  # workspaces are sized for the requests that the pool holds

    def __init__(self, runner: Any, branches: int = 0) -> None:
        """branches: 0 for a backend of all steps; for one draft step, the rows of each request."""
        super().__init__()
        check_runner(runner)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        is_encoder_decoder = bool(runner.model_config.is_encoder_decoder)
        # tokens of a decoder begin anywhere in a page
        self.page_size: int = 1 if is_encoder_decoder else runner.page_size or 1
        self.device: torch.device = self.req_to_token_pool.req_to_token.device
        self.dtype: torch.dtype = runner.dtype
        self._is_fp4 = compat.stores_fp4(runner)
        self.kv_dtype: CacheDtype = MXFP4 if self._is_fp4 else runner.kv_cache_dtype
        # SGLang reads it when it makes masks
        self.max_context_len: int = runner.model_config.context_len
        self.forward_metadata: Step | None = None  # the name that the engine clears on idle steps
        warn_if_untried(self.device, logger)

        self._is_float8 = self.kv_dtype in SCALED_DTYPES
        # of K and V that append_kv writes without the pool
        self._appended_dtypes = (self.dtype, self.kv_dtype)
        self._has_latents = has_latents(runner)
        self._copies_to_slots = self._has_latents or compat.copies_to_slots(self.token_to_kv_pool)
        if self._has_latents:
            ask_for_parts(runner)
        self._of_model = {
            "has_spans": wants_spans(runner),
            "cuts_spans": cuts_spans(runner),
            "in_blocks": drafts_in_blocks(runner),
        }
        self._attention_chunk_size: int | None = getattr(runner.model_config, "attention_chunk_size", None)
        self._nodes_of_trees = verified_tokens(runner) if drafts_are_trees() else 0

        self._max_batch = most_requests(runner, branches)
        self._max_rows = (
            self._max_batch
            if branches
            else longest_extend(runner) + self._max_batch * max(1, compat.num_draft_tokens())
        )
        self._reader = BatchReader(runner, self.device)
        self._window = (
            WindowSlots(self.token_to_kv_pool, self.device)
            if isinstance(self.token_to_kv_pool, SWAKVPool)
            else None
        )
        self._window_slots: Tensor | None = None  # where this step's tokens go in the window pool
        self._allocate_buffers()
        self._planners: dict[LayerSpec, StepPlanner] = {}
        self._caches: dict[int, LayerCache] = {}
        self._layers: dict[RadixAttention, LayerState] = {}
        for layer, parent in attention_layers(runner.model, is_encoder_decoder):
            self._remember(layer, parent)
        log_start(logger)

    # What SGLang asks the backend.

    def support_triton(self) -> bool:
        return self.device.type == "cuda"

    def shared_read_ends(self, fm: Any) -> Any:
        """The point before which SGLang must not write req_to_token, for releases that ask."""
        return (
            compat.shared_reads_end_after_replay()
            if fm.is_decode() or fm.is_target_verify()
            else super().shared_read_ends(fm)
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """On a CPU, SGLang asks this instead for the padding of ranks (--attn-dp-size). Since 0.5.19."""
        return self.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called before anything of these sizes is captured."""
        if max_bs > self._max_batch or max_num_tokens > self._max_rows:
            self._max_batch, self._max_rows = (
                max(max_bs, self._max_batch),
                max(max_num_tokens, self._max_rows),
            )
            self._allocate_buffers()
            for planner in self._planners.values():
                planner.grow(self._max_rows, self._max_batch)

    @property
    def verify_mask(self) -> Any:
        """Where the engine's drafts write the mask of their trees; None: nothing is verified."""
        return self._reader.trees.offered

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Does nothing: nothing that we prepared while the draft ran depends on it."""

    # Planning. `init_forward_metadata` of the base class calls both.

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans extends: the runner that captures whole prefills calls only this method.

        Also copies masks of trees, since graphs read our copy.
        """
        export_counts(logger)
        if self._nodes_of_trees and forward_batch.forward_mode.is_target_verify():
            self._reader.trees.take(
                forward_batch.spec_info, forward_batch.seq_lens[: forward_batch.batch_size]
            )
        if not is_uniform(forward_batch.forward_mode):
            self._read_and_plan(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plans decode and verify steps, inside the graph if there is one."""
        if is_uniform(forward_batch.forward_mode):
            self._read_and_plan(forward_batch)

    def plan_step(self, step: Step | None) -> None:
        """Plans a step for all layers. None: nothing to attend to."""
        self.forward_metadata = step
        if step is None:
            return
        req_to_token = self.req_to_token_pool.req_to_token
        for planner in self._planners.values():
            if planner.spec.of_this_step and step.has_prefixes:
                planner.current = None  # the model attends to the latents in this step
            else:
                planner.plan(step, req_to_token, self.page_size, self._window)

    def one_row_each(self, batch_size: int) -> Tensor:
        """int32 [batch_size + 1], the qo_indptr of a step with one token of each request."""
        return self._reader.one_row_each(batch_size)

    def _read_and_plan(self, forward_batch: Any) -> None:
        step = self._reader.read(forward_batch)
        if step is not None and self._window is not None and forward_batch.out_cache_loc is not None:
            self._window_slots = self._window.translate(forward_batch.out_cache_loc)
        self.plan_step(step)

    def _plan_late(self, planner: StepPlanner) -> Attention:
        """Plans for a layer that was not found in the model at start, after the plans of the others."""
        if self.forward_metadata is None:
            raise RuntimeError("a layer's forward was called before init_forward_metadata")
        if planner.spec.of_this_step and self.forward_metadata.has_prefixes:
            refuse("decompressed keys and values after a cached prefix")
        req_to_token = self.req_to_token_pool.req_to_token
        return planner.plan(self.forward_metadata, req_to_token, self.page_size, self._window)

    # Running.

    def _append_and_attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """Writes a layer's new tokens and attends.

        Args:
            q: [rows, num_qo_heads * head_dim], or these elements in other dimensions: 0.5.17's Gemma 3 has
                [1, rows, num_qo_heads, head_dim].
            k, v: [rows, num_kv_heads, head_dim], [rows, num_kv_heads, head_dim_v]; None if the layer reads
                another layer's cache.
            extra: q_rope [rows, num_qo_heads, rotated part] and k_rope [rows, 1, rotated part] of latents,
                unless q and k include them; sinks.

        Returns:
            [rows, num_qo_heads * head_dim_v], or SGLang's output in its own shape.
        """
        # Whisper's forward() is not under torch.no_grad(), and neither are SGLang's captures of decode graphs
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._append_and_attend(q, k, v, layer, forward_batch, save_kv_cache, **extra)
        q_rope, k_rope = extra.pop("q_rope", None), extra.pop("k_rope", None)
        sinks = self._sinks(layer, extra) if extra else None
        known = self._layers.get(layer) or self._remember(layer)
        planner = known.planner
        attention = planner.current or self._plan_late(planner)  # before append_kv, as after_append says
        q_heads = q.reshape(-1, known.num_qo_heads, known.head_dim if q_rope is None else known.head_dim_v)
        num_rows = q_heads.shape[0]
        out = _output(q, num_rows, known, forward_batch)
        out_heads = out.view(num_rows, known.num_qo_heads, known.head_dim_v)
        if planner.spec.of_this_step:
            attention.run(q_heads, _new_tokens(k, v, known), out=out_heads, sm_scale=known.sm_scale)
            return out
        # called at every step, because it waits for KV that SGLang is still loading
        if self._is_fp4:
            (k_buffer, v_buffer), scales = compat.raw_kv_buffer(self.token_to_kv_pool, layer.layer_id)
            kv = known.cache.view(k_buffer, v_buffer, self.page_size, scales)
        else:
            k_buffer, v_buffer = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            if self._is_float8:
                kv = known.cache.float8_view(layer, k_buffer, v_buffer, self.page_size, writes=k is not None)
            else:
                kv = known.cache.view(k_buffer, v_buffer, self.page_size)
        appended = False
        # save_kv_cache is False if the model's rotary kernel has written k and v already
        if save_kv_cache and k is not None:
            assert v is not None
            appended = self._write(
                k,
                k_rope,
                v,
                kv,
                layer,
                forward_batch.encoder_out_cache_loc if known.of_encoder else forward_batch.out_cache_loc,
            )
        arguments = planner.arguments
        if known.slopes is not None:
            arguments = {"slopes": known.slopes, **(arguments or {})}
        attention.run(
            q_heads,
            kv,
            q_rope=None
            if q_rope is None
            else q_rope.view(num_rows, known.num_qo_heads, known.head_dim - known.head_dim_v),
            out=out_heads,
            sm_scale=known.sm_scale,
            logits_soft_cap=planner.logits_soft_cap,
            after_append=appended,
            variant_args=arguments,
            sinks=sinks,
        )
        return out

    forward_decode = forward_extend = _append_and_attend

    def _write(
        self, k: Tensor, k_rope: Tensor | None, v: Tensor, kv: KVCache, layer: RadixAttention, slots: Tensor
    ) -> bool:
        """Writes a layer's new tokens.

        Returns whether append_kv wrote them: run() may then start before they are in the cache.
        """
        # the pool converts other dtypes
        if (
            self._copies_to_slots
            and k.dtype == v.dtype
            and (self._is_float8 or self._is_fp4 or k.dtype in self._appended_dtypes)
        ):
            slots = slots.contiguous()  # in a draft step they are a column of a table
            if self._has_latents:
                append_latents(k, k_rope, kv, slots)
            else:
                append_kv(k, v, kv, slots)
            return True
        if k_rope is not None:
            k = torch.cat((k, k_rope), -1)
        if self._is_float8:
            scales = cast("tuple[Scale, Scale]", (kv.k_scale, kv.v_scale))
            k, v = quantize(k, scales[0], kv.dtype), quantize(v, scales[1], kv.dtype)
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, self._window_slots), k, v)
        return False

    def _sinks(self, layer: RadixAttention, extra: dict[str, Any]) -> Tensor | None:
        """The sinks among the model's extra arguments, float32 [num_qo_heads].

        Raises:
            ValueError: there are other arguments, or the model did not show the sinks when the engine
                started.
        """
        sinks: Tensor | None = extra.pop("sinks", None)
        given = sorted(name for name, value in extra.items() if value is not None)
        if given:
            refuse(f"this model's attention arguments ({', '.join(given)})")
        if sinks is None:
            return None
        known = self._layers.get(layer)
        if known is None or not known.planner.spec.has_sinks:
            refuse(
                f"attention sinks that layer {layer.layer_id} of this model did not show when the engine "
                f"started"
            )
        return sinks.detach().float()  # at every step: weights may be updated in place, under captured graphs

    # Layers and buffers.

    def _remember(self, layer: RadixAttention, parent: Module | None = None) -> LayerState:
        in_window_pool = self._window is not None and self._window.holds(layer.layer_id)
        chunk = self._attention_chunk_size
        spec = layer_spec(
            layer,
            parent,
            kv_dtype=None if self.kv_dtype == self.dtype else self.kv_dtype,
            in_window_pool=in_window_pool,
            attention_chunk_size=chunk,
            **self._of_model,
        )
        planner = self._planners.get(spec)
        if planner is None:
            nodes_of_trees = 0 if spec.of_this_step else self._nodes_of_trees
            planner = self._planners[spec] = StepPlanner(
                spec, self.dtype, self.device, self._max_rows, self._max_batch, nodes_of_trees
            )
        slopes = slopes_of(parent)
        slopes = None if slopes is None else slopes.to(self.device, torch.float32)
        cache = self._caches.setdefault(layer.layer_id, LayerCache(makes_v_anew=self._has_latents))
        known = self._layers[layer] = LayerState(layer, planner, slopes, cache)
        return known

    def _allocate_buffers(self) -> None:
        self._reader.allocate(self._max_rows, self._max_batch)
        if self._window is not None:
            self._window.allocate(self._max_rows)


def _output(q: Tensor, num_rows: int, known: LayerState, forward_batch: Any) -> Tensor:
    """[rows, num_qo_heads * head_dim_v], or SGLang's output of this size, if it has made one."""
    out: Tensor | None = getattr(forward_batch, "_attn_output", None)
    row = known.num_qo_heads * known.head_dim_v
    return q.new_empty((num_rows, row)) if out is None or out.numel() != num_rows * row else out


def _new_tokens(k: Tensor | None, v: Tensor | None, known: LayerState) -> KVCache:
    """A step's own tokens, decompressed. The model has written their latents."""
    assert k is not None
    assert v is not None
    heads = known.planner.spec.num_kv_heads
    return KVCache.from_ragged(k.view(-1, heads, known.head_dim), v.view(-1, heads, known.head_dim_v))


class LayerCache:
    """The pool's buffers of one layer_id as a cache of pages. Several layers may read them.

    The view is made again only if SGLang reallocates the buffers or changes the scales.
    """

    def __init__(self, makes_v_anew: bool = False) -> None:
        """makes_v_anew: the pool returns a new view as V at every step, a part of K's columns: latents.

        SGLang's models also write latents themselves, without a scale. So the scale is 1, whatever a
        checkpoint has.
        """
        self._makes_v_anew = makes_v_anew
        self._kv: KVCache | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._addresses: tuple[int, int, int] | None = None

    def view(
        self, k: Tensor, v: Tensor, page_size: int, scales: tuple[Tensor, Tensor] | None = None
    ) -> KVCache:
        """
        Args:
            k: [slots, num_kv_heads, head_dim], v: [slots, num_kv_heads, head_dim_v], of 16 bits or more: the
                same tensors at every step.
            scales: of K and of V in FP4.
        """
        if (
            self._kv is None
            or self._buffers is None
            or k is not self._buffers[0]
            or (v is not self._buffers[1] and not self._makes_v_anew)
        ):
            k_scale, v_scale = (None, None) if scales is None else (_blocks(x, k, page_size) for x in scales)
            self._kv = KVCache.from_slots(k, v, page_size, k_scale=k_scale, v_scale=v_scale)
            self._buffers = k, v
        return self._kv

    def float8_view(
        self, layer: RadixAttention, k: Tensor, v: Tensor, page_size: int, *, writes: bool
    ) -> KVCache:
        """
        Args:
            layer: has the scales of elements: tensors [] of a checkpoint, which kernels read when they run,
                numbers of --quantization-param-path, or None, which is 1.
            k, v: as in view(), but float8: a pool stores them as uint8, and returns new views at every step.
            writes: whether the layer brings K and V. Otherwise it uses the scales of the layer that wrote
                them.
        """
        kv = self._kv
        scales = (layer.k_scale, layer.v_scale) if kv is None or writes else (kv.k_scale, kv.v_scale)
        if self._makes_v_anew:
            scales = (None, None)
        addresses = (k.data_ptr(), v.data_ptr(), k.shape[0])
        if (
            kv is None
            or addresses != self._addresses
            or kv.k_scale is not scales[0]
            or kv.v_scale is not scales[1]
        ):
            kv = self._kv = KVCache.from_slots(k, v, page_size, k_scale=scales[0], v_scale=scales[1])
            self._addresses = addresses
        return kv


def _blocks(scales: Tensor, rows: Tensor, page_size: int) -> BlockScales:
    """
    Args:
        scales: uint8 [slots, num_kv_heads * head_dim / 16].
        rows: of these slots in FP4, [slots, num_kv_heads, head_dim / 2].
    """
    pages = len(scales) // page_size
    return BlockScales(scales[: pages * page_size].view(pages, page_size, rows.shape[1], -1))


def quantize(x: Tensor, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """The values that append_kv would write: x / scale, rounded to a float8 dtype and clamped to its range.

    For pools that must write themselves. They would divide K and V in place, in the projection's output, and
    turn too large values into NaN.
    """
    largest = torch.finfo(dtype).max
    scaled = x.float() if scale is None else x.float() / scale
    return scaled.clamp(-largest, largest).to(dtype)
