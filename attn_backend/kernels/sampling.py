"""Sampling: draws the next token of every request directly from the logits, in one launch."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..jit import manifest
from ..jit.manifest import BUILDS
from ..validation import check_device, check_int, check_plain, explain_failure, refuse
from . import torch_ops
from .native import arch_on, by_name, float_element, kernel_file, values_of

_rows: dict[torch.device, Tensor] = {}


def row_numbers(batch: int, device: torch.device) -> Tensor:
    """int64 [batch]: 0, 1, 2, ... Cached, so that calls allocate nothing."""
    known = _rows.get(device)
    if known is None or known.shape[0] < batch:
        known = _rows[device] = torch.arange(max(batch, 1024), dtype=torch.int64, device=device)
    return known[:batch]


def draws(
    batch: int,
    device: torch.device,
    seed: Int | None,
    position: Int | None,
    generator: torch.Generator | None,
    *,
    of_row: int = 1,
) -> tuple[Int, Int]:
    """Seed and position of each row: the given ones, or else ones drawn from a generator.

    Args:
        of_row: positions that each row's draws use, starting at its own; 0: the row draws nothing.

    Raises:
        ValueError: a generator together with a seed or a position; a position without a seed; neither a seed
            nor a way to get one during CUDA graph capture.
    """
    if seed is not None:
        if generator is not None:
            refuse("generator", generator, "None beside a seed")
        return seed, 0 if position is None else position
    if position is not None:
        refuse("seed", seed, "given beside a position")
    if of_row == 0:
        return 0, 0
    rows = row_numbers(batch, device)
    return seed_of(generator, device), rows if of_row == 1 else rows * of_row


def seed_of(generator: torch.Generator | None, device: torch.device) -> int:
    """A seed from the generator, which advances. Does not synchronize.

    Args:
        generator: of `device`; None: torch's default generator there.

    Raises:
        ValueError: a generator of another device; or a CUDA graph is being captured, whose replays would
            repeat the draws.
    """
    if generator is not None and generator.device.type != device.type:
        refuse("generator.device", generator.device, f"{device}, where the rows are")
    if device.type != "cuda":
        return int(
            torch.randint(-(2**63), 2**63 - 1, (), generator=generator, dtype=torch.int64, device="cpu")
        )
    if torch.cuda.is_current_stream_capturing():
        refuse(
            "seed",
            None,
            "given, a tensor, while a CUDA graph is captured: its replays would repeat the draws",
        )
    if generator is None:
        generator = torch.cuda.default_generators[
            device.index if device.index is not None else torch.cuda.current_device()
        ]
    state = generator.get_state()  # on the host: seed and offset of Philox, 8 bytes each
    seed, offset = (int(word) for word in state.view(torch.int64))
    state.view(torch.int64)[1] = offset + 4  # offsets are multiples of 4
    generator.set_state(state)
    return mixed(seed, offset)


def mixed(seed: int, offset: int) -> int:
    """Mixes both numbers into one int64, such that consecutive offsets give distant values. Uses the
    finalizer of SplitMix64 (Steele et al. 2014).
    """
    mask = 2**64 - 1
    x = (seed ^ offset * 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


MAX_TOP_LOGPROBS = 128

Float = float | torch.Tensor  # one value, or float32 [batch]
Int = int | torch.Tensor  # one value, or int32 or int64 [batch]
FilterOrder = Literal["top_k_first", "joint"]


@torch_ops.eager
@dataclass(frozen=True)
class Samples:
    """The result of `sample` for a batch.

    token_ids: int32 (or `out`'s dtype) [batch].
    valid: bool [batch]. False: the row has a NaN or +inf, no token that may be drawn, or a parameter that is
    NaN or negative. Its token is then the first that
        the mask allows (0 without a mask), and its log-probabilities are NaN.
    logprobs: float32 [batch], log-probabilities of the tokens; None unless requested.
    top_token_ids, top_logprobs: int32, float32 [batch, num_top_logprobs], most likely first, the lower id
    first among equals. If fewer tokens can be drawn,
        the rest is token 0 with -inf. None unless requested.
    """

    token_ids: torch.Tensor
    valid: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


@cache
def _kernel(name: str, device: torch.device) -> tuple[str, int]:
    """(cubin, most CTAs that may share a row) for a sampling kernel; ("", 1) on a CPU."""
    has_clusters = device.type == "cuda" and BUILDS[arch_on(device)].has_clusters
    return kernel_file(manifest.sampling_name(name), device), values_of("Limit")[
        "kMaxClusterCtas"
    ] if has_clusters else 1


def _logits_kernel(logits: torch.Tensor) -> tuple[str, int]:
    return _kernel(float_element(logits.dtype), logits.device)


def sampling_workspace(device: torch.device | str) -> torch.Tensor:
    """A workspace for `sample`: int64 [4096] on `device`.

    Its contents do not matter. Launches that may run at the same time need separate workspaces.
    """
    return torch.zeros(values_of("Limit")["kWorkspaceWords"], dtype=torch.int64, device=check_device(device))


_ROW_CTAS = "an int of at least 0"
_TENSORS = ("logits", "probs", "draft_probs", "draft_token_ids", "target_probs")
_SCALARS = frozenset((bool, int, float, type(None)))  # isinstance() of a tensor's class takes longer
_TENSORS_OR_NONE = ("rows", "token_mask", "out", "workspace", "logprobs", "top_logprobs", "top_token_ids")


def _call(function: str, kernel: tuple[str, int], row_ctas: int, **arguments: Any) -> None:
    """Calls the library, after the checks that it leaves out: some properties of tensors, types of arguments,
    and ints beyond int64. Messages name the argument.

    arguments: by the library's names.
    """
    try:
        if type(row_ctas) is not int or not 0 <= row_ctas < 2**31:
            refuse("row_ctas", row_ctas, _ROW_CTAS)
        records_gradients = torch.is_grad_enabled()
        for value in arguments.values():
            if type(value) in _SCALARS or not isinstance(value, torch.Tensor):
                continue
            if value.is_neg() or (records_gradients and value.requires_grad):
                explain_failure(
                    (name, tensor)
                    for name, tensor in _by_callers_names(arguments)
                    if isinstance(tensor, torch.Tensor)
                )
        arguments["file"], arguments["max_ctas"] = kernel
        arguments["row_ctas"] = row_ctas
        by_name(function)(**arguments)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        _explain(_by_callers_names(arguments), isinstance(error, ValueError))
        raise


def _explain(arguments: Iterable[tuple[str, Any]], tensors_are_fine: bool = False) -> None:
    """Refuses, by name, an argument of the wrong type or an int beyond int64."""
    for name, value in arguments:
        if isinstance(value, torch.Tensor):
            if not tensors_are_fine:
                explain_failure([(name, value)])
        elif name in _TENSORS:
            refuse(name, value, "a tensor")
        elif name in _TENSORS_OR_NONE:
            if value is not None:
                refuse(name, value, "a tensor or None")
        else:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                refuse(name, value, "in [-2^63, 2^63)")
            if not isinstance(value, int | float):
                refuse(name, value, "a number or a tensor [batch]")


def _by_callers_names(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call, under the names that the caller knows."""
    of_values = "probs" if arguments.get("from_probs") else "logits"
    return [
        (of_values if name == "values" else name, value)
        for name, value in arguments.items()
        if name != "file"
    ]


def _batch_of(name: str, tensor: object, dims: int = 2) -> int:
    """The first size of a tensor. Refuses anything but a tensor of `dims` dimensions."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.dim() != dims
    ):
        refuse(name, tensor, f"a dense tensor of {dims} dimensions")
    return tensor.shape[0]


def _write_rows(
    task: str, row_ctas: int, *, temperature: Float = 1.0, top_k: Int = 0, top_p: Float = 1.0, **given: object
) -> torch.Tensor:
    """float32 [batch, vocab]: the result of a task on `logits` or `probs`."""
    ((name, values),) = given.items()
    rows, from_probs = check_plain(name, values), name == "probs"
    out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    kernel = _kernel("probs", rows.device) if from_probs else _logits_kernel(rows)
    _call(
        "write_rows",
        kernel,
        row_ctas,
        task=values_of("RowTask")[task],
        from_probs=from_probs,
        values=rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        out=out,
    )
    return out


def _is_joint(filter_order: FilterOrder) -> bool:
    if filter_order not in ("top_k_first", "joint"):
        refuse("filter_order", filter_order, "'top_k_first' or 'joint'")
    return filter_order == "joint"


@torch_ops.eager
def sample(
    logits: torch.Tensor,
    *,
    temperature: Float = 1.0,
    top_k: Int | None = None,
    top_p: Float | None = None,
    min_p: Float | None = None,
    seed: Int | None = None,
    position: Int | None = None,
    generator: torch.Generator | None = None,
    token_mask: torch.Tensor | None = None,
    filter_order: FilterOrder = "top_k_first",
    return_logprobs: bool = False,
    num_top_logprobs: int = 0,
    logprobs_of: Literal["logits", "tempered"] = "logits",
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    row_ctas: int = 0,
) -> Samples:
    """Draws one token for each row of `logits`. One launch; capturable in a CUDA graph; never synchronizes.

    The token depends only on the row's logits and parameters, on `seed` and on `position`. It does not depend
    on the batch, the row's place in it, the launch's shape or the GPU; a CPU gives the same token.
    docs/sampling.md defines every edge case.

    Each parameter is one value for all rows, or a tensor [batch] with one value per row. Tensors of
    temperature, top_p and min_p are float32; tensors of top_k, seed and position are int32 or int64.

    Args:
        logits: float32, float16 or bfloat16 [batch, vocab], any row stride, vocab contiguous, at most 2^19;
            penalties already applied.
        temperature: 0: the most likely token (the lowest id among equals), whatever the filters.
        top_k: keeps the k largest logits, and all that equal the k-th. <= 0, or >= vocab: off.
        top_p: keeps the smallest set of most likely tokens with at least this probability. Ties with the
            least likely of them are kept, too. >= 1: off; <= 0: only the most likely tokens.
        min_p: keeps tokens at least this times as likely as the most likely one. <= 0: off; >= 1: only the
            most likely tokens.
        seed, position: the request's seed and this token's position in its sequence, any int64. They are the
            key and the counter of the random numbers, so rows with equal values draw the same. Both None:
            each row and each call draws anew. Only position None: 0.
        generator: source of the draws without seed and position, on the same device; default: torch's own.
            Not allowed during CUDA graph capture.
        token_mask: int32 [batch, at least ceil(vocab / 32)]; bit i % 32 of word i // 32 is set where token i
            is allowed.
        filter_order: "top_k_first": top_p is a share of the tokens that min_p and top_k leave (vLLM).
            "joint": top_p is a share of all tokens (SGLang).
        return_logprobs: also return the log-probability of each token.
        num_top_logprobs: also return this many most likely tokens and their log-probabilities, at most 128.
        logprobs_of: log_softmax of the logits, or of logits / temperature; the mask applies to both, the
            filters to neither.
        out: int32 or int64 [batch], receives the tokens.
        workspace: from `sampling_workspace`; no other launch may use it at the same time. Speeds up small
            batches without filters.
        row_ctas: CTAs that share a row: 1, 2, 4, 8 or 16 on a GPU with thread block clusters. Any number if
            the workspace is used (up to 256 rows). 0: chosen for the batch. Results do not depend on it.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    num_top_logprobs = check_int("num_top_logprobs", num_top_logprobs, 0, MAX_TOP_LOGPROBS)
    if logprobs_of not in ("logits", "tempered"):
        refuse("logprobs_of", logprobs_of, "'logits' or 'tempered'")
    batch, device, joint = _batch_of("logits", logits), logits.device, _is_joint(filter_order)
    if torch.compiler.is_compiling():
        numbers = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "position": position,
        }
        tensors = {"token_mask": token_mask, "out": out, "workspace": workspace}
        _explain(
            (
                (name, value)
                for name, value in {"logits": logits, **numbers, **tensors}.items()
                if value is not None or name == "temperature"
            )
        )
        if not isinstance(row_ctas, int):
            refuse("row_ctas", row_ctas, _ROW_CTAS)
        options = tensors | {
            "filter_order": filter_order,
            "return_logprobs": bool(return_logprobs),
            "num_top_logprobs": num_top_logprobs,
            "logprobs_of": logprobs_of,
            "row_ctas": row_ctas,
        }
        return torch_ops.sample(logits, numbers, generator, options)
    seed, position = draws(
        batch,
        device,
        seed,
        position,
        generator,
        of_row=int(isinstance(temperature, torch.Tensor) or temperature != 0),
    )
    samples = Samples(
        torch.empty(batch, dtype=torch.int32, device=device) if out is None else out,
        torch.empty(batch, dtype=torch.bool, device=device),
        torch.empty(batch, dtype=torch.float32, device=device) if return_logprobs else None,
        torch.empty(batch, num_top_logprobs, dtype=torch.int32, device=device) if num_top_logprobs else None,
        torch.empty(batch, num_top_logprobs, dtype=torch.float32, device=device)
        if num_top_logprobs
        else None,
    )
    _call(
        "sample",
        _logits_kernel(logits),
        row_ctas,
        values=logits,
        from_probs=False,
        joint=joint,
        tempered_logprobs=logprobs_of == "tempered",
        temperature=temperature,
        top_k=0 if top_k is None else top_k,
        top_p=1.0 if top_p is None else top_p,
        min_p=0.0 if min_p is None else min_p,
        seed=seed,
        position=position,
        token_mask=token_mask,
        out=samples.token_ids,
        valid=samples.valid,
        logprobs=samples.logprobs,
        top_logprobs=samples.top_logprobs,
        top_token_ids=samples.top_token_ids,
        workspace=workspace,
    )
    return samples


def sample_from_probs(
    probs: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    top_k: Int | None = None,
    top_p: Float | None = None,
    min_p: Float | None = None,
    seed: Int | None = None,
    position: Int | None = None,
    generator: torch.Generator | None = None,
    filter_order: FilterOrder = "top_k_first",
    out: torch.Tensor | None = None,
    row_ctas: int = 0,
) -> Samples:
    """Draws one token for each row of `probs`: float32 [batch, vocab], not necessarily normalized.

    All other arguments are as in `sample`.

    rows: int32 or int64 [batch]: the row of probs that each token is drawn from. probs may then have any
    number of rows, and nothing is copied. Rows out of range are clamped.

    A row with a negative, infinite or NaN probability, or with none above 0, is not valid. A probability
    below 2^-126 counts as 0.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    batch, device = (
        _batch_of("probs", probs) if rows is None else _batch_of("rows", rows, 1),
        check_plain("probs", probs).device,
    )
    seed, position = draws(batch, device, seed, position, generator)
    samples = Samples(
        torch.empty(batch, dtype=torch.int32, device=device) if out is None else out,
        torch.empty(batch, dtype=torch.bool, device=device),
    )
    _call(
        "sample",
        _kernel("probs", device),
        row_ctas,
        values=probs,
        from_probs=True,
        joint=_is_joint(filter_order),
        tempered_logprobs=False,
        temperature=1.0,
        top_k=0 if top_k is None else top_k,
        top_p=1.0 if top_p is None else top_p,
        min_p=0.0 if min_p is None else min_p,
        seed=seed,
        position=position,
        out=samples.token_ids,
        valid=samples.valid,
        rows=rows,
    )
    return samples


def _renormalised(probs: torch.Tensor, row_ctas: int, **filters: Any) -> torch.Tensor:
    if not isinstance(probs, torch.Tensor) or probs.dtype not in (torch.float16, torch.bfloat16):
        return _write_rows("kRenorm", row_ctas, probs=probs, **filters)
    return _write_rows("kRenorm", row_ctas, probs=check_plain("probs", probs).float(), **filters).to(
        probs.dtype
    )


def softmax(logits: torch.Tensor, temperature: Float = 1.0, *, row_ctas: int = 0) -> torch.Tensor:
    """softmax(logits / temperature): float32 [batch, vocab].

    For temperature 0, the row's most likely tokens share the probability equally. A row that cannot be
    sampled gets zeros.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    return _write_rows("kRenorm", row_ctas, logits=logits, temperature=temperature)


def top_k_mask_logits(logits: torch.Tensor, top_k: Int, *, row_ctas: int = 0) -> torch.Tensor:
    """The logits in float32, with -inf where top-k removes them (ties are kept, as in `sample`).

    A row that cannot be sampled stays as it is.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    return _write_rows("kMaskLogits", row_ctas, logits=logits, top_k=top_k)


def top_k_renorm_probs(probs: torch.Tensor, top_k: Int, *, row_ctas: int = 0) -> torch.Tensor:
    """The probabilities that top-k keeps, renormalized; all others are 0. Returns the dtype of probs:
    float32, bfloat16 or float16 [batch, vocab]; 16-bit inputs are copied to float32. A row that cannot be
    sampled gets zeros.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    return _renormalised(probs, row_ctas, top_k=top_k)


def top_p_renorm_probs(probs: torch.Tensor, top_p: Float, *, row_ctas: int = 0) -> torch.Tensor:
    """The probabilities that top-p keeps, renormalized; all others are 0. Returns the dtype of probs:
    float32, bfloat16 or float16 [batch, vocab]; 16-bit inputs are copied to float32. A row that cannot be
    sampled gets zeros.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    return _renormalised(probs, row_ctas, top_p=top_p)


@dataclass(frozen=True)
class SpeculativeSamples:
    """The result of `chain_speculative_sampling`.

    token_ids: int32 [batch, num_draft_tokens + 1]: the accepted draft tokens, the token drawn after them,
    then -1. num_accepted: int32 [batch], the number of accepted draft tokens.
    num_passed: int32 [batch], the number of draft tokens that passed their own test. Unlike `num_accepted`,
    it also counts tokens after the first rejected one. valid: bool [batch]. False: the row of the drawn token
    cannot be sampled, and the token is 0.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_passed: torch.Tensor
    valid: torch.Tensor


def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    seed: Int | None = None,
    position: Int | None = None,
    generator: torch.Generator | None = None,
    row_ctas: int = 0,
) -> SpeculativeSamples:
    """Speculative sampling of a chain of draft tokens (Leviathan et al. 2023, Chen et al. 2023). The result
    is distributed as if drawn from the target one by one.

    Draft token i is accepted with probability min(1, target / draft). At the first rejected token, a token is
    drawn from max(target - draft, 0), normalized. If all are accepted, one more is drawn from the target.

    Args:
        draft_probs: float32 [batch, num_draft_tokens, vocab], contiguous: the distribution that each draft
            token was drawn from.
        draft_token_ids: int32 or int64 [batch, num_draft_tokens]; an id outside the vocabulary is never
            accepted.
        target_probs: float32 [batch, num_draft_tokens + 1, vocab], contiguous.
        seed: of the requests.
        position: of each request's first draft token.
        generator: as in `sample`.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device, stride or value.
    """
    batch, rows, device = (
        _batch_of("target_probs", target_probs, 3),
        target_probs.shape[1],
        target_probs.device,
    )
    seed, position = draws(batch, device, seed, position, generator, of_row=rows)
    samples = SpeculativeSamples(
        torch.empty(batch, rows, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.bool, device=device),
    )
    _call(
        "speculate",
        _kernel("speculative", device),
        row_ctas,
        draft_probs=draft_probs,
        draft_token_ids=draft_token_ids,
        target_probs=target_probs,
        seed=seed,
        position=position,
        token_ids=samples.token_ids,
        num_accepted=samples.num_accepted,
        num_passed=samples.num_passed,
        valid=samples.valid,
    )
    return samples


class SeedSource:
    """Draws seeds for an engine's requests that bring none, in the order of their arrival.

    Several processes of an engine may sample the same requests (the ranks of a tensor-parallel group). They
    see the requests in the same order, and must draw the same seeds without communication. So each source has
    a private generator, which nothing else advances.
    """

    def __init__(self, *origin: object) -> None:
        """
        Args:
            origin: values that determine the seeds: the engine's own seed, the data-parallel rank.
        """
        self._random = random.Random(repr(origin))

    def draw(self) -> int:
        """A new seed, -2^63 ... 2^63 - 1."""
        return self._random.getrandbits(64) - 2**63


def signed_64_bits(seed: int) -> int:
    """The int64 that has the same bits as the lowest 64 of `seed`."""
    return (seed + 2**63) % 2**64 - 2**63
