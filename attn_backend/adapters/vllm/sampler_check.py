"""A look at the sampler before it is trusted: a small batch on the worker's own device, against vLLM's own
filters on the host.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from attn_backend.kernels.sampling import sample

_VOCAB = 512
_DRAWS = 64  # of each combination of parameters, at as many positions
_FREQUENCIES = 4096  # draws whose frequencies are counted; their standard error is below 0.008


class SamplerDisagrees(RuntimeError):
    """The sampler does not do what vLLM's does."""


def check_sampler(device: torch.device) -> None:
    """Every draw must come from the tokens that vLLM's filters leave, be the same in another batch, and be as
    frequent as it should.

    Synchronises with the device.

    Raises:
        SamplerDisagrees: what was wrong, and with which parameters.
    """
    for dtype in (torch.float32, torch.bfloat16):
        _check_filters(device, dtype)
    _check_frequencies(device)


def _check_filters(device: torch.device, dtype: torch.dtype) -> None:
    cases = list(itertools.product((0.0, 0.6, 1.3), (_VOCAB, 1, 40), (1.0, 0.9, 0.3), (0.0, 0.1)))
    columns = [torch.tensor(column) for column in zip(*cases, strict=True)]
    temperature, top_k, top_p, min_p = columns[0], columns[1].int(), columns[2], columns[3]
    # Distinct values that every dtype holds: no filter promises which of equal logits it keeps.
    order = torch.rand(len(cases), _VOCAB, generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits = ((order - _VOCAB // 2) / 32).to(dtype)
    left = survivors(logits.float(), temperature, top_k, top_p, min_p)

    rows = torch.arange(len(cases)).repeat(_DRAWS)
    position = torch.arange(_DRAWS).repeat_interleave(len(cases))
    inputs = (logits, temperature, top_k, top_p, min_p, rows.to(torch.int64) * 7919 - 12345, position)
    token_ids = _draw(device, *(column if index > 4 else column[rows] for index, column in enumerate(inputs)))
    wrong = ~left[rows, token_ids]
    if wrong.any():
        first = dict(zip(("temperature", "top_k", "top_p", "min_p"), cases[int(rows[wrong][0])], strict=True))
        raise SamplerDisagrees(
            f"{int(wrong.sum())} of {len(rows)} draws from {dtype} logits are not among the tokens that vLLM "
            f"leaves, one with {first}"
        )

    some = torch.arange(len(rows) - 1, -1, -3)
    again = _draw(
        device, *(column[some] if index > 4 else column[rows[some]] for index, column in enumerate(inputs))
    )
    if not torch.equal(again, token_ids[some]):
        raise SamplerDisagrees(f"draws from {dtype} logits change with the batch that they are made in")


def _check_frequencies(device: torch.device) -> None:
    logits = torch.linspace(-1.5, 1.5, 8)
    expected = (logits / 0.7).softmax(-1)
    position = torch.arange(_FREQUENCIES)
    token_ids = sample(
        logits.repeat(_FREQUENCIES, 1).to(device), temperature=0.7, seed=1, position=position.to(device)
    ).token_ids.cpu()
    seen = token_ids.bincount(minlength=8) / _FREQUENCIES
    if (seen - expected).abs().max() > 0.05:
        raise SamplerDisagrees(
            f"tokens of probabilities {expected.tolist()} were drawn with frequencies {seen.tolist()}"
        )


def survivors(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [batch, vocab]: the tokens that vLLM may choose; in a greedy row the most probable one. float32
    logits on the host.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    greedy = temperature == 0
    tempered = logits / torch.where(greedy, 1.0, temperature)[:, None]
    probabilities = tempered.softmax(-1)
    tempered = tempered.masked_fill(
        probabilities < min_p[:, None] * probabilities.amax(-1, keepdim=True), float("-inf")
    )
    left = apply_top_k_top_p_pytorch(tempered, top_k, top_p) > float("-inf")
    left[greedy] = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()[greedy]
    return left


def _draw(device: torch.device, logits: Tensor, *columns: Tensor) -> Tensor:
    temperature, top_k, top_p, min_p, seed, position = (column.to(device) for column in columns)
    samples = sample(
        logits.to(device),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position,
    )
    if not bool(samples.valid.all()):
        raise SamplerDisagrees("rows of ordinary logits are said to be invalid")
    return samples.token_ids.cpu().long()
