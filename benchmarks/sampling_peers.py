"""Samplers of the installed peers: each is a function of a case that returns a launch.

Parameters are a tensor for each request, as engines hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

from benchmarks.timing import Launch


@dataclass(frozen=True)
class Filters:
    """The parameters of a line of the benchmark; None: off. temperature 0: greedy."""

    name: str
    temperature: float = 0.6
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class Requests:
    """Logits [batch, vocab] float32 and the parameters of each row."""

    logits: torch.Tensor
    filters: Filters

    def each(self, value: float | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        return (
            None if value is None else torch.full((self.logits.shape[0],), value, dtype=dtype, device="cuda")
        )


def flashinfer(requests: Requests) -> list[Launch]:
    """FlashInfer from logits: every combination of its functions for these filters; the fastest counts."""
    fi = import_module("flashinfer.sampling")
    f, logits = requests.filters, requests.logits
    temperature = requests.each(f.temperature)
    top_k, top_p, min_p = requests.each(f.top_k, torch.int32), requests.each(f.top_p), requests.each(f.min_p)
    assert temperature is not None
    column = temperature[:, None]

    def probs() -> torch.Tensor:
        return fi.softmax(logits, temperature)

    if f.temperature == 0.0:
        return []
    if top_k is not None and top_p is not None and min_p is not None:  # as SGLang combines them
        return [
            lambda: fi.min_p_sampling_from_probs(
                fi.top_p_renorm_probs(fi.top_k_renorm_probs(probs(), top_k), top_p), min_p
            )
        ]
    if top_k is not None and top_p is not None:
        return [
            lambda: fi.top_k_top_p_sampling_from_probs(probs(), top_k, top_p, filter_apply_order="joint"),
            lambda: fi.top_k_top_p_sampling_from_logits(
                logits / column, top_k, top_p, filter_apply_order="top_k_first"
            ),
        ]
    if top_k is not None:
        return [
            lambda: fi.top_k_sampling_from_probs(probs(), top_k),
            lambda: fi.sampling_from_logits(fi.top_k_mask_logits(logits / column, top_k)),
        ]
    if top_p is not None:
        return [lambda: fi.top_p_sampling_from_probs(probs(), top_p)]
    if min_p is not None:
        return [lambda: fi.min_p_sampling_from_probs(probs(), min_p)]
    return [lambda: fi.sampling_from_logits(logits / column), lambda: fi.sampling_from_probs(probs())]


def vllm(requests: Requests) -> list[Launch]:
    """vLLM's own sampler on a GPU: its Triton kernels for temperature, min-p, top-k with top-p, and the
    Gumbel draw. They work in place, so a copy comes first; the caller subtracts its time.
    """
    gumbel = import_module("vllm.v1.worker.gpu.sample.gumbel")
    apply_min_p = import_module("vllm.v1.worker.gpu.sample.min_p").apply_min_p
    apply_top_k_top_p = import_module("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton
    f, logits = requests.filters, requests.logits
    batch = logits.shape[0]
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    temperature, top_k, top_p, min_p = (
        requests.each(f.temperature),
        requests.each(f.top_k, torch.int32),
        requests.each(f.top_p),
        requests.each(f.min_p),
    )
    seeds = torch.arange(batch, dtype=torch.int64, device="cuda")
    work = torch.empty_like(logits)
    filters = any(value is not None for value in (top_k, top_p, min_p))

    def run() -> torch.Tensor:
        if not filters:
            return gumbel.gumbel_sample(logits, rows, temperature, seeds, seeds, apply_temperature=True)
        work.copy_(logits)
        gumbel.apply_temperature(work, rows, temperature)
        if min_p is not None:
            apply_min_p(work, rows, min_p)
        masked = work if top_k is None and top_p is None else apply_top_k_top_p(work, top_k, top_p)
        return gumbel.gumbel_sample(masked, rows, temperature, seeds, seeds, apply_temperature=False)

    return [run]


def torch_sort(requests: Requests) -> list[Launch]:
    """Sampling by a sort, like the engines' torch implementations; torch.argmax if greedy."""
    f, logits = requests.filters, requests.logits
    if f.temperature == 0.0:
        return [lambda: logits.argmax(-1)]

    def run() -> torch.Tensor:
        probs = torch.softmax(logits / f.temperature, -1)
        if f.min_p is not None:
            probs = torch.where(probs < f.min_p * probs.amax(-1, keepdim=True), 0.0, probs)
        if f.top_k is None and f.top_p is None:
            return (probs / torch.empty_like(probs).exponential_()).argmax(-1)
        ordered, ids = probs.sort(dim=-1, descending=True)
        if f.top_k is not None:
            ordered[:, f.top_k :] = 0.0
            ordered /= ordered.sum(-1, keepdim=True)
        if f.top_p is not None:
            ordered = torch.where(ordered.cumsum(-1) - ordered > f.top_p, 0.0, ordered)
        drawn = (ordered / torch.empty_like(ordered).exponential_()).argmax(-1, keepdim=True)
        return ids.gather(-1, drawn)

    return [run]


def copy_time(requests: Requests) -> Launch:
    """The copy before vLLM's kernels."""
    work = torch.empty_like(requests.logits)
    return lambda: work.copy_(requests.logits)
