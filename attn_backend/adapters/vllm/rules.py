"""The models that this adapter serves in vLLM, as functions of plain values.

Backends, builders and layers ask these functions while vLLM starts. `attn-backend doctor --model` asks them
before, without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attn_backend.adapters import own_kernels
from attn_backend.adapters.checkpoint import (
    DECODER,
    ENCODER_DECODER,
    ENCODER_ONLY,
    Checkpoint,
    Refusal,
    Verdict,
    integer_option,
)
from attn_backend.jit.manifest import MLA_HEAD_DIMS, HeadDims
from attn_backend.metadata.kv_cache import (
    BLOCK_COLUMNS,
    FOUR_BIT_COLUMNS,
    INT4,
    INT8_NVFP4,
    NVFP4,
    TOKEN_SCALED_FORMATS,
    CacheDtype,
    stored_columns,
)
from attn_backend.releases import is_before
from attn_backend.validation import describe

OTHER_BACKEND = "choose another --attention-backend"
OTHER_CACHE = "pass --kv-cache-dtype fp8_e4m3 or auto"
ONE_RANK = "pass --decode-context-parallel-size 1"
OWN_NAME = "ATTN_BACKEND"  # releases up to 0.31 only have CUSTOM
ATTN_TYPES = (DECODER, ENCODER_ONLY, ENCODER_DECODER)
HEAD_SIZES = [dim for dim in range(8, 1024, 8) if HeadDims.of(dim).runs_on_cuda]
LATENT_HEAD_SIZES = [MLA_HEAD_DIMS.qk]

# Cache dtypes by vLLM's names. When vLLM makes a layer, "auto" is the model's dtype: vLLM has resolved what a
# checkpoint declares.
PLAIN_CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FLOAT8_CACHES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# with a scale for each token and head, or for 16 columns of it, which append computes
TOKEN_SCALED_CACHES: dict[str, CacheDtype] = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int4_per_token_head": INT4,
    "nvfp4": NVFP4,
    "int8_k_nvfp4_v": INT8_NVFP4,
}
OWN_CACHE = "int8_k_nvfp4_v"  # a name that this package registers
ROTATED_DTYPES = (INT4,)
# those whose tensors have one-byte elements in vLLM
BYTE_CACHES: dict[str, CacheDtype] = {**FLOAT8_CACHES, **TOKEN_SCALED_CACHES}
# a row is 576 numbers, with the scale of the layer
FLOAT8_LATENTS = tuple(name for name, dtype in FLOAT8_CACHES.items() if dtype == torch.float8_e4m3fn)
CACHES = ("auto", *PLAIN_CACHES, *BYTE_CACHES)
LATENT_CACHES = ("auto", *PLAIN_CACHES, *FLOAT8_LATENTS)
# rows of 656 bytes, with scales for each block of columns; only behind an indexer
SCALED_LATENTS = "fp8_ds_mla"
# Up to 0.27 vLLM only knows the bytes of rows of int4. Its pages of sliding windows have 8-bit rows.
BYTES_OF_ROWS_SINCE = "0.28.0"
CACHE_OF_OLD_RELEASES = "use vLLM 0.28 or later, or pass --kv-cache-dtype int8_per_token_head"
OWN_CACHE_OF_OLD_RELEASES = "use vLLM 0.33 or later, or pass --kv-cache-dtype int8_per_token_head"


def unsupported_layer(head_size: int, head_size_v: int, attn_type: str) -> str | None:
    """Why no kernel serves a layer, or None."""
    if head_size not in HEAD_SIZES:
        return f"head size {head_size}"
    heads = HeadDims(head_size, head_size_v)
    if not heads.runs_on_cuda:
        return f"heads of {heads.qk}/{heads.v} columns"
    if heads.v != head_size and attn_type != DECODER:
        return f"heads of {heads.qk}/{heads.v} columns in attention of type {attn_type}"
    return None if attn_type in ATTN_TYPES else f"attention of type {attn_type}"


def unsupported_cache(heads: HeadDims, kv_cache_dtype: str, device: str) -> str | None:
    """Why no kernel reads a cache of this dtype, or None.

    Args:
        device: "cuda" or "cpu".
    """
    if kv_cache_dtype not in CACHES:
        return f"a KV cache of dtype {kv_cache_dtype}"
    dtype = TOKEN_SCALED_CACHES.get(kv_cache_dtype)
    refused = device == "cuda" and heads.is_wide and dtype is not None
    if dtype in FOUR_BIT_COLUMNS:
        refused |= any(columns % FOUR_BIT_COLUMNS[dtype] != 0 for columns in heads)
        refused |= dtype in ROTATED_DTYPES and not heads.may_be_rotated
    return f"a KV cache of dtype {kv_cache_dtype} for heads of {heads} columns" if refused else None


def bytes_of_row(columns: int, dtype: CacheDtype) -> tuple[int, int]:
    """Bytes of a row of K or V in a cache of TOKEN_SCALED_CACHES, and of its scales. dtype: of K or of V
    (side_dtypes).
    """
    has_blocks = TOKEN_SCALED_FORMATS[dtype].has_block_scales
    return stored_columns(columns, dtype), columns // BLOCK_COLUMNS if has_blocks else 4


def unsupported_name(kv_cache_dtype: str, takes_cache_names: bool) -> str | None:
    """Why vLLM does not know a cache of our own name, or None. takes_cache_names: compat's."""
    return (
        f"a KV cache of dtype {OWN_CACHE}" if kv_cache_dtype == OWN_CACHE and not takes_cache_names else None
    )


def unsupported_pages(kv_cache_dtype: str, has_window: bool, takes_bytes_of_rows: bool) -> str | None:
    """Why vLLM's pages have no room for a layer's cache of this dtype, or None.

    Args:
        has_window: the layer has a sliding window.
        takes_bytes_of_rows: a backend may tell vLLM their size (compat.takes_bytes_of_rows).
    """
    dtype = TOKEN_SCALED_CACHES.get(kv_cache_dtype)
    if takes_bytes_of_rows or dtype not in FOUR_BIT_COLUMNS or (dtype == INT4 and not has_window):
        return None
    where = " in a layer with a sliding window" if dtype == INT4 else ""
    return f"a KV cache of dtype {kv_cache_dtype}{where}"


def unsupported_sinks(sinks: torch.Tensor | None, num_heads: int) -> str | None:
    if sinks is None or sinks.shape == (num_heads,):
        return None
    return f"sinks of shape {tuple(sinks.shape)} in a layer of {num_heads} heads"


def unsupported_argument(name: str, value: Any) -> str | None:
    """Why a layer cannot have an argument that only some models pass (chunk_lookback, ...), or None."""
    # Not `in`: 0 == False, but chunk_lookback=0 hides the chunks before the query's own.
    is_neutral = value is None or value is False or (isinstance(value, int | float) and value == -1)
    return None if is_neutral else f"the attention argument {name} = {describe(value)}"


def unsupported_model(
    *, has_rswa: bool, splits_images: bool, is_diffusion: bool, prefill_ranks: int = 1
) -> str | None:
    """The first need of a model or a deployment that this package cannot serve, or None.

    Args:
        has_rswa: reference sliding window attention.
        splits_images: tokens of an image see each other, and a step may have a part of an image.
        is_diffusion: a batch mixes causal and bidirectional requests.
        prefill_ranks: --prefill-context-parallel-size.
    """
    if has_rswa:
        return "reference sliding window attention (R-SWA)"
    if splits_images:
        return (
            "images that are computed in parts, whose tokens see each other (pass --disable-chunked-mm-input)"
        )
    if is_diffusion:
        return "batches that mix causal and bidirectional requests (diffusion models)"
    return "prefill context parallelism" if prefill_ranks > 1 else None


def unsupported_latents(head_size: int) -> str | None:
    """Why no kernel serves latents with rows of this many columns, or None."""
    return None if head_size in LATENT_HEAD_SIZES else f"latents with rows of {head_size} columns"


# Facts about vLLM that it derives from a checkpoint's configuration.

# These models decompress their latents themselves, and cache keys and values.
_DECOMPRESSED = ("minicpm3", "step3_text")
_SEES_IMAGES_BOTH_WAYS = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")


def uses_latents(model: Checkpoint) -> bool:
    """ModelConfig.use_mla."""
    return model.latents is not None and model.text.get("model_type") not in _DECOMPRESSED


def is_prefix_lm(model: Checkpoint) -> bool:
    """ModelConfig.is_mm_prefix_lm."""
    if "is_mm_prefix_lm" in model.config:
        return bool(model.config["is_mm_prefix_lm"])
    if str(model.config.get("model_type", "")).startswith("gemma4"):
        return bool(model.text.get("use_bidirectional_attention") == "vision")
    return model.config.get("model_type") in _SEES_IMAGES_BOTH_WAYS


def has_windows(model: Checkpoint) -> bool:
    """Whether a layer gets a sliding window: its own, or ModelConfig.get_sliding_window()."""
    of_model = model.text.get("sliding_window") and model.text.get("use_sliding_window") is not False
    return bool(of_model) or any(layer.has_window for layer in model.layers)


def head_size_of(model: Checkpoint) -> int:
    """ModelConfig.get_head_size of a model with latents."""
    return 0 if model.latents is None else model.latents.width + model.latents.rotated


def judge(model: Checkpoint, device: str, options: Mapping[str, str], release: str) -> Verdict:
    """Whether this adapter serves a model.

    Args:
        device: "cuda" or "cpu".
        options: of the server, by their names without dashes.
    """
    return own_kernels.judge("vllm", model, OTHER_BACKEND, _refusals(model, device, options, release))


def _refusals(
    model: Checkpoint, device: str, options: Mapping[str, str], release: str
) -> Iterator[Refusal | None]:
    # On a GPU vLLM forces the option for these models.
    splits = device == "cpu" and is_prefix_lm(model) and "disable-chunked-mm-input" not in options
    yield _refusal(
        unsupported_model(
            has_rswa=model.config.get("rswa_window") is not None,
            splits_images=splits,
            is_diffusion=model.config.get("canvas_length") is not None,
            prefill_ranks=integer_option(options, "prefill-context-parallel-size", 1),
        )
    )
    cache = options.get("kv-cache-dtype", "auto")
    if uses_latents(model):
        assert model.latents is not None
        if model.latents.is_sparse and device == "cpu":
            yield Refusal("sparse attention over latents on a CPU: vLLM's indexer needs a GPU", OTHER_BACKEND)
        yield _refusal(unsupported_latents(head_size_of(model)))
        if cache not in LATENT_CACHES and not (model.latents.is_sparse and cache == SCALED_LATENTS):
            yield Refusal(f"a cache of latents of dtype {cache}", OTHER_CACHE)
        return
    all_heads = sorted({layer.heads for layer in model.layers})
    for what in dict.fromkeys(unsupported_cache(heads, cache, device) for heads in all_heads):
        yield _refusal(what, OTHER_CACHE)
    unsupported = unsupported_pages(cache, has_windows(model), not is_before(release, BYTES_OF_ROWS_SINCE))
    yield _refusal(unsupported, CACHE_OF_OLD_RELEASES)
    kinds = {(layer.heads, layer.attn_type, layer.arguments) for layer in model.layers}
    for heads, attn_type, arguments in sorted(kinds):
        yield _refusal(unsupported_layer(heads.qk, heads.v, attn_type))
        yield from (_refusal(unsupported_argument(name, value)) for name, value in arguments)


def _refusal(what: str | None, way_out: str = OTHER_BACKEND) -> Refusal | None:
    return None if what is None else Refusal(what, way_out)
