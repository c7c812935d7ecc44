"""vLLM's V2 sampler with this package's functions."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

import vllm.v1.worker.gpu.sample.sampler as v2_module
import vllm.v1.worker.gpu.sample.states as v2_states
from torch import Tensor
from vllm import SamplingParams
from vllm_sampling import FILTERS, MIXED, ORIGINALS, VOCAB, distinct_logits, vllms_survivors

from attn_backend.adapters.vllm import sampler
from attn_backend.kernels.sampling import sample

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("vllm_as_it_was")


class HostTensor:
    """vLLM's UvaBackedTensor without a GPU: `np` is written, `gpu` is read after copy_to_uva."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()
        self.copy_to_uva()

    def copy_to_uva(self) -> Tensor:
        self.gpu = torch.from_numpy(self.np.copy())
        return self.gpu


class V2Sampler:
    """Builds vLLM's V2 sampler (on a CPU without its logits processors), and gives it batches as the model
    runner does.
    """

    def __init__(
        self,
        device: str,
        monkeypatch: pytest.MonkeyPatch,
        slots: int = 64,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.device = device
        if device == "cuda":
            from vllm.v1.worker.gpu.states import RequestState

            states = RequestState(slots, 64, 64, 0, VOCAB, torch.device(device))
            self.sampler: Any = v2_module.Sampler(
                slots, VOCAB, torch.device(device), states, logprobs_mode=logprobs_mode
            )
        else:
            monkeypatch.setattr(v2_states, "UvaBackedTensor", HostTensor)
            self.sampler = v2_module.Sampler.__new__(v2_module.Sampler)
            self.sampler.logprobs_mode = logprobs_mode
            self.sampler.sampling_states = v2_states.SamplingStates(slots, VOCAB)
            self.sampler.return_sampling_mask = False
            self.sampler.needs_logits_processing = np.ones(slots, dtype=bool)
            self.sampler.logits_processors = [SimpleNamespace(apply=lambda logits, context: logits)]
            self.sampler.thinking_budget_state = SimpleNamespace(apply=lambda logits, context: None)
            for name in ("logit_bias", "penalties", "bad_words"):  # 0.26
                setattr(
                    self.sampler,
                    f"{name}_state",
                    SimpleNamespace(**{f"apply_{name}": lambda *arguments: None}),
                )
            self.sampler.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda slots: 0)

    def add(self, slot: int, params: SamplingParams) -> None:
        if self.device == "cpu":
            self.sampler.sampling_states.add_request(slot, params)
            self.sampler.sampling_states.apply_staged_writes()
            return
        add = self.sampler.add_request
        add(slot, *([1] if "prompt_len" in inspect.signature(add).parameters else []), params)
        self.sampler.apply_staged_writes()

    def sample(
        self, logits: Tensor, slots: list[int], positions: list[int], **options: Any
    ) -> tuple[Tensor, Tensor]:
        np_slots = np.array(slots, dtype=np.int32)
        values = {
            "expanded_idx_mapping": torch.from_numpy(np_slots).to(self.device),
            "idx_mapping": torch.from_numpy(np_slots).to(self.device),
            "idx_mapping_np": np_slots,
            "pos": torch.tensor(positions, device=self.device),
            "input_ids": torch.zeros(len(slots), dtype=torch.int32, device=self.device),
            "expanded_local_pos": torch.zeros(len(slots), dtype=torch.int32, device=self.device),
            "seq_lens_upper_bound_np": np.array(positions) + 1,
        }
        names = list(inspect.signature(ORIGINALS[v2_module.Sampler]["sample"]).parameters)[2:-1]
        sampled: tuple[Tensor, Tensor] = self.sampler.sample(
            logits.to(self.device, copy=True), *(values[name] for name in names), **options
        )
        return sampled[0].cpu(), sampled[1]


# Arguments between `self` and the last one of Sampler.sample and of Sampler.apply_sampling_params, taken from
# the released sources.
RELEASES = {
    "0.26, 0.27": "logits expanded_idx_mapping idx_mapping_np pos input_ids expanded_local_pos",
    "0.28 to 0.30": "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos",
    "0.31 to 0.33": "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
    "seq_lens_upper_bound_np",
}


def function_of(arguments: str) -> Any:
    """An empty function with these arguments."""

    def function(*arguments: Any, **named: Any) -> None: ...

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in arguments.split()
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("release", RELEASES)
def test_v2_arguments_of_the_known_releases(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(v2_module.Sampler, "sample", function_of(f"self {RELEASES[release]} return_logprobs"))
        patch.setattr(
            v2_module.Sampler,
            "apply_sampling_params",
            function_of(f"self {RELEASES[release]} skip_top_k_top_p"),
        )
        sampler.check_arguments()
        patch.setattr(
            v2_module.Sampler,
            "sample",
            function_of(f"self {RELEASES[release]} temperature_first return_logprobs"),
        )
        with pytest.raises(RuntimeError, match="temperature_first"):
            sampler.check_arguments()


@pytest.mark.parametrize("release", RELEASES)
def test_v2_slots_and_positions_in_the_known_releases(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReleasedSampler:
        sample = function_of(f"self {RELEASES[release]} return_logprobs")
        sampling_states, logprobs_mode = "states", "raw_logprobs"

    read: dict[str, Any] = {}
    parameters = SimpleNamespace(_asdict=dict)
    monkeypatch.setattr(sampler, "_v2_penalize", lambda self, logits, batch: logits)
    monkeypatch.setattr(
        sampler,
        "slot_parameters",
        lambda states, slots, slots_np: read.update(slots=slots, slots_np=slots_np) or parameters,
    )
    monkeypatch.setattr(
        sampler, "sample", lambda logits, *, position, out, workspace: read.update(position=position)
    )
    names = RELEASES[release].split()[1:]
    sampler.v2_sample(ReleasedSampler)(ReleasedSampler(), torch.zeros(1, VOCAB), *names)
    assert read == {"slots": "expanded_idx_mapping", "slots_np": "idx_mapping_np", "position": "pos"}


def skip_unless_v2_builds(device: str) -> None:
    if device == "cuda" and "vllm_config" in inspect.signature(v2_module.Sampler.__init__).parameters:
        pytest.skip("this release's sampler wants the engine's whole configuration")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def v2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> V2Sampler:
    skip_unless_v2_builds(request.param)
    assert sampler.install(torch.device(request.param))
    return V2Sampler(request.param, monkeypatch)


def test_v2_request_gets_the_same_token_in_every_batch(v2: V2Sampler, generator: torch.Generator) -> None:
    slots = torch.randperm(64, generator=generator)[: len(MIXED)].tolist()
    for slot, one in zip(slots, MIXED, strict=True):
        v2.add(slot, SamplingParams(**one))  # type: ignore[arg-type]
    for step in range(20):
        logits = 3 * torch.randn(len(MIXED), VOCAB, generator=generator)
        positions = [100 * i + step for i in range(len(MIXED))]
        together, _ = v2.sample(logits, slots, positions)
        assert together.dtype == torch.int64
        order = torch.randperm(len(MIXED), generator=generator).tolist()
        shuffled, _ = v2.sample(logits[order], [slots[i] for i in order], [positions[i] for i in order])
        assert torch.equal(shuffled, together[order])
        for i, slot in enumerate(slots):
            assert v2.sample(logits[i : i + 1], [slot], [positions[i]])[0].item() == together[i]


def test_v2_draws_are_among_the_tokens_that_vllm_leaves(v2: V2Sampler, generator: torch.Generator) -> None:
    logits = distinct_logits(len(FILTERS), generator)
    for slot, params in enumerate(FILTERS):
        v2.add(slot, params)
    left = vllms_survivors(logits, FILTERS)
    slots = list(range(len(FILTERS)))
    drawn = torch.stack(
        [v2.sample(logits, slots, [position] * len(slots))[0] for position in range(40)], dim=1
    )
    assert left.gather(1, drawn).all()
    assert all(len(row.unique()) > 5 for row in drawn[left.sum(1) > 20])


def test_v2_sees_changed_parameters(v2: V2Sampler) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 1.0
    v2.add(0, SamplingParams(temperature=0.0))
    v2.add(1, SamplingParams(temperature=0.0))
    assert v2.sample(logits, [0, 1], [0, 0])[0].tolist() == [7, 7]
    v2.add(1, SamplingParams(temperature=1.0, seed=1))  # another request in the same slot
    drawn = torch.stack([v2.sample(logits, [0, 1], [position] * 2)[0] for position in range(30)], dim=1)
    assert drawn[0].unique().tolist() == [7]
    assert len(drawn[1].unique()) > 15


def test_v2_rows_of_several_positions(v2: V2Sampler) -> None:
    """More rows than requests: the batch is not remembered, and every row has a separate position."""
    v2.add(3, SamplingParams(temperature=1.0, seed=1))
    values = torch.zeros(5, VOCAB)
    single = [v2.sample(values[:1], [3], [position])[0].item() for position in range(5)]
    assert len(set(single)) > 1
    states = v2.sampler.sampling_states
    expanded = torch.full((5,), 3, dtype=torch.int32, device=v2.device)
    parameters = sampler.slot_parameters(states, expanded, np.array([3], dtype=np.int32))
    drawn = sample(values.to(v2.device), position=torch.arange(5, device=v2.device), **parameters._asdict())
    assert drawn.token_ids.tolist() == single


def test_v2_leaves_temperature_and_filters_to_others_as_they_were(v2: V2Sampler) -> None:
    """The rejection sampler expects logits with the temperature already applied."""
    v2.add(0, SamplingParams(temperature=0.5, min_p=0.1, seed=1))
    states = v2.sampler.sampling_states
    v2.sample(torch.zeros(1, VOCAB), [0], [0])
    assert "apply_temperature" not in vars(states)
    assert "apply_min_p" not in vars(states)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_v2_processed_logits_are_vllms(
    mode: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_v2_builds("cuda")
    assert sampler.install(torch.device("cuda"))
    v2 = V2Sampler("cuda", monkeypatch, logprobs_mode=mode)
    params = [SamplingParams(temperature=0.7, top_k=5, seed=i, logprobs=2) for i in range(4)]
    for slot, one in enumerate(params):
        v2.add(slot, one)
    logits = distinct_logits(4, generator)
    plain, _ = v2.sample(logits, [0, 1, 2, 3], [5] * 4)
    tokens, processed = v2.sample(logits, [0, 1, 2, 3], [5] * 4, return_logprobs=True)
    assert torch.equal(tokens, plain)
    if mode == "processed_logprobs":
        assert torch.equal((processed > float("-inf")).cpu(), vllms_survivors(logits, params))
