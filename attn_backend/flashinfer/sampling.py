"""flashinfer.sampling. Every function is deterministic here; none uses rejection sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import sampling as kernels
from ..kernels.sampling import mixed, row_numbers, seed_of
from ..validation import check_same_device, check_types, refuse

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

Seed = int | Tensor
Samples = Tensor | tuple[Tensor, Tensor]
_MAX_ROW_BITS = 26  # bits for a row's number in a position; the other bits are the offset
_MAX_DRAFT_BITS = 10  # bits for a row's positions in chain_speculative_sampling: one for each draft


def softmax(
    logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """softmax(logits / temperature): float32 [batch, vocab]. temperature: a number, or float32 [batch].

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    return kernels.softmax(
        logits, 1.0 if temperature is None else _of_rows("temperature", temperature, logits.shape[0])
    )


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
) -> Tensor:
    """Draws a token from softmax(logits) for each row, or for each element of `indices` from the row that it
    selects.

    Args:
        logits: float32, float16 or bfloat16 [batch, vocab].
        indices: int32 or int64 [tokens], rows of logits.
        generator: None: torch's default one. seed, offset: used instead of it; numbers, or tensors int64 [1]
            or [tokens].
        check_nan: refuses a NaN, which waits for the device.

    Returns:
        int32, or indices' dtype, [tokens].

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    return top_k_top_p_sampling_from_logits(
        logits, 0, 1.0, indices, "top_k_first", deterministic, generator, check_nan, seed, offset
    )


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
    return_valid: bool = False,
) -> Samples:
    """Draws a token for each row of `probs` (float32 [batch, vocab]), or for each element of `indices` from
    the row that it selects.

    Returns:
        int32, or indices' dtype, [tokens]; with return_valid also bool [tokens]: False for a row that cannot
        be sampled, whose token is 0.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    return draw_from_probs(probs, indices, generator, check_nan, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
    return_valid: bool = False,
) -> Samples:
    """sampling_from_probs from the most likely tokens whose total probability is top_p: a number, or float32
    [batch].
    """
    return draw_from_probs(probs, indices, generator, check_nan, seed, offset, return_valid, top_p=top_p)


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
    return_valid: bool = False,
) -> Samples:
    """sampling_from_probs from the top_k most likely tokens: a number, or integers [batch]."""
    return draw_from_probs(probs, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k)


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
    return_valid: bool = False,
) -> Samples:
    """sampling_from_probs from tokens at least min_p times as likely as the most likely one: a number, or
    float32 [batch].
    """
    return draw_from_probs(probs, indices, generator, check_nan, seed, offset, return_valid, min_p=min_p)


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
) -> Tensor:
    """sampling_from_logits with both filters.

    "top_k_first": top_p is a share of the tokens that top_k leaves; "joint": of all tokens.
    """
    _check_nan("logits", logits, check_nan)
    order = _filter_order(filter_apply_order)
    if indices is not None:
        return draw_from_probs(
            kernels.softmax(logits),
            indices,
            generator,
            False,
            seed,
            offset,
            top_k=top_k,
            top_p=top_p,
            filter_order=order,
        )
    batch = logits.shape[0]
    draw_seed, position = _draws(batch, logits.device, generator, seed, offset)
    sample = kernels.sample(
        logits,
        top_k=_whole(_of_rows("top_k", top_k, batch)),
        top_p=_of_rows("top_p", top_p, batch),
        filter_order=order,
        seed=draw_seed,
        position=position,
    )
    return sample.token_ids


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
    return_valid: bool = False,
) -> Samples:
    """sampling_from_probs with both filters.

    "top_k_first": top_p is a share of the tokens that top_k leaves; "joint": of all tokens.
    """
    return draw_from_probs(
        probs,
        indices,
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
        top_k=top_k,
        top_p=top_p,
        filter_order=_filter_order(filter_apply_order),
    )


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """The probabilities that top_p keeps, renormalized; all others are 0: [batch, vocab] in probs' dtype.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    return kernels.top_p_renorm_probs(probs, _of_rows("top_p", top_p, probs.shape[0]))


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """The probabilities that top_k keeps, renormalized; all others are 0: [batch, vocab] in probs' dtype.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    return kernels.top_k_renorm_probs(probs, _whole(_of_rows("top_k", top_k, probs.shape[0])))


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The logits, with -inf where top_k removes them: [batch, vocab] in logits' dtype.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    return kernels.top_k_mask_logits(logits, _whole(_of_rows("top_k", top_k, logits.shape[0]))).to(
        logits.dtype
    )


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Seed | None = None,
    offset: Seed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling of a chain of draft tokens. The result is distributed as if drawn from the target
    one by one.

    Args:
        draft_probs: float32 [batch, drafts, vocab]. draft_token_ids: [batch, drafts]. target_probs: float32
            [batch, drafts + 1, vocab]. maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num:
            int32 [batch]: the counts are added to them.

    Returns:
        Tokens, int32 [batch, drafts + 1], -1 after the last; and two counts of drafts, int32 [batch]. The
        first counts all drafts that passed their own test, the second only those before the first rejected
        one.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or value.
    """
    batch = target_probs.shape[0]
    draw_seed, position = _draws(batch, target_probs.device, generator, seed, offset, _MAX_DRAFT_BITS)
    found = kernels.chain_speculative_sampling(
        _in_32_bits(draft_probs),
        draft_token_ids,
        _in_32_bits(target_probs),
        seed=draw_seed,
        position=position,
    )
    counts = (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    accepted, emitted = (
        new if count is None else count.add_(new)
        for count, new in zip(counts, (found.num_passed, found.num_accepted), strict=True)
    )
    return found.token_ids, accepted, emitted


def _in_32_bits(probs: Tensor) -> Tensor:
    """A float32 copy of 16-bit probabilities, as in FlashInfer."""
    return probs.float() if probs.dtype in (torch.float16, torch.bfloat16) else probs


def draw_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed | None = None,
    offset: Seed | None = None,
    return_valid: bool = False,
    *,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    filter_order: kernels.FilterOrder = "top_k_first",
) -> Any:  # Samples
    """sampling_from_probs with any filters."""
    _check_nan("probs", probs, check_nan)
    try:
        batch = probs.shape[0] if indices is None else indices.shape[0]
    except AttributeError:  # only on failure
        check_types(Tensor, "a tensor", probs=probs)
        check_types(Tensor, "a tensor", indices=indices)
        raise
    draw_seed, position = _draws(batch, probs.device, generator, seed, offset)
    # A parameter belongs to a row of probs.
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters = {
        name: _of_rows(name, value, probs.shape[0]) for name, value in given.items() if value is not None
    }
    if indices is not None:
        filters = {
            name: value[indices.long()] if isinstance(value, Tensor) else value
            for name, value in filters.items()
        }
    if "top_k" in filters:
        filters["top_k"] = _whole(filters["top_k"])
    out = None if indices is None else torch.empty(batch, dtype=indices.dtype, device=probs.device)
    options = {
        "rows": indices,
        "filter_order": filter_order,
        "seed": draw_seed,
        "position": position,
        "out": out,
        **filters,
    }
    samples = kernels.sample_from_probs(_in_32_bits(probs), **options)  # type: ignore[arg-type]
    return (samples.token_ids, samples.valid) if return_valid else samples.token_ids


def _draws(
    batch: int,
    device: torch.device,
    generator: torch.Generator | None,
    seed: Seed | None,
    offset: Seed | None,
    position_bits: int = 0,
) -> tuple[Seed, Tensor]:
    """seed and position of each row.

    Rows differ even with the same seed. position_bits: low bits of a position, which count a row's draws.
    """
    rows = row_numbers(batch, device)
    if position_bits:
        rows = rows << position_bits
    if seed is None and offset is None:
        return seed_of(generator, device), rows
    seed, offset = 0 if seed is None else seed, 0 if offset is None else offset
    if isinstance(seed, Tensor) != isinstance(offset, Tensor):
        refuse(
            "offset" if isinstance(seed, Tensor) else "seed",
            offset if isinstance(seed, Tensor) else seed,
            "a tensor if the other one of the two is",
        )
    if not isinstance(seed, Tensor) or not isinstance(offset, Tensor):
        return mixed(int(seed), int(offset)), rows
    for name, tensor in (("seed", seed), ("offset", offset)):
        check_same_device(name, tensor, "the rows", device)
        if (
            tensor.dtype not in (torch.int64, torch.uint64)
            or tensor.ndim != 1
            or tensor.shape[0] not in (1, batch)
        ):
            refuse(name, tensor, f"an int64 tensor [1] or [{batch}]")
    position = rows + (offset.view(torch.int64) << _MAX_ROW_BITS + position_bits)
    return seed.view(torch.int64).expand(batch).contiguous(), position


def _of_rows(name: str, value: Tensor | float, batch: int) -> Tensor | float:
    """A number, or a tensor with one value per row: float32, or integers."""
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0:
        raise ValueError(
            f"{name}: Expected a 1D tensor of shape (batch_size,) or scalar, got a 0-dimensional tensor"
        )
    if value.ndim != 1:
        raise ValueError(f"{name}: Expected a 1D tensor or scalar, got a {value.ndim}D tensor")
    if value.shape[0] != batch:
        raise ValueError(
            f"Sampling parameter tensor batch size mismatch: {name} has {value.shape[0]} elements, must have "
            f"{batch}"
        )
    return value.contiguous() if name == "top_k" else value.float().contiguous()


def _whole(top_k: Tensor | float) -> Tensor | int:
    if not isinstance(top_k, Tensor):
        return int(top_k)
    return top_k if top_k.dtype in (torch.int32, torch.int64) else top_k.to(torch.int32)


def _filter_order(order: str) -> kernels.FilterOrder:
    if order not in ("top_k_first", "joint"):
        refuse("filter_apply_order", order, "'top_k_first' or 'joint'")
    return order  # type: ignore[return-value]


def _check_nan(name: str, rows: Tensor, check_nan: bool) -> None:
    if check_nan and bool(rows.isnan().any()):
        raise ValueError(f"{name} has a NaN, must have none with check_nan=True")
