"""Shared by the tests of both vLLM samplers: its original functions, requests, and the tokens that vLLM's own
filters leave.
"""

from __future__ import annotations

import itertools

import torch
import vllm.v1.sample.sampler as v1_module
import vllm.v1.worker.gpu.sample.sampler as v2_module
import vllm.v1.worker.gpu.sample.states as v2_states
import vllm.v1.worker.gpu_model_runner as v1_runner
from torch import Tensor
from vllm import SamplingParams

from attn_backend.adapters.vllm import sampler

VOCAB = 300
ORIGINALS = {
    owner: {name: getattr(owner, name) for name in names}
    for owner, names in [
        (v1_module.Sampler, ["sample"]),
        (v1_runner.GPUModelRunner, ["_sample", "_bookkeeping_sync"]),
        (v2_module.Sampler, ["sample"]),
        (v2_states.SamplingStates, ["add_request"]),
    ]
}


def replaced() -> set[bool]:
    """For each of vLLM's functions, whether it is now replaced."""
    return {
        getattr(owner, name) is not original
        for owner, names in ORIGINALS.items()
        for name, original in names.items()
    }


MIXED = [
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 11},
    {"temperature": 0.0},
    {"temperature": 1.3, "min_p": 0.1, "seed": 12},
    {"temperature": 0.5, "top_k": 3, "seed": 5},
    {"temperature": 1.0, "top_p": 0.3, "seed": 2**63 - 1},
    {"temperature": 1.0, "seed": 0},
]


def distinct_logits(rows: int, generator: torch.Generator) -> Tensor:
    return torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(rows)]) / 32


def vllms_survivors(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    columns = (
        [one.temperature for one in params],
        [one.top_p for one in params],
        [one.min_p for one in params],
    )
    temperature, top_p, min_p = (torch.tensor(column) for column in columns)
    top_k = torch.tensor([one.top_k if 0 < one.top_k < VOCAB else VOCAB for one in params])
    return sampler.survivors(logits, temperature, top_k, top_p, min_p)


FILTERS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        itertools.product((0.0, 0.4, 1.2), (0, 1, 40), (1.0, 0.9, 0.2), (0.0, 0.2))
    )
]
