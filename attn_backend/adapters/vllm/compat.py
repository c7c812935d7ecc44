"""Differences between vLLM's releases.

The rest of the adapter asks this module, except sampler.py, which replaces vLLM's functions. The answers
come from probes, not from version numbers.

| | 0.26 | 0.32, 0.33 |
|---|---|---|
| shape of the KV cache | the backend's get_kv_cache_shape | the spec's [blocks, kv_heads, page, K and V] |
| bytes of a token's scales | up to 0.27 added to every backend's pages | the backend's customize_spec |
| NHD or HND | global: get_kv_cache_stride_order of the backend | the engine's; the backend may restrict it |
| get_supported_kernel_block_sizes | without arguments | with the spec of the KV cache |
| layers with several implementations | none | AttentionImpl.get_impl_variants |
| draft loops inside one CUDA graph | none | AttentionMetadataBuilder.update_draft_decode_metadata |
| chunked local attention | a class derived from our builder splits requests; ours undoes that | the same |
| chunks of a cached prefix, in MLA | up to 0.27 by their number | an object for each |
| metadata of sparse MLA | up to 0.29 each backend's own | a common class, which fills in more |
| space between two blocks of a layer | up to 0.30 whole rows | limited by the spec's block_stride_alignment |
| columns of V in the spec of a KV cache | in FullAttentionSpec and derived classes | in all specs |
| R-SWA, DCP | vLLM does not ask: the builder refuses | vLLM asks the backend |
| merge of states over the ranks of DCP | up to 0.28 ops/common.py and dcp_alltoall.py | ops/dcp.py |
| caches that DCP does not shard (draft models) | up to 0.30 none | dcp_sharded of the spec |
| names of backends | up to 0.31 a fixed list with CUSTOM | AttentionBackendEnum.register |
| names of caches | up to 0.32 a fixed list | register_kv_cache_dtype |
| pool of builders' memory | up to 0.29 the KV cache's, which sleep mode discards | saved; 0.30, 0.31: none |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, reduce, wraps
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from vllm import envs
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
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec

from attn_backend.metadata.kv_cache import side_dtypes
from attn_backend.settings import Settings

from .rules import OWN_CACHE, OWN_NAME, TOKEN_SCALED_CACHES, bytes_of_row

T = TypeVar("T")

# Permutations from [blocks, kv_heads, page, K and V] to memory, without and with a dimension of layers in
# front.
STRIDE_ORDERS: dict[tuple[str, bool], tuple[int, ...]] = {
    ("NHD", False): (0, 2, 1, 3),
    ("NHD", True): (1, 0, 3, 2, 4),
    ("HND", False): (0, 1, 2, 3),
    ("HND", True): (1, 2, 0, 3, 4),
}


def setting(name: str, vllm_config: VllmConfig | None = None) -> Any:
    """A setting by its dotted name; None if the model or the release has none.

    Args:
        vllm_config: None: the configuration with which vLLM makes its layers.
    """
    config = vllm_config or get_current_vllm_config_or_none()
    return reduce(lambda found, part: getattr(found, part, None), name.split("."), config)


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


def with_bytes_of_scales(spec: Any) -> Any:
    """A layer's spec whose pages have room for the scales of each token and head, if its cache has them.

    Releases without the field add the bytes themselves.
    """
    mode = getattr(spec, "kv_quant_mode", None)
    # The mode of registered names shares its value, and its name, with a mode of vLLM's that we do not serve.
    # Workers ask without a current configuration, which has the name of the cache.
    name = OWN_CACHE if getattr(mode, "is_custom_mode", False) else getattr(mode, "name", "").lower()
    if name not in TOKEN_SCALED_CACHES or not takes_bytes_of_rows() or spec.state_content_bytes is not None:
        return spec
    of_k, of_v = side_dtypes(TOKEN_SCALED_CACHES[name])
    of_both = sum(bytes_of_row(spec.head_size, of_k)) + sum(bytes_of_row(head_size_v(spec), of_v))
    return replace(spec, state_content_bytes=of_both)


def takes_bytes_of_rows() -> bool:
    """Whether a backend may tell vLLM how many bytes a token and head take.

    Up to 0.27 vLLM only knows int4, and gives pages of layers with a sliding window room for 8-bit elements.
    """
    return hasattr(AttentionSpec, "state_content_bytes")


class OwnCacheHandler:
    """OWN_CACHE as vLLM's KVCacheDTypeHandler describes it: bytes, which only our backends read."""

    name = OWN_CACHE

    def torch_dtype(self) -> torch.dtype:
        return torch.uint8

    def quant_mode(self) -> Any:
        return import_module("vllm.v1.kv_cache_interface").KVQuantMode.CUSTOM


def takes_cache_names() -> bool:
    """Whether a package may register names for --kv-cache-dtype: since 0.33."""
    return hasattr(import_module("vllm.config.cache"), "register_kv_cache_dtype")


def register_cache_name() -> None:
    """Lets vLLM know OWN_CACHE, once in a process. Earlier releases refuse the name."""
    names = import_module("vllm.config.cache")
    if takes_cache_names() and not names.is_known_kv_cache_dtype(OWN_CACHE):
        names.register_kv_cache_dtype(OWN_CACHE)(OwnCacheHandler)


def batch_invariant() -> bool:
    """Whether the engine runs in its batch invariant mode (VLLM_BATCH_INVARIANT=1)."""
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def prompts_of(metadata: CommonAttentionMetadata) -> torch.Tensor | None:
    """BSRView.prompts of a step, in the batch invariant mode. Does not wait for the device.

    None: no request is a prompt, or vLLM does not say (warm-up, drafts).
    """
    is_prefilling: torch.Tensor | None = getattr(metadata, "is_prefilling", None)  # [requests], on the host
    if is_prefilling is None or not batch_invariant() or not is_prefilling.any():
        return None
    device, batch = metadata.seq_lens.device, metadata.seq_lens.shape[0]
    prompts = torch.zeros(batch, dtype=torch.int32, pin_memory=device.type == "cuda")
    prompts[: is_prefilling.shape[0]] = is_prefilling[:batch]  # without the padding of graphs
    return prompts.to(device, non_blocking=True)


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


def attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """The layers of the model and of its draft model that compute attention, by name."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return {name: layer for name, layer in layers.items() if computes_attention(layer)}


# Layers of these classes keep a state or hidden states; vLLM gives them caches like attention layers.
_OTHER_LAYERS = {"MambaBase", "CacheOnlyAttentionLayer"}


def computes_attention(layer: Any) -> bool:
    """Whether a layer with a cache computes attention.

    The caches of indexers, of compressed keys and the like are layers, too. Nothing calls their `forward`.
    """
    if not _OTHER_LAYERS.isdisjoint(base.__name__ for base in type(layer).__mro__):
        return False
    if hasattr(layer, "impl"):
        return True
    forward = getattr(type(layer), "forward", None)
    return forward not in (None, nn.Module.forward) and len(signature(forward).parameters) > 1


def dcp_group(kv_cache_spec: Any) -> Any:
    """The ranks that share the KV of a layer's cache (--decode-context-parallel-size); None: each rank has
    all of it.
    """
    if not getattr(kv_cache_spec, "dcp_sharded", True):
        return None
    try:
        group = get_dcp_group()
    except AssertionError:  # no process groups: the engine's tests, and ours
        return None
    return group if group.world_size > 1 else None


def combine_of_ranks(vllm_config: VllmConfig) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """vLLM's merge of attention states over the ranks of a group.

    It takes the output [tokens, heads of all ranks, columns], the natural LSE [tokens, heads of all ranks],
    the group and return_lse=True. It returns both for this rank's heads.
    """
    swaps_all = getattr(vllm_config.parallel_config, "dcp_comm_backend", None) == "a2a"
    try:
        ops = import_module("vllm.v1.attention.ops.dcp")
    except ImportError:
        ops = import_module(f"vllm.v1.attention.ops.{'dcp_alltoall' if swaps_all else 'common'}")
    return ops.dcp_a2a_lse_reduce if swaps_all else ops.cp_lse_ag_out_rs


def captures_single_tokens_alone(vllm_config: VllmConfig) -> bool:
    """Whether full CUDA graphs, if there are any, only serve batches with one token for each request."""
    # asked at each build: runner V2 decides it after builders are made
    mode = vllm_config.compilation_config.cudagraph_mode
    return vllm_config.speculative_config is None and mode.mixed_mode() != CUDAGraphMode.FULL


def has_image_spans(vllm_config: VllmConfig) -> bool:
    """Whether tokens of an image see each other, left and right (Gemma 3, the larger models of Gemma 4)."""
    return bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))


def clamps_spans(vllm_config: VllmConfig) -> bool:
    """Whether windows also limit the tokens of an image that another one sees (Gemma 4).

    Layers without a window are then causal: images are text to them.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    return any(getattr(layer, "mm_prefix_clamp_sliding_window", False) for layer in layers)


def spans_of(common_attn_metadata: CommonAttentionMetadata) -> list[tuple[int, int, int]]:
    """(request, first token, last token) of each span of a batch."""
    ranges = common_attn_metadata.mm_req_doc_ranges or {}
    return [(request, first, last) for request, of_request in ranges.items() for first, last in of_request]


def cuts_at_chunks(builder: type) -> bool:
    """Whether vLLM derived this builder for chunked local attention (Llama 4)."""
    return builder.__name__ == "ChunkedLocalAttentionBuilder"


def leave_whole(builder: type) -> None:
    """Keeps the derived builder from splitting requests: the mask knows the chunks."""
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
    return int(getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size))


def fuses_output_scales() -> bool:
    """Whether vLLM may let attention quantize its output (fuse_attn_quant), while it makes layers.

    Each run shows whether its layer does: a graph from vLLM's cache was compiled in another process.
    """
    return bool(setting("compilation_config.pass_config.fuse_attn_quant"))


def has_one_fixed_scale(quant_key: Any) -> bool:
    """Whether vLLM's quantization is float8_e4m3fn with one scale for the tensor, known beforehand."""
    return bool(quant_key == kFp8StaticTensorSym and quant_key.dtype == torch.float8_e4m3fn)


def chosen_names(config: Any) -> list[AttentionBackendEnum]:
    """The backends of --attention-backend and of `backend_per_kind`, without those that vLLM chooses."""
    attention = getattr(config, "attention_config", None)
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    return [name for name in (getattr(attention, "backend", None), *per_kind.values()) if name is not None]


def is_chosen(vllm_config: VllmConfig | None = None) -> bool:
    """Whether the user has chosen this package for all layers or for a kind of layers.

    Without an argument: in the configuration at hand.
    """
    config = vllm_config or get_current_vllm_config_or_none()
    return any(is_our_name(name) for name in chosen_names(config))


def is_our_name(name: AttentionBackendEnum) -> bool:
    """Whether vLLM's registry has a backend of this package behind CUSTOM or ATTN_BACKEND."""
    return (
        name.name in (OWN_NAME, "CUSTOM")
        and name.is_overridden()
        and name.get_path().startswith("attn_backend.")
    )


def hidden_metrics(vllm_config: VllmConfig) -> str | None:
    """Why /metrics does not show counters of workers, or None."""
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        return "VLLM_USE_RUST_FRONTEND"
    executor = vllm_config.parallel_config.distributed_executor_backend
    return "--distributed-executor-backend ray" if executor == "ray" else None


def our_names() -> list[str]:
    """vLLM's names that stand for this package's backends, without those that only models ask for."""
    return [
        name
        for name, member in AttentionBackendEnum.__members__.items()
        if member.is_overridden()
        and member.get_path().startswith("attn_backend.")
        and not name.endswith("_DIFFKV")
    ]


def other_custom() -> str | None:
    """The path of another package's backend that has taken CUSTOM, or None."""
    custom = AttentionBackendEnum.CUSTOM
    return custom.get_path() if custom.is_overridden() and not is_our_name(custom) else None


def register_names(path: str) -> None:
    """Registers the backend at `path` under each name that this release allows.

    CUSTOM is an alias. It stays with another package that has registered it before.
    """
    if hasattr(AttentionBackendEnum, "register"):
        # register() refuses a name that exists
        known = OWN_NAME in AttentionBackendEnum.__members__
        register_backend(AttentionBackendEnum[OWN_NAME] if known else OWN_NAME, path)
        # An Enum's member pickles as its value. vLLM sends its configuration to processes that read it before
        # they load plugins: there, that value would be unknown.
        member: Any = AttentionBackendEnum[OWN_NAME]
        member.__reduce_ex__ = lambda protocol: (_own_name, (path,))
    if other_custom() is None:
        register_backend(AttentionBackendEnum.CUSTOM, path)


def register_mla_prefill(path: str) -> None:
    """Registers the prefill backend at `path` as `--attention-config.mla_prefill_backend CUSTOM`.

    The name stays with another package that has registered it before.
    """
    if not MLAPrefillBackendEnum.CUSTOM.is_overridden():
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, path)


def _own_name(path: str) -> AttentionBackendEnum:
    """Unpickles ATTN_BACKEND."""
    register_names(path)
    return AttentionBackendEnum[OWN_NAME]


def backend_name() -> str:
    """The name that our backends have in vLLM: it looks each backend's name up in its registry."""
    return OWN_NAME if OWN_NAME in AttentionBackendEnum.__members__ else "CUSTOM"


def after_model_is_built(check: Callable[[VllmConfig], None]) -> None:
    """Makes vLLM call `check` in each worker once the model is built. A second call changes nothing.

    vLLM has no hook for this. If no layer is ours, no code of ours runs after registration, so this replaces
    `load_model` of the wrapper through which all executors call their workers.
    """
    wrapper: Any = import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    original = vars(wrapper).get("load_model")
    if getattr(original, "_attn_backend", False):
        return

    def forward_to_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.worker.load_model(*args, **kwargs)

    load = original or forward_to_worker

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        check(self.vllm_config)
        return result

    load_model._attn_backend = True  # type: ignore[attr-defined]
    wrapper.load_model = load_model


def serves_on_cpu() -> bool:
    """Whether this package replaces vLLM's CPU backends."""
    return current_platform.is_cpu() and Settings.read().vllm_cpu


def own_backend(name: str) -> type:
    """The class that vLLM itself has under a name of its registry."""
    module, _, class_name = AttentionBackendEnum[name].value.rpartition(".")
    return getattr(import_module(module), class_name)


def with_whole_rows_between_blocks(kv_cache_spec: Any) -> Any:
    """A layer's spec whose blocks start at whole rows, so that the row of each token has a number.

    Releases without the field put nothing between the blocks of a layer.
    """
    if not hasattr(kv_cache_spec, "block_stride_alignment"):
        return kv_cache_spec
    return replace(kv_cache_spec, block_stride_alignment=kv_cache_spec.state_content_size_bytes)


def context_chunks(prefill_metadata: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The chunks of the cached prefixes in a batch of MLA. Each has two tensors, int32 [requests + 1]: the
    prefix sums of its requests' queries and of their tokens.
    """
    context = prefill_metadata.chunked_context
    if context is None:
        return []
    if hasattr(context, "chunks"):
        return [(chunk.query_start_loc, chunk.cu_seq_lens) for chunk in context.chunks]
    return [(prefill_metadata.query_start_loc, starts) for starts in context.cu_seq_lens]


def number_of_chunk(arguments: dict[str, Any]) -> int:
    """The index in context_chunks() of the chunk that a prefill backend runs. vLLM passes a number or an
    object.
    """
    return int(arguments["chunk_idx"] if "chunk_idx" in arguments else arguments["chunk"].index)


def outside_memory_pools(make: Callable[[], T], device: torch.device) -> T:
    """`make()`, with device memory from torch's general pool whatever pool the caller is in.

    Not while a CUDA graph is captured.

    vLLM makes metadata builders inside the pool of its KV cache (the table above names the releases). Sleep
    mode unmaps that pool and its contents are lost, while CUDA graphs keep using it.

    torch.cuda.use_mem_pool acts on the calling thread, and torch's release decides which of several nested
    pools wins. A new thread is in none of them.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def make_on_stream() -> T:
        with torch.cuda.stream(stream):  # a new thread has device 0 and its default stream
            return make()

    with ThreadPoolExecutor(1, "attn_backend") as thread:
        return thread.submit(make_on_stream).result()


def flash_attention_3(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor,
    longest_q: int,
    longest_kv: int,
) -> Callable[[], torch.Tensor]:
    """A launch of causal attention over pages by vLLM's build of FlashAttention-3, for `attn-backend bench`.

    Args: q [rows, heads, head_dim], kv [pages, 2, page_size, KV heads, head_dim], the other tensors int32.

    Raises:
        ImportError: vLLM was built without it.
    """
    package = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    metadata = package.get_scheduler_metadata(
        batch_size=kv_lens.shape[0],
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_kv,
        num_heads_q=q.shape[1],
        num_heads_kv=kv.shape[3],
        headdim=q.shape[2],
        cache_seqlens=kv_lens,
        cu_seqlens_q=qo_indptr,
        page_size=kv.shape[2],
        causal=True,
    )
    return partial(
        package.flash_attn_varlen_func,
        q=q,
        k=kv[:, 0],
        v=kv[:, 1],
        out=q.new_empty(q.shape),
        cu_seqlens_q=qo_indptr,
        seqused_k=kv_lens,
        block_table=block_table,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_kv,
        softmax_scale=q.shape[2] ** -0.5,
        causal=True,
        fa_version=3,
        scheduler_metadata=metadata,
    )
