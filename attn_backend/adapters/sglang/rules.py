"""The models that this adapter serves in SGLang, as functions of plain values.

Backends ask these functions while SGLang starts (support.py, mla.py). `attn-backend doctor --model` asks
them before, without SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from attn_backend.adapters import own_kernels
from attn_backend.adapters.checkpoint import (
    DECODER,
    ENCODER_ONLY,
    Checkpoint,
    Refusal,
    Verdict,
    integer_option,
)
from attn_backend.jit.manifest import MLA_HEAD_DIMS, HeadDims
from attn_backend.metadata.kv_cache import FOUR_BIT_COLUMNS, MXFP4, SCALED_DTYPES
from attn_backend.releases import SGLANG_ON_CPU_SINCE, is_before

OTHER_BACKEND = "use another --attention-backend"
ARCHITECTURES = ("MHA", "MLA")  # members of SGLang's AttentionArch
LATENT_POOL = "MLATokenToKVPool"
SPARSE = "sparse attention over latents"
BLOCKS = "DFLASH"  # drafts a block of tokens in one pass, in which they see each other
SPECULATION = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", BLOCKS)
REFUSED_OPTIONS = (
    "--enable-unified-memory",  # req_to_token would hold virtual slots
    "--dllm-algorithm",
)
DETERMINISTIC, MIXED_CHUNKS = "--enable-deterministic-inference", "--enable-mixed-chunk"
REFUSED_PARALLELISM = {  # what to use instead
    "--dcp-size": "--attention-backend triton (flashinfer for MLA)",
    "--attn-cp-size": "another --attention-backend",
}
# names that --kv-cache-dtype may have
_CACHES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", MXFP4)
_FP4 = f"--kv-cache-dtype {MXFP4}"
_OTHER_CACHE = "pass --kv-cache-dtype fp8_e4m3"
# With FP4, SGLang copies rows to these places without their scales.
NOT_WITH_FP4 = (
    *("--enable-hierarchical-cache", "--enable-lmcache", "--enable-flexkv"),
    *("--radix-cache-backend", "--enable-unified-cache-external-linker", "--disaggregation-mode"),
)
# Models whose windows have a separate pool, which SGLang makes without FP4's scales.
WINDOW_POOLS = (
    "GptOssForCausalLM",
    *("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM", "IQuestQ1ForCausalLM"),
    "Llama4ForConditionalGeneration",
    *("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
    *("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
    *("MellumForCausalLM", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"),
    *("InklingForConditionalGeneration", "UnlimitedOCRForCausalLM"),
)
# causal over images unless their configuration says otherwise
GEMMA_4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
MASKS_OVER_IMAGES = ("Gemma3ForConditionalGeneration", *GEMMA_4)  # models whose masks this backend knows


def unsupported_device(device: str) -> Refusal | None:
    return None if device in ("cuda", "cpu") else Refusal(f"the device {device!r}", OTHER_BACKEND)


def unsupported_on_cpu(release: str) -> Refusal:
    """For a release that starts Triton on a CPU."""
    advice = (
        f"this release starts Triton for every backend name that is not its own; use SGLang "
        f"{SGLANG_ON_CPU_SINCE} or later on a CPU"
    )
    return Refusal(f"CPUs with SGLang {release}", advice)


def unsupported_architecture(name: str) -> Refusal | None:
    """name: of SGLang's AttentionArch."""
    if name in ARCHITECTURES:
        return None
    return Refusal(f"the attention architecture {name} (it serves MHA, GQA, MQA and MLA)", OTHER_BACKEND)


def unsupported_kv_dtype(name: str, kv_dtype: torch.dtype, dtype: torch.dtype) -> Refusal | None:
    """
    Args:
        name: of --kv-cache-dtype. kv_dtype: of the pool, which is not FP4. dtype: of the model.
    """
    model = "" if dtype == torch.bfloat16 else "--dtype bfloat16 "
    advice = f"pass --kv-cache-dtype fp8_e4m3, or {model}--kv-cache-dtype bfloat16"
    if name in ("mxfp8", "nvfp4"):  # float8_e4m3fn and float4_e2m1fn_x2, with scales in another buffer
        return Refusal(f"--kv-cache-dtype {name}", advice)
    if kv_dtype in (dtype, *SCALED_DTYPES) or {dtype, kv_dtype} == {torch.bfloat16, torch.float16}:
        return None
    return Refusal(f"a KV cache of {kv_dtype} for a model of {dtype}", advice)


def unsupported_fp4(
    device: str,
    *,
    has_latents: bool,
    has_window_pool: bool,
    heads: Iterable[HeadDims] = (),
    drafts_in_blocks: bool = False,
    options: Iterable[str] = (),
) -> Iterator[Refusal]:
    """
    Args:
        has_window_pool: layers with a sliding window have a separate KV pool.
        heads: of the layers. SGLang's pool has as many columns of V as of K.
        drafts_in_blocks: SGLang writes K and V of accepted blocks into this pool, and on a GPU without
            scales.
        options: options of NOT_WITH_FP4 that the server was given.
    """
    if has_latents:
        yield Refusal(f"{_FP4} for latents", _OTHER_CACHE)
        return
    if has_window_pool:
        yield Refusal(f"{_FP4} in a separate KV pool for sliding windows", "pass --disable-hybrid-swa-memory")
    for dims in heads:
        is_stored = dims.qk == dims.v and dims.qk % FOUR_BIT_COLUMNS[MXFP4] == 0
        if not is_stored or (device == "cuda" and dims.is_wide):
            yield Refusal(f"{_FP4} for heads of {dims} columns", _OTHER_CACHE)
    if drafts_in_blocks:
        advice = "pass --speculative-draft-kv-cache-dtype bfloat16 (from 0.5.18 on)"
        yield Refusal(f"{_FP4} for drafts of {BLOCKS}", advice)
    for option in options:
        yield Refusal(f"{_FP4} with {option}: SGLang would not move the scales", f"leave out {option}")


def unsupported_algorithm(name: str) -> Refusal | None:
    """name: of --speculative-algorithm, in capitals; empty: none."""
    if name in ("", *SPECULATION):
        return None
    advice = f"use one of {', '.join(SPECULATION)}, or another --attention-backend"
    return Refusal(f"--speculative-algorithm {name}", advice)


def unsupported_option(option: str) -> Refusal:
    """option: one of REFUSED_OPTIONS, which is given."""
    return Refusal(option, "leave it out, or use another --attention-backend")


def unsupported_deterministic(*, has_latents: bool, has_mixed_chunks: bool) -> Refusal | None:
    """For a server with --enable-deterministic-inference.

    In a mixed step SGLang turns a decode into a prompt of one token, which has other bits.
    """
    if has_latents:
        return Refusal(f"MLA with {DETERMINISTIC}", "use --attention-backend fa3 or triton")
    if has_mixed_chunks:
        return Refusal(f"{MIXED_CHUNKS} with {DETERMINISTIC}", f"leave out {MIXED_CHUNKS}")
    return None


def unsupported_ranks(option: str, size: int) -> Refusal | None:
    """option: one of REFUSED_PARALLELISM. size: its value."""
    if size <= 1:
        return None
    return Refusal(f"{option} {size}", f"pass {option} 1, or use {REFUSED_PARALLELISM[option]}")


def unsupported_pool(names: list[str]) -> str | None:
    """Why latents in this pool cannot be read, or None.

    Args:
        names: of the pool's class and of its bases.
    """
    return None if LATENT_POOL in names else f"latents in a {names[0]}"


def unsupported_latents(width: int, rotated: int, device: str) -> str | None:
    """Why no kernel serves latents of these widths, or None."""
    if device == "cuda" and not HeadDims(width + rotated, width).runs_on_cuda:
        return f"latents of {width} + {rotated} columns (on CUDA it serves 512 + 64)"
    return None


def unsupported_sparse(
    device: str, width: int, rotated: int, index_kpool: int, learnable_sink: bool
) -> Iterator[str]:
    """Why this backend cannot select tokens of latents.

    Args:
        width, rotated: columns of the latents.
        index_kpool, learnable_sink: fields of a checkpoint's configuration.
    """
    if device != "cuda":
        yield f"{SPARSE} on a CPU (SGLang's indexer has only GPU kernels)"
    if HeadDims(width + rotated, width) != MLA_HEAD_DIMS:
        yield f"{SPARSE} of other widths than 512 + 64"
    if index_kpool > 1 or learnable_sink:
        yield f"{SPARSE} with pooled index keys or attention sinks"


def has_spans(model_class: str, is_multimodal: bool, use_bidirectional_attention: Any) -> bool:
    """Whether tokens of an image see each other, in a model that makes such masks.

    Args:
        use_bidirectional_attention: of the language model's configuration. Gemma 4 makes masks whatever it
            says. Its smaller models are causal over images, in transformers and vLLM.
    """
    return is_multimodal and (model_class not in GEMMA_4 or use_bidirectional_attention == "vision")


def unsupported_spans(model_class: str, chunked_prefill_size: int, has_window_pool: bool) -> Refusal | None:
    """Why images whose tokens see each other cannot be served, or None.

    Args:
        has_window_pool: layers with a sliding window have a separate KV pool.
    """
    # --enable-multimodal is most models' default
    text_only = """pass --json-model-override-args '{"language_model_only": true}' (from 0.5.18 on)"""
    if model_class not in MASKS_OVER_IMAGES:
        return Refusal(
            f"the masks over the images of a prompt that {model_class} makes",
            f"{text_only} to serve only text, or use --attention-backend triton",
        )
    if chunked_prefill_size != -1:
        return Refusal(
            "images, whose tokens see each other, in prompts that are computed in chunks",
            "pass --chunked-prefill-size -1",
        )
    if has_window_pool and model_class not in GEMMA_4:  # Gemma 4's windows cut what an image sees
        return Refusal(
            "images, whose tokens see each other, with a separate KV pool for sliding windows",
            "pass --disable-hybrid-swa-memory",
        )
    return None


def unsupported_prompts(
    where: str, attn_type: str, chunked_prefill_size: int, disable_radix_cache: bool
) -> Iterator[Refusal]:
    """A token that sees later tokens needs them in the same step.

    Args:
        where: names the layer.
        attn_type: of layers that are not causal.
    """
    if chunked_prefill_size != -1:
        yield Refusal(f"bidirectional prompts in chunks{where}", "pass --chunked-prefill-size -1")
    if attn_type == ENCODER_ONLY and not disable_radix_cache:
        yield Refusal(f"bidirectional prompts after cached prefixes{where}", "pass --disable-radix-cache")


# Facts about SGLang that it derives from a checkpoint's configuration.

# Models for which it turns off images, unless --enable-multimodal asks for them.
_TEXT_UNLESS_ASKED = ("Gemma3ForConditionalGeneration",)
# Models for which it sets --chunked-prefill-size -1 and --disable-radix-cache itself.
_WHOLE_PROMPTS = ("Gemma3TextModel",)


def judge(model: Checkpoint, device: str, options: Mapping[str, str], release: str) -> Verdict:
    """Whether this adapter serves a model.

    Args:
        device: "cuda" or "cpu".
        options: of the server, by their names without dashes.
    """
    return own_kernels.judge("sglang", model, OTHER_BACKEND, _refusals(model, device, options, release))


def _refusals(
    model: Checkpoint, device: str, options: Mapping[str, str], release: str
) -> Iterator[Refusal | None]:
    all_heads = sorted({layer.heads for layer in model.layers})
    yield unsupported_device(device)
    if device == "cpu" and is_before(release, SGLANG_ON_CPU_SINCE):
        yield unsupported_on_cpu(release)
    kind = "MHA" if model.latents is None else "MLA"
    yield unsupported_architecture(kind if model.layers else "SSM")
    yield from (Refusal(what, OTHER_BACKEND) for what in _latents(model, device) if what is not None)
    yield from _prompts(model, options)
    yield from _of_options(options)
    if DETERMINISTIC[2:] in options:
        yield unsupported_deterministic(
            has_latents=model.latents is not None, has_mixed_chunks=MIXED_CHUNKS[2:] in options
        )
    if options.get("kv-cache-dtype") == MXFP4:
        yield from _fp4(model, device, options, all_heads)
    for heads in all_heads if model.latents is None else ():
        if not (heads.runs_on_cuda if device == "cuda" else heads.runs_on_cpu):
            yield Refusal(f"heads of {heads.qk}/{heads.v} columns", OTHER_BACKEND)


def _of_options(options: Mapping[str, str]) -> Iterator[Refusal | None]:
    cache = options.get("kv-cache-dtype", "auto")
    if cache not in _CACHES:
        yield Refusal(f"--kv-cache-dtype {cache}", f"use one of {', '.join(_CACHES)}")
    yield unsupported_algorithm(options.get("speculative-algorithm", "").upper())
    yield from (unsupported_option(option) for option in REFUSED_OPTIONS if option[2:] in options)
    for option in REFUSED_PARALLELISM:
        yield unsupported_ranks(option, integer_option(options, option[2:], 1))


def _fp4(
    model: Checkpoint, device: str, options: Mapping[str, str], heads: Iterable[HeadDims]
) -> Iterator[Refusal]:
    if device == "cpu":  # SGLang's own refusal
        yield Refusal(f"{_FP4} on a CPU", "pass --kv-cache-dtype auto")
    has_windows = model.architecture in WINDOW_POOLS or bool(model.get("is_hybrid_swa"))
    drafts_in_fp4 = options.get("speculative-draft-kv-cache-dtype", MXFP4) == MXFP4
    yield from unsupported_fp4(
        device,
        has_latents=model.latents is not None,
        has_window_pool=has_windows and "disable-hybrid-swa-memory" not in options,
        heads=heads,
        drafts_in_blocks=drafts_in_fp4 and options.get("speculative-algorithm", "").upper() == BLOCKS,
        options=(option for option in NOT_WITH_FP4 if options.get(option[2:], "null") != "null"),
    )


def _latents(model: Checkpoint, device: str) -> Iterator[str | None]:
    if model.latents is None:
        return
    width, rotated = model.latents.width, model.latents.rotated
    if model.latents.is_sparse:
        pools, has_sink = int(model.get("index_kpool", 1)), bool(model.get("learnable_sink", False))
        yield from unsupported_sparse(device, width, rotated, pools, has_sink)
        return
    # SGLang wraps the pool of a hybrid
    yield unsupported_pool(["HybridLinearKVPool"] if model.has_states else [LATENT_POOL])
    yield unsupported_latents(width, rotated, device)


def _prompts(model: Checkpoint, options: Mapping[str, str]) -> Iterator[Refusal | None]:
    chunk = integer_option(options, "chunked-prefill-size", 8192)
    has_radix_cache = "disable-radix-cache" not in options
    if model.architecture in MASKS_OVER_IMAGES:
        takes_images = "language_model_only" not in options.get("json-model-override-args", "") and (
            model.architecture not in _TEXT_UNLESS_ASKED or "enable-multimodal" in options
        )
        if has_spans(model.architecture, takes_images, model.text.get("use_bidirectional_attention")):
            yield unsupported_spans(model.architecture, chunk, has_window_pool=False)
    types = {layer.attn_type for layer in model.layers} - {DECODER}
    if model.architecture not in _WHOLE_PROMPTS:
        for attn_type in sorted(types):
            yield from unsupported_prompts("", attn_type, chunk, not has_radix_cache)
