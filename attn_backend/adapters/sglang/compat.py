"""Differences between SGLang's releases, 0.5.17 to 0.5.23.

Files that replace functions of the engine also check which release has them: sampler.py and plugin.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from attn_backend.adapters.served import is_ours
from attn_backend.metadata.kv_cache import MXFP4

NAME = "attn_backend"  # of --attention-backend and --sampling-backend


def release() -> str:
    """SGLang's version, or "unknown"."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def register_backend(name: str, create: Callable[[Any], Any]) -> None:
    """Adds a backend to SGLang's registry and to the choices of `--attention-backend`.

    Registering the same name again only replaces the factory.

    It also joins the backends that --enable-deterministic-inference allows, with the radix cache on: a prompt
    has the same bits, whatever part of it is cached (BSRView.prompts). SGLang's other lists of names (chunked
    prefix cache of MLA models) stand for features that this backend does not have.

    Raises:
        RuntimeError: the registry is not where the known releases have it.
    """
    try:
        from sglang.srt import server_args
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    except ImportError as error:
        raise RuntimeError(
            f"attention backend {name!r} cannot be registered with SGLang {release()}: {error}"
        ) from error
    register_attention_backend(name)(create)
    if name not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([name])
    if name not in getattr(server_args, "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", [name]):
        server_args.add_deterministic_attention_backend_choices([name])
    if name not in getattr(server_args, "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND", [name]):
        server_args.add_radix_supported_deterministic_attention_backend_choices([name])


PHASES = ("prefill", "decode")


def phases_of_user(runner: Any) -> list[str]:
    """The phases for which the user chose this package.

    The runner's arguments are the user's: SGLang keeps what it decides for a model elsewhere.
    """
    arguments = runner.server_args
    if runner.is_draft_worker and arguments.speculative_draft_attention_backend is not None:
        return list(PHASES) if arguments.speculative_draft_attention_backend == NAME else []
    return [
        phase
        for phase in PHASES
        if (getattr(arguments, f"{phase}_attention_backend", None) or arguments.attention_backend) == NAME
    ]


def backend_of_layer(backend: Any, layer_id: int, phase: str) -> Any:
    """The backend that runs a layer with softmax, behind the backends of SGLang that have several."""
    while not is_ours(type(backend)):
        if hasattr(backend, "sparse_layer_ids"):  # MiniMax M3
            inner = backend.sparse if layer_id in backend.sparse_layer_ids else backend.dense
        elif hasattr(backend, "full_attn_backend"):  # with layers of linear attention or convolutions
            inner = backend.full_attn_backend
        elif hasattr(backend, "prefill_backend"):  # one for prompts, one for decodes
            inner = backend.prefill_backend if phase == "prefill" else backend.decode_backend
        else:
            break
        backend = inner
    return backend


def register_draft_backend(name: str) -> None:
    """Adds a backend to those that SGLang gives to draft models of DFLASH, which otherwise get FlashInfer's.

    Registering it again changes nothing.

    Up to 0.5.19 the names are in a tuple of the function that checks them: there, drafts stay with
    FlashInfer's backend, and this one verifies them.
    """
    from sglang.srt import server_args

    choices = getattr(server_args, "DRAFT_ATTENTION_BACKEND_CHOICES", None)
    if choices is not None and name not in choices:
        server_args.add_draft_attention_backend_choices([name])


def register_sampler(name: str, create: Callable[[], Any]) -> None:
    """Adds a sampler to SGLang's registry and to the choices of `--sampling-backend`.

    Registering the same one again changes nothing.

    Raises:
        RuntimeError: the registry is not where the known releases have it.
    """
    try:
        from sglang.srt.layers import sampler
        from sglang.srt.layers.sampler import register_sampler_backend
    except ImportError as error:
        raise RuntimeError(
            f"sampling backend {name!r} cannot be registered with SGLang {release()}: {error}"
        ) from error
    # SGLang warns of every second registration
    if getattr(sampler, "_CUSTOM_SAMPLER_FACTORIES", {}).get(name) is not create:
        register_sampler_backend(name, create)


def take_parts(name: str, takes: bool) -> None:
    """Sets whether MLA models in this process pass the latent and the rotated part of Q and K separately to a
    backend of this name, as `q_rope` and `k_rope`.

    For other backends they concatenate both parts, which costs a copy in every layer. So does a release
    without their list of names.
    """
    try:
        from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as names
    except ImportError:
        return
    if takes and name not in names:
        names.append(name)
    elif not takes and name in names:
        names.remove(name)


def deterministic() -> bool:
    """Whether the server runs with --enable-deterministic-inference."""
    return bool(setting("exec.deterministic.enable_deterministic_inference", False))


def starts_triton_on_cpu(name: str) -> bool:
    """Whether SGLang would launch its Triton kernels on a machine without a GPU.

    Up to 0.5.21 it decides by the backend's name and knows only its own; later releases also ask the
    platform.
    """
    from sglang.srt.utils.common import support_triton

    return bool(support_triton(name))


def setting(path: str, default: Any) -> Any:
    """A resolved option of the running server, such as "schedule.chunked_prefill_size".

    Returns `default` if this release or this process does not have it.
    """
    from sglang.srt import runtime_context

    group, *rest = path.split(".")
    getter = getattr(runtime_context, f"get_{group}", None)
    if getter is None:
        return default
    try:
        value = getter()
        for name in rest:
            value = getattr(value, name)
    except (
        AttributeError,
        ValueError,
        AssertionError,
        RuntimeError,
    ):  # not published, no such option, or no process group yet
        return default
    return default if value is None else value


def num_draft_tokens() -> int:
    """Draft tokens of a request in a step that verifies them; 0: this server does not speculate."""
    return int(setting("spec.speculative_num_draft_tokens", 0) or 0)


def shared_reads_end_after_replay() -> Any:
    """The result of `AttentionBackend.shared_read_ends` if captured kernels read req_to_token until the
    replay ends. None: this release does not ask.
    """
    from sglang.srt.layers.attention import base_attn_backend

    ends = getattr(base_attn_backend, "SharedReadEnds", None)
    return None if ends is None else ends.POST_REPLAY


def copies_to_slots(pool: Any) -> bool:
    """Whether append_kv may replace this pool's set_kv_buffer, which only copies K and V of the pool's dtype
    to their slots, or rounds them to FP4.

    The slots are rows of get_kv_buffer's tensors, or of raw_kv_buffer's for FP4. 8-bit floats that a pool
    stores as uint8 count as its dtype.

    One difference remains: under SGLANG_ENABLE_ASYNC_ASSERT a pool checks the slots, while `append_kv` skips
    slots outside the cache.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    names = ("set_kv_buffer", "_store_kv_layer")
    return (
        isinstance(pool, MHATokenToKVPool)
        and all(
            getattr(type(pool), name, None) is getattr(MHATokenToKVPool, name, None)
            and name not in vars(pool)
            for name in names
        )
        and pool.store_dtype == (torch.uint8 if pool.dtype.itemsize == 1 else pool.dtype)
        and getattr(pool, "kv_cache_layout", None) == "nhd"
        and (not getattr(pool, "is_quantized_kv_cache", True) or holds_fp4(pool))
        and not getattr(pool, "requires_physical_write_loc", False)
    )


def stores_fp4(runner: Any) -> bool:
    """Whether this runner's --kv-cache-dtype is fp4_mx_block16.

    A draft model with --speculative-draft-kv-cache-dtype auto has the target's name, and another dtype.
    """
    return runner.kv_cache_dtype_str == MXFP4 and str(runner.kv_cache_dtype) == "torch.float4_e2m1fn_x2"


def holds_fp4(pool: Any) -> bool:
    """Whether a pool stores K and V as fp4_mx_block16.

    The SWAKVPool that SGLang makes with this option is not FP4: it has whole bytes and no scales.
    """
    method = pool.get_kv_cache_quant_method()
    return hasattr(pool, "get_raw_kv_buffer") and getattr(method, "name", None) == MXFP4


def raw_kv_buffer(pool: Any, layer_id: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(K, V) [slots, num_kv_heads, head_dim / 2] of an FP4 pool, and their scales [slots, num_kv_heads *
    head_dim / 16], uint8. get_kv_buffer() would dequantize the whole pool.
    """
    if pool.layer_transfer_counter is not None:  # as get_kv_buffer() does
        pool.layer_transfer_counter.wait_until(layer_id - pool.start_layer)
    k, v, k_scales, v_scales = pool.get_raw_kv_buffer(layer_id)
    return (k, v), (k_scales, v_scales)


def image_spans(forward_batch: Any) -> list[tuple[int, int, int]]:
    """(request, first token, last token) of each image in the prompts of a step."""
    spans = []
    for request, inputs in enumerate(forward_batch.mm_inputs or []):
        for item in [] if inputs is None else inputs.mm_items:
            if item.is_image():
                spans += [(request, int(first), int(last)) for first, last in item.offsets]
    return spans
