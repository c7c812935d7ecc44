"""run, append_kv, append_mla_kv, append_qkv, selected_slots and sample as torch operators, which torch.compile puts into its graphs without tracing them.

Outside of a compiled function nothing here is used. Each operator calls the public function of its name, whose checks and errors come when the graph runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from ..metadata import KVCache
from ..metadata.structure import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .append_qkv import Rotary
    from .attention import Attention
    from .sampling import FilterOrder, Float, Int, Samples

_attentions: WeakValueDictionary[int, Attention] = WeakValueDictionary()
_Number = TypeVar("_Number", int, float)


def know(handle: int, attention: Attention) -> None:
    """Lets compiled functions find an Attention, of which a graph holds the handle."""
    _attentions[handle] = attention


def _cache(k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, k_value: float, v_value: float) -> KVCache:
    """k_value, v_value: scales where there are no tensors."""
    if k_scale is None and v_scale is None and k_value == v_value == 1.0:
        return KVCache.unchecked(k, v)
    return KVCache.unchecked(k, v, k_value if k_scale is None else k_scale, v_value if v_scale is None else v_scale)


def _scales_of(kv: KVCache) -> tuple[Tensor | None, Tensor | None, float, float]:
    """The last arguments of _cache."""
    (k_value, k_scale), (v_value, v_scale) = _both(kv.k_scale, 1.0), _both(kv.v_scale, 1.0)
    return k_scale, v_scale, k_value, v_value


def _both(value: _Number | Tensor | None, default: _Number) -> tuple[_Number, Tensor | None]:
    """A parameter as a number, and as a tensor or None."""
    if value is None:
        return default, None
    if isinstance(value, Tensor):
        return default, value
    return value, None


@custom_op("attn_backend::run", mutates_args=("out", "lse"))
def _run(
    handle: int, q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, k_value: float, v_value: float,
    out: Tensor, lse: Tensor | None, sm_scale: float | None, logits_soft_cap: float, after_append: bool, q_rope: Tensor | None,
    sinks: Tensor | None, q_scale: Tensor | None, q_value: float, out_scale: Tensor | None, out_value: float,
    tensor_names: str, tensors: list[Tensor], number_names: str, numbers: list[float],
) -> None:  # fmt: skip
    names = tensor_names.split() + number_names.split()
    variant_args: dict[str, Any] | None = dict(zip(names, [*tensors, *numbers], strict=True)) or None
    _attentions[handle].run(
        q, _cache(k, v, k_scale, v_scale, k_value, v_value), q_rope=q_rope, out=out, lse=lse, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
        after_append=after_append, variant_args=variant_args, sinks=sinks, q_scale=q_scale if q_scale is not None else None if q_value == 1.0 else q_value,
        out_scale=out_scale if out_scale is not None else None if out_value == 0.0 else out_value,
    )  # fmt: skip


def run(handle: int, q: Tensor, kv: KVCache, out: Tensor, variant_args: Mapping[str, Any] | None, options: dict[str, Any]) -> Tensor:
    """options: the other arguments of Attention.run, by name."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for name, value in (variant_args or {}).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    options["q_value"], options["q_scale"] = _both(options["q_scale"], 1.0)  # a number, a tensor
    options["out_value"], options["out_scale"] = _both(options["out_scale"], 0.0)
    _run(
        handle, q, kv.k, kv.v, *_scales_of(kv), out, **options,
        tensor_names=" ".join(tensors), tensors=list(tensors.values()), number_names=" ".join(numbers), numbers=list(numbers.values()),
    )  # fmt: skip
    return out


@custom_op("attn_backend::append_kv", mutates_args=("k_cache", "v_cache"))
def _append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, k_value: float, v_value: float, slots: Tensor
) -> None:
    from .append import append_kv

    append_kv(k, v, _cache(k_cache, v_cache, k_scale, v_scale, k_value, v_value), slots)


def append_kv(k: Tensor, v: Tensor, kv: KVCache, slots: Tensor) -> None:
    _append_kv(k, v, kv.k, kv.v, *_scales_of(kv), slots)


@custom_op("attn_backend::append_mla_kv", mutates_args=("cache",))
def _append_mla_kv(latent: Tensor, rope: Tensor, cache: Tensor, head_dim_v: int, scale_value: float, scale: Tensor | None, slots: Tensor) -> None:
    from .append_mla import append_mla_kv

    append_mla_kv(latent, rope, _cache(cache, cache[..., :head_dim_v], scale, scale, scale_value, scale_value), slots)


def append_mla_kv(latent: Tensor, rope: Tensor, kv: KVCache, slots: Tensor) -> None:
    _append_mla_kv(latent, rope, kv.k, kv.v.shape[3], *_both(kv.k_scale, 1.0), slots)


@custom_op("attn_backend::append_qkv", mutates_args=("out", "k_cache", "v_cache"))
def _append_qkv(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None, k_value: float, v_value: float, slots: Tensor, table: Tensor | None, interleaved: bool,
    positions: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, norm_eps: float, norm_offset: float,
) -> None:  # fmt: skip
    from .append_qkv import Rotary, append_qkv

    append_qkv(
        q, k, v, _cache(k_cache, v_cache, k_scale, v_scale, k_value, v_value), slots,
        rotary=None if table is None else Rotary(table, interleaved), positions=positions, q_norm=q_norm, k_norm=k_norm,
        norm_eps=norm_eps, norm_offset=norm_offset, out=out,
    )  # fmt: skip


def append_qkv(q: Tensor, k: Tensor, v: Tensor, kv: KVCache, slots: Tensor, out: Tensor | None, rotary: Rotary | None, options: dict[str, Any]) -> Tensor:
    """Without `out` Q is copied: an operator says of each tensor whether it is read or written.

    options: the other arguments of append_qkv, by name.
    """
    out = torch.empty_like(q) if out is None else out
    table, interleaved = (None, False) if rotary is None else (rotary.table, rotary.interleaved)
    _append_qkv(q, k, v, out, kv.k, kv.v, *_scales_of(kv), slots, table, interleaved, **options)
    return out


@custom_op("attn_backend::selected_slots", mutates_args=("out",))
def _selected_slots(
    indices: Tensor, block_table: Tensor | None, requests: Tensor | None, page_size: int, page_stride: int | None, kv_lens: Tensor | None, out: Tensor
) -> None:
    from .selection import selected_slots

    selected_slots(indices, block_table, requests, page_size, page_stride=page_stride, kv_lens=kv_lens, out=out)


def selected_slots(
    indices: Tensor, block_table: Tensor | None, requests: Tensor | None, page_size: int, page_stride: int | None, kv_lens: Tensor | None, out: Tensor | None
) -> Tensor:
    out = torch.empty_like(indices) if out is None else out
    _selected_slots(indices, block_table, requests, page_size, page_stride, kv_lens, out)
    return out


@custom_op("attn_backend::sample", mutates_args=("token_ids", "workspace"))
def _sample(
    logits: Tensor, return_logprobs: bool, num_top_logprobs: int, token_ids: Tensor, workspace: Tensor | None, token_mask: Tensor | None,
    temperature: float, temperatures: Tensor | None, top_k: int, top_ks: Tensor | None, top_p: float, top_ps: Tensor | None,
    min_p: float, min_ps: Tensor | None, seed: int, seeds: Tensor | None, position: int, positions: Tensor | None,
    filter_order: str, logprobs_of: str, row_ctas: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from .sampling import sample

    samples = sample(
        logits, out=token_ids, workspace=workspace, token_mask=token_mask,
        temperature=temperature if temperatures is None else temperatures, top_k=top_k if top_ks is None else top_ks,
        top_p=top_p if top_ps is None else top_ps, min_p=min_p if min_ps is None else min_ps,
        seed=seed if seeds is None else seeds, position=position if positions is None else positions,
        filter_order=cast("FilterOrder", filter_order), logprobs_of=cast("Any", logprobs_of),
        return_logprobs=return_logprobs, num_top_logprobs=num_top_logprobs, row_ctas=row_ctas,
    )  # fmt: skip
    absent = logits.new_empty(0, dtype=torch.float32)
    optional = (samples.logprobs, samples.top_token_ids, samples.top_logprobs)
    logprobs, top_token_ids, top_logprobs = (absent.clone() if tensor is None else tensor for tensor in optional)
    return samples.valid, logprobs, top_token_ids, top_logprobs


@_sample.register_fake
def _(logits: Tensor, return_logprobs: bool, num_top_logprobs: int, *_arguments: Any, **_options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = logits.shape[0]

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    top = (batch, num_top_logprobs) if num_top_logprobs else (0,)
    logprobs = empty(torch.float32, batch if return_logprobs else 0)
    return empty(torch.bool, batch), logprobs, empty(torch.int32 if num_top_logprobs else torch.float32, *top), empty(torch.float32, *top)


def sample(
    logits: Tensor,
    temperature: Float,
    top_k: Int | None,
    top_p: Float | None,
    min_p: Float | None,
    seed: Int | None,
    position: Int | None,
    generator: torch.Generator | None,
    out: Tensor | None,
    options: dict[str, Any],
) -> Samples:
    """options: the other arguments of sampling.sample, by name."""
    from .sampling import Samples

    if seed is None or generator is not None:
        refuse("seed", seed, "given in a compiled function, and no generator: a graph would repeat its draws")
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device) if out is None else out
    return_logprobs, num_top_logprobs = options.pop("return_logprobs"), options.pop("num_top_logprobs")
    valid, logprobs, top_token_ids, top_logprobs = _sample(
        logits, return_logprobs, num_top_logprobs, token_ids, options.pop("workspace"), options.pop("token_mask"),
        *_both(temperature, 1.0), *_both(top_k, 0), *_both(top_p, 1.0), *_both(min_p, 0.0), *_both(seed, 0), *_both(position, 0), **options,
    )  # fmt: skip
    return Samples(token_ids, valid, logprobs if return_logprobs else None, *((top_token_ids, top_logprobs) if num_top_logprobs else (None, None)))
