"""Sampling in vLLM: replacements of the functions that draw tokens, since vLLM has no hook for them.

vLLM has two model runners, each with its own sampler.

- In the newer runner (V2) we replace `Sampler.sample`. We also replace `SamplingStates.add_request`, to learn
  when a request's parameters change.
- In the older runner (V1) we replace `Sampler.sample`. It does not get the requests' seeds and positions, so
  we replace `GPUModelRunner._sample`, which has them. `GPUModelRunner._bookkeeping_sync` winds generators
  back: ours must not, since our draws do not advance them.

Everything around the draw stays vLLM's: logits processors, penalties, grammars, log-probabilities, and the
rejection sampler of speculative decoding.

Two checks at start decide: the functions must have the arguments of a known release (0.26.0 to 0.33.0), and
draws must agree with vLLM's own filters. If a check fails, vLLM's sampler stays, and one warning names the
reason.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.logger import init_logger

from attn_backend.kernels.sampling import SeedSource, sample, sampling_workspace, signed_64_bits
from attn_backend.settings import Settings

from .compat import outside_memory_pools

logger = init_logger("vllm.attn_backend")

V2_SAMPLER, V2_STATES = "vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.sample.states"
V1_SAMPLER, V1_RUNNER = "vllm.v1.sample.sampler", "vllm.v1.worker.gpu_model_runner"

# Arguments of the functions that are replaced or called, as the known releases have them.
_V2_BATCHES = [
    "logits expanded_idx_mapping idx_mapping_np pos input_ids expanded_local_pos",  # 0.26, 0.27
    "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos",  # 0.28 to 0.30
    # 0.31 to 0.33
    "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
    "seq_lens_upper_bound_np",
]
_KNOWN_ARGUMENTS = {
    (V2_SAMPLER, "Sampler.sample"): [f"self {batch} return_logprobs" for batch in _V2_BATCHES],
    (V2_SAMPLER, "Sampler.apply_sampling_params"): [
        f"self {batch} skip_top_k_top_p" for batch in _V2_BATCHES
    ],
    (V2_STATES, "SamplingStates.add_request"): ["self req_idx sampling_params"],
    (V2_STATES, "SamplingStates.apply_temperature"): ["self logits expanded_idx_mapping idx_mapping_np"],
    (V2_STATES, "SamplingStates.apply_min_p"): ["self logits expanded_idx_mapping idx_mapping_np"],
    (V1_SAMPLER, "Sampler.sample"): ["self logits sampling_metadata logprobs_mode_override"],
    (V1_SAMPLER, "Sampler.apply_temperature"): ["logits temp all_random"],
    (V1_RUNNER, "GPUModelRunner._sample"): ["self logits spec_decode_metadata"],
    (V1_RUNNER, "GPUModelRunner._bookkeeping_sync"): [
        "self scheduler_output sampler_output logits hidden_states num_scheduled_tokens"
    ],
}
_PROCESSED = ("processed_logits", "processed_logprobs")  # modes in which vLLM reports what the filters left

_installed: bool | None = None  # None: not tried yet
_originals: list[tuple[type, str, Any]] = []


def install(device: torch.device, vllm_config: Any = None) -> bool:
    """Has this process sample with this package, after a check on `device`.

    Does it once; the metadata builder of a worker's layers calls it.

    Environment:
        ATTN_BACKEND_SAMPLER: `0` leaves vLLM's sampler in place.

    Returns:
        Whether this package samples. If not, and it was not switched off, a warning has said why.
    """
    global _installed  # noqa: PLW0603
    if _installed is None:
        _installed = Settings.read().sampler is not False and _install(device, vllm_config)
    return _installed


def _install(device: torch.device, vllm_config: Any) -> bool:
    try:
        check_arguments()
        check_sampler(device)
        replacements = _replacements(vllm_config)
    except Exception as error:  # the engine can serve without, whatever failed
        logger.warning(
            "attn_backend does not sample, vLLM's own sampler does: %s. ATTN_BACKEND_SAMPLER=0 chooses that "
            "without this warning.",
            f"{type(error).__name__}: {error}",
        )
        return False
    for owner, name, replacement in replacements:
        _originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)
    logger.info("attn_backend samples instead of vLLM's own sampler")
    return True


def uninstall() -> None:
    """Puts vLLM's functions back; the next `install` tries again."""
    global _installed  # noqa: PLW0603
    _installed = None
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def check_arguments() -> None:
    """Probes the model runners that this process has imported: a worker imports only the runner that it uses.

    Raises:
        RuntimeError: a function has other arguments than in the known releases; the message names both.
    """
    probed = [key for key in _KNOWN_ARGUMENTS if key[0] in sys.modules]
    if not probed:
        raise RuntimeError(f"neither of vLLM's model runners is loaded ({V2_SAMPLER}, {V1_RUNNER})")
    for module, name in probed:
        owner, function = name.split(".")
        arguments = " ".join(
            inspect.signature(getattr(getattr(sys.modules[module], owner), function)).parameters
        )
        if arguments not in _KNOWN_ARGUMENTS[module, name]:
            raise RuntimeError(
                f"{module}.{name} takes ({arguments}), known releases take "
                f"({' or '.join(_KNOWN_ARGUMENTS[module, name])})"
            )


def _replacements(vllm_config: Any) -> list[tuple[type, str, Callable[..., Any]]]:
    found: list[tuple[type, str, Callable[..., Any]]] = []
    if V2_SAMPLER in sys.modules:
        sampler, states = sys.modules[V2_SAMPLER].Sampler, sys.modules[V2_STATES].SamplingStates
        found += [
            (sampler, "sample", v2_sample(sampler)),
            (states, "add_request", v2_add_request(states.add_request)),
        ]
    if V1_RUNNER in sys.modules:
        sampler, runner = sys.modules[V1_SAMPLER].Sampler, sys.modules[V1_RUNNER].GPUModelRunner
        parallel = getattr(vllm_config, "parallel_config", None)
        source = SeedSource(
            getattr(getattr(vllm_config, "model_config", None), "seed", 0),
            getattr(parallel, "data_parallel_rank", 0),
        )
        found += [
            (sampler, "sample", v1_sample(sampler)),
            (runner, "_sample", v1_runner_sample(sampler, runner._sample, source)),
        ]
        found.append((runner, "_bookkeeping_sync", v1_bookkeeping(runner._bookkeeping_sync)))
    return found


def workspace_of(sampler: Any, device: torch.device) -> Tensor:
    """The sampler's: its batches are sampled one after another."""
    workspace: Tensor | None = getattr(sampler, "_attn_backend_workspace", None)
    if workspace is None:
        workspace = sampler._attn_backend_workspace = outside_memory_pools(
            lambda: sampling_workspace(device), device
        )
    return workspace


# ---- Model runner V2: parameters, seeds and positions are on the device, indexed by the request's slot


class SlotParameters(NamedTuple):
    """Sampling parameters of the rows of a batch: [rows] tensors, None if no row has that filter."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor


def v2_sample(sampler: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The replacement of V2's `Sampler.sample`: (logits [rows, vocab], ...) -> (int64 [rows] token ids,
    logits that log-probabilities may be made of).
    """
    original: Callable[..., Any] = sampler.sample
    names = list(inspect.signature(original).parameters)
    slots_at, slots_np_at, positions_at = (
        names.index(name) - 2 for name in ("expanded_idx_mapping", "idx_mapping_np", "pos")
    )

    def sample_rows(
        self: Any, logits: Tensor, *batch: Any, return_logprobs: bool = False
    ) -> tuple[Tensor, Tensor]:
        if type(self) is not sampler:  # a watermark's sampler draws in its own way
            return original(self, logits, *batch, return_logprobs=return_logprobs)
        reports_filtered = (return_logprobs and self.logprobs_mode in _PROCESSED) or getattr(
            self, "return_sampling_mask", False
        )
        penalized = _v2_penalize(self, logits.clone() if reports_filtered else logits, batch)
        parameters = slot_parameters(self.sampling_states, batch[slots_at], batch[slots_np_at])
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        sample(
            penalized,
            position=batch[positions_at],
            out=token_ids,
            workspace=workspace_of(self, logits.device),
            **parameters._asdict(),
        )
        if reports_filtered:
            _, penalized = original(self, logits, *batch, return_logprobs=return_logprobs)
        return token_ids, penalized

    return sample_rows


def _v2_penalize(self: Any, logits: Tensor, batch: tuple[Any, ...]) -> Tensor:
    """The logits after vLLM's processors, before temperature and filters, which are part of the draw."""
    states = self.sampling_states
    states.apply_temperature = states.apply_min_p = _leave_logits
    try:
        return self.apply_sampling_params(logits, *batch, skip_top_k_top_p=True)
    finally:
        del states.apply_temperature, states.apply_min_p


def _leave_logits(logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> None: ...


def slot_parameters(states: Any, slots: Tensor, slots_np: Any) -> SlotParameters:
    """The parameters of a batch, gathered once for as long as the batch stays the same.

    Args:
        slots: [rows], the slot of each row's request.
        slots_np: the same on the host, one for each request.
    """
    key = slots_np.tobytes() if len(slots_np) == slots.shape[0] else None
    kept = getattr(states, "_attn_backend_parameters", None)
    if key is not None and kept is not None and kept[0] == key:
        return kept[1]
    used = {
        "top_k": (states.top_k.np[slots_np] < states.vocab_size).any(),
        "top_p": (states.top_p.np[slots_np] < 1.0).any(),
        "min_p": (states.min_p.np[slots_np] > 0.0).any(),
    }
    filters = {name: getattr(states, name).gpu[slots] if is_used else None for name, is_used in used.items()}
    parameters = SlotParameters(states.temperature.gpu[slots], **filters, seed=states.seeds.gpu[slots])
    states._attn_backend_parameters = (key, parameters)
    return parameters


def v2_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, req_idx: int, sampling_params: Any) -> Any:
        self._attn_backend_parameters = None
        return original(self, req_idx, sampling_params)

    return add_request


# ---- Model runner V1: the sampler sees one SamplingMetadata for each composition of the batch; seeds and
# positions travel on it


class Draws(NamedTuple):
    """Seeds and positions of a batch's draws: both [batch], on the device. 0 if all requests are greedy."""

    seed: Tensor | int
    position: Tensor | int


def v1_runner_sample(sampler: Any, original: Callable[..., Any], source: SeedSource) -> Callable[..., Any]:
    """The replacement of `GPUModelRunner._sample`: passes the batch's seeds and positions to the sampler.

    The position belongs to the request's last token, as in V2. It comes from the lengths on the device, which
    are right even if the host runs ahead.
    """

    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        batch = self.input_batch
        of_tokens = logits is not None and spec_decode_metadata is None and logits.shape[0] == batch.num_reqs
        self._attn_backend_drew = of_tokens and type(self.sampler) is sampler
        if self._attn_backend_drew:
            metadata = batch.sampling_metadata
            if metadata.all_greedy:
                metadata._attn_backend_draws = Draws(0, 0)
            else:
                draws = getattr(metadata, "_attn_backend_draws", None)
                seeds = v1_seeds(self, source) if draws is None else draws.seed
                metadata._attn_backend_draws = Draws(seeds, self.seq_lens[: batch.num_reqs] - 1)
        return original(self, logits, spec_decode_metadata)

    return _sample


def v1_bookkeeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `GPUModelRunner._bookkeeping_sync`, which winds a request's generator back after a
    draw that does not count.

    Our draws advance no generator, so the original gets none after them. The batch keeps its generators: the
    rejection sampler of a step with drafts uses them.
    """

    def _bookkeeping_sync(self: Any, *arguments: Any, **named: Any) -> Any:
        batch = self.input_batch
        generators = batch.generators
        if getattr(self, "_attn_backend_drew", False):
            batch.generators = {}
        try:
            return original(self, *arguments, **named)
        finally:
            batch.generators = generators

    return _bookkeeping_sync


def v1_seeds(runner: Any, source: SeedSource) -> Tensor:
    """int64 [batch]: the user's seed of each request, or a new seed for its first batch."""
    batch = runner.input_batch
    seeds = []
    for request_id in batch.req_ids[: batch.num_reqs]:
        request = runner.requests[request_id]
        seed = getattr(request, "_attn_backend_seed", None)
        if seed is None:
            seed = (
                source.draw()
                if request.generator is None
                else signed_64_bits(request.generator.initial_seed())
            )
            request._attn_backend_seed = seed  # kept: a request that is preempted comes back
        seeds.append(seed)
    return torch.tensor(seeds, dtype=torch.int64, pin_memory=runner.device.type == "cuda").to(
        runner.device, non_blocking=True
    )


def v1_sample(sampler: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The replacement of V1's `Sampler.sample`: (logits [batch, vocab], metadata) -> (token ids [batch],
    processed log-probabilities if asked for).
    """
    original: Callable[..., Any] = sampler.sample

    def sample_batch(
        self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        metadata = sampling_metadata
        draws: Draws | None = getattr(metadata, "_attn_backend_draws", None)
        # a warm-up run, the bonus tokens of speculative decoding, a sampler that we do not replace
        if draws is None:
            return original(self, logits, metadata, logprobs_mode_override)
        reports = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
        reports_filtered = reports and (logprobs_mode_override or self.logprobs_mode) in _PROCESSED
        token_ids = v1_draw(self, logits.clone() if reports_filtered else logits, metadata, draws)
        if not reports_filtered:
            return token_ids, None
        # this draw is not used, and must not advance the generators
        without_generators = replace(metadata, generators={})
        return token_ids, original(self, logits, without_generators, logprobs_mode_override)[1]

    return sample_batch


def v1_draw(self: Any, logits: Tensor, metadata: Any, draws: Draws) -> Tensor:
    workspace = workspace_of(self, logits.device)
    if metadata.all_greedy:
        return sample(logits, temperature=0.0, workspace=workspace).token_ids
    temperature, min_p = metadata.temperature, None
    processors = [
        processor
        for processor in metadata.logitsprocs.argmax_invariant
        if getattr(processor, "min_p_count", 1) > 0
    ]
    if len(processors) == 1 and type(processors[0]).__name__ == "MinPLogitsProcessor":
        min_p = processors[0].min_p.view(-1)
    elif processors:  # the user's own: they expect logits that the temperature has been applied to
        logits = self.apply_temperature(logits, temperature, metadata.all_random)
        for processor in processors:
            logits = processor.apply(logits)
        temperature = (temperature > 0).float()
    filters = {"top_k": metadata.top_k, "top_p": metadata.top_p, "min_p": min_p}
    return sample(
        logits,
        temperature=temperature,
        **filters,
        seed=draws.seed,
        position=draws.position,
        workspace=workspace,
    ).token_ids


# ---- The check at start: a small batch on the worker's own device, against vLLM's own filters on the host

_VOCAB = 512
_DRAWS = 64  # of each combination of parameters, at as many positions
_FREQUENCIES = 4096  # draws whose frequencies are counted; their standard error is below 0.008


class SamplerDisagrees(RuntimeError):
    """Our sampler disagrees with vLLM's."""


def check_sampler(device: torch.device) -> None:
    """Every draw must come from the tokens that vLLM's filters leave, be the same in another batch, and be as
    frequent as it should.

    Synchronizes with the device.

    Raises:
        SamplerDisagrees: names the failure and the parameters.
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
        raise SamplerDisagrees("the sampler flags rows of ordinary logits as invalid")
    return samples.token_ids.cpu().long()
