"""Registers run, append_kv, append_mla_kv, append_qkv, selected_slots and sample as torch operators, which
torch.compile puts into its graphs without tracing them.

Each operator calls the public function of its name, so its checks and errors happen when the graph runs.
Attention objects and the public functions register themselves here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from ..metadata import KVCache
from ..metadata.kv_cache import BlockScales, checked_scale
from ..validation import MAX_INT64, check_plain, check_types, refuse

if TYPE_CHECKING:
    from .append import Rotary
    from .attention import Attention
    from .sampling import FilterOrder, Samples


_attentions: WeakValueDictionary[int, Attention] = WeakValueDictionary()
# An int, a float or a bool, passed to operators unchanged. A parameter declared as `float` would turn an int
# or a bool into a float.
_Number = torch.types.Number


_eager: dict[str, Callable[..., Any]] = {}
T = TypeVar("T", bound=Callable[..., Any])


def eager(public: T) -> T:
    """Decorator that registers the public functions that operators call, and the classes that they construct.
    This module cannot import them: their modules import it.
    """
    _eager[public.__name__] = public
    return public


def know(handle: int, attention: Attention) -> None:
    """Lets compiled functions find an Attention by its handle, which a graph holds."""
    _attentions[handle] = attention


def _written_scales(kv: KVCache) -> tuple[Any, ...]:
    """What append's operators take: _scales_of(), and the scales of each token and head, which they write."""
    if kv.has_token_scales:
        (k_scale, k_factor), (v_scale, v_factor) = _split(kv.k_scale), _split(kv.v_scale)
        return None, k_factor, None, v_factor, k_scale, v_scale
    return *_scales_of(kv), None, None


def _cache(
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    k_number: _Number | None,
    v_scale: Tensor | None,
    v_number: _Number | None,
    k_written: Tensor | None = None,
    v_written: Tensor | None = None,
) -> KVCache:
    if k_written is not None:
        k_scale, v_scale = k_written, v_written
    return KVCache.unchecked(k, v, _joined(k_scale, k_number), _joined(v_scale, v_number))


def _scales_of(kv: KVCache) -> tuple[Tensor | None, _Number | None, Tensor | None, _Number | None]:
    """The last arguments of _cache."""
    return *_split(kv.k_scale), *_split(kv.v_scale)


def _split(value: _Number | Tensor | BlockScales | None) -> tuple[Tensor | None, _Number | None]:
    """A parameter in the form that operators take: (tensor or None, number or None); both of BlockScales."""
    if isinstance(value, BlockScales):
        return value
    return (value, None) if isinstance(value, Tensor) else (None, value)


def _joined(tensor: Tensor | None, number: _Number | None) -> Any:
    """Reverses _split()."""
    if tensor is not None and number is not None:
        return BlockScales(tensor, number)
    return number if tensor is None else tensor


@custom_op("attn_backend::run", mutates_args=("out", "lse"))
def _run(
    handle: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    k_number: _Number | None,
    v_scale: Tensor | None,
    v_number: _Number | None,
    out: Tensor,
    lse: Tensor | None,
    sm_scale: _Number | None,
    logits_soft_cap: _Number,
    after_append: _Number,
    q_rope: Tensor | None,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    q_number: _Number | None,
    out_scale: Tensor | None,
    out_number: _Number | None,
    has_variant_args: bool,
    tensor_names: str,
    tensors: list[Tensor],
    number_names: str,
    numbers: list[_Number],
) -> None:
    names = [
        name
        for names, values in ((tensor_names, tensors), (number_names, numbers))
        if values
        for name in names.split("\n")
    ]
    variant_args: dict[str, Any] | None = (
        dict(zip(names, [*tensors, *numbers], strict=True)) if has_variant_args else None
    )
    _attentions[handle].run(
        q,
        _cache(k, v, k_scale, k_number, v_scale, v_number),
        q_rope=q_rope,
        out=out,
        lse=lse,
        sm_scale=cast("float | None", sm_scale),
        logits_soft_cap=cast("float", logits_soft_cap),
        after_append=cast("bool", after_append),
        variant_args=variant_args,
        sinks=sinks,
        q_scale=_joined(q_scale, q_number),
        out_scale=_joined(out_scale, out_number),
    )


def run(
    handle: int,
    q: Tensor,
    kv: KVCache,
    out: Tensor,
    variant_args: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> Tensor:
    """options: the other arguments of Attention.run, by name."""
    if variant_args is not None:
        check_types(Mapping, "a dict or None", variant_args=variant_args)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, _Number] = {}
    for name, value in (variant_args or {}).items():
        if not isinstance(name, str):
            refuse("a name in variant_args", name, "a str")
        if isinstance(value, Tensor):
            tensors[name] = check_plain(f"variant_args[{name!r}]", value)
        elif isinstance(value, float) or (isinstance(value, int) and -MAX_INT64 <= value <= MAX_INT64):
            numbers[name] = value
        else:
            refuse(f"variant_args[{name!r}]", value, "a tensor or a number")
    for name, number in (("q_scale", "q_number"), ("out_scale", "out_number")):
        value = options[name]
        options[name], options[number] = _split(
            value if isinstance(value, float) else checked_scale(name, value)
        )
    _run(
        handle,
        q,
        kv.k,
        kv.v,
        *_scales_of(kv),
        out,
        **options,
        has_variant_args=variant_args is not None,
        tensor_names="\n".join(tensors),
        tensors=list(tensors.values()),
        number_names="\n".join(numbers),
        numbers=list(numbers.values()),
    )
    return out


@custom_op("attn_backend::append_kv", mutates_args=("k_cache", "v_cache", "k_written", "v_written"))
def _append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    k_number: _Number | None,
    v_scale: Tensor | None,
    v_number: _Number | None,
    k_written: Tensor | None,
    v_written: Tensor | None,
    slots: Tensor,
    rotation: bool,
) -> None:
    _eager["append_kv"](
        k,
        v,
        _cache(k_cache, v_cache, k_scale, k_number, v_scale, v_number, k_written, v_written),
        slots,
        rotation=rotation,
    )


def append_kv(k: Tensor, v: Tensor, kv: KVCache, slots: Tensor, rotation: bool) -> None:
    _append_kv(k, v, kv.k, kv.v, *_written_scales(kv), slots, rotation)


@custom_op("attn_backend::append_mla_kv", mutates_args=("k_cache", "v_cache"))
def _append_mla_kv(
    latent: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    k_number: _Number | None,
    v_scale: Tensor | None,
    v_number: _Number | None,
    slots: Tensor,
) -> None:
    _eager["append_mla_kv"](
        latent, rope, _cache(k_cache, v_cache, k_scale, k_number, v_scale, v_number), slots
    )


def append_mla_kv(latent: Tensor, rope: Tensor, kv: KVCache, slots: Tensor) -> None:
    _append_mla_kv(latent, rope, kv.k, kv.v, *_scales_of(kv), slots)


@custom_op("attn_backend::append_qkv", mutates_args=("out", "k_cache", "v_cache", "k_written", "v_written"))
def _append_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    k_number: _Number | None,
    v_scale: Tensor | None,
    v_number: _Number | None,
    k_written: Tensor | None,
    v_written: Tensor | None,
    slots: Tensor,
    table: Tensor | None,
    interleaved: bool,
    positions: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: _Number,
    norm_offset: _Number,
    rotation: bool,
) -> None:
    _eager["append_qkv"](
        q,
        k,
        v,
        _cache(k_cache, v_cache, k_scale, k_number, v_scale, v_number, k_written, v_written),
        slots,
        rotary=None if table is None else _eager["Rotary"](table, interleaved),
        positions=positions,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=cast("float", norm_eps),
        norm_offset=cast("float", norm_offset),
        out=out,
        rotation=rotation,
    )


def append_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVCache,
    slots: Tensor,
    out: Tensor | None,
    rotary: Rotary | None,
    options: dict[str, Any],
) -> Tensor:
    """options: the other arguments of append_qkv, by name."""
    out = q if out is None else out
    table, interleaved = (None, False) if rotary is None else (rotary.table, rotary.interleaved)
    _append_qkv(q, k, v, out, kv.k, kv.v, *_written_scales(kv), slots, table, interleaved, **options)
    return out


@custom_op("attn_backend::selected_slots", mutates_args=("out",))
def _selected_slots(
    indices: Tensor,
    block_table: Tensor | None,
    requests: Tensor | None,
    page_size: _Number,
    page_stride: _Number | None,
    kv_lens: Tensor | None,
    out: Tensor,
) -> None:
    _eager["selected_slots"](
        indices,
        block_table,
        requests,
        cast("int", page_size),
        page_stride=cast("int | None", page_stride),
        kv_lens=kv_lens,
        out=out,
    )


def selected_slots(
    indices: Tensor,
    block_table: Tensor | None,
    requests: Tensor | None,
    page_size: int,
    page_stride: int | None,
    kv_lens: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    out = torch.empty(indices.shape, dtype=indices.dtype, device=indices.device) if out is None else out
    _selected_slots(indices, block_table, requests, page_size, page_stride, kv_lens, out)
    return out


@custom_op("attn_backend::sample", mutates_args=("token_ids", "workspace"))
def _sample(
    logits: Tensor,
    return_logprobs: bool,
    num_top_logprobs: int,
    token_ids: Tensor,
    workspace: Tensor | None,
    token_mask: Tensor | None,
    temperature: Tensor | None,
    temperature_number: _Number | None,
    top_k: Tensor | None,
    top_k_number: _Number | None,
    top_p: Tensor | None,
    top_p_number: _Number | None,
    min_p: Tensor | None,
    min_p_number: _Number | None,
    seed: Tensor | None,
    seed_number: _Number | None,
    position: Tensor | None,
    position_number: _Number | None,
    filter_order: str,
    logprobs_of: str,
    row_ctas: _Number,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    samples = _eager["sample"](
        logits,
        out=token_ids,
        workspace=workspace,
        token_mask=token_mask,
        temperature=_joined(temperature, temperature_number),
        top_k=_joined(top_k, top_k_number),
        top_p=_joined(top_p, top_p_number),
        min_p=_joined(min_p, min_p_number),
        seed=_joined(seed, seed_number),
        position=_joined(position, position_number),
        filter_order=cast("FilterOrder", filter_order),
        logprobs_of=cast("Any", logprobs_of),
        return_logprobs=return_logprobs,
        num_top_logprobs=num_top_logprobs,
        row_ctas=cast("int", row_ctas),
    )
    absent = logits.new_empty(0, dtype=torch.float32)
    optional = (samples.logprobs, samples.top_token_ids, samples.top_logprobs)
    logprobs, top_token_ids, top_logprobs = (
        absent.clone() if tensor is None else tensor for tensor in optional
    )
    return samples.valid, logprobs, top_token_ids, top_logprobs


@_sample.register_fake
def _(
    logits: Tensor, return_logprobs: bool, num_top_logprobs: int, *_arguments: Any, **_options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = logits.shape[0]

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    top = (batch, num_top_logprobs) if num_top_logprobs else (0,)
    return (
        empty(torch.bool, batch),
        empty(torch.float32, batch if return_logprobs else 0),
        empty(torch.int32 if num_top_logprobs else torch.float32, *top),
        empty(torch.float32, *top),
    )


def sample(
    logits: Tensor, numbers: dict[str, Any], generator: torch.Generator | None, options: dict[str, Any]
) -> Samples:
    """numbers: the arguments of sampling.sample that are numbers or tensors, by name; options: all others
    except logits and generator.
    """
    if generator is not None:
        raise ValueError(
            "generator is given, must be None in a compiled function: a graph would repeat its draws"
        )
    if numbers["seed"] is None:
        refuse("seed", None, "given in a compiled function: a graph would repeat its draws")
    out, return_logprobs, num_top_logprobs = (
        options.pop("out"),
        options["return_logprobs"],
        options["num_top_logprobs"],
    )
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device) if out is None else out
    for name, value in numbers.items():
        options[name], options[f"{name}_number"] = _split(value)
    valid, logprobs, top_token_ids, top_logprobs = _sample(logits, token_ids=token_ids, **options)
    return _eager["Samples"](
        token_ids,
        valid,
        logprobs if return_logprobs else None,
        *((top_token_ids, top_logprobs) if num_top_logprobs else (None, None)),
    )
