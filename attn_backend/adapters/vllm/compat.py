"""What differs between vLLM releases.

Nothing else in this adapter knows a release: it asks here, and here the answer is probed, not looked up by
version.

| | 0.26 | 0.32, 0.33 |
|---|---|---|
| shape of the KV cache | the backend's get_kv_cache_shape | the spec's: [blocks, kv_heads, page, K and V] |
| NHD or HND | global; the backend's get_kv_cache_stride_order | the engine's; the backend may restrict it |
| get_supported_kernel_block_sizes | called without arguments | called with the spec of the KV cache |
| layers with several implementations | none | AttentionImpl.get_impl_variants |
| draft loops inside one CUDA graph | none | AttentionMetadataBuilder.update_draft_decode_metadata |
| chunked local attention | a class derived from our builder cuts requests in chunks | the same, undone |
| chunks of a cached prefix, in MLA | up to 0.27 by their number | an object for each |
| metadata of sparse MLA | up to 0.29 each backend's own | a class in common, which fills in more |
| gap between two blocks of a layer | up to 0.30 keeps rows whole | any that block_stride_alignment allows |
| columns of V in the spec of a KV cache | in FullAttentionSpec and what derives from it | in all specs |
| R-SWA, DCP | not asked about: the builder refuses what cannot be served | asked of the backend |
| merge of DCP ranks, in v1/attention/ops/ | up to 0.28 common.py and dcp_alltoall.py | dcp.py |
| caches that DCP leaves whole (draft models) | up to 0.30 none | dcp_sharded of the spec |
| pool of builders' memory | up to 0.29 the KV cache's; 0.30, 0.31: none | one that sleep mode saves |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from vllm.config import (
    CUDAGraphMode,
    VllmConfig,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
)
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attn_backend.settings import Settings

# Permutations from [blocks, kv_heads, page, K and V] to memory; with and without a dimension of layers.
STRIDE_ORDERS: dict[tuple[str, bool], tuple[int, ...]] = {
    ("NHD", False): (0, 2, 1, 3),
    ("NHD", True): (1, 0, 3, 2, 4),
    ("HND", False): (0, 1, 2, 3),
    ("HND", True): (1, 2, 0, 3, 4),
}


def kv_cache_stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
    """Order of the KV cache's dimensions in memory, for releases that ask the backend for it.

    Raises:
        NotImplementedError: this release decides the layout itself.
    """
    try:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout
    except ImportError:
        raise NotImplementedError("this release of vLLM lays out the KV cache itself") from None
    return STRIDE_ORDERS[get_kv_cache_layout(), include_num_layers_dimension]


def batch_invariant() -> bool:
    """Whether the engine runs in its batch invariant mode (VLLM_BATCH_INVARIANT=1)."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def attention_impls(vllm_config: VllmConfig, layer_names: list[str]) -> Iterator[Any]:
    """The attention implementations behind the named layers; nothing for names that the engine does not know
    (its own attention tests).
    """
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names).values():
        impl: Any = getattr(layer, "impl", None)
        if hasattr(impl, "get_impl_variants"):
            yield from impl.get_impl_variants()
        elif impl is not None:
            yield impl


def other_backends(vllm_config: VllmConfig) -> list[str]:
    """The names of the backends, not of this package, on which attention layers run, a draft model's
    included.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    # state-space layers have none, nor have the caches of indexers
    backends = {layer.get_attn_backend() for layer in layers if hasattr(layer, "impl")}
    return sorted(
        backend.get_name()
        for backend in backends
        if not any(base.__module__.startswith("attn_backend.") for base in backend.__mro__)
    )


def unsupported_feature(vllm_config: VllmConfig) -> str | None:
    """What the model or the deployment needs and this package does not have; None if nothing.

    Only what not every release asks the backend about.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model, "rswa_window", None) is not None:
        return "reference sliding window attention (R-SWA)"
    # vLLM forces it where it knows that backends need it, not on CPUs.
    if is_prefix_lm(vllm_config) and not getattr(
        vllm_config.scheduler_config, "disable_chunked_mm_input", False
    ):
        return (
            "images that are computed in parts, whose tokens see each other (pass --disable-chunked-mm-input)"
        )
    if getattr(vllm_config, "diffusion_config", None) is not None:
        return "batches that mix causal and bidirectional requests (diffusion models)"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism"
    return None


def dcp_group(kv_cache_spec: Any) -> Any:
    """The ranks that share the KV of a layer's cache (--decode-context-parallel-size); None: each has it
    whole.
    """
    if not getattr(kv_cache_spec, "dcp_sharded", True):
        return None
    try:
        group = get_dcp_group()
    except AssertionError:  # no process groups: the engine's tests, and ours
        return None
    return group if group.world_size > 1 else None


def combine_of_ranks(vllm_config: VllmConfig) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The engine's merge of attention states over the ranks of a group: (output [tokens, heads of all ranks,
    columns], their natural LSE [tokens, heads of all ranks], group, return_lse=True) to both with this rank's
    heads.
    """
    swaps_all = getattr(vllm_config.parallel_config, "dcp_comm_backend", None) == "a2a"
    try:
        ops = import_module("vllm.v1.attention.ops.dcp")
    except ImportError:
        ops = import_module(f"vllm.v1.attention.ops.{'dcp_alltoall' if swaps_all else 'common'}")
    combine: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
        ops.dcp_a2a_lse_reduce if swaps_all else ops.cp_lse_ag_out_rs
    )
    return combine


def captures_single_tokens_alone(vllm_config: VllmConfig) -> bool:
    """Whether full CUDA graphs, if there are any, serve no batches but those whose requests have one token
    each.
    """
    # asked at each build: runner V2 decides it after builders are made
    mode = vllm_config.compilation_config.cudagraph_mode
    return vllm_config.speculative_config is None and mode.mixed_mode() != CUDAGraphMode.FULL


def unsupported_context_parallelism(vllm_config: VllmConfig, size: int) -> str | None:
    """What keeps a group of this size from sharing KV; None if nothing.

    The layers check the rest (impl.py).
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    advice = "pass --decode-context-parallel-size 1"
    if current_platform.is_cpu():
        return f"decode context parallelism on a CPU, where vLLM cannot merge what its ranks find ({advice})"
    if size & (size - 1):
        return (
            f"decode context parallelism of {size} ranks: vLLM merges those of a power of two ({advice}, "
            f"or 2, 4, 8)"
        )
    if batch_invariant():
        return f"VLLM_BATCH_INVARIANT with decode context parallelism ({advice})"
    if (
        not getattr(model, "use_mla", False)
        and parallel.tensor_parallel_size // model.get_total_num_kv_heads() % size
    ):
        return f"{size} ranks that share KV among them but not one KV head ({advice})"
    return None


def is_prefix_lm(vllm_config: VllmConfig) -> bool:
    """Whether tokens of an image see each other on both sides (Gemma 3, the larger ones of Gemma 4)."""
    return bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))


def clamps_spans(vllm_config: VllmConfig) -> bool:
    """Whether windows also cut what tokens of an image see of it (Gemma 4).

    The model's layers without a window are causal, then: images are text to them.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    return any(getattr(layer, "mm_prefix_clamp_sliding_window", False) for layer in layers)


def spans_of(common_attn_metadata: CommonAttentionMetadata) -> list[tuple[int, int, int]]:
    """(request, first token, last token) of what sees both sides in a batch."""
    ranges = common_attn_metadata.mm_req_doc_ranges or {}
    return [(request, first, last) for request, of_request in ranges.items() for first, last in of_request]


def cuts_at_chunks(builder: type) -> bool:
    """Whether vLLM derived this builder from a backend's, for chunked local attention (Llama 4)."""
    return builder.__name__ == "ChunkedLocalAttentionBuilder"


def leave_whole(builder: type) -> None:
    """Keeps the derived builder from cutting requests: they stay whole, and the mask knows the chunks."""
    for name in ("build", "update_block_table", "get_cudagraph_support"):
        if name in vars(builder):
            delattr(builder, name)


def chunk_of(kv_cache_spec: Any) -> int:
    """Tokens of a chunk of chunked local attention.

    Raises:
        NotImplementedError: this release keeps the number elsewhere.
    """
    chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
    if not chunk:
        raise NotImplementedError(
            f"attn_backend finds no attention_chunk_size in {type(kv_cache_spec).__name__}: choose another "
            f"--attention-backend"
        )
    return int(chunk)


def head_size_v(kv_cache_spec: Any) -> int:
    """Columns of a head of V."""
    return int(getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size))


def fuses_output_scales() -> bool:
    """Whether the engine whose layers are being made may let attention quantise its output (fuse_attn_quant).

    Which layers do is known when they run: a graph from vLLM's cache was compiled in another process, which
    asked then.
    """
    config = get_current_vllm_config_or_none()
    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    return bool(getattr(passes, "fuse_attn_quant", False))


def has_one_fixed_scale(quant_key: Any) -> bool:
    """Whether vLLM's description of a quantisation is: float8_e4m3fn, one scale for the whole tensor, known
    beforehand.
    """
    return bool(quant_key == kFp8StaticTensorSym and quant_key.dtype == torch.float8_e4m3fn)


def may_see_both_sides() -> bool:
    """Whether steps of the decoder whose layers are being made need not be causal (drafts of DFLASH).

    Its windows then reach to both sides, as in FLASH_ATTN.
    """
    config = get_current_vllm_config_or_none()
    return bool(getattr(getattr(config, "attention_config", None), "use_non_causal", False))


def uses_mla() -> bool:
    """Whether the model whose layers are being made has multi-head latent attention.

    False without a model: vLLM asks for backends then, too.
    """
    config = get_current_vllm_config_or_none()
    return bool(getattr(getattr(config, "model_config", None), "use_mla", False))


def is_chosen() -> bool:
    """Whether --attention-backend of the configuration at hand is CUSTOM."""
    config = get_current_vllm_config_or_none()
    return getattr(getattr(config, "attention_config", None), "backend", None) is AttentionBackendEnum.CUSTOM


def serves_on_cpu() -> bool:
    """Whether this package takes the place of vLLM's CPU backends."""
    return current_platform.is_cpu() and Settings.read().vllm_cpu


def own_backend(name: str) -> type:
    """The class that vLLM itself has under a name of its registry."""
    module, _, class_name = AttentionBackendEnum[name].value.rpartition(".")
    own: type = getattr(import_module(module), class_name)
    return own


def uses_sparse_mla() -> bool:
    """Whether that model also has an indexer that selects tokens: then vLLM asks for a sparse backend."""
    config = get_current_vllm_config_or_none()
    return hasattr(getattr(getattr(config, "model_config", None), "hf_config", None), "index_topk")


def unsupported_sparse_feature(vllm_config: VllmConfig) -> str | None:
    """What a deployment of a model with an indexer needs and this package does not have; None if nothing."""
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        return "latents in host memory (HiSparse)"
    if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1:
        return (
            "decode context parallelism of sparse attention over latents (pass "
            "--decode-context-parallel-size 1)"
        )
    return None


def with_whole_rows_between_blocks(kv_cache_spec: Any) -> Any:
    """A layer's spec, so that a token's row has a number whatever lies between two of the layer's blocks.

    Releases without the field put nothing there.
    """
    if not hasattr(kv_cache_spec, "block_stride_alignment"):
        return kv_cache_spec
    return replace(kv_cache_spec, block_stride_alignment=kv_cache_spec.state_content_size_bytes)


def has_chosen_mla_prefill(vllm_config: VllmConfig) -> bool:
    """Whether the user has asked for one of vLLM's prefill backends of MLA."""
    return getattr(vllm_config.attention_config, "mla_prefill_backend", None) is not None


def context_chunks(prefill_metadata: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each chunk of the cached prefixes of a batch of MLA: int32 [requests + 1], where the queries and
    where the tokens of its requests begin.
    """
    context = prefill_metadata.chunked_context
    if context is None:
        return []
    if hasattr(context, "chunks"):
        return [(chunk.query_start_loc, chunk.cu_seq_lens) for chunk in context.chunks]
    return [(prefill_metadata.query_start_loc, starts) for starts in context.cu_seq_lens]


def number_of_chunk(arguments: dict[str, Any]) -> int:
    """The place in context_chunks() of the chunk that vLLM names when it runs a prefill backend: by its
    number, or as an object.
    """
    return int(arguments["chunk_idx"] if "chunk_idx" in arguments else arguments["chunk"].index)
