"""SGLang's sampler: tokens from logits in one launch, each request's draws from its own seed and position."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import sampler as engine_sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.common import is_pin_memory_available
from torch import Tensor

from attn_backend.kernels.sampling import SeedSource, sample, sampling_workspace, signed_64_bits

from . import compat

# Up to 0.5.19 there is no such class, and samplers return no capture.
_Capture = getattr(engine_sampler, "_SamplingMaskCapture", None)
_MOST_OPEN_GROUPS = 4096


class AttnSampler(engine_sampler.Sampler):
    """The sampler behind `--sampling-backend attn_backend`.

    Before a draw SGLang has applied custom logit processors, penalties, logit biases and grammar masks. Its
    own code also reports log-probabilities and sampling masks, around the draw: the draw is the same with and
    without them.
    """

    def __init__(self) -> None:
        super().__init__()
        give_seeds_to_requests()
        self._batch: tuple[SamplingBatchInfo, Tensor] | None = None  # while SGLang's own forward runs
        self._token_ids: Tensor | None = None
        self._workspaces: dict[int, Tensor] = {}  # by CUDA stream

    def forward(
        self,
        logits_output: Any,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **others: Any,
    ) -> Tensor:
        """
        Args:
            logits_output: `next_token_logits` is [batch, vocab]. Changed in place if a request wants more
                than tokens.
            positions: [batch] or longer, of each request's last token.
            others: arguments of later releases for special cases (watermarks).

        Returns:
            Token ids, [batch], int32 or int64.
        """
        if return_logprob or others or asks_for_mask(sampling_info):
            self._batch = (sampling_info, positions)
            try:
                return super().forward(
                    logits_output,
                    sampling_info,
                    return_logprob,
                    top_logprobs_nums,
                    token_ids_logprobs,
                    positions,
                    **others,
                )
            finally:
                self._batch = self._token_ids = None
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        token_ids = self._draw(logits, sampling_info, positions)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        return token_ids

    def _preprocess_logits(self, logits: Tensor, sampling_info: SamplingBatchInfo) -> Tensor:
        logits = super()._preprocess_logits(logits, sampling_info)
        # SGLang next turns the logits into probabilities in place, so draw now. (A second call is for logits
        # that are only reported.)
        if self._batch is not None and self._token_ids is None and not sampling_info.is_all_greedy:
            self._token_ids = self._draw(logits, *self._batch)
        return logits

    def _draw(self, logits: Tensor, sampling_info: SamplingBatchInfo, positions: Tensor) -> Tensor:
        return draw(logits, sampling_info, positions, stream_workspace(self._workspaces, logits.device))

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: SamplingBatchInfo, positions: Tensor, simple_sampling_case: bool
    ) -> Any:
        if _Capture is None:
            return self._token_ids
        rows = sampling_info.sampling_mask_batch_indices
        return self._token_ids, None if rows is None else _capture(probs, sampling_info, positions, rows)

    def _sample_from_logprobs(
        self, logprobs: Tensor, sampling_info: SamplingBatchInfo, positions: Tensor
    ) -> Any:
        return self._token_ids


def stream_workspace(workspaces: dict[int, Tensor], device: torch.device) -> Tensor:
    """The workspace of the current stream: --enable-pdmux samples prefills and decodes on two streams at the
    same time.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    workspace = workspaces.get(stream)
    if workspace is None:
        workspace = workspaces[stream] = sampling_workspace(device)
    return workspace


def draw(
    logits: Tensor, sampling_info: SamplingBatchInfo, positions: Tensor, workspace: Tensor | None = None
) -> Tensor:
    """One token for each row of [batch, vocab]: int32 [batch]."""
    batch = logits.shape[0]
    if batch == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    info = sampling_info
    if info.is_all_greedy:
        return sample(logits, temperature=0.0, workspace=workspace).token_ids
    temperatures = info.temperatures.view(-1)
    if info.is_any_greedy:
        # SGLang writes greedy as top_k 1 at temperature 1, which leaves ties to chance
        temperatures = temperatures * (info.top_ks > 1)
    seeds = info.sampling_seed
    if seeds is None or seeds.shape[0] != batch:  # warm-up runs, speculative decoding
        seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), dtype=torch.int64, device=logits.device)
    return sample(
        logits,
        temperature=temperatures,
        top_k=info.top_ks if info.need_top_k_sampling else None,
        top_p=info.top_ps if info.need_top_p_sampling else None,
        min_p=info.min_ps if info.need_min_p_sampling else None,
        seed=seeds,
        position=positions[:batch],
        filter_order="joint",
        workspace=workspace,
    ).token_ids


def asks_for_mask(sampling_info: SamplingBatchInfo) -> bool:
    """Whether some request wants the set of tokens that it was sampled from."""
    return any(getattr(sampling_info, "return_sampling_masks", None) or ())


def _capture(probs: Tensor, sampling_info: SamplingBatchInfo, positions: Tensor, rows: Tensor) -> Any:
    """SGLang's report of the tokens that the filters left.

    With `selected_weight=None` it looks up the chosen token.
    """
    info = sampling_info
    filters = (info.top_ks[rows], info.top_ps[rows], info.min_ps[rows], info.need_min_p_sampling)
    filtered = engine_sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs[rows], *filters, None, positions, return_filtered_probs=True
    )
    return _Capture(  # type: ignore[misc]
        weights=filtered[1], token_ids=filtered[2], selected_weight=None, batch_rows=rows
    )


class RequestSeeds:
    """The seed of each of SGLang's requests: the user's `sampling_seed` (`seed` in the OpenAI API), or a new
    seed for its first batch.

    The n answers to one request with a seed get that seed + 0 ... n - 1, as in vLLM: SGLang makes n equal
    requests of it.
    """

    def __init__(self, source: SeedSource) -> None:
        self._source = source
        self._answers_seen: dict[tuple[Any, ...], int] = {}

    def __call__(self, request: Any) -> int:
        seed: int | None = getattr(request, "_attn_backend_seed", None)
        if seed is None:
            # kept: a request that is retracted comes back
            seed = request._attn_backend_seed = self._new(request)
        return seed

    def _new(self, request: Any) -> int:
        params = request.sampling_params
        if params.sampling_seed is None:
            return self._source.draw()
        index = 0
        if params.n > 1 and params.max_new_tokens != 0:  # 0: the request that only fills the prefix cache
            group = (params.sampling_seed, params.n, tuple(request.origin_input_ids))
            index = self._answers_seen.pop(group, 0)
            if index + 1 < params.n:
                self._answers_seen[group] = index + 1
            # groups that lost an answer before it was scheduled
            if len(self._answers_seen) > _MOST_OPEN_GROUPS:
                self._answers_seen.pop(next(iter(self._answers_seen)))
        return signed_64_bits(params.sampling_seed + index)


def give_seeds_to_requests() -> None:
    """Makes every batch carry its requests' seeds from now on.

    SGLang itself does so only under --enable-deterministic-inference. Not with speculative decoding, which
    would take the seeds as a sign of that mode.
    """
    original = SamplingBatchInfo.adjusted_from_schedule_batch
    if (
        hasattr(original, "_attn_backend_seeds")
        or compat.setting("spec.speculative_algorithm", None) is not None
    ):
        return
    seeds = RequestSeeds(
        SeedSource(compat.setting("device.random_seed", 0), compat.setting("parallel.attn_dp_rank", 0))
    )

    def adjusted_from_schedule_batch(self: SamplingBatchInfo, batch: Any, vocab_size: int) -> None:
        original(self, batch, vocab_size)
        if self.sampling_seed is None:
            values = torch.tensor(
                [seeds(request) for request in batch.reqs],
                dtype=torch.int64,
                pin_memory=is_pin_memory_available(batch.device),
            )
            self.sampling_seed = values.to(batch.device, non_blocking=True)

    adjusted_from_schedule_batch._attn_backend_seeds = seeds  # type: ignore[attr-defined]
    SamplingBatchInfo.adjusted_from_schedule_batch = adjusted_from_schedule_batch
